"""The least that a build must do, each stage alone and on one core: what nobody who makes such files can go below.

read        parquet -> Python strings
encode      the fast engine alone, without its comparison with the reference
compress    LZ4 of blocks of 4,096 narrow ids
hash        SHA-256 of what is stored
write       to a file, in pieces of 512 KiB, synced once a chunk

No split, no end-of-text tokens, no packing, no lineage, no checksums of blocks, no records, no reading back.
"""

import hashlib
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np

from packhorse.cache.chunk import BLOCK_TOKENS, compress
from packhorse.cache.store import WRITE_BYTES
from packhorse.cache.workers import pin, usable_cores
from packhorse.corpus.documents import Skipped, TextFile, file_length, read_documents
from packhorse.corpus.engines import load_fastokens, make_engine
from packhorse.corpus.tokens import narrowest

STAGES = ("read", "encode", "compress", "hash", "write")


def stage_seconds(
    source: Path, tokenizer_json: Path, vocab_size: int, chunk_bytes: int, folder: Path
) -> dict[str, float]:
    """Seconds that each stage takes for a parquet file.

    Args:
        source: Its column is `text`.
        tokenizer_json: What tokenizes.
        vocab_size: Decides how narrow ids are.
        chunk_bytes: Text between two syncs.
        folder: Where to write; on the disk of the build that this is compared with.
    """
    before = os.sched_getaffinity(0)
    pin(usable_cores()[0])
    try:
        return _measure(source, tokenizer_json, vocab_size, chunk_bytes, folder)
    finally:
        os.sched_setaffinity(0, before)


def _measure(source: Path, tokenizer_json: Path, vocab_size: int, chunk_bytes: int, folder: Path) -> dict[str, float]:
    load_fastokens.cache_clear()  # one that has seen this text before would remember its words
    engine, _ = make_engine("auto", tokenizer_json.read_text(), True, str(tokenizer_json.parent))
    engine = getattr(engine, "bare", engine)
    engine.encode(["warm up"] * 100)
    seconds, digest, kind = dict.fromkeys(STAGES, 0.0), hashlib.sha256(), narrowest(vocab_size)
    file = TextFile(path=str(source), kind="parquet", column="text")
    documents = read_documents(file, 0, file_length(file), Skipped())
    unsynced = 0
    with (folder / "floor").open("wb", buffering=0) as out:
        while True:
            with _timed(seconds, "read"):
                batch = next(documents, None)
            if batch is None:
                break
            with _timed(seconds, "encode"):
                ids = engine.encode(batch.texts)[0].astype(kind)
            with _timed(seconds, "compress"):
                blocks = [bytes(compress(block.tobytes(), "default")) for block in _blocks(ids)]
            with _timed(seconds, "hash"):
                for block in blocks:
                    digest.update(block)
            unsynced += sum(len(text) for text in batch.texts)
            with _timed(seconds, "write"):
                data = b"".join(blocks)
                for start in range(0, len(data), WRITE_BYTES):
                    out.write(data[start : start + WRITE_BYTES])
                if unsynced >= chunk_bytes:
                    os.fsync(out.fileno())
                    unsynced = 0
        with _timed(seconds, "write"):
            os.fsync(out.fileno())
    (folder / "floor").unlink()
    return seconds


def _blocks(ids: np.ndarray) -> Iterator[np.ndarray]:
    return (ids[start : start + BLOCK_TOKENS] for start in range(0, len(ids), BLOCK_TOKENS))


@contextmanager
def _timed(seconds: dict[str, float], stage: str) -> Iterator[None]:
    start = time.perf_counter()
    yield
    seconds[stage] += time.perf_counter() - start
