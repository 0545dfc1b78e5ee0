"""A setting -> sources: where documents come from.

    sample                                     the built-in sample corpus
    data/en.parquet   data/   data/*.jsonl.gz  files: one, a folder, a glob; parquet, jsonl, json, txt, arrow
    HuggingFaceFW/fineweb-edu                  a data set of the Hugging Face hub, through `datasets`
    {path: ..., name: ..., split: ...}         the same with the arguments of `datasets.load_dataset`
    {class_path: ..., init_args: {...}}        any Python class or function that gives an iterable
    a function, an iterable                    in Python only: texts, rows, or ids
    [..., ...]                                 several of these, one after the other

A source is either `Files`, which can be sought, or a `Stream`, which can only be read from the beginning and is
spooled to files piece by piece. Its documents are texts, or arrays of ids (then no tokenizer is needed).
"""

import glob
import hashlib
import importlib
import inspect
import json
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from packhorse.corpus.documents import TextFile, open_arrow, open_parquet, starts_with_bracket
from packhorse.corpus.sample import SampleCorpus
from packhorse.errors import SourceError

COMPRESSIONS = (".gz", ".zst", ".bz2", ".xz")
_KINDS = {".parquet": "parquet", ".arrow": "arrow", ".jsonl": "jsonl", ".ndjson": "jsonl", ".json": "jsonl"}
_TEXT_SUFFIXES = (".txt", ".text")

Document = str | np.ndarray | None


@dataclass(frozen=True, kw_only=True)
class SourceFile:
    """A file of a source, with what identifies its content."""

    file: TextFile
    packed: str
    """How it must be unpacked before it can be sought: a suffix like `.gz`, `array` (a JSON array), or nothing."""
    size: int
    probe: str
    """SHA-256 over the size, both ends and some places between: cheap, and another file has another one."""


@dataclass(frozen=True, kw_only=True)
class Files:
    """Files that can be sought (once they are unpacked)."""

    key: str
    files: list[SourceFile]


@dataclass(frozen=True, kw_only=True)
class Stream:
    """Documents that can only be read one after the other."""

    key: str
    read: Callable[[int], Iterator[Document]] = field(repr=False)
    """Give the documents from number n on; a source that cannot skip reads and drops the first n."""
    fingerprint: str | None = None
    """Equal means that the same documents would come again; None means that one has to look."""
    text_bytes: int | None = None
    """About how much text it has, if it says so."""


@dataclass(frozen=True, kw_only=True)
class Deferred:
    """A source that is expensive to open, so it is opened only when something of it is needed."""

    key: str
    fingerprint: str
    open: Callable[[], Files | Stream] = field(repr=False)


Source = Files | Stream | Deferred


def open_sources(spec: Any, *, text_column: str = "text", sample_by: str = "line") -> list[Source]:
    """The sources that a setting names, checked as far as that is cheap.

    Args:
        spec: What the setting says (see the top of this file), or any iterable of texts, rows or ids.
        text_column: The column or key that holds the text.
        sample_by: What a document of a txt file is: `line`, `paragraph` or `document` (the whole file).

    Raises:
        SourceError: a source does not exist, is damaged, or has no such column.
    """
    if isinstance(spec, str | os.PathLike):
        return [_named(str(spec), text_column, sample_by)]
    if isinstance(spec, Mapping) and ("class_path" in spec or "path" in spec):
        own = dict(spec)
        column = own.pop("text_column", text_column)
        if "class_path" in own:
            return [_from_class(own, column)]
        local = Path(own["path"]).expanduser()
        if set(own) == {"path"} and (local.exists() or glob.has_magic(own["path"])):
            return [_named(own["path"], column, sample_by)]
        return [_from_hub(own, column)]
    if isinstance(spec, list | tuple) and spec and all(isinstance(item, str | os.PathLike | Mapping) for item in spec):
        # One text among them that cannot be a name makes all of them texts.
        if all(map(_may_be_a_name, spec)) and any(_looks_like_a_source(item, text_column) for item in spec):
            return [s for item in spec for s in open_sources(item, text_column=text_column, sample_by=sample_by)]
    if isinstance(spec, Iterable) and not isinstance(spec, Mapping):
        return [_from_iterable(spec, _name(type(spec)), text_column)]
    if callable(spec):
        return [_from_function(spec, _name(spec), text_column)]
    raise SourceError(f"A source is a path, a name, a mapping, a list of these, or an iterable, not {spec!r}.")


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


def _may_be_a_name(item: str | os.PathLike | Mapping) -> bool:
    return not isinstance(item, str) or (0 < len(item) < 256 and "\n" not in item and "\0" not in item)


def _looks_like_a_source(item: str | os.PathLike | Mapping, text_column: str) -> bool:
    """A list of texts or rows is an iterable of documents; a list of names or mappings is a list of sources."""
    if isinstance(item, Mapping):
        return ("path" in item or "class_path" in item) and text_column not in item
    text = str(item)
    pattern = glob.has_magic(text) and "/" in text and not any(map(str.isspace, text))
    return text == "sample" or pattern or bool(_suffix(text)) or Path(text).expanduser().exists()


def _suffix(name: str) -> str:
    path = Path(name)
    inner = Path(path.stem).suffix if path.suffix in COMPRESSIONS else path.suffix
    return inner if inner in _KINDS or inner in _TEXT_SUFFIXES else ""


def _named(name: str, column: str, sample_by: str) -> Source:
    if name == "sample":
        corpus = SampleCorpus()
        return _from_iterable(corpus, "sample", column)
    path = Path(name).expanduser()
    if path.is_dir():
        if (path / "dataset_dict.json").exists():
            splits = sorted(p.name for p in path.iterdir() if p.is_dir())
            raise SourceError(f"{name} holds several splits ({', '.join(splits)}): name one, like {name}/{splits[0]}.")
        paths = [p for p in sorted(path.rglob("*")) if p.is_file() and _suffix(p.name) and not _hidden(p, path)]
        if (path / "state.json").exists():
            paths = [p for p in paths if p.suffix == ".arrow"]
    elif path.is_file():
        paths = [path]
    elif glob.has_magic(name):
        paths = [Path(p) for p in sorted(glob.glob(str(path), recursive=True)) if os.path.isfile(p)]
    elif (
        name.count("/") == 1 and not name.startswith((".", "~", "/")) and not _suffix(name) and not path.parent.is_dir()
    ):
        return _from_hub({"path": name}, column)
    else:
        raise SourceError(f"The source {name} does not exist.\nCheck the path; it is relative to {Path.cwd()}.")
    if not paths:
        known = ", ".join([*_KINDS, *_TEXT_SUFFIXES])
        raise SourceError(f"The source {name} has no file that can be read.\nKnown are {known}, also with .gz or .zst.")
    return Files(key=name, files=[_source_file(p, column, sample_by) for p in paths])


def _hidden(path: Path, root: Path) -> bool:
    return any(part.startswith((".", "_")) for part in path.relative_to(root).parts)


def _source_file(path: Path, column: str, sample_by: str) -> SourceFile:
    suffix = _suffix(path.name)
    if not suffix:
        known = ", ".join([*_KINDS, *_TEXT_SUFFIXES])
        raise SourceError(f"The file {path} is of an unknown kind. Known are {known}, also with .gz or .zst.")
    kind = _KINDS.get(suffix, sample_by)
    packed = path.suffix if path.suffix in COMPRESSIONS else ""
    try:
        size, probe = probe_file(path)
        if kind == "jsonl" and not packed:
            with path.open("rb") as stream:
                packed = "array" if starts_with_bracket(stream.read(4096)) else ""
    except OSError as error:
        raise SourceError(f"The file {path} cannot be read: {error.strerror}.") from None
    file = TextFile(path=str(path.absolute()), kind=kind, column=column if kind in _KINDS.values() else "")
    return SourceFile(file=file, packed=packed, size=size, probe=probe)


def check_sources(sources: list[Source]) -> None:
    """Refuse files that do not have the column that is asked for, before anything is made of them.

    Raises:
        SourceError: with the columns that a file has.
    """
    for source in sources:
        for file in source.files if isinstance(source, Files) else ():
            if not file.packed:
                check_column(file.file)


def columns_of(file: SourceFile) -> list[str]:
    """The columns of a table or the keys of the first JSON line; empty for plain text and for packed files."""
    if file.packed:
        return []
    if file.file.kind == "parquet":
        return open_parquet(file.file.path).schema_arrow.names
    if file.file.kind == "arrow":
        return open_arrow(file.file.path).schema.names
    return (_first_keys(file.file.path) or []) if file.file.kind == "jsonl" else []


def check_column(file: TextFile) -> None:
    """Refuse a file that does not have the column that is asked for.

    Raises:
        SourceError: with the columns that the file has.
    """
    import pyarrow as pa

    if file.kind in ("parquet", "arrow"):
        schema = open_parquet(file.path).schema_arrow if file.kind == "parquet" else open_arrow(file.path).schema
        columns = schema.names
        if file.column in columns:
            kind = schema.field(file.column).type
            inner = getattr(kind, "value_type", None)
            texts = (
                *(pa.types.is_string, pa.types.is_large_string, pa.types.is_string_view),
                *(pa.types.is_binary, pa.types.is_large_binary, pa.types.is_null),
            )
            if any(is_kind(kind) for is_kind in texts) or (inner is not None and pa.types.is_integer(inner)):
                return
            if inner is not None and pa.types.is_string(inner):
                return  # a dictionary of texts
            raise SourceError(
                f"The column {file.column!r} of {file.path} holds {kind}, neither texts nor lists of ids."
            )
    elif file.kind == "jsonl":
        columns = _first_keys(file.path)
        if columns is None or file.column in columns:
            return
    else:
        return
    raise SourceError(
        f"{file.path} has no column {file.column!r}. It has: {', '.join(columns)}.\n"
        "Set `text_column` to the one that holds the text."
    )


def _first_keys(path: str) -> list[str] | None:
    with open(path, "rb") as stream:
        for number, line in enumerate(stream, 1):
            if line.strip():
                try:
                    row = json.loads(line)
                except (ValueError, RecursionError) as error:
                    raise SourceError(f"{path}, line {number} is not valid JSON: {error}.") from None
                if not isinstance(row, dict):
                    raise SourceError(f"{path}, line {number} is not a JSON object, but {type(row).__name__}.")
                return list(row)
    return None


def _from_class(spec: dict[str, Any], column: str) -> Source:
    module, _, name = str(spec["class_path"]).rpartition(".")
    arguments = spec.get("init_args") or {}
    key = json.dumps({"class_path": spec["class_path"], "init_args": arguments}, sort_keys=True, default=str)

    def make():
        try:
            return getattr(importlib.import_module(module), name)(**arguments)
        except (ImportError, AttributeError, ValueError, TypeError) as error:
            raise SourceError(f"The source {spec['class_path']} cannot be made: {error}.") from None

    return _from_function(make, key, column)


def _from_function(make: Callable[[], Any], key: str, column: str) -> Source:
    made = make()
    if callable(made) and not isinstance(made, Iterable):
        return _from_function(made, key, column)
    if isinstance(made, Iterator):
        # It can be read once; the function gives a fresh one each time.
        return Stream(key=key, read=_skipping(lambda: (_document(item, column, key) for item in make())))
    return _from_iterable(made, key, column)


def _from_iterable(iterable: Any, key: str, column: str) -> Source:
    if not isinstance(iterable, Iterable):
        raise SourceError(f"The source {key} is not an iterable of texts, rows or ids.")
    if isinstance(iterable, Iterator):
        iterable = _Once(iterable, key)
    fingerprint = getattr(iterable, "fingerprint", None)
    return Stream(
        key=key,
        read=_skipping(lambda: (_document(item, column, key) for item in iterable)),
        fingerprint=str(fingerprint) if fingerprint is not None else None,
        text_bytes=getattr(iterable, "text_bytes", None),
    )


class _Once:
    """An iterator: a second reading would silently begin in its middle."""

    def __init__(self, iterator: Iterator, key: str) -> None:
        self._iterator: Iterator | None = iterator
        self._key = key

    def __iter__(self) -> Iterator:
        if self._iterator is None:
            raise SourceError(
                f"The source {self._key} can be read only once, and is needed again.\n"
                "Give the function that makes it, or a list."
            )
        iterator, self._iterator = self._iterator, None
        return iterator


def _document(item: Any, column: str, key: str) -> Document:
    if isinstance(item, Mapping):
        if column not in item:
            raise SourceError(f"A row of {key} has no column {column!r}. It has: {', '.join(map(str, item))}.")
        item = item[column]
    if item is None or isinstance(item, str):
        return item
    ids = np.asarray(item)
    if ids.ndim != 1 or (len(ids) and ids.dtype.kind not in "iu"):
        raise SourceError(f"{key} gave {type(item).__name__}: a document is a text, a row, or a list of ids.")
    return ids.astype(np.int64)


def _skipping(read: Callable[[], Iterator[Document]]) -> Callable[[int], Iterator[Document]]:
    def from_number(number: int) -> Iterator[Document]:
        documents = read()
        for _ in range(number):
            if next(documents, StopIteration) is StopIteration:
                break
        return documents

    return from_number


def _from_hub(spec: dict[str, Any], column: str) -> Source:
    """A data set through `datasets`: as arrow files on this disk, or streamed."""
    key = json.dumps(spec, sort_keys=True)
    arguments = {"split": "train", **{k: v for k, v in spec.items() if k != "streaming"}}
    if spec.get("streaming", False):
        return Stream(key=key, read=lambda n: _stream_hub(arguments, column, n), fingerprint=key)
    return Deferred(key=key, fingerprint=key, open=lambda: _materialise_hub(key, arguments, column))


def _materialise_hub(key: str, arguments: dict[str, Any], column: str) -> Files | Stream:
    data = _load_dataset(arguments, streaming=False)
    _check_features(data, column, arguments["path"])
    files = [f["filename"] for f in data.cache_files]
    if files and data._indices is None and sum(open_arrow(f).num_rows for f in files) == data.num_rows:
        return Files(key=key, files=[_source_file(Path(f), column, "line") for f in files])
    # A slice or a selection: its rows are not simply those of its files.
    rows = data.select_columns([column])
    return Stream(key=key, read=_skipping(lambda: (_document(row, column, key) for row in rows)), fingerprint=key)


def _stream_hub(arguments: dict[str, Any], column: str, number: int) -> Iterator[Document]:
    data = _load_dataset(arguments, streaming=True)
    _check_features(data, column, arguments["path"])
    return (_document(row, column, arguments["path"]) for row in data.skip(number))


def _load_dataset(arguments: dict[str, Any], streaming: bool):
    import datasets

    known = set(inspect.signature(datasets.load_dataset).parameters)
    if unknown := set(arguments) - known:
        raise SourceError(f"`datasets.load_dataset` has no argument {', '.join(sorted(unknown))}.")
    try:
        return datasets.load_dataset(**arguments, streaming=streaming)
    except Exception as error:  # network, name, configuration and format errors of several libraries
        raise SourceError(
            f"The data set {arguments['path']} is neither a local file or folder, nor can it be loaded from the "
            f"Hugging Face hub:\n  {type(error).__name__}: {(str(error).splitlines() or [''])[0]}\n"
            "Check the name, `name` (the configuration), `split` and `revision`, and the network."
        ) from None


def _check_features(data, column: str, name: str) -> None:
    columns = data.column_names
    if columns is not None and column not in columns:
        raise SourceError(
            f"The data set {name} has no column {column!r}. It has: {', '.join(columns)}.\n"
            "Set `text_column` to the one that holds the text."
        )


def _name(of: Any) -> str:
    """Of a class or a function."""
    of = of if hasattr(of, "__qualname__") else type(of)
    return f"{of.__module__}.{of.__qualname__}"
