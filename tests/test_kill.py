"""A training that is killed at any instant goes on from a good checkpoint, and ends as if nothing had happened."""

import contextlib
import json
import os
import random
import re
import signal
import sys
import time
from pathlib import Path

import pytest
import torch
from lightning import Callback

from conftest import TINY_MODEL, make_texts, tiny_data, write_jsonl
from packhorse.cli import main
from packhorse.training.checkpoint_file import sound_checkpoints

EVERY = 5


class StepTrace(Callback):
    """Writes down every step that begins."""

    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
        with open(os.environ["STEP_TRACE"], "a") as file:
            file.write(f"{trainer.global_step}\n")


@pytest.fixture
def config(tmp_path) -> Path:
    write_jsonl(tmp_path / "corpus.jsonl", make_texts(300))
    value = {
        "data": tiny_data(tmp_path, engine="hf"),
        "model": {**TINY_MODEL, "schedule": {"shape": "constant", "warmup_steps": 0}},  # for runs of any length
        "trainer": {
            "accelerator": "cpu",
            "default_root_dir": str(tmp_path / "run"),
            "max_epochs": -1,
            "limit_val_batches": 0,
            "logger": False,
            "enable_model_summary": False,
            "callbacks": [{"class_path": "test_kill.StepTrace"}],
        },
        "checkpoint": {"every_n_train_steps": EVERY},
    }
    (tmp_path / "config.yaml").write_text(json.dumps(value))
    return tmp_path / "config.yaml"


def fork_fit(config: Path, folder: Path, steps: int) -> int:
    """Start `fit` in a child of this process, which has everything imported; its process id."""
    folder.mkdir(exist_ok=True)
    child = os.fork()
    if child:
        return child
    try:
        os.environ["STEP_TRACE"] = str(folder / "trace")
        sys.stdout = sys.stderr = (folder / "log").open("a", buffering=1)
        arguments = [f"--checkpoint.dirpath={folder / 'checkpoints'}", f"--trainer.max_steps={steps}"]
        os._exit(main(["fit", "--config", str(config), *arguments, "--ckpt_path=auto"]))
    finally:
        os._exit(99)


def begun(folder: Path) -> list[int]:
    with contextlib.suppress(FileNotFoundError):
        return [int(line) for line in (folder / "trace").read_text().split("\n")[:-1]]
    return []


def newest(folder: Path) -> int:
    for path in sound_checkpoints(folder / "checkpoints"):
        return int(re.search(r"step=(\d+)", path.stem)[1])
    return 0


def kill_once(config: Path, folder: Path, draw: random.Random) -> int:
    """Let a run go on and kill it after a random time; how many steps that has cost."""
    before, resumed = len(begun(folder)), newest(folder)
    child = fork_fit(config, folder, 10**6)
    deadline = time.monotonic() + 100
    while len(begun(folder)) == before and time.monotonic() < deadline:
        time.sleep(0.005)
    time.sleep(draw.random() ** 2 * 0.5)
    os.kill(child, signal.SIGKILL)
    _, status = os.waitpid(child, 0)
    assert os.WIFSIGNALED(status), (folder / "log").read_text()[-3000:]
    steps = begun(folder)
    assert steps[before] == resumed, "it went on from the newest good checkpoint"
    return steps[-1] - newest(folder)


def killed_and_undisturbed(config: Path, folder: Path, kills: int, seed: int) -> None:
    assert main(["cache", "build", "--config", str(config)]) == 0
    draw = random.Random(seed)
    lost = [kill_once(config, folder / "killed", draw) for _ in range(kills)]
    assert max(lost) <= EVERY
    total = newest(folder / "killed") + 7
    ends = []
    for name in ("killed", "undisturbed"):
        _, status = os.waitpid(fork_fit(config, folder / name, total), 0)
        assert status == 0, (folder / name / "log").read_text()[-3000:]
        ends.append(torch.load(folder / name / "checkpoints/last.ckpt", weights_only=True))
        assert len(list((folder / name / "checkpoints").iterdir())) == 2, "nothing is left behind"
    killed, undisturbed = ends
    assert killed["global_step"] == undisturbed["global_step"] == total
    for name, tensor in undisturbed["state_dict"].items():
        assert torch.equal(killed["state_dict"][name], tensor), name


def test_a_training_that_is_killed_three_times_ends_as_if_nothing_had_happened(config, tmp_path):
    killed_and_undisturbed(config, tmp_path, kills=3, seed=1)


@pytest.mark.slow
@pytest.mark.timeout(3_600)
def test_a_training_that_is_killed_a_hundred_times_ends_as_if_nothing_had_happened(config, tmp_path):
    killed_and_undisturbed(config, tmp_path, kills=100, seed=2)
