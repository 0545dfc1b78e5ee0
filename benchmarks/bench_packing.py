"""How much of the sequences holds tokens, and how fast are they packed?

A cache is built of a source for each sequence length, and its records say how much of it is padding: borders of chunks
and the split are in it, as in real life. The speed is that of packing alone, single-threaded, of all documents at once,
in processor time. `concat`, which wastes nothing and cuts anywhere, is measured in turns beside it.

    python benchmarks/bench_packing.py --source my.parquet --tokenizer folder/tokenizer.json

Without --source it takes the built-in sample, without --tokenizer it trains one on that. The last line is the
utilisation of `best_fit` at the first length.
"""

import argparse
import tempfile
import time
from pathlib import Path

import numpy as np
from bench_build import prepare_tokenizer
from report import median, print_header, print_result

from packhorse.cache import Cache, CacheSettings, update_cache
from packhorse.corpus.packing import pack

PACKAGES = ("numpy", "fastokens")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--source", default="sample", help="a parquet or jsonl file, or `sample`")
    parser.add_argument("--tokenizer", help="a folder or a tokenizer.json; by default one is trained on the sample")
    parser.add_argument("--text-column", default="text")
    parser.add_argument("--lengths", type=int, nargs="+", default=[512, 2_048, 8_192, 131_072])
    parser.add_argument("--max-documents", type=int)
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    print_header(*PACKAGES)
    rows, shares = [], []
    with tempfile.TemporaryDirectory(prefix="bench_packing-") as name:
        folder = Path(name)
        tokenizer = prepare_tokenizer(options.tokenizer, folder)
        for length in options.lengths:
            settings = CacheSettings(
                source=options.source,
                text_column=options.text_column,
                tokenizer=str(tokenizer),
                sequence_length=length,
                max_documents=options.max_documents,
                cache_dir=str(folder / "cache"),
            )
            cache = update_cache(settings, quiet=True)
            summary = cache.summary
            speeds = measure_speeds(document_lengths(cache), length, options.rounds)
            shares.append(summary.utilisation)
            rows.append(
                f"{length}: utilisation {summary.utilisation:.2%}, {summary.cut_documents / summary.documents:.0%} of "
                f"documents cut, {summary.chunks} chunks; best_fit {speeds['best_fit'] / 1e6:.0f}, "
                f"concat {speeds['concat'] / 1e6:.0f} M tokens/s"
            )
            print(rows[-1], flush=True)
    print_result(rows, shares[0], *PACKAGES)


def document_lengths(cache: Cache) -> np.ndarray:
    """Tokens of every document, from the pieces of all chunks."""
    lengths = []
    for number in range(cache.snapshot.num_chunks):
        chunk = cache.chunk(number)
        sums = np.bincount(chunk.side("piece_documents"), weights=chunk.side("piece_lengths"))
        lengths.append(sums.astype(np.int64))
    return np.concatenate(lengths)


def measure_speeds(lengths: np.ndarray, sequence_length: int, rounds: int) -> dict[str, float]:
    """Tokens per second of processor time."""
    ids, ends = np.zeros(lengths.sum(), np.uint16), np.cumsum(lengths)
    seconds: dict[str, list[float]] = {"best_fit": [], "concat": []}
    for _ in range(rounds):
        for kind, own in seconds.items():
            begin = time.process_time()
            pack(kind, ids, ends, sequence_length, 0)
            own.append(time.process_time() - begin)
    return {kind: len(ids) / max(median(own), 1e-9) for kind, own in seconds.items()}


if __name__ == "__main__":
    main()
