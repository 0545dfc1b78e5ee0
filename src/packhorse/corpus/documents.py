"""A range of a file -> documents.

Every file that is read here can be sought: a range of rows (parquet, arrow) or of bytes (jsonl, txt) gives the same
documents whoever reads it, and whenever. `tables.py` and `lines.py` give the cells.

    parquet rows [2000, 4000)  ->  Documents(rows=[2000, 2001, ...], texts=[...])  about half a MB at a time

Rows that are null, empty or not valid Unicode, or do not pass the filters, are left out and counted.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np

from packhorse.corpus.filters import LEFT_OUT
from packhorse.corpus.lines import line_cells, pieces, refuse_longer
from packhorse.corpus.tables import cell_bytes, open_arrow, open_parquet, read_column, to_python
from packhorse.errors import SourceError

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
    is_final: bool = False
    """Whether its documents have BOS and EOS where they belong."""

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
    is_final: bool = False
    """Whether they have BOS and EOS where they belong."""


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
    cells = _table_cells if file.counts_rows else line_cells
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
                elif not file.counts_rows and not value.isascii() and not is_unicode(value):  # tables have UTF-8
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
                rows=np.array(rows, np.int64),
                texts=kept if is_text else None,
                ids=None if is_text else kept,
                is_final=file.is_final,
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
            yield batch if keep.all() else take_documents(batch, np.flatnonzero(keep))


def take_documents(batch: Documents, places: np.ndarray) -> Documents:
    """Some documents of a batch."""
    texts, ids = ([own[i] for i in places] if own is not None else None for own in (batch.texts, batch.ids))
    return replace(batch, rows=batch.rows[places], texts=texts, ids=ids)


def count_rows(file: TextFile, start: int, stop: int) -> int:
    """How many rows a range has (left-out ones included)."""
    if file.counts_rows:
        return stop - start
    return sum(1 for _ in pieces(file, start, stop))


def find_row(file: TextFile, start: int, stop: int, rows: int) -> int:
    """Where the range ends that begins at `start` and has `rows` rows, or `stop` when there are fewer."""
    if file.counts_rows:
        return min(start + rows, stop)
    place = start
    for number, piece in enumerate(pieces(file, start, stop)):
        if number == rows:
            return place
        place += len(piece)
    return stop


def file_length(file: TextFile) -> int:
    """One past the last row or byte."""
    if file.kind == "parquet":
        return open_parquet(file.path).metadata.num_rows
    if file.kind == "arrow":
        return open_arrow(file.path).num_rows
    return Path(file.path).stat().st_size


def _table_cells(file: TextFile, start: int, stop: int, batch_bytes: int, max_bytes: int | None) -> Iterator[list]:
    for column, keep in read_column(file.path, file.kind, file.column, start, stop, file.filters):
        places = None if keep is None else np.flatnonzero(keep)
        done = 0
        ends = np.cumsum(sizes := cell_bytes(column))
        refuse_longer(int(sizes.max(initial=0)), max_bytes, file)
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
