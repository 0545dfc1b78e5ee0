"""A plan entry -> a chunk.

`build_chunk` is a pure function of the recipe and the documents: the same payload whoever builds it, wherever, in
whatever order, and however often it was killed before. Forward building, filling gaps, resuming, several builders at
once and repair are this one function; they differ only in which chunk numbers they ask for.
"""

import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

import packhorse
from packhorse.cache.chunk import ChunkContent, Encoded, encode_chunk
from packhorse.cache.phases import PhaseClock
from packhorse.cache.plan import Range
from packhorse.cache.progress import say
from packhorse.cache.recipe import Recipe, read_identity, tokenizer_json
from packhorse.cache.record import Record, commit, read_record, record_path
from packhorse.corpus.documents import Skipped, TextFile, read_ranges
from packhorse.corpus.engines import PROBES, Engine, make_engine, probe_digest
from packhorse.corpus.packing import Packed, pack
from packhorse.corpus.tokens import Tokens, narrowest, tokenize
from packhorse.errors import EngineMismatch, SourceError

Progress = Callable[[int, int, int], None]
"""Called with (documents, tokens, bytes of text) done since the last call."""
PROGRESS_SECONDS = 0.05
"""How often, at most: a message between processes takes as long as a few documents."""


@dataclass(frozen=True, kw_only=True)
class Job:
    """What a builder needs to make one chunk."""

    chunk: int
    ranges: list[Range]
    files: dict[int, TextFile]
    """File number -> the file, ready to be sought."""
    dropped: list[int] = field(default_factory=list)
    """Rows of the ranges whose documents have a place before, in order."""
    max_document_bytes: int | None = None
    """Longer documents are refused: the memory is limited."""


@dataclass(frozen=True, kw_only=True)
class Built:
    """A chunk that was built, and what was counted on the way."""

    encoded: Encoded
    train: Packed
    eval: Packed
    documents: int
    eval_documents: int
    cut_documents: int
    truncated_documents: int
    truncated_tokens: int
    skipped: Skipped
    text_bytes: int


def build_chunk(
    recipe: Recipe,
    job: Job,
    engine: Engine,
    compression: str,
    progress: Progress | None = None,
    clock: PhaseClock | None = None,
) -> Built:
    """Build one chunk: its payload depends on the recipe and the job's documents alone.

    Raises:
        SourceError: a source cannot be read.
        EngineMismatch: the engine differs from the reference.
    """
    skipped, clock = Skipped(), clock or PhaseClock()
    ranges = ((job.files[n], start, stop) for n, start, stop in job.ranges)
    tokens = tokenize(
        clock.each("read", read_ranges(ranges, skipped, job.dropped, job.max_document_bytes)),
        engine,
        skipped,
        **recipe.token_policy,
    )
    parts = list(_counted(clock.each("tokenize", tokens), progress))
    with clock.phase("pack"):
        lengths = _join([np.diff(part.ends, prepend=0) for part in parts], np.int64)
        ids = _join([part.ids for part in parts], narrowest(recipe.vocab_size))
        rows = _join([part.rows for part in parts], np.int64)
        is_eval = _join([part.is_eval for part in parts], bool)
        starts = np.cumsum(lengths) - lengths
        kept = np.minimum(lengths, recipe.sequence_length) if recipe.long_documents == "truncate" else lengths
        train, train_cut = _pack_side(recipe, ids, starts, kept, ~is_eval)
        evaluation, eval_cut = _pack_side(recipe, ids, starts, kept, is_eval)
    with clock.phase("compress"):
        encoded = encode_chunk(
            ChunkContent(train=train, eval=evaluation, document_rows=rows, document_sides=is_eval),
            job.chunk,
            recipe.digest,
            recipe.vocab_size,
            compression,
        )
    return Built(
        encoded=encoded,
        train=train,
        eval=evaluation,
        documents=len(lengths),
        eval_documents=int(is_eval.sum()),
        cut_documents=train_cut + eval_cut,
        truncated_documents=int((kept < lengths).sum()),
        truncated_tokens=int((lengths - kept).sum()),
        skipped=skipped,
        text_bytes=sum(part.text_bytes for part in parts),
    )


class Builder:
    """Builds and commits chunks of one cache, in this process.

    Args:
        folder: The cache: its recipe and its tokenizer are there.
        engine: `auto`, `fastokens` or `hf`.
        compression: A level of `chunk.LEVELS`.
        read_back: Read what was written again before it counts.
        tell: Takes a message for the user.
    """

    def __init__(
        self,
        folder: Path,
        engine: str,
        compression: str,
        read_back: bool = True,
        tell: Callable[[str], None] = say,
    ) -> None:
        self.folder, self.compression, self.read_back = folder, compression, read_back
        identity = read_identity(folder)
        self.recipe = identity.recipe
        split = self.recipe.split_special_tokens
        text = tokenizer_json(folder, identity)
        self.engine, message = make_engine(engine, text, split, str(folder / "tokenizer"))
        if message:
            tell(message)
        # The probe set is in the recipe: whatever happened to libraries or files, these ids may not change.
        if split and probe_digest(self.engine) != self.recipe.tokenizer_probe:
            raise EngineMismatch(f"{self.engine.name} {self.engine.version}", "".join(PROBES))

    def build(self, job: Job, progress: Progress | None = None) -> Record:
        """Build a chunk and commit it.

        Returns:
            The record that counts (see `record.commit`).
        """
        return self.make(job, progress)()[0]

    def make(self, job: Job, progress: Progress | None = None) -> Callable[[], tuple[Record, dict[str, float]]]:
        """Build a chunk; calling what is returned commits it, while the next one may already be built.

        Returns:
            What commits the chunk, and gives the record that counts and the seconds by phase.
        """
        start, clock = time.monotonic(), PhaseClock()
        try:
            built = build_chunk(self.recipe, job, self.engine, self.compression, progress, clock)
        except SourceError:
            # Another builder that was faster may have removed the spool.
            if record_path(self.folder, job.chunk).exists():
                return lambda: (read_record(self.folder, job.chunk), clock.seconds)
            raise
        pieces = len(built.train.piece_lengths) + len(built.eval.piece_lengths)
        record = Record(
            recipe=self.recipe.digest,
            chunk=job.chunk,
            ranges=job.ranges,
            payload_sha256=built.encoded.payload_sha256,
            file_sha256=built.encoded.file_sha256,
            file_bytes=built.encoded.num_bytes,
            index_sha256=built.encoded.index_sha256,
            train_sequences=len(built.train.tokens),
            eval_sequences=len(built.eval.tokens),
            train_tokens=built.train.num_tokens,
            eval_tokens=built.eval.num_tokens,
            pieces=pieces,
            documents=built.documents,
            eval_documents=built.eval_documents,
            cut_documents=built.cut_documents,
            rows_null=built.skipped.null,
            rows_empty=built.skipped.empty,
            rows_invalid=built.skipped.invalid,
            text_bytes=built.text_bytes,
            seconds=round(time.monotonic() - start, 3),
            engine=f"{self.engine.name} {self.engine.version}",
            codec=f"lz4 {_lz4_version()} {self.compression}" if self.compression != "none" else "none",
            packhorse=packhorse.__version__,
            # Every piece of a document but the first begins with tokens of the one before.
            repeated_tokens=self.recipe.overlap * (pieces - built.documents),
            truncated_documents=built.truncated_documents,
            truncated_tokens=built.truncated_tokens,
            rows_filtered=built.skipped.filtered,
            rows_duplicate=built.skipped.duplicate,
        )

        def write() -> tuple[Record, dict[str, float]]:
            with clock.phase("write"):
                winner = commit(self.folder, record, built.encoded.parts, self.read_back)
            return winner, clock.seconds

        return write


def build_all(
    jobs: Iterable[tuple[Builder, Job]],
    on_progress: Progress,
    on_record: Callable[[Record, dict[str, float]], None],
    on_error: Callable[[Exception], None],
) -> None:
    """Build and commit chunk after chunk; one is written to the disk while the next is built.

    Args:
        jobs: Who builds what.
        on_progress: Called while a chunk is built.
        on_record: Called, from another thread, when it is committed, with its record and the seconds by phase.
        on_error: Called with what went wrong; nothing more is built then.
    """

    def finish(commit: Callable[[], tuple[Record, dict[str, float]]]) -> None:
        try:
            on_record(*commit())
        except Exception as error:
            on_error(error)

    with ThreadPoolExecutor(1) as committer:
        try:
            for builder, job in jobs:
                committer.submit(finish, builder.make(job, on_progress))
        except Exception as error:
            on_error(error)


def _counted(parts: Iterator[Tokens], progress: Progress | None) -> Iterator[Tokens]:
    """The same; `progress` is called now and then, and at the end."""
    done, tell_at = np.zeros(3, np.int64), 0.0
    for part in parts:
        done += len(part.ends), len(part.ids), part.text_bytes
        if progress is not None and time.monotonic() >= tell_at:
            progress(*done.tolist())
            done[:], tell_at = 0, time.monotonic() + PROGRESS_SECONDS
        yield part
    if progress is not None and done.any():
        progress(*done.tolist())


def _join(arrays: list[np.ndarray], dtype: type) -> np.ndarray:
    return np.concatenate(arrays).astype(dtype, copy=False) if arrays else np.empty(0, dtype)


def _pack_side(
    recipe: Recipe, ids: np.ndarray, starts: np.ndarray, lengths: np.ndarray, mask: np.ndarray
) -> tuple[Packed, int]:
    """Pack the documents of one side; their numbers stay those in the chunk."""
    ends = (starts + lengths)[mask]
    packed = pack(recipe.packing, ids, ends, recipe.sequence_length, recipe.pad_id, starts[mask], recipe.overlap)
    pieces = np.bincount(packed.piece_documents, minlength=1)
    numbers = np.flatnonzero(mask).astype(np.uint32)
    packed = Packed(
        tokens=packed.tokens,
        pieces_per_sequence=packed.pieces_per_sequence,
        piece_lengths=packed.piece_lengths,
        piece_documents=numbers[packed.piece_documents] if len(numbers) else packed.piece_documents,
    )
    return packed, int((pieces > 1).sum())


def _lz4_version() -> str:
    import lz4

    return lz4.library_version_string()
