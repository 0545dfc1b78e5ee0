"""`packhorse cache estimate`."""

from dataclasses import asdict
from pathlib import Path

from packhorse.cache.commands.outcome import Outcome
from packhorse.cache.estimate import Figure, estimate_cache
from packhorse.cache.settings import CacheSettings
from packhorse.errors import SettingsError


def estimate(where: CacheSettings | Path, *, places: int = 200, seed: int = 0) -> Outcome:
    """Tell what a cache will take before hours are spent: tokens, sequences, chunks, bytes on disk, time.

    Each with the interval in which the truth is about 95 times in 100, from random places of the sources. Builds
    nothing. Exit status 1 when the disk may be too small.

    Args:
        where: What the cache would hold.
        places: How many places of the sources to look at; more of them make the intervals narrower.
        seed: Decides which.
    """
    if not isinstance(where, CacheSettings):
        raise SettingsError(f"An estimate needs sources, not only the folder {where}: give --config.")
    found = estimate_cache(where, places=places, seed=seed)
    rows = [
        ("documents", found.documents, _count),
        ("tokens", found.tokens, _count),
        ("sequences", found.sequences, _count),
        ("chunks", found.chunks, _count),
        ("on disk", found.disk_bytes, _megabytes),
        ("time", found.seconds, _time),
    ]
    lines = [f"{name:10} {_told(figure, form)}" for name, figure, form in rows]
    is_enough = found.disk_bytes.high <= found.free_bytes
    lines.append(f"From {found.places} random places. Free on the disk: {_megabytes(found.free_bytes)}.")
    if not is_enough:
        lines.append("The disk may be too small.")
    return Outcome(lines=lines, values={**asdict(found), "fits": is_enough}, status=0 if is_enough else 1)


def _told(figure: Figure, form) -> str:
    return f"{form(figure.estimate):>16}   ({form(figure.low)} to {form(figure.high)})"


def _count(value: float) -> str:
    return f"{round(value):,}"


def _megabytes(value: float) -> str:
    return f"{value / 1e6:,.1f} MB"


def _time(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes:02} min" if hours else f"{minutes} min {rest:02} s" if minutes else f"{seconds:.1f} s"
