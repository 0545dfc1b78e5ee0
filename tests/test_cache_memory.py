"""Laws of `memory_limit`: it is kept by what builders really take, or refused with what is needed."""

import json
import os
import subprocess
import sys
import threading
import time

import psutil
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from conftest import make_texts, payloads, write_jsonl, write_parquet
from packhorse.cache import CacheSettings, memory
from packhorse.cache.memory import MAX_CHUNK_TOKENS, plan_memory, used_memory
from packhorse.cache.plan import Plan
from packhorse.cache.settings import parse_size
from packhorse.corpus import tables
from packhorse.corpus.documents import Skipped, TextFile, read_documents
from packhorse.errors import DocumentTooLongError, SettingsError

BUILD = """
import sys, json
from packhorse.cache import CacheSettings, update_cache
settings = json.loads(sys.argv[1])
print("here", flush=True)
cache = update_cache(CacheSettings(**settings), quiet=True)
print(json.dumps([cache.summary.documents, cache.summary.chunks]))
"""


def build_and_watch(settings: dict) -> tuple[int, int, int]:
    """Build in another process: (documents, most bytes of all its processes together, most processes)."""
    command = [sys.executable, "-c", BUILD, json.dumps(settings)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env={**os.environ, "HF_HUB_OFFLINE": "1"})
    most, processes = 0, 0

    def watch() -> None:
        nonlocal most, processes
        while process.poll() is None:
            total = 0
            try:
                family = [process.pid, *(child.pid for child in psutil.Process(process.pid).children(recursive=True))]
                total = sum(map(used_memory, family))
            except (psutil.Error, FileNotFoundError, ProcessLookupError):
                continue
            most, processes = max(most, total), max(processes, len(family))
            time.sleep(0.005)

    watcher = threading.Thread(target=watch)
    watcher.start()
    output = process.communicate()[0]
    watcher.join()
    assert process.returncode == 0
    return json.loads(output.splitlines()[-1])[0], most, processes


def write_large(path, kind: str, megabytes: int) -> str:
    """Documents of about 4 kB, and among them four of `megabytes` MB."""
    small = [text * 16 for text in make_texts(400, seed=2)]
    texts = [*small[:100], *(f"{i} " + " ".join(small) * 99 for i in range(4)), *small[100:]]
    texts = [text[: megabytes * 10**6] for text in texts]
    if kind == "jsonl":
        return str(write_jsonl(path / "a.jsonl", texts))
    return str(write_parquet(path / "a.parquet", texts, rows=1_000))


@pytest.mark.parametrize(
    ("kind", "megabytes", "limits"),
    [
        ("parquet", 3, {2: 2_600}),
        pytest.param("jsonl", 50, {2: 2_600, 1: 1_300}, marks=pytest.mark.slow),
        pytest.param("parquet", 50, {2: 3_600, 1: 1_800}, marks=pytest.mark.slow),
    ],
)
def test_a_build_with_long_documents_stays_below_the_limit(tmp_path, gpt2_like, kind, megabytes, limits):
    source = write_large(tmp_path, kind, megabytes)
    settings = {"source": source, "tokenizer": str(gpt2_like), "cache_dir": str(tmp_path / "c"), "workers": 2}
    for builders, limit in limits.items():
        more = {"memory_limit": f"{limit}MB", "name": f"by-{builders}", "sequences_per_chunk": 2_000}
        documents, most, processes = build_and_watch({**settings, **more})
        assert (documents, processes) == (404, builders)
        assert 10**8 < most <= limit * 10**6, f"{most / 1e6:.0f} MB"


def test_a_limit_makes_builders_fewer_and_then_chunks_smaller(build, tmp_path, monkeypatch):
    monkeypatch.setattr(memory, "used_memory", lambda: 100 * 10**6)  # not that of the tests before
    source = str(write_jsonl(tmp_path / "a.jsonl", make_texts(30)))
    recipe = build(source).recipe

    def budget(limit: str, builders: int = 8, planned: int = 0, **more):
        settings = CacheSettings(source=source, memory_limit=limit, sequence_length=2_048, **more)
        return plan_memory(settings, recipe, 3_500_000, builders, planned)

    found = [budget(limit) for limit in ("100GB", "6GB", "3GB", "1400MB")]
    assert [one.builders for one in found] == sorted((one.builders for one in found), reverse=True)
    assert found[0].builders == 8
    assert found[-1].builders == 1
    assert all(memory.MIN_CHUNK_TOKENS <= one.chunk_tokens <= 8_000 * 2_048 for one in found)
    assert all(one.document_bytes >= memory.DOCUMENT_BYTES for one in found)
    assert budget("100GB").document_bytes > budget("14GB").document_bytes
    assert budget("6GB", planned=100_000_000).builders < budget("6GB").builders
    assert budget("20GB", engine="hf").builders < budget("20GB").builders


def test_too_small_a_limit_is_refused_with_the_one_that_is_needed(build, tmp_path):
    source = str(write_jsonl(tmp_path / "a.jsonl", make_texts(30)))
    with pytest.raises(SettingsError, match=r"building here needs ([\d,]+) MB") as caught:
        build(source, memory_limit="200MB")
    needed = int(str(caught.value).split("needs ")[1].split(" MB")[0].replace(",", ""))
    assert not list(tmp_path.rglob("*.chunk"))
    assert build(source, memory_limit=f"{needed + 100}MB").summary.documents == 30


def test_chunks_of_long_sequences_are_bounded_without_a_limit(build, tmp_path):
    recipe = build(str(write_jsonl(tmp_path / "a.jsonl", make_texts(30)))).recipe
    for length, expected in ((512, 8_000), (2_048, 8_000), (8_192, 2_048), (131_072, 128)):
        budget = plan_memory(CacheSettings(sequence_length=length), recipe, 0, 2, 0)
        assert budget.chunk_tokens // length == expected
        assert budget.chunk_tokens <= MAX_CHUNK_TOKENS
        assert budget.document_bytes is None


@pytest.mark.parametrize("kind", ["jsonl", "parquet", "line", "document"])
def test_a_document_that_is_too_long_is_refused_before_it_is_tokenized(tmp_path, kind):
    texts = ["short", "long " * 1_000, "short"]
    path = tmp_path / f"a.{kind}"
    if kind == "parquet":
        write_parquet(path, texts)
    elif kind == "jsonl":
        write_jsonl(path, texts)
    else:
        path.write_text("\n".join(texts))
    file = TextFile(path=str(path), kind=kind)
    stop = 3 if kind == "parquet" else path.stat().st_size
    assert sum(len(batch.texts) for batch in read_documents(file, 0, stop, Skipped(), max_bytes=10_000)) >= 1
    with pytest.raises(DocumentTooLongError, match="memory_limit"):
        list(read_documents(file, 0, stop, Skipped(), max_bytes=3_000))


@pytest.mark.parametrize("filters", [(), ("number >= 3",)])
def test_large_row_groups_are_read_some_rows_at_a_time_and_hold_the_same(tmp_path, monkeypatch, filters):
    texts = make_texts(200, seed=3)
    path = str(write_parquet(tmp_path / "a.parquet", texts, rows=90))
    file = TextFile(path=path, kind="parquet", filters=filters)

    def read(start, stop):
        skipped = Skipped()
        batches = list(read_documents(file, start, stop, skipped))
        rows = [int(row) for batch in batches for row in batch.rows]
        return [text for batch in batches for text in batch.texts], rows, skipped.rows, skipped.filtered

    ranges = ((0, 200), (17, 95), (90, 180), (91, 92))
    whole = [read(*span) for span in ranges]
    monkeypatch.setattr(tables, "LARGE_GROUP", 1)
    monkeypatch.setattr(tables, "BATCH_BYTES", 2_000)
    parts = [len(part) for part, _ in tables.read_column(path, "parquet", "text", 0, 200, filters)]
    assert len(parts) > 10
    assert max(parts) < 30
    assert [read(*span) for span in ranges] == whole
    assert whole[0][0] == (texts[3:] if filters else texts)


def test_a_batch_is_cut_by_bytes_not_by_rows(tmp_path):
    texts = ["x" * 10] * 500 + ["y" * 5_000] * 5 + ["x" * 10] * 500
    pq.write_table(pa.table({"text": texts}), tmp_path / "a.parquet")
    file = TextFile(path=str(tmp_path / "a.parquet"), kind="parquet")
    sizes = [sum(map(len, batch.texts)) for batch in read_documents(file, 0, 1_005, Skipped(), batch_bytes=5_010)]
    assert sum(sizes) == sum(map(len, texts))
    assert max(sizes) <= 5_010


def test_a_limit_does_not_change_what_is_built(build, tmp_path):
    source = str(write_jsonl(tmp_path / "a.jsonl", make_texts(60)))
    plain = build(source, name="plain")
    limited = build(source, name="limited", memory_limit="16GB")
    assert payloads(limited) == payloads(plain)
    assert Plan(limited.folder).pages[0].entries == Plan(plain.folder).pages[0].entries


@pytest.mark.parametrize(
    ("text", "expected"),
    [("16GB", 16 * 10**9), ("1.5 GiB", 3 * 2**29), ("900mb", 9 * 10**8), ("12345678", 12_345_678), ("2T", 2 * 10**12)],
)
def test_sizes_are_read_as_people_write_them(text, expected):
    assert parse_size(text) == expected


@pytest.mark.parametrize("text", ["", "much", "-1GB", "16 XB", "0", "1e9", "iB"])
def test_what_is_no_size_is_refused(text):
    with pytest.raises(SettingsError, match="memory_limit must be a size"):
        CacheSettings(memory_limit=text)
