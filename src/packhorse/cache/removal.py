"""A cache -> nothing. First it gets another name, at once; then it is taken apart, and nobody sees it half gone."""

import time
from pathlib import Path

from packhorse.cache import store
from packhorse.cache.claims import Claims
from packhorse.cache.recipe import read_identity
from packhorse.errors import CacheError

PARTS = (
    *("recipe.json", "metadata.json", "tokenizer", "plan", "chunks", "records", "index"),
    *("spool", "suspects", "quarantine", "claims", "duplicates", "log"),
)
"""What a cache's folder holds; where there is anything else, it is not ours to remove."""

BUSY_SECONDS = 600
"""Whoever writes a temporary file for longer than this is not writing."""


def refuse_removal(folder: Path) -> None:
    """Refuse to remove what is not a cache alone, or is being built.

    Raises:
        CacheIncompleteError, CacheCorruptionError: there is no cache, or its recipe.json is damaged.
        CacheError: there is something else in the folder, or a builder is at work.
    """
    read_identity(folder)
    if folder.is_symlink():
        raise CacheError(f"{folder} is a link: remove what it leads to, {folder.resolve()}.")
    strangers = sorted(path.name for path in folder.iterdir() if path.name not in PARTS)
    if strangers:
        raise CacheError(f"{folder} holds what is not of a cache: {', '.join(strangers)}. Move it away first.")
    if builders := Claims(folder).builders():
        raise CacheError(f"A builder is at work in {folder}: {builders[0].name}. Stop it first.")
    for path in folder.rglob(f"{store.TEMPORARY}*"):
        if path.lstat().st_mtime > time.time() - BUSY_SECONDS:
            raise CacheError(f"A builder seems to be at work: {path} is young. Stop it, or wait ten minutes.")


def remove_cache(folder: Path) -> None:
    """Remove a cache for good.

    Raises:
        CacheError: as `refuse_removal`.
    """
    refuse_removal(folder)
    folder = store.renameable(folder)
    with store.disk_errors(folder):
        aside = store.put_aside(folder)
    store.remove_folder(aside)
