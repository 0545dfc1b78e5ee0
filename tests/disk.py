"""A disk for tests: stands in for `os` in the one module that writes, `store`.

Disk            counts the operations; something may happen before each: an error, or the death of the process
RecordedDisk    does them, and keeps the log that `power.PowerCut` needs
"""

import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, ClassVar

from packhorse.cache import store

OPERATIONS = ("open", "write", "fsync", "link", "unlink", "mkdir", "replace", "rename")


class Killed(BaseException):
    """The process is dead: no handler does anything on the disk any more."""


class Disk:
    """Stands in for `os`.

    Args:
        before: Called with number, name and arguments of each operation before it is done; may raise.
    """

    def __init__(self, before: Callable[[int, str, tuple], None] | None = None) -> None:
        self.start(before)

    def __getattr__(self, name: str) -> Any:
        real = getattr(os, name)
        return (lambda *args: self.operate(name, real, args)) if name in OPERATIONS else real

    def start(self, before: Callable[[int, str, tuple], None] | None = None) -> None:
        """A new process on the same disk."""
        self.count, self.before, self.is_dead = 0, before, False
        self.operations: list[str] = []
        """Names of what was done so far."""

    def operate(self, name: str, real: Callable, args: tuple) -> Any:
        """One operation."""
        if self.is_dead:
            raise Killed
        self.count += 1
        self.operations.append(name)
        if self.before is not None:
            try:
                self.before(self.count, name, args)
            except Killed:
                self.is_dead = True
                raise
        return self.do(name, real, args)

    def do(self, name: str, real: Callable, args: tuple) -> Any:
        """Do it."""
        return real(*args)


def die() -> None:
    """Die within this process, for tests that go on in it."""
    raise Killed


def kill_at(number: int, kill: Callable[[], None] = die) -> Callable[[int, str, tuple], None]:
    """Die before an operation; of a write half of the bytes got out."""

    def before(count: int, name: str, args: tuple) -> None:
        if count == number:
            if name == "write":
                os.write(args[0], bytes(args[1])[: len(args[1]) // 2])
            kill()

    return before


@contextmanager
def use(disk: Disk) -> Iterator[Disk]:
    """The store writes to this disk, as in a process that has just started."""
    before = {name: getattr(store, name) for name in ("os", "_durable", *RecordedDisk.PROMISES)}
    store.os, store._durable = disk, set()
    if isinstance(disk, RecordedDisk):
        for name, promise in RecordedDisk.PROMISES.items():
            setattr(store, name, disk.promising(before[name], promise))
    try:
        yield disk
    finally:
        for name, value in before.items():
            setattr(store, name, value)


def lives_through(disk: Disk, action: Callable[[], Any]) -> bool:
    """Whether a process came to its end on this disk."""
    with use(disk), suppress(Killed):
        action()
    return not disk.is_dead


class RecordedDisk(Disk):
    """Does everything and keeps a log for `power.PowerCut`: (operation, path, ...), and what the store promised.

    Args:
        root: What lies elsewhere is not logged.
        without: A line of the store: the sync that it asks for is left out.
    """

    PROMISES: ClassVar = {
        **{"publish": "there", "replace": "there", "make_folder": "there", "quarantine": "moved", "settle": "settled"}
    }
    """Function of the store -> what it promises when it returns."""

    def __init__(self, root: Path, without: int | None = None) -> None:
        super().__init__()
        self.root, self.without = root, without
        self.log: list[tuple] = []
        self.synced_at: set[int] = set()
        """Lines of the store that asked for a sync."""
        self._descriptors: dict[int, str] = {}

    def do(self, name: str, real: Callable, args: tuple) -> Any:
        if name == "fsync" and self._line() == self.without:
            return None
        result = real(*args)
        if name == "open":
            self._descriptors[result] = str(args[0])
        where = self._descriptors[args[0]] if name in ("write", "fsync") else str(args[0])
        # Claims are advice: nothing depends on them, and nothing of theirs is synced.
        if "/claims/" in where or not Path(where).is_relative_to(self.root):
            return result
        if name == "write":
            self.log.append((name, where, bytes(args[1][:result])))
        elif name in ("link", "replace", "rename"):
            self.log.append(("rename" if name == "replace" else name, where, str(args[1])))
        elif name != "open":
            self.log.append((name, where))
        elif args[1] & os.O_CREAT:
            self.log.append(("create", where))
        return result

    def promising(self, function: Callable, promise: str) -> Callable:
        """A function of the store that tells the log when it has returned."""

        def promised(path: Path, *args):
            result = function(path, *args)
            if "claims" not in path.name:
                self.log.append((promise, str(path), str(result)))
            return result

        return promised

    def _line(self) -> int:
        frame = sys._getframe(4)
        if frame.f_code.co_name == "sync_folder":
            frame = frame.f_back
        self.synced_at.add(frame.f_lineno)
        return frame.f_lineno
