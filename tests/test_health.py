"""What a run says about itself, in its logs, is true, and `health` reads it without torch."""

import json
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from lightning.pytorch.loggers import CSVLogger, TensorBoardLogger
from torch.utils.tensorboard import SummaryWriter

from packhorse.cli import main
from packhorse.training.checkpoint_io import CrashSafeCheckpointIO
from packhorse.training.run_logs import read_run
from packhorse.training.speed import Speed, duration


def write_run(folder: Path, logger: str, losses: list[float], total: int = 1_000, **last: float) -> Path:
    """Logs of a run that writes a loss every tenth step."""
    made = (TensorBoardLogger if logger == "tensorboard" else CSVLogger)(folder, name="run", version=3)
    rates = {"tokens_per_second": 2_048.0, "steps_per_second": 4.0, "run/steps": float(total), "run/epoch": 0.5}
    for number, loss in enumerate(losses):
        made.log_metrics({"train/loss": loss, **rates}, step=10 * number + 9)
    made.log_metrics({"val/loss": 2.5, **last}, step=10 * len(losses) - 1)
    made.experiment.flush() if logger == "tensorboard" else made.save()
    run = folder / "run/version_3"
    (run / "config.yaml").write_text("checkpoint:\n  every_n_train_steps: 250\n  dirpath: null\n")
    CrashSafeCheckpointIO().save_checkpoint({"global_step": 1}, run / "checkpoints/step=00000100.ckpt")
    return run


def age(run: Path, seconds: float) -> None:
    for path in run.iterdir():
        os.utime(path, (time.time() - seconds, time.time() - seconds))


def look(folder: Path, capsys, *options: str) -> tuple[int, dict]:
    status = main(["health", str(folder), "--json", *options])
    return status, json.loads(capsys.readouterr().out)


@pytest.mark.parametrize("logger", ["tensorboard", "csv"])
def test_health_tells_a_running_run(tmp_path, capsys, logger):
    run = write_run(tmp_path, logger, [5 - 0.1 * n for n in range(20)])
    status, facts = look(tmp_path, capsys)
    assert status == 0
    assert facts["run"] == str(run)
    assert (facts["state"], facts["step"], facts["steps"]) == ("running", 200, 1_000)
    assert facts["loss"] == pytest.approx(3.1)
    assert facts["trend"] == "falling"
    assert (facts["validation_loss"], facts["tokens_per_second"]) == (2.5, 2_048)
    assert facts["seconds_left"] == 200  # 800 steps at 4 a second
    assert facts["seconds_to_checkpoint"] == 12  # step 250
    assert facts["checkpoint"]["sound"]
    assert main(["health", str(run)]) == 0
    assert "step        200 of 1,000" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("losses", "trend"), [([3.0] * 20, "flat"), ([2 + 0.1 * n for n in range(20)], "rising"), ([1.0], None)]
)
def test_health_tells_the_trend(tmp_path, capsys, losses, trend):
    write_run(tmp_path, "csv", losses)
    assert look(tmp_path, capsys)[1]["trend"] == trend


@pytest.mark.parametrize("logger", ["tensorboard", "csv"])
def test_a_run_without_news_is_silent_unless_it_said_how_it_ended(tmp_path, capsys, logger):
    for name, last, expected in (("a", {}, ("silent", 1)), ("b", {"run/ended": 1.0}, ("finished", 0))):
        age(write_run(tmp_path / name, logger, [3.0, 2.0], **last), 10_000)
        status, facts = look(tmp_path / name, capsys)
        assert (facts["state"], status) == expected
    write_run(tmp_path / "c", logger, [3.0, 2.0], **{"run/ended": 0.0})
    status, facts = look(tmp_path / "c", capsys)
    assert (facts["state"], status) == ("stopped", 1)


def test_health_is_not_well_with_a_loss_that_is_no_number_or_a_damaged_checkpoint(tmp_path, capsys):
    write_run(tmp_path / "a", "csv", [3.0, float("nan")])
    assert look(tmp_path / "a", capsys)[0] == 1
    run = write_run(tmp_path / "b", "csv", [3.0, 2.0])
    (run / "checkpoints/step=00000100.ckpt").write_bytes(b"PK")
    status, facts = look(tmp_path / "b", capsys)
    assert status == 1
    assert not facts["checkpoint"]["sound"]


def test_health_of_nothing_is_refused_in_words(tmp_path, capsys):
    assert main(["health", str(tmp_path)]) == 2
    assert "There are no logs" in capsys.readouterr().err


@pytest.mark.parametrize("logger", ["tensorboard", "csv"])
def test_health_is_of_the_last_training_whatever_other_commands_logged_since(tmp_path, capsys, logger):
    run = write_run(tmp_path, logger, [3.0, 2.0])
    later = (TensorBoardLogger if logger == "tensorboard" else CSVLogger)(tmp_path, name="run", version=4)
    later.log_metrics({"val/loss": 2.0}, step=20)
    later.experiment.flush() if logger == "tensorboard" else later.save()
    age(run, 60)
    assert look(tmp_path, capsys)[1]["run"] == str(run)
    assert main(["health", str(tmp_path / "run/version_4")]) == 2
    assert "There are no logs of a training in" in capsys.readouterr().err
    # A run that Python made has no configuration, and perhaps no checkpoint yet.
    (run / "config.yaml").unlink()
    shutil.rmtree(run / "checkpoints")
    assert look(tmp_path, capsys)[1]["run"] == str(run)


def test_logs_that_are_cut_short_are_read_as_far_as_they_go(tmp_path):
    for logger in ("tensorboard", "csv"):
        run = write_run(tmp_path / logger, logger, [3.0, 2.0, 1.0])
        (path,) = [*run.glob("events*"), *run.glob("metrics.csv")]
        path.write_bytes(path.read_bytes()[:-20])
        assert read_run(run).scalars["train/loss"][0].value == 3.0


def test_health_needs_no_torch(tmp_path):
    write_run(tmp_path, "tensorboard", [3.0, 2.0])
    code = (
        "import sys; from packhorse.cli import main; "
        f"status = main(['health', {str(tmp_path)!r}]); "
        "print([name for name in ('torch', 'lightning', 'transformers', 'tensorflow') if name in sys.modules])"
    )
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert out.splitlines()[-1] == "[]"


def test_histograms_beside_the_scalars_do_no_harm(tmp_path):
    writer = SummaryWriter(tmp_path)
    writer.add_histogram("gates", torch.rand(10), 1)
    writer.add_scalar("train/loss", 2.0, 1)
    writer.close()
    assert list(read_run(tmp_path).scalars) == ["train/loss"]


def test_speed_is_of_the_last_steps_and_leaves_validation_out():
    speed = Speed(steps=10)
    for step in range(20):
        speed.mark(step, now=step * 100.0)  # slow at first
    for step in range(20, 31):
        speed.mark(step, now=1_900 + (step - 19) * 0.5)
    assert speed.steps_per_second == pytest.approx(2)
    assert speed.seconds_left(50) == pytest.approx(10)
    speed.pause(1_000)
    speed.mark(31, now=1_900 + 12 * 0.5 + 1_000)
    assert speed.steps_per_second == pytest.approx(2)
    assert [duration(seconds) for seconds in (5, 600, 7_200)] == ["5 s", "10 min", "2.0 h"]
