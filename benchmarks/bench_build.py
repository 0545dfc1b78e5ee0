"""How much faster is a cache build than `datasets.map` + grouping + `torch.save`?

Both read the same file with the same tokenizer on the same number of processes, in turns, and the medians count. Four
modes, four questions:

whole     A user types the command. Both sides are a subprocess with all of its start-up and a fresh folder: here
          `packhorse cache build`, there `peer_datasets.py`.

steady    A long job, start-up on neither side. At least 300 MB of text in which rare words do not come back (see
          `varied_text.py`), 16 chunks or more. Here: the clock starts when the first chunk is committed and stops with
          the last commit; the first chunk of every worker is not counted. Reading, packing, LZ4, SHA-256, fsync and
          the wait for the slowest worker are in it. There: the two maps and
          `torch.save` on a slice of the same text (the whole would take minutes), after both maps ran on a few
          documents; what they cost on a few documents (starting processes) is subtracted, and loading the file into
          `datasets` is left out, so the peer is measured at its best.

workers   The rate of a long job with --workers builders against one, in turns; both must give the same payloads.

floor     The rate of a long job against `floor.py`: reading, encoding, LZ4, SHA-256, write and fsync, each alone on one
          core in the same run, times the number of builders. The ratio is at most 1. Both begin with a fresh engine.

    python benchmarks/bench_build.py --mode whole --source my.parquet --tokenizer folder/tokenizer.json
    python benchmarks/bench_build.py --mode steady
    python benchmarks/bench_build.py --mode workers --source my.parquet --tokenizer folder/tokenizer.json
    python benchmarks/bench_build.py --mode floor --source my.parquet --tokenizer folder/tokenizer.json

Without --source it takes the built-in sample, without --tokenizer it trains one on that. Both sides must come to the
same number of tokens, or nothing is reported. The last line is the ratio of the speeds, ours / peer.
"""

import argparse
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
from floor import stage_seconds
from report import as_installed, median, print_header, print_result
from varied_text import vary

from packhorse.cache import Cache, CacheSettings, staff, update_cache
from packhorse.corpus.documents import Skipped, file_length, read_documents
from packhorse.corpus.engines import load_fastokens
from packhorse.corpus.sample import SampleCorpus
from packhorse.corpus.sources import Files, open_sources
from packhorse.corpus.tokenizer import locate_tokenizer, read_tokenizer, train_tokenizer

PACKAGES = ("datasets", "fastokens", "tokenizers", "torch", "transformers")
TRAINED_VOCABULARY = 8_192
MIN_CHUNKS = 16


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mode", choices=["whole", "steady", "workers", "floor"], default="whole")
    parser.add_argument("--source", default="sample", help="a parquet or jsonl file, or `sample`")
    parser.add_argument("--tokenizer", help="a folder or a tokenizer.json; by default one is trained on the sample")
    parser.add_argument("--text-column", default="text")
    parser.add_argument("--sequence-length", type=int, default=512)
    parser.add_argument("--megabytes", type=float, help="text to build from: by default all (whole) or 320 (steady)")
    parser.add_argument("--peer-megabytes", type=float, default=30, help="steady: text for the peer")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    print_header(*PACKAGES)
    with tempfile.TemporaryDirectory(prefix="bench_build-") as name:
        folder = Path(name)
        options.tokenizer_json = prepare_tokenizer(options.tokenizer, folder)
        options.eos_id = read_tokenizer(options.tokenizer_json).facts.eos_id
        compare = {"whole": compare_whole, "steady": compare_steady, "workers": compare_workers, "floor": compare_floor}
        compare[options.mode](options, folder)


def compare_whole(options: argparse.Namespace, folder: Path) -> None:
    source = Path(options.source)
    if options.megabytes or not source.is_file():
        source, options.text_column = folder / "source.parquet", "text"
        write_parquet(source, [read_texts(options, options.megabytes)])
    ours: list[float] = []
    theirs: list[float] = []
    for number in range(options.rounds):
        with tempfile.TemporaryDirectory(dir=folder) as name:
            # Who begins changes every time: the second one finds the disk busy with what the first one wrote.
            contestants = [(ours, build_command), (theirs, peer_command)]
            for seconds, command in contestants[:: -1 if number % 2 else 1]:
                start = time.perf_counter()
                output = run(command(options, source, Path(name)))
                seconds.append(time.perf_counter() - start)
                if command is peer_command:
                    peer = json.loads(output.splitlines()[-1])
                else:
                    cache = json.loads(output)
                    tokens, size = cache["tokens"], cache["text_bytes"]
        print(f"round {number + 1}: ours {ours[-1]:.2f} s, peer {theirs[-1]:.2f} s", flush=True)
        check_same_tokens(tokens, peer, options.sequence_length)
    print(
        f"peer, last round: load {peer['load_seconds']:.2f} s, tokenize {peer['tokenize_seconds']:.2f} s, "
        f"group {peer['group_seconds']:.2f} s, save {peer['save_seconds']:.2f} s"
    )
    rows = [
        f"whole command, {size / 1e6:.1f} MB, {tokens:,} tokens, {options.workers} processes",
        f"ours {median(ours):.2f} s = {size / 1e6 / median(ours):.2f} MB/s",
        f"peer {median(theirs):.2f} s = {size / 1e6 / median(theirs):.2f} MB/s",
        f"ratio {median(theirs) / median(ours):.1f}",
    ]
    print_result(rows, median(theirs) / median(ours), *PACKAGES)


def compare_steady(options: argparse.Namespace, folder: Path) -> None:
    source, size, texts, plain = prepare_long_text(options, folder)
    slice_of_it, few = (folder / f"{name}.parquet" for name in ("slice", "few"))
    slice_size = cut_slice(source, slice_of_it, options.peer_megabytes * 1e6)
    pq.write_table(pa.table({"text": texts[:8]}), few)
    print(f"{slice_size / 1e6:.1f} MB for the peer")
    ours: list[float] = []
    theirs: list[float] = []
    for number in range(options.rounds):
        with tempfile.TemporaryDirectory(dir=folder) as name:
            contestants = ["ours", "peer"]
            for contestant in contestants[:: -1 if number % 2 else 1]:
                if contestant == "ours":
                    cache, speed = time_steady_build(options, source, Path(name))
                    cache = cache.summary
                    ours.append(speed)
                else:
                    output = run([*peer_command(options, slice_of_it, Path(name)), "--warm-up", str(few)])
                    peer = json.loads(output.splitlines()[-1])
                    theirs.append(slice_size / (peer["work_seconds"] - peer["overhead_seconds"]))
        print(f"round {number + 1}: ours {ours[-1] / 1e6:.2f} MB/s, peer {theirs[-1] / 1e6:.2f} MB/s", flush=True)
    chunks, tokens, rate = cache.chunks, cache.tokens, cache.tokens / cache.text_bytes
    print(
        f"tokens per byte: ours {rate:.4f}, peer {peer['tokens'] / slice_size:.4f}, unvaried text {plain:.4f}; "
        f"peer, last round: {peer['overhead_seconds']:.2f} of {peer['work_seconds']:.2f} s subtracted"
    )
    if abs(peer["tokens"] / slice_size / rate - 1) > 0.02:
        raise SystemExit("Tokens per byte differ by more than 2 %: the two sides do not do the same work.")
    rows = [
        f"steady, {size / 1e6:.0f} MB in {chunks} chunks, {tokens:,} tokens, {options.workers} processes",
        f"ours {median(ours) / 1e6:.2f} MB/s",
        f"peer {median(theirs) / 1e6:.2f} MB/s on {slice_size / 1e6:.0f} MB",
        f"ratio {median(ours) / median(theirs):.1f}",
    ]
    print_result(rows, median(ours) / median(theirs), *PACKAGES)


def compare_workers(options: argparse.Namespace, folder: Path) -> None:
    source, size, _, _ = prepare_long_text(options, folder)
    speeds: dict[int, list[float]] = {1: [], options.workers: []}
    digests = set()
    for number in range(options.rounds):
        for workers in list(speeds)[:: -1 if number % 2 else 1]:
            with tempfile.TemporaryDirectory(dir=folder) as name:
                cache, speed = time_steady_build(options, source, Path(name), workers)
                speeds[workers].append(speed)
                digests.add(cache.snapshot.digest)
                chunks = cache.snapshot.num_chunks
        told = ", ".join(f"{workers} workers {speed[-1] / 1e6:.2f} MB/s" for workers, speed in speeds.items())
        print(f"round {number + 1}: {told}", flush=True)
    if len(digests) != 1:
        raise SystemExit("The builds differ: a chunk depends on who builds it.")
    rows = [f"steady, {size / 1e6:.0f} MB in {chunks} chunks, same snapshot"]
    rows += [f"{workers} workers {median(speed) / 1e6:.2f} MB/s" for workers, speed in speeds.items()]
    ratio = median(speeds[options.workers]) / median(speeds[1])
    print_result([*rows, f"ratio {ratio:.2f}"], ratio, *PACKAGES)


def compare_floor(options: argparse.Namespace, folder: Path) -> None:
    source, size, _, plain = prepare_long_text(options, folder)
    vocab_size = read_tokenizer(options.tokenizer_json).facts.vocab_size
    chunk_bytes = int(options.sequences_per_chunk * options.sequence_length / plain)
    ours: list[float] = []
    floors: list[float] = []
    for number in range(options.rounds):
        with tempfile.TemporaryDirectory(dir=folder) as name:
            for contestant in ["ours", "floor"][:: -1 if number % 2 else 1]:
                if contestant == "ours":
                    ours.append(time_steady_build(options, source, Path(name))[1])
                else:
                    stages = stage_seconds(source, options.tokenizer_json, vocab_size, chunk_bytes, Path(name))
                    floors.append(size / sum(stages.values()) * options.workers)
        told = ", ".join(f"{stage} {size / 1e6 / seconds:.0f}" for stage, seconds in stages.items())
        print(
            f"round {number + 1}: ours {ours[-1] / 1e6:.2f} MB/s, floor {floors[-1] / 1e6:.2f} MB/s "
            f"(MB/s of one core: {told})",
            flush=True,
        )
    ratio = median(ours) / median(floors)
    rows = [
        f"steady, {size / 1e6:.0f} MB, {options.workers} workers",
        f"ours {median(ours) / 1e6:.2f} MB/s",
        f"floor {median(floors) / 1e6:.2f} MB/s; of one core: {told}",
        f"ratio {ratio:.2f}",
    ]
    print_result(rows, ratio, *PACKAGES)


def prepare_long_text(options: argparse.Namespace, folder: Path) -> tuple[Path, int, list[str], float]:
    """Text for a long job: its file, its bytes, the texts that it was made of, and their tokens per byte."""
    wanted = options.megabytes or 320
    texts = read_texts(options, wanted)
    plain = tokens_per_byte(options, texts[:2_000])
    copies = -int(-wanted * 1e6 // sum(len(text.encode()) for text in texts))
    source, options.text_column = folder / "source.parquet", "text"
    size = write_parquet(source, vary(texts, copies))
    # So small that every worker has several, as in a long job; 8,000 is the default.
    chunk_tokens = size * plain / (MIN_CHUNKS + options.workers + 2)
    options.sequences_per_chunk = min(8_000, max(1, int(chunk_tokens / options.sequence_length)))
    print(f"text: {size / 1e6:.1f} MB, {copies} x {len(texts):,} documents")
    return source, size, texts, plain


def build_command(options: argparse.Namespace, source: Path, folder: Path) -> list[str]:
    values = {
        "source": source,
        "text_column": options.text_column,
        "tokenizer": options.tokenizer_json,
        "sequence_length": options.sequence_length,
        "cache_dir": folder / "cache",
        "workers": options.workers,
    }
    arguments = [word for name, value in values.items() for word in (f"--data.{name}", str(value))]
    return [sys.executable, "-m", "packhorse.cli", "cache", "build", *arguments, "--json"]


def peer_command(options: argparse.Namespace, source: Path, folder: Path) -> list[str]:
    script = Path(__file__).with_name("peer_datasets.py")
    target = folder / "peer"
    target.mkdir()
    values = {
        "eos-id": options.eos_id,
        "text-column": options.text_column,
        "sequence-length": options.sequence_length,
        "workers": options.workers,
    }
    arguments = [word for name, value in values.items() for word in (f"--{name}", str(value))]
    return [sys.executable, str(script), str(source), str(options.tokenizer_json), str(target), *arguments]


def run(command: list[str]) -> str:
    environment = {**as_installed(), "HF_HUB_OFFLINE": "1", "HF_DATASETS_DISABLE_PROGRESS_BARS": "1"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"{' '.join(command)}\nended with status {done.returncode}:\n{done.stderr}")
    return done.stdout


def time_steady_build(
    options: argparse.Namespace, source: Path, folder: Path, workers: int | None = None
) -> tuple[Cache, float]:
    """Build a cache with real workers; the cache, and bytes of text per second once they are warm."""
    workers = workers or options.workers
    settings = CacheSettings(
        source=str(source),
        tokenizer=str(options.tokenizer_json),
        sequence_length=options.sequence_length,
        sequences_per_chunk=options.sequences_per_chunk,
        cache_dir=str(folder / "cache"),
        workers=workers,
    )
    arrivals: list[tuple[float, int]] = []

    class TimedWorkers(staff.Workers):
        def run(self, *arguments) -> None:
            *before, on_record, tell = arguments

            def note(record, seconds) -> None:
                arrivals.append((time.perf_counter(), record.text_bytes))
                on_record(record, seconds)

            super().run(*before, note, tell)

    plain, staff.Workers = staff.Workers, TimedWorkers
    load_fastokens.cache_clear()  # one that has seen this text before would remember its words
    try:
        cache = update_cache(settings, quiet=True)
    finally:
        staff.Workers = plain
    # The clock starts when the first chunk is committed. The first chunk of every worker is not counted, though some
    # of them are still being built then: that is to our disadvantage.
    timed = arrivals[workers:]
    if len(timed) < MIN_CHUNKS:
        raise SystemExit(f"Only {len(timed)} chunks were timed, {MIN_CHUNKS} are needed: raise --megabytes.")
    return cache, sum(size for _, size in timed) / (arrivals[-1][0] - arrivals[0][0])


def check_same_tokens(ours: int, peer: dict, sequence_length: int) -> None:
    """Both must have made the same tokens, but for the rests of batches that the peer drops."""
    kept = peer["rows"] * sequence_length
    lost = peer["batches"] * sequence_length
    # Control tokens that are written out in a text are text for us, and control tokens for the peer.
    if abs(ours / peer["tokens"] - 1) > 1e-3 or not peer["tokens"] - lost <= kept <= peer["tokens"]:
        raise SystemExit(f"Unlike things: {ours:,} tokens here, {peer['tokens']:,} there, {kept:,} of them in rows.")


def tokens_per_byte(options: argparse.Namespace, texts: list[str]) -> float:
    """Of some texts, by the reference; EOS included."""
    from tokenizers import Tokenizer

    encodings = Tokenizer.from_file(str(options.tokenizer_json)).encode_batch_fast(texts, add_special_tokens=False)
    return sum(len(encoding.ids) + 1 for encoding in encodings) / sum(len(text.encode()) for text in texts)


def prepare_tokenizer(name: str | None, folder: Path) -> Path:
    """A tokenizer.json without padding or truncation, which the peer would obey."""
    if name is None:
        content = train_tokenizer(SampleCorpus(megabytes=4), TRAINED_VOCABULARY)
    else:
        content = read_tokenizer(locate_tokenizer(name))
    path = folder / "tokenizer.json"
    path.write_bytes(content.files["tokenizer.json"])
    return path


def read_texts(options: argparse.Namespace, megabytes: float | None) -> list[str]:
    """The texts of the source, from the beginning."""
    texts: list[str] = []
    size = 0
    for text in _texts_of(options):
        texts.append(text)
        size += len(text.encode())
        if megabytes is not None and size >= megabytes * 1e6:
            break
    return texts


def _texts_of(options: argparse.Namespace) -> Iterator[str]:
    for source in open_sources(options.source, text_column=options.text_column):
        if not isinstance(source, Files):
            yield from (text for text in source.read(0) if isinstance(text, str) and text.strip())
            continue
        for file in source.files:
            for batch in read_documents(file.file, 0, file_length(file.file), Skipped()):
                yield from batch.texts or []


def write_parquet(path: Path, parts: Iterable[list[str]]) -> int:
    """Write texts as a data set of the hub has them, in row groups of 1,000; returns their size in bytes."""
    size = 0
    with pq.ParquetWriter(path, pa.schema([("text", pa.string())])) as writer:
        for texts in parts:
            writer.write_table(pa.table({"text": texts}), row_group_size=1_000)
            size += sum(len(text.encode()) for text in texts)
    return size


def cut_slice(source: Path, target: Path, wanted: float) -> int:
    """Row groups from all over the file, so that the slice is like the whole; returns the bytes of text."""
    file = pq.ParquetFile(source)
    groups = file.num_row_groups
    size = 0
    sizes = [file.metadata.row_group(g).column(0).total_uncompressed_size for g in range(groups)]
    count = max(1, min(groups, round(wanted / (sum(sizes) / groups))))
    with pq.ParquetWriter(target, file.schema_arrow) as writer:
        for number in range(count):
            table = file.read_row_group(number * groups // count)
            writer.write_table(table, row_group_size=1_000)
            size += sum(len(text.as_py().encode()) for text in table["text"])
    return size


if __name__ == "__main__":
    main()
