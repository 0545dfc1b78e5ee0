"""Laws of validation: when it happens, and on what."""

import numpy as np
import pytest
import torch
from lightning.pytorch.callbacks import Callback

from packhorse.cache import open_cache, update_cache
from packhorse.errors import SettingsError
from packhorse.training.monitors import RunReport
from packhorse.training.sampler import FILLER, Rows, share_out
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


class BuildsLater:
    """Builds the rest of a cache, in this process, when it was asked often enough."""

    def __init__(self, settings):
        self.settings, self.asked = settings[0], 0

    @property
    def status(self):
        self.asked += 1
        if self.asked == 2:
            update_cache(self.settings, quiet=True)
        return None if self.asked < 4 else 0

    def stop(self):
        pass


def run_and_say(data, folder, capfd, *, start=None, **settings) -> tuple[list[int], str]:
    seen, values = Validated(), {"max_epochs": 1, "limit_val_batches": None, **settings}
    run = trainer(folder, callbacks=[seen, RunReport()], **values)
    run.fit(module(), datamodule=data, ckpt_path=start)
    run.save_checkpoint(folder / "saved.ckpt")
    return seen.steps, capfd.readouterr().err


@pytest.mark.parametrize(
    ("data", "limits", "reason"),
    [
        ({"eval_share": 0}, {}, "the cache has no evaluation sequences (raise `data.eval_share`, or add text)"),
        ({"max_documents": 10}, {}, "the cache has no evaluation sequences (raise `data.eval_share`, or add text)"),
        ({"eval_sequences": 0}, {}, "`data.eval_sequences` is 0"),
        ({}, {"limit_val_batches": 0}, "`trainer.limit_val_batches` is 0"),
    ],
)
def test_a_run_that_will_not_be_validated_says_so_first(corpus, tmp_path, capfd, data, limits, reason):
    steps, said = run_and_say(datamodule(tmp_path, corpus, **data), tmp_path, capfd, **limits)
    assert steps == []
    assert f"validation  none: {reason}; best.ckpt will not be written" in said.partition("Report")[0]


@pytest.mark.parametrize("on_growth", ["adopt", "pin"])
def test_a_run_that_began_without_evaluation_text_is_validated_when_the_data_have_some(
    corpus, tmp_path, capfd, on_growth
):
    few = datamodule(tmp_path, corpus, max_documents=10)
    assert run_and_say(few, tmp_path, capfd)[0] == []
    more = datamodule(tmp_path, corpus, on_growth=on_growth)
    saved = str(tmp_path / "saved.ckpt")
    steps, said = run_and_say(more, tmp_path, capfd, start=saved, max_epochs=2)
    known = torch.load(saved, weights_only=True)["TokenDataModule"]["caches"][0]["eval_sequences"]
    assert bool(steps) == bool(known) == (on_growth == "adopt")
    assert ("validation  none" in said) == (on_growth == "pin")
    assert known in (0, open_cache(more.settings.cache).num_sequences("eval"))


def test_a_checkpoint_of_a_run_without_evaluation_text_is_validated_on_what_there_is_now(corpus, tmp_path, capfd):
    run_and_say(datamodule(tmp_path, corpus, max_documents=10), tmp_path, capfd)
    data = datamodule(tmp_path, corpus)
    validation = trainer(tmp_path, limit_val_batches=None)
    validation.validate(module(), data, ckpt_path=str(tmp_path / "saved.ckpt"), verbose=False)
    assert data.validation_sequences() == {"hills": data.cache.num_sequences("eval")}
    assert "val/loss" in validation.callback_metrics


def test_a_run_beside_a_builder_is_validated_from_the_first_chunk_with_evaluation_text_on(
    corpus, tmp_path, capfd, monkeypatch
):
    monkeypatch.setattr("packhorse.training.datamodule.BackgroundBuilder", BuildsLater)
    monkeypatch.setattr("packhorse.training.datamodule.EVERY_STEPS", 1)
    data = datamodule(tmp_path, corpus, start_after_chunks=1, sequences_per_chunk=10, packing="concat")
    steps, said = run_and_say(data, tmp_path, capfd, val_check_interval=1)
    assert "validation  none yet: the first chunks have no evaluation sequences" in said
    assert "evaluation sequences from now on" in said
    (first, *_), end = steps, data.plan.steps
    assert first > 1
    assert steps == list(range(first, end + 1))
    assert data.run.state.caches[0].eval_sequences == data.cache.num_sequences("eval")


@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
@pytest.mark.parametrize("count", [1, 4, 5, 7])
def test_ranks_evaluate_as_many_micro_batches_each_and_every_sequence_once(room, corpus, count, world_size):
    data = datamodule(room, corpus)
    data.prepare_data()
    data.setup("validate")
    (cache,) = data.caches.values()
    numbers = np.stack([np.zeros(count, np.int64), np.arange(count)], axis=1)
    shares = [share_out(numbers, rank, world_size, micro_batch=2) for rank in range(world_size)]
    assert len({tuple(map(len, share)) for share in shares}) == 1, "ranks would wait for each other"
    rows = Rows({0: cache}, "eval")
    labels = [row for share in shares for batch in share for row in rows[batch]["labels"]]
    counted = [row.tolist() for row in labels if (row >= 0).any()]
    assert sorted(counted) == sorted(rows[np.arange(count)]["labels"].tolist())
    assert len(labels) - len(counted) == -count % world_size


def test_rows_that_only_keep_ranks_in_step_change_no_loss(room, corpus, tmp_path):
    data, model, run = datamodule(room, corpus), module(), trainer(tmp_path, limit_val_batches=None)
    run.validate(model, datamodule=data, verbose=False)
    numbers, rows = np.array([[0, 2], [0, FILLER], [0, 0], [0, FILLER]]), data.rows("eval")
    with torch.no_grad():
        mixed, alone = (model(model.on_before_batch_transfer(rows[each], 0)) for each in (numbers, numbers[::2]))
    assert mixed[1] == alone[1] > 0
    torch.testing.assert_close(mixed[0], alone[0], rtol=1e-6, atol=0)


@pytest.mark.parametrize("function", ["validate", "test"])
def test_where_there_is_no_evaluation_text_nothing_is_measured_in_silence(corpus, tmp_path, function):
    run, data = trainer(tmp_path, limit_val_batches=None), datamodule(tmp_path, corpus, eval_share=0)
    with pytest.raises(SettingsError, match=r"(?s)no evaluation text.*eval_share"):
        getattr(run, function)(module(), datamodule=data, verbose=False)


@pytest.mark.parametrize("function", ["test", "predict"])
def test_what_needs_a_whole_model_is_refused_where_it_would_be_sharded(room, corpus, tmp_path, function):
    model = module()
    model._device_mesh = object()  # as ModelParallelStrategy does
    with pytest.raises(SettingsError, match=f"(?s)`{function}` needs the whole model.*Leave the strategy"):
        getattr(trainer(tmp_path), function)(model, datamodule=datamodule(room, corpus))
