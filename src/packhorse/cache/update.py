"""Settings -> a cache that is up to date.

`update_cache` finds what is missing between the plan and the records, and builds it. Doing that again when nothing is
missing takes milliseconds, so building, going on after a kill, and growing are all the same call.
"""

import itertools
import re
from collections.abc import Callable, Iterator
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from packhorse.cache import store
from packhorse.cache.build import Job
from packhorse.cache.cache import Cache, cache_path, locate_cache
from packhorse.cache.metadata import write_metadata
from packhorse.cache.plan import Plan
from packhorse.cache.planner import Planner
from packhorse.cache.progress import BuildProgress, say
from packhorse.cache.recipe import Recipe, create, make_recipe, read_identity, tokenizer_json
from packhorse.cache.record import Record, chunk_files, chunk_path, committed_chunks, read_record, record_path
from packhorse.cache.settings import CacheSettings
from packhorse.cache.snapshot import Index
from packhorse.cache.tokenizers import resolve_tokenizer
from packhorse.cache.workers import Workers, usable_cores
from packhorse.corpus.engines import make_engine
from packhorse.corpus.sources import Files, Source, Stream, check_sources
from packhorse.corpus.tokenizer import locate_tokenizer, read_tokenizer
from packhorse.errors import CacheCorruptionError, CacheError, EngineMismatch, SourceError

EARLY_BYTES = 16 * 2**20
"""With more than this to build for sure, workers are started before the plan is made."""


def build_cache(source: Any, *, tokenizer: str | None = None, **settings: Any) -> Cache:
    """Build a cache, or bring it up to date, and open it.

    Args:
        source: Files, a data set, or any iterable of texts: see `corpus.sources.open_sources`.
        tokenizer: A hub name, a folder, or a tokenizer.json.
        **settings: The other fields of `CacheSettings`: `sequence_length`, `cache_dir`, ...
    """
    return update_cache(CacheSettings(source=source, tokenizer=tokenizer, **settings))


def open_cache(settings: CacheSettings | Path | str) -> Cache:
    """Open the cache that the settings describe (or the one in a folder), without building anything.

    Raises:
        CacheIncompleteError: it does not exist yet.
        RecipeMismatch: the folder holds a cache of another recipe.
    """
    return Cache(folder_of(settings))


def folder_of(where: CacheSettings | Path | str) -> Path:
    """The folder of the cache that the settings describe, even if it is damaged.

    Raises:
        RecipeMismatch: the folder holds a cache of another recipe.
    """
    if not isinstance(where, CacheSettings):
        return Path(where)
    facts, _ = resolve_tokenizer(where, train=False)
    recipe = make_recipe(where, facts)
    with suppress(CacheCorruptionError):
        folder, mismatch = locate_cache(where, recipe)
        if mismatch is not None:
            raise mismatch
        return folder
    return cache_path(where, recipe)


def update_cache(settings: CacheSettings, quiet: bool = False) -> Cache:
    """Bring the cache up to date with its sources, and open it. Safe to kill, to repeat, and to run beside others.

    Args:
        settings: What the cache holds, and where it lies.
        quiet: Say nothing.

    Raises:
        PackhorseError: see `errors.py`; what was committed before stays.
    """
    tell = (lambda text: None) if quiet else say
    sources = settings.open_sources()
    with _Staff(settings, sources) as staff:
        facts, content = resolve_tokenizer(settings, sources=sources, tell=tell, on_new=staff.call_early)
        recipe = make_recipe(settings, facts)
        folder, mismatch = locate_cache(settings, recipe)
        if mismatch is not None:
            if settings.on_mismatch == "error":
                raise mismatch
            old = _free_name(folder)
            folder.rename(old)
            tell(f"The cache in {folder} was of another recipe; it is now {old}.")
        if not (folder / "recipe.json").exists():
            check_sources(sources)
            content = content or read_tokenizer(locate_tokenizer(str(settings.tokenizer)))
            create(folder, recipe, content, str(settings.tokenizer))
        _Update(settings, recipe, folder, sources, staff, tell).run()
    cache = Cache(folder)
    if not cache.num_sequences("train"):
        raise SourceError(
            f"The sources have no text for training: {cache.summary.documents:,} documents, "
            f"{cache.summary.rows_null + cache.summary.rows_empty + cache.summary.rows_invalid:,} rows left out, "
            f"{cache.summary.rows_filtered:,} by the filters.\n"
            "Check `source`, `text_column` and `filters`, and that `eval_share` leaves something."
        )
    return cache


class _Staff:
    """The workers of one run of `update_cache`: there when they are needed, or a little earlier."""

    def __init__(self, settings: CacheSettings, sources: list[Source]) -> None:
        self._number, self._split_special_tokens = settings.workers, settings.split_special_tokens
        self._workers: Workers | None = None
        self._text_bytes = 0
        for source in sources:
            if isinstance(source, Files):
                self._text_bytes += sum(file.size for file in source.files)
            elif isinstance(source, Stream):
                self._text_bytes += source.text_bytes or 0

    def __enter__(self) -> "_Staff":
        return self

    def __exit__(self, *_) -> None:
        self.dismiss()

    def call_early(self, tokenizer: Path) -> None:
        """Start them before the plan is made, if there is much to build: what they import and load takes a while."""
        if self._text_bytes > EARLY_BYTES:
            file = tokenizer if tokenizer.is_file() else tokenizer / "tokenizer.json"
            self.call(many=True).prepare(file, self._split_special_tokens)

    def call(self, many: bool) -> Workers:
        """The workers. `auto` takes none for a single chunk: that is built faster here than a process starts."""
        if self._workers is None:
            number = self._number
            if number == "auto":
                number = len(usable_cores()) if many else 0
            self._workers = Workers(number)
        return self._workers

    def dismiss(self) -> None:
        """Stop them."""
        if self._workers is not None:
            self._workers.stop()
            self._workers = None


class _Update:
    """One run of `update_cache`."""

    def __init__(
        self,
        settings: CacheSettings,
        recipe: Recipe,
        folder: Path,
        sources: list[Source],
        staff: _Staff,
        tell: Callable[[str], None],
    ) -> None:
        self.staff = staff
        self.settings, self.recipe, self.folder, self.tell = settings, recipe, folder, tell
        self.plan, self.index = Plan(folder), Index(folder)
        self.planner = Planner(
            self.plan,
            sources,
            self._count_tokens,
            sequence_length=recipe.sequence_length,
            sequences_per_chunk=settings.sequences_per_chunk,
            max_documents=settings.max_documents,
            deduplicate=recipe.deduplicate == "exact",
        )
        self.progress = BuildProgress(quiet=tell is not say)
        self._waiting: dict[int, int] = {}  # file number -> chunks that still need it

    def run(self) -> None:
        """Build what is missing."""
        if self._is_suspect_index():
            self.index.forget()
        while True:
            try:
                built = self._build()
                break
            except EngineMismatch as error:
                if error.engine.split()[0] != "fastokens":
                    raise  # the reference itself: there is nothing to fall back on
                self._suspect(error)
        if any(self._differs_from_index(record) for record in built):
            self.index.forget()
        self.index.extend(self.plan.num_chunks, self._trusted)
        if built:
            self.tell(f"{len(built)} chunks built in {self.progress.seconds:.1f} s: {self.progress.rates()}")
        if self.index.num_chunks < self.plan.num_chunks:
            raise CacheError(f"Chunk {self.index.num_chunks} of {self.folder} was not built. Run the command again.")
        self.planner.locations.remove_spools()
        if built:
            store.remove_leftovers(self.folder)
        if built or not (self.folder / "metadata.json").exists():
            write_metadata(self.folder, self.recipe, self.index.num_chunks)

    def _build(self) -> list[Record]:
        jobs = self._jobs()
        first = list(itertools.islice(jobs, 2))
        if not first:
            return []
        workers = self.staff.call(many=len(first) > 1)
        built: list[Record] = []

        def on_record(record: Record) -> None:
            built.append(record)
            self.progress.committed()
            self._release(record)

        with self.progress.shown():
            workers.run(
                itertools.chain(first, jobs),
                self.folder,
                self._engine(),
                self.settings.compression,
                self.progress.add,
                on_record,
                self.tell,
            )
        return built

    def _jobs(self) -> Iterator[Job]:
        """The chunks that are missing, planned ones first."""
        missing = self._missing()
        if missing and self.plan.num_chunks > len(missing):
            done = self.plan.num_chunks - len(missing)
            self.tell(f"Going on in {self.folder}: {done} of {self.plan.num_chunks} chunks are there.")
        elif missing:
            self.tell(f"Going on in {self.folder}.")
        yield from self._jobs_for(missing)
        for page in self.planner.extend():
            if page.entries:
                verb = "Building" if page.page == 0 else "Extending"
                self.tell(f"{verb} the cache {self.folder}: {len(page.entries)} chunks.")
            yield from self._jobs_for(range(page.first_chunk, page.first_chunk + len(page.entries)))

    def _missing(self) -> list[int]:
        """Planned chunks that have no record, no file, or tokens of an engine that was wrong."""
        committed = committed_chunks(self.folder)
        # `max`: the last of either can only be there when its page was.
        self.plan.refuse_gaps(max(self.index.num_chunks, committed[-1] + 1 if committed else 0))
        files = chunk_files(self.folder)
        missing = set(range(self.plan.num_chunks)) - set(committed)
        for chunk in committed:
            is_indexed = chunk < self.index.num_chunks
            digest = self.index.file_sha256(chunk) if is_indexed else read_record(self.folder, chunk).file_sha256
            if chunk_path(self.folder, chunk, digest).name not in files or not self._trusted_chunk(chunk):
                missing.add(chunk)
        return sorted(missing)

    def _differs_from_index(self, record: Record) -> bool:
        return record.chunk < self.index.num_chunks and self.index.file_sha256(record.chunk) != record.file_sha256

    def _jobs_for(self, chunks) -> Iterator[Job]:
        entries = {chunk: self.plan.entry(chunk) for chunk in chunks}
        for chunk, entry in entries.items():
            self.progress.planned(1, self.plan.page(chunk).chunk_bytes)
            for number in {number for number, _, _ in entry}:
                self._waiting[number] = self._waiting.get(number, 0) + 1
        for chunk, entry in entries.items():
            files = {number: self.planner.locations.locate(number) for number, _, _ in entry}
            yield Job(chunk=chunk, ranges=entry, files=files, dropped=self.plan.dropped(chunk))

    def _release(self, record: Record) -> None:
        """Remove the spools that no chunk waits for."""
        for number in {number for number, _, _ in record.ranges}:
            self._waiting[number] -= 1
            if self._waiting[number] == 0:
                self.planner.locations.remove_spool(number)

    def _engine(self) -> str:
        """What may tokenize: what the settings say, but for an engine that was wrong before."""
        if self.settings.engine == "hf" or not self._suspects():
            return self.settings.engine
        with suppress(PackageNotFoundError):
            if f"fastokens {version('fastokens')}" in self._suspects():
                self.tell(f"The engine fastokens was wrong before ({self.folder / 'suspects'}): not used.")
                return "hf"
        return self.settings.engine

    def _count_tokens(self, texts: list[str]) -> int:
        """By the reference: the sample is small, and builders have the fast engine to load."""
        text = tokenizer_json(self.folder, read_identity(self.folder))
        folder = str(self.folder / "tokenizer")
        engine, _ = make_engine("hf", text, self.recipe.split_special_tokens, folder)
        extra = (self.recipe.bos_id is not None) + (self.recipe.eos_id is not None)
        return len(engine.encode(texts)[0]) + extra * len(texts)

    def _suspects(self) -> set[str]:
        root = self.folder / "suspects"
        return {str(store.read_sealed(path).get("engine")) for path in root.glob("*.json")} if root.is_dir() else set()

    def _trusted(self, record: Record) -> bool:
        if record.recipe != self.recipe.digest:
            raise CacheCorruptionError(f"The record of chunk {record.chunk} in {self.folder} is of another recipe.")
        if record.ranges != self.plan.entry(record.chunk):
            raise CacheCorruptionError(
                f"The record of chunk {record.chunk} in {self.folder} is not of what is planned."
            )
        return record.engine not in self._suspects()

    def _trusted_chunk(self, chunk: int) -> bool:
        if not self._suspects() or self._trusted(record := read_record(self.folder, chunk)):
            return True
        # It must not be found again: chunk and record leave together, the record first.
        store.quarantine(record_path(self.folder, chunk), self.folder)
        with suppress(FileNotFoundError):
            store.quarantine(chunk_path(self.folder, chunk, record.file_sha256), self.folder)
        return False

    def _is_suspect_index(self) -> bool:
        """Whether chunks of a suspect engine are, or were, in the index: it must be derived anew."""
        if not self._suspects():
            return False
        try:
            return not all(self._trusted(read_record(self.folder, chunk)) for chunk in range(self.index.num_chunks))
        except FileNotFoundError:
            # The record is in quarantine, and a power cut brought the index back.
            return True

    def _suspect(self, error: EngineMismatch) -> None:
        """Put every chunk of an engine that was wrong out of use, before anything else is done."""
        store.make_folder(self.folder / "suspects")
        name = re.sub(r"[^A-Za-z0-9.]+", "-", error.engine)
        value = {"engine": error.engine, "text": error.text.encode("utf-8", "surrogatepass").hex()}
        store.publish(self.folder / "suspects" / f"{name}.json", store.seal(value))
        self.staff.dismiss()
        if self._is_suspect_index():
            self.index.forget()
        self.progress = BuildProgress(quiet=self.tell is not say)
        self._waiting.clear()
        self.tell(
            f"{error}\nThe document is kept in {self.folder / 'suspects'}. All chunks of that engine are built again "
            "with the Hugging Face reference."
        )


def _free_name(folder: Path) -> Path:
    return next(
        path for number in itertools.count(1) if not (path := folder.with_name(f"{folder.name}.old-{number}")).exists()
    )
