"""Positions in the order -> batches: what a loader draws, and what it reads for it."""

import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset, Sampler

from packhorse.cache import Cache
from packhorse.training.batches import IGNORE_INDEX, derive
from packhorse.training.mixture import RunOrder
from packhorse.training.order import micro_batch_positions

LOOK_AHEAD = 4_096
"""Positions that are looked up at once: after several growths a single one costs twenty times as much."""


FILLER = -1
"""The number of a sequence that only keeps the ranks in step: none of its labels counts."""


def share_out(numbers: np.ndarray, rank: int, world_size: int, micro_batch: int) -> list[np.ndarray]:
    """The micro-batches of one rank that evaluates; all ranks get as many, or they would wait for each other for ever.

    Args:
        numbers: int64 [n, 2] of (cache, sequence number), n > 0; where they run out, fillers take their place.
        rank: This process.
        world_size: All processes.
        micro_batch: Sequences in a micro-batch.
    """
    fillers = np.full((-len(numbers) % world_size, 2), FILLER)
    fillers[:, 0] = numbers[0, 0]
    mine = np.concatenate([numbers, fillers])[rank::world_size]
    return [mine[start : start + micro_batch] for start in range(0, len(mine), micro_batch)]


class Rows(Dataset):
    """Sequence numbers -> a batch.

    Args:
        caches: The open caches by their number in the run's order.
        split: `train` or `eval`.
    """

    def __init__(self, caches: Mapping[int, Cache], split: str) -> None:
        self.caches, self.split = caches, split
        self.seconds = 0.0
        """Time spent in reading."""

    def __getitem__(self, numbers: np.ndarray) -> dict[str, torch.Tensor]:
        """A batch of these sequences: int64 [n, 2] of (cache, sequence number or `FILLER`), or [n] of the first cache.

        Returns:
            int64 [B, T] each: input_ids, position_ids (restarting with every piece), labels (-100 for none).
        """
        start = time.monotonic()
        numbers = np.asarray(numbers)
        if numbers.ndim == 1:
            numbers = np.stack([np.full_like(numbers, next(iter(self.caches))), numbers], axis=1)
        parts = {cache: numbers[:, 0] == cache for cache in np.unique(numbers[:, 0]).tolist()}
        read = {cache: self._read(cache, np.maximum(numbers[mine, 1], 0)) for cache, mine in parts.items()}
        (batch, *others) = read.values()
        if others:
            batch = {name: np.empty((len(numbers), array.shape[1]), array.dtype) for name, array in batch.items()}
            for cache, mine in parts.items():
                for name in batch:
                    batch[name][mine] = read[cache][name]
        batch["labels"][numbers[:, 1] == FILLER] = IGNORE_INDEX
        self.seconds += time.monotonic() - start
        return {name: torch.from_numpy(array) for name, array in batch.items()}

    def _read(self, cache: int, numbers: np.ndarray) -> dict[str, np.ndarray]:
        rows = self.caches[cache].read(numbers, self.split)
        return derive(rows.tokens, rows.piece_lengths, rows.repeated)._asdict()


def for_transformers(batch: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """A batch with each label at its own token, as models of transformers take them, not at the token before."""
    labels = torch.full_like(batch["labels"], IGNORE_INDEX)
    labels[:, 1:] = batch["labels"][:, :-1]
    return {**batch, "labels": labels}


class TrainLoader(DataLoader):
    """A loader that Lightning knows to be resumable: where it goes on is the run's to know, see `RunState`."""

    def state_dict(self) -> dict[str, Any]:
        """Nothing: the sampler is made for the step in which a run goes on."""
        return {}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Nothing to load."""


class TrainSampler(Sampler):
    """The sequence numbers of each micro-batch of one rank, from an optimizer step on.

    Args:
        order: The global order of the run, asked for when a step begins: it may have grown.
        trained: Sequences trained on before the first step.
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
        order: Callable[[], RunOrder],
        trained: int,
        accumulation: int,
        micro_batch: int,
        rank: int,
        world_size: int,
        length: int,
        done: int = 0,
    ) -> None:
        self.order, self.trained, self.length, self.done = order, trained, length, done
        self._share = {"micro_batch": micro_batch, "world_size": world_size, "accumulation": accumulation}
        self._rank = rank
        self._known: tuple[RunOrder | None, int, np.ndarray] = None, 0, np.empty((0, 2), np.int64)

    def __len__(self) -> int:
        return self.length

    def __iter__(self) -> Iterator[np.ndarray]:
        accumulation = self._share["accumulation"]
        index = 0
        while index < self.length - self.done:
            step, part = divmod(index, accumulation)
            if part == 0:
                order = self.order()
            positions = micro_batch_positions(step, part, self._rank, **self._share, consumed=self.trained)
            yield self._look_up(order, positions)
            index += 1

    def _look_up(self, order: RunOrder, positions: range) -> np.ndarray:
        known_order, first, numbers = self._known
        if order is not known_order or not first <= positions.start <= positions.stop <= first + len(numbers):
            first, numbers = positions.start, order.sequence_numbers(positions.start, max(len(positions), LOOK_AHEAD))
            self._known = order, first, numbers
        return numbers[positions.start - first : positions.stop - first]


class PassSampler(TrainSampler):
    """The same for a loop without a Trainer: iterated again, it goes on behind the last batch that was asked for.

    So a loop may be left at any batch. What the workers of a loader ask for ahead is passed over.
    """

    def __iter__(self) -> Iterator[np.ndarray]:
        for _ in range(self.length):
            numbers = self._look_up(
                self.order(), micro_batch_positions(0, 0, self._rank, **self._share, consumed=self.trained)
            )
            # Before the batch is given: a loop that is left there never comes back here.
            self.trained += self._share["micro_batch"] * self._share["world_size"]
            yield numbers
