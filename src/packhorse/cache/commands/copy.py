"""`packhorse cache copy`."""

from dataclasses import asdict
from pathlib import Path

from packhorse.cache.commands.outcome import Outcome
from packhorse.cache.copying import copy_cache
from packhorse.cache.settings import CacheSettings
from packhorse.cache.update import folder_of
from packhorse.errors import SettingsError


def copy(where: CacheSettings | Path, *, to: str | None = None, verify: bool = True) -> Outcome:
    """Copy the cache to another folder or bucket, or to an older copy what it lacks. Safe to stop, and beside builders.

    Args:
        where: The settings, or the folder of a cache.
        to: The folder of the copy, or a URL that fsspec knows (`s3://bucket/cache`); of a
            mixture each cache gets a folder in it, by its name.
        verify: Read what was written again, and compare its SHA-256.
    """
    if to is None:
        raise SettingsError("Say where to: --to FOLDER.")
    folder = folder_of(where)
    copied = copy_cache(folder, to, verify, quiet=False)
    line = f"{copied.files:,} files written ({copied.bytes / 1e6:,.1f} MB), {copied.skipped:,} were there"
    lines = [f"{folder} -> {to}", f"{line}; the copy has {copied.chunks:,} chunks"]
    return Outcome(lines=lines, values={"folder": str(folder), **asdict(copied)})
