"""Sources -> more pages for the plan.

Files are planned from what is cheap to know: the footers of parquet files, the bytes of text files. Entries get about
the same amount of text, and end where row groups and documents end. Streams are spooled part by part, a part for a
chunk, and their pages are published (and built) as they come.
"""

import itertools
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import replace

from packhorse.cache import rate, spool
from packhorse.cache.cuts import cut_ranges, first_bytes
from packhorse.cache.duplicates import Duplicates
from packhorse.cache.limits import Limits
from packhorse.cache.locations import Locations, take
from packhorse.cache.plan import Page, Plan, PlannedFile, Range
from packhorse.cache.planned import PlannedFiles, refuse_other_sources
from packhorse.cache.rate import tokens_per_byte, tokens_per_byte_of
from packhorse.corpus.documents import file_length
from packhorse.corpus.files import SourceFile, check_column
from packhorse.corpus.hub import tell_once
from packhorse.corpus.lines import whole_lines
from packhorse.corpus.sources import Deferred, Document, Files, Source, Stream, document_bytes
from packhorse.errors import SourceChangedError, SourceError

SEARCHED_CHUNKS = 32
"""Chunks on a page that is searched for duplicates."""
STREAM_PARTS = 8
"""Parts of a stream that are spooled before their page is published and built."""


class Planner:
    """Extends a plan by what the sources have and the plan does not.

    Args:
        plan: The plan to extend.
        sources: What the settings name now.
        count_tokens: Gives the number of tokens of some texts; called on a sample.
        sequence_length: Tokens per sequence.
        sequences_per_chunk: Sequences that a chunk is to have.
        max_documents: Rows to take in all, None for all.
        deduplicate: Find the documents that have a place before.
        max_chunks: Chunks to plan in all, None for as many as it takes.
        max_tokens: Tokens to plan in all, by the rate of a sample; None for all.
        is_strict: Refuse JSON lines that end in the middle.
        allow: Called with a page before it is in the plan, where it would stay; may raise.
    """

    def __init__(
        self,
        plan: Plan,
        sources: list[Source],
        count_tokens: Callable[[list[str]], int],
        *,
        sequence_length: int,
        sequences_per_chunk: int,
        max_documents: int | None,
        deduplicate: bool = False,
        max_chunks: int | None = None,
        max_tokens: int | None = None,
        is_strict: bool = False,
        allow: Callable[[Page], None] = lambda page: None,
    ) -> None:
        self.is_strict, self.allow = is_strict, allow
        self.plan, self.sources, self.count_tokens = plan, sources, count_tokens
        self.chunk_tokens = sequence_length * sequences_per_chunk
        self.locations = Locations(plan, sources)
        self.limits = Limits(
            plan=plan,
            locations=self.locations,
            max_documents=max_documents,
            max_chunks=max_chunks,
            max_tokens=max_tokens,
        )
        self._duplicates = Duplicates(plan, self.locations) if deduplicate else None
        self._next_page = 0

    def extend(self) -> Iterator[Page]:
        """Publish page after page until the plan has everything, yielding each.

        Raises:
            SourceError: a source is not what it seems.
            SourceChangedError: a source is no longer what was planned.
        """
        refuse_other_sources(self.plan, self.sources)
        while True:
            self._next_page = len(self.plan.pages)
            try:
                yield from self._extend()
                return
            except (_Overtaken, SourceError, FileNotFoundError):
                # Another builder published a page of its own: what was worked out here is out of date, and spools that
                # it was worked out from may be gone.
                self.plan.reload()
                if len(self.plan.pages) == self._next_page:
                    raise
                yield from self.plan.pages[self._next_page :]

    def _extend(self) -> Iterator[Page]:
        finished = self.plan.finished
        pending: list[Range] = []
        new_files: list[PlannedFile] = []
        done: dict[str, str] = {}
        for source in self.sources:
            fingerprint = ""
            if isinstance(source, Deferred):
                if finished.get(source.key) == source.fingerprint:
                    continue
                fingerprint = source.fingerprint
                source = self.locations.open(source)
            if isinstance(source, Files):
                pending += self._unplanned(source, new_files)
                done[source.key] = fingerprint
            else:
                # What a stream gives is planned after the files before it, and page by page.
                yield from self._publish_files(pending, new_files, done)
                pending, new_files, done = [], [], {}
                yield from self._publish_stream(source)
        yield from self._publish_files(pending, new_files, done)

    def _unplanned(self, source: Files, new_files: list[PlannedFile]) -> list[Range]:
        """Ranges of a source's files that are not in the plan; files that are new are appended to `new_files`."""
        planned = PlannedFiles(self.plan, source)
        stops = self._stops()
        ranges: list[Range] = []
        for file in source.files:
            number = planned.take(file)
            is_known = number is not None
            if is_known:
                self.locations.places[number] = file.file.path
                start = stops[number]
                if not file.packed and not file.file.counts_rows and start == file.size:
                    continue  # without opening it
                if start and number in planned.complete:
                    continue
            else:
                start = self._appended(file, planned, stops)
                number = len(self.plan.files) + len(new_files)
                new_files.append(
                    PlannedFile(
                        source=source.key,
                        path=file.file.path,
                        kind=file.file.kind,
                        column=file.file.column,
                        packed=file.packed,
                        size=file.size,
                        probe=file.probe,
                    )
                )
                self.locations.places[number] = file.file.path
            readable = self.locations.readable(file)
            if not is_known:
                check_column(readable)
            length = file_length(readable)
            if readable.kind == "jsonl" and not file.packed and start < length:
                length, end = whole_lines(replace(readable, is_strict=self.is_strict), start, length), length
                if length < end:
                    tell_once(f"The last line of {readable.path} is not whole: it is left until the file has grown.")
            if start < length:
                ranges.append((number, start, length))
        return ranges

    def _stops(self) -> Counter[int]:
        """File number -> one past the last row or byte that is planned."""
        stops: Counter[int] = Counter()
        for page in self.plan.pages:
            for entry in page.entries:
                for number, _, stop in entry:
                    stops[number] = max(stops[number], stop)
        return stops

    def _appended(self, file: SourceFile, planned: PlannedFiles, stops: Counter[int]) -> int:
        """Where to begin in a file that is new: at 0, or behind what was planned when it was shorter."""
        before = planned.before(file)
        if before is None:
            return 0
        if planned.is_continued(before, file):
            # Not necessarily its end: `max_documents` may have stopped before it.
            place = stops[before]
            with open(file.file.path, "rb") as stream:
                stream.seek(max(place - 1, 0))
                if place == 0 or b"\n" in stream.read(2):
                    return place
        old = self.plan.files[before]
        raise SourceChangedError(
            f"The source file {old.path} has changed since the cache {self.plan.folder} was built from it "
            f"({old.size:,} bytes then, {file.size:,} now).\n"
            "Put new text into new files or at the end of a text file, or set `name` to build another cache."
        )

    def _publish_files(self, ranges: list[Range], new_files: list[PlannedFile], done: dict[str, str]) -> Iterator[Page]:
        files = {number: self.locations.of_new(number, new_files) for number, _, _ in ranges}
        ranges, rows, complete = self.limits.first_rows(ranges, files)
        finished = done if complete else {}
        if self.limits.are_reached() if ranges else all(self.plan.finished.get(k) == v for k, v in finished.items()):
            return
        density = tokens_per_byte(ranges, files, self.count_tokens)
        chunk_bytes = max(1, round(self.chunk_tokens / density))
        max_tokens = None
        if (tokens_left := self.limits.tokens_left) is not None:
            within = first_bytes(ranges, files, tokens_left / density)
            if within != ranges:
                ranges, rows, complete, max_tokens = within, None, False, self.limits.max_tokens
        entries = list(cut_ranges(ranges, files, chunk_bytes))
        within = entries[: self.limits.chunks_left]
        if len(within) < len(entries):
            entries, rows, complete = within, None, False
        finished = done if complete else {}
        # Files beyond `max_documents` do not enter the plan yet; those before are a prefix.
        last = max((number for entry in entries for number, _, _ in entry), default=-1)
        kept = new_files if complete else new_files[: max(0, last + 1 - len(self.plan.files))]
        if self._duplicates is None:
            yield self._publish(kept, entries, chunk_bytes, density, rows, finished, max_tokens)
            return
        # Text is read for these pages: small ones can be built while the next is looked at.
        while len(entries) > SEARCHED_CHUNKS:
            last = max(number for entry in entries[:SEARCHED_CHUNKS] for number, _, _ in entry)
            count = max(0, last + 1 - len(self.plan.files))
            yield self._publish(kept[:count], entries[:SEARCHED_CHUNKS], chunk_bytes, density, None, {})
            kept, entries, rows = kept[count:], entries[SEARCHED_CHUNKS:], None
        yield self._publish(kept, entries, chunk_bytes, density, rows, finished, max_tokens)

    def _publish_stream(self, source: Stream) -> Iterator[Page]:
        known = [file for file in self.plan.files if file.source == source.key]
        consumed = known[-1].stop if known else 0
        recorded = self.plan.finished.get(source.key)
        if recorded and recorded == source.fingerprint:
            return
        left = self.limits.rows_left
        if (left is not None and left <= 0) or self.limits.are_reached():
            return
        documents = self._after(source, known)
        limited = documents if left is None else _limited(documents, left)
        head = _take_bytes(limited, rate.SAMPLE_BYTES)
        if not head:
            if recorded is None and known:
                yield self._publish([], [], 1, 1.0, 0, {source.key: source.fingerprint or ""})
            return
        density = tokens_per_byte_of(head, self.count_tokens)
        chunk_bytes = max(1, round(self.chunk_tokens / density))
        taken = chained = itertools.chain(head, limited)
        if (tokens_left := self.limits.tokens_left) is not None:
            taken = _first_bytes(chained, tokens_left / density)
        parts = itertools.islice(spool.cut_stream(taken, chunk_bytes), self.limits.chunks_left)
        files: list[PlannedFile] = []
        while True:
            part = next(parts, None)
            if part is not None:
                files.append(self._spool(source, part, consumed))
                consumed = files[-1].stop
            # What `max_tokens` or `max_chunks` left is still in `chained`; what `max_documents` left, in `documents`.
            is_cut = part is None and next(chained, _END) is not _END
            max_tokens = self.limits.max_tokens if is_cut and self.limits.chunks_left != len(files) else None
            if (files and (part is None or len(files) == STREAM_PARTS)) or max_tokens is not None:
                first = len(self.plan.files)
                entries = [[(first + i, 0, f.size)] for i, f in enumerate(files)]
                is_end = part is None and not is_cut and next(documents, _END) is _END
                finished = {source.key: source.fingerprint or ""} if is_end else {}
                rows = sum(f.size for f in files)
                yield self._publish(files, entries, chunk_bytes, density, rows, finished, max_tokens)
                files = []
            if part is None:
                return

    def _after(self, source: Stream, known: list[PlannedFile]) -> Iterator[Document]:
        """What a stream gives after the parts of it that are planned."""
        if source.fingerprint == source.key:
            return source.read(known[-1].stop if known else 0)
        # Nothing vouches for what was planned before but the content: a fingerprint may have changed since.
        documents = source.read(0)
        for part in known:
            self.locations.check_part(part, take(documents, part.stop - part.start))
        return documents

    def _spool(self, source: Stream, part: list[Document], start: int) -> PlannedFile:
        """Keep a part of a stream until its chunk is built."""
        file = PlannedFile(
            source=source.key,
            path="",
            kind="parquet",
            column="document",
            packed="stream",
            size=len(part),
            probe=spool.digest_documents(part),
            start=start,
            stop=start + len(part),
            is_final=source.is_final,
        )
        spool.write_documents(part, self.locations.spool_path(file))
        return file

    def _publish(
        self,
        files: list[PlannedFile],
        entries: list[list[Range]],
        chunk_bytes: int,
        density: float,
        rows: int | None,
        finished: dict[str, str],
        max_tokens: int | None = None,
    ) -> Page:
        located = {number: self.locations.of_new(number, files) for entry in entries for number, _, _ in entry}
        dropped = self._duplicates.find(entries, located) if self._duplicates else []
        page = Page(
            page=len(self.plan.pages),
            first_chunk=self.plan.num_chunks,
            first_file=len(self.plan.files),
            files=files,
            entries=entries,
            chunk_bytes=chunk_bytes,
            tokens_per_byte=round(density, 6),
            rows=rows,
            finished=finished,
            dropped=dropped if any(dropped) else [],
            max_tokens=max_tokens,
        )
        self.allow(page)
        if page.page != self._next_page or self.plan.publish(page) != page:
            raise _Overtaken
        if self._duplicates:
            self._duplicates.published(page)
        self._next_page += 1
        return page


class _Overtaken(Exception):
    """The page that counts is that of another builder."""


_END = object()


def _take_bytes(documents: Iterator[Document], size: int) -> list[Document]:
    taken: list[Document] = []
    while size > 0 and (document := next(documents, _END)) is not _END:
        taken.append(document)
        size -= document_bytes(document)
    return taken


def _limited(documents: Iterator[Document], count: int) -> Iterator[Document]:
    for _ in range(count):
        if (document := next(documents, _END)) is _END:
            return
        yield document


def _first_bytes(documents: Iterator[Document], size: float) -> Iterator[Document]:
    """Documents until they have so many bytes of text; at least one."""
    for document in documents:
        yield document
        size -= document_bytes(document)
        if size <= 0:
            return
