"""Parquet and arrow files -> columns -> cells.

Opened files are kept with their footers, and so is the row group that was read last: a worker that takes the next chunk
often needs the rest of it.
"""

import os
from collections.abc import Iterator
from functools import lru_cache

import numpy as np

from packhorse.errors import SourceError


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
        return pq.ParquetFile(path, memory_map=True)
    except (pa.ArrowException, OSError) as error:
        raise SourceError(f"The parquet file {path} cannot be read: it is damaged or cut off ({error}).") from None


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
def _row_group(path: str, version: tuple[int, ...], number: int, column: str):
    import pyarrow as pa

    try:
        return _open_parquet(path, version).read_row_group(number, columns=[column], use_threads=False).column(0)
    except (pa.ArrowException, OSError) as error:
        raise SourceError(f"Row group {number} of the parquet file {path} cannot be read: {error}") from None


def read_column(path: str, kind: str, column: str, start: int, stop: int) -> Iterator:
    """The rows of a column of a `parquet` or `arrow` file, a row group at a time."""
    if kind == "arrow":
        yield open_arrow(path).column(column).slice(start, stop - start)
        return
    version = file_version(path)
    metadata = _open_parquet(path, version).metadata
    first = 0
    for number in range(metadata.num_row_groups):
        rows = metadata.row_group(number).num_rows
        low, high = max(start, first), min(stop, first + rows)
        if low < high:
            yield _row_group(path, version, number, column).slice(low - first, high - low)
        first += rows


def to_python(column) -> list:
    """The cells of a column: texts, arrays, None; what is not UTF-8 comes as a text with lone surrogates."""
    import pyarrow as pa

    kind = column.type
    if pa.types.is_list(kind) or pa.types.is_large_list(kind) or pa.types.is_fixed_size_list(kind):
        return [None if cell is None else to_ids(cell) for cell in column.to_pylist()]
    if pa.types.is_dictionary(kind):
        column = column.cast(kind.value_type)
    try:
        # Casting bytes to a string checks that they are UTF-8; a string column is checked by `to_pylist`.
        return (column.cast(pa.large_string()) if _is_binary(kind) else column).to_pylist()
    except (UnicodeDecodeError, pa.ArrowInvalid):
        return [_decode(cell) for cell in column.cast(pa.large_binary()).to_pylist()]


def to_ids(cell: list) -> np.ndarray | object:
    """An array, also of what are no ids: the caller counts it as invalid."""
    try:
        return np.asarray(cell) if cell else np.empty(0, np.int64)
    except (ValueError, OverflowError):  # lists of unequal lists
        return cell


def _is_binary(kind) -> bool:
    import pyarrow as pa

    return pa.types.is_binary(kind) or pa.types.is_large_binary(kind) or pa.types.is_fixed_size_binary(kind)


def _decode(data: bytes | None) -> str | None:
    return None if data is None else data.decode("utf-8", "surrogateescape")
