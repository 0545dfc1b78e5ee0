"""One run of a builder: chunks that are missing -> committed chunks, and the snapshot that they make.

Planned chunks come first, in order; then the plan is extended by what the sources have and the plan does not, page by
page. What is not selected is left to others.
"""

import itertools
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from packhorse.cache import spool, store
from packhorse.cache.build import Job
from packhorse.cache.claims import Claims
from packhorse.cache.gaps import estimate_gaps
from packhorse.cache.integrity import Integrity
from packhorse.cache.memory import largest_page, plan_memory
from packhorse.cache.plan import Page, Plan, Range
from packhorse.cache.planner import Planner
from packhorse.cache.progress import BuildProgress, say
from packhorse.cache.recipe import Recipe, read_identity, tokenizer_json
from packhorse.cache.record import Record, committed_chunks, read_record, refuse_strangers
from packhorse.cache.selection import Selection, ranges
from packhorse.cache.settings import CacheSettings
from packhorse.cache.snapshot import Index
from packhorse.cache.space import refuse_small_disk
from packhorse.cache.staff import Staff
from packhorse.cache.states import ChunkStates, find_states, is_built
from packhorse.cache.suspects import Suspects
from packhorse.corpus.engines import make_engine
from packhorse.corpus.packing import places_taken
from packhorse.corpus.sources import Source
from packhorse.corpus.tokens import narrowest
from packhorse.errors import (
    CacheCorruptionError,
    CacheError,
    CacheIncompleteError,
    EngineMismatch,
    PackhorseError,
    SettingsError,
)

WAIT_SECONDS = 0.5
"""Between two looks at what others are building."""

GROWTH_SECONDS = 5.0
"""A snapshot is published at most this often while a build goes on."""

TELL_SECONDS = 2.0
"""So often a builder tells others how it goes."""


class Building:
    """One run of a builder.

    Args:
        settings: How to build.
        recipe: What the cache is.
        folder: The cache.
        sources: Where text comes from.
        selection: Which chunks this builder asks for.
        staff: The workers.
        tell: Takes messages for the user.
    """

    def __init__(
        self,
        settings: CacheSettings,
        recipe: Recipe,
        folder: Path,
        sources: list[Source],
        selection: Selection,
        staff: Staff,
        tell: Callable[[str], None],
    ) -> None:
        self.settings, self.recipe, self.folder, self.selection = settings, recipe, folder, selection
        self.staff, self.tell = staff, tell
        self.plan, self.index, self.suspects = Plan(folder), Index(folder), Suspects(folder)
        self.budget = plan_memory(
            settings,
            recipe,
            (folder / "tokenizer" / "tokenizer.json").stat().st_size if settings.memory_limit else 0,
            staff.expected,
            self._planned_tokens() if settings.memory_limit else 0,
            largest_page(sources) if settings.memory_limit else 0,
        )
        staff.most = self.budget.builders
        self.planner = Planner(
            self.plan,
            sources,
            self._count_tokens,
            sequence_length=recipe.sequence_length,
            sequences_per_chunk=self.budget.chunk_tokens // recipe.sequence_length,
            max_documents=settings.max_documents,
            max_chunks=settings.max_chunks,
            max_tokens=settings.max_tokens_in_all,
            deduplicate=recipe.deduplicate == "exact",
            is_strict=settings.invalid_rows == "error",
            allow=self._refuse_page,
        )
        self.progress = self._new_progress()
        self._waiting: dict[Path, int] = {}  # spool -> unfinished chunks that still need it
        self._elsewhere: list[int] = []  # chunks that other builders have in hand
        self._found: list[int] = []  # chunks that others have built
        self._extend_at = self._tell_at = 0.0

    def run(self) -> Integrity:
        """Build what is missing of the selection.

        Raises:
            PackhorseError: see `errors.py`; what was committed before stays.
        """
        if self._is_suspect_index():
            self.index.forget()
        with Claims(self.folder) as self.claims:
            try:
                built = self._build_trusted()
            except BaseException:
                # Nobody may go on, and what is complete can be trained on.
                with suppress(PackhorseError, OSError):
                    self._publish([])
                raise
            if built:
                self.claims.sweep()
        self._publish([record.chunk for record in built] + self._found)
        if built:
            text = f"{len(built)} chunks built in {self.progress.seconds:.1f} s: {self.progress.rates()}"
            self.tell("\n  ".join([text, *self.progress.details()]))
            store.remove_leftovers(self.folder)
        states = self._before
        if built or self._found or states.planned != self.plan.num_chunks:
            states = self._find_states()
        if left := self._left(states):
            raise CacheError(f"Chunk {left[0]} of {self.folder} was not built. Run the command again.")
        if not states.unfinished:
            self.planner.locations.remove_spools()
        return Integrity(
            states=states,
            built=len({record.chunk for record in built}),
            is_read_back=self.settings.validation,
        )

    def _build_trusted(self) -> list[Record]:
        """Build, and again by the reference where the fast engine was wrong: here, or in another builder."""
        while True:
            try:
                built = self._build()
                if not self.suspects.engines() or not self._left(self._find_states()):
                    return built
            except EngineMismatch as error:
                if error.engine.split()[0] != "fastokens":
                    raise  # the reference itself: there is nothing to fall back on
                self._suspect(error)
            self._start_again()

    def _new_progress(self) -> BuildProgress:
        id_bytes = np.dtype(narrowest(self.recipe.vocab_size)).itemsize
        return BuildProgress(self.tell is not say, self.folder, id_bytes, self.recipe.sequence_length)

    def _publish(self, fresh: list[int]) -> None:
        """Let readers and trainings see what follows without a gap."""
        # What others committed counts from here on; they may have been killed before it was safe.
        store.settle(self.folder)
        if self._look_up(lambda: any(self._differs_from_index(chunk) for chunk in fresh)):
            self.index.forget()
        self._extend_index()

    def _extend_index(self) -> None:
        self._look_up(lambda: self.index.extend(self.plan.num_chunks, self._trust()))

    def _look_up(self, ask: Callable[[], Any]) -> Any:
        """What the index says now. A builder that finds an engine wrong removes it, at any time; all others go on."""
        while True:
            self.index = Index(self.folder)
            with suppress(CacheIncompleteError):
                return ask()

    def _find_states(self) -> ChunkStates:
        return self._look_up(lambda: find_states(self.folder, self.plan, self.index))

    def _left(self, states: ChunkStates) -> list[int]:
        """What is not there of what this builder was asked for."""
        return [chunk for chunk in states.unfinished if chunk in self.selection]

    def _build(self) -> list[Record]:
        self._elsewhere.clear()
        built = self._run(self._jobs())
        is_told = False
        while self._elsewhere:
            # They are built by others, who may die: in the end every chunk is there, whoever made it.
            left, self._elsewhere = self._elsewhere, []
            more = self._run(job for chunk in left if (job := self._job(chunk)) is not None)
            built += more
            if self._elsewhere and not more:
                if not is_told:
                    self.tell(f"Waiting for chunks that others are building: {ranges(self._elsewhere)}.")
                    is_told = True
                time.sleep(WAIT_SECONDS)
        return built

    def _run(self, jobs: Iterator[Job]) -> list[Record]:
        first = list(itertools.islice(jobs, 2))
        if not first:
            return []
        workers = self.staff.call(many=len(first) > 1)
        built: list[Record] = []

        def on_record(record: Record, seconds: dict[str, float]) -> None:
            built.append(record)
            self.progress.committed(record, seconds)
            self.claims.drop(record.chunk)
            self._release(record)
            self._show_growth(record)

        def on_progress(*done: int) -> None:
            self.progress.add(*done)
            if time.monotonic() > self._tell_at:
                self.claims.tell(self.progress.values())
                self._tell_at = time.monotonic() + TELL_SECONDS

        with self.progress.shown():
            workers.run(
                itertools.chain(first, jobs),
                self.folder,
                self._engine(),
                self.settings.compression,
                self.settings.validation,
                on_progress,
                on_record,
                self.tell,
            )
        return built

    def _show_growth(self, record: Record) -> None:
        """Now and then, let trainings see what has become complete: they may begin before the end."""
        if record.chunk >= self.index.num_chunks and time.monotonic() > self._extend_at:
            self._extend_index()
            self._extend_at = time.monotonic() + GROWTH_SECONDS

    def _jobs(self) -> Iterator[Job]:
        """The chunks that are missing, planned ones first."""
        states = self._states()
        self._tell_gaps(states)
        for chunk in states.suspect:
            self.suspects.put_out_of_use(chunk)
        planned = [self.plan.page(chunk) for chunk in self._left(states)]
        refuse_small_disk(self.settings, self.recipe, self.folder, self.plan, planned)
        yield from self._jobs_for(states.unfinished)
        if self.selection.needs_more_than(self.plan.num_chunks):
            yield from self._jobs_of_more()
        if self.selection.start_chunk >= max(1, self.plan.num_chunks):
            raise SettingsError(
                f"start_chunk is {self.selection.start_chunk}: the plan of {self.folder} has "
                f"{self.plan.num_chunks} chunks, numbered from 0."
            )

    def _jobs_of_more(self) -> Iterator[Job]:
        """The chunks of pages that are added to the plan now."""
        for page in self.planner.extend():
            if page.entries:
                verb = "Building" if page.page == 0 else "Extending"
                self.tell(f"{verb} the cache {self.folder}: {len(page.entries)} chunks.")
            yield from self._jobs_for(range(page.first_chunk, page.first_chunk + len(page.entries)))
            if not self.selection.needs_more_than(self.plan.num_chunks):
                return

    def _refuse_page(self, page: Page) -> None:
        """Refuse a page for which the disk has no room, before it is in the plan."""
        chunks = range(page.first_chunk, page.first_chunk + len(page.entries))
        pages = [page for chunk in chunks if chunk in self.selection]
        refuse_small_disk(self.settings, self.recipe, self.folder, self.plan, pages)

    def _jobs_for(self, chunks: Iterable[int]) -> Iterator[Job]:
        entries = {chunk: self.plan.entry(chunk) for chunk in chunks}
        for entry in entries.values():
            for path in self._spools(entry):
                self._waiting[path] = self._waiting.get(path, 0) + 1
        selected = [chunk for chunk in entries if chunk in self.selection]
        for chunk in selected:
            self.progress.planned(1, self.plan.page(chunk).chunk_bytes)
        yield from (job for chunk in selected if (job := self._job(chunk)) is not None)

    def _job(self, chunk: int) -> Job | None:
        """The job of a chunk, unless others have built it meanwhile, or are about to."""
        if not is_built(self.folder, chunk):
            if not self.claims.take(chunk):
                self._elsewhere.append(chunk)
                return None
            # Again: its builder may have committed it and dropped the claim just now.
            if not is_built(self.folder, chunk):
                entry = self.plan.entry(chunk)
                is_strict = self.settings.invalid_rows == "error"
                located = {number: self.planner.locations.locate(number) for number, _, _ in entry}
                files = {number: replace(file, is_strict=is_strict) for number, file in located.items()}
                return Job(
                    chunk=chunk,
                    ranges=entry,
                    files=files,
                    dropped=self.plan.dropped(chunk),
                    max_document_bytes=self.budget.document_bytes,
                )
            self.claims.drop(chunk)
        self._found.append(chunk)
        self.progress.planned(-1, -self.plan.page(chunk).chunk_bytes)
        return None

    def _planned_tokens(self) -> int:
        """Of the largest chunk that is planned and not there."""
        committed = set(committed_chunks(self.folder))
        missing = {self.plan.page(n).page for n in range(self.plan.num_chunks) if n not in committed}
        pages = [self.plan.pages[number] for number in missing]
        return max((round(page.chunk_bytes * page.tokens_per_byte) for page in pages), default=0)

    def _states(self) -> ChunkStates:
        while True:
            self._before = states = self._find_states()
            known = [*states.built, *states.lost, *states.damaged, *states.suspect, *states.unplanned]
            # The last of either can only be there when its page was.
            self.plan.refuse_gaps(max(self.index.num_chunks, 1 + max(known, default=-1)))
            if states.planned == self.plan.num_chunks:
                break  # else another builder has just added a page
        for message in states.unreadable.values():
            raise CacheCorruptionError(message)
        refuse_strangers(self.folder, self.plan, self.recipe.digest, sorted(known))
        return states

    def _tell_gaps(self, states: ChunkStates) -> None:
        """What is there and what is missing, before anything is built."""
        gaps = self._left(states)
        if self.selection.mode == "inverse":
            if not states.planned:
                raise CacheIncompleteError(
                    f"{self.folder} has no plan yet, so there are no gaps to fill. Build without `--mode inverse`."
                )
            found = f"Found {len(states.built)} chunks ({ranges(states.built)})" if states.built else "Found no chunk"
            missing = f"missing {len(gaps)} ({ranges(gaps)})" if gaps else "none is missing"
            expected = f": {estimate_gaps(self.folder, self.plan, states, gaps, self.staff.expected)}" if gaps else ""
            self.tell(f"{found}, {missing}{expected}.")
        elif gaps:
            done = f": {len(states.built)} of {states.planned} chunks are there" if states.built else ""
            self.tell(f"Going on in {self.folder}{done}.")

    def _release(self, record: Record) -> None:
        """Remove the spools that no chunk waits for."""
        for path in self._spools(record.ranges):
            self._waiting[path] -= 1
            if self._waiting[path] == 0:
                spool.remove(path)

    def _spools(self, ranges: list[Range]) -> set[Path]:
        """What a chunk is read from that does not stay; files of equal content share one."""
        files = [self.plan.files[number] for number, _, _ in ranges]
        return {self.planner.locations.spool_path(file) for file in files if file.packed}

    def _engine(self) -> str:
        engine = self.suspects.instead_of(self.settings.engine)
        if engine != self.settings.engine:
            self.tell(f"The engine fastokens was wrong before ({self.folder / 'suspects'}): not used.")
        return engine

    def _count_tokens(self, texts: list[str]) -> int:
        """By the reference: the sample is small, and builders have the fast engine to load."""
        text = tokenizer_json(self.folder, read_identity(self.folder))
        folder = str(self.folder / "tokenizer")
        engine, _ = make_engine("hf", text, self.recipe.split_special_tokens, folder)
        extra = (self.recipe.bos_id is not None) + (self.recipe.eos_id is not None)
        lengths = np.diff(engine.encode(texts)[1], prepend=0) + extra
        return int(places_taken(self.recipe.packing, lengths, self.recipe.sequence_length, self.recipe.overlap).sum())

    def _trust(self) -> Callable[[Record], bool]:
        """Whether a record may be in the index; one that is of another cache ends the build."""
        engines = self.suspects.engines()

        def is_trusted(record: Record) -> bool:
            if record.recipe != self.recipe.digest:
                raise CacheCorruptionError(f"The record of chunk {record.chunk} in {self.folder} is of another recipe.")
            if record.ranges != self.plan.entry(record.chunk):
                raise CacheCorruptionError(
                    f"The record of chunk {record.chunk} in {self.folder} is not of what is planned."
                )
            return record.engine not in engines

        return is_trusted

    def _is_suspect_index(self) -> bool:
        """Whether chunks of a suspect engine are, or were, in the index: it must be derived anew."""
        if not self.suspects.engines():
            return False
        is_trusted = self._trust()
        self.index.reload()
        try:
            return not all(is_trusted(read_record(self.folder, n)) for n in range(self.index.num_chunks))
        except FileNotFoundError:
            # The record is in quarantine, and a power cut brought the index back.
            return True

    def _differs_from_index(self, chunk: int) -> bool:
        """Whether a chunk was built anew, by another codec, since the index was made, or is out of use."""
        try:
            return (
                chunk < self.index.num_chunks
                and self.index.file_sha256(chunk) != read_record(self.folder, chunk).file_sha256
            )
        except FileNotFoundError:
            return True

    def _suspect(self, error: EngineMismatch) -> None:
        """Remember that an engine was wrong, before anything else is done."""
        self.suspects.add(error)
        self.tell(
            f"{error}\nThe document is kept in {self.folder / 'suspects'}. All chunks of that engine are built again "
            "with the Hugging Face reference."
        )

    def _start_again(self) -> None:
        """Put the chunks of an engine that was wrong out of the index, and let go what still has that engine."""
        self.staff.dismiss()
        if self._is_suspect_index():
            self.index.forget()
        self.progress = self._new_progress()
        self._waiting.clear()
