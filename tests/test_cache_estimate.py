"""Laws of `cache estimate`: the truth lies in the interval, and nothing is built."""

import gzip
import json
import random
import shutil
from collections import namedtuple

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from conftest import WORDS, make_texts, write_jsonl
from packhorse.cache import CacheSettings, places, space
from packhorse.cache.commands import run_cache_command
from packhorse.cache.estimate import estimate_cache
from packhorse.errors import SourceError, StorageFullError

SEEDS = 30


def skewed_texts(count: int) -> list[str]:
    """Lengths over four orders of magnitude, and at the end of the file another language."""
    draw = random.Random(1)
    texts = []
    for number in range(count):
        kind = number / count + 0.3 * draw.random()
        words = ["мир", "слово", "世界", "zzqx"] if kind > 0.9 else WORDS[:20]
        texts.append(f"{number} " + " ".join(draw.choices(words, k=max(1, int(draw.lognormvariate(3.3, 1.5))))))
    return texts


def settings_for(source, tokenizer, folder, **more) -> CacheSettings:
    defaults = {"sequence_length": 64, "sequences_per_chunk": 250, "workers": 0, "engine": "fastokens"}
    return CacheSettings(
        source=source, tokenizer=str(tokenizer), cache_dir=str(folder / "cache"), **{**defaults, **more}
    )


def truth_of(cache) -> dict[str, int]:
    summary = cache.summary
    return {
        "documents": summary.documents,
        "tokens": summary.tokens - summary.repeated_tokens,
        "sequences": summary.train_sequences + summary.eval_sequences,
        "chunks": summary.chunks,
        "disk_bytes": sum(path.stat().st_size for path in cache.folder.rglob("*") if path.is_file()),
    }


@pytest.fixture(scope="module")
def skewed(tmp_path_factory):
    folder = tmp_path_factory.mktemp("skewed")
    texts = skewed_texts(3_000)
    pq.write_table(pa.table({"text": texts}), folder / "a.parquet", row_group_size=300)
    lines = "".join(json.dumps({"text": text}, ensure_ascii=False) + "\n" for text in texts)
    (folder / "a.jsonl").write_text(lines)
    (folder / "a.jsonl.gz").write_bytes(gzip.compress(lines.encode()))
    return folder


@pytest.mark.parametrize("kind", ["jsonl", "parquet"])
def test_nine_of_ten_intervals_hold_the_truth_on_skewed_text(build, skewed, gpt2_like, tmp_path, monkeypatch, kind):
    monkeypatch.setattr(places, "PLACE_BYTES", 2_000)
    settings = settings_for(str(skewed / f"a.{kind}"), gpt2_like, tmp_path)
    found = [estimate_cache(settings, places=100, seed=seed) for seed in range(SEEDS)]
    assert not (tmp_path / "cache").exists()
    cache = build(settings.source, sequence_length=64, sequences_per_chunk=250, eval_share=settings.eval_share)
    for name, truth in truth_of(cache).items():
        figures = [getattr(estimate, name) for estimate in found]
        assert sum(figure.low <= truth <= figure.high for figure in figures) >= 0.9 * SEEDS, name
        if name == "tokens":
            assert all(figure.high - figure.low < 0.25 * truth for figure in figures), "an interval must say something"


@pytest.mark.parametrize(
    "more",
    [
        {"packing": "pad"},
        {"packing": "pad", "long_documents": "truncate"},
        {"packing": "window", "overlap": 16},
        {"packing": "concat", "compression": "none"},
        {"max_documents": 700},
        {"max_tokens": 100_000},
    ],
    ids=str,
)
def test_every_packing_is_estimated_as_it_is_built(build, skewed, gpt2_like, tmp_path, more):
    source = str(skewed / "a.parquet")
    estimate = estimate_cache(settings_for(source, gpt2_like, tmp_path, **more), places=60)
    cache = build(source, sequence_length=64, sequences_per_chunk=250, eval_share=0.02, **more)
    for name, truth in truth_of(cache).items():
        if name != "chunks":
            assert getattr(estimate, name).estimate == pytest.approx(truth, rel=0.25), name


def test_packed_files_are_looked_into(skewed, gpt2_like, tmp_path):
    plain, packed = (
        estimate_cache(settings_for(str(skewed / name), gpt2_like, tmp_path), places=60)
        for name in ("a.jsonl", "a.jsonl.gz")
    )
    assert packed.tokens == plain.tokens
    assert [path.name for path in tmp_path.iterdir()] == []


class Sized:
    """A stream that says how much text it has."""

    def __init__(self, texts: list[str]) -> None:
        self.texts, self.text_bytes = texts, sum(len(text.encode()) for text in texts)

    def __iter__(self):
        return iter(self.texts)


def test_a_stream_is_estimated_by_what_it_says_of_its_size_or_by_max_documents(gpt2_like, tmp_path):
    texts = make_texts(3_000, seed=4)
    by_size = estimate_cache(settings_for(Sized(texts), gpt2_like, tmp_path), places=30)
    by_count = estimate_cache(settings_for(texts, gpt2_like, tmp_path, max_documents=3_000), places=30)
    assert by_size.documents.estimate == pytest.approx(3_000, rel=0.1)
    assert by_count.tokens.estimate == pytest.approx(by_size.tokens.estimate, rel=0.1)
    with pytest.raises(SourceError, match="does not say how much text it has"):
        estimate_cache(settings_for(texts, gpt2_like, tmp_path))


@pytest.mark.parametrize("name", ["a.jsonl", "a.jsonl.gz", "a.json", "a.json.gz"])
@pytest.mark.parametrize("rows", [[], [{"text": None}, {"text": " "}]], ids=["no rows", "rows without text"])
def test_files_without_text_are_refused_as_a_build_refuses_them(name, rows, build, gpt2_like, tmp_path):
    lines = "".join(json.dumps(row) + "\n" for row in rows) if "jsonl" in name else json.dumps(rows)
    path = tmp_path / name
    path.write_bytes(gzip.compress(lines.encode()) if path.suffix == ".gz" else lines.encode())
    with pytest.raises(SourceError, match="The sources have no text"):
        estimate_cache(settings_for(str(path), gpt2_like, tmp_path))
    with pytest.raises(SourceError, match="The sources have no text"):
        build(str(path))
    both = [str(path), str(write_jsonl(tmp_path / "b.jsonl", make_texts(3_000)))]
    found = estimate_cache(settings_for(both, gpt2_like, tmp_path))
    assert found.documents.estimate == pytest.approx(3_000, rel=0.1)


@pytest.mark.parametrize("texts", [[], [" ", ""]], ids=["no rows", "rows without text"])
def test_a_stream_without_text_is_refused(texts, gpt2_like, tmp_path):
    with pytest.raises(SourceError, match="The sources have no text"):
        estimate_cache(settings_for(Sized(texts), gpt2_like, tmp_path))


def test_documents_that_begin_at_no_place_are_not_taken_for_none(gpt2_like, tmp_path):
    (tmp_path / "a.txt").write_text("a book of books in one line " * 60_000)
    with pytest.raises(SourceError, match=r"None of the documents of .* begins at .* 30 places (.|\n)*--places"):
        estimate_cache(settings_for(str(tmp_path / "a.txt"), gpt2_like, tmp_path), places=30)


@pytest.mark.parametrize("most", [3_000, 10**9])
@pytest.mark.parametrize("packing", ["best_fit", "pad"])
def test_files_that_are_one_document_each_are_estimated(build, gpt2_like, tmp_path, monkeypatch, packing, most):
    monkeypatch.setattr(places, "MOST_OF_A_DOCUMENT", most)
    (tmp_path / "books").mkdir()
    for number, text in enumerate([*skewed_texts(3_000)[::20], "a book of books " * 1_000, " "]):
        (tmp_path / "books" / f"{number}.txt").write_text(text)
    settings = settings_for(str(tmp_path / "books"), gpt2_like, tmp_path, sample_by="document", packing=packing)
    estimate = estimate_cache(settings, places=400)
    cache = build(settings.source, sequence_length=64, sequences_per_chunk=250, sample_by="document", packing=packing)
    assert cache.summary.documents == 151
    for name in ("documents", "tokens", "sequences"):
        figure, truth = getattr(estimate, name), truth_of(cache)[name]
        assert figure.low * 0.95 <= truth <= figure.high * 1.05, name
        assert figure.estimate == pytest.approx(truth, rel=0.35), name


def test_a_build_that_would_not_fit_is_refused_before_its_first_chunk(build, skewed, gpt2_like, tmp_path, monkeypatch):
    source = str(skewed / "a.parquet")
    estimate = estimate_cache(settings_for(source, gpt2_like, tmp_path, compression="max"))
    usage = namedtuple("usage", "total used free")
    free = int(estimate.disk_bytes.low * 0.9)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage(10**9, 0, free))
    same = {"sequence_length": 64, "sequences_per_chunk": 250, "eval_share": 0.02, "compression": "max"}
    with pytest.raises(StorageFullError, match=r"may take .* MB, and the disk has .* MB left; nothing was built"):
        build(source, **same)
    assert not list((tmp_path / "cache").rglob("*.chunk"))
    assert not list((tmp_path / "cache").rglob("plan/*.json")), "what is planned would be built by whoever comes next"
    free = int(estimate.disk_bytes.high * 1.1)
    raw = 2 * estimate.tokens.estimate
    assert free < raw, "so that the sources must be looked at"
    cache = build(source, **same)
    assert cache.summary.documents == 3_000
    monkeypatch.setattr(space, "estimate_cache", None)
    build(source, **same)  # nothing is missing: nothing is looked at


def test_a_stream_that_would_not_fit_is_refused_by_its_plan(build, monkeypatch):
    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage(10**9, 0, 3_000))
    with pytest.raises(StorageFullError, match="nothing was built"):
        build(make_texts(200))


def test_the_command_says_whether_the_disk_is_large_enough(skewed, gpt2_like, tmp_path, capsys, monkeypatch):
    arguments = ["estimate", "--data.source", str(skewed / "a.jsonl"), "--data.tokenizer", str(gpt2_like)]
    arguments += ["--data.cache_dir", str(tmp_path / "cache"), "--places", "40"]
    assert run_cache_command(arguments) == 0
    said = capsys.readouterr().out
    assert "tokens" in said
    assert " to " in said
    usage = namedtuple("usage", "total used free")(10**9, 10**9, 1_000)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage)
    assert run_cache_command([*arguments, "--json"]) == 1
    values = json.loads(capsys.readouterr().out)
    assert values["fits"] is False
    assert values["tokens"]["low"] < values["tokens"]["estimate"] < values["tokens"]["high"]
