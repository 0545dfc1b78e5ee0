"""Sequences trained on -> (cache, sequence number): one order over several caches, stage by stage.

    trained -> position -> stage -> block, slot -> cache, how many of it came before -> its own TrainingOrder

A position is a place in the run's order; it is ahead of what was trained on by what was skipped. From the position at
which a stage begins, every 2,048 positions form a block that takes a fixed number from each cache, stirred. In small,
with blocks of 8 and shares 5 : 3 of the caches a and b:

    block        a b a a b a b a   b a a b a a b a   ...
    of cache a   0   1 2   3   4     5 6   7 8   9

Promises: each cache is taken in its own order, with its own epochs and its own growth, however often weights change;
O(1) memory; equal arguments give equal numbers for ever. One cache is the mixture with a single share.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

import numpy as np

from packhorse.errors import SettingsError
from packhorse.training.order import TrainingOrder
from packhorse.training.permutation import derive_key, permute

BLOCK = 2_048
"""Positions in which a mixture's weights hold exactly."""


@dataclass(frozen=True)
class RunOrder:
    """The order of a run over its caches."""

    orders: tuple[TrainingOrder, ...]
    """Of each cache."""
    stages: tuple[tuple[int, tuple[int, ...]], ...]
    """(position at which it begins, positions per block for each cache), oldest first; the first begins at 0."""
    skips: tuple[tuple[int, int], ...] = ()
    """(position, how many from there on are left out), in order and apart from each other."""

    def __post_init__(self) -> None:
        starts = [start for start, _ in self.stages]
        if starts[:1] != [0] or starts != sorted(set(starts)):
            raise ValueError(f"Stages begin one after the other, the first at position 0; got {starts}.")
        for _, shares in self.stages:
            if len(shares) != len(self.orders) or min(shares) < 0 or sum(shares) != BLOCK:
                raise ValueError(f"A stage has a share of {BLOCK} for each of {len(self.orders)} caches; got {shares}.")
        end = 0
        for position, count in self.skips:
            if position < end or count < 1:
                raise ValueError(f"What is skipped must be apart and in order; got {list(self.skips)}.")
            end = position + count

    def sequence_numbers(self, start: int, count: int) -> np.ndarray:
        """The next `count` (cache, sequence number), int64 [count, 2], after the first `start` of the run."""
        parts = [self._take(position, length) for position, length in self.pieces(start, count)]
        return np.concatenate([np.empty((0, 2), np.int64), *parts])

    def pieces(self, start: int, count: int) -> Iterator[tuple[int, int]]:
        """Where those lie: (position, how many from there on), each in one stage and without anything left out."""
        while count > 0:
            position = self.position(start)
            length = min(count, *(end - position for end in self._borders if end > position), count)
            yield position, length
            start, count = start + length, count - length

    def position(self, trained: int) -> int:
        """Where in the order the next sequence lies."""
        for skipped, count in self.skips:
            trained += count if trained >= skipped else 0
        return trained

    def trained_at(self, position: int) -> int:
        """How many sequences are trained on before this position."""
        return position - sum(min(count, max(0, position - skipped)) for skipped, count in self.skips)

    def taken(self, position: int) -> list[int]:
        """How many sequences of each cache, skipped ones among them, come before a position."""
        counts = np.zeros(len(self.orders), np.int64)
        ends = [start for start, _ in self.stages[1:]] + [position]
        for (start, shares), end in zip(self.stages, ends, strict=True):
            blocks, rest = divmod(max(0, min(end, position) - start), BLOCK)
            counts += blocks * np.array(shares)
            if rest:
                counts += np.bincount(self._slots(start, shares, blocks)[:rest], minlength=len(shares))
        return counts.tolist()

    def grow(self, cache: int, num_sequences: int, position: int) -> "RunOrder":
        """The same run after a cache has grown."""
        orders = list(self.orders)
        orders[cache] = orders[cache].grow(num_sequences, self.taken(position)[cache])
        return replace(self, orders=tuple(orders))

    @property
    def only_cache(self) -> int | None:
        """The number of the cache, if all positions are of one."""
        used = {number for _, shares in self.stages for number, share in enumerate(shares) if share}
        return used.pop() if len(used) == 1 else None

    @property
    def _borders(self) -> list[int]:
        """Positions before which a contiguous piece ends."""
        return [start for start, _ in self.stages] + [position for position, _ in self.skips]

    def _take(self, position: int, count: int) -> np.ndarray:
        """A piece that lies in one stage and leaves nothing out."""
        slots = np.concatenate([np.empty(0, np.int64), *self._slots_between(position, position + count)])
        before, out = self.taken(position), np.empty((count, 2), np.int64)
        out[:, 0] = slots
        for cache in np.unique(slots).tolist():
            mine = slots == cache
            out[mine, 1] = self.orders[cache].sequence_numbers(before[cache], int(mine.sum()))
        return out

    def _slots_between(self, position: int, end: int) -> Iterator[np.ndarray]:
        start, shares = next(stage for stage in reversed(self.stages) if stage[0] <= position)
        while position < end:
            block, slot = divmod(position - start, BLOCK)
            length = min(BLOCK - slot, end - position)
            yield self._slots(start, shares, block)[slot : slot + length]
            position += length

    def _slots(self, start: int, shares: tuple[int, ...], block: int) -> np.ndarray:
        # With one cache there is nothing to stir.
        return _stir(0 if max(shares) == BLOCK else derive_key(self.orders[0].seed, start, block), shares)


def shares_of(weights: Sequence[float]) -> tuple[int, ...]:
    """How many of the 2,048 positions of a block each weight gets: largest remainders first, and at least one.

    Raises:
        SettingsError: a weight is negative or not finite, all are 0, or there are more than 2,048.
    """
    weight = np.asarray(weights, np.float64)
    if not (np.isfinite(weight).all() and (weight >= 0).all() and weight.sum() > 0 and len(weight) <= BLOCK):
        raise SettingsError(f"Weights, at most {BLOCK:,}, must be 0 or more and not all 0; got {list(weights)}.")
    exact = weight / weight.sum() * BLOCK
    shares = np.where(weight > 0, np.maximum(np.floor(exact), 1), 0).astype(np.int64)
    while shares.sum() != BLOCK:
        sign = 1 if shares.sum() < BLOCK else -1
        may_change = (weight > 0) & (shares + sign > 0)
        shares[np.argmax(np.where(may_change, sign * (exact - shares), -np.inf))] += sign
    return tuple(shares.tolist())


@lru_cache(maxsize=64)
def _stir(key: int, shares: tuple[int, ...]) -> np.ndarray:
    slots = np.repeat(np.arange(len(shares)), shares)
    return slots if max(shares) == BLOCK else slots[permute(np.arange(BLOCK), BLOCK, key).astype(np.int64)]
