"""Positions in the order -> batches: what a loader draws, and what it reads for it."""

from collections.abc import Iterator

import numpy as np
import torch
from torch.utils.data import Dataset, Sampler

from packhorse.cache import Cache
from packhorse.training.batches import derive
from packhorse.training.order import TrainingOrder, micro_batch_positions


class Rows(Dataset):
    """Sequence numbers -> a batch.

    Args:
        cache: The open cache.
        split: `train` or `eval`.
    """

    def __init__(self, cache: Cache, split: str) -> None:
        self.cache, self.split = cache, split

    def __getitem__(self, numbers: np.ndarray) -> dict[str, torch.Tensor]:
        """int64 [B, T] each: input_ids, position_ids (restarting with every piece), labels (-100 for none)."""
        rows = self.cache.read(numbers, self.split)
        batch = derive(rows.tokens, rows.piece_lengths, rows.repeated)
        return {name: torch.from_numpy(array) for name, array in batch._asdict().items()}


class TrainSampler(Sampler):
    """The sequence numbers of each micro-batch of one rank, from an optimizer step on.

    Args:
        order: The global order of the run.
        step: Optimizer steps done.
        accumulation: Micro-batches in a step.
        micro_batch: Sequences in a micro-batch.
        rank: This process.
        world_size: All processes.
        length: Micro-batches in this Lightning epoch.
        done: How many of them were done before (after a resume; Lightning counts on from there).
    """

    def __init__(
        self,
        *,
        order: TrainingOrder,
        step: int,
        accumulation: int,
        micro_batch: int,
        rank: int,
        world_size: int,
        length: int,
        done: int = 0,
    ) -> None:
        self.order, self.step, self.length, self.done = order, step, length, done
        self._share = {"micro_batch": micro_batch, "world_size": world_size, "accumulation": accumulation}
        self._rank = rank

    def __len__(self) -> int:
        return self.length

    def __iter__(self) -> Iterator[np.ndarray]:
        accumulation = self._share["accumulation"]
        for index in range(self.length - self.done):
            step, part = divmod(index, accumulation)
            positions = micro_batch_positions(self.step + step, part, self._rank, **self._share)
            yield self.order.sequence_numbers(positions.start, len(positions))
