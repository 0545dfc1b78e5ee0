"""Two processes train as one does, stop together, and fail together. Real processes, gloo, CPU."""

import csv
import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import torch

from conftest import TINY_MODEL, make_texts, tiny_data, write_jsonl

ROOT = Path(__file__).parents[1]
TRACE = '''
import json, os, sys
from lightning import Callback

class Trace(Callback):
    """Which rows each rank trained on in which step."""
    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
        with open(os.environ["TRACE"] + f".{trainer.global_rank}", "a") as file:
            print(json.dumps([trainer.global_step, batch["input_ids"].tolist()]), file=file)
'''


@pytest.fixture(scope="module")
def place(tmp_path_factory) -> Path:
    """A folder with a configuration whose cache is built."""
    folder = tmp_path_factory.mktemp("ddp")
    write_jsonl(folder / "corpus.jsonl", make_texts(300))
    (folder / "trace.py").write_text(TRACE)
    value = {
        "data": tiny_data(folder, engine="hf", packing="pad"),  # ranks with very different numbers of tokens
        "model": {**TINY_MODEL, "schedule": {"shape": "constant", "warmup_steps": 0}},  # for runs of any length
        "trainer": {
            "accelerator": "cpu",
            "max_steps": 12,
            "log_every_n_steps": 1,
            "limit_val_batches": 0,
            "callbacks": [{"class_path": "trace.Trace"}],
            "logger": {
                "class_path": "lightning.pytorch.loggers.CSVLogger",
                "init_args": {"save_dir": str(folder), "name": "logs", "flush_logs_every_n_steps": 1},
            },
        },
    }
    (folder / "config.yaml").write_text(json.dumps(value))
    return folder


def start(place: Path, name: str, *arguments: str, launcher: tuple[str, ...] = (), **environment: str):
    """Run `fit` in `place`, with logs, checkpoints and traces under `name`."""
    command = [sys.executable, *launcher, str(ROOT / "main.py"), "fit", "--config", str(place / "config.yaml")]
    command += [f"--trainer.logger.init_args.name={name}", *arguments]
    return subprocess.Popen(
        command,
        cwd=place,
        env={**os.environ, "PYTHONPATH": f"{place}:{ROOT / 'src'}", "TRACE": str(place / name), **environment},
        stdout=subprocess.DEVNULL,
        stderr=(place / f"{name}.err").open("w"),
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
        start_new_session=True,  # so that nothing survives a test
    )


def finish(run: subprocess.Popen, timeout: float = 150) -> int:
    try:
        return run.wait(timeout)
    except subprocess.TimeoutExpired:
        os.killpg(run.pid, signal.SIGKILL)
        raise


def losses(place: Path, name: str, version: int = 0) -> list[float]:
    with (place / name / f"version_{version}" / "metrics.csv").open() as file:
        return [float(row["train/loss"]) for row in csv.DictReader(file) if row["train/loss"]]


def rows(place: Path, name: str, ranks: int) -> dict[int, list[list[int]]]:
    """Step -> its rows, in the global order of its micro-batches."""
    found: dict[int, list[list[int]]] = {}
    traces = [(place / f"{name}.{rank}").read_text().splitlines() for rank in range(ranks)]
    for lines in zip(*traces, strict=False):
        for line in lines:
            step, batch = json.loads(line)
            found.setdefault(step, []).extend(batch)
    return found


def stopped_in(place: Path, name: str) -> int:
    return torch.load(place / name / "version_0/checkpoints/last.ckpt", weights_only=True)["global_step"]


def test_two_processes_train_as_one_and_stop_together_when_one_is_told_to(place):
    assert finish(start(place, "one", "--data.micro_batch_size=4")) == 0
    two = start(place, "two", "--trainer.devices=2", "--trainer.max_steps=1000000", "--trainer.max_epochs=-1")
    deadline = time.monotonic() + 120
    while not (place / "two.0").exists() or (place / "two.0").read_text().count("\n") < 20:
        assert time.monotonic() < deadline
        assert two.poll() is None, (place / "two.err").read_text()
        time.sleep(0.2)
    two.send_signal(signal.SIGTERM)
    assert finish(two, 60) == 143
    step = stopped_in(place, "two")
    traced = [len((place / f"two.{rank}").read_text().splitlines()) for rank in (0, 1)]
    assert traced == [step, step], "both ranks end after the step that is saved"
    assert f"Stopped in step {step:,}" in (place / "two.err").read_text()
    one, both = rows(place, "one", 1), rows(place, "two", 2)
    assert len(one) == 12
    assert all(both[step] == one[step] for step in one), "the same order"
    np.testing.assert_allclose(losses(place, "two")[:12], losses(place, "one"), rtol=2e-5)


@pytest.mark.slow
def test_torchrun_trains_as_one_process_does(place):
    torchrun = ("-m", "torch.distributed.run", "--nproc_per_node=2", "--standalone")
    assert finish(start(place, "alone", "--data.micro_batch_size=4")) == 0
    assert finish(start(place, "elastic", launcher=torchrun)) == 0
    np.testing.assert_allclose(losses(place, "elastic"), losses(place, "alone"), rtol=2e-5)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["SIGTERM", "SIGINT", "SIGUSR1"])
@pytest.mark.parametrize("attempt", range(4))
def test_ranks_stop_together_whenever_a_signal_comes(place, name, attempt):
    run_name = f"{name}{attempt}"
    run = start(place, run_name, "--trainer.devices=2", "--trainer.max_steps=1000000", "--trainer.max_epochs=-1")
    deadline = time.monotonic() + 120
    while not (place / f"{run_name}.1").exists() and time.monotonic() < deadline:
        time.sleep(0.05)
    time.sleep(0.37 * attempt)
    if attempt % 2:
        os.killpg(run.pid, getattr(signal, name))  # as a terminal and Slurm do: all processes
    else:
        run.send_signal(getattr(signal, name))
    assert finish(run, 60) == 128 + getattr(signal, name)
    step = stopped_in(place, run_name)
    assert [len((place / f"{run_name}.{rank}").read_text().splitlines()) for rank in (0, 1)] == [step, step]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--data.text_column=body", "--data.name=other"], "SourceError: .*has no column 'body'"),
        (["--data.micro_batch_size=100000"], "SettingsError: .*fewer than one global batch"),
    ],
    ids=["build", "setup"],
)
def test_a_failure_ends_every_rank_soon_with_one_clear_error(place, arguments, message):
    started = time.monotonic()
    run = start(place, "failing", "--trainer.devices=2", *arguments)
    assert finish(run, 100) == 2
    said = (place / "failing.err").read_text()
    assert len(re.findall(message, said)) == 1
    assert "Traceback" not in said
    assert time.monotonic() - started < 90


@pytest.mark.slow
def test_a_port_in_use_is_explained(place):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = str(taken.getsockname()[1])
        assert finish(start(place, "port", "--trainer.devices=2", MASTER_PORT=port)) == 2
    said = (place / "port.err").read_text()
    assert f"PortInUseError: The port {port}" in said
    assert "MASTER_PORT" in said
    assert "Traceback" not in said


@pytest.mark.slow
def test_two_runs_that_start_together_have_folders_of_their_own(place):
    runs = [start(place, "together", "--trainer.max_steps=2") for _ in range(2)]
    assert [finish(run) for run in runs] == [0, 0]
    assert sorted(path.name for path in (place / "together").iterdir()) == ["version_0", "version_1"]
    for version in (0, 1):
        assert (place / f"together/version_{version}/checkpoints/last.ckpt").exists()
        assert len(losses(place, "together", version)) == 2


SHARDED = {
    "class_path": "lightning.pytorch.strategies.ModelParallelStrategy",
    "init_args": {
        "data_parallel_size": 2,
        "tensor_parallel_size": 1,
        "save_distributed_checkpoint": False,
        "process_group_backend": "gloo",
    },
}


@pytest.mark.slow
@pytest.mark.parametrize("sequences", [1, 5])
def test_ranks_validate_as_one_process_does_however_few_sequences_there_are(place, sequences):
    limits = ["--trainer.limit_val_batches=1.0", "--trainer.max_steps=2", f"--data.eval_sequences={sequences}"]
    ways = {
        "single": ["--data.micro_batch_size=4"],
        "double": ["--trainer.devices=2"],
        "shared": ["--trainer.devices=2", f"--trainer.strategy={json.dumps(SHARDED)}"],
    }
    found = {}
    for name, way in ways.items():
        assert finish(start(place, f"{name}{sequences}", *limits, *way)) == 0
        with (place / f"{name}{sequences}/version_0/metrics.csv").open() as file:
            (found[name],) = [float(row["val/loss"]) for row in csv.DictReader(file) if row["val/loss"]]
    np.testing.assert_allclose([found["double"], found["shared"]], found["single"], rtol=2e-5)


@pytest.mark.slow
def test_a_sharded_model_trains_as_a_whole_one_and_goes_on_with_another_number_of_devices(place):
    """FSDP2 on two processes; its checkpoint is that of the whole model."""
    sharded = ["--trainer.devices=2", f"--trainer.strategy={json.dumps(SHARDED)}"]
    assert finish(start(place, "plain", "--data.micro_batch_size=4", "--trainer.max_steps=18")) == 0
    assert finish(start(place, "sharded", *sharded)) == 0
    np.testing.assert_allclose(losses(place, "sharded"), losses(place, "plain")[:12], rtol=2e-5)
    more = ["--trainer.max_steps=18", "--ckpt_path=last"]
    assert finish(start(place, "sharded", *sharded, *more)) == 0
    first = str(place / "sharded/version_0")
    assert finish(start(place, "whole", "--data.micro_batch_size=4", more[0], f"--ckpt_path={first}")) == 0
    for name, version in (("sharded", 1), ("whole", 0)):
        np.testing.assert_allclose(losses(place, name, version), losses(place, "plain")[12:], rtol=2e-5)
