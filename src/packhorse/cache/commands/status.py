"""`packhorse cache status`."""

import sys
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

from packhorse.cache.cache import Cache
from packhorse.cache.claims import Claims, LiveBuilder
from packhorse.cache.commands.outcome import Outcome, compression_line, describe, ranges
from packhorse.cache.gaps import duration, estimate_gaps
from packhorse.cache.plan import Plan
from packhorse.cache.progress import say
from packhorse.cache.settings import CacheSettings
from packhorse.cache.snapshot import Index
from packhorse.cache.states import ChunkStates, find_states
from packhorse.cache.update import folder_of
from packhorse.errors import CacheCorruptionError


def status(where: CacheSettings | Path, *, watch: float | None = None) -> Outcome:
    """Tell what is planned, what is built, and who is building.

    Args:
        where: The settings, or the folder of a cache.
        watch: Look again every so many seconds, until everything is built or Ctrl-C.
    """
    folder = folder_of(where)
    claims = Claims(folder)
    outcome = _look(folder, claims)
    if watch is None:
        return outcome
    try:
        while outcome.values["missing"] or outcome.values["builders"]:
            _show(outcome)
            time.sleep(max(0.1, watch))
            outcome = _look(folder, claims)
    except KeyboardInterrupt:
        pass
    return outcome


def _look(folder: Path, claims: Claims) -> Outcome:
    plan, index = Plan(folder), Index(folder)
    states = find_states(folder, plan)  # without the index, which knows nothing of what befell records since
    plan.refuse_gaps(max([index.num_chunks, *(chunk + 1 for chunk in states.unplanned)]))
    cache, problems = _open(folder, states, index.num_chunks)
    builders = claims.builders()
    claimed = sorted({chunk for builder in builders for chunk in builder.chunks} & set(states.unfinished))
    rate = sum(builder.tells["bytes_per_second"] for builder in builders)
    left = sum(plan.page(chunk).chunk_bytes for chunk in states.unfinished)
    lines = [f"{folder}", *cache.summary.lines(), compression_line(cache), *_states_lines(states, claimed, cache)]
    lines += problems
    lines += [_builder_line(builder) for builder in builders]
    if rate and left:
        lines.append(f"about {duration(left / rate)} left at {rate / 1e6:,.1f} MB of text per second")
    elif states.unfinished:
        lines.append(f"nobody is building; one core takes {estimate_gaps(folder, plan, states, states.unfinished, 1)}")
    values: dict[str, Any] = {
        **describe(cache),
        "planned": states.planned,
        "missing": states.unfinished,
        "lost": states.lost,
        "damaged": states.damaged,
        "suspect": states.suspect,
        "claimed": claimed,
        "builders": [asdict(builder) for builder in builders],
        "seconds_left": left / rate if rate else None,
    }
    return Outcome(lines=lines, values=values)


def _open(folder: Path, states: ChunkStates, published: int) -> tuple[Cache, list[str]]:
    """The cache of the chunks that can be read, even if the index promises more; and what is wrong with the index."""
    complete = states.unfinished[0] if states.unfinished else states.planned
    try:
        cache = Cache(folder, min(complete, published or complete))
        _ = cache.snapshot.digest  # read now, while there is another way
        return cache, []
    except CacheCorruptionError as error:
        cache = Cache(folder, complete, from_records=True)
        return cache, [str(error).splitlines()[0]]


def _states_lines(states: ChunkStates, claimed: list[int], cache: Cache) -> list[str]:
    if not states.unfinished:
        return [f"All {states.planned} planned chunks are there."]
    complete, published = states.unfinished[0], cache.snapshot.num_chunks
    lines = [f"{len(states.built)} of {states.planned} planned chunks are there, the first {complete} without a gap"]
    if published < complete:
        lines[0] += f" ({published} of them published so far)"
    kinds = {
        "missing": states.missing,
        "without their file": states.lost,
        "damaged (another size, or an unreadable record)": states.damaged,
        "of an engine that was wrong": states.suspect,
        "being built": claimed,
    }
    return lines + [f"{len(chunks)} {kind}: {ranges(chunks)}" for kind, chunks in kinds.items() if chunks]


def _builder_line(builder: LiveBuilder) -> str:
    tells = builder.tells
    return (
        f"builder {tells['host']}, process {tells['pid']:.0f}: {ranges(builder.chunks) or '-'}, "
        f"{tells['chunks']:.0f} chunks done, {tells['tokens_per_second'] / 1e6:,.2f} M tokens/s, "
        f"{tells['bytes_per_second'] / 1e6:,.1f} MB/s, heard of {builder.heartbeat_seconds:.0f} s ago"
    )


def _show(outcome: Outcome) -> None:
    """A look that is not the last: over the one before on a terminal, below it elsewhere."""
    clear = "\x1b[2J\x1b[H" if sys.stderr.isatty() else ""
    say(clear + "\n".join(outcome.lines) + ("" if clear else "\n"))
