"""Laws of limits: a run trains on what its Trainer was told, or says in words why it cannot."""

import pytest
from lightning.pytorch.callbacks import Callback, GradientAccumulationScheduler

from packhorse.errors import SettingsError
from packhorse.training import ScheduleSettings
from packhorse.training.monitors import RunReport
from packhorse.training.schedule import Schedule
from test_training import datamodule, module, trainer, write_corpus


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    return write_corpus(tmp_path_factory.mktemp("corpus") / "hills.jsonl", 30)


@pytest.fixture(scope="module")
def room(tmp_path_factory):
    return tmp_path_factory.mktemp("room")


class Rates(Callback):
    """Keeps the learning rate of every step, and stops the run."""

    def __init__(self, stop_after: int) -> None:
        self.rates, self.stop_after = [], stop_after

    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
        self.rates.append(trainer.optimizers[0].param_groups[0]["lr"])
        trainer.should_stop = len(self.rates) == self.stop_after


ENDLESS = {"max_epochs": -1, "max_steps": -1}


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"limit_train_batches": 5, "accumulate_grad_batches": 4}, r"5` micro-batches.*\n.*8"),
        ({"limit_train_batches": 0.5}, "not as the share 0.5"),
        ({"overfit_batches": 2}, r"overfit_batches.*\n.*max_documents"),
        ({"callbacks": [GradientAccumulationScheduler({0: 2})]}, r"(?s)Scheduler.*accumulate_grad_batches"),
        (ENDLESS, r"(?s)how long.*max_steps.*max_epochs.*max_train_tokens.*constant"),
        ({**ENDLESS, "max_time": "00:00:00:05"}, "max_time"),
    ],
)
def test_what_a_run_cannot_keep_to_is_refused_before_anything_is_built(corpus, tmp_path, settings, words):
    data = datamodule(tmp_path, corpus)
    with pytest.raises(SettingsError, match=words):
        trainer(tmp_path, **settings).fit(module(), datamodule=data)
    assert not (tmp_path / "cache").exists()


def test_an_endless_run_keeps_its_learning_rate_and_says_that_nothing_ends_it(room, corpus, tmp_path, capfd):
    model = module(schedule=ScheduleSettings(shape="constant", warmup_steps=3))
    seen = Rates(stop_after=12)
    trainer(tmp_path, callbacks=[RunReport(), seen], **ENDLESS).fit(model, datamodule=datamodule(room, corpus))
    assert seen.rates[2:] == [1e-2] * 10
    said = capfd.readouterr().err
    assert "no end, each of 4 sequences" in said
    assert "  0 " not in said.partition("Report")[0]


def test_a_run_without_an_end_begins_its_decay_when_it_gets_one():
    schedule = Schedule(totals=((0, 0),), warmup_steps=10)
    assert [schedule.factor(step) for step in (9, 10, 1_000)] == [1, 1, 1]
    ended = schedule.grow(1_000, 2_000)
    assert ended.factor(1_000) == 1
    assert ended.factor(1_500) == pytest.approx(0.55)
    assert ended.factor(2_000) == pytest.approx(0.1)


def test_a_step_that_is_cut_short_has_the_gradient_of_the_mean_over_its_tokens(room, corpus, tmp_path):
    norms = [gradient_norm(room, corpus, tmp_path, accumulation) for accumulation in (1, 4)]
    assert norms[0] == pytest.approx(norms[1], rel=1e-5)


def gradient_norm(room, corpus, folder, accumulation: int) -> float:
    """Of the only step of a run of one micro-batch."""
    run, norms = trainer(folder, fast_dev_run=True, accumulate_grad_batches=accumulation), []
    model = module()
    own = model.on_before_optimizer_step

    def look(optimizer):
        own(optimizer)
        norms.append(sum(float(p.grad.norm() ** 2) for p in model.parameters() if p.grad is not None))

    model.on_before_optimizer_step = look
    run.fit(model, datamodule=datamodule(room, corpus))
    (norm,) = norms
    return norm
