"""Laws of where a run goes on from: the checkpoint that is found, the one that is refused, and what is told of it."""

from pathlib import Path

import pytest
from lightning import Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger

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


def test_a_run_without_a_recovery_checkpoint_tells_of_the_one_it_has(room, tmp_path, capfd):
    run(room, tmp_path / "runs", ModelCheckpoint(tmp_path / "own", save_last=True), RunReport())
    assert f"--ckpt_path {tmp_path / 'own/last.ckpt'}" in capfd.readouterr().err
