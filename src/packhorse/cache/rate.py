"""Some texts -> how many tokens a byte of text gives, which decides how much text makes a chunk."""

from collections.abc import Callable, Iterator

import numpy as np

from packhorse.cache.cuts import range_weight
from packhorse.cache.plan import Range
from packhorse.corpus.documents import Skipped, TextFile, is_unicode, read_documents
from packhorse.corpus.lines import find_cut
from packhorse.corpus.sources import Document

SAMPLE_BYTES = 64 * 1024
"""Text that is tokenized to learn how many bytes a chunk needs."""

FILTERED_PLACES = 8
"""With filters so many places are looked at, to learn how many rows pass,"""
PLACE_BYTES, PLACE_ROWS = 4 * 2**20, 20_000
"""and at each of them not more than this."""
LEAST_SHARE = 0.05
"""If fewer pass, chunks become smaller: if more did elsewhere, they would become large."""

CountTokens = Callable[[list[str]], int]


def tokens_per_byte(ranges: list[Range], files: dict[int, TextFile], count_tokens: CountTokens) -> float:
    """Of files, from texts at two places: of the first range the beginning, of the middle one the middle.

    With filters it is that of the text that passes, times the share of the rows that do.
    """
    sample: list[Document] = []
    skipped = Skipped()
    for file, start, stop in _places(ranges, files):
        batch = next(read_documents(file, start, stop, skipped, SAMPLE_BYTES // 2), None)
        if batch is not None:
            sample += batch.texts or batch.ids or []
    share = (skipped.rows - skipped.filtered) / max(skipped.rows, 1) if skipped.filtered else 1.0
    return tokens_per_byte_of(sample, count_tokens) * max(share, LEAST_SHARE)


def _places(ranges: list[Range], files: dict[int, TextFile]) -> Iterator[tuple[TextFile, int, int]]:
    if not ranges:
        return
    is_filtered = bool(files[ranges[0][0]].filters)
    count = FILTERED_PLACES if is_filtered else 2
    # The beginning last: what is read of a file is kept for a moment, and it is built next.
    for place in reversed(range(count)):
        number, first, stop = ranges[len(ranges) * place // count]
        file, start = files[number], first + (stop - first) * place // count
        if not file.counts_rows and start > first:
            start = find_cut(file, start, stop)
        if is_filtered:
            stop = min(stop, start + PLACE_ROWS) if file.counts_rows else find_cut(file, start + PLACE_BYTES, stop)
            if not range_weight(file, start, stop):
                continue  # no row of it passes, and it will not weigh in a chunk either
        yield file, start, stop


def tokens_per_byte_of(sample: list[Document], count_tokens: CountTokens) -> float:
    """Of some documents; an id counts as four bytes."""
    # Of a book of books the beginning says enough; the reference would take minutes and gigabytes for the whole.
    cut = [document[:SAMPLE_BYTES] for document in sample if isinstance(document, str)]
    texts = [text for text in cut if is_unicode(text)]
    ids = sum(len(document) for document in sample if isinstance(document, np.ndarray))
    size = sum(len(text.encode()) for text in texts) + 4 * ids
    return max((ids + (count_tokens(texts) if texts else 0)) / max(size, 1), 0.01)
