"""Laws of chunk files: what is packed comes back, and nothing that was damaged ever does."""

import os

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from packhorse.cache.chunk import (
    LEVELS,
    ChunkContent,
    decode_header,
    encode_chunk,
    pack_tokens,
    stored_bytes,
    token_bits,
    unpack_tokens,
)
from packhorse.cache.reader import ChunkReader
from packhorse.corpus.packing import pack
from packhorse.errors import CacheCorruptionError, CacheError

RECIPE = "ab" * 32


@settings(max_examples=150, deadline=None)
@given(data=st.data())
def test_tokens_of_every_width_come_back_whole_and_in_part(data):
    vocab_size = data.draw(
        st.sampled_from([2, 200, 256, 257, 50_257, 65_536, 65_537, 128_256, 151_669, 262_144, 2**32])
    )
    rows, length = data.draw(st.integers(1, 5)), data.draw(st.integers(2, 40))
    bits = token_bits(vocab_size)
    seed = data.draw(st.integers(0, 2**32))
    tokens = np.random.default_rng(seed).integers(0, vocab_size, (rows, length), dtype=np.uint32)
    tokens[0, 0], tokens[-1, -1] = vocab_size - 1, 0
    raw = pack_tokens(tokens, bits)
    assert len(raw) == stored_bytes(rows * length, bits)
    start = data.draw(st.integers(0, rows * length))
    stop = data.draw(st.integers(start, rows * length))
    assert np.array_equal(unpack_tokens(raw, bits, rows * length, start, stop), tokens.reshape(-1)[start:stop])


@pytest.mark.parametrize(
    ("vocab_size", "bits"), [(1, 8), (256, 8), (257, 16), (65_536, 16), (65_537, 17), (131_072, 17), (151_669, 18)]
)
def test_tokens_are_stored_in_the_narrowest_width(vocab_size, bits):
    assert token_bits(vocab_size) == bits


def some_content(vocab_size: int, length: int = 8, documents: int = 12) -> ChunkContent:
    draw = np.random.default_rng(vocab_size)
    lengths = draw.integers(1, 3 * length, documents)
    ids = draw.integers(0, vocab_size, int(lengths.sum()), dtype=np.uint32)
    return ChunkContent(
        train=pack("best_fit", ids, np.cumsum(lengths), length, 0),
        eval=pack("best_fit", ids[:5], np.array([2, 5]), length, 0),
        document_rows=np.arange(documents, dtype=np.uint32),
        document_sides=np.zeros(documents, np.uint8),
    )


def write_chunk(path, vocab_size=300, compression="default", chunk=3, content=None):
    encoded = encode_chunk(content or some_content(vocab_size), chunk, RECIPE, vocab_size, compression)
    path.write_bytes(b"".join(encoded.parts))
    return encoded


def read_all(path, index_sha256: bytes | None = None, chunk: int = 3):
    """Everything that a chunk holds."""
    reader = ChunkReader(path, chunk, RECIPE, index_sha256)
    rows = range(reader.header.num_sequences)
    return (
        [reader.tokens(row).tolist() for row in rows],
        [reader.piece_lengths(row).tolist() for row in rows],
        [reader.piece_documents(row).tolist() for row in rows],
        reader.side("document_rows").tolist(),
        reader.side("document_sides").tolist(),
    )


@pytest.mark.parametrize("compression", LEVELS)
@pytest.mark.parametrize("vocab_size", [200, 50_257, 100_000, 151_669])
def test_a_chunk_comes_back_as_it_was(tmp_path, vocab_size, compression):
    content = some_content(vocab_size, length=100, documents=300)
    encoded = write_chunk(tmp_path / "c", vocab_size, compression, content=content)
    tokens, lengths, documents, rows, sides = read_all(tmp_path / "c", bytes.fromhex(encoded.index_sha256))
    assert tokens == [*content.train.tokens.tolist(), *content.eval.tokens.tolist()]
    assert [i for own in lengths for i in own] == [*content.train.piece_lengths, *content.eval.piece_lengths]
    assert [i for own in documents for i in own] == [*content.train.piece_documents, *content.eval.piece_documents]
    assert (rows, sides) == (content.document_rows.tolist(), content.document_sides.tolist())
    assert ChunkReader(tmp_path / "c", 3, RECIPE, None).content_digest() == encoded.payload_sha256


def test_the_payload_hash_is_the_same_for_every_codec():
    hashes = {encode_chunk(some_content(300), 3, RECIPE, 300, level).payload_sha256 for level in LEVELS}
    assert len(hashes) == 1


def test_a_chunk_without_sequences_is_a_chunk(tmp_path):
    nothing = pack("best_fit", np.empty(0, np.uint32), np.empty(0, np.int64), 8, 0)
    empty = np.empty(0, np.uint32)
    content = ChunkContent(train=nothing, eval=nothing, document_rows=empty, document_sides=empty.astype(np.uint8))
    write_chunk(tmp_path / "c", content=content)
    assert read_all(tmp_path / "c") == ([], [], [], [], [])


@pytest.mark.parametrize(("vocab_size", "compression"), [(300, "none"), (300, "default"), (100_000, "default")])
@pytest.mark.parametrize("believes_record", [True, False])
def test_every_flipped_byte_of_a_chunk_is_refused(tmp_path, vocab_size, compression, believes_record):
    encoded = write_chunk(tmp_path / "c", vocab_size, compression)
    index_sha256 = bytes.fromhex(encoded.index_sha256) if believes_record else None
    data = (tmp_path / "c").read_bytes()
    with (tmp_path / "c").open("r+b", buffering=0) as file:
        for place in range(len(data)):
            for mask in (0x01, 0x80):
                os.pwrite(file.fileno(), bytes([data[place] ^ mask]), place)
                with pytest.raises(CacheCorruptionError):
                    read_all(tmp_path / "c", index_sha256)
            os.pwrite(file.fileno(), data[place : place + 1], place)
    assert read_all(tmp_path / "c", index_sha256)


@pytest.mark.parametrize("believes_record", [True, False])
def test_every_truncation_and_every_appended_byte_of_a_chunk_is_refused(tmp_path, believes_record):
    encoded = write_chunk(tmp_path / "c")
    index_sha256 = bytes.fromhex(encoded.index_sha256) if believes_record else None
    size = (tmp_path / "c").stat().st_size
    for wrong_size in [size + 1, 2 * size, *reversed(range(size))]:
        os.truncate(tmp_path / "c", wrong_size)
        with pytest.raises(CacheCorruptionError):
            read_all(tmp_path / "c", index_sha256)


def test_a_block_whose_checksum_was_mended_is_still_refused_by_the_record(tmp_path):
    """Somebody who writes a consistent but other file is found out by the hash in the record."""
    path = tmp_path / "c"
    encoded = write_chunk(path)
    write_chunk(path, content=some_content(299))
    assert read_all(path)  # consistent in itself
    with pytest.raises(CacheCorruptionError, match="not the file that its record describes"):
        read_all(path, bytes.fromhex(encoded.index_sha256))


def test_a_chunk_of_another_number_or_another_recipe_is_refused(tmp_path):
    write_chunk(tmp_path / "c")
    with pytest.raises(CacheCorruptionError, match="another place"):
        ChunkReader(tmp_path / "c", 4, RECIPE, None)
    with pytest.raises(CacheCorruptionError, match="another cache"):
        ChunkReader(tmp_path / "c", 3, "cd" * 32, None)


def test_a_header_that_promises_gigabytes_is_refused_before_memory_is_taken(tmp_path):
    import struct
    import zlib

    from packhorse.cache.chunk import HEADER, MAGIC

    numbers = (3, bytes.fromhex(RECIPE)[:16], 2, 2**32 - 1, 2**32 - 1, 2**32 - 1, 1, 16, 1, 1)
    head = HEADER.pack(MAGIC, *numbers, 0)[:-4]
    (tmp_path / "c").write_bytes(head + struct.pack("<I", zlib.crc32(head)) + bytes(1_000))
    with pytest.raises(CacheError):
        read_all(tmp_path / "c")
    with pytest.raises(CacheCorruptionError, match="header"):
        decode_header(b"PACK", "a file")
