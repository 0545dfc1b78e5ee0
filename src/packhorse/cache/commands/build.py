"""`packhorse cache build`."""

from dataclasses import replace
from pathlib import Path
from typing import Literal

from packhorse.cache.commands.outcome import Outcome, compression_line, describe
from packhorse.cache.selection import Selection
from packhorse.cache.settings import CacheSettings
from packhorse.cache.update import build_selection
from packhorse.errors import SettingsError


def build(
    where: CacheSettings | Path,
    *,
    mode: Literal["forward", "inverse"] = "forward",
    start_chunk: int = 0,
    end_chunk: int | None = None,
    max_chunks: int | None = None,
    max_sequences: int | None = None,
    max_tokens: int | None = None,
    max_documents: int | None = None,
    num_shards: int = 1,
    shard_index: int = 0,
    resume: bool = True,
    force: bool = False,
) -> Outcome:
    """Build the cache, or bring it up to date with its sources. Safe to stop at any time: the same command goes on.

    Any number of these may run at once on one folder, here or on other machines.

    Args:
        where: The settings.
        mode: `inverse` finds the gaps of what is planned, says them, and fills only those, lowest first.
        start_chunk: Build no chunk before this one.
        end_chunk: Build no chunk after this one; it is built itself.
        max_chunks: Instead of `data.max_chunks`.
        max_sequences: Instead of `data.max_sequences`.
        max_tokens: Instead of `data.max_tokens`.
        max_documents: Instead of `data.max_documents`: rows that are read, before filters.
        num_shards: Share the chunks among so many builders, by number ...
        shard_index: ... and build those of this one, from 0.
        resume: Go on with what is there. That is what happens anyway.
        force: Build everything anew; what was there is moved to the cache's quarantine.
    """
    if not isinstance(where, CacheSettings):
        raise SettingsError(f"Building needs sources, not only the folder {where}: give --config.")
    given = {"chunks": max_chunks, "sequences": max_sequences, "tokens": max_tokens, "documents": max_documents}
    settings = replace(where, **{f"max_{name}": limit for name, limit in given.items() if limit is not None})
    selection = Selection(
        mode=mode, start_chunk=start_chunk, end_chunk=end_chunk, num_shards=num_shards, shard_index=shard_index
    )
    if not resume:
        raise SettingsError("A build always goes on with what is there. To build everything anew, say `--force`.")
    if force and selection != Selection():
        raise SettingsError("`--force` builds everything anew: it goes with no choice of chunks.")
    cache, integrity = build_selection(settings, selection, start_over=force)
    lines = [f"{cache.folder}", *cache.summary.lines(), compression_line(cache), integrity.line()]
    values = {
        **describe(cache),
        "planned": integrity.states.planned,
        "built": integrity.built,
        "missing": integrity.states.unfinished,
    }
    return Outcome(lines=lines, values=values)
