"""Laws of going on: at any step, saved by any hook, stopped in any way, with grown data or other devices."""

import contextlib
from itertools import pairwise

import pytest
import torch

from packhorse.errors import SettingsError, SnapshotMismatch
from packhorse.training import ScheduleSettings
from resuming import (
    ACCUMULATION,
    EPOCHS,
    HOOKS,
    MICRO_BATCH,
    STOPS,
    Home,
    SaveAndStop,
    Watch,
    assert_once_per_epoch,
    chain,
    forked,
    make_caches,
    order_of,
    rates,
    read_trace,
    run,
)

BATCH = MICRO_BATCH * ACCUMULATION


@pytest.fixture(scope="module")
def caches(tmp_path_factory):
    return make_caches(tmp_path_factory.mktemp("caches"))


@pytest.fixture(scope="module")
def undisturbed(caches, tmp_path_factory):
    """The trace and the last state of a run that nobody stopped."""
    home = Home(caches, tmp_path_factory.mktemp("undisturbed"))
    training, _ = run(home, 0, Watch(home.folder / "trace"))
    training.save_checkpoint(home.folder / "end.ckpt")
    return read_trace(home.folder / "trace"), torch.load(home.folder / "end.ckpt", weights_only=True), random_state()


def random_state() -> torch.Tensor:
    return torch.get_rng_state()


def first_run(home: Home, hook: str, stop: str, step: int, saved, trace, start=None, **values) -> None:
    with contextlib.suppress(RuntimeError):
        run(home, values.pop("size", 0), Watch(trace), SaveAndStop(hook, step, saved, stop), start=start, **values)


def resume_to_the_end(home, size, saved, trace, end, **values) -> None:
    training, _ = run(home, size, Watch(trace), start=saved, **values)
    assert training.global_step == training.datamodule.plan.steps
    training.save_checkpoint(end)
    torch.save(random_state(), f"{end}.random")


def try_cell(caches, folder, undisturbed, hook: str, change: str, stop: str, in_process: bool) -> None:
    """One cell of the matrix: save in a hook, stop, change something, go on, and look at all that was trained on."""
    call = (lambda function, *a, **k: function(*a, **k)) if in_process else forked_keywords
    home, saved, end = Home(caches, folder), folder / "saved.ckpt", folder / "end.ckpt"
    everything, last, last_random = undisturbed
    steps_per_epoch = len(everything) // EPOCHS
    early = steps_per_epoch + 3 if hook != "on_train_end" else 0  # in the second epoch
    call(first_run, home, hook, stop, early, saved, folder / "trace")
    step = torch.load(saved, weights_only=True)["global_step"]
    before, trained, parts = read_trace(folder / "trace"), BATCH * step, []
    assert step >= early
    parts.append((before, 0, step))
    size, values = 0, {}
    if change == "grown twice":
        call(
            first_run,
            home,
            "on_train_batch_end",
            stop,
            step + 4,
            folder / "second.ckpt",
            folder / "trace2",
            saved,
            size=1,
        )
        saved, size = folder / "second.ckpt", 2
        middle, step2 = read_trace(folder / "trace2"), torch.load(saved, weights_only=True)["global_step"]
        assert step2 == step + 4
        parts.append((middle, step, step2))
        step, trained = step2, BATCH * step2
    elif change == "grown":
        size = 1
    batch = BATCH
    if change == "other world size":
        after, plan = order_of(home, 0, saved, world_size=3, micro_batch=1, accumulation=2)
        batch, total = 6, plan.steps
        assert sorted(after) == list(range(step, total))
    else:
        if change == "other micro batch":
            values, batch = {"micro_batch": 3}, 3 * ACCUMULATION
        call(resume_to_the_end, home, size, saved, folder / "trace3", end, **values)
        after, total = read_trace(folder / "trace3"), torch.load(end, weights_only=True)["global_step"]
    parts.append((after, step, total))
    numbers = home.stored(size)
    assert total == step + (len(numbers) * EPOCHS - trained) // batch
    sequences = chain(*parts)
    assert_once_per_epoch(sequences, numbers, {len(home.stored(each)) for each in range(size + 1)})
    if size == 0:
        expected = chain((everything, 0, len(everything)))
        assert sequences[: len(expected)] == expected[: len(sequences)]
        assert abs(len(sequences) - len(expected)) < batch, "only the run's last batch may be cut"
    if change == "same":
        is_over = hook == "on_train_end"  # and nothing was left to train
        assert_same_state(torch.load(end, weights_only=True), last, counters=not is_over)
        assert is_over or torch.equal(torch.load(f"{end}.random", weights_only=True), last_random)
    elif change != "other world size" and (folder / "trace3").exists():
        falling = list(rates(folder / "trace3").values())
        assert all(a >= b for a, b in pairwise(falling)), "the learning rate never rises again"


def forked_keywords(function, *arguments, **keywords) -> None:
    forked(lambda: function(*arguments, **keywords))


def assert_same_state(one, other, counters: bool = True) -> None:
    for key in (
        "global_step",
        "epoch",
        "state_dict",
        "optimizer_states",
        "lr_schedulers",
        "TokenDataModule",
        "packhorse",
    ):
        assert_equal(one[key], other[key], key)
    if counters:  # those of an epoch that was over before the resume are gone
        for loop in ("epoch_progress", "epoch_loop.batch_progress", "epoch_loop.scheduler_progress"):
            assert one["loops"]["fit_loop"][loop] == other["loops"]["fit_loop"][loop], loop


def assert_equal(one, other, where: str) -> None:
    if isinstance(one, torch.Tensor):
        assert torch.equal(one, other), where
    elif isinstance(one, dict):
        assert one.keys() == other.keys(), where
        for key in one:
            assert_equal(one[key], other[key], f"{where}.{key}")
    elif isinstance(one, list | tuple):
        assert len(one) == len(other), where
        for number, pair in enumerate(zip(one, other, strict=True)):
            assert_equal(*pair, f"{where}[{number}]")
    else:
        assert one == other, where


CHANGES = ("same", "grown", "grown twice", "other world size", "other micro batch")


@pytest.mark.parametrize(
    ("hook", "change"),
    [
        ("in_an_accumulation", "same"),
        ("on_validation_end", "grown"),
        ("on_train_batch_end", "grown twice"),
        ("on_exception", "other micro batch"),
        ("on_train_end", "grown"),
        ("on_train_epoch_end", "other world size"),
    ],
)
def test_a_stopped_run_goes_on_in_the_same_order(caches, undisturbed, tmp_path, hook, change):
    try_cell(caches, tmp_path, undisturbed, hook, change, "exception", in_process=True)


@pytest.mark.slow
@pytest.mark.parametrize("stop", STOPS)
@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("hook", HOOKS)
def test_the_resume_matrix(caches, undisturbed, tmp_path, hook, change, stop):
    try_cell(caches, tmp_path, undisturbed, hook, change, stop, in_process=False)


def stopped(caches, folder, size=0, step=20, **values):
    """A run that was stopped, and its checkpoint."""
    home = Home(caches, folder)
    first_run(
        home, "on_train_batch_end", "exception", step, folder / "saved.ckpt", folder / "trace", size=size, **values
    )
    return home, folder / "saved.ckpt"


def test_growth_is_told_in_one_line_and_the_learning_rate_goes_on(caches, tmp_path, capfd):
    home, saved = stopped(caches, tmp_path)
    old = torch.load(saved, weights_only=True)["lr_schedulers"][0]["_last_lr"][0]
    training, model = run(home, 1, start=saved)
    before, after = len(home.stored(0)), len(home.stored(1))
    assert (
        f"dataset expanded: {before:,} -> {after:,} sequences; steps {before * EPOCHS // BATCH:,} -> "
        f"{training.global_step:,}; now at step 20; learning rate goes on from {old:.2g}"
    ) in capfd.readouterr().err
    assert model.schedule.totals == ((0, before * EPOCHS // BATCH), (20, training.global_step))


def test_a_pinned_run_goes_on_bit_for_bit_without_what_is_new(caches, undisturbed, tmp_path, capfd):
    home, saved = stopped(caches, tmp_path)
    training, _ = run(home, 1, start=saved, on_growth="pin")
    training.save_checkpoint(tmp_path / "end.ckpt")
    assert_same_state(torch.load(tmp_path / "end.ckpt", weights_only=True), undisturbed[1])
    assert "`on_growth: pin`" in capfd.readouterr().err


@pytest.mark.parametrize("limit", ["max_steps", "max_train_tokens"])
def test_a_fixed_total_stays_when_the_data_grow_and_that_is_said(caches, tmp_path, capfd, limit):
    values = {"limits": {"max_epochs": -1}}
    if limit == "max_steps":
        values["limits"]["max_steps"] = 30
    else:
        values["max_train_tokens"] = 30 * BATCH * 32
    home, saved = stopped(caches, tmp_path, **values)
    training, _ = run(home, 1, start=saved, **values)
    assert training.global_step == 30
    assert f"steps stay 30 (`{limit}`); now at step 20" in capfd.readouterr().err


def test_a_cache_that_shrank_or_is_another_is_refused(caches, tmp_path):
    home, saved = stopped(caches, tmp_path, size=1)
    with pytest.raises(SnapshotMismatch, match="it shrank"):
        run(home, 0, start=saved)
    with pytest.raises(SnapshotMismatch, match="is not the one that the checkpoint was trained on"):
        run(home, 2, start=saved, sequence_length=16)


def test_validation_stays_on_what_the_first_snapshot_had(caches, tmp_path):
    home, saved = stopped(caches, tmp_path)
    first = torch.load(saved, weights_only=True)["TokenDataModule"]["caches"][0]["eval_sequences"]
    training, _ = run(home, 2, start=saved, limits={"max_epochs": 1})
    data = training.datamodule
    assert sum(len(batch["input_ids"]) for batch in data.val_dataloader()) == first
    assert data.cache.num_sequences("eval") > first


def test_skipped_steps_leave_their_data_out(caches, undisturbed, tmp_path):
    home, saved = stopped(caches, tmp_path)
    training, _ = run(home, 0, Watch(tmp_path / "rest"), start=saved, skip_steps=[[26, 30]])
    everything = undisturbed[0]
    rest = read_trace(tmp_path / "rest")
    assert training.global_step == len(everything) - 5
    assert chain((rest, 20, len(everything) - 5)) == chain((everything, 20, 25), (everything, 30, len(everything)))
    with pytest.raises(SettingsError, match="the run is in step 20"):
        run(home, 0, start=saved, skip_steps=[[20, 30]])


def test_warm_up_is_a_share_of_the_full_data_set_and_frozen_at_the_first_run(caches, tmp_path):
    schedule = {"schedule": ScheduleSettings(warmup_ratio=0.1), "full_dataset_sequences": 400}
    home, saved = stopped(caches, tmp_path, **schedule)
    training, model = run(home, 1, start=saved, schedule=ScheduleSettings(warmup_ratio=0.5))
    assert model.schedule.warmup_steps == 400 * EPOCHS // BATCH // 10
    assert training.global_step > model.schedule.warmup_steps


def test_a_warm_up_longer_than_what_is_there_is_told(caches, tmp_path):
    with pytest.warns(UserWarning, match=r"Warm-up takes .* steps over the full data set\), the whole run only"):
        run(
            Home(caches, tmp_path),
            0,
            schedule=ScheduleSettings(),
            full_dataset_sequences=10**6,
            limits={"max_epochs": 1},
        )


def test_a_learning_rate_that_is_given_anew_wins_over_that_of_the_checkpoint(caches, tmp_path):
    home, saved = stopped(caches, tmp_path)
    training, model = run(home, 0, start=saved, learning_rate=5e-3)
    last = training.optimizers[0].param_groups[0]["lr"]
    assert last == pytest.approx(5e-3 * model.schedule.factor(training.global_step))
