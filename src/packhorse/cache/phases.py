"""How the time of a builder is spent: read, tokenize, pack, compress, write.

One clock runs at a time. What is asked for while another phase runs stops that phase's clock, so nested generators are
told apart and the sum is the time that has passed:

    for tokens in clock.each("tokenize", tokenize(clock.each("read", documents))): ...
"""

import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import TypeVar

PHASES = ("read", "tokenize", "pack", "compress", "write")
"""`write` is writing, syncing and reading back."""

Item = TypeVar("Item")


class PhaseClock:
    """Seconds by phase."""

    def __init__(self) -> None:
        self.seconds = dict.fromkeys(PHASES, 0.0)
        self._phase: str | None = None
        self._since = time.perf_counter()

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """What happens in the block belongs to a phase."""
        before = self._switch(name)
        try:
            yield
        finally:
            self._switch(before)

    def each(self, name: str, items: Iterable[Item]) -> Iterator[Item]:
        """The items; making them belongs to a phase."""
        iterator = iter(items)
        while True:
            with self.phase(name):
                try:
                    item = next(iterator)
                except StopIteration:
                    return
            yield item

    def _switch(self, name: str | None) -> str | None:
        now, before = time.perf_counter(), self._phase
        if before is not None:
            self.seconds[before] += now - self._since
        self._phase, self._since = name, now
        return before


def shares(seconds: dict[str, float]) -> dict[str, float]:
    """Each phase's part of the whole, the largest first."""
    total = sum(seconds.values()) or 1.0
    return dict(sorted(((name, value / total) for name, value in seconds.items()), key=lambda item: -item[1]))
