"""Laws of the gates' budget: what a run cannot reach is told before it begins."""

import pytest
import torch

from packhorse.models import InfiniAttentionConfig
from packhorse.training.gate_budget import gate_budget, gate_schedule
from packhorse.training.schedule import Schedule
from packhorse.training.telling import gate_lines

PEAK, GATE_PEAK = 3.75e-5, 1.5e-4
HARD = InfiniAttentionConfig(balance_act_type="hard_sigmoid")


def schedule_of(steps: int, gate_peak: float = GATE_PEAK) -> Schedule:
    return gate_schedule(Schedule(totals=((0, steps),), warmup_steps=5_000), PEAK, gate_peak)


class Module:
    """What `gate_lines` asks of a LanguageModule."""

    infini_attention, balance_factor_lr = HARD, GATE_PEAK

    def __init__(self, steps: int, **settings) -> None:
        self.gate_schedule = schedule_of(steps)
        vars(self).update(settings)


@pytest.mark.parametrize(("steps", "budget"), [(50_000, 3.8), (10_000, 0.8)])
def test_the_budget_is_the_sum_of_the_gates_learning_rates(steps, budget):
    schedule = schedule_of(steps)
    allowed = gate_budget(HARD, schedule, GATE_PEAK)
    assert allowed.budget == pytest.approx(sum(GATE_PEAK * schedule.factor(step) for step in range(steps)))
    assert round(allowed.budget, 1) == budget


def test_gates_fall_to_the_learning_rate_that_everything_else_falls_to():
    assert GATE_PEAK * schedule_of(50_000).factor(50_000) == pytest.approx(PEAK / 10)
    assert schedule_of(50_000, gate_peak=1e-6).factor(50_000) == 1.0, "a floor is no reason to rise"
    assert schedule_of(50_000, gate_peak=0.0).factor(50_000) == 1.0


def test_a_run_whose_gates_can_open_and_close_says_how_far_they_can_move():
    (line,) = gate_lines(Module(50_000))
    assert "move by 3.8 at most, to shares of the memory from 0.00 to 1.00" in line


def test_a_run_whose_gates_can_neither_open_nor_close_says_so_once_in_its_plan(recwarn):
    far, advice = gate_lines(Module(10_000))
    assert "0.8 at most, to shares of the memory from 0.35 to 0.65" in far
    assert "can neither close nor open" in advice
    assert "Raise `balance_factor_lr`" in advice
    assert not recwarn.list


@pytest.mark.parametrize(
    ("settings", "least", "most"),
    [
        ({"balance_init_type": "constant", "balance_init_value": -4.0}, 0.003, 0.15),
        ({"balance_act_type": "orig_tanh"}, 0.0, 0.97),
        ({"balance_init_type": "randn", "balance_act_type": "tanh_abs"}, 0.0, 0.97),
    ],
)
def test_what_is_within_reach_depends_on_start_and_activation(settings, least, most):
    constant = Schedule(totals=((0, 100),), shape="constant")
    allowed = gate_budget(InfiniAttentionConfig(**settings), constant, peak=0.0225)
    assert allowed.least == pytest.approx(least, abs=0.01)
    assert allowed.most == pytest.approx(most, abs=0.01)


def test_gates_that_start_closed_and_cannot_open_are_told_so():
    settings = InfiniAttentionConfig(balance_init_type="constant", balance_init_value=-4.0)
    assert "cannot open" in gate_lines(Module(10_000, infini_attention=settings))[1]


def test_adam_moves_no_gate_farther_than_its_budget():
    gate = torch.nn.Parameter(torch.zeros(1))
    schedule = Schedule(totals=((0, 200),), warmup_steps=20)
    optimizer = torch.optim.AdamW([gate], lr=0.01, betas=(0.9, 0.95), weight_decay=0.0)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, schedule.factor)
    for _ in range(200):
        gate.grad = torch.ones(1)
        optimizer.step()
        scheduler.step()
    assert abs(gate.item()) == pytest.approx(gate_budget(InfiniAttentionConfig(), schedule, 0.01).budget, rel=1e-3)


def test_without_memory_there_is_no_budget_to_tell():
    assert gate_lines(Module(10, infini_attention=InfiniAttentionConfig(turn_on_memory=False))) == []
