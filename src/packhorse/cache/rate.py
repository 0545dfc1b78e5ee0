"""Some texts -> how many tokens a byte of text gives, which decides how much text makes a chunk."""

import itertools
from collections.abc import Callable, Iterator

import numpy as np

from packhorse.cache.cuts import range_weight
from packhorse.cache.plan import Range
from packhorse.corpus.documents import Skipped, TextFile, is_unicode, read_documents
from packhorse.corpus.lines import find_cut
from packhorse.corpus.sources import Document, document_bytes
from packhorse.corpus.tables import ID_BYTES, cell_bytes, holds_ids, read_column

SAMPLE_BYTES = 64 * 1024
"""Text that is tokenized to learn how many bytes a chunk needs."""

FILTERED_PLACES = 8
"""With filters so many places are looked at, to learn how many rows pass,"""
PLACE_BYTES, PLACE_ROWS = 4 * 2**20, 20_000
"""and at each of them not more than this."""
LEAST_SHARE = 0.05
"""If fewer pass, chunks become smaller: if more did elsewhere, they would become large."""

LEAST_DENSITY = 0.01
"""Of text that gives hardly any token, chunks are not larger than this asks for."""

CountTokens = Callable[[list[str]], int]


def tokens_per_byte(ranges: list[Range], files: dict[int, TextFile], count_tokens: CountTokens) -> float:
    """Of files, from texts at two places: of the first range the beginning, of the middle one the middle.

    A byte is one of those that `range_weight` counts, by which chunks are cut: in lines of JSON with other keys, or a
    column that is encoded as a dictionary, there is more or less text than that. Rows that no filter passes weigh too.
    """
    tokens = weight = 0.0
    skipped = Skipped()
    for file, start, stop in _places(ranges, files):
        reader = read_documents(file, start, stop, skipped, SAMPLE_BYTES // 2)
        batches = list(itertools.islice(reader, 1) if file.counts_rows else reader)
        documents: list[Document] = [document for batch in batches for document in batch.texts or batch.ids or []]
        size = sum(map(document_bytes, documents))
        if file.counts_rows:
            # Rows weigh alike, however long they are: only many of them say what there is for that weight.
            stop, size = _part_of_table(file, start, stop, SAMPLE_BYTES // 2)
        tokens += size * tokens_per_byte_of(documents, count_tokens)
        weight += range_weight(file, start, stop)
    least = LEAST_SHARE * skipped.rows / max(skipped.rows - skipped.filtered, 1) if skipped.filtered else 1.0
    return max(tokens / max(weight, 1.0) * max(1.0, least), LEAST_DENSITY)


def _places(ranges: list[Range], files: dict[int, TextFile]) -> Iterator[tuple[TextFile, int, int]]:
    if not ranges:
        return
    is_filtered = bool(files[ranges[0][0]].filters)
    count = FILTERED_PLACES if is_filtered else 2
    # The beginning last: what is read of a file is kept for a moment, and it is built next.
    for place in reversed(range(count)):
        number, first, stop = ranges[len(ranges) * place // count]
        file, start = files[number], first + (stop - first) * place // count
        if not file.counts_rows:
            start = find_cut(file, start, stop) if start > first else start
            stop = find_cut(file, start + (PLACE_BYTES if is_filtered else SAMPLE_BYTES // 2), stop)
        else:
            stop = min(stop, start + PLACE_ROWS)
        if is_filtered and not range_weight(file, start, stop):
            continue  # no row of it passes, and it will not weigh in a chunk either
        yield file, start, stop


def _part_of_table(file: TextFile, start: int, stop: int, enough: int) -> tuple[int, float]:
    """One past the last row of as many row groups as have `enough` bytes of documents, and how many these have."""
    size = 0.0
    for cells, keep in read_column(file.path, file.kind, file.column, start, stop, file.filters):
        start += len(cells) if keep is None else len(keep)
        size += float(cell_bytes(cells).sum()) * (ID_BYTES / 8 if holds_ids(cells.type) else 1)
        if size >= enough:
            break
    return start, size


def tokens_per_byte_of(sample: list[Document], count_tokens: CountTokens) -> float:
    """Of some documents, each as many bytes as `document_bytes` says."""
    if any(isinstance(document, np.ndarray) for document in sample):
        return 1 / ID_BYTES
    texts: list[str] = []
    size = 0
    for document in sample:
        # Of a book of books the beginning says enough; the reference would take minutes and gigabytes for the whole.
        if isinstance(document, str) and size < SAMPLE_BYTES and is_unicode(cut := document[:SAMPLE_BYTES]):
            texts.append(cut)
            size += document_bytes(cut)
    return max(count_tokens(texts) / max(size, 1) if texts else 0, LEAST_DENSITY)
