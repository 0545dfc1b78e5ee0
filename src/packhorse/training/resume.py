"""A checkpoint's data state, and the caches as they are now -> how the run goes on; and Lightning's counters to match.

Lightning restores the counters that it happened to have when the checkpoint was written: in the middle of an
accumulation, before or after the end of an epoch, depending on the hook that saved. We set them to what the completed
optimizer steps imply, so that every checkpoint of a step continues alike.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from lightning import Trainer
from lightning.pytorch.loops.loop import _Loop

from packhorse.cache import Cache
from packhorse.errors import CheckpointError
from packhorse.training.caches import snapshots_of
from packhorse.training.plan import RunPlan
from packhorse.training.state import RunState, StageStart


@dataclass(frozen=True, kw_only=True)
class Change:
    """What is different since the checkpoint, or since the last growth."""

    step: int
    before: RunPlan
    after: RunPlan
    pinned: int = 0
    """Train sequences that are there, but left out by `on_growth: pin`."""

    def lines(self, learning_rate: float) -> list[str]:
        """For people; nothing if nothing changed."""
        before, after = self.before, self.after
        steps = f"steps {before.length} -> {after.length}"
        if before.steps == after.steps:
            steps = f"steps stay {after.length}" + (f" (`{after.fixed_by}`)" if after.fixed_by else "")
        rest = f"{steps}; now at step {self.step:,}; learning rate goes on from {learning_rate:.2g}"
        lines = []
        if before.sequences != after.sequences:
            waits = any(
                cache.history[-1][0] > taken for cache, taken in zip(after.state.caches, self._taken, strict=True)
            )
            lines.append(
                f"dataset expanded: {before.sequences:,} -> {after.sequences:,} sequences; {rest}"
                + ("; what is new joins with the next epoch" if waits else "")
            )
        if before.global_batch != after.global_batch:
            lines.append(f"global batch changed: {before.global_batch:,} -> {after.global_batch:,} sequences; {rest}")
        if not lines and before.steps != after.steps:
            lines.append(f"run changed: {rest}")
        if self.pinned:
            lines.append(
                f"dataset pinned: the cache has grown by {self.pinned:,} sequences, which this run leaves out "
                "(`on_growth: pin`)"
            )
        return lines

    @property
    def _taken(self) -> list[int]:
        return self.after.state.order.taken(self.after.state.position(self.step))


def continue_run(
    state: RunState,
    step: int,
    caches: Mapping[str, Cache],
    starts: Sequence[StageStart],
    *,
    global_batch: int,
    skips: Sequence[tuple[int, int]] | None,
) -> RunState:
    """The state in which a run goes on.

    Args:
        state: Of the checkpoint.
        step: Completed steps of the checkpoint.
        caches: As they are used from now on.
        starts: The stages that the settings ask for.
        global_batch: From now on.
        skips: Steps whose data are left out; None for those that the checkpoint remembers.

    Raises:
        SnapshotMismatch: A cache is not the one of the checkpoint, or shrank.
        SettingsError: A step that shall be skipped is done.
    """
    if len(caches) == len(state.caches) == 1:  # another name for the same thing
        state = replace(state, caches=(replace(state.caches[0], name=next(iter(caches))),))
    # Steps to leave out are of the log so far, so they are counted before anything changes.
    state = state.with_skips(skips, step).with_batch(step, global_batch)
    for name, cache in caches.items():
        state = state.with_snapshot(snapshots_of(name, cache), step)
    return state.with_stages(starts, step)


def align_loops(trainer: Trainer, plan: RunPlan) -> None:
    """Set Lightning's counters to what the completed optimizer steps imply, wherever the checkpoint was written.

    Raises:
        CheckpointError: Lightning's counters are not as we know them.
    """
    step, accumulation = trainer.global_step, trainer.accumulate_grad_batches
    epoch, first, end = plan.epoch_at(step)
    is_inside = first < step
    done = min(step, end) - first
    fit_loop, epoch_loop = trainer.fit_loop, trainer.fit_loop.epoch_loop
    try:
        _set(fit_loop.epoch_progress.total, epoch, begun=epoch + is_inside)
        _set(fit_loop.epoch_progress.current, epoch, begun=epoch + is_inside)
        _set(epoch_loop.batch_progress.total, step * accumulation)
        _set(epoch_loop.batch_progress.current, done * accumulation)
        epoch_loop.batch_progress.is_last_batch = False
        steps = epoch_loop.automatic_optimization.optim_progress.optimizer.step
        _set(steps.current, done)
        steps.total.ready = steps.total.completed
        _set(epoch_loop.scheduler_progress.total, step)
        _set(epoch_loop.scheduler_progress.current, done)
        epoch_loop.val_loop.batch_progress.reset()
        epoch_loop._batches_that_stepped = step
        # Lightning would take an epoch that has not begun for one that was interrupted, if `max_steps` is set.
        _Loop.restarting.fset(fit_loop, is_inside)
    except AttributeError as error:  # pragma: no cover (another version of Lightning)
        raise CheckpointError(f"This version of Lightning counts in another way: {error}.") from error


def _set(tracker, count: int, begun: int | None = None) -> None:
    """Set one of Lightning's counters: so many are done, and perhaps one more has begun."""
    for name in ("ready", "started"):
        if hasattr(tracker, name):
            setattr(tracker, name, count if begun is None else begun)
    for name in ("processed", "completed"):
        if hasattr(tracker, name):
            setattr(tracker, name, count)
