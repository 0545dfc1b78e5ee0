"""Ranges of files -> the entries of a page: about equal amounts of text, cut where it is cheap to read."""

from collections.abc import Iterator
from functools import lru_cache

from packhorse.cache.plan import Range
from packhorse.corpus.documents import TextFile
from packhorse.corpus.filters import parse_filters
from packhorse.corpus.lines import find_cut
from packhorse.corpus.masks import is_excluded
from packhorse.corpus.tables import ID_BYTES, column_weight, file_version, holds_ids, open_arrow, open_parquet


def cut_ranges(ranges: list[Range], files: dict[int, TextFile], chunk_bytes: int) -> Iterator[list[Range]]:
    """Cut ranges into entries of about equal text, near `chunk_bytes` each, at borders of row groups where it can."""
    weights = [range_weight(files[number], start, stop) for number, start, stop in ranges]
    left = sum(weights)
    entry: list[Range] = []
    room = target = _share(left, chunk_bytes)
    for (number, start, stop), weight in zip(ranges, weights, strict=True):
        while start < stop:
            if weight <= room * 1.1:
                cut, taken = stop, weight
            else:
                cut = _advance(files[number], start, stop, room, fresh=not entry)
                taken = range_weight(files[number], start, cut)
            if cut > start:
                entry.append((number, start, cut))
                room, left, weight, start = room - taken, left - taken, weight - taken, cut
            if (room < 0.1 * target or cut < stop) and entry:
                yield entry
                entry, room = [], (target := _share(left, chunk_bytes))
    if entry:
        yield entry


def _share(left: float, chunk_bytes: int) -> float:
    """Text of the next entry: what is left, in equal parts. Asked anew each time, so that no crumb is left over."""
    return left / max(1, round(left / chunk_bytes))


def _advance(file: TextFile, start: int, stop: int, room: float, fresh: bool) -> int:
    """Where a range is cut so that about `room` bytes lie before the cut; `start` if better nothing is taken."""
    if not file.counts_rows:
        return find_cut(file, start + max(1, int(room)), stop)
    cut = start
    for first, rows, size in row_groups(file):
        low, high = max(first, start), min(first + rows, stop)
        if low >= high:
            continue
        weight = size * (high - low) / rows
        if weight <= room * 1.2:
            cut, room = high, room - weight
        elif cut > start or not fresh:
            return cut
        else:
            return low + max(1, min(high - low, round(room * rows / max(size, 1))))
    return cut


def first_bytes(ranges: list[Range], files: dict[int, TextFile], size: float) -> list[Range]:
    """The beginning of some ranges: about `size` bytes of text, cut between two documents."""
    kept: list[Range] = []
    for number, start, stop in ranges:
        if size < 1:
            break
        weight = range_weight(files[number], start, stop)
        cut = stop if weight <= size else _find_place(files[number], start, stop, size)
        kept.append((number, start, cut))
        size -= weight
    return kept


def _find_place(file: TextFile, start: int, stop: int, size: float) -> int:
    """Where about `size` bytes of text after `start` end; at least one document is before it."""
    if not file.counts_rows:
        return find_cut(file, start + max(1, int(size)), stop)
    for first, rows, weight in row_groups(file):
        low, high = max(first, start), min(first + rows, stop)
        if low < high and (here := weight * (high - low) / rows) > size:
            return min(high, max(low, start + 1, low + round(size * rows / weight)))
        size -= here if low < high else 0
    return stop


def range_weight(file: TextFile, start: int, stop: int) -> float:
    """Bytes of text in a range, as far as they are known without reading it."""
    if not file.counts_rows:
        return stop - start
    return sum(
        size * max(0, min(first + rows, stop) - max(first, start)) / rows for first, rows, size in row_groups(file)
    )


def row_groups(file: TextFile) -> list[tuple[int, int, int]]:
    """(first row, rows, weight of the column) of each row group that has rows."""
    return _read_row_groups(file, file_version(file.path))


@lru_cache(maxsize=8)
def _read_row_groups(file: TextFile, version: tuple[int, ...]) -> list[tuple[int, int, int]]:
    if file.kind == "arrow":
        column = open_arrow(file.path).column(file.column)
        has_ids = holds_ids(column.type)
        weight = ID_BYTES * sum(len(part.flatten()) for part in column.chunks) if has_ids else column.nbytes
        return [(0, len(column), weight)] if len(column) else []
    groups = []
    comparisons = parse_filters(file.filters)
    opened = open_parquet(file.path)
    first = 0
    for number in range(opened.num_row_groups):
        rows = opened.metadata.row_group(number).num_rows
        if rows:
            # What is known to be left out has no text to read.
            is_left_out = is_excluded(opened, number, comparisons)
            groups.append((first, rows, 0 if is_left_out else column_weight(opened, number, file.column)))
        first += rows
    return groups
