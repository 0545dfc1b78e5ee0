"""Laws of where a run goes on from: the checkpoint that is found, the one that is refused, and what is told of it."""

import os
from pathlib import Path

import pytest
import torch
from lightning import Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.demos.boring_classes import BoringModel
from lightning.pytorch.loggers import CSVLogger

from packhorse.errors import CheckpointCorruptError, CheckpointError, SettingsError
from packhorse.training import BestCheckpoint, RecoveryCheckpoint
from packhorse.training.locate import find_checkpoint
from packhorse.training.monitors import RunReport
from packhorse.training.run_folder import runs_folder
from test_training import datamodule, module, trainer, write_corpus


@pytest.fixture(scope="module")
def room(tmp_path_factory) -> Path:
    """A corpus, a tokenizer and a cache."""
    folder = tmp_path_factory.mktemp("room")
    datamodule(folder, write_corpus(folder / "hills.jsonl", 100)).prepare_data()
    return folder


def recovery(**settings) -> RecoveryCheckpoint:
    return RecoveryCheckpoint(filename="{step}", save_last="link", **settings)


def run(room: Path, runs: Path, *callbacks, start: str | None = None) -> Trainer:
    """Three steps more, with a validation after each."""
    settings = {"val_check_interval": 1, "limit_val_batches": 1, "enable_checkpointing": True}
    training = trainer(runs, max_steps=3, logger=CSVLogger(runs), callbacks=list(callbacks), **settings)
    training.fit(module(), datamodule=datamodule(room, room / "hills.jsonl"), ckpt_path=start)
    return training


def test_a_run_goes_on_from_its_recovery_checkpoint_wherever_others_are_kept(room, tmp_path, capfd):
    extra = ModelCheckpoint(tmp_path / "extra", monitor="val/loss")
    training = run(room, tmp_path / "runs", extra, BestCheckpoint(tmp_path / "best"), RunReport(), recovery())
    assert any((tmp_path / "extra").iterdir())
    assert any((tmp_path / "best").iterdir())
    last = Path(training.log_dir) / "checkpoints/last.ckpt"
    assert f"--ckpt_path {last}" in capfd.readouterr().err
    for name in ("auto", "last"):
        assert find_checkpoint(name, runs_folder(training)) == str(last.resolve())


def test_a_run_never_goes_on_from_weights_alone_and_says_so(room, tmp_path, capfd):
    training = run(room, tmp_path, BestCheckpoint(save_weights_only=True), recovery())
    runs, best = runs_folder(training), Path(training.log_dir) / "checkpoints/best.ckpt"
    os.utime(best)  # the newest
    for name in ("auto", "last", training.log_dir):
        assert find_checkpoint(name, runs) == str(best.with_name("step=3.ckpt"))
        assert f"Skipped: {best} holds the weights of a model" in capfd.readouterr().err
        assert find_checkpoint(name, runs, goes_on=False) == str(best), "weights are enough to validate"
    with pytest.raises(CheckpointError, match="not the state of a run"):
        find_checkpoint(str(best), runs)
    with pytest.raises(CheckpointError, match=r"best.ckpt holds .* not the state of a run"):
        run(room, tmp_path, start=str(best))
    best.with_name("step=3.ckpt").unlink()
    assert find_checkpoint("auto", runs) is None, "a run that is started again before its first save"
    with pytest.raises(SettingsError, match="do not hold the state of a run"):
        find_checkpoint("last", runs)
    best.with_name("last.ckpt").unlink()
    best.with_name("step=6.ckpt").write_bytes(best.read_bytes()[:-3000])
    with pytest.raises(CheckpointCorruptError):
        find_checkpoint("auto", runs)


def test_a_checkpoint_of_another_program_is_refused_in_words(room, tmp_path):
    training = trainer(tmp_path, max_steps=1, logger=False)
    training.fit(BoringModel())
    training.save_checkpoint(tmp_path / "other.ckpt")
    torch.save({"weight": torch.zeros(2)}, tmp_path / "weights.ckpt")
    for name in ("other.ckpt", "weights.ckpt"):
        for goes_on in (True, False):
            with pytest.raises(CheckpointError, match=f"{name} is a checkpoint, but not of a Packhorse run"):
                find_checkpoint(str(tmp_path / name), tmp_path, goes_on=goes_on)
    with pytest.raises(CheckpointError, match=r"other.ckpt is a checkpoint, but not of a Packhorse run"):
        run(room, tmp_path, start=str(tmp_path / "other.ckpt"))


@pytest.mark.parametrize("name", ["auto", "last"])
def test_a_run_whose_checkpoints_are_at_an_address_never_begins_anew_without_a_word(tmp_path, name):
    runs = runs_folder(trainer(tmp_path, callbacks=[recovery(dirpath="memory://runs")], enable_checkpointing=True))
    with pytest.raises(SettingsError, match="kept at an address"):
        find_checkpoint(name, runs)
    assert find_checkpoint("memory://runs/last.ckpt", runs) == "memory://runs/last.ckpt"


def test_a_run_without_a_recovery_checkpoint_tells_of_the_one_it_has(room, tmp_path, capfd):
    run(room, tmp_path / "runs", ModelCheckpoint(tmp_path / "own", save_last=True), RunReport())
    assert f"--ckpt_path {tmp_path / 'own/last.ckpt'}" in capfd.readouterr().err
