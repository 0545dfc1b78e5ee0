"""`packhorse cache remove`."""

import sys
from pathlib import Path

from packhorse.cache import store
from packhorse.cache.catalogue import describe_folder
from packhorse.cache.commands.outcome import Outcome
from packhorse.cache.removal import refuse_removal, remove_cache
from packhorse.cache.settings import CacheSettings
from packhorse.cache.update import folder_of
from packhorse.errors import SettingsError


def remove(where: CacheSettings | Path, *, yes: bool = False) -> Outcome:
    """Remove the cache for good, after asking.

    Args:
        where: The settings, or the folder of a cache.
        yes: Do not ask.
    """
    folder = store.renameable(folder_of(where))
    refuse_removal(folder)
    entry = describe_folder(folder)
    if not yes:
        if not sys.stdin.isatty():
            raise SettingsError(f"{entry.line()}\nSay --yes to remove it; nobody is there to be asked.")
        print(f"{entry.line()}\nRemove {folder}? Type yes: ", end="", file=sys.stderr, flush=True)
        if sys.stdin.readline().strip() != "yes":
            return Outcome(lines=["Nothing was removed."], values={"folder": str(folder), "removed": False})
    remove_cache(folder)
    values = {"folder": str(folder), "removed": True, "bytes": entry.bytes}
    return Outcome(lines=[f"{folder} was removed: {entry.bytes / 1e6:,.1f} MB."], values=values)
