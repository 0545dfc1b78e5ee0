"""Number of sequences consumed -> the next sequence numbers: the global order of training.

    consumed -> epoch, position -> window, offset -> group, place -> sequence number

Groups of 8,192 neighbouring sequences are permuted over the data set, then the sequences inside windows of 8 permuted
groups. In small, with groups of 2, windows of 2 groups and 9 sequences (the short last group may land anywhere):

    sequences    0 1 | 2 3 | 4 5 | 6 7 | 8
    groups       4 5 | 8 | 6 7 | 0 1 | 2 3
    windows     [4 5   8][6 7   0 1][2 3]
    the order    8 4 5    0 6 1 7    3 2

Promises: every sequence exactly once per epoch; a pass needs a group in one window only, so a bounded local copy is
enough; O(1) memory; nothing depends on ranks, workers, micro-batch size or accumulation, so a run goes on in the same
order on other devices; equal arguments give equal numbers for ever (golden test).

When the data set has grown, the rest of the epoch is a permutation of what was not yet seen plus what is new, and what
was seen keeps its place: nothing repeats, nothing is lost, however often it grows. The state is a handful of integers.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache

import numpy as np

from packhorse.training.permutation import derive_key, derive_keys, permute, unpermute


@dataclass(frozen=True)
class EpochOrder:
    """Position in one epoch -> sequence number; call it with an array of positions."""

    num_sequences: int
    """Sequences in the snapshot. Also the length of the epoch, whether it grew on the way or not."""
    seed: int
    epoch: int
    growths: tuple[tuple[int, int], ...] = ()
    """For each growth inside this epoch, oldest first: (num_sequences before it, positions consumed before it)."""
    group_sequences: int = 8192
    window_groups: int = 8

    def __post_init__(self) -> None:
        object.__setattr__(self, "growths", tuple((int(n), int(c)) for n, c in self.growths))  # JSON has only lists
        if min(self.num_sequences, self.group_sequences, self.window_groups) < 1:
            raise ValueError(f"An order needs at least one sequence, and groups and windows of at least one: {self}")
        sizes = [n for n, _ in self.growths] + [self.num_sequences]
        consumed = [0] + [c for _, c in self.growths]
        forwards = sizes == sorted(sizes) and consumed == sorted(consumed)
        if not forwards or any(c > n for n, c in self.growths):
            raise ValueError(
                f"A data set can only grow and be consumed forwards, but epoch {self.epoch} went through "
                f"(sequences, consumed) {list(self.growths)} to {self.num_sequences} sequences."
            )

    def __call__(self, positions: np.ndarray | Sequence[int]) -> np.ndarray:
        """Sequence numbers (int64) at these positions of the epoch, a one-dimensional array in [0, num_sequences)."""
        positions = np.atleast_1d(np.asarray(positions, np.int64))
        if positions.size and not 0 <= positions.min() <= positions.max() < self.num_sequences:
            raise IndexError(f"Positions {positions.min()} to {positions.max()} in an epoch of {self.num_sequences}.")
        return self._at(positions)

    def grow(self, num_sequences: int, consumed: int) -> "EpochOrder":
        """The same epoch over more sequences: its first `consumed` positions stay, the rest is shuffled anew."""
        return replace(self, num_sequences=num_sequences, growths=(*self.growths, (self.num_sequences, consumed)))

    def _at(self, positions: np.ndarray) -> np.ndarray:
        if self._before is None:
            return self._draw(positions)
        return np.piecewise(
            positions,
            [positions < self._start],
            [self._before._at, lambda position: self._draw(position - self._start)],
        )

    def _draw(self, positions: np.ndarray, stir: bool = True) -> np.ndarray:
        """Sequence numbers at positions counted from the last growth; not `stir`: only the groups are permuted."""
        index, before = self._shuffle(positions, stir), self._before
        if before is None:
            return index
        # The index counts, in this order: windows nobody has touched, group by group, so that groups stay together;
        # the rest of the window that was open when the data grew; and the new sequences.
        done = self._start - before._start
        border = before._next_window(done)
        untouched, unseen = before._size - border, before._size - done
        return np.piecewise(
            index,
            [index < untouched, (index >= untouched) & (index < unseen)],
            [
                lambda i: before._draw(border + i, stir=False),
                lambda i: before._draw(done + i - untouched),
                lambda i: before.num_sequences + i - unseen,
            ],
        )

    def _shuffle(self, positions: np.ndarray, stir: bool) -> np.ndarray:
        """The two permutations, on [0, size)."""
        group, window_slots = self.group_sequences, self._window_slots
        short_slot, missing = self._short
        short_window = short_slot // self.window_groups
        # Pretend that every group is full: what comes behind the window with the short one moves up by what is missing.
        places = positions + missing * (positions >= self._window_start(short_window + 1))
        window, offset = np.divmod(places, window_slots)
        in_short = window == short_window
        if stir:
            lengths = np.minimum(window_slots, self._num_groups * group - window * window_slots) - missing * in_short
            offset = permute(offset, lengths, derive_keys(self._keys[1], window)).astype(np.int64)
        places = window * window_slots + offset
        places += missing * (in_short & (places >= (short_slot + 1) * group - missing))  # the same inside the window
        slot, place = np.divmod(places, group)
        return self._group(slot) * group + place

    def _group(self, slot: np.ndarray) -> np.ndarray:
        if self._num_groups <= len(self._few_groups):
            return self._few_groups[slot]
        return permute(slot, self._num_groups, self._keys[0]).astype(np.int64)

    def _window_start(self, window: int) -> int:
        late = self._short[1] if window > self._short[0] // self.window_groups else 0
        return min(window * self._window_slots - late, self._size)

    def _next_window(self, position: int) -> int:
        """The first position from here on at which a window begins, or the end."""
        window = -(-position // self._window_slots)
        start = self._window_start(window)
        return start if start >= position else self._window_start(window + 1)

    @cached_property
    def _before(self) -> "EpochOrder | None":
        """This epoch as it was before it last grew."""
        if not self.growths:
            return None
        return replace(self, num_sequences=self.growths[-1][0], growths=self.growths[:-1])

    @cached_property
    def _start(self) -> int:
        return self.growths[-1][1] if self.growths else 0

    @cached_property
    def _size(self) -> int:
        return self.num_sequences - self._start

    @cached_property
    def _num_groups(self) -> int:
        return -(-self._size // self.group_sequences)

    @cached_property
    def _window_slots(self) -> int:
        return self.window_groups * self.group_sequences

    @cached_property
    def _short(self) -> tuple[int, int]:
        """The slot of the short last group, and how many sequences it is short of."""
        if not self._size:
            return 0, 0
        slot = unpermute(self._num_groups - 1, self._num_groups, self._keys[0])
        return int(slot[0]), self._num_groups * self.group_sequences - self._size

    @cached_property
    def _few_groups(self) -> np.ndarray:
        """A table while it is tiny: permuting few groups anew for each position costs more than all the rest."""
        return permute(np.arange(min(self._num_groups, 64)), self._num_groups, self._keys[0]).astype(np.int64)

    @cached_property
    def _keys(self) -> tuple[int, int]:
        """Of the permutation of groups, and of those inside windows."""
        group_key, window_key = (derive_key(self.seed, self.epoch, len(self.growths), use) for use in (0, 1))
        return group_key, window_key


@dataclass(frozen=True)
class TrainingOrder:
    """Sequences consumed since the run began -> the next sequence numbers, one epoch after the other.

    This seed, this history and the number of sequences consumed are a run's whole data state.
    """

    seed: int
    history: tuple[tuple[int, int], ...]
    """For each snapshot: (sequences consumed when it was adopted, its num_sequences); the first is adopted at 0."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "history", tuple((int(at), int(n)) for at, n in self.history))
        adopted, sizes = [at for at, _ in self.history], [n for _, n in self.history]
        if adopted[:1] != [0] or adopted != sorted(set(adopted)) or sizes != sorted(sizes) or sizes[0] < 1:
            raise ValueError(
                f"A run's history is a list of (consumed, num_sequences) that begins with consumed = 0 and grows in "
                f"both; got {list(self.history)}."
            )

    def sequence_numbers(self, start: int, count: int) -> np.ndarray:
        """The `count` sequence numbers (int64) after the first `start` ones of the run, across the ends of epochs."""
        parts = [np.empty(0, np.int64)]
        while count > 0:
            order, position = self.locate(start)
            until_growth = [at - start for at, _ in self.history if at > start]
            length = min(count, order.num_sequences - position, *until_growth)
            parts.append(order(np.arange(position, position + length)))
            start, count = start + length, count - length
        return np.concatenate(parts)

    def locate(self, consumed: int) -> tuple[EpochOrder, int]:
        """The order of the epoch in which the next sequence lies, and its position there."""
        if consumed < 0:
            raise IndexError(f"A run cannot have consumed {consumed} sequences.")
        _, begin, order = next(era for era in reversed(self._eras) if era[0] <= consumed)
        epochs, position = divmod(consumed - begin, order.num_sequences)
        return _skip_epochs(order, epochs), position

    def grow(self, num_sequences: int, consumed: int) -> "TrainingOrder":
        """The same run after the data set has grown; what it has `consumed` (trained on, not prefetched) stays.

        New data joins at once when it is at least an eighth of what is left of the epoch, otherwise with the next
        epoch, so that growths of one epoch stay few. Asking twice changes nothing.
        """
        known = self.history[-1][1]
        if num_sequences < known:
            raise ValueError(
                f"The data set shrank from {known} to {num_sequences} sequences, but this run's order holds all of "
                f"them. Restore the missing ones or start a new run."
            )
        if num_sequences == known:
            return self
        lived = tuple(entry for entry in self.history if entry[0] < consumed)  # later ones were only announced
        if not lived:
            return replace(self, history=((0, num_sequences),))
        order, position = replace(self, history=lived).locate(consumed)
        rest, new = order.num_sequences - position, num_sequences - order.num_sequences
        adopted = consumed if position == 0 or 8 * new >= rest else consumed + rest
        return replace(self, history=(*lived, (adopted, num_sequences)))

    def epoch_start(self, epoch: int) -> int:
        """Sequences consumed when this epoch begins, if the data set does not grow again before."""
        _, begin, order = next(era for era in reversed(self._eras) if era[2].epoch <= epoch)
        return begin + (epoch - order.epoch) * order.num_sequences

    @cached_property
    def _eras(self) -> list[tuple[int, int, EpochOrder]]:
        """For each snapshot: when it was adopted, when the epoch of that moment began, and that epoch's order."""
        (_, num_sequences), *growths = self.history
        eras = [(0, 0, EpochOrder(num_sequences, self.seed, epoch=0))]
        for adopted, num_sequences in growths:
            _, begin, order = eras[-1]
            epochs, position = divmod(adopted - begin, order.num_sequences)
            begin, order = begin + epochs * order.num_sequences, _skip_epochs(order, epochs)
            order = order.grow(num_sequences, position) if position else replace(order, num_sequences=num_sequences)
            eras.append((adopted, begin, order))
        return eras


@lru_cache(maxsize=64)
def _skip_epochs(order: EpochOrder, epochs: int) -> EpochOrder:
    return replace(order, epoch=order.epoch + epochs, growths=()) if epochs else order


def micro_batch_positions(
    step: int,
    accumulation_index: int,
    rank: int,
    *,
    micro_batch: int,
    world_size: int = 1,
    accumulation: int = 1,
    consumed: int = 0,
) -> range:
    """Positions in the run of the micro-batch that one rank takes; those of a step lie side by side without gaps.

    So an optimizer step sees the same sequences in the same order however its global batch is shared out:

        2 ranks, micro-batch 3, accumulation 2    [0 1 2 | 3 4 5] [6 7 8 | 9 10 11]
        3 ranks, micro-batch 2, accumulation 2    [0 1 | 2 3 | 4 5] [6 7 | 8 9 | 10 11]

    Args:
        step: Optimizer steps since `consumed`.
        accumulation_index: Which micro-batch of the step, in [0, accumulation).
        rank: Which process, in [0, world_size).
        micro_batch: Sequences that a process takes at once.
        world_size: Devices times nodes.
        accumulation: Micro-batches per step.
        consumed: Sequences consumed before step 0, when the run began with another global batch.
    """
    if not (0 <= accumulation_index < accumulation and 0 <= rank < world_size):
        raise IndexError(
            f"There is no micro-batch {accumulation_index} of {accumulation}, rank {rank} of {world_size}."
        )
    start = consumed + ((step * accumulation + accumulation_index) * world_size + rank) * micro_batch
    return range(start, start + micro_batch)


def total_steps(sequences: int, epochs: int, global_batch: int) -> int:
    """Optimizer steps of a run. Batches straddle epochs, so only the run's last partial batch is dropped."""
    return sequences * epochs // global_batch


def recalculated_total(step: int, consumed: int, sequences: int, epochs: int, global_batch: int) -> int:
    """`total_steps` again in step `step`, when the data or the global batch has changed; the same if nothing has."""
    return step + max(0, sequences * epochs - consumed) // global_batch


def steps_in_epoch(epoch: int, sequences: int, global_batch: int) -> int:
    """Optimizer steps that end in this epoch (from 0 on). They add up to `total_steps`."""
    return total_steps(sequences, epoch + 1, global_batch) - total_steps(sequences, epoch, global_batch)
