"""Laws of validation: when it happens, and on what."""

import pytest
from lightning.pytorch.callbacks import Callback

from packhorse.errors import SettingsError
from test_training import datamodule, module, trainer, write_corpus


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    return write_corpus(tmp_path_factory.mktemp("corpus") / "hills.jsonl", 70)


@pytest.fixture(scope="module")
def room(tmp_path_factory):
    return tmp_path_factory.mktemp("room")


class Validated(Callback):
    """Remembers after which steps a run was validated."""

    def __init__(self) -> None:
        self.steps: list[int] = []

    def on_validation_end(self, trainer, pl_module):
        self.steps.append(trainer.global_step)


def validated_steps(room, corpus, folder, start=None, **settings) -> tuple[list[int], int]:
    seen = Validated()
    run = trainer(folder, callbacks=[seen], limit_val_batches=None, **{"max_epochs": 3, **settings})
    run.fit(module(), datamodule=datamodule(room, corpus), ckpt_path=start)
    assert "val/loss" in run.callback_metrics
    return seen.steps, run.global_step


@pytest.mark.parametrize(("accumulation", "every"), [(1, 16), (2, 12), (1, 10_000), (1, {"hours": 1})])
def test_an_interval_of_validation_counts_the_whole_run_and_its_end(room, corpus, tmp_path, accumulation, every):
    limits = {"val_check_interval": every, "accumulate_grad_batches": accumulation}
    steps, end = validated_steps(room, corpus, tmp_path, **limits)
    every = every // accumulation if isinstance(every, int) else end
    assert steps == [*range(every, end, every), end]


def test_a_run_that_goes_on_is_validated_where_it_would_have_been(room, corpus, tmp_path):
    limits = {"val_check_interval": 16}
    run = trainer(tmp_path, max_epochs=3, max_steps=27, **limits)
    run.fit(module(), datamodule=datamodule(room, corpus))
    run.save_checkpoint(tmp_path / "saved.ckpt")
    steps, end = validated_steps(room, corpus, tmp_path, tmp_path / "saved.ckpt", **limits)
    assert steps == [*range(32, end, 16), end]


def test_an_interval_of_micro_batches_within_some_epochs_is_refused(room, corpus, tmp_path):
    with pytest.raises(SettingsError, match=r"check_val_every_n_epoch: 2.*\n.*share"):
        validated_steps(room, corpus, tmp_path, val_check_interval=20, check_val_every_n_epoch=2)
