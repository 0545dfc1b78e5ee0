import json
import math
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from packhorse.training.schedule import Schedule, warmup_steps

SHAPES = ["cosine", "linear", "constant", "wsd"]


def curve(schedule: Schedule) -> list[float]:
    return [schedule.factor(step) for step in range(schedule.total + 1)]


def test_warm_up_is_a_straight_line_whose_first_step_already_moves():
    schedule = Schedule(totals=[(0, 100)], warmup_steps=4)
    assert [schedule.factor(step) for step in range(5)] == [0.25, 0.5, 0.75, 1.0, 1.0]
    assert Schedule(totals=[(0, 100)]).factor(0) == 1.0


@pytest.mark.parametrize(
    ("shape", "quarters"),
    [
        ("cosine", [1.0, 0.2 + 0.8 * (1 + math.sqrt(0.5)) / 2, 0.6, 0.2 + 0.8 * (1 - math.sqrt(0.5)) / 2, 0.2]),
        ("linear", [1.0, 0.8, 0.6, 0.4, 0.2]),
        ("constant", [1.0, 1.0, 1.0, 1.0, 1.0]),
        ("wsd", [1.0, 1.0, 1.0, 0.6, 0.2]),  # the last half falls
    ],
)
def test_each_shape_has_its_values_at_the_quarters_of_the_progress(shape, quarters):
    schedule = Schedule(totals=[(0, 110)], warmup_steps=10, shape=shape, min_ratio=0.2, decay_share=0.5)
    assert [schedule.factor(step) for step in (10, 35, 60, 85, 110)] == pytest.approx(quarters)
    assert schedule.factor(10_000) == pytest.approx(quarters[-1])  # and stays there


growing_runs = st.lists(st.tuples(st.integers(0, 300), st.integers(1, 500)), max_size=5)


@given(
    shape=st.sampled_from(SHAPES),
    warmup=st.integers(0, 150),
    total=st.integers(1, 400),
    growths=growing_runs,
    min_ratio=st.floats(0, 1),
)
def test_growth_leaves_the_past_alone_and_never_jumps_rises_or_warms_up_again(shape, warmup, total, growths, min_ratio):
    schedule, step = Schedule(totals=[(0, total)], warmup_steps=warmup, shape=shape, min_ratio=min_ratio), 0
    for later, more in growths:
        step += later
        grown = schedule.grow(step, max(schedule.total, step) + more)
        for t in range(step + 1):  # including the step of growth itself: the curve is continuous
            assert grown.factor(t) == pytest.approx(schedule.factor(t), abs=1e-12)
        assert grown.progress(step + 1) <= schedule.progress(step + 1) + 1e-12  # slower from here on
        schedule = grown
    factors = curve(schedule)
    assert all(0 <= f <= 1 for f in factors)
    assert all(a < b for a, b in pairwise(factors[:warmup]))
    assert all(a >= b - 1e-12 for a, b in pairwise(factors[warmup:]))
    assert (
        Schedule(totals=json.loads(json.dumps(schedule.totals)), warmup_steps=warmup, shape=shape, min_ratio=min_ratio)
        == schedule
    )


@pytest.mark.parametrize("shape", SHAPES)
def test_a_grown_run_still_arrives_at_the_minimum_in_its_last_step(shape):
    schedule = Schedule(totals=[(0, 100)], warmup_steps=10, shape=shape).grow(40, 160).grow(90, 300)
    assert schedule.progress(300) == pytest.approx(1)
    assert schedule.progress(299) < 1
    assert schedule.factor(300) == pytest.approx(1.0 if shape == "constant" else 0.1)


def test_progress_after_growth_follows_the_formula():
    schedule = Schedule(totals=[(0, 100)]).grow(60, 160)
    assert schedule.progress(60) == pytest.approx(0.6)
    assert schedule.progress(110) == pytest.approx(0.6 + 0.4 * (110 - 60) / (160 - 60))


def test_growth_during_warm_up_is_the_plain_schedule_of_the_new_total():
    grown = Schedule(totals=[(0, 100)], warmup_steps=20).grow(7, 300)
    assert curve(grown) == pytest.approx(curve(Schedule(totals=[(0, 300)], warmup_steps=20)))


def test_growing_again_in_the_same_step_counts_once():
    schedule = Schedule(totals=[(0, 100)])
    assert schedule.grow(0, 200).totals == ((0, 200),)
    assert schedule.grow(50, 200).grow(50, 300).totals == ((0, 100), (50, 300))
    assert schedule.grow(50, 100) is schedule


def test_growth_before_an_earlier_growth_is_refused():
    with pytest.raises(ValueError, match="step 50"):
        Schedule(totals=[(0, 100), (50, 200)]).grow(49, 300)


def test_a_finished_run_that_grows_goes_on_at_the_minimum():
    assert Schedule(totals=[(0, 100)]).grow(100, 200).factor(150) == pytest.approx(0.1)


def test_fewer_steps_than_expected_make_the_curve_steeper_without_a_jump():
    schedule = Schedule(totals=[(0, 100)], shape="linear", min_ratio=0).grow(50, 60)
    assert [schedule.factor(t) for t in (50, 55, 60)] == pytest.approx([0.5, 0.25, 0])


def test_the_published_warm_up_share_gives_the_published_steps():
    assert warmup_steps(0.025, 138_888) == 3_472
    assert warmup_steps(0, 10) == 0
    assert warmup_steps(0.29, 100) == 29  # 0.29 * 100 is 28.999999999999996


def test_the_budget_of_the_published_gate_learning_rates_comes_out():
    """Nanotron's exp53: peak 1.5e-4, cosine to 3.75e-6, warm-up 5,000 of 50,000 steps; and its 10,000-step form."""
    published = {"warmup_steps": 5000, "min_ratio": 3.75e-6 / 1.5e-4}
    assert Schedule(totals=[(0, 50_000)], **published).budget(1.5e-4) == pytest.approx(3.8, abs=0.05)
    assert Schedule(totals=[(0, 10_000)], **published).budget(1.5e-4) == pytest.approx(0.8, abs=0.05)


def test_the_budget_is_the_sum_of_the_learning_rates_that_are_left():
    schedule = Schedule(totals=[(0, 100), (30, 150)], warmup_steps=10)
    assert schedule.budget(2.0) == pytest.approx(2 * sum(curve(schedule)[:150]))
    assert schedule.budget(2.0, start=149) == pytest.approx(2 * schedule.factor(149))
    assert schedule.budget(2.0, start=150) == 0


@pytest.mark.parametrize(
    "settings",
    [
        {"totals": []},
        {"totals": [(1, 10)]},
        {"totals": [(0, 10), (5, 20), (5, 30)]},
        {"shape": "square"},
        {"warmup_steps": -1},
        {"min_ratio": 1.1},
        {"min_ratio": -0.1},
        {"decay_share": 0.0},
    ],
)
def test_an_impossible_schedule_is_refused(settings):
    with pytest.raises(ValueError, match=next(iter(settings))):
        Schedule(**{"totals": [(0, 10)], **settings})
