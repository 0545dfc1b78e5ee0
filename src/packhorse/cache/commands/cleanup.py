"""`packhorse cache cleanup`."""

from pathlib import Path

from packhorse.cache.cleanup import clean, find_leftovers
from packhorse.cache.commands.outcome import Outcome
from packhorse.cache.settings import CacheSettings
from packhorse.cache.update import folder_of


def cleanup(where: CacheSettings | Path, *, yes: bool = False, quarantine_days: float | None = None) -> Outcome:
    """Say what dead builders left and nobody needs; with --yes remove it. Nothing goes that cannot be rebuilt.

    What is younger than a day is left alone: a builder may be writing it.

    Args:
        where: The settings, or the folder of a cache.
        yes: Do it; without this nothing is changed.
        quarantine_days: Also remove for good what has been in quarantine for so many days.
    """
    folder = folder_of(where)
    found = find_leftovers(folder, quarantine_days)
    if yes:
        clean(found, folder)
    total = sum(leftover.num_bytes for leftover in found)
    end = "Done." if yes else "Nothing was changed; say --yes to do it."
    lines = [f"{folder}", *map(str, found), f"{len(found)} leftovers, {total:,} bytes. {end if found else ''}".strip()]
    values = {
        "folder": str(folder),
        "leftovers": [{"path": str(x.path), "why": x.why, "bytes": x.num_bytes, "keep": x.keep} for x in found],
        "bytes": total,
        "done": yes,
    }
    return Outcome(lines=lines, values=values)
