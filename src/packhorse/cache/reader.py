"""Cache -> sequences, at random.

    cache.read([5, 1_000_003], split="train")  ->  tokens [2, sequence_length], lengths of the pieces of each

Only the blocks that are touched are read, and the checksum of each is verified every time, before its tokens are
used. Files are read, never mapped into memory: a file that is cut off under a map kills the process, a short read is
an error.
"""

import hashlib
import os
from collections import OrderedDict
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np

from packhorse.cache.chunk import Header, decode_block, decode_header, decode_index, unpack_tokens
from packhorse.cache.record import chunk_path
from packhorse.cache.regular import open_file
from packhorse.cache.snapshot import Snapshot
from packhorse.errors import CacheCorruptionError, CacheIncompleteError

OPEN_CHUNKS = 256
"""Chunk files that are kept open."""

Split = Literal["train", "eval"]

REPAIR = "`packhorse cache validate` says what else is damaged; `packhorse cache repair` makes it again."


@dataclass(frozen=True, kw_only=True)
class Sequences:
    """Some sequences of a cache."""

    tokens: np.ndarray
    """[n, sequence_length], in the narrowest unsigned integer that holds the vocabulary."""
    piece_lengths: list[np.ndarray]
    """For each sequence the lengths of its pieces, uint32; what is left of the sequence is padding."""
    repeated: list[np.ndarray] | None = None
    """With `packing: window`, for each piece how many of its first tokens another sequence has too, int64: they are
    context, and have no labels."""


class ChunkReader:
    """One open chunk file.

    Args:
        path: The file.
        chunk: The number it must have.
        recipe_digest: The recipe it must be of.
        index_sha256: What header and index must hash to, as its record says; None believes the file.

    Raises:
        CacheIncompleteError: the file does not exist.
        CacheCorruptionError: it is not the file that is meant.
    """

    def __init__(self, path: Path, chunk: int, recipe_digest: str, index_sha256: bytes | None) -> None:
        self.path = path
        try:
            self._descriptor = open_file(path)
        except FileNotFoundError:
            raise CacheIncompleteError(
                f"The file of chunk {chunk} is missing: {path}.\n`packhorse cache build` makes it again."
            ) from None
        size = os.fstat(self._descriptor).st_size
        head = os.pread(self._descriptor, 16_384, 0)
        self.header: Header = decode_header(head, path)
        if self.header.index_bytes > size:
            raise CacheCorruptionError(f"{path} is cut off: it has {size} bytes, less than its index.\n{REPAIR}")
        if len(head) < self.header.index_bytes:
            head = os.pread(self._descriptor, self.header.index_bytes, 0)
        head = head[: self.header.index_bytes]
        if index_sha256 is not None and hashlib.sha256(head).digest() != index_sha256:
            raise CacheCorruptionError(f"{path} is not the file that its record describes.\n{REPAIR}")
        if self.header.chunk != chunk or self.header.recipe != bytes.fromhex(recipe_digest)[:16]:
            raise CacheCorruptionError(f"{path} is a chunk of another place or another cache.\n{REPAIR}")
        offsets, checksums = decode_index(head, self.header, path)
        if size != int(offsets[-1]):
            raise CacheCorruptionError(f"{path} has {size} bytes, not {int(offsets[-1])}: it was cut off.\n{REPAIR}")
        self._offsets, self._checksums = offsets.tolist(), checksums.tolist()
        self._piece_ends: np.ndarray | None = None
        self._continued: np.ndarray | None = None
        self._last: tuple[int, bytes] = (-1, b"")

    def close(self) -> None:
        """Close the file."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1

    def __del__(self) -> None:
        # At the end of a process modules may be gone before their objects, and the file is closed without us.
        if hasattr(self, "_descriptor") and os is not None:
            self.close()

    def block(self, number: int) -> bytes:
        """The raw bytes of a block, verified."""
        start, stop = self._offsets[number], self._offsets[number + 1]
        try:
            return decode_block(
                os.pread(self._descriptor, stop - start, start),
                self._checksums[number],
                self.header.raw_bytes(number),
                self.header.compressed,
                self.path,
                number,
            )
        except CacheCorruptionError as error:
            raise CacheCorruptionError(f"{error}\n{REPAIR}") from None

    def tokens(self, row: int) -> np.ndarray:
        """The tokens of a sequence [sequence_length]; train sequences come first, then those for evaluation."""
        header = self.header
        length = header.sequence_length
        number, inside = divmod(row, header.rows_per_block)
        if self._last[0] != number:
            self._last = number, self.block(number)
        raw = self._last[1]
        rows = min(header.rows_per_block, header.num_sequences - number * header.rows_per_block)
        return unpack_tokens(raw, header.bits, rows * length, inside * length, (inside + 1) * length)

    def piece_lengths(self, row: int) -> np.ndarray:
        """The lengths of the pieces of a sequence, uint32."""
        if self._piece_ends is None:
            self._piece_ends = np.cumsum(self.side("pieces_per_sequence"), dtype=np.int64)
            self._piece_lengths = self.side("piece_lengths")
            total = int(self._piece_ends[-1]) if len(self._piece_ends) else 0
            if total != self.header.num_pieces:
                raise CacheCorruptionError(f"{self.path} is damaged: its pieces do not add up.\n{REPAIR}")
        start = int(self._piece_ends[row - 1]) if row else 0
        return self._piece_lengths[start : int(self._piece_ends[row])]

    def piece_documents(self, row: int) -> np.ndarray:
        """The document of each piece of a sequence, by its number in the chunk."""
        lengths = self.piece_lengths(row)
        assert self._piece_ends is not None
        start = int(self._piece_ends[row - 1]) if row else 0
        return self.side("piece_documents")[start : start + len(lengths)]

    def repeated(self, row: int, overlap: int) -> np.ndarray:
        """How many of the first tokens of each piece the document's piece before has too, int64.

        Args:
            row: The sequence.
            overlap: What the recipe says; nothing is repeated without one.
        """
        lengths = self.piece_lengths(row)
        if not overlap:
            return np.zeros(len(lengths), np.int64)
        if self._continued is None:
            documents = self.side("piece_documents")
            if len(documents) and int(documents.max()) >= self.header.num_documents:
                raise CacheCorruptionError(f"{self.path} is damaged: a piece is of no document.\n{REPAIR}")
            # Whole sequences of a document stand in order, and its rest, the one shorter piece, is its end.
            whole = np.flatnonzero(self._piece_lengths == self.header.sequence_length)
            firsts = whole[np.unique(documents[whole], return_index=True)[1]]
            self._continued = np.bincount(documents)[documents] > 1
            self._continued[firsts] = False
        start = int(self._piece_ends[row - 1]) if row else 0
        return self._continued[start : start + len(lengths)] * np.int64(overlap)

    def side(self, name: str) -> np.ndarray:
        """One of the arrays behind the tokens (see `chunk.py`)."""
        names = ("pieces_per_sequence", "piece_lengths", "piece_documents", "document_rows", "document_sides")
        number = names.index(name)
        raw = self.block(self.header.num_token_blocks + number)
        return np.frombuffer(raw, "u1" if number == 4 else "<u4")

    def all_tokens(self) -> np.ndarray:
        """The tokens of all sequences [num_sequences, sequence_length]."""
        header = self.header
        width = np.dtype("u1" if header.bits == 8 else "<u2" if header.bits == 16 else "<u4")
        tokens = np.empty((header.num_sequences, header.sequence_length), width)
        for number in range(header.num_token_blocks):
            first = number * header.rows_per_block
            part = tokens[first : first + header.rows_per_block]
            part[:] = unpack_tokens(self.block(number), header.bits, part.size, 0, part.size).reshape(part.shape)
        return tokens

    def damage(self) -> str:
        """Which blocks are damaged, in words; empty when none is."""
        header, damaged = self.header, []
        for number in range(header.num_blocks):
            try:
                self.block(number)
            except CacheCorruptionError:
                damaged.append(number)
        if not damaged:
            return ""
        words = []
        for number in damaged[:8]:
            first = number * header.rows_per_block
            last = min(first + header.rows_per_block, header.num_sequences) - 1
            words.append(f"{number} (sequences {first} to {last})" if number < header.num_token_blocks else f"{number}")
        more = ", ..." if len(damaged) > len(words) else ""
        return f"{len(damaged)} of {header.num_blocks} blocks do not match their checksum: {', '.join(words)}{more}"

    def content_digest(self) -> str:
        """SHA-256 of the payload, as in the record: reads and verifies everything."""
        digest = hashlib.sha256(os.pread(self._descriptor, 21, 28))
        for number in range(self.header.num_blocks):
            digest.update(self.block(number))
        return digest.hexdigest()


class SequenceReader:
    """Reads sequences of a snapshot by number. Can be pickled into the workers of a DataLoader.

    Args:
        folder: The cache.
        snapshot: What is read.
        recipe_digest: The recipe of the cache.
        sequence_length: As the recipe says.
        bits: Bits that a token is stored in.
        overlap: As the recipe says.
    """

    def __init__(
        self, folder: Path, snapshot: Snapshot, recipe_digest: str, sequence_length: int, bits: int, overlap: int = 0
    ) -> None:
        self.folder, self.snapshot, self.recipe_digest = folder, snapshot, recipe_digest
        self.sequence_length, self.bits, self.overlap = sequence_length, bits, overlap
        self.dtype = np.dtype("u1" if bits == 8 else "<u2" if bits == 16 else "<u4")
        self._open: OrderedDict[int, ChunkReader] = OrderedDict()

    def read(self, numbers: np.ndarray | list[int], split: Split = "train") -> Sequences:
        """Read sequences, in the order of `numbers`.

        Args:
            numbers: int64 [n], each from 0 to `snapshot.num_sequences(split)` - 1.
            split: Which side of the split.

        Raises:
            IndexError: there is no such sequence.
            CacheCorruptionError: a block is damaged; nothing of it was returned.
        """
        numbers = np.asarray(numbers, np.int64)
        chunks, rows = self.snapshot.locate(numbers, split)
        tokens = np.empty((len(numbers), self.sequence_length), self.dtype)
        lengths: list[np.ndarray] = [None] * len(numbers)  # type: ignore[list-item]
        repeated = lengths.copy() if self.overlap else None
        # Neighbours in a block are read once.
        for place in np.lexsort((rows, chunks)).tolist():
            reader = self.chunk(int(chunks[place]))
            row = int(rows[place]) + (reader.header.num_train if split == "eval" else 0)
            tokens[place] = reader.tokens(row)
            lengths[place] = reader.piece_lengths(row)
            if repeated is not None:
                repeated[place] = reader.repeated(row, self.overlap)
        return Sequences(tokens=tokens, piece_lengths=lengths, repeated=repeated)

    def chunk(self, number: int) -> ChunkReader:
        """The open file of a chunk."""
        reader = self._open.get(number)
        if reader is None:
            if number >= self.snapshot.num_chunks:
                raise CacheIncompleteError(f"Chunk {number} is not in the snapshot of {self.folder}.")
            row = self.snapshot.row(number)
            path = chunk_path(self.folder, number, bytes(row["file_sha256"].item()).hex())
            reader = ChunkReader(path, number, self.recipe_digest, bytes(row["index_sha256"].item()))
            header = reader.header
            if header.sequence_length != self.sequence_length or header.bits != self.bits:
                raise CacheCorruptionError(f"{path} holds sequences of another kind than its recipe says.\n{REPAIR}")
            if (header.num_train, header.num_eval) != (int(row["train"]), int(row["eval"])):
                raise CacheCorruptionError(f"{path} has other numbers of sequences than its record says.\n{REPAIR}")
            self._open[number] = reader
            if len(self._open) > OPEN_CHUNKS:
                self._open.popitem(last=False)[1].close()
        else:
            self._open.move_to_end(number)
        return reader

    def __getstate__(self) -> dict:
        return {**self.__dict__, "_open": OrderedDict()}
