"""What a verb has to say: lines for people, values for scripts, an exit status for both."""

from dataclasses import asdict, dataclass, field
from typing import Any

from packhorse.cache.cache import Cache
from packhorse.cache.selection import ranges as ranges


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
    }
