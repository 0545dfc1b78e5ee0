"""Laws of building: the same text gives the same chunks, whoever builds them and with whatever engine."""

import json
import random
import threading

import numpy as np
import pytest

from conftest import all_tokens, file_bytes, make_texts, payloads, texts_in, write_jsonl, write_parquet
from packhorse.cache import build as build_module
from packhorse.cache import building, open_cache, planner, rate, store, workers
from packhorse.cache.build import Builder, Job
from packhorse.cache.check import check_cache
from packhorse.cache.plan import Plan
from packhorse.cache.record import read_record
from packhorse.cache.snapshot import Index
from packhorse.cache.suspects import Suspects
from packhorse.cache.workers import Workers
from packhorse.corpus import engines
from packhorse.corpus.documents import TextFile
from packhorse.errors import EngineMismatch

TEXTS = make_texts(160, seed=8, words=20)


@pytest.mark.parametrize("packing", ["best_fit", "concat"])
def test_workers_and_engines_do_not_change_a_byte(packing, build, tmp_path):
    files = [
        str(write_parquet(tmp_path / "a.parquet", TEXTS[:80], rows=9)),
        str(write_jsonl(tmp_path / "b.jsonl", TEXTS[80:])),
    ]
    caches = [
        build(files, packing=packing, workers=workers, engine=engine, cache_dir=str(tmp_path / f"{workers}{engine}"))
        for workers, engine in ((0, "hf"), (0, "fastokens"), (1, "hf"), (2, "fastokens"), (2, "auto"))
    ]
    assert caches[0].snapshot.num_chunks >= 4
    assert texts_in(caches[0]) == TEXTS
    for cache in caches[1:]:
        assert payloads(cache) == payloads(caches[0])
        assert file_bytes(cache.folder) == file_bytes(caches[0].folder)
        assert cache.snapshot.digest == caches[0].snapshot.digest


def jsonl_with(path, texts, **more) -> str:
    path.write_text("".join(json.dumps({**more, "text": text}) + "\n" for text in texts))
    return str(path)


CYRILLIC = [text.translate(str.maketrans("abcdefghijklmnopqrst", "абвгдежзиклмнопрстуф")) for text in make_texts(200)]
STORED = {
    "lines with other keys": lambda f: jsonl_with(
        f / "a.jsonl", make_texts(600), url="https://x" * 30, scores=[0.5] * 40
    ),
    "lines with escapes": lambda f: jsonl_with(f / "a.jsonl", CYRILLIC),
    "a dictionary of few texts": lambda f: str(write_parquet(f / "a.parquet", make_texts(30) * 40, rows=10)),
    "a stream that is not ASCII": lambda f: CYRILLIC,
}


@pytest.mark.parametrize("form", STORED)
def test_limits_and_chunks_hold_for_tokens_however_a_source_stores_its_text(form, build, tmp_path):
    source = STORED[form](tmp_path)
    whole = build(source, sequences_per_chunk=200, eval_share=0.0, cache_dir=str(tmp_path / "whole"))
    per_chunk = whole.num_sequences("train") / whole.snapshot.num_chunks
    assert per_chunk == pytest.approx(200, rel=0.15)
    half = whole.summary.tokens // 2
    limited = build(source, sequences_per_chunk=200, eval_share=0.0, max_tokens=half)
    assert limited.summary.tokens == pytest.approx(half, rel=0.1)


def test_a_builder_that_is_ready_first_takes_more_chunks(monkeypatch, tmp_path):
    """The one in this process is still loading when the other has built all that is left."""
    others: list[Ready] = []
    monkeypatch.setattr(workers, "_start", lambda core, number, messages: others.append(Ready(messages)) or others[0])

    def build_late(self: Workers, *_) -> None:
        others[0].is_idle.wait(5)
        while not self._here.empty():
            self._messages.put((0, {"record": self._here.get().chunk, "seconds": {}}))

    monkeypatch.setattr(Workers, "_build_here", build_late)
    jobs = [Job(chunk=chunk, ranges=[], files={}) for chunk in range(7)]
    built: list[str] = []
    builders = Workers(2)
    builders.run(
        jobs, tmp_path, "auto", "default", True, lambda *_: None, lambda record, _: built.append(record), print
    )
    builders.stop()
    assert others[0].chunks == [1, 2, 3, 4, 5, 6]
    assert built == [*others[0].chunks, 0]


@pytest.mark.parametrize("wanted", [2, 0, None])
def test_a_process_that_was_started_early_builds_or_is_gone(wanted, build, tmp_path, monkeypatch):
    monkeypatch.setattr(workers, "usable_cores", lambda: [0, 0])
    with workers.one_early():
        (early,) = workers._early
        assert early.poll() is None
        if wanted is not None:
            launched = []
            launch = workers._launch
            monkeypatch.setattr(workers, "_launch", lambda core: launched.append(launch(core)) or launched[-1])
            cache = build(str(write_jsonl(tmp_path / "a.jsonl", TEXTS)), workers=wanted)
            assert texts_in(cache) == TEXTS
            assert launched == []
            assert early.poll() is not None
    assert early.poll() is not None


def test_no_process_is_started_early_where_there_is_no_core_for_it(monkeypatch):
    monkeypatch.setattr(workers, "usable_cores", lambda: [0])
    with workers.one_early():
        assert workers._early == []


class Ready:
    """Stands in for the process of a builder that has everything loaded."""

    def __init__(self, messages) -> None:
        self.messages, self.chunks, self.is_idle, self.stdin = messages, [], threading.Event(), self

    def write(self, line: str) -> None:
        """A job comes, and is done at once."""
        self.chunks.append(chunk := json.loads(line)["job"]["chunk"])
        self.messages.put((1, {"progress": (1, 1, 1)}))
        self.messages.put((1, {"record": chunk, "seconds": {}}))
        if chunk == 6:
            self.is_idle.set()

    def flush(self) -> None:
        """Nothing waits."""

    kill = wait = flush


def test_the_order_in_which_chunks_are_built_does_not_change_a_byte(build, tmp_path):
    source = str(write_jsonl(tmp_path / "a.jsonl", TEXTS))
    cache = build(source)
    expected, records = file_bytes(cache.folder), payloads(cache)
    plan = Plan(cache.folder)
    for name in ("chunks", "records", "index"):
        for path in (cache.folder / name).rglob("*.*"):
            path.unlink()
    builder = Builder(cache.folder, "fastokens", "default")
    numbers = list(range(plan.num_chunks))
    random.Random(1).shuffle(numbers)
    for number in numbers:
        builder.build(Job(chunk=number, ranges=plan.entry(number), files={0: TextFile(path=source, kind="jsonl")}))
    assert file_bytes(cache.folder) == expected
    assert payloads(build(source)) == records


@pytest.mark.parametrize("kind", ["jsonl", "txt", "paragraph", "parquet"])
def test_chunks_hold_every_document_once_however_a_file_is_cut(kind, build, tmp_path):
    texts = [text.replace("\n", " ").strip() for text in TEXTS]
    for size in (1, 3, 10, 50, 10_000):
        if kind == "jsonl":
            path = write_jsonl(tmp_path / "a.jsonl", texts)
        elif kind == "parquet":
            path = write_parquet(tmp_path / "a.parquet", texts, rows=max(1, size * 2))
        else:
            path = tmp_path / "a.txt"
            path.write_text(("\n" if kind == "txt" else "\n\n").join(texts))
        sample_by = "paragraph" if kind == "paragraph" else "line"
        cache = build(str(path), sequences_per_chunk=size, sample_by=sample_by, name=f"by-{size}")
        assert texts_in(cache) == texts


def test_chunks_are_about_as_large_as_asked_for(build, tmp_path):
    for name, path in (
        ("t", write_parquet(tmp_path / "a.parquet", TEXTS, rows=20)),
        ("j", write_jsonl(tmp_path / "a.jsonl", TEXTS)),
    ):
        cache = build(str(path), sequences_per_chunk=30, name=name)
        sizes = [read_record(cache.folder, n).sequences for n in range(cache.snapshot.num_chunks)]
        assert len(sizes) > 3
        assert 15 <= np.mean(sizes) <= 45
        assert max(sizes) <= 75


def test_a_build_with_nothing_to_do_touches_no_file(build, tmp_path):
    source = str(write_parquet(tmp_path / "a.parquet", TEXTS))
    cache = build(source)
    before = {path: path.stat().st_mtime_ns for path in (tmp_path / "cache").rglob("*")}
    assert build(source).snapshot.digest == cache.snapshot.digest
    assert {path: path.stat().st_mtime_ns for path in (tmp_path / "cache").rglob("*")} == before


# -- an engine that is wrong


def lie_about(monkeypatch, on: str, every: int) -> None:
    """From now on fastokens gives a wrong id for texts with `on`; one document in `every` is looked at."""

    class Lying(engines.Fastokens):
        def encode(self, texts):
            ids, ends = super().encode(texts)
            ids = ids.copy()
            for i, text in enumerate(texts):
                if on in text:
                    ids[ends[i] - 1] ^= 1
            return ids, ends

    monkeypatch.setattr(engines, "load_fastokens", Lying)
    monkeypatch.setattr(engines, "SAMPLE_EVERY", every)
    monkeypatch.setattr(engines, "FIRST_DOCUMENTS", 1)


@pytest.fixture
def small_sample(monkeypatch):
    """What is tokenized before building starts is a few texts, so that a lie is not found there."""
    monkeypatch.setattr(rate, "SAMPLE_BYTES", 400)


@pytest.mark.usefixtures("small_sample")
def test_an_engine_that_lies_while_it_runs_is_caught_and_everything_is_built_by_the_reference(
    build, tmp_path, monkeypatch
):
    texts = list(TEXTS)
    texts[31] += " LIE"  # not looked at: it stands in a committed chunk, wrong, when the lie is found
    texts[90] += " LIE"
    source = str(write_jsonl(tmp_path / "a.jsonl", texts))
    expected = build(source, engine="hf", cache_dir=str(tmp_path / "reference"))
    committed = []
    commit = build_module.commit
    monkeypatch.setattr(build_module, "commit", lambda *a: committed.append(a[1]) or commit(*a))
    lie_about(monkeypatch, "LIE", 90)
    cache = build(source, engine="auto")
    engines_used = [record.engine.split()[0] for record in committed]
    assert engines_used.count("fastokens") >= 2
    wrong = {r.payload_sha256 for r in committed if r.engine.startswith("fast")} - set(payloads(expected))
    assert wrong, "the lie must have got into a chunk for this test to mean anything"
    assert payloads(cache) == payloads(expected)
    assert file_bytes(cache.folder) == file_bytes(expected.folder)
    assert all(read_record(cache.folder, n).engine.startswith("hf ") for n in range(cache.snapshot.num_chunks))
    suspect = store.read_sealed(next((cache.folder / "suspects").iterdir()))
    assert bytes.fromhex(suspect["text"]).decode() == texts[90]
    assert list((cache.folder / "quarantine").iterdir())
    # It is not believed again, not even when asked for by name.
    for engine in ("auto", "fastokens"):
        texts += make_texts(30, seed=10)
        write_jsonl(tmp_path / "a.jsonl", texts[-30:], "a")
        cache = build(source, engine=engine)
        assert texts_in(cache) == texts
        assert read_record(cache.folder, cache.snapshot.num_chunks - 1).engine.startswith("hf ")


@pytest.mark.usefixtures("small_sample")
def test_chunks_of_an_engine_that_lied_are_out_of_the_snapshot_even_if_the_builder_dies(build, tmp_path, monkeypatch):
    source = str(write_jsonl(tmp_path / "a.jsonl", TEXTS))
    expected = build(source, engine="hf", cache_dir=str(tmp_path / "reference"))
    cache = build(source, engine="fastokens")
    assert cache.num_sequences() > 0
    more = [*make_texts(50, seed=9), "LIE"]
    write_jsonl(tmp_path / "a.jsonl", more, "a")
    lie_about(monkeypatch, "LIE", 1)

    def die(*_):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(store, "quarantine", die)
        with pytest.raises(KeyboardInterrupt):
            build(source, engine="auto")
    assert open_cache(cache.folder).num_sequences() == 0
    again = build(source, engine="auto")
    assert payloads(again)[: expected.snapshot.num_chunks] == payloads(expected)
    assert texts_in(again) == [*TEXTS, *more]


@pytest.mark.parametrize("put_out", [0, 1, 3])
def test_a_builder_goes_on_when_another_finds_the_engine_wrong_and_removes_the_index(
    put_out, build, tmp_path, monkeypatch
):
    source = str(write_jsonl(tmp_path / "a.jsonl", TEXTS))
    expected = build(source, engine="hf", cache_dir=str(tmp_path / "reference"))
    assert expected.snapshot.num_chunks > 4
    monkeypatch.setattr(building, "GROWTH_SECONDS", 0.0)
    commit = build_module.commit

    def commit_beside_another(folder, record, *more):
        result = commit(folder, record, *more)
        if record.chunk == 3 and record.engine.startswith("fastokens"):
            Suspects(folder).add(EngineMismatch(record.engine, "a text"))
            Index(folder).forget()
            for chunk in range(put_out):
                Suspects(folder).put_out_of_use(chunk)
        return result

    monkeypatch.setattr(build_module, "commit", commit_beside_another)
    cache = build(source, engine="auto")
    assert list((cache.folder / "suspects").iterdir())
    assert file_bytes(cache.folder) == file_bytes(expected.folder)
    assert all(read_record(cache.folder, n).engine.startswith("hf ") for n in range(cache.snapshot.num_chunks))
    assert check_cache(cache.folder, "deep").is_good


def test_a_reference_that_no_longer_gives_the_ids_of_the_recipe_is_an_error(build, tmp_path, monkeypatch):
    source = str(write_jsonl(tmp_path / "a.jsonl", TEXTS))
    build(source)
    write_jsonl(tmp_path / "a.jsonl", ["more"], "a")
    monkeypatch.setattr(build_module, "probe_digest", lambda engine: "another")
    with pytest.raises(EngineMismatch, match="hf"):
        build(source)


def test_a_sentencepiece_form_builds_the_same_with_any_engine(build, tmp_path, llama_like):
    source = str(write_jsonl(tmp_path / "a.jsonl", TEXTS))
    caches = [build(source, tokenizer=str(llama_like), engine=e, cache_dir=str(tmp_path / e)) for e in ("hf", "auto")]
    assert payloads(caches[0]) == payloads(caches[1])
    assert [t.strip() for t in texts_in(caches[0])] == [t.strip() for t in TEXTS]
    assert (all_tokens(caches[0]) == caches[0].recipe.bos_id).any()


@pytest.mark.usefixtures("small_sample")
def test_the_first_real_document_of_every_builder_is_looked_at(build, tmp_path, monkeypatch):
    source = str(write_jsonl(tmp_path / "a.jsonl", TEXTS))
    build(source, engine="fastokens")
    more = make_texts(50, seed=9)
    more[0] = "LIE"
    write_jsonl(tmp_path / "a.jsonl", more, "a")
    lie_about(monkeypatch, "LIE", 1_000)
    monkeypatch.setattr(planner, "tokens_per_byte", lambda *_: 0.3)
    cache = build(source, engine="auto")
    assert list((cache.folder / "suspects").iterdir())
    assert texts_in(cache) == [*TEXTS, *more]
