"""Records -> metadata.json: a page for people. Nothing is ever read from it but to check it."""

import json
from dataclasses import asdict
from pathlib import Path

from packhorse.cache import store
from packhorse.cache.cache import summarise
from packhorse.cache.recipe import Recipe
from packhorse.cache.regular import read_file
from packhorse.cache.snapshot import Index, Snapshot
from packhorse.errors import CacheCorruptionError

MAX_BYTES = 16 * 2**20
"""A larger metadata.json is refused unread."""


def metadata_of(folder: Path, recipe: Recipe, num_chunks: int) -> bytes:
    """What metadata.json says of the first `num_chunks` chunks."""
    summary = summarise(folder, num_chunks, recipe.sequence_length)
    value = {
        "version": recipe.format,
        "recipe": recipe.canonical,
        "snapshot": Snapshot(Index(folder), num_chunks).digest,
        "summary": asdict(summary),
        "utilisation": round(summary.utilisation, 6),
        "bytes_per_token": round(summary.bytes_per_token, 4),
    }
    return json.dumps(value, indent=2).encode() + b"\n"


def write_metadata(folder: Path, recipe: Recipe, num_chunks: int) -> None:
    """Write metadata.json anew."""
    store.replace(folder / "metadata.json", metadata_of(folder, recipe, num_chunks))


def check_metadata(folder: Path, recipe: Recipe, num_chunks: int) -> None:
    """Compare metadata.json with the records; it may be of fewer chunks than there are now.

    Raises:
        FileNotFoundError: there is none.
        CacheCorruptionError: it is damaged, or says something else.
    """
    path = folder / "metadata.json"
    try:
        data = read_file(path, MAX_BYTES)
        chunks = json.loads(data)["summary"]["chunks"]
        if type(chunks) is not int or not 0 <= chunks <= num_chunks:
            raise ValueError(f"it is of {chunks!r:.20} chunks, and there are {num_chunks}")
        if data != metadata_of(folder, recipe, chunks):
            raise ValueError("it says something else than the records")
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise CacheCorruptionError(f"{path} is damaged: {error}.") from None
