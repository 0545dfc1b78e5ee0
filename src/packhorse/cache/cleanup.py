"""What dead builders left, and what nobody needs any more -> a list, and on demand an end to it.

    temporary files     of writers that died: nothing refers to them
    index pages         that longer ones have replaced
    spools              whose chunks are all committed, and scratch caches of repairs
    claims              of builders that are gone
    chunk files         that no record names: those that a record has replaced are removed; where the chunk has no
                        record they may be the only copy, so they are moved to quarantine
    quarantine          only when asked for, by age

Safe beside live builders: what is younger than any writing takes is left alone. Nothing goes that cannot be rebuilt.
"""

import math
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from packhorse.cache import store
from packhorse.cache.claims import Claims
from packhorse.cache.plan import Plan
from packhorse.cache.recipe import read_identity
from packhorse.cache.record import Record, chunk_path, committed_chunks, read_record
from packhorse.cache.regular import read_parts
from packhorse.cache.snapshot import Index
from packhorse.errors import CacheError

DAY_SECONDS = 24 * 3600
CLAIM_SECONDS = 3600
"""Leases are refreshed three times a minute."""


@dataclass(frozen=True, kw_only=True)
class Leftover:
    """Something that can go."""

    path: Path
    why: str
    num_bytes: int
    keep: bool = False
    """Whether it is moved to quarantine instead."""

    def __str__(self) -> str:
        action = "to quarantine" if self.keep else "removed"
        return f"{self.path} ({self.num_bytes:,} bytes): {self.why}; {action}"


def find_leftovers(
    folder: Path, quarantine_days: float | None = None, min_age_seconds: float = store.LEFTOVER_SECONDS
) -> list[Leftover]:
    """What could go. Changes nothing.

    Args:
        folder: The cache.
        quarantine_days: Also what has been in quarantine for so long.
        min_age_seconds: Leave alone what is younger: somebody may be writing it.

    Raises:
        CacheIncompleteError: there is no cache.
        CacheCorruptionError: recipe or plan are damaged: then nobody knows what is needed.
    """
    read_identity(folder)
    finder = _Finder(folder, time.time() - min_age_seconds)
    found = [*finder.temporary(), *finder.pages(), *finder.spools(), *finder.claims(), *finder.chunk_files()]
    if quarantine_days is not None:
        found += _old_quarantine(folder, time.time() - quarantine_days * DAY_SECONDS)
    return found


def clean(leftovers: list[Leftover], folder: Path) -> None:
    """End them."""
    for leftover in leftovers:
        if leftover.keep:
            _set_aside(leftover.path, folder)
        elif leftover.path.is_dir() and not leftover.path.is_symlink():
            store.remove_folder(leftover.path)
        else:
            store.remove(leftover.path)


def _set_aside(path: Path, folder: Path) -> None:
    """Move a chunk file without a record to quarantine; and back, if a builder has committed it meanwhile."""
    moved = store.quarantine(path, folder)
    chunk = int(path.name.partition("-")[0])
    with suppress(FileNotFoundError, CacheError):
        if chunk_path(folder, chunk, read_record(folder, chunk).file_sha256) == path:
            store.publish(path, read_parts(moved))


class _Finder:
    def __init__(self, folder: Path, oldest: float) -> None:
        self.folder, self.oldest = folder, oldest
        self.plan = Plan(folder)
        self.records: dict[int, Record | None] = {}
        for chunk in committed_chunks(folder):
            try:
                self.records[chunk] = read_record(folder, chunk)
            except (CacheError, FileNotFoundError):
                self.records[chunk] = None

    def temporary(self) -> Iterator[Leftover]:
        """Of writers that died."""
        for path in sorted(self.folder.rglob(f"{store.TEMPORARY}*")):
            if "quarantine" not in path.relative_to(self.folder).parts and self._is_old(path):
                yield self._leftover(path, "a temporary file of a writer that died")

    def pages(self) -> Iterator[Leftover]:
        """Index pages that longer ones have replaced."""
        index = Index(self.folder)
        names = [index.path(page).name for page in range(index.num_pages)]
        used = {name.partition("-")[0]: name for name in names}
        for path in sorted((self.folder / "index").glob("*.idx")):
            longer = used.get(path.name.partition("-")[0], "")
            if longer > path.name and self._is_old(path):
                yield self._leftover(path, f"{longer} has replaced it")

    def spools(self) -> Iterator[Leftover]:
        """Spools whose chunks are all committed, or that no plan knows."""
        needed = set()
        for page in self.plan.pages:
            for place, entry in enumerate(page.entries):
                if self.records.get(page.first_chunk + place) is None:
                    needed |= {self.plan.files[number].probe for number, _, _ in entry}
        root = self.folder / "spool"
        for path in sorted(root.iterdir()) if root.is_dir() else ():
            if path.name.partition(".")[0] not in needed and self._is_old(path):
                yield self._leftover(path, "no chunk waits for it")

    def claims(self) -> Iterator[Leftover]:
        """Claims and notes of builders whose lease was not refreshed for long."""
        root, seen, oldest = self.folder / "claims", Claims(self.folder), time.time() - CLAIM_SECONDS
        for path in sorted(root.iterdir()) if root.is_dir() else ():
            name = seen.owner(int(path.stem)) if path.suffix == ".claim" and path.stem.isdigit() else path.stem
            lease = root / f"{name}.lease" if _is_name(name) else path
            if _written(path, if_gone=math.inf) < oldest and _written(lease, if_gone=0.0) < oldest:
                yield self._leftover(path, "its builder is gone")

    def chunk_files(self) -> Iterator[Leftover]:
        """Chunk files that no record names."""
        for path in sorted((self.folder / "chunks").rglob("*.chunk")):
            number = path.name.partition("-")[0]
            if not number.isdigit() or not self._is_old(path):
                continue
            chunk = int(number)
            record = self.records.get(chunk)
            if chunk not in self.records:
                yield self._leftover(path, f"chunk {chunk} has no record", keep=True)
            elif record is not None and path != (own := chunk_path(self.folder, chunk, record.file_sha256)):
                if store.holds(own, record.file_sha256):
                    yield self._leftover(path, f"the record of chunk {chunk} names another file, which is whole")

    def _is_old(self, path: Path) -> bool:
        return _written(path, if_gone=math.inf) < self.oldest

    def _leftover(self, path: Path, why: str, keep: bool = False) -> Leftover:
        return Leftover(path=path, why=why, num_bytes=_size(path), keep=keep)


def _old_quarantine(folder: Path, oldest: float) -> Iterator[Leftover]:
    root = folder / "quarantine"
    for path in sorted(root.iterdir()) if root.is_dir() else ():
        with suppress(FileNotFoundError):
            # When it was moved: the time of a file is that of its content, the other that of its name.
            if path.lstat().st_ctime < oldest:
                yield Leftover(path=path, why="in quarantine for long enough", num_bytes=_size(path))


def _written(path: Path, if_gone: float) -> float:
    """When it was written last. It may be gone since the folder was listed: builders work on."""
    try:
        return path.lstat().st_mtime
    except FileNotFoundError:
        return if_gone


def _is_name(name: str) -> bool:
    return bool(name) and "/" not in name and name not in (".", "..")


def _size(path: Path) -> int:
    """Bytes of a file, or of all files below a folder, as far as they are still there."""
    size = 0
    for file in path.rglob("*") if path.is_dir() and not path.is_symlink() else [path]:
        with suppress(FileNotFoundError):
            size += file.lstat().st_size
    return size
