"""Caches beside a cache, where builders can do no harm."""

import os
import secrets
from pathlib import Path

from packhorse.cache import store
from packhorse.cache.recipe import Identity
from packhorse.cache.regular import read_parts


class Scratch:
    """Caches with the recipe and the tokenizer of another, and no chunks; removed at the end.

    Args:
        folder: The other cache; they lie in its spool.
        identity: What it is.
    """

    def __init__(self, folder: Path, identity: Identity) -> None:
        self.source, self.identity = folder, identity
        self.folder = folder / "spool" / f"repair-{os.getpid()}-{secrets.token_hex(4)}"

    def __enter__(self) -> "Scratch":
        return self

    def __exit__(self, *_) -> None:
        store.remove_folder(self.folder)

    def cache(self, name: str) -> Path:
        """The folder of one of them."""
        folder = self.folder / name
        for file in (*(f"tokenizer/{name}" for name in self.identity.tokenizer_files), "recipe.json"):
            store.make_folder((folder / file).parent)
            store.publish(folder / file, read_parts(self.source / file))
        return folder
