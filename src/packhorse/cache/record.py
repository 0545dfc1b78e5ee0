"""Commit records: the small file that makes a chunk exist.

A chunk file whose record is missing is nothing; a record names its chunk file by hash, and tells what went into it. All
counts, totals, indexes and snapshots are derived from records.
"""

import re
from bisect import bisect_left
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path

from packhorse.cache import store
from packhorse.cache.plan import Plan, Range
from packhorse.cache.regular import file_size
from packhorse.cache.typed import make, refuse_unless
from packhorse.errors import CacheCorruptionError, CacheError, NonDeterministicBuildError, StorageIOError

FOLDER_CHUNKS = 1_000
"""Chunks in one folder."""
MAX_CHUNKS = 2**32
"""A chunk file has room for its number in four bytes."""

MAX_RECORD_BYTES = 16 * 2**20

_HASH = re.compile(r"\A[0-9a-f]{64}\Z")
_BOUNDS = (
    ("eval_documents", "documents"),
    ("cut_documents", "documents"),
    ("documents", "pieces"),
    ("sequences", "pieces"),
)
"""(count, what it cannot be above)."""


@dataclass(frozen=True, kw_only=True)
class Record:
    """What is known about one committed chunk."""

    format: int = 1
    recipe: str
    """Digest of the recipe."""
    chunk: int
    ranges: list[Range]
    """The entry of the plan that was built."""
    payload_sha256: str
    """Of what the chunk holds, whatever the codec: equal for all who build it."""
    file_sha256: str
    file_bytes: int
    index_sha256: str
    train_sequences: int
    eval_sequences: int
    train_tokens: int
    """Without padding."""
    eval_tokens: int
    pieces: int
    documents: int
    eval_documents: int
    cut_documents: int
    """Documents with more than one piece."""
    rows_null: int
    rows_empty: int
    rows_invalid: int
    text_bytes: int
    seconds: float
    """That the building took; says nothing about the content."""
    engine: str
    """Name and version of what tokenized."""
    codec: str
    """Level and version of what compressed."""
    packhorse: str
    """Version of this package."""
    repeated_tokens: int = 0
    """Of the tokens, those that `packing: window` put into a second sequence as well."""
    truncated_documents: int = 0
    truncated_tokens: int = 0
    rows_filtered: int = 0
    rows_duplicate: int = 0
    """Documents that have a place before, with `deduplicate: exact`."""
    """What `long_documents: truncate` dropped."""

    @property
    def sequences(self) -> int:
        """Train and eval."""
        return self.train_sequences + self.eval_sequences

    @property
    def tokens(self) -> int:
        """Train and eval, without padding."""
        return self.train_tokens + self.eval_tokens


def chunk_path(folder: Path, chunk: int, file_sha256: str) -> Path:
    """Where the file of a chunk lies: its name follows from number and hash, never from what a file says."""
    return folder / "chunks" / f"{chunk // FOLDER_CHUNKS:06d}" / f"{chunk:08d}-{file_sha256[:16]}.chunk"


def record_path(folder: Path, chunk: int) -> Path:
    """Where the record of a chunk lies."""
    return folder / "records" / f"{chunk // FOLDER_CHUNKS:06d}" / f"{chunk:08d}.json"


def commit(folder: Path, record: Record, parts: list[bytes | memoryview], read_back: bool = True) -> Record:
    """Make a chunk exist: first its file, then its record.

    Args:
        folder: The cache.
        record: What is known about the chunk.
        parts: The bytes of its file.
        read_back: Read the file again before the record is written, and compare its SHA-256.

    Returns:
        The record that counts: this one, or that of another builder who was first.

    Raises:
        NonDeterministicBuildError: another builder made other tokens of the same documents; nothing was overwritten.
        StorageIOError: the disk did not keep what was written.
        CacheError: the cache was removed meanwhile; it is not made again.
    """
    # Chunks of which no recipe and no plan knows would be in the way of whoever builds here next.
    if not (folder / "recipe.json").exists():
        raise _removed(folder)
    try:
        return _commit(folder, record, parts, read_back)
    except FileNotFoundError:
        if (folder / "recipe.json").exists():
            raise
        raise _removed(folder) from None


def _commit(folder: Path, record: Record, parts: list[bytes | memoryview], read_back: bool) -> Record:
    path = chunk_path(folder, record.chunk, record.file_sha256)
    store.make_folder(path.parent, folder)
    if not store.publish(path, parts) and not store.holds(path, record.file_sha256):
        store.quarantine(path, folder)
        store.publish(path, parts)
    if read_back and not store.holds(path, record.file_sha256):
        moved = store.quarantine(path, folder)
        raise StorageIOError(
            f"{path} was read back with another content than was written; it is now {moved}.\n"
            "Check the disk and the memory of this machine, and run the same command again."
        )
    where = record_path(folder, record.chunk)
    store.make_folder(where.parent, folder)
    if store.publish(where, store.seal(asdict(record))):
        return record
    try:
        winner = read_record(folder, record.chunk)
    except FileNotFoundError:
        # Another process has just moved it to the quarantine; a link that leads nowhere goes there now.
        if where.is_symlink():
            store.quarantine(where, folder)
        return _commit(folder, record, parts, read_back)
    if winner.payload_sha256 != record.payload_sha256:
        raise NonDeterministicBuildError(
            f"Chunk {record.chunk} of {folder} was built twice, with different tokens:\n"
            f"  committed {winner.payload_sha256} by {winner.engine}\n"
            f"  now       {record.payload_sha256} by {record.engine}\n"
            "Nothing was overwritten. Check the source and the memory of this machine."
        )
    if winner.file_sha256 != record.file_sha256:
        if not store.holds(chunk_path(folder, record.chunk, winner.file_sha256), winner.file_sha256):
            # The file of the winner is lost or damaged, and another codec makes another file of the same tokens.
            store.quarantine(where, folder)
            return _commit(folder, record, parts, read_back)
        store.remove(path)
    return winner


def read_record(folder: Path, chunk: int) -> Record:
    """The record of a chunk.

    Raises:
        FileNotFoundError: the chunk is not committed.
        CacheCorruptionError: the record is damaged, or does not belong here.
    """
    path = record_path(folder, chunk)
    what = f"the commit record of chunk {chunk}"
    record = make(Record, store.read_sealed(path, MAX_RECORD_BYTES), path, what)
    if record.chunk != chunk or record.format != 1:
        raise CacheCorruptionError(f"{path} is the record of chunk {record.chunk} in format {record.format}.")
    for name in ("recipe", "payload_sha256", "file_sha256", "index_sha256"):
        refuse_unless(bool(_HASH.match(getattr(record, name))), path, what, f"{name} is not a SHA-256")
    for count, limit in _BOUNDS:
        problem = f"{count} is {getattr(record, count):,}, and {limit} {getattr(record, limit):,}"
        refuse_unless(getattr(record, count) <= getattr(record, limit), path, what, problem)
    refuse_unless(
        record.pieces <= record.tokens < 2**40, path, what, f"{record.tokens:,} tokens, {record.pieces:,} pieces"
    )
    refuse_unless(record.pieces < 2**32 > record.documents, path, what, f"{record.pieces:,} pieces")
    refuse_unless(all(start < stop for _, start, stop in record.ranges), path, what, "a range is empty")
    return record


def refuse_strangers(folder: Path, plan: Plan, recipe_digest: str, committed: list[int]) -> None:
    """Refuse to build on when recipe or plan are those of another cache: every page is compared with two records.

    Raises:
        CacheCorruptionError: a record is of another recipe, or of other ranges than its entry.
    """
    first_chunks = [page.first_chunk for page in plan.pages]
    places = {bisect_left(committed, chunk) for chunk in first_chunks}
    for chunk in {committed[i] for place in places for i in (place - 1, place) if 0 <= i < len(committed)}:
        if chunk >= plan.num_chunks:
            continue
        with suppress(FileNotFoundError):  # moved away since the folder was listed
            record = read_record(folder, chunk)
            if record.recipe != recipe_digest or record.ranges != plan.entry(chunk):
                which = "recipe.json" if record.recipe != recipe_digest else f"page {plan.page(chunk).page} of the plan"
                raise CacheCorruptionError(
                    f"The {which} in {folder} is that of another cache: chunk {chunk} was built by another.\n"
                    "Nothing was built. `packhorse cache validate` says more."
                )


def readable_records(folder: Path, chunks: list[int] | None = None) -> Iterator[Record]:
    """The records of some chunks, by default of all, that are there and not damaged, in order."""
    for chunk in committed_chunks(folder) if chunks is None else chunks:
        with suppress(FileNotFoundError, CacheCorruptionError):
            yield read_record(folder, chunk)


def committed_chunks(folder: Path) -> list[int]:
    """Numbers of the chunks that have a record, in order; some may be beyond the plan."""
    return sorted(chunk for path in _files(folder / "records", ".json") if (chunk := _chunk_of(path)) is not None)


def misplaced_records(folder: Path) -> list[Path]:
    """What lies among the records under a name that no record has there."""
    return sorted(path for path in _files(folder / "records", ".json") if _chunk_of(path) is None)


def unplanned_chunks(folder: Path, beyond: list[int], recipe_digest: str | None) -> list[int]:
    """Those of the numbers beyond a plan that are chunks: the page that planned them is gone.

    A record is only written for what is planned; so one that is whole, and of this recipe, tells that there was a page.
    """
    return [r.chunk for r in readable_records(folder, beyond) if recipe_digest in (None, r.recipe)]


def chunk_sizes(folder: Path) -> dict[str, int]:
    """Names of the chunk files that exist -> bytes; -1 for what is no file."""
    sizes = {}
    for path in _files(folder / "chunks", ".chunk"):
        with suppress(FileNotFoundError):  # quarantined meanwhile
            if _chunk_of(path) is not None:
                sizes[path.name] = file_size(path)
    return sizes


def _removed(folder: Path) -> CacheError:
    return CacheError(
        f"The cache {folder} was removed while it was being built.\nRun the command again to build it anew."
    )


def _chunk_of(path: Path) -> int | None:
    """The chunk whose record or file has this name, in this folder; None if none has."""
    digits = path.stem.partition("-")[0]
    if not (digits.isascii() and digits.isdecimal()):
        return None
    chunk = int(digits)
    is_there = (path.parent.name, digits) == (f"{chunk // FOLDER_CHUNKS:06d}", f"{chunk:08d}")
    return chunk if is_there and chunk < MAX_CHUNKS else None


def _files(root: Path, suffix: str) -> list[Path]:
    folders = [sub for sub in root.iterdir() if sub.name.isdigit() and sub.is_dir()] if root.is_dir() else []
    return [path for sub in folders for path in sub.iterdir() if path.suffix == suffix]
