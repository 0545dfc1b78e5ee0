"""A path -> the files of a source, each with what identifies its content."""

import glob
import hashlib
import json
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from packhorse.corpus.documents import Reading, TextFile
from packhorse.corpus.filters import kind_of, parse_filters, wrong_kind
from packhorse.corpus.hub import tell_once
from packhorse.corpus.lines import COMPRESSIONS, parse_row, refuse_utf16, starts_with_bracket
from packhorse.corpus.masks import column_kind
from packhorse.corpus.tables import holds_ids, open_arrow, open_parquet
from packhorse.errors import SourceError

LOOK_BYTES = 2**28
"""How far a valid JSON line is looked for."""

NAMED_FILES = 3
"""Of more files that are not read, the names of these are told."""

_KINDS = {".parquet": "parquet", ".arrow": "arrow", ".jsonl": "jsonl", ".ndjson": "jsonl", ".json": "jsonl"}
_TEXT_SUFFIXES = (".txt", ".text")
_KNOWN = ", ".join([*_KINDS, *_TEXT_SUFFIXES])


@dataclass(frozen=True, kw_only=True)
class SourceFile:
    """A file of a source, with what identifies its content."""

    file: TextFile
    packed: str
    """How it must be unpacked before it can be sought: a suffix like `.gz`, `array` (a JSON array), or nothing."""
    size: int
    probe: str
    """SHA-256 over the size, both ends and some places between: cheap, and another file has another one."""


def find_files(name: str, reading: Reading) -> list[SourceFile]:
    """The files of a folder, a glob, or a single one, in the order of their names.

    Raises:
        SourceError: there is none that can be read.
    """
    path = Path(name).expanduser()
    if path.is_dir():
        if (path / "dataset_dict.json").exists():
            splits = sorted(p.name for p in path.iterdir() if p.is_dir())
            raise SourceError(f"{name} holds several splits ({', '.join(splits)}): name one, like {name}/{splits[0]}.")
        inside = sorted(_walk(path))
        paths = [p for p in inside if suffix_of(p.name)]
        if (path / "state.json").exists():
            paths = _saved_files(path)
        elif 0 < len(paths) < len(inside):
            others = [str(p.relative_to(path)) for p in inside if p not in set(paths)]
            dots = ", ..." if len(others) > NAMED_FILES else ""
            tell_once(
                f"{name}: {len(others)} of {len(inside)} files are of an unknown kind and are not read "
                f"({', '.join(others[:NAMED_FILES])}{dots})."
            )
    elif path.is_file():
        paths = [path]
    else:
        paths = [Path(p) for p in sorted(glob.glob(str(path), recursive=True)) if os.path.isfile(p)]
    if not paths:
        raise SourceError(f"The source {name} has no file that can be read.\n{_what_is_known(f'{name}/**')}")
    return [source_file(p, reading) for p in paths]


def source_file(path: Path, reading: Reading) -> SourceFile:
    """A file, probed.

    Raises:
        SourceError: it cannot be read, or is of an unknown kind.
    """
    suffix = suffix_of(path.name)
    if not suffix:
        raise SourceError(f"The file {path} is of an unknown kind.\n{_what_is_known(str(path))}")
    kind = _KINDS.get(suffix, reading.sample_by)
    packed = path.suffix if path.suffix in COMPRESSIONS else ""
    try:
        size, probe = probe_file(path)
        with path.open("rb") as stream:
            head = stream.read(4096)
    except OSError as error:
        raise SourceError(f"The file {path} cannot be read: {error.strerror}.") from None
    if not packed and kind not in ("parquet", "arrow"):
        refuse_utf16(head, path)
        packed = "array" if kind == "jsonl" and starts_with_bracket(head) else ""
    column = reading.column if kind in _KINDS.values() else ""
    file = TextFile(path=str(path.absolute()), kind=kind, column=column, filters=reading.filters)
    return SourceFile(file=file, packed=packed, size=size, probe=probe)


def probe_file(path: str | Path, size: int | None = None) -> tuple[int, str]:
    """Size and probe of a file (see `SourceFile`), or of its first `size` bytes: a few reads, whatever its size."""
    with open(path, "rb") as stream:
        size = os.fstat(stream.fileno()).st_size if size is None else size
        digest = hashlib.sha256(str(size).encode())
        last = max(size - 65_536, 0)
        for place in sorted({0, last, *(last * i // 15 for i in range(1, 15))}):
            stream.seek(place)
            digest.update(stream.read(min(65_536 if place in (0, last) else 4_096, size - place)))
    return size, digest.hexdigest()


def unreadable(error: OSError, path: Path, pattern: str) -> SourceError:
    """Why a source of several files that belong together cannot be read; of a folder, which of its files may be meant.

    Args:
        error: What the system said.
        path: What the setting names.
        pattern: What a file to name looks like.
    """
    inside = sorted(path.glob(pattern)) if path.is_dir() else []
    if inside:
        return SourceError(f"{path} is a folder. Name one of its files: {', '.join(map(str, inside))}.")
    return SourceError(f"{error.filename} cannot be read: {error.strerror}.")


def _what_is_known(name: str) -> str:
    """What can be read, and what to do about a path of another kind."""
    builder = "csv" if name.endswith(".csv") else "text"
    return (
        f"Known are {_KNOWN}, also with .gz or .zst.\nOthers are read by `datasets`: {{path: {builder}, data_files: "
        f"{name}}} as a source{' takes each line of any text file' if builder == 'text' else ''}."
    )


def suffix_of(name: str) -> str:
    """What says how a file is read, as in `a.jsonl.gz`; empty when it is not known."""
    path = Path(name)
    inner = Path(path.stem).suffix if path.suffix in COMPRESSIONS else path.suffix
    return inner if inner in _KINDS or inner in _TEXT_SUFFIXES else ""


def columns_of(file: SourceFile) -> list[str]:
    """The columns of a table or the keys of the first valid JSON line; empty for plain text and for packed files."""
    if file.packed:
        return []
    if file.file.kind == "parquet":
        return open_parquet(file.file.path).schema_arrow.names
    if file.file.kind == "arrow":
        return open_arrow(file.file.path).schema.names
    return list(_first_row(file.file) or []) if file.file.kind == "jsonl" else []


def check_column(file: TextFile) -> None:
    """Refuse a file that does not have the columns that are asked for, or other values in them.

    Raises:
        SourceError: with the columns that the file has.
    """
    import pyarrow as pa

    _check_filters(file)
    if file.kind in ("parquet", "arrow"):
        schema = open_parquet(file.path).schema_arrow if file.kind == "parquet" else open_arrow(file.path).schema
        columns = schema.names
        if file.column in columns:
            kind = schema.field(file.column).type
            inner = kind.value_type if pa.types.is_dictionary(kind) else kind
            texts = (
                *(pa.types.is_string, pa.types.is_large_string, pa.types.is_string_view),
                *(pa.types.is_binary, pa.types.is_large_binary, pa.types.is_null),
            )
            if any(is_kind(inner) for is_kind in texts) or (holds_ids(kind) and pa.types.is_integer(kind.value_type)):
                return
            raise SourceError(
                f"The column {file.column!r} of {file.path} holds {kind}, neither texts nor lists of ids."
            )
    elif file.kind == "jsonl":
        row = _first_row(file)
        if row is None or file.column in row:
            return
        columns = list(row)
    else:
        return
    raise SourceError(
        f"{file.path} has no column {file.column!r}. It has: {', '.join(columns)}.\n"
        "Set `text_column` to the one that holds the text."
    )


def _check_filters(file: TextFile) -> None:
    for comparison in parse_filters(file.filters):
        kinds = _kinds_of(file)
        if kinds is None:
            continue
        if comparison.column not in kinds:
            raise SourceError(
                f"{file.path} has no column {comparison.column!r} for the filter `{comparison}`. "
                f"It has: {', '.join(kinds) or 'none, it is plain text'}."
            )
        # What is null in the first row may be anything in others.
        if comparison.kind and kinds[comparison.column] not in ("", comparison.kind):
            raise SourceError(f"{file.path}: {wrong_kind(comparison, kinds[comparison.column])}.")


def _kinds_of(file: TextFile) -> dict[str, str] | None:
    """Column -> what it holds, of a table or of the first valid JSON line; None for a file without rows."""
    if file.kind in ("parquet", "arrow"):
        schema = open_parquet(file.path).schema_arrow if file.kind == "parquet" else open_arrow(file.path).schema
        return {field.name: column_kind(field.type) for field in schema}
    if file.kind == "jsonl":
        row = _first_row(file)
        return None if row is None else {key: kind_of(value) for key, value in row.items()}
    return {}


def _walk(root: Path) -> Iterator[Path]:
    """The files of a folder and of those inside, links too; neither what is hidden nor token caches."""
    seen: set[str] = set()
    for name, folders, files in os.walk(root, followlinks=True):
        folder = Path(name)
        if (real := os.path.realpath(folder)) in seen:  # a link to a folder that is looked through anyway
            folders.clear()
            continue
        seen.add(real)
        caches = {f for f in folders if (folder / f / "recipe.json").exists() and (folder / f / "plan").is_dir()}
        besides = {"tokenizers"} if caches else set()
        folders[:] = sorted(f for f in folders if not f.startswith((".", "_")) and f not in caches | besides)
        paths = (folder / file for file in files if not file.startswith((".", "_")))
        yield from (path for path in paths if path.is_file())


def _saved_files(folder: Path) -> list[Path]:
    """The files of a data set that `datasets` saved: what it computes of one later is kept beside them."""
    try:
        listed = json.loads((folder / "state.json").read_bytes())["_data_files"]
        return [folder / Path(file["filename"]).name for file in listed]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise SourceError(
            f"{folder} is a data set that `datasets` saved, but its state.json cannot be read ({error!r})."
        ) from None


def _first_row(file: TextFile) -> dict | None:
    """The first JSON line that is valid; None if there is none."""
    place = 0
    with open(file.path, "rb") as stream:
        while line := stream.readline(LOOK_BYTES - place):
            if place + len(line) == LOOK_BYTES:
                raise SourceError(
                    f"No line in the first {LOOK_BYTES / 1e6:,.0f} MB of {file.path} is a valid JSON object.\n"
                    "Check that it has one object a line, or leave it out of `source`."
                )
            if line.strip() and (row := parse_row(line, file, place)) is not None:
                return row
            place += len(line)
    return None
