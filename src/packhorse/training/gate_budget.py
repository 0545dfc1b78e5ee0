"""Schedule and gate settings -> how far a gate can travel, and whether that is far enough.

An Adam step moves a parameter by about its learning rate and not more, so the sum of a run's learning rates is the
farthest that a gate can get. A gate is closed below a share of 0.1 of the memory and open above 0.9. Runs have failed
because no gate could ever become either: with a budget of 0.03 every gate stays at one half, whatever the data.
"""

from dataclasses import dataclass, replace

import torch

from packhorse.models import InfiniAttentionConfig
from packhorse.models.gates import activate_gate
from packhorse.training.schedule import Schedule

CLOSED, OPEN = 0.1, 0.9


@dataclass(frozen=True)
class GateBudget:
    """The farthest that gates can travel in a run."""

    budget: float
    """The sum of their learning rates."""
    least: float
    """The smallest share of memory within reach."""
    most: float
    """The largest."""

    @property
    def suffices(self) -> bool:
        """Whether a gate can close and open, if all its gradients agree."""
        return self.least <= CLOSED and self.most >= OPEN

    def __str__(self) -> str:
        far = f"{self.budget:.1f}" if self.budget >= 0.1 else f"{self.budget:.1g}"
        return f"can move by {far} at most, to shares of the memory from {self.least:.2f} to {self.most:.2f}"

    def advice(self) -> str:
        """What to do about a budget that does not suffice."""
        stuck = [word for word, lacks in (("close", self.least > CLOSED), ("open", self.most < OPEN)) if lacks]
        what = "can neither close nor open" if len(stuck) == 2 else f"cannot {stuck[0]}"
        return (
            f"With so small a sum of learning rates they {what} (below {CLOSED}, above {OPEN}), and the memory is "
            "never told from none. Raise `balance_factor_lr`, train for more steps, or start the gates elsewhere "
            "(`balance_init_type: constant`)."
        )


def gate_schedule(schedule: Schedule, peak: float, gate_peak: float) -> Schedule:
    """The gates' share of a run's schedule: its warm-up and shape, down to the same learning rate as everything else.

    Args:
        schedule: Of the run.
        peak: Peak learning rate of everything else.
        gate_peak: The gates' own.
    """
    floor = schedule.min_ratio * peak
    return replace(schedule, min_ratio=min(floor / gate_peak, 1.0) if gate_peak else 1.0)


def gate_budget(settings: InfiniAttentionConfig, schedule: Schedule, peak: float) -> GateBudget:
    """What a whole run allows its gates.

    Args:
        settings: Where gates start (randn is taken as its mean, 0) and their activation.
        schedule: The gates', of the whole run.
        peak: Their peak learning rate.
    """
    budget = schedule.budget(peak)
    start = settings.balance_init_value
    share = activate_gate(torch.linspace(start - budget, start + budget, 10_001), settings.balance_act_type).abs()
    return GateBudget(budget, float(share.min()), float(share.max()))
