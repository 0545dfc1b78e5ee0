"""Rows of long documents -> batches in which every lane reads one document after the other, row by row.

A memory that is carried from row to row (`packhorse.models.MemoryState`) wants the next row of a document at the same
place of the next batch. With 3 lanes and documents of 4, 2, 1, 3 and 2 rows, in a shuffled order:

    step       0   1   2   3
    lane 0    a0  a1  a2  a3
    lane 1    b0  b1  d0  d1
    lane 2    c0  e0  e1  e2

Promises: every row exactly once; a document's rows stand in one lane, in order, without a gap; the next document goes
to the lane that is free first, so lanes end at most one document apart. A pure function of lengths, lanes and seed: the
step is the whole state. Idle lanes at the end have row -1.
"""

import heapq
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from packhorse.training.permutation import derive_key, permute


@dataclass(frozen=True)
class LaneOrder:
    """Step of an epoch -> the row of every lane; call it with a step."""

    document_rows: Sequence[int]
    """Rows of each document, in the order of the rows: document i begins where the one before it ends."""
    lanes: int
    """Sequences of a batch. Each rank, and each micro-batch of a step, takes some lanes and keeps them."""
    seed: int
    epoch: int = 0

    def __post_init__(self) -> None:
        if self.lanes < 1 or not len(self.document_rows) or min(self.document_rows) < 1:
            raise ValueError(
                f"Lanes need at least one lane and documents of at least one row; got {self.lanes} lanes and "
                f"{len(self.document_rows)} documents."
            )

    def __len__(self) -> int:
        """Steps of an epoch."""
        return max(int(ends[-1]) if len(ends) else 0 for _, ends in self._lanes)

    def __call__(self, step: int) -> np.ndarray:
        """Row numbers, int64 [lanes]; -1 where a lane has come to its end."""
        if not 0 <= step < len(self):
            raise IndexError(f"There is no step {step} in an epoch of {len(self)}.")
        rows = np.full(self.lanes, -1, np.int64)
        for lane, (starts, ends) in enumerate(self._lanes):
            place = int(np.searchsorted(ends, step, side="right"))
            if place < len(ends):
                rows[lane] = starts[place] + step - (ends[place - 1] if place else 0)
        return rows

    @cached_property
    def _lanes(self) -> list[tuple[np.ndarray, np.ndarray]]:
        """For each lane: the first rows of its documents, and the steps at which they end."""
        lengths = np.asarray(self.document_rows, np.int64)
        first_rows = np.cumsum(lengths) - lengths
        order = permute(np.arange(len(lengths)), len(lengths), derive_key(self.seed, self.epoch)).astype(np.int64)
        free = [(0, lane) for lane in range(self.lanes)]
        starts: list[list[int]] = [[] for _ in range(self.lanes)]
        ends: list[list[int]] = [[] for _ in range(self.lanes)]
        for document in order:
            step, lane = heapq.heappop(free)
            starts[lane].append(int(first_rows[document]))
            ends[lane].append(step + int(lengths[document]))
            heapq.heappush(free, (ends[lane][-1], lane))
        return [(np.array(s, np.int64), np.array(e, np.int64)) for s, e in zip(starts, ends, strict=True)]
