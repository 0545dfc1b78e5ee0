"""Some texts -> how many tokens a byte of text gives, which decides how much text makes a chunk."""

from collections.abc import Callable

from packhorse.cache.plan import Range
from packhorse.corpus.documents import Skipped, TextFile, find_cut, is_unicode, read_documents
from packhorse.corpus.sources import Document

SAMPLE_BYTES = 64 * 1024
"""Text that is tokenized to learn how many bytes a chunk needs."""

CountTokens = Callable[[list[str]], int]


def tokens_per_byte(ranges: list[Range], files: dict[int, TextFile], count_tokens: CountTokens) -> float:
    """Of files, from texts at two places: of the first range the beginning, of the middle one the middle."""
    sample: list[Document] = []
    for half, (number, start, stop) in enumerate([ranges[0], ranges[len(ranges) // 2]] if ranges else []):
        file = files[number]
        place = start + (stop - start) * half // 2
        if not file.counts_rows and place > start:
            place = find_cut(file, place, stop)
        batch = next(read_documents(file, place, stop, Skipped(), SAMPLE_BYTES // 2), None)
        if batch is not None:
            sample += batch.texts or batch.ids or []
    return tokens_per_byte_of(sample, count_tokens)


def tokens_per_byte_of(sample: list[Document], count_tokens: CountTokens) -> float:
    """Of some documents; an id counts as four bytes."""
    texts = [document for document in sample if isinstance(document, str) and is_unicode(document)]
    ids = sum(len(document) for document in sample if document is not None and not isinstance(document, str))
    size = sum(len(text.encode()) for text in texts) + 4 * ids
    return max((ids + (count_tokens(texts) if texts else 0)) / max(size, 1), 0.01)
