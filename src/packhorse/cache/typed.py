"""JSON values -> dataclasses, checked field by field.

Every metadata file may be damaged, of another version, or made by somebody who means harm; a valid checksum says only
that it is as somebody wrote it. So its values are believed only where they are of the type, and in the range, that the
dataclass names: whole numbers from 0 to 2^63 - 1, finite floats, texts without NUL. Fields with a default may be
missing (but for `format`), as in files of older versions; fields that are not known are refused.
"""

import math
import types
import typing
from dataclasses import MISSING, fields, is_dataclass
from functools import lru_cache
from pathlib import Path
from reprlib import Repr
from typing import Any, TypeVar

from packhorse.errors import CacheCorruptionError

MAX_INTEGER = 2**63

Kind = TypeVar("Kind")

_short = Repr()
_short.maxstring = _short.maxother = _short.maxlong = 80


def make(kind: type[Kind], value: Any, where: Path, what: str) -> Kind:
    """An object of a dataclass from what a file says.

    Args:
        kind: The dataclass.
        value: What `json` made of the file.
        where: The file, for messages.
        what: What the file should be, for messages: `a commit record`.

    Raises:
        CacheCorruptionError: a field is missing, unknown, or not what it must be.
    """
    try:
        return _object(kind, value, "")
    except ValueError as error:
        raise CacheCorruptionError(f"{where} is not {what}: {error}.") from None


def refuse_unless(holds: bool, where: Path, what: str, problem: str) -> None:
    """Refuse a file whose values make no sense together."""
    if not holds:
        raise CacheCorruptionError(f"{where} is not {what}: {problem}.")


def _object(kind: type, value: Any, name: str) -> Any:
    if type(value) is not dict:
        raise ValueError(f"{name or 'it'} is {_short.repr(value)}, not an object")
    hints, needed = _fields(kind)
    for problem, names in (("missing", needed - set(value)), ("not known", set(value) - set(hints))):
        if names:
            raise ValueError(f"{name or 'it'} has fields that are {problem}: {_short.repr(sorted(names))}")
    return kind(**{n: _value(hints[n], item, f"{name}.{n}".strip(".")) for n, item in value.items()})


@lru_cache
def _fields(kind: type) -> tuple[dict[str, Any], set[str]]:
    """The types of a dataclass's fields, and the names of those that must be there."""
    optional = {f.name for f in fields(kind) if f.default is not MISSING or f.default_factory is not MISSING}
    needed = {f.name for f in fields(kind)} - optional | {f.name for f in fields(kind) if f.name == "format"}
    return typing.get_type_hints(kind), needed


def _value(hint: Any, value: Any, name: str) -> Any:
    origin, inner = typing.get_origin(hint), typing.get_args(hint)
    if origin is types.UnionType:
        return None if value is None and type(None) in inner else _value(inner[0], value, name)
    if is_dataclass(hint):
        return _object(hint, value, name)
    if origin is list and type(value) is list:
        return [_value(inner[0], item, f"{name}[{place}]") for place, item in enumerate(value)]
    if origin is tuple and type(value) is list and inner[-1] is Ellipsis:
        return tuple(_value(inner[0], item, name) for item in value)
    if origin is tuple and type(value) is list and len(value) == len(inner):
        return tuple(_value(part, item, name) for part, item in zip(inner, value, strict=True))
    if origin is dict and type(value) is dict:
        return {_value(str, key, name): _value(inner[1], item, f"{name}.{key}") for key, item in value.items()}
    if type(value) is not hint or not _in_range(value):
        raise ValueError(f"{name} is {_short.repr(value)}")
    return value


def _in_range(value: Any) -> bool:
    if type(value) is int:
        return 0 <= value < MAX_INTEGER
    if type(value) is float:
        return math.isfinite(value)
    if type(value) is str:
        return "\0" not in value
    return type(value) is bool
