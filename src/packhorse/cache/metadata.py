"""Records -> metadata.json: a page for people, and for scripts that only want to look.

Every figure is a sum over commit records; docs/cache.md says what each means. Nothing is ever read from the file but to
check it, and no name in it ever becomes a path.
"""

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

from packhorse.cache import store
from packhorse.cache.cache import summarise
from packhorse.cache.chunk import token_bits
from packhorse.cache.plan import Plan
from packhorse.cache.recipe import Recipe, read_identity
from packhorse.cache.regular import read_file
from packhorse.cache.snapshot import Index, Snapshot
from packhorse.errors import CacheCorruptionError

MAX_BYTES = 16 * 2**20
"""A larger metadata.json is refused unread."""


def metadata_of(folder: Path, recipe: Recipe, num_chunks: int) -> bytes:
    """What metadata.json says of the first `num_chunks` chunks."""
    summary = summarise(folder, num_chunks, recipe.sequence_length)
    snapshot, bits = Snapshot(Index(folder), num_chunks), token_bits(recipe.vocab_size)
    distinct, train_documents = summary.tokens - summary.repeated_tokens, summary.documents - summary.eval_documents
    value = {
        "version": recipe.format,
        "model_name": read_identity(folder).tokenizer_name,
        "tokenizer_fingerprint": recipe.tokenizer,
        "vocab_size": recipe.vocab_size,
        "special_tokens": {
            "bos_id": recipe.bos_id,
            "eos_id": recipe.eos_id,
            "pad_id": recipe.pad_id,
            "split_special_tokens": recipe.split_special_tokens,
        },
        "packing": {
            "strategy": recipe.packing,
            "overlap": recipe.overlap,
            "long_documents": recipe.long_documents,
        },
        "max_length": recipe.sequence_length,
        "dtype": "uint8" if bits == 8 else "uint16" if bits == 16 else "uint32",
        "bits_per_token": bits,
        "compression_enabled": summary.compressed_chunks > 0,
        "sources": _sources(Plan(folder), num_chunks),
        "total_chunks": summary.chunks,
        "total_sequences": summary.train_sequences + summary.eval_sequences,
        "train": _side(summary.train_sequences, snapshot.totals.train_tokens, train_documents),
        "eval": _side(summary.eval_sequences, snapshot.totals.eval_tokens, summary.eval_documents),
        "sizes": {
            "text_bytes": summary.text_bytes,
            "file_bytes": summary.file_bytes,
            "bytes_per_token": round(summary.bytes_per_token, 4),
        },
        "utilization_stats": {
            "avg_utilization": round(summary.utilisation, 6),
            "total_tokens": summary.tokens,
            "total_slots": summary.slots,
            "efficiency_ratio": round(distinct / summary.slots, 6) if summary.slots else 1.0,
        },
        "recipe": recipe.canonical,
        "snapshot": snapshot.digest,
        "summary": asdict(summary),
    }
    return json.dumps(value, indent=2).encode() + b"\n"


def _side(sequences: int, tokens: int, documents: int) -> dict[str, int]:
    return {"sequences": sequences, "tokens": tokens, "documents": documents}


def _sources(plan: Plan, num_chunks: int) -> list[dict[str, Any]]:
    """What the chunks were made from, in the order of the plan."""
    files = {number: plan.files[number] for chunk in range(num_chunks) for number, _, _ in plan.entry(chunk)}
    sources: dict[str, dict[str, Any]] = {}
    sizes: dict[str, dict[str, int]] = {}
    for _, file in sorted(files.items()):
        value = sources.setdefault(file.source, {"source": file.source, "files": 0, "bytes": 0, "documents": 0})
        if file.packed == "stream":
            value["documents"] += file.size  # the size of a part of a stream
            continue
        # A file to which lines were appended is planned again as a longer one, and still is one file.
        own = sizes.setdefault(file.source, {})
        own[file.path] = file.size
        value["files"], value["bytes"] = len(own), sum(own.values())
    return list(sources.values())


def write_metadata(folder: Path, recipe: Recipe, num_chunks: int) -> None:
    """Write metadata.json anew."""
    store.replace(folder / "metadata.json", metadata_of(folder, recipe, num_chunks))


def check_metadata(folder: Path, recipe: Recipe, num_chunks: int) -> None:
    """Compare metadata.json with the records; it may be of fewer chunks than there are now.

    Raises:
        FileNotFoundError: there is none.
        CacheCorruptionError: it is damaged, or says something else.
    """
    path = folder / "metadata.json"
    try:
        data = read_file(path, MAX_BYTES)
        chunks = json.loads(data)["summary"]["chunks"]
        if type(chunks) is not int or not 0 <= chunks <= num_chunks:
            raise ValueError(f"it is of {chunks!r:.20} chunks, and there are {num_chunks}")
        if data != metadata_of(folder, recipe, chunks):
            raise ValueError("it says something else than the records")
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise CacheCorruptionError(f"{path} is damaged: {error}.") from None
