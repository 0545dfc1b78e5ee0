"""Laws of `deduplicate: exact`: the first place in the plan stays, whatever the source, and however the cache grows."""

import gzip
import json
from dataclasses import replace

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from conftest import make_texts, payloads, texts_in, write_jsonl, write_parquet
from packhorse.cache import duplicates, planner
from packhorse.cache.duplicates import Seen
from packhorse.cache.plan import Plan

UNIQUE = make_texts(80, seed=6, words=15)
TEXTS = UNIQUE[:50] + UNIQUE[10:30] + [UNIQUE[0]] * 5 + UNIQUE[50:] + UNIQUE


def firsts(texts: list[str]) -> list[str]:
    return list(dict.fromkeys(texts))


@pytest.fixture(params=["jsonl", "parquet", "gz", "stream"])
def source(request, tmp_path):
    if request.param == "stream":
        return TEXTS
    path = tmp_path / "a.jsonl"
    if request.param == "parquet":
        return str(write_parquet(tmp_path / "a.parquet", TEXTS, rows=30))
    write_jsonl(path, TEXTS)
    if request.param == "gz":
        (tmp_path / "a.jsonl.gz").write_bytes(gzip.compress(path.read_bytes()))
        return str(tmp_path / "a.jsonl.gz")
    return str(path)


def test_of_equal_documents_the_first_in_the_plan_stays_and_the_rest_is_counted(build, source):
    cache = build(source, deduplicate="exact")
    assert texts_in(cache) == firsts(TEXTS)
    assert cache.summary.rows_duplicate == len(TEXTS) - len(firsts(TEXTS))
    assert cache.snapshot.num_chunks > 2
    assert any("dropped" in line for line in cache.summary.lines())


def test_without_it_every_document_stays(build, source):
    assert texts_in(build(source)) == TEXTS
    assert build(source).folder != build(source, deduplicate="exact").folder


def test_what_is_added_later_is_compared_with_all_before(build, tmp_path):
    path = str(write_jsonl(tmp_path / "a.jsonl", TEXTS[:60]))
    first = build(path, deduplicate="exact")
    before = payloads(first)
    write_jsonl(tmp_path / "a.jsonl", TEXTS[60:], mode="a")
    new = [*make_texts(20, seed=8, words=15), *UNIQUE[40:60]]
    other = str(write_parquet(tmp_path / "b.parquet", new, rows=7))
    cache = build([{"path": path}, {"path": other}], deduplicate="exact", name="a")
    assert cache.folder == first.folder
    assert payloads(cache)[: len(before)] == before
    assert texts_in(cache) == firsts(TEXTS + new)


def test_growth_reads_nothing_of_the_text_before(build, tmp_path):
    folder = tmp_path / "texts"
    folder.mkdir()
    write_jsonl(folder / "a.jsonl", UNIQUE[:50])
    before = payloads(build(str(folder), deduplicate="exact"))
    (folder / "a.jsonl").unlink()
    write_jsonl(folder / "b.jsonl", TEXTS)
    cache = build(str(folder), deduplicate="exact")
    assert payloads(cache)[: len(before)] == before
    assert texts_in(cache) == firsts(UNIQUE[:50] + TEXTS)


@pytest.mark.parametrize("damage", ["missing", "flipped", "of another page", "cut"])
def test_kept_hashes_that_are_lost_or_damaged_are_made_again(build, tmp_path, damage):
    path = str(write_jsonl(tmp_path / "a.jsonl", TEXTS[:60]))
    cache = build(path, deduplicate="exact")
    (kept,) = (cache.folder / "duplicates").iterdir()
    content = kept.read_bytes()
    if damage == "missing":
        kept.unlink()
    elif damage == "cut":
        kept.write_bytes(content[:-16])
    elif damage == "flipped":
        kept.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    else:
        page = Plan(cache.folder).pages[0]
        other = replace(page, chunk_bytes=page.chunk_bytes + 1)
        duplicates._save(cache.folder, other, np.zeros((2, 0), "<u8"))
    write_jsonl(tmp_path / "a.jsonl", TEXTS[60:], mode="a")
    assert texts_in(build(path, deduplicate="exact")) == firsts(TEXTS)


def test_pages_that_are_searched_are_small_and_together_the_same(build, tmp_path, monkeypatch):
    files = [str(write_parquet(tmp_path / f"{i}.parquet", TEXTS[i::3], rows=9)) for i in range(3)]
    whole = build(files, deduplicate="exact", name="whole")
    monkeypatch.setattr(planner, "SEARCHED_CHUNKS", 2)
    parts = build(files, deduplicate="exact", name="parts")
    assert payloads(parts) == payloads(whole)
    plan = Plan(parts.folder)
    assert len(plan.pages) > 2
    assert all(len(page.entries) <= 2 for page in plan.pages)
    assert [page.finished for page in plan.pages[:-1]] == [{}] * (len(plan.pages) - 1)
    assert plan.files == Plan(whole.folder).files


@pytest.mark.parametrize("kind", ["jsonl", "parquet", "stream"])
def test_what_filters_leave_out_has_no_place_whatever_the_source(build, kind, tmp_path):
    rows = [{"text": text, "score": place % 3} for place, text in enumerate(TEXTS)]
    (tmp_path / "a.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "a.parquet", row_group_size=30)
    source = rows if kind == "stream" else str(tmp_path / f"a.{kind}")
    cache = build(source, deduplicate="exact", filters=["score >= 1"])
    passed = [row["text"] for row in rows if row["score"]]
    assert texts_in(cache) == firsts(passed)
    assert cache.summary.rows_filtered == len(rows) - len(passed)
    assert cache.summary.rows_duplicate == len(passed) - len(firsts(passed))


def test_worker_processes_drop_what_this_one_drops(build, source, tmp_path):
    here = build(source, deduplicate="exact")
    assert payloads(build(source, deduplicate="exact", workers=2, cache_dir=str(tmp_path / "other"))) == payloads(here)


def test_lists_of_ids_are_compared_too(build):
    ids = [[5, 6, 7, 8], [9, 9], [5, 6, 7, 8], [5, 6, 7]] * 10
    cache = build(ids, deduplicate="exact", eval_share=0.0)
    assert cache.summary.documents == 3


small = st.integers(0, 3)


@given(st.lists(st.lists(st.tuples(small, small), max_size=12), max_size=8))
def test_seen_tells_the_first_of_every_hash(batches):
    seen, known = Seen(), set()
    for batch in batches:
        hashes = np.array(batch, "<u8").reshape(-1, 2).T
        expected = []
        for item in batch:
            expected.append(item not in known)
            known.add(item)
        assert seen.add(hashes).tolist() == expected
        assert seen.holds(hashes).all()
    assert len(seen) == len(known)
    assert list(zip(*seen.sorted().tolist(), strict=True)) == sorted(known)


def test_a_document_takes_16_bytes_of_memory():
    seen = Seen()
    draw = np.random.default_rng(0)
    for _ in range(20):
        seen.add(draw.integers(0, 2**63, (2, 1_000)).astype("<u8"))
    assert sum(run.nbytes for run in seen._runs) == 16 * len(seen)
    assert len(seen._runs) < 6
