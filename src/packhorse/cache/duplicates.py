"""Documents in the order of the plan -> which of them were there before.

`deduplicate: exact` keeps the first place of every document. One pass over the text, before a page of the plan is
published, finds the others; they are listed in the page and so never change. A document is known by 128 bits of hash:
16 bytes of memory each, three times that for a moment when runs are merged.

What a page added is kept beside the plan, in `duplicates/`, so that the next page need not read the text of all before.
It is derived: a file that is missing or damaged is made again from the text.

    offset  size  field
    0       8     magic      b"PACKHDUP"
    8       8     documents
    16      32    SHA-256    of the page of the plan, then of the hashes
    48      8 n   hashes     their first halves, sorted
    -       8 n   -          their second halves
"""

import hashlib
import struct
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path

import numpy as np
import xxhash

from packhorse.cache import store
from packhorse.cache.locations import Locations
from packhorse.cache.plan import Page, Plan, Range
from packhorse.corpus.documents import Documents, Skipped, TextFile, read_ranges

MAGIC = b"PACKHDUP"
HEADER = struct.Struct("<8sQ32s")


class Seen:
    """Hashes of documents, uint64 [2, N], in sorted runs: a run is merged with the next before that is as long."""

    def __init__(self) -> None:
        self._runs: list[np.ndarray] = []

    def __len__(self) -> int:
        return sum(run.shape[1] for run in self._runs)

    def holds(self, hashes: np.ndarray) -> np.ndarray:
        """Whether each hash was added before: bool [N]."""
        known = np.zeros(hashes.shape[1], bool)
        for run in self._runs:
            known |= _is_in(run, hashes)
        return known

    def add(self, hashes: np.ndarray) -> np.ndarray:
        """Add hashes; whether each is the first of its kind: bool [N]."""
        order = np.lexsort(hashes[::-1])  # stable: of equals the first stays the first
        ordered = hashes[:, order]
        is_new = np.ones(len(order), bool)
        is_new[1:] = (ordered[:, 1:] != ordered[:, :-1]).any(axis=0)
        is_new &= ~self.holds(ordered)
        self.add_sorted(ordered[:, is_new])
        is_first = np.zeros(len(order), bool)
        is_first[order[is_new]] = True
        return is_first

    def add_sorted(self, run: np.ndarray) -> None:
        """Add sorted hashes of which none was added before."""
        if run.size:
            self._runs.append(run)
        while len(self._runs) > 1 and self._runs[-2].shape[1] <= 2 * self._runs[-1].shape[1]:
            self._merge()

    def sorted(self) -> np.ndarray:
        """All of them, in order."""
        while len(self._runs) > 1:
            self._merge()
        return self._runs[0] if self._runs else np.empty((2, 0), "<u8")

    def _merge(self) -> None:
        both = np.concatenate([self._runs.pop(), self._runs.pop()], axis=1)
        self._runs.append(both[:, np.lexsort(both[::-1])])


class Duplicates:
    """Finds the documents of new pages that the plan has already.

    Args:
        plan: The plan.
        locations: Where its files are.
    """

    def __init__(self, plan: Plan, locations: Locations) -> None:
        self.plan, self.locations = plan, locations
        self._seen = Seen()
        self._pages = 0  # that are in `_seen`
        self._fresh = Seen()

    def find(self, entries: list[list[Range]], files: dict[int, TextFile]) -> list[list[int]]:
        """For each entry that is about to enter the plan, the rows of documents that have a place before.

        Args:
            entries: The entries of the next page.
            files: File number -> where it is now.
        """
        self._catch_up()
        self._fresh = Seen()
        return [self._find(entry, files) for entry in entries]

    def published(self, page: Page) -> None:
        """Keep what the last call of `find` saw: its page is in the plan now."""
        hashes = self._fresh.sorted()
        _save(self.plan.folder, page, hashes)
        self._seen.add_sorted(hashes)
        self._pages, self._fresh = page.page + 1, Seen()

    def _find(self, entry: list[Range], files: dict[int, TextFile]) -> list[int]:
        dropped: list[np.ndarray] = []
        for batch in _read(entry, files):
            hashes = _hash(batch)
            known = self._seen.holds(hashes)
            known[~known] = ~self._fresh.add(hashes[:, ~known])
            dropped.append(batch.rows[known])
        return np.concatenate(dropped).tolist() if dropped else []

    def _catch_up(self) -> None:
        """Learn what the pages of the plan hold."""
        for page in self.plan.pages[self._pages :]:
            hashes = _load(self.plan.folder, page)
            if hashes is None:
                fresh = Seen()
                for entry, dropped in zip(page.entries, page.dropped or [[]] * len(page.entries), strict=True):
                    files = {number: self.locations.locate(number) for number, _, _ in entry}
                    for batch in _read(entry, files, dropped):
                        fresh.add(_hash(batch))
                hashes = fresh.sorted()
                _save(self.plan.folder, page, hashes)
            self._seen.add_sorted(hashes)
            self._pages = page.page + 1


def _read(entry: list[Range], files: dict[int, TextFile], dropped: Sequence[int] = ()) -> Iterator[Documents]:
    return read_ranges(((files[number], start, stop) for number, start, stop in entry), Skipped(), dropped)


def _hash(batch: Documents) -> np.ndarray:
    """Hashes of documents, uint64 [2, N]."""
    if batch.texts is not None:
        data = [text.encode() for text in batch.texts]
    else:
        data = [np.ascontiguousarray(ids, "<i8").tobytes() for ids in batch.ids]
    return np.frombuffer(b"".join(map(xxhash.xxh3_128_digest, data)), "<u8").reshape(-1, 2).T


def _is_in(run: np.ndarray, hashes: np.ndarray) -> np.ndarray:
    first, second = run
    place = np.searchsorted(first, hashes[0])
    found = np.zeros(hashes.shape[1], bool)
    left = np.arange(hashes.shape[1])
    # Almost always two rounds: documents that share the first half of their hashes and not the second are rare.
    while len(left := left[place[left] < len(first)]):
        left = left[first[place[left]] == hashes[0][left]]
        found[left] |= second[place[left]] == hashes[1][left]
        place[left] += 1
    return found


def _path(folder: Path, page: Page) -> Path:
    return folder / "duplicates" / f"{page.page:06d}.hashes"


def _save(folder: Path, page: Page, hashes: np.ndarray) -> None:
    data = np.ascontiguousarray(hashes, "<u8").tobytes()
    store.make_folder(folder / "duplicates")
    store.replace(_path(folder, page), HEADER.pack(MAGIC, hashes.shape[1], _seal(page, data)) + data)


def _load(folder: Path, page: Page) -> np.ndarray | None:
    """What `_save` wrote for just this page, or None."""
    try:
        content = _path(folder, page).read_bytes()
    except OSError:
        return None
    data = content[HEADER.size :]
    if len(content) < HEADER.size or content[: HEADER.size] != HEADER.pack(MAGIC, len(data) // 16, _seal(page, data)):
        return None
    return np.frombuffer(data, "<u8").reshape(2, -1)


def _seal(page: Page, data: bytes) -> bytes:
    return hashlib.sha256(hashlib.sha256(store.seal(asdict(page))).digest() + data).digest()
