"""Room on the disk -> builds that would not fit are refused before hours are spent."""

import math
import shutil
from pathlib import Path

from packhorse.cache.chunk import token_bits
from packhorse.cache.estimate import RECORD_BYTES, estimate_cache
from packhorse.cache.plan import Page, Plan
from packhorse.cache.recipe import Recipe
from packhorse.cache.record import committed_chunks, read_record
from packhorse.cache.settings import CacheSettings
from packhorse.errors import StorageFullError

FIRST_CHUNKS = 20
"""So many say how far tokens are compressed."""
MARGIN = 1.25
"""A plan knows its tokens from a small sample."""


def refuse_small_disk(settings: CacheSettings, recipe: Recipe, folder: Path, plan: Plan, pages: list[Page]) -> None:
    """Refuse to build chunks for which there is no room.

    Cheap as long as their ids would fit without compression. Else, for what is about to enter the plan, the sources are
    looked at, as `cache estimate` does; for what is in it, the chunks that are there.

    Args:
        settings: What is built.
        recipe: How.
        folder: The cache.
        plan: Its plan.
        pages: For each chunk that is about to be built its page, of the plan or about to enter it.

    Raises:
        StorageFullError: with the room that is needed and that there is; nothing was built.
    """
    if not pages:
        return
    free = shutil.disk_usage(folder).free
    tokens = sum(page.chunk_bytes * page.tokens_per_byte for page in pages)
    needed = MARGIN * tokens * token_bits(recipe.vocab_size) / 8 + len(pages) * RECORD_BYTES
    is_planned = pages[0].page < len(plan.pages)
    files = [*plan.files, *(file for page in pages for file in page.files)]
    if needed > free and is_planned:
        needed = min(needed, MARGIN * tokens * _bytes_per_token(folder) + len(pages) * RECORD_BYTES)
    elif needed > free and not any(file.packed == "stream" for file in files):
        # The upper end of the interval, for as many of the chunks as are missing.
        found = estimate_cache(settings)
        needed = min(needed, found.disk_bytes.high * min(1.0, len(pages) / found.chunks.estimate))
    if needed > free:
        less = (
            "build a part of what is planned (`--end-chunk`), or another cache of less text (`name`, `max_documents`)"
            if is_planned
            else "take less text (`max_documents`, `max_tokens`)"
        )
        raise StorageFullError(
            f"{len(pages)} chunks of {folder} may take {needed / 1e6:,.1f} MB, and the disk has {free / 1e6:,.1f} MB "
            f"left; nothing was built.\nFree some space, set `cache_dir` to another disk, or {less}."
        )


def _bytes_per_token(folder: Path) -> float:
    """Of the first chunks that are there; endless if there are none."""
    records = [read_record(folder, chunk) for chunk in committed_chunks(folder)[:FIRST_CHUNKS]]
    tokens = sum(record.tokens for record in records)
    return sum(record.file_bytes for record in records) / tokens if tokens else math.inf
