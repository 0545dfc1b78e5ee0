"""Sources -> what stands at random places of them.

    source     |......x.........x......x...........x..|      x are places, drawn evenly over the text
    place      the documents that begin in the next 32 KiB; a file that is one document as a whole

The text of a source is known by its weight: bytes of files, or of the column in the footers of parquet files. A place
says how much weight it stands for, so that totals are sums over places, divided by their weight, times that of the
source. Only what cannot be sought is not read at random: streams from their beginning.
"""

import time
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path

import numpy as np

from packhorse.cache.cuts import range_weight, row_groups
from packhorse.cache.plan import Range
from packhorse.cache.spool import unpack
from packhorse.corpus.documents import (
    Skipped,
    TextFile,
    count_rows,
    file_length,
    find_row,
    is_unicode,
    read_documents,
)
from packhorse.corpus.lines import find_cut
from packhorse.corpus.sources import Document, Files, Stream, document_bytes
from packhorse.corpus.tables import cell_bytes, read_column, to_python
from packhorse.errors import SourceError

PLACE_BYTES = 32 * 1024
"""Text that is looked at in one place."""
MOST_OF_A_DOCUMENT = 256 * 1024
"""Of a file that is one document only so many characters are tokenized."""
MAX_UNPACKED = 256 * 2**20
"""Of packed files only so many bytes are unpacked, whole files drawn by chance, at least one."""


@dataclass(frozen=True, kw_only=True)
class Place:
    """Some documents, and what they stand for."""

    documents: list[Document]
    weight: float
    """What `documents`, taken `factor` times, weigh."""
    factor: float = 1.0
    num_documents: float
    """Documents of the weight `size`; known better than by counting `documents`."""
    size: float
    seconds: float
    """That reading `documents` took."""


@dataclass(frozen=True, kw_only=True)
class Places:
    """The places of one source."""

    places: list[Place]
    weight: float
    """Of all that is taken of the source."""
    num_rows: int
    """Rows that it takes of `max_documents`."""
    ranges: list[Range]
    files: dict[int, TextFile]
    """What the plan would be made of; empty for streams."""
    is_final: bool = False
    """Whether its documents have BOS and EOS where they belong."""


def draw_places(
    source: Files | Stream, count: int, draw: np.random.Generator, scratch: Path, limit: int | None
) -> Places:
    """Look at random places of a source.

    Args:
        source: The source.
        count: Places, more or less.
        draw: Decides which.
        scratch: A folder in which packed files are unpacked.
        limit: Rows to take at most; makes up for a stream that does not know its size.

    Raises:
        SourceError: nothing can be said about the size of a stream.
    """
    if isinstance(source, Stream):
        return _of_stream(source, count, limit)
    files, share = _readable(source, draw, scratch)
    ranges, num_rows = _limited(files, limit)
    weights = np.array([range_weight(files[number], start, stop) for number, start, stop in ranges])
    ends = np.cumsum(weights)
    places = []
    # One in each of `count` equal parts, in order: neighbours share a row group.
    for at in (np.arange(count) + draw.random(count)) / count * ends[-1] if len(ends) else ():
        number = int(np.searchsorted(ends, at, side="right"))
        inside = at - ends[number] + weights[number]
        file, stop = files[ranges[number][0]], ranges[number][2]
        look = _in_table if file.counts_rows else _of_file if file.kind == "document" else _in_bytes
        places.append(look(file, stop, inside, draw))
    weight = float(weights.sum()) / share
    return Places(places=places, weight=weight, num_rows=num_rows, ranges=ranges, files=files)


def _limited(files: dict[int, TextFile], limit: int | None) -> tuple[list[Range], int]:
    """The ranges that are taken, cut where a build would cut them."""
    ranges, taken = [], 0
    for number, file in files.items():
        stop = file_length(file)
        if limit is not None:
            stop = find_row(file, 0, stop, limit - taken)
            taken += count_rows(file, 0, stop)
        if stop:
            ranges.append((number, 0, stop))
    return ranges, taken


def _readable(source: Files, draw: np.random.Generator, scratch: Path) -> tuple[dict[int, TextFile], float]:
    """Files that can be sought, and what share of the source they are."""
    plain = {number: file.file for number, file in enumerate(source.files) if not file.packed}
    packed = [(number, file) for number, file in enumerate(source.files) if file.packed]
    total = taken = 0
    for position in draw.permutation(len(packed)):
        number, file = packed[position]
        total += file.size
        if taken and taken + file.size > MAX_UNPACKED:
            continue
        taken += file.size
        target = scratch / f"{number}-{file.probe[:16]}"
        unpack(file.file.path, file.packed, file.file.kind, target)
        plain[number] = replace(file.file, path=str(target))
    if total == taken:
        return plain, 1.0
    # Packed and plain bytes are of different worth: a source that has both is judged by what was unpacked.
    return {n: f for n, f in plain.items() if source.files[n].packed}, taken / total


def _in_bytes(file: TextFile, end: int, at: float, draw: np.random.Generator) -> Place:
    """The documents that begin in a window of bytes: every document has the same chance."""
    begin = time.perf_counter()
    start = find_cut(file, int(at), end) if at >= 1 else 0
    # A long document that begins before and ends behind leaves nothing here: it counts where it begins.
    stop = max(start, find_cut(file, int(at) + PLACE_BYTES, end))
    documents: list[Document] = []
    for batch in read_documents(file, start, stop, Skipped()):
        documents += batch.texts if batch.texts is not None else batch.ids
    return Place(
        documents=documents,
        weight=stop - start,
        num_documents=len(documents),
        size=min(PLACE_BYTES, end - at),
        seconds=time.perf_counter() - begin,
    )


def _of_file(file: TextFile, end: int, at: float, draw: np.random.Generator) -> Place:
    """The one document of a file. Large files are drawn more often, and so much less does each count."""
    texts, seconds = _whole(file, end)
    cut = [text[:MOST_OF_A_DOCUMENT] for text in texts]
    part = sum(map(len, cut)) / max(1, sum(map(len, texts)))
    return Place(
        documents=cut,
        weight=PLACE_BYTES,
        factor=PLACE_BYTES / (end * (part or 1)),
        num_documents=len(texts) * PLACE_BYTES / end,
        size=PLACE_BYTES,
        seconds=seconds * part,
    )


@lru_cache(maxsize=1)
def _whole(file: TextFile, end: int) -> tuple[list[str], float]:
    """The document of a file, if it is one, and how long reading took."""
    begin = time.perf_counter()
    texts = [text for batch in read_documents(file, 0, end, Skipped()) for text in batch.texts or []]
    return texts, time.perf_counter() - begin


def _in_table(file: TextFile, end: int, at: float, draw: np.random.Generator) -> Place:
    """Neighbouring rows of the row group at that place, for the whole of it."""
    cut = [(first, min(rows, end - first) / rows, rows, weight) for first, rows, weight in row_groups(file)]
    groups = [(first, round(part * rows), part * weight) for first, part, rows, weight in cut if part > 0]
    first, rows, weight = groups[
        min(np.searchsorted(np.cumsum([w for _, _, w in groups]), at, "right"), len(groups) - 1)
    ]
    cells, sizes, seconds = _row_group(file, first, rows)
    scale, total = PLACE_BYTES / weight, int(sizes.sum())
    count = max(1, round(len(cells) * PLACE_BYTES / max(1, total)))
    start = int(draw.integers(0, max(1, len(cells) - count + 1)))
    chosen = cells.slice(start, count)
    # Every row has the same chance, so rows say how much of the group these are; in the ratio of the sums over places,
    # rows that happen to be long weigh as much more as they have tokens.
    factor = scale * len(cells) / max(1, len(chosen))
    part = float(sizes[start : start + count].sum() / max(1, total))
    return Place(
        documents=[cell for cell in to_python(chosen) if _is_document(cell)],
        weight=weight * part * factor if total else PLACE_BYTES,
        factor=factor,
        num_documents=int((sizes > 0).sum()) * scale,
        size=PLACE_BYTES,
        seconds=seconds * part,
    )


@lru_cache(maxsize=1)
def _row_group(file: TextFile, first: int, rows: int):
    """The cells of a row group that pass, the bytes of each, and how long reading took."""
    import pyarrow as pa

    begin = time.perf_counter()
    parts = [part for part, _ in read_column(file.path, file.kind, file.column, first, first + rows, file.filters)]
    # Large row groups come in several parts, those of which nothing passes without a type.
    parts = [part for part in parts if len(part)] or parts[:1]
    chunks = [chunk for part in parts for chunk in (part.chunks if isinstance(part, pa.ChunkedArray) else [part])]
    cells = pa.chunked_array(chunks, type=parts[0].type)
    return cells, cell_bytes(cells), time.perf_counter() - begin


def _of_stream(source: Stream, count: int, limit: int | None) -> Places:
    if source.text_bytes is None and limit is None:
        raise SourceError(
            f"The source {source.key} is a stream that does not say how much text it has: nothing can be estimated.\n"
            "Give its class an attribute `text_bytes`, or set `max_documents`."
        )
    rows = 0
    is_sized = source.text_bytes is not None
    places: list[Place] = []
    documents: list[Document] = []
    size, begin = 0, time.perf_counter()
    for document in source.read(0):
        rows += 1
        documents.append(document)
        size += document_bytes(document)
        if size >= PLACE_BYTES:
            places.append(_of_documents(documents, size if is_sized else len(documents), begin))
            documents, size, begin = [], 0, time.perf_counter()
        if len(places) == count:
            break
    if documents:
        places.append(_of_documents(documents, size if is_sized else len(documents), begin))
    seen = sum(place.size for place in places)
    weight = source.text_bytes if is_sized else limit
    num_rows = round(weight * rows / max(1, seen))
    if limit is not None and num_rows > limit:
        weight, num_rows = weight * limit / num_rows, limit
    return Places(places=places, weight=float(weight), num_rows=num_rows, ranges=[], files={}, is_final=source.is_final)


def _of_documents(documents: list[Document], weight: int, begin: float) -> Place:
    kept = [document for document in documents if _is_document(document)]
    return Place(
        documents=kept,
        weight=weight,
        num_documents=len(kept),
        size=weight,
        seconds=time.perf_counter() - begin,
    )


def _is_document(cell: Document) -> bool:
    if isinstance(cell, str):
        return bool(cell) and not cell.isspace() and is_unicode(cell)
    return isinstance(cell, np.ndarray) and len(cell) > 0
