"""What a verb has to say: lines for people, values for scripts, an exit status for both."""

from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np

from packhorse.cache.cache import Cache
from packhorse.cache.selection import ranges as ranges
from packhorse.corpus.tokens import narrowest


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """The result of a verb."""

    lines: list[str] = field(default_factory=list)
    """For people."""
    values: dict[str, Any] = field(default_factory=dict)
    """For scripts, as JSON."""
    status: int = 0
    """Exit status: 0 all is well, 1 something was found that should not be."""


def describe(cache: Cache) -> dict[str, Any]:
    """What scripts want to know about a cache, whatever the verb."""
    summary = cache.summary
    return {
        "folder": str(cache.folder),
        "recipe": asdict(cache.recipe),
        "snapshot": cache.snapshot.digest,
        **asdict(summary),
        "utilisation": summary.utilisation,
        "bytes_per_token": summary.bytes_per_token,
        "compression": compression(cache),
    }


def compression(cache: Cache) -> dict[str, float]:
    """How many times smaller the chunks are than plain arrays of the same sequences, padding included."""
    summary = cache.summary
    kinds = (np.dtype(np.int64), np.dtype(narrowest(cache.vocab_size)))
    return {kind.name: round(kind.itemsize * summary.slots / max(summary.file_bytes, 1), 3) for kind in kinds}


def compression_line(cache: Cache) -> str:
    """The same for people."""
    return "on disk " + ", ".join(
        f"{ratio:.2f} times smaller than {kind}" for kind, ratio in compression(cache).items()
    )
