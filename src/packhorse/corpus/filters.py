"""Column filters: which rows of a source are documents.

    filters: ["int_score >= 3", "language == 'en' and url != null"]

    filter    comparison ("and" comparison)*
    comparison    column  == | != | < | <= | > | >=  literal
    column    letters, digits, _ . -   or anything between backquotes
    literal   3   -0.5   'text'   "text"   true   false   null        (true, false and null with == and != only)

All filters must hold. A row whose column is null (or missing) passes `== null` alone, as in SQL. Nothing is ever
evaluated: a filter is parsed into comparisons, and those are looked up in a table.
"""

import ast
import json
import math
import operator
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from packhorse.errors import SettingsError

COMPARE = {
    "==": operator.eq,
    "!=": operator.ne,
    "<": operator.lt,
    "<=": operator.le,
    ">": operator.gt,
    ">=": operator.ge,
}

_COMPARISON = re.compile(
    r"""\s*(?:`(?P<quoted>[^`]+)`|(?P<plain>[^\W\d][\w.-]*))
        \s*(?P<operator>==|!=|<=|>=|<|>)
        \s*(?P<literal>'(?:[^'\\]|\\.)*'|"(?:[^"\\]|\\.)*"|[-+]?[\d.][\w.+-]*|true\b|false\b|null\b)
        \s*(?P<more>and\b)?""",
    re.VERBOSE,
)
_WORDS = {"true": True, "false": False, "null": None}


class LeftOut:
    """In the place of a row that does not pass."""

    def __len__(self) -> int:
        return 1

    def __repr__(self) -> str:
        return "LEFT_OUT"


LEFT_OUT = LeftOut()


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """A column, and what it is compared with."""

    column: str
    operator: str
    value: str | int | float | bool | None

    def __str__(self) -> str:
        plain = re.fullmatch(r"[^\W\d][\w.-]*", self.column)
        literal = json.dumps(self.value, ensure_ascii=False)
        return f"{self.column if plain else f'`{self.column}`'} {self.operator} {literal}"

    @property
    def kind(self) -> str:
        """What the column must hold: `number`, `text`, `boolean`, or `` for anything."""
        return kind_of(self.value)


def normal_filters(filters: Iterable[str]) -> tuple[str, ...]:
    """The same filters in the one form that is part of a recipe: comparison by comparison, sorted.

    Raises:
        SettingsError: one of them is no filter.
    """
    return tuple(sorted({str(comparison) for comparison in parse_filters(tuple(filters))}))


@lru_cache(maxsize=64)
def parse_filters(filters: tuple[str, ...]) -> tuple[Comparison, ...]:
    """The comparisons of some filters.

    Raises:
        SettingsError: one of them is no filter.
    """
    return tuple(comparison for text in filters for comparison in _parse(text))


def passes(row: Mapping[str, Any], comparisons: tuple[Comparison, ...]) -> bool:
    """Whether a row holds what all filters ask for.

    Raises:
        ValueError: a value is of another kind than what it is compared with.
    """
    return all(_holds(row.get(comparison.column), comparison) for comparison in comparisons)


def kind_of(value: Any) -> str:
    """What a value is for filters: `number`, `text`, `boolean`, `` for null, or the name of its type."""
    if value is None:
        return ""
    if isinstance(value, bool):
        return "boolean"
    return "number" if isinstance(value, int | float) else "text" if isinstance(value, str) else type(value).__name__


def wrong_kind(comparison: Comparison, found: str) -> str:
    """A message about a column that cannot be compared so."""
    return f"the filter `{comparison}` needs a {comparison.kind} in the column {comparison.column!r}, which has {found}"


def _holds(value: Any, comparison: Comparison) -> bool:
    if comparison.value is None:
        return (value is None) == (comparison.operator == "==")
    if value is None:
        return False
    if kind_of(value) != comparison.kind:
        raise ValueError(wrong_kind(comparison, f"{value!r:.100}"))
    return COMPARE[comparison.operator](value, comparison.value)


def _parse(text: str) -> list[Comparison]:
    comparisons: list[Comparison] = []
    place, more = 0, True
    while more and (match := _COMPARISON.match(text, place)):
        column = match["quoted"] or match["plain"]
        comparison = Comparison(column=column, operator=match["operator"], value=_literal(match["literal"], text))
        if comparison.kind in ("", "boolean") and comparison.operator not in ("==", "!="):
            raise _no_filter(text, f"{match['literal']} has no order: == and != alone make sense")
        comparisons.append(comparison)
        place, more = match.end(), bool(match["more"])
    if more or text[place:].strip():
        raise _no_filter(
            text, f"{text[place:].strip()[:40]!r} is not understood" if text[place:].strip() else "it ends early"
        )
    return comparisons


def _literal(token: str, text: str) -> str | int | float | bool | None:
    if token in _WORDS:
        return _WORDS[token]
    try:
        if token[0] in "'\"":
            value = ast.literal_eval(token)
            value.encode()
            return value
        number = float(token)
        value = int(token) if re.fullmatch(r"[-+]?\d+", token) else int(number) if number.is_integer() else number
    except (ValueError, SyntaxError, OverflowError):
        raise _no_filter(text, f"{token} is neither a number nor a text") from None
    if not math.isfinite(number) or abs(value) >= 2**63:
        raise _no_filter(text, f"{token} is too large")
    return value


def _no_filter(text: str, problem: str) -> SettingsError:
    return SettingsError(
        f"The filter {text!r} cannot be used: {problem}.\n"
        "A filter is like `int_score >= 3` or `language == 'en' and url != null`: column, == != < <= > >=, literal."
    )
