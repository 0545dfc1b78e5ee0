"""`packhorse cache repair`."""

from pathlib import Path

from packhorse.cache.commands.outcome import Outcome
from packhorse.cache.repair import repair_cache
from packhorse.cache.settings import CacheSettings
from packhorse.cache.update import folder_of


def repair(where: CacheSettings | Path) -> Outcome:
    """Build what is damaged again from its source, prove it equal, and put it in its place.

    Chunks whose source has changed are left as they are. Damaged files are moved to the cache's quarantine. Exit
    status 1 when something stays damaged.

    Args:
        where: The settings, or the folder of a cache whose sources are where they were.
    """
    folder = folder_of(where)
    result = repair_cache(folder, where if isinstance(where, CacheSettings) else None, quiet=False)
    values = {
        "folder": str(folder),
        "mended": result.mended,
        "refused": result.refused,
        "damaged_before": result.before.damaged_chunks,
        "damaged": {chunk: result.after.problem_of(chunk) for chunk in result.after.damaged_chunks},
    }
    return Outcome(lines=[f"{folder}", *result.lines()], values=values, status=0 if result.is_good else 1)
