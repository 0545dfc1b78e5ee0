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
import importlib
import itertools
import json
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from packhorse.corpus.documents import Reading, Skipped, file_length, read_documents
from packhorse.corpus.files import SourceFile, check_column, find_files, probe_file, source_file, suffix_of
from packhorse.corpus.filters import LEFT_OUT, LeftOut, parse_filters, passes
from packhorse.corpus.hub import AS_USUAL, Downloads, check_features, columns_read, load_data_set
from packhorse.corpus.sample import SampleCorpus
from packhorse.corpus.tables import ID_BYTES, open_arrow
from packhorse.errors import SourceError

ROWS_OF_TEXT = ("csv", "json", "text", "xml")
"""Builders of `datasets` that read rows of text."""

PATHS = ("path", "data_dir", "data_files")
"""Arguments of `datasets.load_dataset` that may name what lies on this machine."""

Document = str | np.ndarray | None | LeftOut
"""What a row holds; None for null."""


def document_bytes(document: Document) -> int:
    """What a document weighs: a text its UTF-8, an id four bytes, a row without a document one."""
    if isinstance(document, str):
        return len(document) if document.isascii() else len(document.encode("utf-8", "surrogatepass"))
    return ID_BYTES * len(document) if isinstance(document, np.ndarray) else 1


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
    is_empty: bool = False
    """Whether it is known to have nothing."""
    is_once: bool = False
    """Whether it can be read only once."""
    is_final: bool = False
    """Whether its documents have BOS and EOS where they belong: nothing is added to them or taken away."""


@dataclass(frozen=True, kw_only=True)
class Deferred:
    """A source that is expensive to open, so it is opened only when something of it is needed."""

    key: str
    fingerprint: str
    open: Callable[[], Files | Stream] = field(repr=False)


Source = Files | Stream | Deferred


def open_sources(
    spec: Any,
    *,
    text_column: str = "text",
    sample_by: str = "line",
    filters: tuple[str, ...] = (),
    downloads: Downloads = AS_USUAL,
) -> list[Source]:
    """The sources that a setting names, checked as far as that is cheap.

    Args:
        spec: What the setting says (see the top of this file), or any iterable of texts, rows or ids.
        text_column: The column or key that holds the text.
        sample_by: What a document of a txt file is: `line`, `paragraph` or `document` (the whole file).
        filters: Which rows are documents: see `filters.py`.
        downloads: How data sets of the hub are fetched.

    Raises:
        SourceError: a source does not exist, is damaged, or has no such column.
    """
    return _open(spec, Reading(column=text_column, filters=filters, sample_by=sample_by), downloads)


def _open(spec: Any, reading: Reading, downloads: Downloads) -> list[Source]:
    if isinstance(spec, str | os.PathLike):
        return [_named(str(spec), reading, downloads)]
    if isinstance(spec, Mapping) and ("class_path" in spec or "path" in spec):
        own = {**spec, **_paths_of(spec, os.fspath)}
        reading = replace(reading, column=own.pop("text_column", reading.column))
        if "class_path" in own:
            return [_from_class(own, reading)]
        local = Path(own["path"]).expanduser()
        if set(own) == {"path"} and (local.exists() or _looks_like_a_source(own["path"], reading.column)):
            return [_named(own["path"], reading, downloads)]
        return [_from_hub(own, reading, downloads)]
    if isinstance(spec, list | tuple) and are_sources(spec, reading.column):
        return [source for item in spec for source in _open(item, reading, downloads)]
    if isinstance(spec, Iterable) and not isinstance(spec, Mapping):
        return [_from_iterable(spec, _name(type(spec)), reading)]
    if callable(spec):
        return [_from_function(spec, _name(spec), reading)]
    raise SourceError(f"A source is a path, a name, a mapping, a list of these, or an iterable, not {spec!r}.")


def named_in_configuration(spec: Any) -> Any:
    """The same setting, so that the items of a list can only be sources: nobody writes texts into a YAML."""
    if isinstance(spec, list):
        return [{"path": item} if isinstance(item, str) else item for item in spec]
    return spec


def are_sources(items: Sequence[Any], text_column: str = "text") -> bool:
    """Whether a list names sources; else its items are documents."""
    # One text among them that cannot be a name makes all of them texts.
    return all(isinstance(item, str | os.PathLike | Mapping) and _may_be_a_name(item) for item in items) and any(
        _looks_like_a_source(item, text_column) for item in items
    )


def _may_be_a_name(item: str | os.PathLike | Mapping) -> bool:
    return not isinstance(item, str) or (0 < len(item) < 256 and "\n" not in item and "\0" not in item)


def _looks_like_a_source(item: str | os.PathLike | Mapping, text_column: str) -> bool:
    """A list of texts or rows is an iterable of documents; a list of names or mappings is a list of sources."""
    if isinstance(item, Mapping):
        return ("path" in item or "class_path" in item) and text_column not in item
    text = str(item)
    pattern = glob.has_magic(text) and "/" in text and not any(map(str.isspace, text))
    return text == "sample" or pattern or bool(suffix_of(text)) or Path(text).expanduser().exists()


def _named(name: str, reading: Reading, downloads: Downloads) -> Source:
    if name == "sample":
        corpus = SampleCorpus()
        return _from_iterable(corpus, "sample", reading)
    path = Path(name).expanduser()
    if path.exists() or glob.has_magic(name):
        return Files(key=name, files=find_files(name, reading))
    if (
        name.count("/") == 1
        and not name.startswith((".", "~", "/"))
        and not suffix_of(name)
        and not path.parent.is_dir()
    ):
        return _from_hub({"path": name}, reading, downloads)
    if "://" in name:
        raise SourceError(
            f"The source {name} is a URL. `datasets` reads it: {{path: json, data_files: {name}}} as a source, or "
            "parquet, csv, text instead of json; with `streaming: true` without a download before."
        )
    raise SourceError(f"The source {name} does not exist.\nCheck the path; it is relative to {Path.cwd()}.")


def check_sources(sources: list[Source], is_strict: bool = False) -> None:
    """Refuse files that are damaged, empty, or lack the column that is asked for, before anything is made of them.

    Cheap: of the files' content only the beginning is read, up to the first document.

    Args:
        sources: The sources.
        is_strict: Refuse lines at the beginning that are not valid JSON.

    Raises:
        SourceError: with the columns that a file has.
    """
    files = [file for source in sources if isinstance(source, Files) for file in source.files]
    plain = [replace(file.file, is_strict=is_strict) for file in files if not file.packed]
    for file in plain:
        check_column(file)
    # What can be read only once has shown its first document already.
    if sources and all(isinstance(source, Stream) and _is_empty(source) for source in sources):
        raise SourceError(f"The sources have no text: {', '.join(source.key for source in sources)} gave no document.")
    has_text = any(next(read_documents(file, 0, file_length(file), Skipped(), 2**16), None) for file in plain)
    if not has_text and len(plain) == len(files) and all(isinstance(source, Files) for source in sources):
        raise no_text(sources)


def no_text(sources: list[Source]) -> SourceError:
    """What is to be raised when the rows of all sources were in vain."""
    return SourceError(
        f"The sources have no text: {', '.join(source.key for source in sources)} is empty, or all rows are null, "
        "empty, not valid text or left out by `filters`."
    )


def _is_empty(source: Stream) -> bool:
    return source.is_empty or (not source.is_once and next(source.read(0), source) is source)


def _from_class(spec: dict[str, Any], reading: Reading) -> Source:
    if unknown := set(spec) - {"class_path", "init_args"}:
        # As a dotted option of the command line would leave behind, and nobody would read.
        raise SourceError(
            f"A source with a class_path has no {', '.join(sorted(map(str, unknown)))}, only init_args and "
            "text_column.\nOn the command line the parts of a source cannot be set: write them in the YAML."
        )
    module, _, name = str(spec["class_path"]).rpartition(".")
    arguments = spec.get("init_args") or {}
    key = json.dumps({"class_path": spec["class_path"], "init_args": arguments}, sort_keys=True, default=str)

    def make():
        try:
            return getattr(importlib.import_module(module), name)(**arguments)
        except SourceError:
            raise  # it says all
        except (ImportError, AttributeError, ValueError, TypeError) as error:
            raise SourceError(f"The source {spec['class_path']} cannot be made: {error}.") from None

    return _from_function(make, key, reading)


def _from_function(make: Callable[[], Any], key: str, reading: Reading) -> Source:
    made = make()
    if callable(made) and not isinstance(made, Iterable):
        return _from_function(made, key, reading)
    if isinstance(made, Iterator):
        # It can be read once; the function gives a fresh one each time.
        return Stream(key=key, read=_skipping(lambda: (_document(item, reading, key) for item in make())))
    return _from_iterable(made, key, reading)


def _from_iterable(iterable: Any, key: str, reading: Reading) -> Source:
    if not isinstance(iterable, Iterable):
        raise SourceError(f"The source {key} is not an iterable of texts, rows or ids.")
    is_once = isinstance(iterable, Iterator)
    if is_once:
        iterable = _Once(iterable, key)
    fingerprint = getattr(iterable, "fingerprint", None)
    return Stream(
        key=key,
        read=_skipping(lambda: (_document(item, reading, key) for item in iterable)),
        fingerprint=str(fingerprint) if fingerprint is not None else None,
        text_bytes=getattr(iterable, "text_bytes", None),
        is_once=is_once,
        is_empty=is_once and iterable.is_empty,
        is_final=bool(getattr(iterable, "is_final", False)),
    )


class _Once:
    """An iterator: a second reading would silently begin in its middle."""

    def __init__(self, iterator: Iterator, key: str) -> None:
        first = list(itertools.islice(iterator, 1))
        self.is_empty = not first
        self._iterator: Iterator | None = itertools.chain(first, iterator)
        self._key = key

    def __iter__(self) -> Iterator:
        if self._iterator is None:
            raise SourceError(
                f"The source {self._key} can be read only once, and is needed again.\n"
                "Give the function that makes it, or a list."
            )
        iterator, self._iterator = self._iterator, None
        return iterator


def _document(item: Any, reading: Reading, key: str) -> Document:
    if isinstance(item, Mapping):
        comparisons = parse_filters(reading.filters)
        for column in (reading.column, *(comparison.column for comparison in comparisons)):
            if column not in item:
                raise SourceError(f"A row of {key} has no column {column!r}. It has: {', '.join(map(str, item))}.")
        try:
            if not passes(item, comparisons):
                return LEFT_OUT
        except ValueError as error:
            raise SourceError(f"A row of {key} cannot be used: {error}.") from None
        item = item[reading.column]
    elif reading.filters:
        raise SourceError(
            f"{key} gives {type(item).__name__}, not rows: the filter {reading.filters[0]!r} cannot hold."
        )
    if item is None or isinstance(item, str):
        return item
    try:
        ids = np.asarray(item)
    except ValueError:  # lists of unequal lists
        ids = np.empty((0, 0))
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


def _from_hub(spec: dict[str, Any], reading: Reading, downloads: Downloads) -> Source:
    """A data set through `datasets`: as arrow files on this disk, or streamed."""
    key = json.dumps(spec, sort_keys=True, default=str)
    # The key is what was written; `datasets` knows no `~`.
    spec = {**spec, **_paths_of(spec, os.path.expanduser)}
    arguments = {"split": "train", **{k: v for k, v in spec.items() if k != "streaming"}}
    if spec["path"] == "text":
        arguments.setdefault("sample_by", reading.sample_by)
    local = [probe_file(path) for path in _local_files(spec)]
    if spec.get("streaming", downloads.streaming) or local:
        fingerprint = json.dumps([key, local]) if local else key
        return Stream(key=key, read=lambda n: _stream_hub(arguments, reading, downloads, n), fingerprint=fingerprint)
    return Deferred(key=key, fingerprint=key, open=lambda: _materialise_hub(key, arguments, reading, downloads))


def _paths_of(spec: Mapping[str, Any], change: Callable[[Any], str]) -> dict[str, Any]:
    """The paths among the arguments of a data set, each of them changed; they may be nested."""

    def changed(value: Any) -> Any:
        if isinstance(value, Mapping):
            return {key: changed(inner) for key, inner in value.items()}
        if isinstance(value, list | tuple):
            return [changed(inner) for inner in value]
        return change(value) if isinstance(value, str | os.PathLike) else value

    return {name: changed(spec[name]) for name in PATHS if name in spec}


def _local_files(spec: Mapping[str, Any]) -> list[str]:
    """The files on this machine that `datasets` is to read as rows of text: they may grow, those of the hub do not."""
    named = spec.get("data_files", [])
    named = list(named.values()) if isinstance(named, Mapping) else [named]
    if spec["path"] not in ROWS_OF_TEXT:
        return []
    patterns = [str(p) for part in named for p in (part if isinstance(part, list | tuple) else [part])]
    found = [sorted(glob.glob(pattern, recursive=True)) for pattern in patterns]
    return [file for files in found for file in files if os.path.isfile(file)]


def _materialise_hub(key: str, arguments: dict[str, Any], reading: Reading, downloads: Downloads) -> Files | Stream:
    data = load_data_set(arguments, downloads, streaming=False)
    check_features(data, reading, arguments["path"])
    files = [f["filename"] for f in data.cache_files]
    if files and data._indices is None and sum(open_arrow(f).num_rows for f in files) == data.num_rows:
        return Files(key=key, files=[source_file(Path(f), reading) for f in files])
    # A slice or a selection: its rows are not simply those of its files.
    rows = data.select_columns(columns_read(reading))
    return Stream(key=key, read=_skipping(lambda: (_document(row, reading, key) for row in rows)), fingerprint=key)


def _stream_hub(arguments: dict[str, Any], reading: Reading, downloads: Downloads, number: int) -> Iterator[Document]:
    data = load_data_set(arguments, downloads, streaming=True)
    check_features(data, reading, arguments["path"])
    return (_document(row, reading, arguments["path"]) for row in data.skip(number))


def _name(of: Any) -> str:
    """Of a class or a function."""
    of = of if hasattr(of, "__qualname__") else type(of)
    return f"{of.__module__}.{of.__qualname__}"
