"""What one rank of a training meets -> what all its ranks do.

Lightning prepares the data on one process of a node while the others wait, for days if need be. A failure there, or
in `setup` on any rank, is told to all before anybody goes on: all end at once with the same words and the same status.
"""

import functools
from collections.abc import Callable

import torch.distributed as dist
from lightning import LightningDataModule, Trainer
from lightning.fabric.plugins.environments import LightningEnvironment

from packhorse.errors import RankError


def share_of(trainer: Trainer | None) -> tuple[int, int]:
    """Rank and number of all processes: those of a Trainer, or of a loop of one's own."""
    if trainer is not None:
        return trainer.global_rank, trainer.world_size
    return (dist.get_rank(), dist.get_world_size()) if dist.is_available() and dist.is_initialized() else (0, 1)


def keep_failure(prepare_data: Callable[..., None]) -> Callable[..., None]:
    """Let `prepare_data` fail only in `setup`, when the other ranks no longer wait for it."""

    @functools.wraps(prepare_data)
    def kept(self: LightningDataModule) -> None:
        self._failure = None
        try:
            prepare_data(self)
        except Exception as error:
            if not _is_one_of_many(self.trainer):
                raise
            self._failure = error

    return kept


def share_failure(setup: Callable[..., None]) -> Callable[..., None]:
    """Let `setup` fail on all ranks if it, or `prepare_data`, fails on one.

    Raises:
        RankError: this rank is well, another is not; the message says what that one met.
    """

    @functools.wraps(setup)
    def shared(self: LightningDataModule, stage: str) -> None:
        if not _is_one_of_many(self.trainer):
            return setup(self, stage)
        _raise_together(getattr(self, "_failure", None))
        failure = None
        try:
            setup(self, stage)
        except Exception as error:
            failure = error
        _raise_together(failure)

    return shared


def _raise_together(own: Exception | None) -> None:
    """Raise what this or another rank met; all ranks come here."""
    failures: list[str | None] = [None] * dist.get_world_size()
    dist.all_gather_object(failures, own and f"{type(own).__name__}: {own}")
    if own is not None:
        own.is_shared = True
        raise own
    for rank, failure in enumerate(failures):
        if failure is not None:
            raise RankError(f"Process {rank} of the training failed.\n{failure}")


def is_watched(trainer: Trainer) -> bool:
    """Whether Lightning started this process from the first one, which it kills as soon as this one fails."""
    environment = getattr(trainer.strategy, "cluster_environment", None)
    return isinstance(environment, LightningEnvironment) and trainer.local_rank > 0


def _is_one_of_many(trainer: Trainer | None) -> bool:
    return trainer is not None and trainer.world_size > 1 and dist.is_initialized()
