"""Plan, records and files -> what is the matter with every chunk.

    built      its record is there, and its file has the size that the record says
    missing    it is planned, and has no record
    lost       its record is there, its file is not
    damaged    its file has another size or is none (a link, a pipe), or its record cannot be read
    suspect    its tokens are of an engine that was wrong

No chunk is opened: `cache validate` is what hashes. Where an index is given, only records that it lacks are read.
"""

from dataclasses import dataclass, field
from pathlib import Path

from packhorse.cache.plan import Plan
from packhorse.cache.recipe import read_identity
from packhorse.cache.record import chunk_path, chunk_sizes, committed_chunks, read_record, unplanned_chunks
from packhorse.cache.regular import file_size
from packhorse.cache.snapshot import Index
from packhorse.cache.suspects import Suspects
from packhorse.errors import CacheCorruptionError


@dataclass(frozen=True, kw_only=True)
class ChunkStates:
    """The chunks of a plan, by state, each in order."""

    planned: int
    built: list[int] = field(default_factory=list)
    missing: list[int] = field(default_factory=list)
    lost: list[int] = field(default_factory=list)
    damaged: list[int] = field(default_factory=list)
    suspect: list[int] = field(default_factory=list)
    unplanned: list[int] = field(default_factory=list)
    """Those beyond the plan, in none of the other states: a page of the plan is gone, or was added just now."""
    unreadable: dict[int, str] = field(default_factory=dict)
    """Of the damaged ones, those whose record cannot be read, and why."""

    @property
    def unfinished(self) -> list[int]:
        """All that must be built, in order."""
        return sorted([*self.missing, *self.lost, *self.damaged, *self.suspect])


def find_states(folder: Path, plan: Plan, index: Index | None = None) -> ChunkStates:
    """Look at every chunk of a plan.

    Args:
        folder: The cache.
        plan: Its plan.
        index: Its index; chunks that it has are believed to be what it says. Without one every record is read.
    """
    committed = committed_chunks(folder)
    states = ChunkStates(planned=plan.num_chunks)
    states.missing.extend(sorted(set(range(plan.num_chunks)) - set(committed)))
    sizes = chunk_sizes(folder)
    engines = Suspects(folder).engines()
    planned, beyond = plan.divide(committed)
    if beyond:
        states.unplanned.extend(unplanned_chunks(folder, beyond, read_identity(folder).recipe.digest))
    for chunk in planned:
        try:
            digest, size = _recorded(folder, index, chunk)
            found = sizes.get(chunk_path(folder, chunk, digest).name)
            is_suspect = bool(engines) and read_record(folder, chunk).engine in engines
        except FileNotFoundError:  # another process moved it to the quarantine
            states.missing.append(chunk)
            continue
        except CacheCorruptionError as error:
            states.damaged.append(chunk)
            states.unreadable[chunk] = str(error)
            continue
        right = states.suspect if is_suspect else states.built
        (states.lost if found is None else right if found == size else states.damaged).append(chunk)
    return states


def is_built(folder: Path, chunk: int) -> bool:
    """Whether a chunk is committed by now, and its file has the size that its record says."""
    try:
        record = read_record(folder, chunk)
        return file_size(chunk_path(folder, chunk, record.file_sha256)) == record.file_bytes
    except (OSError, CacheCorruptionError):
        return False


def _recorded(folder: Path, index: Index | None, chunk: int) -> tuple[str, int]:
    if index is not None and chunk < index.num_chunks:
        return index.file_sha256(chunk), int(index.row(chunk)["file_bytes"])
    record = read_record(folder, chunk)
    return record.file_sha256, record.file_bytes
