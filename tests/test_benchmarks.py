"""Laws of the benchmarks: each runs anywhere, at a tiny size, and ends with its ratio."""

import os
import random
import re
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).parents[1] / "benchmarks"
RUNS = {
    "build": ["bench_build.py", "--megabytes", "0.3", "--rounds", "1"],
    "build steady": [
        "bench_build.py",
        "--mode",
        "steady",
        "--megabytes",
        "3",
        "--peer-megabytes",
        "3",
        "--rounds",
        "1",
    ],
    "build workers": ["bench_build.py", "--mode", "workers", "--megabytes", "2", "--rounds", "1"],
    "build floor": ["bench_build.py", "--mode", "floor", "--megabytes", "2", "--rounds", "1"],
    "gap": ["bench_gap.py", "--megabytes", "0.5", "--rounds", "1"],
    "open": ["bench_open.py", "--chunks", "10", "4200", "--rounds", "1"],
    "packing": ["bench_packing.py", "--lengths", "64", "512", "--max-documents", "60", "--rounds", "1"],
    "order": ["bench_order.py", "--batches", "3"],
    "backends": ["bench_backends.py", "--quick", "--threads", "1"],
    "lengths": [
        *("bench_lengths.py", "--threads", "1", "--segment", "32", "--repeats", "1"),
        *("--shortest", "64", "--longest", "128", "--full-up-to", "128"),
    ],
    "read": ["bench_read.py", "--megabytes", "0.5", "--rounds", "1", "--seconds", "0.02"],
}


def test_every_benchmark_is_run_here():
    # Even at their smallest, these take a minute, much memory, or start several trainings.
    there = {path.name for path in BENCHMARKS.glob("bench_*.py")} - {
        "bench_attention.py",
        "bench_start.py",
        "bench_loss.py",
    }
    assert there == {command[0] for command in RUNS.values()}


@pytest.mark.parametrize("name", RUNS)
def test_a_benchmark_ends_with_its_ratio(name, tmp_path):
    script, *arguments = RUNS[name]
    done = subprocess.run(
        [sys.executable, str(BENCHMARKS / script), *arguments],
        cwd=tmp_path,
        env={**os.environ, "TMPDIR": str(tmp_path)},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr[-2_000:]
    found = re.fullmatch(r"ratio=(\d+\.\d+)", done.stdout.splitlines()[-1])
    assert found
    assert float(found[1]) > 0
    # What torch compiles it keeps for the next process.
    assert [path for path in tmp_path.iterdir() if "torchinductor" not in path.name] == [], "temporary files are left"


def test_a_comparison_without_its_peer_says_so_and_ends_well():
    script = BENCHMARKS / "peer_infini_transformer.py"
    done = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, check=True)
    assert "is not installed" in done.stdout or "ratio=" in done.stdout


def test_varied_text_repeats_no_document_and_no_rare_word(monkeypatch):
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    from varied_text import RARE, vary

    generator = random.Random(0)
    words = ["".join(generator.choices("abcdefghijklmnop", k=generator.randint(1, 12))) for _ in range(700)]
    documents = [" ".join(generator.choices(words, k=200)) for _ in range(50)]
    copies = list(vary(documents, 4))
    assert copies[0] == documents
    assert copies == list(vary(documents, 4))
    assert len({text for copy in copies for text in copy}) == 4 * len(documents)
    counts = [Counter(word for text in copy for word in re.findall(r"\w+", text)) for copy in copies]
    # Words of one and two letters are too few to have others.
    rare = [{word for word, count in counter.items() if count < RARE and len(word) > 2} for counter in counts]
    for number, words_of_copy in enumerate(rare):
        assert len(words_of_copy) > 100
        assert not any(words_of_copy & set(other) for other in counts[:number])
    for copy in copies[1:]:
        sizes = [sum(map(len, texts)) for texts in (documents, copy)]
        assert abs(sizes[1] / sizes[0] - 1) < 0.05
