"""What is damaged -> what it was, built again and proven equal.

    check -> recipe, tokenizer, suspects -> chunks -> index, metadata -> check again

A chunk is built again by the builders that every build uses, but in a scratch cache beside the others, where nothing
can be harmed. Only when its payload is proven to be the one that was committed does it take its place: by the hash in
its record, or, where the record itself is damaged, by the digest of the snapshot, which goes over all payloads. What
was damaged goes to quarantine. A chunk that differs (its source changed) is refused, and nothing of it is changed.
"""

import os
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path

from packhorse.cache import store
from packhorse.cache.build import Job
from packhorse.cache.check import check_cache
from packhorse.cache.chunk import LEVELS
from packhorse.cache.evidence import Evidence, level_of
from packhorse.cache.locations import Locations
from packhorse.cache.metadata import check_metadata, write_metadata
from packhorse.cache.plan import Plan
from packhorse.cache.recipe import Identity, create, make_recipe, read_identity
from packhorse.cache.record import Record, chunk_path, committed_chunks, read_record, readable_records, record_path
from packhorse.cache.regular import read_file, read_parts
from packhorse.cache.report import Report
from packhorse.cache.scratch import Scratch
from packhorse.cache.settings import CacheSettings
from packhorse.cache.snapshot import Index, next_digest
from packhorse.cache.states import find_states
from packhorse.cache.suspects import Suspects
from packhorse.cache.workers import Workers, usable_cores
from packhorse.corpus.tokenizer import locate_tokenizer, read_tokenizer
from packhorse.errors import (
    CacheCorruptionError,
    CacheError,
    CacheIncompleteError,
    EngineMismatch,
    PackhorseError,
    StorageFullError,
    StorageIOError,
)

DISK_ERRORS = (StorageFullError, StorageIOError)
"""These end a repair: nothing that is written later would fare better."""

MANY_CHUNKS = 4
"""For fewer chunks no processes are started: they are built here meanwhile."""


@dataclass(kw_only=True)
class Repair:
    """What was repaired, and what could not be."""

    before: Report
    after: Report
    mended: list[str] = field(default_factory=list)
    """What was done, in words."""
    refused: list[str] = field(default_factory=list)
    """What was left as it is, and why."""

    @property
    def is_good(self) -> bool:
        """Whether nothing is damaged now."""
        return self.after.is_good

    def lines(self) -> list[str]:
        """For people."""
        if self.before.is_good:
            return ["Nothing is damaged.", *self.after.lines()]
        return [*self.mended, *(f"Left as it is: {text}" for text in self.refused), *self.after.lines()]


def repair_cache(folder: Path, settings: CacheSettings | None = None, quiet: bool = True) -> Repair:
    """Mend what is damaged. Safe to kill, to repeat, and beside builders and readers.

    Args:
        folder: The cache.
        settings: What the cache was built with. Without them sources are looked for where they were planned, and
            recipe and tokenizer cannot be repaired.
        quiet: Do not show progress.

    Raises:
        CacheIncompleteError: there is no cache at all.
    """
    before = check_cache(folder, "full", quiet=quiet)
    work = Repair(before=before, after=before)
    if not before.is_good:
        _Work(folder, settings, work).run()
        work.after = check_cache(folder, "full", quiet=quiet)
    return work


class _Work:
    """One run of `repair_cache`."""

    def __init__(self, folder: Path, settings: CacheSettings | None, result: Repair) -> None:
        self.folder, self.settings, self.result = folder, settings, result
        self.kinds = {finding.kind for finding in result.before.findings}
        self.index_changed = False

    def run(self) -> None:
        """Mend what can be mended; the rest is told in `refused`."""
        self._suspects()
        self._strays()
        try:
            if self.kinds & {"recipe", "tokenizer"}:
                self._identity()
            identity = read_identity(self.folder)
            plan = Plan(self.folder)
        except DISK_ERRORS:
            raise
        except PackhorseError as error:
            self.result.refused.append(str(error))
            return
        wanted = self._wanted()
        if wanted:
            self._chunks(wanted, plan, identity)
        if "plan" in self.kinds:
            return  # what is derived from it would lose what only the index still knows
        has_none = not Index(self.folder).num_chunks and 0 in committed_chunks(self.folder)
        if self.index_changed or has_none or "index" in self.kinds:
            self._index(plan, identity)
        self._metadata(identity)

    def _suspects(self) -> None:
        for finding in self.result.before.findings:
            if finding.kind == "suspect":
                engine = finding.path.stem.replace("-", " ", 1)
                store.quarantine(finding.path, self.folder)
                store.publish(finding.path, store.seal({"engine": engine, "text": ""}))
                self.result.mended.append(f"{finding.path} says again that {engine} is not to be trusted.")

    def _strays(self) -> None:
        for finding in self.result.before.findings:
            if finding.kind == "stray":
                moved = store.quarantine(finding.path, self.folder)
                self.result.mended.append(f"{finding.path} is the record of no chunk; it is now {moved}.")

    def _identity(self) -> None:
        """Recipe and tokenizer, from the settings: only if they are those that the chunks were built with."""
        if self.settings is None:
            raise CacheError("Recipe and tokenizer can only be repaired with the settings: give --config.")
        content = read_tokenizer(locate_tokenizer(str(self.settings.tokenizer)))
        recipe = make_recipe(self.settings, content.facts)
        known = {record.recipe for record in readable_records(self.folder)}
        with suppress(PackhorseError):
            if not any(finding.kind == "recipe" for finding in self.result.before.findings):
                known.add(read_identity(self.folder).recipe.digest)
        if known - {recipe.digest}:
            raise CacheError(f"The settings are of the recipe {recipe.id}; the chunks are of {sorted(known)[0][:12]}.")
        for finding in self.result.before.findings:
            if finding.kind == "tokenizer" and os.path.lexists(finding.path):
                store.quarantine(finding.path, self.folder)
        if os.path.lexists(self.folder / "recipe.json"):
            store.quarantine(self.folder / "recipe.json", self.folder)
        create(self.folder, recipe, content, str(self.settings.tokenizer))
        self.result.mended.append("Recipe and tokenizer were written again from the settings.")

    def _wanted(self) -> list[Evidence]:
        """What is known of each chunk whose file or record is damaged, or whose record the index contradicts."""
        index = Index(self.folder)
        chunks = {f.chunk for f in self.result.before.findings if f.chunk is not None}
        return [self._known(index, chunk) for chunk in sorted(chunks)]

    def _known(self, index: Index, chunk: int) -> Evidence:
        record = None
        is_strange = any(f.chunk == chunk and f.kind == "record" for f in self.result.before.findings)
        with suppress(CacheError, FileNotFoundError):
            record = None if is_strange else read_record(self.folder, chunk)
        with suppress(CacheError):
            if chunk < index.num_chunks:
                row = index.row(chunk)
                return Evidence(
                    chunk=chunk,
                    record=record,
                    file_sha256=bytes(row["file_sha256"].item()).hex(),
                    index_sha256=bytes(row["index_sha256"].item()).hex(),
                    file_bytes=int(row["file_bytes"]),
                    digest_before=index.digest(chunk),
                    digest=index.digest(chunk + 1),
                )
        return Evidence(chunk=chunk, record=record, file_sha256=record.file_sha256 if record else None)

    def _chunks(self, wanted: list[Evidence], plan: Plan, identity: Identity) -> None:
        """Build chunks again, with one level of compression after the other, until each has the bytes that it had."""
        sources = self.settings.open_sources() if self.settings is not None else []
        usual = [level_of(record) for record in readable_records(self.folder)]
        built: dict[int, tuple[Record, Path]] = {}
        with Scratch(self.folder, identity) as scratch:
            locations = Locations(plan, sources, scratch.folder / "spool")
            # Where no record is left to say: as the settings say, so that the snapshot keeps its digest.
            otherwise = self.settings.compression if self.settings is not None else "default"
            for level in sorted(LEVELS, key=lambda level: (-usual.count(level), level != otherwise)):
                for known in self._build([w for w in wanted if w.needs(level, built)], plan, locations, scratch, level):
                    built[known[0].chunk] = known
            for known in wanted:
                if known.chunk in built:
                    self._put(known, *built[known.chunk])

    def _build(
        self, wanted: list[Evidence], plan: Plan, locations: Locations, scratch: "Scratch", level: str
    ) -> Iterator[tuple[Record, Path]]:
        """Build chunks in a scratch cache: their records there, and their files."""
        jobs = []
        for known in wanted:
            try:
                entry = plan.entry(known.chunk)
                files = {number: locations.locate(number) for number, _, _ in entry}
                jobs.append(Job(chunk=known.chunk, ranges=entry, files=files, dropped=plan.dropped(known.chunk)))
            except DISK_ERRORS:
                raise
            except PackhorseError as error:
                self._refuse(f"chunk {known.chunk}: {error}")
        if not jobs:
            return
        folder = scratch.cache(level)
        for engine in ("auto", "hf"):
            try:
                self._run(jobs, folder, engine, level)
                break
            except EngineMismatch:
                continue  # the reference does not differ from itself
            except DISK_ERRORS:
                raise
            except PackhorseError as error:
                self._refuse(str(error))
                break
        for job in jobs:
            with suppress(FileNotFoundError):
                record = read_record(folder, job.chunk)
                yield record, chunk_path(folder, job.chunk, record.file_sha256)

    def _run(self, jobs: list[Job], folder: Path, engine: str, level: str) -> None:
        workers = Workers(len(usable_cores()) if len(jobs) >= MANY_CHUNKS else 0)
        try:
            workers.run(
                jobs, folder, engine, level, False, lambda *done: None, lambda *done: None, self.result.mended.append
            )
        finally:
            workers.stop()

    def _refuse(self, text: str) -> None:
        if text not in self.result.refused:
            self.result.refused.append(text)

    def _put(self, known: Evidence, built: Record, file: Path) -> None:
        """Put a chunk in its place, if it is proven to be what was there."""
        proof = known.proof(built)
        if proof is None:
            self._refuse(
                f"chunk {known.chunk}: built again it holds other tokens than were committed. Its source or its "
                "tokenizer is not what it was; nothing of the chunk was changed."
            )
            return
        wanted, record = known.file_sha256, known.record
        if wanted not in (None, built.file_sha256) and store.holds(
            chunk_path(self.folder, known.chunk, wanted), wanted
        ):
            # Another version of the codec gave other bytes; the file that is there is intact, so it stays.
            built = replace(
                built, file_sha256=wanted, file_bytes=known.file_bytes, index_sha256=known.index_sha256, codec="lz4"
            )
        if record is not None and record.file_sha256 == built.file_sha256:
            built = record
        self._put_file(known, built, file)
        self._put_record(built)
        if known.digest and next_digest(known.digest_before, built) != known.digest:
            self.index_changed = True
        self.result.mended.append(f"chunk {known.chunk} was built again; {proof}.")

    def _put_file(self, known: Evidence, built: Record, file: Path) -> None:
        target = chunk_path(self.folder, built.chunk, built.file_sha256)
        if store.holds(target, built.file_sha256):
            return
        for path in {target, chunk_path(self.folder, known.chunk, known.file_sha256 or built.file_sha256)}:
            if os.path.lexists(path):
                store.quarantine(path, self.folder)
        store.make_folder(target.parent)
        store.publish(target, read_parts(file))

    def _put_record(self, record: Record) -> None:
        path, data = record_path(self.folder, record.chunk), store.seal(asdict(record))
        with suppress(OSError, CacheCorruptionError):
            if read_file(path, len(data) + 1) == data:
                return
        if os.path.lexists(path):
            store.quarantine(path, self.folder)
        store.make_folder(path.parent)
        store.publish(path, data)

    def _metadata(self, identity: Identity) -> None:
        num_chunks = Index(self.folder).num_chunks
        try:
            check_metadata(self.folder, identity.recipe, num_chunks)
        except (FileNotFoundError, CacheError):
            with suppress(CacheIncompleteError, CacheCorruptionError):  # a record that is still missing
                write_metadata(self.folder, identity.recipe, num_chunks)
                self.result.mended.append("metadata.json was derived again from the records.")

    def _index(self, plan: Plan, identity: Identity) -> None:
        unreadable = find_states(self.folder, plan).unreadable
        index = Index(self.folder)
        index.forget()
        # As far as it goes: a record that could not be repaired ends it.
        index.extend(
            min(unreadable, default=plan.num_chunks), Suspects(self.folder).trust(plan, identity.recipe.digest)
        )
        self.result.mended.append(f"The index was derived again from the records: {index.num_chunks} chunks.")
