"""`packhorse cache build`."""

from pathlib import Path

from packhorse.cache.commands.outcome import Outcome, describe
from packhorse.cache.settings import CacheSettings
from packhorse.cache.update import update_cache
from packhorse.errors import SettingsError


def build(where: CacheSettings | Path) -> Outcome:
    """Build the cache, or bring it up to date with its sources. Safe to stop at any time: the same command goes on."""
    if not isinstance(where, CacheSettings):
        raise SettingsError(f"Building needs sources, not only the folder {where}: give --config.")
    cache = update_cache(where)
    return Outcome(lines=[f"{cache.folder}", *cache.summary.lines()], values=describe(cache))
