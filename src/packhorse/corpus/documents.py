r"""A range of a file -> documents.

Every file that is read here can be sought: a range of rows (parquet, arrow) or of bytes (jsonl, txt) gives the same
documents whoever reads it, and whenever. Bytes are cut at b"\n" only: `str.splitlines` would also cut at U+2028
inside a JSON string.

    parquet rows [2000, 4000)  ->  Documents(rows=[2000, 2001, ...], texts=[...])  about half a MB at a time

Rows that are null, empty or not valid Unicode, or do not pass the filters, are left out and counted.
"""

import gzip
import json
import zlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from packhorse.corpus.filters import LEFT_OUT, parse_filters, passes
from packhorse.corpus.tables import cell_bytes, open_arrow, open_parquet, read_column, to_ids, to_python
from packhorse.errors import DocumentTooLongError, SourceError

BATCH_BYTES = 2**19
"""Text handed on at a time: what engines read and write of it stays in the cache of a core."""


@dataclass(frozen=True, kw_only=True)
class Reading:
    """What of a source is a document."""

    column: str = "text"
    """The column or key that holds the text."""
    filters: tuple[str, ...] = ()
    """Which rows: see `filters.py`."""
    sample_by: str = "line"
    """What of a txt file: `line`, `paragraph` or `document` (the whole file)."""


@dataclass(frozen=True, kw_only=True)
class TextFile:
    """One file of a source that can be sought, and how it is read."""

    path: str
    kind: str
    """`parquet` or `arrow` (ranges of rows); `jsonl`, `line`, `paragraph` or `document` (ranges of bytes)."""
    column: str = "text"
    """The column of a table, or the key of a JSON line. Its values are texts, or lists of ids."""
    filters: tuple[str, ...] = ()
    """Which rows are documents: see `filters.py`."""
    is_strict: bool = False
    """Whether a line that is not valid JSON is an error; else it is left out and counted."""

    @property
    def counts_rows(self) -> bool:
        """Whether ranges of this file are rows; else they are bytes."""
        return self.kind in ("parquet", "arrow")


@dataclass(kw_only=True)
class Documents:
    """Some documents of a file, in order. Either `texts` or `ids` is there."""

    rows: np.ndarray
    """int64 [n]: the place of each in its range, counted from 0, left-out rows included."""
    texts: list[str] | None = None
    ids: list[np.ndarray] | None = None


@dataclass(kw_only=True)
class Skipped:
    """Rows that gave no document."""

    null: int = 0
    empty: int = 0
    invalid: int = 0
    filtered: int = 0
    """Rows that did not pass the filters."""
    duplicate: int = 0
    """Documents that were dropped for one before them."""
    rows: int = field(default=0, repr=False)
    """All rows seen, left out or not."""


def read_documents(
    file: TextFile,
    start: int,
    stop: int,
    skipped: Skipped,
    batch_bytes: int = BATCH_BYTES,
    max_bytes: int | None = None,
) -> Iterator[Documents]:
    """The documents of a range, in order, about `batch_bytes` at a time.

    Args:
        file: The file.
        start: First row, or first byte.
        stop: One past the last.
        skipped: Counts what is left out, added to while reading.
        batch_bytes: When a batch is full; a longer document is one of its own.
        max_bytes: Longer documents are refused.

    Raises:
        DocumentTooLongError: a document is longer than `max_bytes`.
        SourceError: the file cannot be read, or a line (the message has its number) is not valid JSON or holds what a
            filter cannot compare.
    """
    cells = _table_cells if file.counts_rows else _line_cells
    first = skipped.rows
    for values in cells(file, start, stop, batch_bytes, max_bytes):
        rows: list[int] = []
        kept: list = []
        for value in values:
            row = skipped.rows - first
            skipped.rows += 1
            if value is LEFT_OUT:
                skipped.filtered += 1
            elif value is None:
                skipped.null += 1
            elif isinstance(value, str):
                if not value or value.isspace():
                    skipped.empty += 1
                elif not value.isascii() and not is_unicode(value):
                    skipped.invalid += 1
                else:
                    rows.append(row)
                    kept.append(value)
            elif isinstance(value, np.ndarray):
                if not len(value):
                    skipped.empty += 1
                elif value.ndim != 1 or value.dtype.kind not in "iu":
                    skipped.invalid += 1
                else:
                    rows.append(row)
                    kept.append(value.astype(np.int64, copy=False))
            else:
                skipped.invalid += 1
        if rows:
            is_text = isinstance(kept[0], str)
            if any(isinstance(value, str) != is_text for value in kept):
                raise SourceError(f"{file.path} mixes texts and lists of ids in {file.column!r}.")
            yield Documents(
                rows=np.array(rows, np.int64), texts=kept if is_text else None, ids=None if is_text else kept
            )


def read_ranges(
    ranges: Iterable[tuple[TextFile, int, int]],
    skipped: Skipped,
    dropped: Sequence[int] = (),
    max_bytes: int | None = None,
) -> Iterator[Documents]:
    """The documents of several ranges, as `read_documents` gives them; rows are counted through all of them.

    Args:
        ranges: File, start and stop of each.
        skipped: Counts what is left out, added to while reading.
        dropped: Rows that are left out as duplicates, in order.
        max_bytes: Longer documents are refused.
    """
    for file, start, stop in ranges:
        first = skipped.rows
        for batch in read_documents(file, start, stop, skipped, max_bytes=max_bytes):
            batch.rows += first
            keep = ~np.isin(batch.rows, dropped) if len(dropped) else np.ones(len(batch.rows), bool)
            skipped.duplicate += int((~keep).sum())
            yield batch if keep.all() else _take(batch, np.flatnonzero(keep))


def count_rows(file: TextFile, start: int, stop: int) -> int:
    """How many rows a range has (left-out ones included)."""
    if file.counts_rows:
        return stop - start
    return sum(1 for _ in _pieces(file, start, stop))


def find_row(file: TextFile, start: int, stop: int, rows: int) -> int:
    """Where the range ends that begins at `start` and has `rows` rows, or `stop` when there are fewer."""
    if file.counts_rows:
        return min(start + rows, stop)
    place = start
    for number, piece in enumerate(_pieces(file, start, stop)):
        if number == rows:
            return place
        place += len(piece)
    return stop


def find_cut(file: TextFile, place: int, stop: int) -> int:
    """The first border between documents at or after byte `place`."""
    if file.kind == "document":
        return stop
    border = b"\n\n" if file.kind == "paragraph" else b"\n"
    place = max(place - len(border), 0)
    with open(file.path, "rb") as stream:
        stream.seek(place)
        tail = b""
        while place < stop:
            data = stream.read(min(2**20, stop - place))
            if not data:
                break
            at = (tail + data).find(border)
            if at >= 0:
                return min(place - len(tail) + at + len(border), stop)
            tail = data[-(len(border) - 1) :] if len(border) > 1 else b""
            place += len(data)
    return stop


def file_length(file: TextFile) -> int:
    """One past the last row or byte."""
    if file.kind == "parquet":
        return open_parquet(file.path).metadata.num_rows
    if file.kind == "arrow":
        return open_arrow(file.path).num_rows
    return Path(file.path).stat().st_size


def _take(batch: Documents, places: np.ndarray) -> Documents:
    texts, ids = ([own[i] for i in places] if own is not None else None for own in (batch.texts, batch.ids))
    return Documents(rows=batch.rows[places], texts=texts, ids=ids)


def _table_cells(file: TextFile, start: int, stop: int, batch_bytes: int, max_bytes: int | None) -> Iterator[list]:
    for column, keep in read_column(file.path, file.kind, file.column, start, stop, file.filters):
        places = None if keep is None else np.flatnonzero(keep)
        done = 0
        ends = np.cumsum(sizes := cell_bytes(column))
        _refuse_longer(int(sizes.max(initial=0)), max_bytes, file)
        first = 0
        while first < len(column):
            before = ends[first - 1] if first else 0
            count = max(1, int(np.searchsorted(ends, before + batch_bytes, side="right")) - first)
            cells = to_python(column.slice(first, count))
            first += count
            if places is None:
                yield cells
                continue
            last = int(places[first - 1]) + 1
            values: list = [LEFT_OUT] * (last - done)
            for place, cell in zip(places[first - count : first].tolist(), cells, strict=True):
                values[place - done] = cell
            yield values
            done = last
        if keep is not None and done < len(keep):
            yield [LEFT_OUT] * (len(keep) - done)


def is_unicode(text: str) -> bool:
    """Whether a text can be written as UTF-8: a Python string may hold lone surrogates."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def _refuse_longer(size: int, max_bytes: int | None, file: TextFile) -> None:
    if max_bytes is not None and size > max_bytes:
        raise DocumentTooLongError(
            f"{file.path} has a document of {size / 1e6:,.1f} MB or more; `memory_limit` leaves room for "
            f"{max_bytes / 1e6:,.1f} MB.\nRaise the limit, set fewer `workers`, or leave the document out."
        )


def _line_cells(file: TextFile, start: int, stop: int, batch_bytes: int, max_bytes: int | None) -> Iterator[list]:
    parse = _parse_json if file.kind == "jsonl" else _parse_text
    cells: list = []
    size = 0
    place = start
    for piece in _pieces(file, start, stop, max_bytes):
        cells.append(parse(piece, file, place))
        place += len(piece)
        size += len(piece)
        if size >= batch_bytes:
            yield cells
            cells, size = [], 0
    if cells:
        yield cells


def _parse_text(piece: bytes, file: TextFile, place: int) -> str:
    if file.kind != "document":
        piece = piece.rstrip(b"\r\n")
    return piece.decode("utf-8", "surrogateescape")


def _parse_json(piece: bytes, file: TextFile, place: int) -> object:
    if not piece.strip():
        return ""
    try:
        row = json.loads(piece)
        if not isinstance(row, dict):
            raise ValueError(f"an object with the key {file.column!r} is expected, not {type(row).__name__}")
    except UnicodeDecodeError:
        return piece  # counted as invalid
    except (ValueError, RecursionError) as error:
        if not file.is_strict:
            return piece
        raise SourceError(
            f"{file.path}, line {_line_number(file, place)} is not valid JSON: {error}.\n"
            "Set `invalid_rows: skip` to leave such lines out and count them: what was built stays, and the same "
            "command goes on. A mended file is another file: to build from one, set `name`, for another cache."
        ) from None
    try:
        if not passes(row, parse_filters(file.filters)):
            return LEFT_OUT
    except ValueError as error:
        raise SourceError(f"{file.path}, line {_line_number(file, place)}: {error}.") from None
    value = row.get(file.column)
    return to_ids(value) if isinstance(value, list) else value


def _line_number(file: TextFile, place: int) -> int:
    with open(file.path, "rb") as stream:
        return 1 + sum(block.count(b"\n") for block in _blocks(stream, 0, place))


def _pieces(file: TextFile, start: int, stop: int, max_bytes: int | None = None) -> Iterator[bytes]:
    """The raw bytes of each document, borders included: together they are the whole range."""
    border = {"paragraph": b"\n\n", "document": None}.get(file.kind, b"\n")
    with _open(file.path) as stream:
        if border is None:
            _refuse_longer(stop - start, max_bytes, file)
            stream.seek(start)
            data = stream.read(stop - start)
            if data:
                yield data
            return
        # Joined only where a document ends: a long one is not copied again for every block of it.
        waiting: list[bytes] = []
        for block in _blocks(stream, start, stop):
            edge = waiting[-1][1 - len(border) :] if waiting and len(border) > 1 else b""
            waiting.append(block)
            if border not in edge + block:
                _refuse_longer(sum(map(len, waiting)), max_bytes, file)
                continue
            parts = b"".join(waiting).split(border)
            tail = parts.pop()
            waiting = [tail] if tail else []
            for part in parts:
                _refuse_longer(len(part), max_bytes, file)
                yield part + border
        if waiting:
            yield b"".join(waiting)


def _open(path: str):
    try:
        return open(path, "rb")
    except OSError as error:
        raise SourceError(f"The source file {path} cannot be read: {error.strerror}.") from None


def _blocks(stream, start: int, stop: int) -> Iterator[bytes]:
    stream.seek(start)
    while start < stop:
        block = stream.read(min(2**20, stop - start))
        if not block:
            raise SourceError(f"{stream.name} is shorter than it was when the plan was made.")
        start += len(block)
        yield block


def decompress(path: str) -> Iterator[bytes]:
    """The content of a compressed file (gz, zst, bz2, xz), a block at a time."""
    import bz2
    import lzma

    openers = {".gz": gzip.open, ".bz2": bz2.open, ".xz": lzma.open, ".zst": _open_zstd}
    try:
        with openers[Path(path).suffix](path, "rb") as stream:
            while block := stream.read(2**20):
                yield block
    except (OSError, EOFError, lzma.LZMAError, zlib.error) as error:
        raise SourceError(f"The compressed file {path} cannot be read: it is damaged or cut off ({error}).") from None


def starts_with_bracket(data: bytes) -> bool:
    """Whether JSON that begins so is one array, not a row a line."""
    return data.lstrip(b"\xef\xbb\xbf \t\r\n")[:1] == b"["


def _open_zstd(path: str, mode: str):
    import pyarrow as pa

    return pa.CompressedInputStream(pa.OSFile(path, mode), "zstd")
