"""A cache on disk -> what is wrong with it, and what to do about each thing. Nothing is changed.

    quick    every small file in full: recipe, tokenizer copy, plan, records, index, metadata, suspects; sizes of chunks
    full     also every hash of every chunk, on all usable cores
    deep     also what the chunks hold (see `deep.py`), and some documents tokenized again from their source

A chunk that is planned and not built yet is no damage. Neither are chunks that are committed and not indexed yet: a
builder may be at work.
"""

import hashlib
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

from packhorse.cache import store
from packhorse.cache.byte_progress import ByteProgress
from packhorse.cache.deep import check_content, check_sample
from packhorse.cache.metadata import check_metadata
from packhorse.cache.plan import Plan, read_page
from packhorse.cache.reader import ChunkReader
from packhorse.cache.recipe import Identity, read_identity, strange_files, verified_file
from packhorse.cache.record import (
    Record,
    chunk_path,
    committed_chunks,
    misplaced_records,
    read_record,
    readable_records,
    record_path,
    unplanned_chunks,
)
from packhorse.cache.regular import file_size, open_file
from packhorse.cache.report import Depth, Report
from packhorse.cache.snapshot import EMPTY_DIGEST, PAGE_CHUNKS, Index, Totals, next_digest
from packhorse.cache.workers import usable_cores
from packhorse.corpus.sources import Source
from packhorse.errors import CacheError, PackhorseError


def check_cache(folder: Path, depth: Depth = "full", sources: list[Source] | None = None, quiet: bool = True) -> Report:
    """Check a cache. Changes nothing.

    Args:
        folder: The cache.
        depth: How closely to look.
        sources: For `deep`: what the settings name now; without them files are looked for where they were planned.
        quiet: Do not show progress.

    Raises:
        CacheIncompleteError: there is no cache at all.
    """
    start = time.monotonic()
    check = _Check(folder, depth)
    check.small_files()
    if depth != "quick":
        check.chunk_files(quiet)
    if depth == "deep" and check.identity is not None and check.plan is not None:
        planned, _ = check.plan.divide(check.committed)
        check.report.retokenized = check_sample(
            check.plan, check.identity, readable_records(folder, planned), sources, check.report
        )
    check.report.findings.sort(key=lambda finding: (finding.chunk is not None, finding.chunk or 0))
    check.report.seconds = time.monotonic() - start
    return check.report


def check_chunk(folder: Path, record: Record, identity: Identity | None, deep: bool = False) -> list[str]:
    """What is wrong with the file of a chunk, compared with its record: every hash, and deeper if asked to."""
    path = chunk_path(folder, record.chunk, record.file_sha256)
    try:
        reader = ChunkReader(path, record.chunk, record.recipe, bytes.fromhex(record.index_sha256))
    except CacheError as error:
        return [str(error)]
    header = reader.header
    said = (record.train_sequences, record.eval_sequences, record.pieces, record.documents)
    found = (header.num_train, header.num_eval, header.num_pieces, header.num_documents)
    if said != found:
        return [f"{path} has {found} train and eval sequences, pieces and documents; its record says {said}."]
    try:
        payload = reader.content_digest()
    except CacheError:
        return [f"{path} is damaged: {reader.damage()}."]
    if payload != record.payload_sha256:
        return [f"{path} holds other tokens than its record says."]
    with open(open_file(path), "rb") as file:
        if hashlib.file_digest(file, "sha256").hexdigest() != record.file_sha256:
            return [f"{path} has another SHA-256 than its record says."]
    if deep and identity is not None:
        return [f"{path}: {problem}." for problem in check_content(reader, record, identity.recipe)]
    return []


class _Check:
    """One run of `check_cache`."""

    def __init__(self, folder: Path, depth: Depth) -> None:
        self.folder, self.depth = folder, depth
        self.report = Report(folder=folder, depth=depth)
        self.identity: Identity | None = None
        self.plan: Plan | None = None
        # In this order: a builder writes a page, then records of it, and takes those into the index.
        self.index = Index(folder)
        self.committed = committed_chunks(folder)

    def small_files(self) -> None:
        """Everything but the content of chunks."""
        self._identity()
        self._plan()
        self._suspects()
        self._strays()
        self._records()
        self._index()
        self._metadata()

    def chunk_files(self, quiet: bool) -> None:
        """Every hash of every chunk whose record and size are right."""
        damaged = set(self.report.damaged_chunks)
        records = [record for record in readable_records(self.folder, self.committed) if record.chunk not in damaged]
        with (
            ByteProgress("checking", sum(record.file_bytes for record in records), quiet) as progress,
            ThreadPoolExecutor(len(usable_cores())) as pool,
        ):

            def look(record: Record) -> tuple[Record, list[str]]:
                problems = check_chunk(self.folder, record, self.identity, self.depth == "deep")
                progress.add(record.file_bytes)
                return record, problems

            for record, problems in pool.map(look, records):
                path = chunk_path(self.folder, record.chunk, record.file_sha256)
                for problem in problems:
                    self.report.add("chunk", path, problem, record.chunk)
                self.report.bytes_read += record.file_bytes

    def _identity(self) -> None:
        path = self.folder / "recipe.json"
        try:
            self.identity = read_identity(self.folder)
        except PackhorseError as error:
            if not path.exists() and not (self.folder / "records").is_dir():
                raise
            self.report.add("recipe", path, error)
            return
        for name, digest in self.identity.tokenizer_files.items():
            copy = self.folder / "tokenizer" / name
            try:
                verified_file(copy, digest)
            except CacheError as error:
                self.report.add("tokenizer", copy, error)
        for path in strange_files(self.folder, self.identity):
            self.report.add("tokenizer", path, f"{path} is not a file of this cache's tokenizer.")

    def _plan(self) -> None:
        root = self.folder / "plan"
        numbers = sorted(int(path.stem) for path in root.glob("*.json") if path.stem.isdigit())
        for number in range(numbers[-1] + 1 if numbers else 0):
            path = root / f"{number:06d}.json"
            try:
                read_page(path)
            except FileNotFoundError:
                self.report.add("plan", path, f"{path} is missing, and later pages are there.")
            except CacheError as error:
                self.report.add("plan", path, error)
        try:
            self.plan = Plan(self.folder)
        except CacheError as error:
            if not any(finding.kind == "plan" for finding in self.report.findings):
                self.report.add("plan", root, error)
            return
        _, beyond = self.plan.divide(self.committed)
        unplanned = unplanned_chunks(self.folder, beyond, self.identity and self.identity.recipe.digest)
        path = self.plan.lost_page(max([self.index.num_chunks, *(chunk + 1 for chunk in unplanned)]))
        if path is not None and not any(finding.path == path for finding in self.report.findings):
            self.report.add("plan", path, f"{path} is missing, and chunks that it planned are there.")

    def _strays(self) -> None:
        """Files among the records that are no chunk's; beyond the plan there are chunks only if a page is gone."""
        strays = misplaced_records(self.folder)
        if self.plan is not None and not any(finding.kind == "plan" for finding in self.report.findings):
            self.committed, beyond = self.plan.divide(self.committed)
            strays += [record_path(self.folder, chunk) for chunk in beyond]
        for path in strays:
            self.report.add("stray", path, f"{path} is the record of no chunk that is planned.")

    def _suspects(self) -> None:
        for path in sorted((self.folder / "suspects").glob("*.json")):
            try:
                if not isinstance(store.read_sealed(path).get("engine"), str):
                    self.report.add("suspect", path, f"{path} names no engine.")
            except CacheError as error:
                self.report.add("suspect", path, error)

    def _records(self) -> None:
        committed = self.committed
        self.report.chunks = len({*committed, *range(self.index.num_chunks)})
        for chunk in sorted(set(range(self.index.num_chunks)) - set(committed)):
            path = record_path(self.folder, chunk)
            self.report.add("record", path, f"{path} is missing.", chunk)
        strangers: dict[str, list[int]] = {}
        unplanned: dict[Path, list[int]] = {}
        for chunk in committed:
            path = record_path(self.folder, chunk)
            try:
                record = read_record(self.folder, chunk)
            except CacheError as error:
                self.report.add("record", path, error, chunk)
                continue
            except FileNotFoundError:
                continue  # moved away since the folder was listed
            if self.identity is not None and record.recipe != self.identity.recipe.digest:
                strangers.setdefault(record.recipe, []).append(chunk)
            if self.plan is not None and (page := self._page_of_another_plan(record)) is not None:
                unplanned.setdefault(page, []).append(chunk)
            self._file_size(record)
        self._strangers(strangers, len(committed))
        self._unplanned(unplanned, committed)

    def _page_of_another_plan(self, record: Record) -> Path | None:
        """The page that plans something else than the record is of."""
        if record.chunk >= self.plan.num_chunks or record.ranges == self.plan.entry(record.chunk):
            return None
        return self.folder / "plan" / f"{self.plan.page(record.chunk).page:06d}.json"

    def _file_size(self, record: Record) -> None:
        path = chunk_path(self.folder, record.chunk, record.file_sha256)
        try:
            size = file_size(path)
        except FileNotFoundError:
            self.report.add("chunk", path, f"{path} is missing.", record.chunk)
            return
        if size < 0:
            self.report.add("chunk", path, f"{path} is {'a link, ' if path.is_symlink() else ''}no file.", record.chunk)
        elif size != record.file_bytes:
            problem = f"{path} has {size:,} bytes; its record says {record.file_bytes:,}."
            self.report.add("chunk", path, problem, record.chunk)

    def _strangers(self, strangers: dict[str, list[int]], committed: int) -> None:
        """Records of another recipe: when all are of the same other one, it is the recipe.json that is wrong."""
        path = self.folder / "recipe.json"
        for digest, chunks in strangers.items():
            if len(chunks) == committed:
                mine = self.identity.recipe.digest
                problem = f"{path} is that of another cache: its digest is {mine[:12]}, all records say {digest[:12]}."
                self.report.add("recipe", path, problem)
                continue
            for chunk in chunks:
                where = record_path(self.folder, chunk)
                self.report.add("record", where, f"{where} is of another recipe ({digest[:12]}).", chunk)

    def _unplanned(self, unplanned: dict[Path, list[int]], committed: list[int]) -> None:
        """Records that are not of what is planned: when all of a page are not, it is the page that is wrong."""
        for path, chunks in unplanned.items():
            page = self.plan.pages[int(path.stem)]
            stop = page.first_chunk + len(page.entries)
            if len(chunks) > 1 and len(chunks) == sum(page.first_chunk <= chunk < stop for chunk in committed):
                problem = f"{path} plans other ranges than the records of its {len(chunks)} chunks are of."
                self.report.add("plan", path, problem)
                continue
            for chunk in chunks:
                where = record_path(self.folder, chunk)
                self.report.add("record", where, f"{where} is not of what is planned.", chunk)

    def _index(self) -> None:
        # Only what follows the first chunk without a gap is ever in an index.
        if not self.index.num_chunks and (self.folder / "metadata.json").exists() and 0 in self.committed:
            self.report.add("index", self.folder / "index", f"{self.folder / 'index'} is missing.")
        totals, digest = Totals(), EMPTY_DIGEST
        for page in range(self.index.num_pages):
            path = self.index.path(page)
            try:
                header, rows = self.index.header(page), self.index.rows(page)
            except CacheError as error:
                self.report.add("index", path, error)
                return  # what comes after it cannot be compared
            if header.before != totals or header.after != totals.plus(rows) or header.digest != _digest(rows[-1]):
                self.report.add("index", path, f"{path} has other sums than its rows.")
            totals = header.after
            for place, row in enumerate(rows):
                digest = self._row(path, page * PAGE_CHUNKS + place, row, digest)

    def _row(self, path: Path, chunk: int, row, before: bytes) -> bytes:
        """Compare a row with its record; the digest that goes on from there."""
        try:
            record = read_record(self.folder, chunk)
        except (CacheError, FileNotFoundError):
            return _digest(row)
        said = (record.train_sequences, record.eval_sequences, record.train_tokens, record.eval_tokens)
        found = tuple(int(row[name]) for name in ("train", "eval", "train_tokens", "eval_tokens"))
        hashes = (record.file_sha256, record.index_sha256)
        same = hashes == tuple(bytes(row[name].item()).hex() for name in ("file_sha256", "index_sha256"))
        if said != found or not same or next_digest(before, record) != _digest(row):
            self.report.add("index", path, f"{path} says something else of chunk {chunk} than its record.", chunk)
        return _digest(row)

    def _metadata(self) -> None:
        if self.identity is None or not self.report.is_good:
            return  # what it is derived from is damaged itself
        with suppress(FileNotFoundError):
            try:
                check_metadata(self.folder, self.identity.recipe, self.index.num_chunks)
            except CacheError as error:
                self.report.add("metadata", self.folder / "metadata.json", error)


def _digest(row) -> bytes:
    return bytes(row["digest"].item())
