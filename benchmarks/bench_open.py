"""How long does a cache of a million chunks take to open, to the first row?

The index is synthetic: every chunk is the same few rows of text. Those that are touched have a file; of the others only
the index knows. Each opening is a fresh process, timed after its imports, and the sizes take turns:

    cache = Cache(folder)                  reads recipe.json, lists the index, the header of its last page
    cache.read([row])                      the headers on the way, one page of the index, one block of one chunk

    python benchmarks/bench_open.py
    python benchmarks/bench_open.py --chunks 1000 1000000 --rounds 15

On a busy machine look at the time of the processor (cpu). The last line is the slowest opening of the largest cache /
that of the smallest.
"""

import argparse
import dataclasses
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from unittest import mock

from report import median, print_header, print_result

from packhorse.cache import Cache, build_cache
from packhorse.cache.build import Builder, Job
from packhorse.cache.plan import Plan
from packhorse.cache.record import read_record
from packhorse.cache.snapshot import PAGE_CHUNKS, Index
from packhorse.corpus.documents import TextFile
from packhorse.corpus.sample import SampleCorpus
from packhorse.corpus.tokenizer import train_tokenizer

PACKAGES = ("numpy",)
PLACES = {"first": 0.0, "middle": 0.5, "last": 1.0}
"""Name of a row -> where in the cache it is."""

OPENING = """
import sys, time
import numpy, lz4.block
from packhorse.cache import Cache
folder, row = sys.argv[1:]
start, cpu = time.perf_counter(), time.process_time()
Cache(folder).read([int(row)])
print(time.perf_counter() - start, time.process_time() - cpu)
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--chunks", type=int, nargs="+", default=[1_000, 1_000_000])
    parser.add_argument("--rounds", type=int, default=9)
    options = parser.parse_args()
    print_header(*PACKAGES)
    with tempfile.TemporaryDirectory(prefix="bench_open-") as name:
        folders = {count: make_cache(Path(name), count) for count in sorted(options.chunks)}
        took: dict[tuple[int, str], list[tuple[float, float]]] = {}
        for _ in range(options.rounds):
            for count, folder in folders.items():
                for place, share in PLACES.items():
                    took.setdefault((count, place), []).append(seconds_to(folder, share))
    rows, slowest = [], []
    for count in folders:
        wall = {place: median([seconds for seconds, _ in took[count, place]]) * 1e3 for place in PLACES}
        cpu = max(median([seconds for _, seconds in took[count, place]]) * 1e3 for place in PLACES)
        slowest.append(max(wall.values()))
        places = ", ".join(f"{place} {milliseconds:.2f} ms" for place, milliseconds in wall.items())
        rows.append(f"{count:,} chunks: {places} (cpu at most {cpu:.2f} ms)")
        print(rows[-1], flush=True)
    print_result(rows, slowest[-1] / slowest[0], *PACKAGES)


def make_cache(folder: Path, count: int) -> Path:
    """A cache that says it has so many chunks."""
    tokenizer, source = folder / "tokenizer", folder / "text.jsonl"
    if not source.exists():
        texts = [str(text) for text in SampleCorpus(0.2)]
        source.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
        tokenizer.mkdir()
        for name, data in train_tokenizer(texts, 1_000).files.items():
            (tokenizer / name).write_bytes(data)
    cache = build_cache(str(source), tokenizer=str(tokenizer), cache_dir=str(folder / f"{count}"), eval_share=0)
    first, builder = read_record(cache.folder, 0), Builder(cache.folder, "hf", "default")
    ranges, file = Plan(cache.folder).entry(0), TextFile(path=str(source), kind="jsonl", column="text")
    touched = {int(share * (count - 1)) for share in PLACES.values()}
    for chunk in touched - {0}:
        builder.build(Job(chunk=chunk, ranges=ranges, files={0: file}))

    def read(_: Path, chunk: int):
        return read_record(cache.folder, chunk) if chunk in touched else dataclasses.replace(first, chunk=chunk)

    with mock.patch("packhorse.cache.snapshot.read_record", read):
        index = Index(cache.folder)
        while index.num_chunks < count:
            index.extend(min(count, index.num_chunks + PAGE_CHUNKS), lambda record: True)
    return cache.folder


def seconds_to(folder: Path, share: float) -> tuple[float, float]:
    """Open a cache in a fresh process and read a row: wall clock, and the processor's."""
    chunks = Cache(folder).snapshot.num_chunks
    rows = Cache(folder).num_sequences() // chunks
    command = [sys.executable, "-c", OPENING, str(folder), str(int(share * (chunks - 1)) * rows)]
    wall, cpu = subprocess.run(command, check=True, capture_output=True, text=True).stdout.split()
    return float(wall), float(cpu)


if __name__ == "__main__":
    main()
