import ast
import json
import sys
import time
import tracemalloc
from collections import OrderedDict
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from packhorse import training
from packhorse.training.order import (
    EpochOrder,
    TrainingOrder,
    micro_batch_positions,
    recalculated_total,
    steps_in_epoch,
    total_steps,
)

SMALL = {"group_sequences": 16, "window_groups": 4}


def whole(order: EpochOrder) -> np.ndarray:
    return order(np.arange(order.num_sequences))


def closed_stretches(order: EpochOrder) -> list[set[int]]:
    """The pass cut wherever no group lies on both sides of the cut -> the groups of each stretch."""
    group = whole(order) // order.group_sequences
    last_position = {g: position for position, g in enumerate(group.tolist())}
    stretches, current, end = [], set(), -1
    for position, g in enumerate(group.tolist()):
        current.add(g)
        end = max(end, last_position[g])
        if position == end:
            stretches.append(current)
            current = set()
    return stretches


def fetches(numbers: np.ndarray, group_sequences: int, room: int) -> int:
    """How many groups a local copy with room for so many would fetch, the longest unused making way."""
    copy, count = OrderedDict(), 0
    for group in (numbers // group_sequences).tolist():
        count += group not in copy
        copy[group] = None
        copy.move_to_end(group)
        if len(copy) > room:
            copy.popitem(last=False)
    return count


# --- an epoch ---


@given(
    num_sequences=st.integers(1, 700), seed=st.integers(0, 2**63), group=st.integers(1, 20), window=st.integers(1, 5)
)
def test_each_sequence_comes_exactly_once_per_epoch(num_sequences, seed, group, window):
    order = EpochOrder(num_sequences, seed, 0, group_sequences=group, window_groups=window)
    np.testing.assert_array_equal(np.sort(whole(order)), np.arange(num_sequences))


@pytest.mark.parametrize("num_sequences", [1, 8191, 8192, 8193, 65_536, 65_537, 281_773])
def test_each_sequence_comes_exactly_once_with_the_default_sizes(num_sequences):
    numbers = whole(EpochOrder(num_sequences, 1, 2))
    assert numbers.dtype == np.int64
    np.testing.assert_array_equal(np.sort(numbers), np.arange(num_sequences))


def test_positions_may_be_asked_in_any_portion_and_order():
    order = EpochOrder(1000, 5, 1, **SMALL)
    positions = np.random.default_rng(0).permutation(1000)
    np.testing.assert_array_equal(order(positions), whole(order)[positions])
    np.testing.assert_array_equal(order([999]), whole(order)[999:])
    assert order([]).size == 0


@pytest.mark.parametrize("num_sequences", [16 * 16, 16 * 17, 16 * 18 + 5, 16 * 21 + 1, 16 * 23 + 15])
def test_a_pass_needs_each_group_in_one_window_only_wherever_the_short_group_lands(num_sequences):
    short_group, short_in_the_middle = num_sequences // 16, 0
    for seed in range(40):
        stretches = closed_stretches(EpochOrder(num_sequences, seed, 0, **SMALL))
        assert max(map(len, stretches)) <= 4
        assert sum(map(len, stretches)) == -(-num_sequences // 16)
        short_in_the_middle += short_group in set().union(*stretches[:-2])
    assert short_in_the_middle > 10 or num_sequences % 16 == 0


def test_epochs_and_seeds_have_unrelated_orders():
    base = whole(EpochOrder(50_000, 1, 0, group_sequences=16))
    for seed, epoch in [(1, 1), (2, 0), (0, 1)]:
        other = whole(EpochOrder(50_000, seed, epoch, group_sequences=16))
        assert (base == other).mean() < 0.001
        assert abs(np.corrcoef(base, other)[0, 1]) < 0.1  # five standard deviations of 3,125 groups


def test_neighbours_in_the_order_are_seldom_neighbours_in_the_data():
    numbers = whole(EpochOrder(100_000, 3, 0))
    assert (np.abs(np.diff(numbers)) == 1).mean() < 0.0005
    place = numbers[: 8 * 8192] % 8192
    assert abs(np.corrcoef(place, np.arange(len(place)))[0, 1]) < 0.02  # five standard deviations


def test_windows_are_stirred_each_in_its_own_way():
    first, second = (whole(EpochOrder(2 * 65_536, 3, 0)) % 8192).reshape(2, -1)
    assert (first == second).mean() < 0.001


def test_every_sequence_begins_an_epoch_about_equally_often_over_seeds():
    orders = [EpochOrder(50, seed, 0, group_sequences=8, window_groups=2) for seed in range(1500)]
    counts = np.bincount([order([0])[0] for order in orders], minlength=50)
    # Not exactly: who shares a window with the short group has fewer rivals there.
    assert ((counts - 30) ** 2 / 30).sum() < 49 + 8 * (2 * 49) ** 0.5
    assert 10 < counts.min() <= counts.max() < 60


def test_the_order_is_frozen_for_ever():
    """Golden values; see test_permutation.py. The last one went through two growths."""
    golden = [
        (EpochOrder(20, 1234, 0), range(10, 20), [2, 16, 0, 11, 12, 3, 14, 5, 15, 17]),
        (EpochOrder(20, 1234, 3), range(10, 20), [18, 6, 15, 19, 14, 2, 10, 3, 0, 5]),
        (EpochOrder(281_773, 1234, 0), range(281_768, 281_773), [279724, 40842, 199380, 33408, 281576]),
        (EpochOrder(10**10, 1234, 3), range(10**10 - 3, 10**10), [3691812703, 4188235152, 5133658481]),
        (
            EpochOrder(300_000, 1234, 1, growths=((100_000, 30_000), (200_000, 90_000))),
            [0, 29_999, 30_000, 65_536, 89_999, 90_000, 140_000, 299_999],
            [68466, 45235, 88748, 6279, 121892, 241382, 219135, 164214],
        ),
    ]
    for order, positions, numbers in golden:
        np.testing.assert_array_equal(order(positions), numbers)


@pytest.mark.parametrize("num_sequences", [40_000, 281_773, 10_000_000_000])
def test_an_order_of_any_size_costs_next_to_nothing(num_sequences):
    order = EpochOrder(num_sequences, 1, 0)
    positions = np.random.default_rng(0).integers(0, num_sequences, 4096)
    tracemalloc.start()
    numbers = order(positions)
    peak_bytes = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak_bytes < 4 * 2**20
    assert len(np.unique(numbers)) == len(np.unique(positions))
    started = time.perf_counter()
    for _ in range(10):
        order(positions)
    assert (time.perf_counter() - started) / 10 / 4096 < 5e-6  # 0.3 microseconds; the rest is for a busy machine


@pytest.mark.parametrize("positions", [[-1], [10], [0, 5, 10]])
def test_positions_outside_the_epoch_are_refused(positions):
    with pytest.raises(IndexError, match="epoch of 10"):
        EpochOrder(10, 0, 0)(positions)


@pytest.mark.parametrize("module", ["order", "permutation", "schedule", "batches"])
def test_the_pure_pieces_import_nothing_but_numpy_and_each_other(module):
    tree = ast.parse((Path(training.__file__).parent / f"{module}.py").read_text())
    imported = [node.module for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)]
    imported += [name.name for node in ast.walk(tree) if isinstance(node, ast.Import) for name in node.names]
    foreign = {name for name in imported if name.split(".")[0] not in sys.stdlib_module_names}
    assert foreign <= {"numpy", "packhorse.training.permutation"}


# --- growth inside an epoch ---


@given(
    first=st.integers(1, 300),
    steps=st.lists(st.tuples(st.integers(0, 120), st.floats(0, 1)), max_size=5),
    seed=st.integers(0, 1000),
    group=st.integers(1, 20),
    window=st.integers(1, 5),
)
def test_however_often_an_epoch_grows_nothing_repeats_nothing_is_lost_and_the_past_stays(
    first, steps, seed, group, window
):
    order, consumed = EpochOrder(first, seed, 1, group_sequences=group, window_groups=window), 0
    for new, share in steps:
        consumed += int(share * (order.num_sequences - consumed))
        grown = order.grow(order.num_sequences + new, consumed)
        numbers = whole(grown)
        np.testing.assert_array_equal(numbers[:consumed], whole(order)[:consumed])
        np.testing.assert_array_equal(np.sort(numbers), np.arange(grown.num_sequences))
        order = grown


def test_what_is_new_is_mixed_into_what_is_left():
    numbers = whole(EpochOrder(16 * 400, 1, 0, **SMALL).grow(16 * 800, consumed=16 * 200 + 7))[16 * 200 + 7 :]
    is_new = numbers >= 16 * 400
    quarters = [quarter.mean() for quarter in np.array_split(is_new, 4)]
    assert all(0.5 < share < 0.83 for share in quarters)  # two thirds of the rest are new


def test_growth_keeps_groups_together():
    """The groups of the one window that was open are scattered; all others stay (nearly) whole."""
    order, room = EpochOrder(16 * 400, 1, 0, **SMALL), 3 * 4
    assert fetches(whole(order), 16, room) == 400
    once = order.grow(16 * 600 + 3, consumed=16 * 50 + 7)
    twice = once.grow(16 * 800, consumed=16 * 150 + 1)
    assert fetches(whole(once), 16, room) < 2 * 601
    assert fetches(whole(twice), 16, room) < 2.5 * 800


@pytest.mark.parametrize(
    ("num_sequences", "growths"),
    [(9, [(10, 5)]), (20, [(10, 5), (15, 4)]), (20, [(10, 11)]), (20, [(10, -1)]), (0, [])],
)
def test_an_impossible_epoch_is_refused(num_sequences, growths):
    with pytest.raises(ValueError):
        EpochOrder(num_sequences, 0, 0, growths=growths)


# --- a run ---


def test_a_run_is_one_epoch_after_the_other():
    run = TrainingOrder(seed=7, history=((0, 100),))
    numbers = run.sequence_numbers(0, 500)
    for epoch in range(5):
        np.testing.assert_array_equal(numbers[epoch * 100 :][:100], whole(EpochOrder(100, 7, epoch)))
    assert run.locate(499) == (EpochOrder(100, 7, 4), 99)
    assert run.locate(500) == (EpochOrder(100, 7, 5), 0)


@given(portions=st.lists(st.integers(0, 400), max_size=8))
def test_batches_of_any_size_continue_the_same_run(portions):
    run = TrainingOrder(3, ((0, 100), (130, 150), (290, 155)))
    everything, start, parts = run.sequence_numbers(0, sum(portions)), 0, []
    for count in portions:
        parts.append(run.sequence_numbers(start, count))
        start += count
    np.testing.assert_array_equal(np.concatenate([np.empty(0, np.int64), *parts]), everything)


@pytest.mark.parametrize(("world_size", "micro_batch", "accumulation"), [(1, 24, 1), (2, 3, 4), (8, 3, 1), (4, 1, 6)])
@pytest.mark.parametrize("workers", [1, 3])
def test_the_global_order_is_the_same_for_all_ranks_workers_micro_batches_and_accumulations(
    world_size, micro_batch, accumulation, workers
):
    run, steps = TrainingOrder(1, ((0, 50),)), 9
    shape = {"micro_batch": micro_batch, "world_size": world_size, "accumulation": accumulation}
    taken = {}
    for rank in range(world_size):
        for worker in range(workers):  # a loader's worker makes every so-many-th micro-batch, whenever it likes
            for index in range(worker, steps * accumulation, workers):
                positions = micro_batch_positions(*divmod(index, accumulation), rank, **shape, consumed=11)
                taken[index, rank] = run.sequence_numbers(positions.start, len(positions))
    in_order = np.concatenate([taken[key] for key in sorted(taken)])
    np.testing.assert_array_equal(in_order, run.sequence_numbers(11, steps * 24))


def test_a_micro_batch_that_nobody_has_is_refused():
    for index, rank in [(2, 0), (0, 2), (-1, 0), (0, -1)]:
        with pytest.raises(IndexError):
            micro_batch_positions(0, index, rank, micro_batch=1, world_size=2, accumulation=2)


@settings(max_examples=60, deadline=None)
@given(
    first=st.integers(30, 200),
    growths=st.lists(st.tuples(st.integers(0, 100), st.integers(0, 300)), max_size=5),
    seed=st.integers(0, 99),
)
def test_a_growing_run_gives_every_sequence_once_in_every_epoch(first, growths, seed):
    run, consumed = TrainingOrder(seed, ((0, first),)), 0
    for new, trained in growths:
        consumed += trained
        grown = run.grow(run.history[-1][1] + new, consumed)
        np.testing.assert_array_equal(grown.sequence_numbers(0, consumed), run.sequence_numbers(0, consumed))
        run = TrainingOrder(**json.loads(json.dumps({"seed": grown.seed, "history": grown.history})))
        assert run == grown
    last_epoch = run.locate(consumed)[0].epoch + 2
    for epoch in range(last_epoch):
        start, end = run.epoch_start(epoch), run.epoch_start(epoch + 1)
        np.testing.assert_array_equal(np.sort(run.sequence_numbers(start, end - start)), np.arange(end - start))
    assert end - start == run.history[-1][1]  # by then everything takes part


def test_new_data_joins_at_once_when_it_is_an_eighth_of_the_rest_else_with_the_next_epoch():
    run = TrainingOrder(1, ((0, 1000),))
    assert run.grow(1100, consumed=200).history == ((0, 1000), (200, 1100))  # rest 800, an eighth is 100
    assert run.grow(1099, consumed=200).history == ((0, 1000), (1000, 1099))
    assert run.grow(1099, consumed=3200).history == ((0, 1000), (4000, 1099))
    assert run.grow(1001, consumed=3000).history == ((0, 1000), (3000, 1001))  # an epoch begins here anyway
    assert run.grow(1001, consumed=0).history == ((0, 1001),)


def test_growth_that_only_waits_for_the_next_epoch_can_still_be_outgrown():
    waiting = TrainingOrder(1, ((0, 1000),)).grow(1010, consumed=100)
    assert waiting.history == ((0, 1000), (1000, 1010))
    assert waiting.grow(1010, consumed=999) == waiting  # asked again, nothing new
    assert waiting.grow(1500, consumed=300).history == ((0, 1000), (300, 1500))
    assert waiting.grow(1500, consumed=1300).history == ((0, 1000), (1000, 1010), (1300, 1500))


def test_a_data_set_that_shrank_is_refused():
    with pytest.raises(ValueError, match="shrank from 1010 to 1009"):
        TrainingOrder(1, ((0, 1000), (1000, 1010))).grow(1009, consumed=5)


@pytest.mark.parametrize("history", [(), ((1, 10),), ((0, 10), (0, 20)), ((0, 10), (5, 9)), ((0, 0),)])
def test_an_impossible_history_is_refused(history):
    with pytest.raises(ValueError):
        TrainingOrder(0, history)


# --- steps ---


def test_the_published_numbers_of_steps_come_out_at_a_global_batch_of_72():
    """0.8 of the total floored (unfloored gives the same); the published text says 48, which gives 29,351."""
    before, after, full = (int(0.8 * total) for total in (352_217, 472_240, 2_500_000))
    assert total_steps(before, 5, 72) == 19_567
    assert total_steps(after, 5, 72) == 26_235
    assert total_steps(full, 5, 72) == 138_888
    assert total_steps(before, 5, 48) == 29_351


@given(
    sequences=st.integers(1, 10**6),
    epochs=st.integers(1, 9),
    global_batch=st.integers(1, 5000),
    share=st.floats(0, 1),
)
def test_recalculated_steps_equal_the_plain_formula_until_something_changes(sequences, epochs, global_batch, share):
    total = total_steps(sequences, epochs, global_batch)
    step = int(share * total)
    assert recalculated_total(step, step * global_batch, sequences, epochs, global_batch) == total
    assert recalculated_total(step, step * global_batch, 0, epochs, global_batch) == step


def test_steps_are_recalculated_from_what_is_left_when_the_global_batch_changes():
    assert recalculated_total(step=100, consumed=7200, sequences=281_773, epochs=5, global_batch=144) == 100 + 9733


@given(sequences=st.integers(1, 10**5), epochs=st.integers(1, 20), global_batch=st.integers(1, 10**5))
def test_the_steps_of_all_epochs_add_up_to_the_run(sequences, epochs, global_batch):
    each = [steps_in_epoch(epoch, sequences, global_batch) for epoch in range(epochs)]
    assert sum(each) == sequences * epochs // global_batch
    assert max(each) - min(each) <= 1
