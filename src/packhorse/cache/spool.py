"""What cannot be sought -> files that can.

Compressed files, JSON arrays and streams are unpacked into the cache's `spool` folder, named by the probe of what they
come from. A spool is scratch: whoever misses one makes it again, and it is removed once its chunks are committed.
"""

import hashlib
import io
import itertools
import json
from collections.abc import Iterable, Iterator
from functools import lru_cache
from pathlib import Path

import numpy as np
import xxhash

from packhorse.cache import store
from packhorse.cache.regular import read_parts
from packhorse.corpus.filters import LEFT_OUT
from packhorse.corpus.lines import decompress, starts_with_bracket
from packhorse.corpus.sources import Document, document_bytes
from packhorse.corpus.tables import file_version
from packhorse.errors import CacheCorruptionError, SourceError

FILTERS = ("passed == true",)
"""The filters of spooled documents: a stream is filtered before."""


def unpack(path: str, packed: str, kind: str, target: Path) -> None:
    """Unpack a file of a source (see `SourceFile.packed`) to `target`, unless that is there and whole."""
    if is_whole(target):
        return
    if packed == "array":
        lines = _array_lines(path, Path(path).read_bytes())
    else:
        lines = decompress(path)
        if kind == "jsonl":
            first = next(lines, b"")
            rest = itertools.chain([first], lines)
            lines = _array_lines(path, b"".join(rest)) if starts_with_bracket(first) else rest
    publish(target, lines)


def publish(target: Path, parts: Iterable[bytes]) -> None:
    """Write a spool, unless it is there and whole; before it has its name, its checksum is beside it."""
    if target.exists():
        if is_whole(target):
            return
        remove(target)
    store.make_folder(target.parent)
    store.publish(target, _summed(target, parts))


def is_whole(target: Path) -> bool:
    """Whether a spool is there, as it was written: else text would be tokenized that nobody wrote."""
    try:
        return _is_whole(target, file_version(str(target)))
    except SourceError:
        return False


def remove(target: Path) -> None:
    """Remove a spool: it can be made again."""
    store.remove(target)
    store.remove(_sum_path(target))


def cut_stream(documents: Iterator[Document], part_bytes: int) -> Iterator[list[Document]]:
    """Lists of documents of about `part_bytes` bytes of text."""
    part: list[Document] = []
    size = 0
    for document in documents:
        part.append(document)
        size += document_bytes(document)
        if size >= part_bytes:
            yield part
            part, size = [], 0
    if part:
        yield part


def digest_documents(documents: Iterable[Document]) -> str:
    """SHA-256 over documents and their borders."""
    digest = hashlib.sha256()
    for document in documents:
        if document is None:
            data = b"null"
        elif document is LEFT_OUT:
            data = b"left out"
        elif isinstance(document, str):
            data = b"text" + document.encode("utf-8", "surrogatepass")
        else:
            data = b"ids " + document.astype("<i8").tobytes()
        digest.update(len(data).to_bytes(8, "little") + data)
    return digest.hexdigest()


def write_documents(documents: list[Document], target: Path) -> None:
    """Spool documents to a parquet file with the columns `document` and `passed` (the filters)."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    cells = [None if document is LEFT_OUT else document for document in documents]
    if any(isinstance(cell, np.ndarray) for cell in cells):
        if any(isinstance(cell, str) for cell in cells):
            raise SourceError("A source gave texts and lists of ids mixed: it must give one kind.")
        lengths = [0 if cell is None else len(cell) for cell in cells]
        ids = np.concatenate([np.empty(0, np.int64), *(cell for cell in cells if cell is not None)]).astype(np.int64)
        borders = pa.array(np.cumsum([0, *lengths]), pa.int64())
        column = pa.LargeListArray.from_arrays(borders, pa.array(ids), mask=pa.array([c is None for c in cells]))
    else:
        # As bytes, because a Python string may hold what is not Unicode; the reader counts and skips that.
        data = [None if cell is None else cell.encode("utf-8", "surrogatepass") for cell in cells]
        column = pa.array(data, pa.large_binary())
    buffer = io.BytesIO()
    table = pa.table({"document": column, "passed": [document is not LEFT_OUT for document in documents]})
    pq.write_table(table, buffer, compression="none", use_dictionary=False, row_group_size=max(1, len(documents)))
    publish(target, [buffer.getvalue()])


@lru_cache(maxsize=1_024)
def _is_whole(target: Path, version: tuple[int, ...]) -> bool:
    digest = xxhash.xxh3_128()
    try:
        expected = store.read_sealed(_sum_path(target), 4_096)
        for part in read_parts(target):
            digest.update(part)
    except (FileNotFoundError, CacheCorruptionError):
        return False
    return expected == {"xxh3_128": digest.hexdigest()}


def _summed(target: Path, parts: Iterable[bytes]) -> Iterator[bytes]:
    digest = xxhash.xxh3_128()
    for part in parts:
        digest.update(part)
        yield part
    store.publish(_sum_path(target), store.seal({"xxh3_128": digest.hexdigest()}))


def _sum_path(target: Path) -> Path:
    return target.with_name(f"{target.name}.sum")


def _array_lines(path: str, data: bytes) -> Iterator[bytes]:
    try:
        rows = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise SourceError(f"{path} is not valid JSON: {error}.") from None
    for row in rows:
        yield json.dumps(row).encode() + b"\n"
