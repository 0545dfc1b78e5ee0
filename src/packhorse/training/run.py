"""Trainer, settings and open caches -> a run: what of the data it has used, how long it is, and how it grows."""

from typing import Any

from lightning import Trainer

from packhorse.cache import Cache, DataSettings
from packhorse.errors import SettingsError
from packhorse.training.caches import pin_caches, snapshots_of, stage_starts
from packhorse.training.plan import RunPlan
from packhorse.training.resume import Change, continue_run
from packhorse.training.state import RunState, begin_run


class Run:
    """One run of a Trainer over some caches.

    Args:
        trainer: What trains; its limits, devices and accumulation count.
        settings: The `data:` group.
        caches: The open caches by name; it is changed when they grow or are pinned.

    Raises:
        SettingsError: The limits of the Trainer or the size of the data make no run.
    """

    def __init__(self, trainer: Trainer, settings: DataSettings, caches: dict[str, Cache]) -> None:
        self._trainer, self._settings, self._caches = trainer, settings, caches
        self.change: Change | None = None
        """What is different since the checkpoint that the run goes on from, or since it last grew."""
        snapshots = [snapshots_of(name, cache) for name, cache in caches.items()]
        self._follow(begin_run(snapshots, stage_starts(settings), seed=settings.seed, **self._share))
        self._check_plan()

    def resume(self, state: RunState, step: int) -> None:
        """Go on in a step of a run, with the caches and the Trainer as they are now.

        Raises:
            SnapshotMismatch: A cache is not the one of the checkpoint, or shrank.
            SettingsError: A step that shall be skipped is done.
        """
        there, before = self._sequences, self._plan_of(state)
        if self._settings.on_growth == "pin":
            self._caches.update(pin_caches(self._caches, state))
        self._follow(continue_run(state, step, self._caches, stage_starts(self._settings), **self._share))
        self._check_plan()
        pinned = there - self._sequences
        self.change = Change(step=step, before=before, after=self.plan, pinned=pinned)

    def take_up(self, chunks: dict[str, int], step: int) -> bool:
        """Go on with so many chunks of each cache, if that is more; whether it is."""
        state, before = self.state, self.plan
        for name, count in chunks.items():
            if count > self._caches[name].snapshot.num_chunks:
                self._caches[name] = Cache(self._caches[name].folder, count)
                state = state.with_snapshot(snapshots_of(name, self._caches[name]), step)
        if state is self.state:
            return False
        self._follow(state)
        self.change = Change(step=step, before=before, after=self.plan)
        return True

    def _follow(self, state: RunState) -> None:
        """Make the plan of the run as it is now, and let the Trainer end with it."""
        epoch_loop = self._trainer.fit_loop.epoch_loop
        if epoch_loop.max_steps != getattr(epoch_loop, "packhorse_max_steps", None):
            epoch_loop.packhorse_users_max_steps = epoch_loop.max_steps  # what we set below must not be taken for it
        self.state, self.plan = state, self._plan_of(state)
        is_ours = self.plan.fixed_by == "max_train_tokens"
        epoch_loop.max_steps = self.plan.steps if is_ours else epoch_loop.packhorse_users_max_steps
        epoch_loop.packhorse_max_steps = epoch_loop.max_steps

    def _plan_of(self, state: RunState) -> RunPlan:
        trainer, max_steps = self._trainer, self._trainer.fit_loop.epoch_loop.packhorse_users_max_steps
        limit, accumulation = trainer.limit_train_batches, trainer.accumulate_grad_batches
        return RunPlan(
            state=state,
            sequence_length=next(iter(self._caches.values())).sequence_length,
            max_epochs=trainer.max_epochs if trainer.max_epochs is not None and trainer.max_epochs >= 0 else None,
            max_steps=None if max_steps == -1 else max_steps,
            max_train_tokens=self._settings.max_train_tokens,
            limit=-(-limit // accumulation) if isinstance(limit, int) else None,
        )

    @property
    def _share(self) -> dict[str, Any]:
        """What the size of a step and the settings say of the data."""
        batch = self._trainer.world_size * self._settings.micro_batch_size * self._trainer.accumulate_grad_batches
        return {"global_batch": batch, "skips": self._settings.skip_steps}

    @property
    def _sequences(self) -> int:
        return sum(cache.num_sequences("train") for cache in self._caches.values())

    def _check_plan(self) -> None:
        plan = self.plan
        if plan.state.order.only_cache is None and plan.fixed_by is None:
            raise SettingsError(
                "A mixture of caches has no length of its own.\nSet `trainer.max_steps` or `data.max_train_tokens`."
            )
        if plan.sequences < plan.global_batch:
            raise SettingsError(
                f"The cache has {plan.sequences:,} train sequences, fewer than one global batch "
                f"({plan.global_batch:,}).\nAdd text, or lower `micro_batch_size`, `accumulate_grad_batches` or "
                "`sequence_length`."
            )
