"""`packhorse cache validate`."""

from pathlib import Path

from packhorse.cache.commands.outcome import Outcome
from packhorse.cache.reader import ChunkReader
from packhorse.cache.record import chunk_path, committed_chunks, read_record
from packhorse.cache.settings import CacheSettings
from packhorse.cache.update import open_cache
from packhorse.errors import CacheError, CacheIncompleteError


def validate(where: CacheSettings | Path) -> Outcome:
    """Read every chunk and verify every hash. Changes nothing. Exit status 1 when something is damaged."""
    cache = open_cache(where)
    folder = cache.folder
    # What the index knows must have its record; what is only planned need not be there yet.
    chunks = sorted({*committed_chunks(folder), *range(cache.snapshot.num_chunks)})
    damaged: dict[int, str] = {}
    for chunk in chunks:
        try:
            record = read_record(folder, chunk)
            path = chunk_path(folder, chunk, record.file_sha256)
            reader = ChunkReader(path, chunk, cache.recipe.digest, bytes.fromhex(record.index_sha256))
            if reader.content_digest() != record.payload_sha256:
                raise CacheIncompleteError(f"{path} holds other tokens than its record says.")
        except FileNotFoundError as error:
            damaged[chunk] = f"{error.filename} is missing. `packhorse cache build` makes it again."
        except CacheError as error:
            damaged[chunk] = str(error)
    verdict = "all hashes verified" if not damaged else f"{len(damaged)} damaged"
    lines = [f"{len(chunks) - len(damaged)}/{len(chunks)} chunks, {verdict}"]
    lines += [f"chunk {chunk}: {text}" for chunk, text in damaged.items()]
    # No sums here: they would need the records that may be damaged.
    values = {"folder": str(folder), "chunks": len(chunks), "damaged": damaged}
    return Outcome(lines=lines, values=values, status=1 if damaged else 0)
