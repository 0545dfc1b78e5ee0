"""Records -> index -> snapshot: which sequence lies in which chunk, and what a training pins.

A snapshot is the first n chunks of the plan, all committed, and a hash over their records. A later snapshot begins with
the earlier one and never changes what that holds.

The index is derived from records and can be removed at any time. It has a page for every 4,096 chunks, with one row a
chunk. Opening reads the header of the last page; a lookup reads the pages it touches, so that a million chunks open as
fast as a thousand.

    offset  size  field
    0       8     magic          b"PACKHIDX"
    8       4     format         1
    12      4     first chunk    a multiple of 4,096
    16      4     rows           chunks on this page
    20      4     -
    24      8 4   before         train sequences, eval sequences, train tokens, eval tokens of all chunks before
    56      8 4   after          the same with this page
    88      32    digest         of the snapshot that ends with this page
    120     4     CRC-32         of the rows
    124     4     CRC-32         of bytes 0 to 123
    128     -     rows           see ROW

The digest of n chunks is SHA-256(digest of n - 1 chunks, chunk number, payload hash, file hash).
"""

import hashlib
import os
import struct
import zlib
from bisect import bisect_right
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from packhorse.cache import store
from packhorse.cache.record import Record, read_record
from packhorse.cache.regular import read_file
from packhorse.errors import CacheCorruptionError, CacheIncompleteError

PAGE_CHUNKS = 4_096
MAGIC = b"PACKHIDX"
HEADER = struct.Struct("<8sIIII8q32sII")
ROW = np.dtype(
    [
        ("train", "<u4"),
        ("eval", "<u4"),
        ("train_tokens", "<u8"),
        ("eval_tokens", "<u8"),
        ("file_bytes", "<u8"),
        ("file_sha256", "V32"),
        ("index_sha256", "V32"),
        ("digest", "V32"),
    ]
)
EMPTY_DIGEST = hashlib.sha256(b"packhorse snapshot").digest()


@dataclass(frozen=True, kw_only=True)
class Totals:
    """Sums over chunks."""

    train_sequences: int = 0
    eval_sequences: int = 0
    train_tokens: int = 0
    eval_tokens: int = 0

    def plus(self, rows: np.ndarray) -> "Totals":
        """These, and the rows of some chunks."""
        names = ("train", "eval", "train_tokens", "eval_tokens")
        sums = [int(rows[name].sum(dtype=np.int64)) for name in names]
        return Totals(
            train_sequences=self.train_sequences + sums[0],
            eval_sequences=self.eval_sequences + sums[1],
            train_tokens=self.train_tokens + sums[2],
            eval_tokens=self.eval_tokens + sums[3],
        )

    def values(self) -> tuple[int, int, int, int]:
        """In the order of the file format."""
        return self.train_sequences, self.eval_sequences, self.train_tokens, self.eval_tokens


@dataclass(frozen=True, kw_only=True)
class _Header:
    first: int
    count: int
    before: Totals
    after: Totals
    digest: bytes
    crc: int


def next_digest(digest: bytes, record: Record) -> bytes:
    """The digest of a snapshot with one chunk more."""
    hashes = bytes.fromhex(record.payload_sha256) + bytes.fromhex(record.file_sha256)
    return hashlib.sha256(digest + record.chunk.to_bytes(8, "little") + hashes).digest()


class Index:
    """The index of a cache on disk.

    Args:
        folder: The cache.
        in_memory: Begin with no chunk, whatever pages are on the disk.
    """

    def __init__(self, folder: Path, in_memory: bool = False) -> None:
        self.folder, self._in_memory = folder, in_memory
        self._headers: dict[Path, _Header] = {}
        self._memory: dict[Path, bytes] = {}
        """Pages that are not on the disk."""
        self._rows: dict[Path, np.ndarray] = {}
        self.reload()

    def reload(self) -> None:
        """Look for pages that were published since."""
        longest: dict[int, tuple[int, str]] = {}
        root = self.folder / "index"
        # No `Path` of each: there are hundreds.
        for name in os.listdir(root) if root.is_dir() and not self._in_memory else ():
            stem, _, suffix = name.rpartition(".")
            first, _, count = stem.partition("-")
            if suffix == "idx" and first.isdigit() and count.isdigit():
                longest[int(first)] = max(longest.get(int(first), (0, "")), (int(count), name))
        self._names: list[str] = []
        self._paths: dict[int, Path] = {}
        self.num_chunks = 0
        while (found := longest.get(self.num_chunks)) is not None:
            self._names.append(found[1])
            self.num_chunks += found[0]
            if found[0] < PAGE_CHUNKS:
                break

    def digest(self, num_chunks: int) -> bytes:
        """The digest of the snapshot of the first `num_chunks` chunks."""
        if num_chunks == 0:
            return EMPTY_DIGEST
        page, row = divmod(num_chunks - 1, PAGE_CHUNKS)
        return bytes(self.rows(page)[row]["digest"].item())

    def totals(self, num_chunks: int) -> Totals:
        """Sums over the first `num_chunks` chunks."""
        if num_chunks == 0:
            return Totals()
        page, rest = divmod(num_chunks - 1, PAGE_CHUNKS)
        header = self.header(page)
        return header.after if rest + 1 == header.count else header.before.plus(self.rows(page)[: rest + 1])

    @property
    def num_pages(self) -> int:
        """Pages that are in use."""
        return len(self._names)

    def header(self, page: int) -> _Header:
        """The header of a page, verified."""
        path = self.path(page)
        if path not in self._headers:
            data = self._read(page, HEADER.size)
            path = self.path(page)  # another one now, if a builder was faster
            self._headers[path] = _decode_header(data, path, page)
        return self._headers[path]

    def rows(self, page: int) -> np.ndarray:
        """The rows of a page, verified."""
        path = self.path(page)
        if path not in self._rows:
            data = self._read(page, HEADER.size + PAGE_CHUNKS * ROW.itemsize + 1)
            path = self.path(page)
            header = _decode_header(data[: HEADER.size], path, page)
            data = data[HEADER.size :]
            if len(data) != header.count * ROW.itemsize or zlib.crc32(data) != header.crc:
                raise CacheCorruptionError(f"{path} is damaged. Remove it: `packhorse cache build` makes it again.")
            self._rows[path] = np.frombuffer(data, ROW)
        return self._rows[path]

    def path(self, page: int) -> Path:
        """The file of a page."""
        if page >= len(self._names):
            raise self._gone(page)
        if page not in self._paths:  # made once: every lookup asks for it
            self._paths[page] = self.folder / "index" / self._names[page]
        return self._paths[page]

    def row(self, chunk: int) -> np.void:
        """The row of a chunk."""
        return self.rows(chunk // PAGE_CHUNKS)[chunk % PAGE_CHUNKS]

    def file_sha256(self, chunk: int) -> str:
        """SHA-256 of a chunk's file."""
        return bytes(self.row(chunk)["file_sha256"].item()).hex()

    def extend(self, num_planned: int, trusted, in_memory: bool = False) -> None:
        """Take up the records of chunks that follow without a gap, and publish the pages.

        Args:
            num_planned: Chunks in the plan.
            trusted: Called with a record; False keeps its chunk, and all behind it, out.
            in_memory: Write nothing: the pages are for this object alone.
        """
        # Counted here, not by `self.num_chunks`: another builder may publish longer pages meanwhile.
        first = self.num_chunks
        fresh = list(self._following(num_planned, trusted))
        while fresh:
            page, used = divmod(first, PAGE_CHUNKS)
            rows = self.rows(page)[:used] if used else np.empty(0, ROW)
            before = self.header(page).before if used else self.totals(first)
            digest = self.digest(first)
            taken, fresh = fresh[: PAGE_CHUNKS - used], fresh[PAGE_CHUNKS - used :]
            new = np.zeros(len(taken), ROW)
            for row, record in zip(new, taken, strict=True):
                digest = next_digest(digest, record)
                row["train"], row["eval"] = record.train_sequences, record.eval_sequences
                row["train_tokens"], row["eval_tokens"] = record.train_tokens, record.eval_tokens
                row["file_bytes"] = record.file_bytes
                row["file_sha256"] = np.void(bytes.fromhex(record.file_sha256))
                row["index_sha256"] = np.void(bytes.fromhex(record.index_sha256))
                row["digest"] = np.void(digest)
            self._publish(page, np.concatenate([rows, new]), before, digest, in_memory)
            first += len(taken)

    def forget(self) -> None:
        """Remove all pages; they are made again from the records."""
        for path in (self.folder / "index").glob("*.idx"):
            store.remove(path)
        # A page that is made anew may get the name of one that was removed.
        self._headers.clear()
        self._rows.clear()
        self.reload()

    def _read(self, page: int, size: int) -> bytes:
        """The first bytes of a page."""
        try:
            path = self.path(page)
            return self._memory[path][:size] if path in self._memory else read_file(path, size)
        except FileNotFoundError:
            # A builder has published a longer page in its place: it begins with the same rows.
            known = self.num_chunks
            self.reload()
            if self.num_chunks < known:
                raise self._gone(page) from None
            return self._read(page, size)

    def _gone(self, page: int) -> CacheIncompleteError:
        """What is to be raised when a builder has removed the index, which must be derived anew."""
        return CacheIncompleteError(f"Page {page} of {self.folder / 'index'} is gone. Open the cache again.")

    def _following(self, num_planned: int, trusted) -> Iterator[Record]:
        for chunk in range(self.num_chunks, num_planned):
            try:
                record = read_record(self.folder, chunk)
            except FileNotFoundError:
                return
            if not trusted(record):
                return
            yield record

    def _publish(self, page: int, rows: np.ndarray, before: Totals, digest: bytes, in_memory: bool) -> None:
        first = page * PAGE_CHUNKS
        data = rows.tobytes()
        values = (*before.values(), *before.plus(rows).values())
        head = HEADER.pack(MAGIC, 1, first, len(rows), 0, *values, digest, zlib.crc32(data), 0)[:-4]
        content = head + struct.pack("<I", zlib.crc32(head)) + data
        old = self.path(page) if page < len(self._names) else None
        path = self.folder / "index" / f"{first:09d}-{len(rows):04d}.idx"
        if in_memory:
            self._memory[path] = content
            self._names[page:], self._paths[page] = [path.name], path
            self.num_chunks = first + len(rows)
            return
        store.make_folder(self.folder / "index")
        store.replace(path, content)
        if old is not None and old.name < path.name:  # shorter: a longer one is another builder's
            store.remove(old)
        self.reload()


class Snapshot:
    """The first chunks of a cache: what it holds is fixed for ever.

    Args:
        index: The index of the cache.
        num_chunks: Take so many chunks; by default all that the index has.
    """

    def __init__(self, index: Index, num_chunks: int | None = None) -> None:
        self._index = index
        self.num_chunks = index.num_chunks if num_chunks is None else num_chunks
        if self.num_chunks > index.num_chunks:
            raise CacheIncompleteError(
                f"{index.folder} has {index.num_chunks} chunks without a gap; {self.num_chunks} are asked for."
            )
        self.totals = index.totals(self.num_chunks)
        self._ends: dict[tuple[int, str], np.ndarray] = {}

    @property
    def digest(self) -> str:
        """SHA-256 over the chunks."""
        return self.digest_of(self.num_chunks)

    def digest_of(self, num_chunks: int) -> str:
        """The digest of an earlier snapshot, of fewer chunks, with which this one begins."""
        return self._index.digest(num_chunks).hex()

    def num_sequences(self, split: str) -> int:
        """Sequences on one side of the split, `train` or `eval`."""
        if split not in ("train", "eval"):
            raise ValueError(f"split must be train or eval, not {split!r}.")
        return self.totals.train_sequences if split == "train" else self.totals.eval_sequences

    def locate(self, numbers: np.ndarray, split: str) -> tuple[np.ndarray, np.ndarray]:
        """Chunk and row in that split of the chunk for each sequence number.

        Args:
            numbers: int64 [n], from 0 to `num_sequences(split)` - 1.
            split: `train` or `eval`.
        """
        if len(numbers) and not 0 <= int(numbers.min()) <= int(numbers.max()) < self.num_sequences(split):
            raise IndexError(f"{split} sequences go from 0 to {self.num_sequences(split) - 1}.")
        chunks = np.empty(len(numbers), np.int64)
        rows = np.empty(len(numbers), np.int64)
        if not len(numbers):
            return chunks, rows
        pages = np.array([self._page_of(int(n), split) for n in numbers]) if self._num_pages > 1 else None
        # Not `np.unique`: its first call imports for longer than a cache takes to open.
        for page in range(1) if pages is None else set(pages.tolist()):
            mask = slice(None) if pages is None else pages == page
            ends = self._page_ends(page, split)
            place = numbers[mask] - self._start(page, split)
            found = np.searchsorted(ends, place, side="right")
            chunks[mask] = found + page * PAGE_CHUNKS
            rows[mask] = place - np.where(found > 0, ends[found - 1], 0)
        return chunks, rows

    def row(self, chunk: int) -> np.void:
        """The index row of a chunk."""
        return self._index.row(chunk)

    @property
    def _num_pages(self) -> int:
        return -(-self.num_chunks // PAGE_CHUNKS)

    def _start(self, page: int, split: str) -> int:
        before = self._index.header(page).before
        return before.train_sequences if split == "train" else before.eval_sequences

    def _page_of(self, number: int, split: str) -> int:
        # Binary search: only headers of the pages on the way are read.
        return bisect_right(range(self._num_pages), number, key=lambda page: self._start(page, split)) - 1

    def _page_ends(self, page: int, split: str) -> np.ndarray:
        if (page, split) not in self._ends:
            self._ends[page, split] = np.cumsum(self._index.rows(page)[split], dtype=np.int64)
        return self._ends[page, split]


def _decode_header(data: bytes, path: Path, page: int) -> _Header:
    if len(data) < HEADER.size or struct.unpack_from("<I", data, HEADER.size - 4)[0] != zlib.crc32(data[:-4]):
        raise CacheCorruptionError(f"{path} is damaged. Remove it: `packhorse cache build` makes it again.")
    magic, version, first, count, _, *values, digest, crc, _ = HEADER.unpack(data)
    is_named = path.stem == f"{first:09d}-{count:04d}" and first == page * PAGE_CHUNKS
    if magic != MAGIC or version != 1 or not is_named or not 0 < count <= PAGE_CHUNKS:
        raise CacheCorruptionError(f"{path} is not page {page} of an index. Remove it.")
    names = ("train_sequences", "eval_sequences", "train_tokens", "eval_tokens")
    return _Header(
        first=first,
        count=count,
        before=Totals(**dict(zip(names, values[:4], strict=True))),
        after=Totals(**dict(zip(names, values[4:], strict=True))),
        digest=digest,
        crc=crc,
    )
