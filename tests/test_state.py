"""Laws of a run's data state: what was trained on stays, what is to come follows from completed steps alone."""

import json

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from packhorse.errors import CheckpointError, SettingsError, SnapshotMismatch
from packhorse.training.mixture import BLOCK, RunOrder, shares_of
from packhorse.training.order import TrainingOrder
from packhorse.training.plan import RunPlan
from packhorse.training.resume import continue_run
from packhorse.training.state import RunState, Snapshots, StageStart, begin_run


def snapshot(
    sequences: int,
    name: str = "web",
    chunks: int | None = None,
    origin: str = "a",
    eval_sequences: int = 7,
    recipe: str = "",
) -> Snapshots:
    return Snapshots(
        name=name,
        num_chunks=sequences // 10 if chunks is None else chunks,
        sequences=sequences,
        eval_sequences=eval_sequences,
        digests=lambda n: f"{origin}{n:063d}",
        recipe=recipe,
    )


ALONE = [StageStart(step=0, shares={"web": BLOCK})]


def begin(sequences: int, global_batch: int = 8, **values) -> RunState:
    return begin_run([snapshot(sequences)], ALONE, seed=3, global_batch=global_batch, **values)


def reloaded(state: RunState, step: int) -> RunState:
    return RunState.from_dict(json.loads(json.dumps(state.to_dict(step))))


def plan(state: RunState, **limits) -> RunPlan:
    return RunPlan(state=state, sequence_length=512, **limits)


# --- one cache ---


@settings(max_examples=60, deadline=None)
@given(
    first=st.integers(30, 200),
    changes=st.lists(
        st.tuples(st.integers(0, 9), st.integers(0, 150), st.sampled_from([3, 4, 8, 12])), min_size=1, max_size=5
    ),
)
def test_growth_and_other_global_batches_leave_the_past_and_give_every_sequence_once_per_epoch(first, changes):
    state, step, total = begin(first), 0, first
    for steps, new, global_batch in changes:
        step, total = step + steps, total + new
        past = state.order.sequence_numbers(0, state.trained(step))
        state = reloaded(state, step).with_batch(step, global_batch).with_snapshot(snapshot(total), step)
        assert state.trained(step) == len(past)
        np.testing.assert_array_equal(state.order.sequence_numbers(0, len(past)), past)
    order = state.order.orders[0]
    for epoch in range(order.locate(state.position(step))[0].epoch + 2):
        start, end = order.epoch_start(epoch), order.epoch_start(epoch + 1)
        numbers = state.order.sequence_numbers(start, end - start)[:, 1]
        np.testing.assert_array_equal(np.sort(numbers), np.arange(end - start))


@given(
    sequences=st.integers(10, 500),
    epochs=st.integers(1, 4),
    share=st.floats(0, 1),
    global_batch=st.sampled_from([2, 3, 8]),
    new=st.integers(0, 500),
)
def test_the_total_follows_the_formula_whenever_the_growth_came(sequences, epochs, share, global_batch, new):
    state = begin(sequences, global_batch=4)
    step = int(share * plan(state, max_epochs=epochs).steps)
    state = state.with_batch(step, global_batch).with_snapshot(snapshot(sequences + new), step)
    expected = step + ((sequences + new) * epochs - 4 * step) // global_batch
    assert plan(state, max_epochs=epochs).steps == expected


def test_the_published_example_comes_out():
    """0.8 of 352,217 and of 472,240 sequences, 5 epochs, global batch 72: at 48, as it was printed, it does not."""
    before, after, full = (int(0.8 * total) for total in (352_217, 472_240, 2_500_000))
    state = begin(before, global_batch=72)
    assert plan(state, max_epochs=5).steps == 19_567
    assert plan(state, max_epochs=5).of_full_data(full) == 138_888
    for step in (1, 5_000, 12_345, 19_567):
        assert plan(state.with_snapshot(snapshot(after), step), max_epochs=5).steps == 26_235
    assert plan(begin(before, global_batch=48), max_epochs=5).steps == 29_351


@settings(max_examples=60, deadline=None)
@given(
    sequences=st.integers(20, 200),
    max_epochs=st.integers(1, 4),
    new=st.integers(0, 200),
    share=st.floats(0, 1),
)
def test_the_epochs_of_a_plan_follow_each_other_and_end_with_the_run(sequences, max_epochs, new, share):
    state = begin(sequences)
    step = int(share * plan(state, max_epochs=max_epochs).steps)
    grown = plan(state.with_snapshot(snapshot(sequences + new), step), max_epochs=max_epochs)
    ends, position = [], 0
    while position < grown.steps:
        epoch, first, end = grown.epoch_at(position)
        assert (epoch, first) == (len(ends), position)
        assert grown.epoch_at(end - 1) == (epoch, first, end)
        ends.append(end)
        position = end
    assert ends[-1] == grown.steps
    assert len(ends) == max_epochs
    assert grown.epoch_at(grown.steps) == (max_epochs, grown.steps, grown.steps)


def test_max_steps_and_max_tokens_keep_the_total_when_the_data_grow():
    state = begin(100)
    grown = state.with_snapshot(snapshot(900), 5)
    for limits in ({"max_steps": 40}, {"max_train_tokens": 40 * 8 * 512 + 100}):
        before, after = plan(state, **limits), plan(grown, **limits)
        assert before.steps == after.steps == 40
        assert [before.fixed_by, after.fixed_by] == [*limits] * 2
    assert plan(state.with_batch(10, 4), max_train_tokens=40 * 8 * 512).steps == 10 + 60


def test_a_shrunk_or_foreign_cache_is_refused_with_the_reason():
    state = begin(100)
    with pytest.raises(SnapshotMismatch, match=r"has 9 chunks, but the checkpoint was trained on 10: it shrank"):
        state.with_snapshot(snapshot(90), 3)
    with pytest.raises(SnapshotMismatch, match=r"is not the one that the checkpoint was trained on"):
        state.with_snapshot(snapshot(200, origin="b"), 3)


def test_validation_stays_on_the_first_evaluation_sequences_that_a_run_had():
    state = begin_run([snapshot(40, eval_sequences=0)], ALONE, seed=3, global_batch=8)
    for step, (sequences, there, known) in enumerate([(50, 0, 0), (60, 3, 3), (80, 9, 3)], start=1):
        state = reloaded(state.with_snapshot(snapshot(sequences, eval_sequences=there), step), step)
        assert state.caches[0].eval_sequences == known


def test_a_cache_of_another_recipe_is_told_from_one_that_shrank():
    # A checkpoint that does not know its recipe learns it.
    state = reloaded(begin(100).with_snapshot(snapshot(110, recipe="short"), 3), 3)
    with pytest.raises(SnapshotMismatch, match=r"its recipe is long, in the checkpoint short.*`sequence_length`"):
        state.with_snapshot(snapshot(90, recipe="long"), 3)
    with pytest.raises(SnapshotMismatch, match="it shrank"):
        state.with_snapshot(snapshot(90, recipe="short"), 3)


@pytest.mark.parametrize("damage", [{"format": 2}, {"caches": []}, {"batches": [[5, 0, 8]]}, {"seed": None}])
def test_a_state_that_makes_no_sense_is_refused(damage):
    with pytest.raises(CheckpointError):
        RunState.from_dict({**begin(100).to_dict(3), **damage})


def test_the_state_of_a_run_that_grew_five_times_is_below_a_kilobyte():
    state = begin(10_000_000_000, global_batch=4096)
    for number in range(1, 6):
        state = state.with_snapshot(snapshot(10_000_000_000 + number * 1_500_000_000), number * 200_000)
    assert len(state.caches[0].history) == 6
    assert len(json.dumps(state.to_dict(1_000_000))) < 1_000


# --- what is left out ---


def test_skipped_steps_leave_out_exactly_what_they_would_have_trained_on():
    plain = begin(400)
    everything = plain.order.sequence_numbers(0, 400)
    skipping = plain.with_skips([(11, 15), (21, 22)], 4)
    expected = np.concatenate([everything[:80], everything[120:160], everything[176:400]])
    np.testing.assert_array_equal(skipping.order.sequence_numbers(0, len(expected)), expected)
    assert plan(skipping, max_epochs=1).steps == 50 - 7


def test_skipped_steps_are_kept_in_the_state_and_counted_once():
    skipping = begin(400).with_skips([(11, 15)], 4)
    later = reloaded(skipping, 20).with_skips([(11, 15)], 20)
    assert later == skipping
    np.testing.assert_array_equal(later.order.sequence_numbers(0, 200), skipping.order.sequence_numbers(0, 200))
    assert reloaded(skipping, 20).with_skips([], 20) == skipping, "what was left out is a fact"
    assert reloaded(skipping, 5).with_skips([], 5).skips == (), "what is to come is a setting"
    assert reloaded(skipping, 10).with_skips([], 10).skips == (), "also if it comes next"
    assert reloaded(skipping, 5).with_skips(None, 5) == skipping, "which need not be repeated"


@given(stop=st.integers(5, 40), again=st.integers(0, 20), global_batch=st.sampled_from([3, 8, 12]))
def test_what_a_range_leaves_out_is_decided_once(stop, again, global_batch):
    ranges = [(11, 15), (21, 22), (31, 40)]
    skipping = begin(400).with_skips(ranges, 5)
    expected = skipping.order.sequence_numbers(0, 400)
    for step in (stop, stop + again):
        state = continue_run(reloaded(skipping, step), step, {}, ALONE, global_batch=global_batch, skips=ranges)
        np.testing.assert_array_equal(state.order.sequence_numbers(0, 400), expected)
        assert state.skips == skipping.skips


def test_steps_to_leave_out_are_those_of_the_log_before_the_global_batch_changes():
    everything = begin(400).order.sequence_numbers(0, 400)
    state = continue_run(begin(400), 20, {}, ALONE, global_batch=4, skips=[(26, 30)])
    expected = np.delete(everything, range(200, 240), axis=0)
    np.testing.assert_array_equal(state.order.sequence_numbers(0, 360), expected)


def test_ranges_that_overlap_leave_out_what_lies_in_any_of_them():
    everything = begin(400).order.sequence_numbers(0, 400)

    def left_out(state):
        return np.setdiff1d(everything[:, 1], state.order.sequence_numbers(0, 400 - 8 * 6)[:, 1])

    ranges = [(11, 14), (12, 13), (13, 16)]
    once = begin(400).with_skips(ranges, 5)
    np.testing.assert_array_equal(left_out(once), np.sort(everything[80:128, 1]))
    assert reloaded(once, 30).with_skips(ranges, 30) == once, "also the one that lies in another is remembered"
    # A range around one that is recorded: steps 11 and 12, and their data, are out; 10 and 13 to 15 of the log follow.
    around = begin(400).with_skips([(11, 12)], 5).with_skips([(11, 12), (10, 13)], 6)
    np.testing.assert_array_equal(left_out(around), np.sort(everything[72:120, 1]))


def test_steps_that_are_done_cannot_be_skipped():
    with pytest.raises(SettingsError, match=r"steps 3 to 9 cannot be left out, the run is in step 4"):
        begin(400).with_skips([(3, 9)], 4)


def test_growth_after_a_skip_repeats_nothing_and_brings_back_nothing():
    state = begin(400).with_skips([(11, 15)], 4).with_snapshot(snapshot(1000), 20)
    seen = state.order.sequence_numbers(0, 960)[:, 1]
    assert len(np.unique(seen)) == 960
    left_out = np.setdiff1d(np.arange(1000), seen)
    np.testing.assert_array_equal(left_out, np.sort(begin(400).order.sequence_numbers(80, 40)[:, 1]))


# --- several caches ---


def mixed(weights=(3, 1), sizes=(500, 90), seed=1) -> RunOrder:
    orders = tuple(TrainingOrder(seed, ((0, size),)) for size in sizes)
    return RunOrder(orders, ((0, shares_of(weights)),))


def test_weights_hold_in_every_block_and_each_cache_keeps_its_own_epochs():
    order = mixed()
    taken = order.sequence_numbers(0, 5 * BLOCK)
    for block in range(5):
        assert (taken[block * BLOCK :][:BLOCK, 0] == 1).sum() == BLOCK // 4
    for cache, size in enumerate((500, 90)):
        own = taken[taken[:, 0] == cache, 1]
        np.testing.assert_array_equal(own, order.orders[cache].sequence_numbers(0, len(own)))
        np.testing.assert_array_equal(np.sort(own[:size]), np.arange(size))
    assert (taken[:100, 0] == 1).any(), "caches are stirred within a block"


@given(portions=st.lists(st.integers(0, 3000), max_size=5))
@settings(max_examples=25, deadline=None)
def test_a_mixture_may_be_asked_in_any_portion(portions):
    order = RunOrder(
        mixed().orders, ((0, (1536, 512)), (1000, (0, 2048)), (5000, (1024, 1024))), ((700, 50), (4990, 20))
    )
    everything, start, parts = order.sequence_numbers(0, sum(portions)), 0, [np.empty((0, 2), np.int64)]
    for count in portions:
        parts.append(order.sequence_numbers(start, count))
        start += count
    np.testing.assert_array_equal(np.concatenate(parts), everything)


def test_caches_of_a_mixture_grow_each_on_its_own():
    starts = [StageStart(step=0, shares={"web": 1536, "code": 512})]
    snapshots = [snapshot(500), snapshot(90, "code")]
    state = begin_run(snapshots, starts, seed=3, global_batch=8)
    past = state.order.sequence_numbers(0, 800)
    state = reloaded(state, 100).with_snapshot(snapshot(300, "code"), 100).with_stages(starts, 100)
    np.testing.assert_array_equal(state.order.sequence_numbers(0, 800), past)
    numbers = state.order.sequence_numbers(0, 4 * BLOCK)
    for cache in (0, 1):
        order = state.order.orders[cache]
        own = numbers[numbers[:, 0] == cache, 1]
        assert state.order.taken(4 * BLOCK)[cache] == len(own)
        for epoch in range(2):
            start, end = order.epoch_start(epoch), order.epoch_start(epoch + 1)
            np.testing.assert_array_equal(np.sort(own[start:end]), np.arange(end - start))


def test_a_stage_begins_with_its_step_and_caches_go_on_where_they_were():
    starts = [
        StageStart(step=0, shares={"web": BLOCK}),
        StageStart(step=50, shares={"web": 1024, "code": 1024}),
    ]
    state = begin_run([snapshot(500), snapshot(90, "code")], starts, seed=3, global_batch=8)
    numbers = state.order.sequence_numbers(0, 400 + BLOCK)
    assert (numbers[:400, 0] == 0).all()
    assert (numbers[400:, 0] == 1).sum() == 1024
    own = numbers[numbers[:, 0] == 0, 1]
    np.testing.assert_array_equal(own, state.order.orders[0].sequence_numbers(0, len(own)))


def test_a_stage_to_come_keeps_its_step_when_the_global_batch_changes():
    starts = [StageStart(step=0, shares={"web": BLOCK}), StageStart(step=50, shares={"code": BLOCK})]
    state = begin_run([snapshot(500), snapshot(90, "code")], starts, seed=3, global_batch=8)
    state = reloaded(state, 20).with_batch(20, 4).with_stages(starts, 20)
    caches = state.order.sequence_numbers(0, 1000)[:, 0]
    assert (np.flatnonzero(caches == 1)[0], state.trained(50)) == (280, 280)
    later = reloaded(state, 60).with_batch(60, 16).with_stages(starts, 60)
    np.testing.assert_array_equal(later.order.sequence_numbers(0, 1000)[:, 0], caches)


def test_other_weights_on_resume_count_from_there_on():
    both = [snapshot(500), snapshot(90, "code")]
    state = begin_run(both, [StageStart(step=0, shares={"web": 1024, "code": 1024})], seed=3, global_batch=8)
    past = state.order.sequence_numbers(0, 160)
    changed = reloaded(state, 20).with_stages([StageStart(step=0, shares={"code": BLOCK})], 20)
    numbers = changed.order.sequence_numbers(0, 300)
    np.testing.assert_array_equal(numbers[:160], past)
    assert (numbers[160:, 0] == 1).all()


def test_a_cache_can_join_a_run_that_goes_on():
    state = begin(500).with_snapshot(snapshot(90, "code"), 20)
    state = state.with_stages([StageStart(step=0, shares={"web": 1024, "code": 1024})], 20)
    numbers = state.order.sequence_numbers(0, 160 + BLOCK)
    np.testing.assert_array_equal(numbers[:160], begin(500).order.sequence_numbers(0, 160))
    assert (numbers[160:, 0] == 1).sum() == 1024


@given(weights=st.lists(st.floats(0, 1000, allow_subnormal=False), min_size=1, max_size=8).filter(lambda w: sum(w) > 1))
def test_shares_are_as_near_to_the_weights_as_a_block_allows(weights):
    shares = shares_of(weights)
    assert sum(shares) == BLOCK
    for share, weight in zip(shares, weights, strict=True):
        assert (share == 0) == (weight == 0)
        assert abs(share - BLOCK * weight / sum(weights)) <= len(weights)


@pytest.mark.parametrize("weights", [[0, 0], [1, -1], [float("nan"), 1]])
def test_weights_that_make_no_sense_are_refused(weights):
    with pytest.raises(SettingsError, match="Weights"):
        shares_of(weights)
