r"""Optimizer step -> factor of the peak learning rate.

A straight warm-up, then a shape over the progress p, which runs from 0 after warm-up to 1 at the run's last step:

    cosine     1 -> min_ratio along half a cosine
    linear     1 -> min_ratio
    wsd        1 until the last `decay_share`, then linear -> min_ratio (warm-up, stable, decay)
    constant   1

Promises: a pure function of the step and of a few integers, so a resumed run continues the very same curve. When the
number of steps changes, because the data set grew, the curve goes on from where it is, only slower: no jump, never a
rise, no second warm-up. With T = 100 that becomes 160 in step 60:

    p    0 ------ 0.6 - - 1        before growth: p = t / 100
                    \----------- 1   after: p = 0.6 + 0.4 (t - 60) / (160 - 60)
    step 0        60    100      160
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal


@dataclass(frozen=True, kw_only=True)
class Schedule:
    """The learning rate of a run as a factor of its peak."""

    totals: Sequence[tuple[int, int]]
    """(step, the run's total as known from that step on, 0 if nothing ends it), oldest first; the first step is 0.
    This is the state."""
    warmup_steps: int = 0
    """Frozen at the first run: a larger data set must not put a warm run back into warm-up."""
    shape: Literal["cosine", "linear", "constant", "wsd"] = "cosine"
    min_ratio: float = 0.1
    """The factor at the end of the run."""
    decay_share: float = 0.2
    """wsd only: the share of the progress in which the learning rate falls."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "totals", tuple((int(step), int(total)) for step, total in self.totals))
        steps = [step for step, _ in self.totals]
        if steps[:1] != [0] or steps != sorted(set(steps)):
            raise ValueError(
                f"totals must be (step, total) pairs with rising steps from 0 on; got {list(self.totals)}."
            )
        if self.shape not in _SHAPES:
            raise ValueError(f"shape must be one of {', '.join(_SHAPES)}; got {self.shape!r}.")
        if self.warmup_steps < 0:
            raise ValueError(f"warmup_steps must not be negative; got {self.warmup_steps}.")
        if not 0 <= self.min_ratio <= 1:
            raise ValueError(f"min_ratio is a share of the peak learning rate, in [0, 1]; got {self.min_ratio}.")
        if not 0 < self.decay_share <= 1:
            raise ValueError(f"decay_share must lie in (0, 1]; got {self.decay_share}.")

    @property
    def total(self) -> int:
        """The number of steps as known now."""
        return self.totals[-1][1]

    def factor(self, step: int) -> float:
        """Factor for the update that leads from `step` to `step + 1`.

        The first update has 1 / warmup_steps, not 0: an update without effect would waste its batch.
        """
        if step < self.warmup_steps:
            return (step + 1) / self.warmup_steps
        return _SHAPES[self.shape](self, self.progress(step))

    def progress(self, step: int) -> float:
        """How much of the way after warm-up lies behind, in [0, 1]; without an end there is no way."""
        progress, done = 0.0, self.warmup_steps
        ends = [changed for changed, _ in self.totals[1:]] + [step]
        for (_, total), end in zip(self.totals, ends, strict=True):
            end = min(end, step)
            if end > done:
                share = (end - done) / (total - done) if total > done else float(total > 0)
                progress += (1 - progress) * min(share, 1.0)
                done = end
        return progress

    def grow(self, step: int, total: int) -> "Schedule":
        """The same schedule when the run turns out in `step` to have `total` steps (more or, harmlessly, fewer)."""
        if step < self.totals[-1][0]:
            raise ValueError(
                f"The schedule was already changed in step {self.totals[-1][0]}, after step {step}. "
                "A run resumed from an earlier checkpoint needs the totals of that checkpoint."
            )
        if total == self.total:
            return self
        kept = tuple(entry for entry in self.totals if entry[0] < step)
        return replace(self, totals=(*kept, (step, total)))

    def to_dict(self) -> dict[str, Any]:
        """What a checkpoint keeps: the rest is settings."""
        return {"totals": [list(entry) for entry in self.totals], "warmup_steps": self.warmup_steps}

    def budget(self, peak: float, start: int = 0) -> float:
        """The sum of the learning rates from step `start` on: the farthest a parameter can travel.

        Adam moves a parameter by about its learning rate per step and not more. A gate that must travel from 0 to 4
        (sigmoid 0.98) and has a budget of 0.8 will never get there, whatever the data. Costs a microsecond per step.
        """
        return peak * math.fsum(map(self.factor, range(start, self.total)))


@dataclass(frozen=True, kw_only=True)
class ScheduleSettings:
    """How the learning rate goes over the run."""

    shape: Literal["cosine", "linear", "constant", "wsd"] = "cosine"
    """After warm-up; `wsd` stays at the peak and falls at the end."""
    warmup_ratio: float = 0.025
    """Warm-up as a share of the run's steps; over the full data set, if `data.full_dataset_sequences` says its size.
    Fixed at the first run."""
    warmup_steps: int | None = None
    """Warm-up in steps, instead of the share."""
    min_ratio: float = 0.1
    """Learning rate at the end, as a share of the peak."""
    decay_share: float = 0.2
    """wsd only: the share of the run in which the learning rate falls."""

    def __post_init__(self) -> None:
        if not 0 <= self.warmup_ratio <= 1:
            raise ValueError(f"warmup_ratio is a share of the run's steps, in [0, 1]; got {self.warmup_ratio}.")
        self.make(1)  # refuses the rest, before hours of building

    def make(self, total: int, full_total: int | None = None) -> Schedule:
        """The schedule of a new run of `total` steps, `full_total` if the data set were complete."""
        warm = warmup_steps(self.warmup_ratio, full_total or total)
        return self.restore({"totals": [(0, total)], "warmup_steps": warm})

    def restore(self, state: dict[str, Any]) -> Schedule:
        """The schedule of a run that goes on; what the settings say of its shape counts from now on."""
        return Schedule(
            totals=tuple(state["totals"]),
            warmup_steps=state["warmup_steps"] if self.warmup_steps is None else self.warmup_steps,
            shape=self.shape,
            min_ratio=self.min_ratio,
            decay_share=self.decay_share,
        )


def set_learning_rates(trainer: Any, peaks: Sequence[float]) -> None:
    """Put the learning rates of the next step into the optimizer and its LambdaLR.

    A checkpoint brings back those of the run that wrote it: its peaks, and its schedule before any growth.
    """
    (optimizer,), (config,) = trainer.optimizers, trainer.lr_scheduler_configs
    scheduler, step = config.scheduler, trainer.global_step
    scheduler.last_epoch, scheduler.base_lrs = step, list(peaks)
    for group, peak, factor in zip(optimizer.param_groups, peaks, scheduler.lr_lambdas, strict=True):
        group["initial_lr"], group["lr"] = peak, peak * factor(step)
    scheduler._last_lr = [group["lr"] for group in optimizer.param_groups]


def warmup_steps(ratio: float, total: int) -> int:
    """Warm-up as a share of the full data set's steps, to the nearest step."""
    return round(ratio * total)


def _cosine(schedule: Schedule, progress: float) -> float:
    return schedule.min_ratio + (1 - schedule.min_ratio) * 0.5 * (1 + math.cos(math.pi * progress))


def _linear(schedule: Schedule, progress: float) -> float:
    return 1 - (1 - schedule.min_ratio) * progress


def _constant(schedule: Schedule, progress: float) -> float:
    return 1.0


def _wsd(schedule: Schedule, progress: float) -> float:
    return _linear(schedule, max(0.0, 1 - (1 - progress) / schedule.decay_share))


_SHAPES = {"cosine": _cosine, "linear": _linear, "constant": _constant, "wsd": _wsd}
