"""A folder -> an open cache.

    <cache_dir>/<name>-<recipe id>/
        recipe.json       what it is                                  tokenizer/   a reference copy
        plan/             which text makes which chunk                records/     what is committed
        chunks/           the sequences                               index/       derived: quick to open
        metadata.json     derived: sums, for people                   quarantine/  what was moved out of the way
        spool/            scratch                                     suspects/    engines that gave wrong ids
        claims/           who is building which chunk                 log/         of builds, for TensorBoard
        duplicates/       derived: hashes of the documents of each page, with `deduplicate: exact`

Opening reads recipe.json and the last page of the index; everything else is read when it is needed.
"""

import re
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from packhorse.cache import store
from packhorse.cache.chunk import token_bits
from packhorse.cache.reader import SequenceReader, Split
from packhorse.cache.recipe import Recipe, read_identity, tokenizer_json
from packhorse.cache.record import MAX_CHUNKS, Record, read_record, record_path
from packhorse.cache.settings import CacheSettings
from packhorse.cache.snapshot import Index, Snapshot
from packhorse.cache.suspects import Suspects
from packhorse.corpus.sources import are_sources
from packhorse.errors import CacheCorruptionError, CacheIncompleteError, RecipeMismatch, SettingsError


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
    repeated_tokens: int = 0
    """Of the tokens, those that stand in two sequences (`packing: window`)."""
    truncated_documents: int = 0
    truncated_tokens: int = 0
    """Dropped by `long_documents: truncate`."""
    rows_null: int = 0
    rows_empty: int = 0
    rows_invalid: int = 0
    rows_filtered: int = 0
    rows_duplicate: int = 0
    text_bytes: int = 0
    compressed_chunks: int = 0
    """Chunks of another compression than none."""
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
        ] + [
            line
            for count, line in (
                (
                    skipped,
                    f"{skipped:,} rows were left out: {self.rows_null:,} null, {self.rows_empty:,} empty, "
                    f"{self.rows_invalid:,} not valid text",
                ),
                (self.rows_filtered, f"{self.rows_filtered:,} rows did not pass the filters"),
                (self.rows_duplicate, f"{self.rows_duplicate:,} documents were there before and were dropped"),
                (self.repeated_tokens, f"{self.repeated_tokens:,} of the tokens stand in two sequences"),
                (
                    self.truncated_tokens,
                    f"{self.truncated_documents:,} documents were truncated: {self.truncated_tokens:,} tokens dropped",
                ),
            )
            if count
        ]


@dataclass(frozen=True, kw_only=True)
class Piece:
    """A run of tokens of one document in a sequence."""

    chunk: int
    document: int
    """Number of the document in the chunk."""
    row: int
    """Row of the document in the part of the source that the chunk was made from, counted from 0."""
    length: int
    """Tokens."""
    repeated: int = 0
    """How many of the first of them the document's piece before has too (`packing: window`)."""


class Cache:
    """An open cache.

    Args:
        folder: Its folder.
        num_chunks: Open the snapshot of the first so many chunks; by default all that are there without a gap.
        from_records: Leave the index on the disk aside, as if there were none.

    Raises:
        CacheIncompleteError: there is no cache, or it has fewer chunks.
        CacheCorruptionError: one of the files that were read is damaged.
    """

    def __init__(self, folder: Path | str, num_chunks: int | None = None, from_records: bool = False) -> None:
        # What is read later is where it was when the cache was opened, wherever the process goes.
        self.folder = Path(folder).expanduser().absolute()
        self.identity = read_identity(self.folder)
        self.recipe = self.identity.recipe
        self.snapshot = Snapshot(self._index(num_chunks, from_records), num_chunks)
        self._reader = SequenceReader(
            self.folder,
            self.snapshot,
            self.recipe.digest,
            self.recipe.sequence_length,
            token_bits(self.recipe.vocab_size),
            self.recipe.overlap,
        )

    def __repr__(self) -> str:
        """What a notebook shows, from the index alone."""
        totals = self.snapshot.totals
        return (
            f"Cache({str(self.folder)!r}: {self.snapshot.num_chunks:,} chunks, {totals.train_sequences:,} train + "
            f"{totals.eval_sequences:,} eval sequences of {self.sequence_length:,}, "
            f"{totals.train_tokens + totals.eval_tokens:,} tokens)"
        )

    def _index(self, num_chunks: int | None, from_records: bool) -> Index:
        """The index on the disk; without one, what the records say, for this object alone."""
        index = Index(self.folder, in_memory=from_records)
        if not index.num_chunks:
            suspects = Suspects(self.folder).engines()

            def is_trusted(record: Record) -> bool:
                if record.recipe != self.recipe.digest:
                    raise CacheCorruptionError(
                        f"The record of chunk {record.chunk} in {self.folder} is of another recipe.\n"
                        "`packhorse cache validate` says whose."
                    )
                return record.engine not in suspects

            index.extend(MAX_CHUNKS if num_chunks is None else num_chunks, is_trusted, in_memory=True)
        return index

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

    @property
    def utilisation(self) -> float:
        """Share of the sequences' places that hold a token, from the index alone."""
        totals = self.snapshot.totals
        places = (totals.train_sequences + totals.eval_sequences) * self.sequence_length
        return (totals.train_tokens + totals.eval_tokens) / places if places else 1.0

    @cached_property
    def summary(self) -> CacheSummary:
        """Sums over the snapshot."""
        return summarise(self.folder, self.snapshot.num_chunks, self.recipe.sequence_length)

    def pieces(self, number: int, split: Split = "train") -> list["Piece"]:
        """What a sequence is made of: which documents, and where they came from."""
        chunks, rows = self.snapshot.locate(np.array([number]), split)
        reader = self.chunk(int(chunks[0]))
        row = int(rows[0]) + (reader.header.num_train if split == "eval" else 0)
        documents = reader.piece_documents(row)
        return [
            Piece(
                chunk=int(chunks[0]),
                document=int(document),
                row=int(source_row),
                length=int(length),
                repeated=int(repeated),
            )
            for document, source_row, length, repeated in zip(
                documents,
                reader.side("document_rows")[documents],
                reader.piece_lengths(row),
                reader.repeated(row, self.recipe.overlap),
                strict=True,
            )
        ]

    def encode(self, text: str) -> list[int]:
        """The ids of a text, without special tokens."""
        ids = self._tokenizer.encode(text, add_special_tokens=False)
        return ids if isinstance(ids, list) else ids.ids

    def decode(self, tokens) -> str:
        """The text of some ids, special tokens included."""
        return self._tokenizer.decode([int(t) for t in tokens], skip_special_tokens=False)

    @cached_property
    def _tokenizer(self):
        """Of `tokenizers`, or of transformers where there is no other; of files that are as the recipe says."""
        text = tokenizer_json(self.folder, self.identity)
        if text:
            from tokenizers import Tokenizer

            return Tokenizer.from_str(text)
        from transformers import AutoTokenizer

        return AutoTokenizer.from_pretrained(str(self.tokenizer_folder))


def cache_root(settings: CacheSettings) -> Path:
    """The folder of all caches, whether it exists or not.

    Raises:
        SettingsError: it can be none.
    """
    path = Path(settings.cache_dir).expanduser()
    if file := store.file_in_the_way(path):
        raise SettingsError(
            f"The `cache_dir` {path} cannot be a folder: {file} is a file.\nName another folder, or move the file away."
        )
    return path.parent if (path / "recipe.json").exists() else path


def cache_path(settings: CacheSettings, recipe: Recipe) -> Path:
    """The folder of the cache, whether there is one or not."""
    path = Path(settings.cache_dir).expanduser()
    if (path / "recipe.json").exists():
        return path
    return path / f"{settings.name or default_name(settings.source)}-{recipe.id}"


def locate_cache(settings: CacheSettings, recipe: Recipe) -> tuple[Path, RecipeMismatch | None]:
    """The folder of the cache, and what is wrong with it when it was named explicitly and is another."""
    path = cache_path(settings, recipe)
    if not (path / "recipe.json").exists():
        return path, None
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
    """What a cache is called when nobody says: after its first source; never after a text of a list of texts."""
    first = source
    if isinstance(source, list | tuple):
        first = source[0] if source and are_sources(source) else "texts"
    if isinstance(first, dict):
        first = first.get("path") or str(first.get("class_path", "cache")).rpartition(".")[2]
    text = Path(first).name if isinstance(first, str | Path) else getattr(first, "__name__", type(first).__name__)
    text = re.split(r"[*?\[]", text)[0].split(".")[0]
    return re.sub(r"[^A-Za-z0-9_-]+", "-", text).strip("-").lower()[:40] or "cache"


def summarise(folder: Path, num_chunks: int, sequence_length: int) -> CacheSummary:
    """Sums over the records of the first `num_chunks` chunks: reads all of them."""
    sums = dict.fromkeys(CacheSummary.__dataclass_fields__, 0)
    for chunk in range(num_chunks):
        try:
            record = read_record(folder, chunk)
        except FileNotFoundError:
            raise CacheIncompleteError(
                f"The record of chunk {chunk} of {folder} is missing. `packhorse cache build` makes it again."
            ) from None
        sums["chunks"] += 1
        sums["compressed_chunks"] += record.codec != "none"
        sums["tokens"] += record.tokens
        sums["slots"] += record.sequences * sequence_length
        sums["file_bytes"] += record.file_bytes + record_path(folder, chunk).stat().st_size
        for name in sums.keys() & Record.__dataclass_fields__.keys() - {"file_bytes"}:
            sums[name] += getattr(record, name)
    return CacheSummary(**sums)
