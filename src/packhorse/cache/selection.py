"""Which chunks a builder asks for.

A chunk is a pure function of recipe and plan, so every way of building is a choice of numbers:

    forward                            all that is missing, after the plan was extended
    mode="inverse"                     the gaps of the plan as it is, lowest first
    start_chunk=10, end_chunk=19       10 to 19
    num_shards=4, shard_index=1        1, 5, 9, ...

Any number of builders, each with any selection, may work in one folder at the same time.
"""

from dataclasses import dataclass
from typing import Literal

from packhorse.errors import SettingsError


@dataclass(frozen=True, kw_only=True)
class Selection:
    """The chunks that one builder asks for; all of them by default."""

    mode: Literal["forward", "inverse"] = "forward"
    """`inverse` fills gaps of the plan and never extends it."""
    start_chunk: int = 0
    """The first chunk."""
    end_chunk: int | None = None
    """The last chunk, itself included."""
    num_shards: int = 1
    """So many builders share the work by number."""
    shard_index: int = 0
    """Which of them this one is, from 0."""

    def __post_init__(self) -> None:
        if self.start_chunk < 0 or (self.end_chunk is not None and self.end_chunk < self.start_chunk):
            raise SettingsError(f"There are no chunks from {self.start_chunk} to {self.end_chunk}.")
        if self.num_shards < 1:
            raise SettingsError(f"There are no num_shards {self.num_shards}: 1 builder or more share the work.")
        if not 0 <= self.shard_index < self.num_shards:
            raise SettingsError(
                f"shard_index must be from 0 to {self.num_shards - 1} with num_shards {self.num_shards}, "
                f"not {self.shard_index}."
            )

    def __contains__(self, chunk: int) -> bool:
        last = chunk if self.end_chunk is None else self.end_chunk
        return self.start_chunk <= chunk <= last and chunk % self.num_shards == self.shard_index

    def needs_more_than(self, num_planned: int) -> bool:
        """Whether chunks beyond a plan of so many are asked for."""
        return self.mode == "forward" and (self.end_chunk is None or self.end_chunk >= num_planned)


def ranges(numbers: list[int]) -> str:
    """1, 2, 3, 7 -> "1-3, 7"."""
    runs: list[list[int]] = []
    for number in numbers:
        if runs and number == runs[-1][1] + 1:
            runs[-1][1] = number
        else:
            runs.append([number, number])
    return ", ".join(str(a) if a == b else f"{a}-{b}" for a, b in runs)
