"""Sequences <-> the bytes of one chunk file.

    offset  size  field
    0       8     magic               b"PACKHRS1"
    8       4     chunk number
    12      16    recipe              first 16 bytes of its SHA-256
    28      4     sequence length     in tokens
    32      4     train sequences     they come first
    36      4     eval sequences
    40      4     pieces
    44      4     documents
    48      1     bits of a token     8, 16, or 17 to 32
    49      1     codec               0 none, 1 LZ4
    50      2     rows per block
    52      4     CRC-32              of bytes 0 to 51
    56      8 n   index               for each of the n blocks: stored bytes (4), CRC-32 of what is stored (4)
    -       4     CRC-32              of the index
    -       -     blocks              one after the other, in the order of the index

Everything is little-endian and unsigned. The first blocks hold tokens, `rows per block` sequences each (about 8 KiB, so
that one sequence is read without its neighbours' cost). Ids are stored narrow: one byte, or two, or the low 16 bits of
all followed by one packed bit plane for each higher bit. Five more blocks describe what the sequences are made of, all
uint32 but the last:

    pieces per sequence    [train + eval]
    piece lengths          [pieces]
    piece documents        [pieces]      number of the piece's document in the chunk
    document rows          [documents]   its row in the chunk's source range
    document sides         [documents]   uint8, 1 for evaluation

A block that LZ4 cannot make smaller is stored as it is; it is the one whose stored size equals its raw size. The
checksum of a block is verified at every read, before LZ4 sees it: LZ4 itself lets most flipped bits through.
"""

import hashlib
import struct
import zlib
from collections.abc import Iterator
from dataclasses import dataclass

import lz4.block
import numpy as np

from packhorse.corpus.packing import Packed
from packhorse.errors import CacheCorruptionError

MAGIC = b"PACKHRS1"
HEADER = struct.Struct("<8sI16sIIIIIBBHI")
BLOCK_TOKENS = 4_096
MAX_BLOCK_BYTES = 2**30

LEVELS: dict[str, dict] = {
    "none": {},
    "fast": {"mode": "fast", "acceleration": 4},
    "default": {"mode": "default"},
    "max": {"mode": "high_compression", "compression": 3},
}


@dataclass(frozen=True, kw_only=True)
class ChunkContent:
    """What a chunk holds, ready to be stored."""

    train: Packed
    eval: Packed
    document_rows: np.ndarray
    """uint32 [num_documents]."""
    document_sides: np.ndarray
    """uint8 [num_documents]: 1 for evaluation."""


@dataclass(frozen=True, kw_only=True)
class Encoded:
    """A chunk file, and the hashes that its record needs."""

    parts: list[bytes | memoryview]
    """The file's bytes, in order."""
    num_bytes: int
    file_sha256: str
    payload_sha256: str
    """Over the raw blocks: the same whatever the codec."""
    index_sha256: str
    """Over header and index: they in turn fix every block by its checksum."""


@dataclass(frozen=True, kw_only=True)
class Header:
    """The first bytes of a chunk file, checked for sense."""

    chunk: int
    recipe: bytes
    sequence_length: int
    num_train: int
    num_eval: int
    num_pieces: int
    num_documents: int
    bits: int
    compressed: bool
    rows_per_block: int

    @property
    def num_sequences(self) -> int:
        """Train and eval."""
        return self.num_train + self.num_eval

    @property
    def num_token_blocks(self) -> int:
        """Blocks that hold tokens; five more follow."""
        return -(-self.num_sequences // self.rows_per_block)

    @property
    def num_blocks(self) -> int:
        """All blocks."""
        return self.num_token_blocks + 5

    @property
    def index_bytes(self) -> int:
        """Header, index, and the index's checksum."""
        return HEADER.size + 8 * self.num_blocks + 4

    def raw_bytes(self, block: int) -> int:
        """Size of a block before compression."""
        if block < self.num_token_blocks:
            rows = min(self.rows_per_block, self.num_sequences - block * self.rows_per_block)
            return stored_bytes(rows * self.sequence_length, self.bits)
        return (
            4 * self.num_sequences,
            4 * self.num_pieces,
            4 * self.num_pieces,
            4 * self.num_documents,
            self.num_documents,
        )[block - self.num_token_blocks]


def encode_chunk(content: ChunkContent, chunk: int, recipe_digest: str, vocab_size: int, compression: str) -> Encoded:
    """The file of a chunk: the same content gives the same payload, and under one codec version the same bytes."""
    length = content.train.tokens.shape[1]
    bits = token_bits(vocab_size)
    rows_per_block = max(1, BLOCK_TOKENS // length)
    raw = [pack_tokens(rows, bits) for rows in _rows(content.train.tokens, content.eval.tokens, rows_per_block)]
    both = (content.train, content.eval)
    piece_lengths = np.concatenate([p.piece_lengths for p in both])
    raw += [
        np.concatenate([p.pieces_per_sequence for p in both]).astype("<u4").tobytes(),
        piece_lengths.astype("<u4").tobytes(),
        np.concatenate([p.piece_documents for p in both]).astype("<u4").tobytes(),
        content.document_rows.astype("<u4").tobytes(),
        content.document_sides.astype("u1").tobytes(),
    ]
    stored = [compress(block, compression) for block in raw]
    header = HEADER.pack(
        MAGIC,
        chunk,
        bytes.fromhex(recipe_digest)[:16],
        length,
        len(content.train.tokens),
        len(content.eval.tokens),
        len(piece_lengths),
        len(content.document_rows),
        bits,
        int(compression != "none"),
        rows_per_block,
        0,
    )[:-4]
    header += struct.pack("<I", zlib.crc32(header))
    index = b"".join(struct.pack("<II", len(block), zlib.crc32(block)) for block in stored)
    head = header + index + struct.pack("<I", zlib.crc32(index))
    parts = [head, *stored]
    payload = hashlib.sha256(header[28:49])
    for block in raw:
        payload.update(block)
    file = hashlib.sha256()
    for part in parts:
        file.update(part)
    return Encoded(
        parts=parts,
        num_bytes=sum(map(len, parts)),
        file_sha256=file.hexdigest(),
        payload_sha256=payload.hexdigest(),
        index_sha256=hashlib.sha256(head).hexdigest(),
    )


def decode_header(data: bytes, where: object) -> Header:
    """Read the header.

    Raises:
        CacheCorruptionError: the bytes are not the beginning of a chunk file.
    """
    if len(data) < HEADER.size:
        raise CacheCorruptionError(f"{where} is cut off: it has {len(data)} bytes, less than a header.")
    fields = HEADER.unpack_from(data)
    if fields[0] != MAGIC:
        raise CacheCorruptionError(f"{where} is not a chunk file: it begins with {fields[0]!r}.")
    if fields[-1] != zlib.crc32(data[: HEADER.size - 4]):
        raise CacheCorruptionError(f"{where} is damaged: the checksum of its header does not match.")
    header = Header(
        chunk=fields[1],
        recipe=fields[2],
        sequence_length=fields[3],
        num_train=fields[4],
        num_eval=fields[5],
        num_pieces=fields[6],
        num_documents=fields[7],
        bits=fields[8],
        compressed=bool(fields[9]),
        rows_per_block=fields[10],
    )
    sensible = (
        0 < header.sequence_length <= 131_072
        and 0 < header.rows_per_block
        and (header.bits in (8, 16) or 17 <= header.bits <= 32)
        and fields[9] in (0, 1)
        and header.num_sequences <= header.num_pieces <= header.num_sequences * header.sequence_length
        and header.num_documents <= header.num_pieces
        and max(header.raw_bytes(b) for b in (0, *range(header.num_token_blocks, header.num_blocks))) < MAX_BLOCK_BYTES
    )
    if not sensible:
        raise CacheCorruptionError(f"{where} is damaged: its header makes no sense.")
    return header


def decode_index(data: bytes, header: Header, where: object) -> tuple[np.ndarray, np.ndarray]:
    """Where the blocks are.

    Args:
        data: The file's first `header.index_bytes` bytes.
        header: Its header.
        where: The file's path, for messages.

    Returns:
        offsets int64 [num_blocks + 1] in the file, checksums uint32 [num_blocks].

    Raises:
        CacheCorruptionError: the index is damaged.
    """
    index = data[HEADER.size : header.index_bytes - 4]
    if len(data) < header.index_bytes or zlib.crc32(index) != struct.unpack_from("<I", data, header.index_bytes - 4)[0]:
        raise CacheCorruptionError(f"{where} is damaged: the checksum of its index does not match.")
    table = np.frombuffer(index, "<u4").reshape(-1, 2)
    offsets = np.concatenate([[header.index_bytes], header.index_bytes + np.cumsum(table[:, 0], dtype=np.int64)])
    return offsets, table[:, 1]


def decode_block(stored: bytes, checksum: int, raw_bytes: int, compressed: bool, where: object, block: int) -> bytes:
    """The raw bytes of a block, after its checksum was verified.

    Raises:
        CacheCorruptionError: the block is damaged.
    """
    if zlib.crc32(stored) != checksum:
        raise CacheCorruptionError(
            f"{where} is damaged: the checksum of block {block} does not match. None of its tokens was used."
        )
    if compressed and len(stored) != raw_bytes:
        try:
            stored = lz4.block.decompress(stored, uncompressed_size=raw_bytes)
        except lz4.block.LZ4BlockError as error:
            raise CacheCorruptionError(f"{where} is damaged: block {block} cannot be decompressed ({error}).") from None
    if len(stored) != raw_bytes:
        raise CacheCorruptionError(f"{where} is damaged: block {block} has {len(stored)} bytes, not {raw_bytes}.")
    return stored


def token_bits(vocab_size: int) -> int:
    """Bits that a token is stored in: 8, 16, or as many as the vocabulary needs."""
    needed = max(1, (vocab_size - 1).bit_length())
    return 8 if needed <= 8 else max(16, needed)


def stored_bytes(num_tokens: int, bits: int) -> int:
    """Raw bytes of that many tokens."""
    if bits <= 16:
        return num_tokens * bits // 8
    return 2 * num_tokens + (bits - 16) * -(-num_tokens // 8)


def pack_tokens(tokens: np.ndarray, bits: int) -> bytes | memoryview:
    """Tokens [rows, length] -> raw bytes of a block; those of the array itself where they are just that."""
    flat = tokens.reshape(-1)
    if bits <= 16:
        return memoryview(flat.astype("u1" if bits == 8 else "<u2", copy=False)).cast("B")
    planes = [np.packbits((flat >> bit).astype("u1") & 1, bitorder="little").tobytes() for bit in range(16, bits)]
    return b"".join([flat.astype("<u2").tobytes(), *planes])


def unpack_tokens(raw: bytes, bits: int, num_tokens: int, start: int, stop: int) -> np.ndarray:
    """Tokens [start, stop) of a block of `num_tokens`, in the narrowest unsigned integer: uint8, uint16 or uint32."""
    if bits == 8:
        return np.frombuffer(raw, "u1", stop - start, start)
    low = np.frombuffer(raw, "<u2", stop - start, 2 * start)
    if bits == 16:
        return low
    tokens = low.astype(np.uint32)
    plane_bytes = -(-num_tokens // 8)
    first, last = start // 8, -(-stop // 8)
    for plane in range(bits - 16):
        packed = np.frombuffer(raw, "u1", last - first, 2 * num_tokens + plane * plane_bytes + first)
        ones = np.unpackbits(packed, bitorder="little")[start - 8 * first : stop - 8 * first]
        tokens |= ones.astype(np.uint32) << np.uint32(16 + plane)
    return tokens


def _rows(train: np.ndarray, evaluation: np.ndarray, count: int) -> Iterator[np.ndarray]:
    """`count` rows at a time of one below the other, without copying more than the rows at the border."""
    for start in range(0, len(train) + len(evaluation), count):
        stop = start + count
        first = train[start:stop]
        rest = evaluation[max(0, start - len(train)) : max(0, stop - len(train))]
        yield first if not len(rest) else rest if not len(first) else np.concatenate([first, rest])


def compress(block: bytes | memoryview, compression: str) -> bytes | memoryview:
    """A block as it is stored: compressed at a level of `LEVELS`, or as it is where that is not smaller."""
    if not block or compression == "none":
        return block
    smaller = lz4.block.compress(block, store_size=False, **LEVELS[compression])
    return smaller if len(smaller) < len(block) else block
