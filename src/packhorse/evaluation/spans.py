"""Numbers that may be large -> a few spans, each twice as wide as the one before: 0, 1, 2-3, 4-7, 8-15, ..."""

from torch import Tensor, arange, searchsorted

NUM_SPANS = 32


def span_of(number: Tensor) -> Tensor:
    """Which span each number, 0 or more, is in."""
    starts = (2 ** arange(NUM_SPANS, device=number.device)).to(number.dtype)
    return searchsorted(starts, number, right=True).clamp(max=NUM_SPANS - 1)


def span_name(span: int) -> str:
    """What a span is called: its first and last number."""
    first, last = 2 ** (span - 1) if span else 0, 2**span - 1
    return str(first) if first >= last else f"{first}-{last}"
