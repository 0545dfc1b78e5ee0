"""What does it cost to fill a gap: one missing chunk in a hundred?

The yardstick is the building and committing of that chunk alone, in a process that has everything loaded. Against it:
`update_cache` in a fresh process after its imports (it reads recipe, plan and tokenizer, lists records and files,
builds the chunk, derives index and metadata again), and the whole command, from the shell and back.

    python benchmarks/bench_gap.py
    python benchmarks/bench_gap.py --source my.parquet --tokenizer gpt2/tokenizer.json --sequences-per-chunk 8000

The last line is the time of the gap / (the time of the chunk + 1 s).
"""

import argparse
import json
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict
from pathlib import Path

from report import median, print_header, print_result

from packhorse.cache import CacheSettings, open_cache, update_cache
from packhorse.cache.build import Builder, Job
from packhorse.cache.locations import Locations
from packhorse.cache.plan import Plan
from packhorse.cache.record import chunk_path, read_record, record_path
from packhorse.corpus.sample import SampleCorpus
from packhorse.corpus.sources import open_sources
from packhorse.corpus.tokenizer import train_tokenizer

PACKAGES = ("fastokens", "tokenizers", "lz4")

FILLING = """
import json, sys, time
from packhorse.cache import CacheSettings, update_cache
settings = CacheSettings(**json.loads(sys.argv[1]))
start = time.perf_counter()
update_cache(settings, quiet=True)
print(time.perf_counter() - start)
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--source", help="what a cache can be built from; by default the built-in sample")
    parser.add_argument("--tokenizer", help="a folder or a tokenizer.json; by default one is trained on the sample")
    parser.add_argument("--megabytes", type=float, default=20, help="how much of the sample, if that is the source")
    parser.add_argument("--sequence-length", type=int, default=512)
    parser.add_argument("--sequences-per-chunk", type=int, default=100)
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    print_header(*PACKAGES)
    with tempfile.TemporaryDirectory(prefix="bench_gap-") as name:
        settings = make_settings(options, Path(name))
        cache = update_cache(settings)
        number = cache.snapshot.num_chunks
        builder = Builder(cache.folder, "auto", settings.compression)
        chunk, gap, command = [], [], []
        for attempt in range(options.rounds + 1):
            lost = number * (attempt + 1) // (options.rounds + 2)
            times = (time_chunk(builder, settings, lost), time_gap(settings, lost), time_command(settings, lost))
            if attempt:  # the first loads what stays loaded
                for times_, seconds in zip((chunk, gap, command), times, strict=True):
                    times_.append(seconds)
    ratio = median(gap) / (median(chunk) + 1)
    rows = [
        f"one chunk of {number}: {median(chunk):.3f} s alone, {median(gap):.3f} s as a gap, "
        f"{median(command):.3f} s with the start of Python and all imports"
    ]
    print(rows[0])
    print_result(rows, ratio, *PACKAGES)


def time_chunk(builder: Builder, settings: CacheSettings, chunk: int) -> float:
    """Seconds that building and committing a chunk takes."""
    lose(builder.folder, chunk)
    plan = Plan(builder.folder)
    files = Locations(plan, open_sources(settings.source))
    entry = plan.entry(chunk)
    job = Job(chunk=chunk, ranges=entry, files={number: files.locate(number) for number, _, _ in entry})
    start = time.perf_counter()
    builder.build(job)
    return time.perf_counter() - start


def time_gap(settings: CacheSettings, chunk: int) -> float:
    """Seconds of `update_cache` in a fresh process, when that chunk is missing."""
    lose(open_cache(settings).folder, chunk)
    command = [sys.executable, "-c", FILLING, json.dumps(asdict(settings))]
    return float(subprocess.run(command, check=True, capture_output=True, text=True).stdout)


def time_command(settings: CacheSettings, chunk: int) -> float:
    """Seconds of the whole command."""
    lose(open_cache(settings).folder, chunk)
    command = [sys.executable, "-c", FILLING, json.dumps(asdict(settings))]
    start = time.perf_counter()
    subprocess.run(command, check=True, capture_output=True)
    return time.perf_counter() - start


def lose(folder: Path, chunk: int) -> None:
    """Remove a chunk: its file and its record."""
    chunk_path(folder, chunk, read_record(folder, chunk).file_sha256).unlink()
    record_path(folder, chunk).unlink()


def make_settings(options: argparse.Namespace, folder: Path) -> CacheSettings:
    """The cache to build; what is not given is made here."""
    source, tokenizer = options.source, options.tokenizer
    if source is None:
        source = str(folder / "text.jsonl")
        with open(source, "w") as file:
            file.writelines(json.dumps({"text": str(text)}) + "\n" for text in SampleCorpus(options.megabytes))
    if tokenizer is None:
        texts = [str(text) for text in SampleCorpus(1)]
        tokenizer = str(folder / "tokenizer")
        Path(tokenizer).mkdir()
        for name, data in train_tokenizer(texts, 4_096).files.items():
            (Path(tokenizer) / name).write_bytes(data)
    return CacheSettings(
        source=source,
        tokenizer=tokenizer,
        cache_dir=str(folder / "cache"),
        sequence_length=options.sequence_length,
        sequences_per_chunk=options.sequences_per_chunk,
    )


if __name__ == "__main__":
    main()
