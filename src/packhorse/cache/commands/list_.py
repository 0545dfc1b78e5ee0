"""`packhorse cache list`."""

from dataclasses import asdict
from pathlib import Path

from packhorse.cache.cache import cache_root
from packhorse.cache.catalogue import list_caches
from packhorse.cache.commands.outcome import Outcome
from packhorse.cache.settings import CacheSettings
from packhorse.errors import CacheIncompleteError


def list_(where: CacheSettings | Path) -> Outcome:
    """List the caches of a root: tokenizer, recipe, tokens, size, last use.

    Args:
        where: The settings, whose `cache_dir` is meant, or a folder of caches.
    """
    root = cache_root(where) if isinstance(where, CacheSettings) else where
    if root == where and not root.is_dir():
        raise CacheIncompleteError(f"There is no folder {root.absolute()} in which caches could be.")
    entries = list_caches(root)
    lines = [f"{root}: {len(entries)} caches", *(entry.line() for entry in entries)]
    return Outcome(lines=lines, values={"root": str(root), "caches": [asdict(entry) for entry in entries]})
