"""How fast are random reads of rows, beside a numpy memmap of the same raw ids?

One process, rows of 512 tokens in an order without any locality, every checksum verified here and none there. The
memmap holds exactly the same rows in the narrowest type of numpy: uint16 for a vocabulary of GPT-2's size, uint32 for
one of Qwen's. Both lie in memory (the page cache), and both give a copy; here the lengths of the pieces come with it.

    memmap        np.stack([raw[n] for n in numbers]): how data sets on a memmap read (nanoGPT, Megatron)
    one gather    raw[numbers]: the fastest that numpy can; what is left is the speed of memory
    litdata       np.stack([data[n] for n in numbers]), if it is installed: see `peer_litdata.py`

The contestants take turns and the medians count. Opening is the time from nothing to the first row, after imports.

    python benchmarks/bench_read.py
    python benchmarks/bench_read.py --source my.parquet --tokenizer gpt2/tokenizer.json qwen3/tokenizer.json

Without --tokenizer, one is trained on the built-in sample, and its ids are spread over vocabularies of both sizes. The
last line is the lowest of the ratios ours / memmap.
"""

import argparse
import json
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import peer_litdata
from report import median, print_header, print_result

from packhorse.cache import Cache, build_cache
from packhorse.corpus.sample import SampleCorpus
from packhorse.corpus.tokenizer import train_tokenizer

PACKAGES = ("numpy", "lz4")
VOCABULARIES = {"gpt2-sized": 50_257, "qwen-sized": 151_669}
TRAINED_VOCABULARY = 8_192
BATCH_SIZES = (8, 64)

Read = Callable[[np.ndarray], np.ndarray]
"""Numbers of rows -> the rows."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--source", help="what a cache can be built from; by default the built-in sample")
    parser.add_argument("--text-column", default="text")
    parser.add_argument("--tokenizer", nargs="+", help="folders or tokenizer.json files")
    parser.add_argument("--sequence-length", type=int, default=512)
    parser.add_argument("--megabytes", type=float, default=20, help="how much of the sample, if that is the source")
    parser.add_argument("--seconds", type=float, default=0.5, help="a turn of a contestant takes about so long")
    parser.add_argument("--rounds", type=int, default=9)
    options = parser.parse_args()
    packages = (*PACKAGES, "litdata") if peer_litdata.is_installed() else PACKAGES
    print_header(*packages)
    rows: list[str] = []
    ratios: list[float] = []
    with tempfile.TemporaryDirectory(prefix="bench_read-") as name:
        folder = Path(name)
        for label, tokenizer in tokenizers(options, folder):
            cache = build_cache(
                options.source or SampleCorpus(options.megabytes),
                tokenizer=str(tokenizer),
                text_column=options.text_column,
                sequence_length=options.sequence_length,
                cache_dir=str(folder / label),
            )
            raw = write_raw(cache, folder / f"{label}.bin")
            contestants = {
                "ours": lambda numbers, cache=cache: cache.read(numbers).tokens,
                "memmap": lambda numbers, raw=raw: np.stack([raw[number] for number in numbers]),
                "one gather": lambda numbers, raw=raw: raw[numbers],
            }
            if peer_litdata.is_installed():
                contestants["litdata"] = peer_litdata.write_rows(raw, folder / f"{label}.litdata")
            check_same_rows(contestants, len(raw))
            size = f"{len(raw):,} rows of {cache.sequence_length} {raw.dtype}, vocabulary {cache.vocab_size:,}"
            print(f"\n{label}: {size}", flush=True)
            rows.append(f"{label}: {size}")
            for batch_size in BATCH_SIZES:
                speeds = compare_reads(contestants, raw.shape, batch_size, options.seconds, options.rounds)
                ratios.append(speeds["ours"] / speeds["memmap"])
                told = ", ".join(f"{name} {speed:.1f}" for name, speed in speeds.items())
                rows.append(f"batches of {batch_size}: {told} M tokens/s, ratio {ratios[-1]:.3f}")
                print(rows[-1], flush=True)
            ours, memmap = compare_opening(cache, raw, options.rounds)
            rows.append(f"opening to the first row: ours {ours * 1e3:.2f} ms, memmap {memmap * 1e3:.2f} ms")
            print(rows[-1], flush=True)
    print_result(rows, min(ratios), *packages)


def compare_reads(
    contestants: dict[str, Read], shape: tuple[int, int], batch_size: int, seconds: float, rounds: int
) -> dict[str, float]:
    """Millions of tokens per second of each contestant."""
    order = np.random.default_rng(0).permutation(shape[0])
    batches = [order[i : i + batch_size] for i in range(0, len(order) - batch_size + 1, batch_size)]
    speeds: dict[str, list[float]] = {name: [] for name in contestants}
    for attempt in range(rounds + 1):
        for name, read in contestants.items():
            count = 0
            start = now = time.perf_counter()
            while now - start < seconds:
                for _ in range(8):  # the clock is not asked after every batch
                    read(batches[count % len(batches)])
                    count += 1
                now = time.perf_counter()
            if attempt:  # the first turn opens files and fills caches
                speeds[name].append(count * batch_size * shape[1] / (now - start) / 1e6)
    return {name: median(speed) for name, speed in speeds.items()}


def compare_opening(cache: Cache, raw: np.memmap, rounds: int) -> list[float]:
    """Seconds from nothing to the first row, of both."""
    folder, path, shape, dtype = cache.folder, raw.filename, raw.shape, raw.dtype
    row = len(raw) // 2
    contestants: list[Callable] = [
        lambda: Cache(folder).read([row]).tokens,
        lambda: np.memmap(path, dtype, "r", shape=shape)[[row]],
    ]
    seconds: list[list[float]] = [[], []]
    for _ in range(rounds):
        for open_and_read, took in zip(contestants, seconds, strict=True):
            start = time.perf_counter()
            open_and_read()
            took.append(time.perf_counter() - start)
    return [median(took) for took in seconds]


def write_raw(cache: Cache, path: Path) -> np.memmap:
    """The train rows of a cache as raw ids in one file, in the order of the cache."""
    count = cache.num_sequences()
    with path.open("wb") as file:
        for start in range(0, count, 1_000):
            file.write(cache.read(np.arange(start, min(start + 1_000, count))).tokens.tobytes())
    return np.memmap(path, cache.read([0]).tokens.dtype, "r", shape=(count, cache.sequence_length))


def check_same_rows(contestants: dict[str, Read], count: int) -> None:
    numbers = np.random.default_rng(1).integers(count, size=256)
    rows = [read(numbers) for read in contestants.values()]
    if not all(np.array_equal(some, rows[0]) for some in rows):
        raise SystemExit("The contestants do not hold the same rows.")


def tokenizers(options: argparse.Namespace, folder: Path) -> list[tuple[str, Path]]:
    """Names and tokenizers; without any, one that is trained here, in both sizes."""
    if options.tokenizer:
        return [(_name(Path(tokenizer)), Path(tokenizer)) for tokenizer in options.tokenizer]
    content = json.loads(train_tokenizer(SampleCorpus(megabytes=4), TRAINED_VOCABULARY).json)
    made = []
    for label, size in VOCABULARIES.items():
        path = folder / f"tokenizer-{label}.json"
        path.write_text(json.dumps(_spread(content, size)))
        made.append((label, path))
    return made


def _name(path: Path) -> str:
    return path.parent.name if path.name == "tokenizer.json" else path.stem


def _spread(content: dict, size: int) -> dict:
    """The same tokenizer with its ids spread over a larger vocabulary: frequent tokens keep the lower ids."""
    vocabulary = content["model"]["vocab"]
    last = max(vocabulary.values())
    added = [{**token, "id": token["id"] * (size - 1) // last} for token in content["added_tokens"]]
    model = {**content["model"], "vocab": {token: i * (size - 1) // last for token, i in vocabulary.items()}}
    return {**content, "model": model, "added_tokens": added}


if __name__ == "__main__":
    main()
