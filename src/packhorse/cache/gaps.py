"""Gaps of a plan -> the space and the time that filling them will take, from the chunks that are there."""

from pathlib import Path

from packhorse.cache.plan import Plan
from packhorse.cache.record import read_record
from packhorse.cache.states import ChunkStates

SAMPLE_CHUNKS = 32
"""Records that are read to know what a chunk takes."""


def estimate_gaps(folder: Path, plan: Plan, states: ChunkStates, gaps: list[int], builders: int) -> str:
    """Space and time for some chunks, in words.

    Args:
        folder: The cache.
        plan: Its plan.
        states: What is there.
        gaps: The chunks to build.
        builders: How many build at once.
    """
    text_bytes = sum(plan.page(chunk).chunk_bytes for chunk in gaps)
    sample = [read_record(folder, chunk) for chunk in states.built[:: -(-len(states.built) // SAMPLE_CHUNKS) or 1]]
    if not (known := sum(record.text_bytes for record in sample)):
        return f"about {text_bytes / 1e6:,.1f} MB of text"
    space = text_bytes * sum(record.file_bytes for record in sample) / known
    seconds = text_bytes * sum(record.seconds for record in sample) / known / max(1, min(builders, len(gaps)))
    return f"about {space / 1e6:,.1f} MB on disk and {duration(seconds)}"


def duration(seconds: float) -> str:
    """4000 -> "1 h 7 min"."""
    if seconds < 120:
        return f"{seconds:.0f} s" if seconds >= 10 else f"{seconds:.1f} s"
    minutes = round(seconds / 60)
    return f"{minutes} min" if minutes < 120 else f"{minutes // 60} h {minutes % 60} min"
