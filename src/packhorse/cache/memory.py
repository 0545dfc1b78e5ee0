"""A memory limit -> how many builders, how large their chunks, how long a document may be.

    process      this process as it is now, measured          70 MB for each other builder
    tokenizer    64 MB + 21 times its tokenizer.json          GPT-2 126 MB, Qwen3 278 MB
    reading      a row group of 64 MB, batches of text        128 MB, or 3 times the largest page of a parquet file
    chunk        5 times the bytes of its ids                 8,000 x 512 ids of 2 bytes: 41 MB
    document     12 times its text (fastokens), 125 (hf)      64 MiB of text: 805 MB, 8.4 GB

All but the first are for each builder. They were measured, and a test holds them against what builds really take. A
limit makes builders fewer first, then chunks smaller; documents that are longer than what is left are refused, with the
limit that they need, before they are tokenized.
"""

import ctypes
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import psutil

from packhorse.cache.cuts import row_groups
from packhorse.cache.recipe import Recipe
from packhorse.cache.settings import CacheSettings, parse_size
from packhorse.corpus.sources import Files, Source
from packhorse.corpus.tables import LARGE_GROUP
from packhorse.corpus.tokens import narrowest
from packhorse.errors import SettingsError

PROCESS_BYTES = 70 * 10**6
ENGINE_BYTES, ENGINE_FACTOR = 64 * 10**6, 21
READING_BYTES = 128 * 10**6
PAGE_ROWS, PAGE_FACTOR = 1_024, 3
"""Writers look at the size of a page once in so many rows; a page is held so many times while it is decoded."""
CHUNK_FACTOR = 5
DOCUMENT_FACTOR = {"fastokens": 12, "hf": 125}
DOCUMENT_BYTES = 64 * 2**20
"""Text of the longest document that a limit leaves room for."""
MAX_CHUNK_TOKENS = 2**24
"""Chunks have no more, whatever the length of sequences: 8,000 sequences of 131,072 would take 10 GB to build."""
MIN_CHUNK_TOKENS = 2**20
"""A limit makes chunks as small as that, or of 16 sequences."""


@dataclass(frozen=True, kw_only=True)
class Budget:
    """What fits."""

    builders: int
    chunk_tokens: int
    document_bytes: int | None = None
    """Text of the longest document; None for any."""


def plan_memory(
    settings: CacheSettings,
    recipe: Recipe,
    tokenizer_bytes: int = 0,
    builders: int = 1,
    planned: int = 0,
    page_bytes: int = 0,
) -> Budget:
    """What fits into the limit of the settings.

    Args:
        settings: The settings.
        recipe: What is built.
        tokenizer_bytes: Size of the tokenizer.json.
        builders: How many are wanted.
        planned: Tokens of the largest chunk that is planned already, and must be built as it is.
        page_bytes: The largest page of a parquet file: see `largest_page`.

    Raises:
        SettingsError: the limit is too small, with the one that is needed.
    """
    wanted = min(settings.sequences_per_chunk * settings.sequence_length, MAX_CHUNK_TOKENS)
    wanted = max(wanted, settings.sequence_length)
    if settings.memory_limit is None:
        return Budget(builders=builders, chunk_tokens=wanted)
    limit = parse_size(settings.memory_limit)
    release_unused()
    here = used_memory()
    engine = ENGINE_BYTES + ENGINE_FACTOR * tokenizer_bytes
    per_token = CHUNK_FACTOR * narrowest(recipe.vocab_size)().itemsize
    longest = DOCUMENT_BYTES * DOCUMENT_FACTOR["hf" if settings.engine == "hf" else "fastokens"]
    reading = max(READING_BYTES, PAGE_FACTOR * page_bytes)
    least = max(planned, min(wanted, max(MIN_CHUNK_TOKENS, 16 * settings.sequence_length)))

    def taken(number: int, tokens: int) -> int:
        fixed = here + (number - 1) * PROCESS_BYTES
        return fixed + number * (engine + reading + longest + per_token * tokens)

    number = next((n for n in range(max(1, builders), 0, -1) if taken(n, least) <= limit), 0)
    if not number:
        raise SettingsError(
            f"memory_limit is {settings.memory_limit}; building here needs {taken(1, least) / 1e6:,.0f} MB: "
            f"this process {here / 1e6:,.0f}, the tokenizer {engine / 1e6:,.0f}, reading {reading / 1e6:,.0f}, "
            f"a chunk {per_token * least / 1e6:,.0f}, a document of {DOCUMENT_BYTES >> 20} MiB {longest / 1e6:,.0f}."
        )
    tokens = max(least, min(wanted, least + (limit - taken(number, least)) // (number * per_token)))
    room = DOCUMENT_BYTES + max(0, limit - taken(number, tokens)) // (number * longest // DOCUMENT_BYTES)
    return Budget(builders=number if builders else 0, chunk_tokens=tokens, document_bytes=room)


def largest_page(sources: list[Source]) -> int:
    """Bytes that must be read at once of a parquet file: about a row group of a thousand rows, of others a page."""
    files = [file.file for source in sources if isinstance(source, Files) for file in source.files if not file.packed]
    groups = [group for file in files if file.kind == "parquet" for group in row_groups(file)]
    return max((min(size, LARGE_GROUP + size * PAGE_ROWS // rows) for _, rows, size in groups), default=0)


def release_unused() -> None:
    """Give back what libraries hold for later."""
    import pyarrow as pa

    pa.default_memory_pool().release_unused()
    with suppress(OSError, AttributeError):  # not every system has glibc
        ctypes.CDLL(None).malloc_trim(0)


def used_memory(process: int | None = None) -> int:
    """Bytes that a process, by default this one, holds: without mapped files, which the system can drop."""
    try:
        lines = Path(f"/proc/{process or 'self'}/status").read_text().splitlines()
        return 1024 * int(next(line.split()[1] for line in lines if line.startswith("RssAnon")))
    except (OSError, StopIteration):
        return psutil.Process(process).memory_info().rss
