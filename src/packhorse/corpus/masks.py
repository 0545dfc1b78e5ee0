"""A table and filters -> which of its rows pass; statistics of a row group and filters -> whether any can."""

import numpy as np

from packhorse.corpus.filters import Comparison, kind_of, wrong_kind
from packhorse.errors import SourceError

_COMPARE = {"==": "equal", "!=": "not_equal", "<": "less", "<=": "less_equal", ">": "greater", ">=": "greater_equal"}
"""The functions of numpy and pyarrow."""


def is_excluded(file, number: int, comparisons: tuple[Comparison, ...]) -> bool:
    """Whether the statistics of a row group of an opened parquet file prove that none of its rows passes."""
    group = file.metadata.row_group(number)
    # `a.b` may be a column, and at the same time a part of the struct `a`.
    columns = {path[0]: group.column(i) for i, path in enumerate(file.reader.column_paths) if len(path) == 1}
    return any(_excludes(columns[c.column].statistics, c, group.num_rows) for c in comparisons if c.column in columns)


def column_kind(kind) -> str:
    """What an arrow type is for filters: `number`, `text`, `boolean`, `` for null, or the name of another type."""
    import pyarrow as pa

    if pa.types.is_dictionary(kind):
        kind = kind.value_type
    if pa.types.is_null(kind):
        return ""
    if pa.types.is_boolean(kind):
        return "boolean"
    if pa.types.is_string(kind) or pa.types.is_large_string(kind) or pa.types.is_string_view(kind):
        return "text"
    return "number" if pa.types.is_integer(kind) or pa.types.is_floating(kind) else str(kind)


def keep_rows(table, comparisons: tuple[Comparison, ...]) -> np.ndarray:
    """Whether each row of a table passes, bool [rows]."""
    import pyarrow as pa
    import pyarrow.compute as pc

    keep = np.ones(len(table), bool)
    for comparison in comparisons:
        column = table.column(comparison.column)
        if comparison.value is None:
            passed = pc.is_null(column) if comparison.operator == "==" else pc.is_valid(column)
        else:
            if pa.types.is_dictionary(column.type):
                column = column.cast(column.type.value_type)
            if column_kind(column.type) not in ("", comparison.kind):
                raise SourceError(f"Cannot go on: {wrong_kind(comparison, str(column.type))}.")
            if comparison.kind == "number" and not pa.types.is_null(column.type):
                # Arrow refuses to compare large integers with fractions, or with integers of another size.
                is_floating = pa.types.is_floating(column.type)
                value = np.float64(comparison.value) if is_floating else comparison.value
                numbers = column if is_floating else pc.fill_null(column, 0)
                compare = getattr(np, _COMPARE[comparison.operator])
                keep &= pc.is_valid(column).to_numpy() & compare(numbers.to_numpy(), value)
                continue
            value = comparison.value
            if comparison.kind == "text":
                column, value = column.cast(pa.large_string()), pa.scalar(value, pa.large_string())
            passed = getattr(pc, _COMPARE[comparison.operator])(column, value)
        keep &= pc.fill_null(passed, False).to_numpy()
    return keep


def _excludes(statistics, comparison: Comparison, rows: int) -> bool:
    if statistics is None:
        return False
    if comparison.value is None:
        nulls = statistics.null_count if statistics.has_null_count else None
        return nulls == (0 if comparison.operator == "==" else rows)
    if not statistics.has_min_max or kind_of(statistics.min) != comparison.kind:
        return False
    least, most, value = statistics.min, statistics.max, comparison.value
    # `!=` excludes nothing: NaN differs from everything, and is in no statistics.
    return {
        "==": value < least or value > most,
        "<": least >= value,
        "<=": least > value,
        ">": most <= value,
        ">=": most < value,
    }.get(comparison.operator, False)
