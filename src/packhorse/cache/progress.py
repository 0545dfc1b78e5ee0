"""What a long build tells: rates, phases, the machine, the time left; on a terminal, in plain lines, in TensorBoard."""

import sys
import time
from collections import Counter, deque
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from packhorse.cache.phases import shares

if TYPE_CHECKING:
    from rich.progress import Progress

    from packhorse.cache.record import Record

LINE_SECONDS = 5.0
"""Plain lines, and looks at the machine, come at most this often."""

MACHINE_SECONDS = 2.0
"""Before that nobody looks at the machine: short builds do without."""

WINDOW_SECONDS = 300.0
"""The rate of so much time before now says how long the rest will take."""


def say(text: str) -> None:
    """Print a message for the user, beside results on standard output."""
    print(text, file=sys.stderr, flush=True)


def live_bar(label: str) -> "Progress":
    """A bar for a terminal, on standard error; what its task describes stands beside it."""
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn

    columns = (TextColumn(label), BarColumn(), TextColumn("{task.description}"))
    return Progress(*columns, console=Console(stderr=True))


class BuildProgress:
    """Counts what builders report, and shows it.

    Args:
        quiet: Only count.
        folder: The cache, whose dashboard gets the same figures.
        id_bytes: Bytes of an id in the narrowest array; 0 if nothing is to be compared.
        sequence_length: Tokens per sequence.
    """

    def __init__(
        self, quiet: bool = False, folder: Path | None = None, id_bytes: int = 0, sequence_length: int = 0
    ) -> None:
        self.quiet, self._id_bytes, self._sequence_length = quiet, id_bytes, sequence_length
        self.chunks_done = self.chunks_total = 0
        self.bytes_total = 0
        self.documents = self.tokens = self.text_bytes = 0
        self.phases: Counter[str] = Counter()
        """Seconds of all builders by phase."""
        self._kept_tokens = self._slots = self._file_bytes = 0  # of chunks that are committed
        self._start: float | None = None
        self._last_look = time.monotonic()
        self._window: deque[tuple[float, int]] = deque()
        self._bar = self._machine = self._dashboard = None
        self._folder, self._machine_now = folder, {}

    def planned(self, chunks: int, text_bytes: int) -> None:
        """More chunks are to be built; fewer, if negative."""
        self.chunks_total += chunks
        self.bytes_total += text_bytes

    def add(self, documents: int, tokens: int, text_bytes: int) -> None:
        """Some documents were tokenized."""
        self.documents += documents
        self.tokens += tokens
        self.text_bytes += text_bytes
        self._show()

    def committed(self, record: "Record", seconds: dict[str, float]) -> None:
        """A chunk was committed, and its builder has spent so many seconds in each phase."""
        self.chunks_done += 1
        self.phases.update(seconds)
        self._kept_tokens += record.tokens
        self._slots += record.sequences * self._sequence_length
        self._file_bytes += record.file_bytes
        self._show()

    @property
    def seconds(self) -> float:
        """Since the first job."""
        return max(time.monotonic() - (self._start or time.monotonic()), 1e-9)

    @property
    def seconds_left(self) -> float:
        """By the rate of the last minutes."""
        since, done = self._window[0] if self._window else (time.monotonic() - self.seconds, 0)
        rate = (self.text_bytes - done) / max(time.monotonic() - since, 1e-9)
        return max(self.bytes_total - self.text_bytes, 0) / rate if rate else 0.0

    @contextmanager
    def shown(self) -> Iterator[None]:
        """Show progress while the block runs."""
        self._start = self._start or time.monotonic()
        self._last_look = time.monotonic()
        try:
            if self.quiet or not sys.stderr.isatty():
                yield
                return
            with live_bar("building the cache") as self._bar:
                self._task = self._bar.add_task("", total=None)
                yield
        finally:
            self._bar = None
            if self._dashboard is not None:
                self._dashboard.close()

    def values(self) -> dict[str, float]:
        """All figures, as they go to TensorBoard and to `cache status`."""
        counts = {"documents": self.documents, "tokens": self.tokens, "bytes": self.text_bytes}
        values = {f"{name}_per_second": round(count / self.seconds, 1) for name, count in counts.items()}
        values |= {"chunks": self.chunks_done, "seconds_left": round(self.seconds_left, 1)}
        values |= {f"share_{name}": round(share, 4) for name, share in shares(self.phases).items()}
        if self._slots and self._file_bytes:
            values["utilisation"] = round(self._kept_tokens / self._slots, 4)
            values |= {name: round(ratio, 3) for name, ratio in self._smaller().items()}
        return values | self._machine_now

    def rates(self) -> str:
        """Per second, since the first job."""
        seconds = self.seconds
        return (
            f"{self.documents / seconds:,.0f} documents/s, {self.tokens / seconds / 1e6:.2f} M tokens/s, "
            f"{self.text_bytes / seconds / 1e6:.1f} MB/s"
        )

    def details(self) -> list[str]:
        """Where the time goes, first what takes most of it; what comes out; what the machine does."""
        lines = []
        if spent := shares(self.phases):
            slowest = next(iter(spent))
            parts = ", ".join(f"{name} {share:.0%}" for name, share in spent.items())
            lines.append(f"{parts}: the bottleneck is to {slowest}")
        if self._slots and self._file_bytes:
            smaller = ", ".join(
                f"{ratio:.2f} times smaller than {name[13:]}" for name, ratio in self._smaller().items()
            )
            lines.append(f"utilisation {self._kept_tokens / self._slots:.2%}, {smaller}")
        if now := self._machine_now:
            lines.append(
                f"CPU {now['cpu']:.0%}, memory {now['memory_bytes'] / 1e9:.2f} GB, "
                f"disk {now['disk_read_bytes_per_second'] / 1e6:.1f} MB/s read "
                f"{now['disk_write_bytes_per_second'] / 1e6:.1f} MB/s written, "
                f"network {now['network_received_bytes_per_second'] / 1e6:.1f} MB/s"
            )
        return lines

    def _smaller(self) -> dict[str, float]:
        """How many times smaller the chunks are than plain arrays of the same sequences, padding included."""
        kinds = {"int64": 8, f"uint{8 * self._id_bytes}": self._id_bytes}
        return {f"smaller_than_{name}": size * self._slots / self._file_bytes for name, size in kinds.items()}

    def _show(self) -> None:
        now = time.monotonic()
        if self._machine is None and self.seconds > MACHINE_SECONDS:
            from packhorse.cache.machine import Machine

            self._machine = Machine()
        if is_due := now - self._last_look >= LINE_SECONDS:
            self._last_look = now
            self._look(now)
        if self._bar is not None:
            total = max(self.bytes_total, self.text_bytes)
            text = "\n".join([str(self), *self.details()])
            self._bar.update(self._task, description=text, completed=self.text_bytes, total=total)
        elif not self.quiet and is_due:
            say("\n  ".join([f"building the cache: {self}", *self.details()]))

    def _look(self, now: float) -> None:
        """At the machine; and let the dashboard see everything."""
        self._window.append((now, self.text_bytes))
        while now - self._window[0][0] > WINDOW_SECONDS:
            self._window.popleft()
        if self._machine is not None:
            self._machine_now = self._machine.look()
        if self._folder is not None:
            if self._dashboard is None:
                from packhorse.cache.dashboard import Dashboard

                self._dashboard = Dashboard(self._folder)
            self._dashboard.show(self.values(), round(self.seconds))

    def __str__(self) -> str:
        left = self.seconds_left
        return f"{self.chunks_done}/{self.chunks_total} chunks, {self.rates()}, {left:,.0f} s left"
