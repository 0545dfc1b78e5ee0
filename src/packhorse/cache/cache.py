"""Settings -> a cache that is up to date, or an open one.

    <cache_dir>/<name>-<recipe id>/
        recipe.json       what it is                                  tokenizer/   a reference copy
        plan/             which text makes which chunk                records/     what is committed
        chunks/           the sequences                               index/       derived: quick to open
        metadata.json     derived: sums, for people                   quarantine/  what was moved out of the way
        spool/            scratch                                     suspects/    engines that gave wrong ids

`update_cache` finds what is missing between the plan and the records, and builds it. Doing that again when nothing is
missing takes milliseconds, so building, going on after a kill, and growing are all the same call.
"""

import itertools
import json
import re
import shutil
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from packhorse.cache import store
from packhorse.cache.build import Job
from packhorse.cache.chunk import token_bits
from packhorse.cache.plan import Plan, Planner
from packhorse.cache.progress import BuildProgress, say
from packhorse.cache.reader import SequenceReader
from packhorse.cache.recipe import Recipe, create, make_recipe, read_identity, tokenizer_json
from packhorse.cache.record import Record, chunk_path, committed_chunks, read_record, record_path
from packhorse.cache.settings import CacheSettings
from packhorse.cache.snapshot import Index, Snapshot
from packhorse.cache.workers import run_jobs, usable_cores
from packhorse.corpus.documents import Skipped, file_length, read_documents
from packhorse.corpus.engines import choose_engine, make_engine
from packhorse.corpus.sources import Deferred, Files, Source, open_sources
from packhorse.corpus.tokenizer import (
    TokenizerContent,
    TokenizerFacts,
    locate_tokenizer,
    raw_digest,
    read_tokenizer,
    train_tokenizer,
)
from packhorse.errors import (
    CacheCorruptionError,
    CacheError,
    EngineMismatch,
    RecipeMismatch,
    SourceError,
    TokenizerError,
)

TRAINING_BYTES = 8_000_000
"""Text that a tokenizer is trained on."""
MIN_UTILISATION = 0.90
"""Below this share of real tokens a cache is not used without a word."""


@dataclass(frozen=True, kw_only=True)
class CacheSummary:
    """Sums over the chunks of a cache, derived from the records."""

    chunks: int = 0
    train_sequences: int = 0
    eval_sequences: int = 0
    tokens: int = 0
    """Without padding."""
    slots: int = 0
    """Tokens that the sequences have room for."""
    documents: int = 0
    eval_documents: int = 0
    cut_documents: int = 0
    pieces: int = 0
    rows_null: int = 0
    rows_empty: int = 0
    rows_invalid: int = 0
    text_bytes: int = 0
    file_bytes: int = 0
    """Chunk files and records: everything that grows with the text."""

    @property
    def utilisation(self) -> float:
        """Share of the slots that hold a token."""
        return self.tokens / self.slots if self.slots else 1.0

    @property
    def bytes_per_token(self) -> float:
        """Bytes on disk per token."""
        return self.file_bytes / self.tokens if self.tokens else 0.0

    def lines(self) -> list[str]:
        """For people."""
        skipped = self.rows_null + self.rows_empty + self.rows_invalid
        return [
            f"{self.chunks:,} chunks, {self.train_sequences:,} train + {self.eval_sequences:,} eval sequences",
            f"{self.documents:,} documents ({self.cut_documents:,} cut), {self.tokens:,} tokens, "
            f"utilisation {self.utilisation:.2%}, {self.bytes_per_token:.3f} bytes per token on disk",
        ] + (
            [
                f"{skipped:,} rows were left out: {self.rows_null:,} null, {self.rows_empty:,} empty, "
                f"{self.rows_invalid:,} not valid text"
            ]
            if skipped
            else []
        )


class Cache:
    """An open cache.

    Args:
        folder: Its folder.
        num_chunks: Open the snapshot of the first so many chunks; by default all that are there without a gap.

    Raises:
        CacheIncompleteError: there is no cache, or it has fewer chunks.
        CacheCorruptionError: one of the files that were read is damaged.
    """

    def __init__(self, folder: Path | str, num_chunks: int | None = None) -> None:
        self.folder = Path(folder)
        self.identity = read_identity(self.folder)
        self.recipe = self.identity.recipe
        self.snapshot = Snapshot(Index(self.folder), num_chunks)
        self._reader = SequenceReader(
            self.folder,
            self.snapshot,
            self.recipe.digest,
            self.recipe.sequence_length,
            token_bits(self.recipe.vocab_size),
        )

    @property
    def read(self):
        """Read sequences by number: see `SequenceReader.read`."""
        return self._reader.read

    @property
    def chunk(self):
        """Open one chunk file: see `ChunkReader`."""
        return self._reader.chunk

    @property
    def sequence_length(self) -> int:
        """Tokens per sequence."""
        return self.recipe.sequence_length

    @property
    def vocab_size(self) -> int:
        """Ids are below this."""
        return self.recipe.vocab_size

    @property
    def tokenizer_folder(self) -> Path:
        """A copy of the tokenizer, as `AutoTokenizer.from_pretrained` reads it."""
        return self.folder / "tokenizer"

    def num_sequences(self, split: str = "train") -> int:
        """Sequences on one side of the split."""
        return self.snapshot.num_sequences(split)

    @cached_property
    def summary(self) -> CacheSummary:
        """Sums over the snapshot."""
        return _summarise(self.folder, self.snapshot.num_chunks, self.recipe.sequence_length)

    @cached_property
    def _decoder(self):
        from tokenizers import Tokenizer

        return Tokenizer.from_file(str(self.tokenizer_folder / "tokenizer.json"))

    def decode(self, tokens) -> str:
        """The text of some ids, special tokens included."""
        if (self.tokenizer_folder / "tokenizer.json").exists():
            return self._decoder.decode([int(t) for t in tokens], skip_special_tokens=False)
        from transformers import AutoTokenizer

        return AutoTokenizer.from_pretrained(str(self.tokenizer_folder)).decode(tokens)


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
    if not isinstance(settings, CacheSettings):
        return Cache(settings)
    facts, _ = resolve_tokenizer(settings, train=False)
    folder, mismatch = locate_cache(settings, make_recipe(settings, facts))
    if mismatch is not None:
        raise mismatch
    return Cache(folder)


def update_cache(settings: CacheSettings, quiet: bool = False) -> Cache:
    """Bring the cache up to date with its sources, and open it. Safe to kill, to repeat, and to run beside others.

    Args:
        settings: What the cache holds, and where it lies.
        quiet: Say nothing.

    Raises:
        PackhorseError: see `errors.py`; what was committed before stays.
    """
    tell = (lambda text: None) if quiet else say
    sources = open_sources(settings.source, text_column=settings.text_column, sample_by=settings.sample_by)
    facts, content = resolve_tokenizer(settings, sources=sources, tell=tell)
    recipe = make_recipe(settings, facts)
    folder, mismatch = locate_cache(settings, recipe)
    if mismatch is not None:
        if settings.on_mismatch == "error":
            raise mismatch
        old = _free_name(folder)
        folder.rename(old)
        tell(f"The cache in {folder} was of another recipe; it is now {old}.")
    if not (folder / "recipe.json").exists():
        content = content or read_tokenizer(locate_tokenizer(str(settings.tokenizer)))
        create(folder, recipe, content, str(settings.tokenizer))
    _Update(settings, recipe, folder, sources, tell).run()
    cache = Cache(folder)
    if not cache.num_sequences("train"):
        raise SourceError(
            f"The sources have no text for training: {cache.summary.documents:,} documents, "
            f"{cache.summary.rows_null + cache.summary.rows_empty + cache.summary.rows_invalid:,} rows left out.\n"
            "Check `source` and `text_column`, and that `eval_share` leaves something."
        )
    return cache


def resolve_tokenizer(
    settings: CacheSettings, *, sources: list[Source] | None = None, train: bool = True, tell=say
) -> tuple[TokenizerFacts, TokenizerContent | None]:
    """What the tokenizer of the settings is. Its content is read only when it was never seen before.

    Args:
        settings: The settings.
        sources: What a tokenizer is trained on, if it must be.
        train: Train it if it does not exist and the settings say so.
        tell: Takes messages.

    Raises:
        TokenizerError: there is none, or it cannot be used.
    """
    if settings.tokenizer is None:
        raise TokenizerError("No tokenizer is named. Set `tokenizer`: a hub name, a folder, or a tokenizer.json.")
    if settings.train_tokenizer is not None:
        _train(settings, sources, tell) if train else None
    path = locate_tokenizer(settings.tokenizer)
    # What was read once is remembered by the hash of the files, so that a start does not parse megabytes of JSON.
    memo = cache_root(settings) / "tokenizers" / f"{raw_digest(path)}.json"
    try:
        return TokenizerFacts(**store.read_sealed(memo)), None
    except (FileNotFoundError, CacheCorruptionError, TypeError):
        content = read_tokenizer(path)
        if train:
            store.make_folder(memo.parent)
            store.replace(memo, store.seal(asdict(content.facts)))
        return content.facts, content


def cache_root(settings: CacheSettings) -> Path:
    """The folder of all caches."""
    path = Path(settings.cache_dir).expanduser()
    return path.parent if (path / "recipe.json").exists() else path


def locate_cache(settings: CacheSettings, recipe: Recipe) -> tuple[Path, RecipeMismatch | None]:
    """The folder of the cache, and what is wrong with it when it was named explicitly and is another."""
    path = Path(settings.cache_dir).expanduser()
    if not (path / "recipe.json").exists():
        return path / f"{settings.name or default_name(settings.source)}-{recipe.id}", None
    differences = recipe.differences(read_identity(path).recipe)
    if not differences:
        return path, None
    lines = [f"  {name}: on disk {there}, asked for {here}" for name, here, there in differences]
    return path, RecipeMismatch(
        f"The cache in {path} was built by another recipe:\n" + "\n".join(lines) + "\n"
        "Point `cache_dir` to another folder (or to the folder above, where every recipe has its own), or set "
        "`on_mismatch: rebuild` to move this one away and build anew."
    )


def default_name(source: Any) -> str:
    """What a cache is called when nobody says: after its first source."""
    first = source[0] if isinstance(source, list | tuple) and source else source
    if isinstance(first, dict):
        first = first.get("path") or str(first.get("class_path", "cache")).rpartition(".")[2]
    text = Path(first).name if isinstance(first, str | Path) else type(first).__name__
    text = re.split(r"[*?\[]", text)[0].split(".")[0]
    return re.sub(r"[^A-Za-z0-9_-]+", "-", text).strip("-").lower()[:40] or "cache"


class _Update:
    """One run of `update_cache`."""

    def __init__(self, settings: CacheSettings, recipe: Recipe, folder: Path, sources: list[Source], tell) -> None:
        self.settings, self.recipe, self.folder, self.tell = settings, recipe, folder, tell
        self.plan, self.index = Plan(folder), Index(folder)
        self.planner = Planner(
            self.plan,
            sources,
            self._count_tokens,
            sequence_length=recipe.sequence_length,
            sequences_per_chunk=settings.sequences_per_chunk,
            max_documents=settings.max_documents,
        )
        self.engine: str | None = None
        self.progress = BuildProgress()
        self._counter = None
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
                self._suspect(error)
        self.index.extend(self.plan.num_chunks, self._trusted)
        if built:
            self.tell(f"{built}/{built} chunks built in {self.progress.seconds:.1f} s: {self.progress}")
        if self.index.num_chunks < self.plan.num_chunks:
            raise CacheError(f"Chunk {self.index.num_chunks} of {self.folder} was not built. Run the command again.")
        _write_metadata(self.folder, self.recipe, self.index.num_chunks)

    def _build(self) -> int:
        jobs = self._jobs()
        first = list(itertools.islice(jobs, 2))
        if not first:
            return 0
        workers = self.settings.workers
        if workers == "auto":
            # A single chunk is built faster here than a process starts.
            workers = len(usable_cores()) if len(first) > 1 else 0
        built = 0

        def on_record(record: Record) -> None:
            nonlocal built
            built += 1
            self.progress.committed()
            self._release(record)

        with self.progress.shown():
            run_jobs(
                itertools.chain(first, jobs),
                workers,
                self.folder,
                self._engine([]),
                self.settings.compression,
                self.progress.add if self.tell is say else lambda *_: None,
                on_record,
            )
        return built

    def _jobs(self) -> Iterator[Job]:
        """The chunks that are missing, planned ones first."""
        committed = set(committed_chunks(self.folder, self.index.num_chunks))
        missing = [c for c in range(self.index.num_chunks, self.plan.num_chunks) if c not in committed]
        missing += [c for c in sorted(committed) if not self._trusted_chunk(c)]
        if missing and self.plan.num_chunks > len(missing):
            done = self.plan.num_chunks - len(missing)
            self.tell(f"Going on in {self.folder}: {done} of {self.plan.num_chunks} chunks are there.")
        elif missing:
            self.tell(f"Going on in {self.folder}.")
        yield from self._jobs_for(sorted(missing))
        for page in self.planner.extend():
            if page.entries:
                verb = "Building" if page.page == 0 else "Extending"
                self.tell(f"{verb} the cache {self.folder}: {len(page.entries)} chunks.")
            yield from self._jobs_for(range(page.first_chunk, page.first_chunk + len(page.entries)))

    def _jobs_for(self, chunks) -> Iterator[Job]:
        entries = {chunk: self.plan.entry(chunk) for chunk in chunks}
        for chunk, entry in entries.items():
            page = next(p for p in reversed(self.plan.pages) if p.first_chunk <= chunk)
            self.progress.planned(1, page.chunk_bytes)
            for number in {number for number, _, _ in entry}:
                self._waiting[number] = self._waiting.get(number, 0) + 1
        for chunk, entry in entries.items():
            files = {number: self.planner.locate(number) for number, _, _ in entry}
            yield Job(chunk=chunk, ranges=entry, files=files)

    def _release(self, record: Record) -> None:
        """Remove the spools that no chunk waits for."""
        for number in {number for number, _, _ in record.ranges}:
            self._waiting[number] -= 1
            if self._waiting[number] == 0:
                self.planner.remove_spool(number)

    def _engine(self, texts: list[str]) -> str:
        """The engine, chosen when the first texts are there."""
        if self.engine is None:
            text = tokenizer_json(self.folder, read_identity(self.folder))
            if not text:
                self.engine = "slow"
                self.tell("The tokenizer exists in Python only: it is slow. A tokenizer.json would be much faster.")
            else:
                wanted = "hf" if self._suspects() and self.settings.engine == "auto" else self.settings.engine
                self.engine, message = choose_engine(wanted, text, self.recipe.split_special_tokens, texts)
                if message:
                    self.tell(message)
        return self.engine

    def _count_tokens(self, texts: list[str]) -> int:
        if self._counter is None:
            engine = self._engine(texts[:200])
            text = tokenizer_json(self.folder, read_identity(self.folder))
            tokenizer = str(self.folder / "tokenizer")
            self._counter = make_engine(engine, text, self.recipe.split_special_tokens, tokenizer)
        extra = (self.recipe.bos_id is not None) + (self.recipe.eos_id is not None)
        return len(self._counter.encode(texts)[0]) + extra * len(texts)

    def _suspects(self) -> set[str]:
        root = self.folder / "suspects"
        return {store.read_sealed(path)["engine"] for path in root.glob("*.json")} if root.is_dir() else set()

    def _trusted(self, record: Record) -> bool:
        if record.recipe != self.recipe.digest:
            raise CacheCorruptionError(f"The record of chunk {record.chunk} in {self.folder} is of another recipe.")
        return record.engine not in self._suspects()

    def _trusted_chunk(self, chunk: int) -> bool:
        if not self._suspects() or self._trusted(record := read_record(self.folder, chunk)):
            return True
        # It must not be found again: chunk and record leave together, the record first.
        store.quarantine(record_path(self.folder, chunk), self.folder)
        store.quarantine(chunk_path(self.folder, chunk, record.file_sha256), self.folder)
        return False

    def _is_suspect_index(self) -> bool:
        """Whether chunks of a suspect engine are in the index: it must be derived anew."""
        return bool(self._suspects()) and any(
            not self._trusted(read_record(self.folder, chunk)) for chunk in range(self.index.num_chunks)
        )

    def _suspect(self, error: EngineMismatch) -> None:
        """Put every chunk of an engine that was wrong out of use, before anything else is done."""
        store.make_folder(self.folder / "suspects")
        name = re.sub(r"[^A-Za-z0-9.]+", "-", error.engine)
        value = {"engine": error.engine, "text": error.text.encode("utf-8", "surrogatepass").hex()}
        store.publish(self.folder / "suspects" / f"{name}.json", store.seal(value))
        self.engine, self._counter = "hf", None
        if self._is_suspect_index():
            self.index.forget()
        self.progress = BuildProgress()
        self._waiting.clear()
        self.tell(
            f"{error}\nThe document is kept in {self.folder / 'suspects'}. All chunks of that engine are built again "
            "with the Hugging Face reference."
        )


def _train(settings: CacheSettings, sources: list[Source] | None, tell) -> None:
    """Train the tokenizer of the settings, unless it exists."""
    assert settings.tokenizer is not None
    assert settings.train_tokenizer is not None
    folder = Path(settings.tokenizer).expanduser()
    if (folder / "tokenizer.json").exists():
        config = json.loads((folder / "tokenizer_config.json").read_text(encoding="utf-8"))
        wanted = config.get("packhorse_train_tokenizer", settings.train_tokenizer)
        if wanted != settings.train_tokenizer:
            raise TokenizerError(
                f"The tokenizer in {folder} was trained for {wanted} entries; train_tokenizer asks for "
                f"{settings.train_tokenizer}.\nSet `tokenizer` to another folder, or remove this one."
            )
        return
    if sources is None:
        sources = open_sources(settings.source, text_column=settings.text_column, sample_by=settings.sample_by)
    content = train_on(sources, settings.train_tokenizer, tell)
    config = json.loads(content.files["tokenizer_config.json"])
    config["packhorse_train_tokenizer"] = settings.train_tokenizer
    store.make_folder(folder)
    store.publish(folder / "tokenizer_config.json", json.dumps(config).encode())
    store.publish(folder / "tokenizer.json", content.files["tokenizer.json"])


def train_on(sources: list[Source], vocab_size: int, tell=say) -> TokenizerContent:
    """Train a tokenizer on the beginning of the sources."""
    texts: list[str] = []
    size = 0
    for text in sample_texts(sources):
        texts.append(text)
        size += len(text)
        if size >= TRAINING_BYTES:
            break
    if not texts:
        raise SourceError("The sources have no text to train a tokenizer on.")
    start = time.monotonic()
    content = train_tokenizer(texts, vocab_size)
    tell(
        f"Trained a tokenizer of {content.facts.vocab_size:,} entries on {size / 1e6:.1f} MB of text "
        f"in {time.monotonic() - start:.1f} s."
    )
    return content


def sample_texts(sources: list[Source]) -> Iterator[str]:
    """The texts of the sources, from the beginning."""
    for source in sources:
        source = source.open() if isinstance(source, Deferred) else source
        if isinstance(source, Files):
            for file in source.files:
                if file.packed:
                    yield from _packed_texts(file)
                    continue
                for batch in read_documents(file.file, 0, file_length(file.file), Skipped(), 2**18):
                    yield from batch.texts or []
        else:
            yield from (document for document in source.read(0) if isinstance(document, str) and document)


def _packed_texts(file) -> Iterator[str]:
    import tempfile

    from packhorse.cache.spool import unpack
    from packhorse.corpus.documents import TextFile

    with tempfile.TemporaryDirectory() as folder:
        target = Path(folder) / "unpacked"
        unpack(file.file.path, file.packed, target)
        unpacked = TextFile(path=str(target), kind=file.file.kind, column=file.file.column)
        for batch in read_documents(unpacked, 0, file_length(unpacked), Skipped(), 2**18):
            yield from batch.texts or []


def _summarise(folder: Path, num_chunks: int, sequence_length: int) -> CacheSummary:
    """The sums in metadata.json when they are of just this snapshot, else from the records."""
    sums = dict.fromkeys(CacheSummary.__dataclass_fields__, 0)
    for chunk in range(num_chunks):
        record = read_record(folder, chunk)
        sums["chunks"] += 1
        sums["tokens"] += record.tokens
        sums["slots"] += record.sequences * sequence_length
        sums["file_bytes"] += record.file_bytes + record_path(folder, chunk).stat().st_size
        for name in sums.keys() & Record.__dataclass_fields__.keys() - {"file_bytes"}:
            sums[name] += getattr(record, name)
    return CacheSummary(**sums)


def _write_metadata(folder: Path, recipe: Recipe, num_chunks: int) -> None:
    """A page for people, derived from the records: nothing is ever read from it."""
    summary = _summarise(folder, num_chunks, recipe.sequence_length)
    value = {
        "version": recipe.format,
        "recipe": asdict(recipe),
        "snapshot": Snapshot(Index(folder)).digest,
        "summary": asdict(summary),
        "utilisation": round(summary.utilisation, 6),
        "bytes_per_token": round(summary.bytes_per_token, 4),
    }
    store.replace(folder / "metadata.json", json.dumps(value, indent=2).encode() + b"\n")


def _free_name(folder: Path) -> Path:
    return next(
        path for number in itertools.count(1) if not (path := folder.with_name(f"{folder.name}.old-{number}")).exists()
    )


def free_bytes(folder: Path) -> int:
    """Free space where a folder is, or will be."""
    while not folder.exists():
        folder = folder.parent
    return shutil.disk_usage(folder).free
