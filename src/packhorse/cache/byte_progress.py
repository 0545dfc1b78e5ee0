"""How much of so many bytes is done: a bar on a terminal, plain lines elsewhere."""

import sys
import threading
import time

from packhorse.cache.progress import LINE_SECONDS, live_bar, say


class ByteProgress:
    """Counts bytes and shows them, with rate and time left; `add` may be called from several threads.

    Args:
        verb: What is being done: `checking`.
        total: Bytes in all.
        quiet: Only count.
    """

    def __init__(self, verb: str, total: int, quiet: bool = False) -> None:
        self.verb, self.total, self.quiet = verb, total, quiet
        self.done = 0
        self._start = self._last = time.monotonic()
        self._lock = threading.Lock()
        self._bar = None

    def __enter__(self) -> "ByteProgress":
        if not self.quiet and sys.stderr.isatty():
            self._bar = live_bar(self.verb)
            self._task = self._bar.add_task("", total=max(self.total, 1))
            self._bar.start()
        return self

    def __exit__(self, *_) -> None:
        if self._bar is not None:
            self._bar.stop()

    def add(self, num_bytes: int) -> None:
        """So many more are done."""
        with self._lock:
            self.done += num_bytes
            if self._bar is not None:
                self._bar.update(self._task, completed=self.done, description=str(self))
            elif not self.quiet and time.monotonic() - self._last >= LINE_SECONDS:
                self._last = time.monotonic()
                say(f"{self.verb}: {self}")

    def __str__(self) -> str:
        rate = self.done / max(time.monotonic() - self._start, 1e-9)
        left = (self.total - self.done) / rate if rate else 0
        return f"{self.done / 1e9:.2f} of {self.total / 1e9:.2f} GB, {rate / 1e6:,.0f} MB/s, {left:,.0f} s left"
