"""Room on the disk -> builds that would not fit are refused before hours are spent."""

import shutil
from pathlib import Path

from packhorse.cache.chunk import token_bits
from packhorse.cache.estimate import RECORD_BYTES, estimate_cache
from packhorse.cache.plan import Plan
from packhorse.cache.recipe import Recipe
from packhorse.cache.settings import CacheSettings
from packhorse.errors import StorageFullError

MARGIN = 1.25
"""A plan knows its tokens from a small sample."""


def refuse_small_disk(settings: CacheSettings, recipe: Recipe, folder: Path, plan: Plan, chunks: list[int]) -> None:
    """Refuse to build chunks for which there is no room.

    Cheap as long as their ids would fit without compression; else the sources are looked at, as `cache estimate` does.

    Args:
        settings: What is built.
        recipe: How.
        folder: The cache.
        plan: Its plan.
        chunks: Planned chunks that are about to be built.

    Raises:
        StorageFullError: with the room that is needed and that there is; nothing was built.
    """
    free = shutil.disk_usage(folder).free
    pages = [plan.page(chunk) for chunk in chunks]
    tokens = sum(page.chunk_bytes * page.tokens_per_byte for page in pages)
    needed = MARGIN * tokens * token_bits(recipe.vocab_size) / 8 + len(chunks) * RECORD_BYTES
    if needed > free and not any(file.packed == "stream" for file in plan.files):
        # The upper end of the interval, for as many of the chunks as are missing.
        found = estimate_cache(settings)
        needed = min(needed, found.disk_bytes.high * min(1.0, len(chunks) / found.chunks.estimate))
    if needed > free:
        raise StorageFullError(
            f"{len(chunks)} chunks of {folder} may take {needed / 1e6:,.1f} MB, and the disk has {free / 1e6:,.1f} MB "
            "left; nothing was built.\nFree some space, set `cache_dir` to another disk, or take less text "
            "(`max_documents`, `max_tokens`)."
        )
