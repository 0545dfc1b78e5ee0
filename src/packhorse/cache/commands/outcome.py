"""What a verb has to say: lines for people, values for scripts, an exit status for both."""

from dataclasses import asdict, dataclass, field
from typing import Any

from packhorse.cache.cache import Cache


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


def ranges(numbers: list[int]) -> str:
    """1, 2, 3, 7 -> "1-3, 7"."""
    runs: list[list[int]] = []
    for number in numbers:
        if runs and number == runs[-1][1] + 1:
            runs[-1][1] = number
        else:
            runs.append([number, number])
    return ", ".join(str(a) if a == b else f"{a}-{b}" for a, b in runs)
