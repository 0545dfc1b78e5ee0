"""Lengths of documents and utilisation of sequences -> histograms in text."""

import numpy as np

from packhorse.cache.cache import Cache
from packhorse.cache.restore import arrange

SAMPLE_CHUNKS = 64
"""Chunks, spread over the cache, that are looked at."""
BAR = 40
"""The longest bar, in characters."""


def document_lengths(cache: Cache) -> np.ndarray:
    """Tokens of each document of the sampled chunks, int64."""
    parts = [np.empty(0, np.int64)]
    for chunk in _sample(cache):
        pieces = arrange(cache.chunk(chunk), cache.recipe)
        parts.append(np.bincount(pieces.documents, weights=pieces.lengths - pieces.repeated).astype(np.int64))
    return np.concatenate(parts)


def utilisations(cache: Cache) -> np.ndarray:
    """The share of each sequence of the sampled chunks that holds tokens, float64."""
    parts = [np.empty(0)]
    for chunk in _sample(cache):
        pieces = arrange(cache.chunk(chunk), cache.recipe)
        parts.append(np.bincount(pieces.sequences, weights=pieces.lengths) / cache.sequence_length)
    return np.concatenate(parts)


def length_bins(lengths: np.ndarray) -> list[tuple[str, int]]:
    """How many lengths are in each doubling: ("64 to 127", 12)."""
    if not len(lengths):
        return []
    powers = np.floor(np.log2(lengths)).astype(int)
    return [(f"{2**p} to {2 ** (p + 1) - 1}", int((powers == p).sum())) for p in range(powers.min(), powers.max() + 1)]


def share_bins(shares: np.ndarray) -> list[tuple[str, int]]:
    """How many shares are in each tenth, and how many are whole: ("90 to 99 %", 12), ("100 %", 80)."""
    tenths = [
        (f"{10 * t} to {10 * t + 9} %", int(((shares >= t / 10) & (shares < (t + 1) / 10)).sum())) for t in range(10)
    ]
    first = next((place for place, (_, count) in enumerate(tenths) if count), len(tenths))
    return [*tenths[first:], ("100 %", int((shares >= 1).sum()))]


def draw(title: str, bins: list[tuple[str, int]]) -> list[str]:
    """A histogram, line by line."""
    most = max((count for _, count in bins), default=0)
    width = max((len(name) for name, _ in bins), default=0)
    bars = (f"  {name:>{width}}  {'#' * round(BAR * count / most) if most else ''} {count:,}" for name, count in bins)
    return [title, *bars]


def _sample(cache: Cache) -> list[int]:
    total = cache.snapshot.num_chunks
    return sorted({total * place // SAMPLE_CHUNKS for place in range(SAMPLE_CHUNKS)}) if total else []
