"""What a long build tells: rate and time left, as a bar on a terminal, as plain lines elsewhere."""

import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager

LINE_SECONDS = 5.0
"""Plain lines come at most this often."""


def say(text: str) -> None:
    """Print a message for the user, beside results on standard output."""
    print(text, file=sys.stderr, flush=True)


class BuildProgress:
    """Counts what builders report, and shows it.

    Args:
        quiet: Only count.
    """

    def __init__(self, quiet: bool = False) -> None:
        self.quiet = quiet
        self.chunks_done = self.chunks_total = 0
        self.bytes_total = 0
        self.documents = self.tokens = self.text_bytes = 0
        self._start = self._last_line = time.monotonic()
        self._bar = None

    def planned(self, chunks: int, text_bytes: int) -> None:
        """More chunks are to be built."""
        self.chunks_total += chunks
        self.bytes_total += text_bytes

    def add(self, documents: int, tokens: int, text_bytes: int) -> None:
        """Some documents were tokenized."""
        self.documents += documents
        self.tokens += tokens
        self.text_bytes += text_bytes
        self._show()

    def committed(self) -> None:
        """A chunk was committed."""
        self.chunks_done += 1
        self._show()

    @property
    def seconds(self) -> float:
        """Since the first job."""
        return max(time.monotonic() - self._start, 1e-9)

    @contextmanager
    def shown(self) -> Iterator[None]:
        """Show progress while the block runs."""
        self._start = self._last_line = time.monotonic()
        if self.quiet or not sys.stderr.isatty():
            yield
            return
        from rich.console import Console
        from rich.progress import BarColumn, Progress, TextColumn

        with Progress(
            TextColumn("building the cache"),
            BarColumn(),
            TextColumn("{task.description}"),
            console=Console(stderr=True),
        ) as self._bar:
            self._task = self._bar.add_task("", total=None)
            yield
        self._bar = None

    def _show(self) -> None:
        if self._bar is not None:
            total = max(self.bytes_total, self.text_bytes)
            self._bar.update(self._task, description=str(self), completed=self.text_bytes, total=total)
        elif not self.quiet and time.monotonic() - self._last_line >= LINE_SECONDS:
            self._last_line = time.monotonic()
            say(f"building the cache: {self}")

    def values(self) -> dict[str, float]:
        """For others: see `claims.Claims.tell`."""
        counts = {"documents": self.documents, "tokens": self.tokens, "bytes": self.text_bytes}
        rates = {f"{name}_per_second": round(count / self.seconds, 1) for name, count in counts.items()}
        return {"chunks": self.chunks_done, **rates}

    def rates(self) -> str:
        """Per second, since the first job."""
        seconds = self.seconds
        return (
            f"{self.documents / seconds:,.0f} documents/s, {self.tokens / seconds / 1e6:.2f} M tokens/s, "
            f"{self.text_bytes / seconds / 1e6:.1f} MB/s"
        )

    def __str__(self) -> str:
        left = max(self.bytes_total - self.text_bytes, 0) * self.seconds / max(self.text_bytes, 1)
        return f"{self.chunks_done}/{self.chunks_total} chunks, {self.rates()}, {left:,.0f} s left"
