"""`packhorse cache status`."""

from pathlib import Path

from packhorse.cache.commands.outcome import Outcome, describe, ranges
from packhorse.cache.plan import Plan
from packhorse.cache.record import committed_chunks
from packhorse.cache.settings import CacheSettings
from packhorse.cache.update import open_cache


def status(where: CacheSettings | Path) -> Outcome:
    """Tell what is planned and what is built."""
    cache = open_cache(where)
    plan = Plan(cache.folder)
    committed = set(committed_chunks(cache.folder))
    missing = [chunk for chunk in range(plan.num_chunks) if chunk not in committed]
    lines = [f"{cache.folder}", *cache.summary.lines()]
    if missing:
        lines.append(f"{len(missing)} of {plan.num_chunks} planned chunks are missing: {ranges(missing)}")
    else:
        lines.append(f"All {plan.num_chunks} planned chunks are there.")
    return Outcome(lines=lines, values={**describe(cache), "planned": plan.num_chunks, "missing": missing})
