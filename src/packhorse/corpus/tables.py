"""Parquet and arrow files -> columns -> cells.

Opened files are kept with their footers, and so is the row group that was read last: a worker that takes the next chunk
often needs the rest of it. Filters are decided before any text is read: by the statistics of a row group, then by the
filtered columns; where no row passes, the text is not read at all.
"""

import os
from collections.abc import Iterator
from functools import lru_cache
from typing import Any

import numpy as np

from packhorse.corpus.filters import parse_filters
from packhorse.corpus.masks import is_excluded, keep_rows
from packhorse.errors import SourceError

ID_BYTES = 4
"""What an id of a source of ids weighs, beside the bytes of texts."""
LARGE_GROUP = 64 * 2**20
"""Row groups with more text are not kept, and not read at once."""
BATCH_BYTES = 2**19
"""Text that is read of them at a time: so little that long documents, which often stand together, come one by one."""


def file_version(path: str) -> tuple[int, ...]:
    """Changes when another file takes the name: what is kept in memory of a file is kept under this."""
    try:
        status = os.stat(path)
    except OSError as error:
        raise SourceError(f"The source file {path} cannot be read: {error.strerror}.") from None
    return status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns


def open_parquet(path: str):
    """The opened parquet file; opened ones are kept, with their footers."""
    return _open_parquet(path, file_version(path))


@lru_cache(maxsize=4)
def _open_parquet(path: str, version: tuple[int, ...]):
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        # Not mapped: the memory of a worker would grow with the file, and a file that is cut off would kill it.
        return pq.ParquetFile(path, memory_map=False)
    except (pa.ArrowException, OSError) as error:
        raise SourceError(f"The parquet file {path} cannot be read: it is damaged or cut off ({error}).") from None


def column_bytes(file, number: int, name: str) -> int:
    """Bytes of a column in a row group of a parquet file, uncompressed.

    Args:
        file: The opened file.
        number: Of the row group.
        name: Of the column. Parquet keeps lists and structs as several columns that begin with it; a dot may be part of
            it, so the joined paths of parquet's own metadata do not tell.
    """
    group = file.metadata.row_group(number)
    return sum(group.column(i).total_uncompressed_size for i in _parts(file, name))


def column_weight(file, number: int, name: str) -> int:
    """What a column of a row group weighs in a plan: texts their bytes; ids four each, however they are encoded."""
    group = file.metadata.row_group(number)
    if any(len(file.reader.column_paths[i]) > 1 for i in _parts(file, name)):
        return ID_BYTES * sum(group.column(i).num_values for i in _parts(file, name))
    return column_bytes(file, number, name)


def _parts(file, name: str) -> list[int]:
    return [i for i, path in enumerate(file.reader.column_paths) if path[0] == name]


def open_arrow(path: str):
    """The table in an arrow file (stream or file format), memory-mapped."""
    return _open_arrow(path, file_version(path))


@lru_cache(maxsize=4)
def _open_arrow(path: str, version: tuple[int, ...]):
    import pyarrow as pa

    try:
        mapped = pa.memory_map(path)
        try:
            return pa.ipc.open_stream(mapped).read_all()
        except pa.ArrowInvalid:
            return pa.ipc.open_file(mapped).read_all()
    except (pa.ArrowException, OSError) as error:
        raise SourceError(f"The arrow file {path} cannot be read: it is damaged or cut off ({error}).") from None


@lru_cache(maxsize=1)
def _row_group(path: str, version: tuple[int, ...], number: int, column: str, filters: tuple[str, ...]):
    """The cells of a row group that pass, and which rows those are (None for all)."""
    import pyarrow as pa

    def read(*columns: str):
        return _open_parquet(path, version).read_row_group(number, columns=list(columns), use_threads=False)

    try:
        if not filters:
            return read(column).column(column), None
        file = _open_parquet(path, version)
        comparisons = parse_filters(filters)
        if is_excluded(file, number, comparisons):
            return pa.nulls(0, pa.string()), np.zeros(file.metadata.row_group(number).num_rows, bool)
        keep = keep_rows(read(*{c.column for c in comparisons}), comparisons)
        return (read(column).column(column).filter(keep) if keep.any() else pa.nulls(0, pa.string())), keep
    except (pa.ArrowException, OSError) as error:
        raise SourceError(f"Row group {number} of the parquet file {path} cannot be read: {error}") from None


def read_column(
    path: str, kind: str, column: str, start: int, stop: int, filters: tuple[str, ...] = ()
) -> Iterator[tuple[Any, np.ndarray | None]]:
    """The rows of a column of a `parquet` or `arrow` file, a row group at a time.

    Yields:
        The cells that pass the filters, and for each row whether it does, bool; None when there are no filters.
    """
    if kind == "arrow":
        table = open_arrow(path).slice(start, stop - start)
        keep = keep_rows(table, parse_filters(filters)) if filters else None
        yield (table.column(column) if keep is None else table.column(column).filter(keep)), keep
        return
    version = file_version(path)
    opened = _open_parquet(path, version)
    first = 0
    for number in range(opened.num_row_groups):
        rows = opened.metadata.row_group(number).num_rows
        low, high = max(start, first) - first, min(stop, first + rows) - first
        if low < high and column_bytes(opened, number, column) > LARGE_GROUP:
            yield from _large_group(path, version, number, column, filters, low, high)
        elif low < high:
            cells, keep = _row_group(path, version, number, column, filters)
            if keep is None:
                yield cells.slice(low, high - low), None
            else:
                yield cells.slice(int(keep[:low].sum()), int(keep[low:high].sum())), keep[low:high]
        first += rows


def cell_bytes(column) -> np.ndarray:
    """Bytes of each cell of a column, int64; null has none."""
    parts = [_sizes(part) for part in getattr(column, "chunks", [column])]
    return np.concatenate(parts) if parts else np.empty(0, np.int64)


def _sizes(array) -> np.ndarray:
    # From the offsets themselves: `pyarrow.compute` takes longer to import than a small cache to build.
    import pyarrow as pa

    kind, count, unit = array.type, len(array), 1
    if pa.types.is_dictionary(kind):
        return _sizes(array.dictionary_decode())
    if pa.types.is_string_view(kind) or pa.types.is_binary_view(kind):
        return _sizes(array.cast(pa.large_binary()))
    if not count or pa.types.is_null(kind):
        return np.zeros(count, np.int64)
    if pa.types.is_fixed_size_list(kind):
        return np.full(count, 8 * kind.list_size)
    if pa.types.is_fixed_size_binary(kind):
        return np.full(count, kind.byte_width)
    if pa.types.is_list(kind) or pa.types.is_large_list(kind):
        unit = 8
    large = pa.types.is_large_list(kind) or pa.types.is_large_string(kind) or pa.types.is_large_binary(kind)
    offsets = np.frombuffer(array.buffers()[1], "<i8" if large else "<i4")[array.offset : array.offset + count + 1]
    return unit * np.diff(offsets).astype(np.int64)


def _large_group(
    path: str, version: tuple[int, ...], number: int, column: str, filters: tuple[str, ...], low: int, high: int
) -> Iterator[tuple[Any, np.ndarray | None]]:
    """As `read_column`, for rows of a row group that is too large to be kept: some rows at a time."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    opened = _open_parquet(path, version)
    comparisons = parse_filters(filters)
    if filters and is_excluded(opened, number, comparisons):
        yield pa.nulls(0, pa.string()), np.zeros(high - low, bool)
        return
    num_rows = opened.metadata.row_group(number).num_rows
    batch_rows = max(1, num_rows * BATCH_BYTES // column_bytes(opened, number, column))
    columns = list(dict.fromkeys([column, *(comparison.column for comparison in comparisons)]))
    first = 0
    try:
        # Read, not mapped, and page after page.
        with pq.ParquetFile(path, buffer_size=2**20, pre_buffer=False) as file:
            for batch in file.iter_batches(batch_rows, row_groups=[number], columns=columns, use_threads=False):
                rows = pa.table(batch).slice(
                    max(0, low - first), max(0, min(high, first + len(batch)) - max(low, first))
                )
                first += len(batch)
                if len(rows):
                    keep = keep_rows(rows, comparisons) if filters else None
                    yield (rows.column(column) if keep is None else rows.column(column).filter(keep)), keep
                if first >= high:
                    return
    except (pa.ArrowException, OSError) as error:
        raise SourceError(f"Row group {number} of the parquet file {path} cannot be read: {error}") from None


def holds_ids(kind) -> bool:
    """Whether a column of this type has lists."""
    import pyarrow as pa

    return pa.types.is_list(kind) or pa.types.is_large_list(kind) or pa.types.is_fixed_size_list(kind)


def to_python(column) -> list:
    """The cells of a column: texts, arrays, None; what is not UTF-8 comes as bytes."""
    import pyarrow as pa

    kind = column.type
    if holds_ids(kind):
        ids = _integer_lists(column)
        return ids if ids is not None else [None if cell is None else to_ids(cell) for cell in column.to_pylist()]
    if pa.types.is_dictionary(kind):
        column = column.cast(kind.value_type)
    try:
        # Casting bytes to a string checks that they are UTF-8; a string column is checked by `to_pylist`.
        return (column.cast(pa.large_string()) if _is_binary(kind) else column).to_pylist()
    except (UnicodeDecodeError, pa.ArrowInvalid):
        return [_decode(cell) for cell in column.cast(pa.large_binary()).to_pylist()]


def _integer_lists(column) -> list | None:
    """The cells of a column of lists of whole numbers, without a Python object for each number; None for others."""
    import pyarrow as pa

    lists: list[np.ndarray | None] = []
    for part in column.chunks if isinstance(column, pa.ChunkedArray) else [column]:
        if pa.types.is_fixed_size_list(part.type) or not pa.types.is_integer(part.type.value_type):
            return None
        if part.values.null_count:
            return None
        ids, offsets = part.values.to_numpy(), part.offsets.to_numpy()
        is_there = part.is_valid().to_numpy(zero_copy_only=False).tolist()
        borders = zip(is_there, offsets[:-1].tolist(), offsets[1:].tolist(), strict=True)
        lists += [ids[start:stop] if there else None for there, start, stop in borders]
    return lists


def to_ids(cell: list) -> np.ndarray | object:
    """An array, also of what are no ids: the caller counts it as invalid."""
    try:
        return np.asarray(cell) if cell else np.empty(0, np.int64)
    except (ValueError, OverflowError):  # lists of unequal lists
        return cell


def _is_binary(kind) -> bool:
    import pyarrow as pa

    return pa.types.is_binary(kind) or pa.types.is_large_binary(kind) or pa.types.is_fixed_size_binary(kind)


def _decode(data: bytes | None) -> str | bytes | None:
    try:
        return None if data is None else data.decode()
    except UnicodeDecodeError:
        return data
