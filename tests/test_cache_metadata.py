"""Laws of metadata.json: its figures are those of the cache, and nothing depends on it."""

import json
import shutil

import numpy as np
import pytest

from conftest import make_texts, write_jsonl
from packhorse.cache import open_cache

TEXTS = make_texts(60, seed=3, words=30)


@pytest.fixture
def source(tmp_path) -> str:
    return str(write_jsonl(tmp_path / "a.jsonl", TEXTS))


def metadata(cache) -> dict:
    return json.loads((cache.folder / "metadata.json").read_text())


@pytest.mark.parametrize("packing", [{}, {"packing": "pad"}, {"packing": "window", "overlap": 8}], ids=str)
def test_its_figures_are_counted_again_from_the_sequences(build, source, gpt2_like, packing):
    cache = build(source, **packing)
    found = metadata(cache)
    lengths, repeated = {}, 0
    for split in ("train", "eval"):
        rows = cache.read(np.arange(cache.num_sequences(split)), split)
        lengths[split] = [int(own.sum()) for own in rows.piece_lengths]
        repeated += sum(int(own.sum()) for own in rows.repeated or [])
        assert found[split]["sequences"] == len(lengths[split])
        assert found[split]["tokens"] == sum(lengths[split])
        assert found["dtype"] == str(rows.tokens.dtype)
    counts = [*lengths["train"], *lengths["eval"]]
    assert (found["version"], found["max_length"], found["total_sequences"]) == (1, 32, len(counts))
    assert found["total_chunks"] == cache.snapshot.num_chunks
    assert found["train"]["documents"] + found["eval"]["documents"] == len(TEXTS)
    assert found["compression_enabled"] is True
    assert found["model_name"] == str(gpt2_like)
    assert found["tokenizer_fingerprint"] == cache.recipe.tokenizer
    assert found["sizes"]["text_bytes"] == sum(len(text.encode()) for text in TEXTS)
    assert [entry["files"] for entry in found["sources"]] == [1]
    stats = found["utilization_stats"]
    assert stats["total_slots"] == 32 * len(counts)
    assert stats["total_tokens"] == sum(counts)
    assert stats["avg_utilization"] == pytest.approx(np.mean(counts) / 32, abs=1e-6)
    assert stats["efficiency_ratio"] == pytest.approx((sum(counts) - repeated) / (32 * len(counts)), abs=1e-6)


def test_without_compression_it_says_so_and_a_stream_has_documents(build):
    found = metadata(build(TEXTS, compression="none"))
    assert found["compression_enabled"] is False
    assert [(entry["files"], entry["documents"]) for entry in found["sources"]] == [(0, len(TEXTS))]


def test_a_file_that_grew_is_one_file_of_its_latest_size(build, source, tmp_path):
    for seed in (4, 5):
        write_jsonl(tmp_path / "a.jsonl", make_texts(30, seed=seed, words=30), "a")
        (entry,) = metadata(build(source))["sources"]
        assert (entry["files"], entry["bytes"]) == (1, (tmp_path / "a.jsonl").stat().st_size)
    write_jsonl(tmp_path / "b.jsonl", make_texts(30, seed=6, words=30))
    paths = [tmp_path / "a.jsonl", tmp_path / "b.jsonl"]
    found = metadata(build([str(path) for path in paths]))["sources"]
    assert sum(entry["files"] for entry in found) == 2
    assert sum(entry["bytes"] for entry in found) == sum(path.stat().st_size for path in paths)


def test_another_name_of_an_equal_tokenizer_is_accepted_and_said(build, source, gpt2_like, tmp_path, capsys):
    from packhorse.cache import CacheSettings, update_cache

    first = build(source)
    shutil.copytree(gpt2_like, tmp_path / "other-name")
    settings = {"tokenizer": str(tmp_path / "other-name"), "cache_dir": str(tmp_path / "cache"), "sequence_length": 32}
    more = {"sequences_per_chunk": 20, "eval_share": 0.1, "workers": 0, "engine": "hf"}
    cache = update_cache(CacheSettings(source=source, **settings, **more))
    assert cache.snapshot.digest == first.snapshot.digest
    said = capsys.readouterr()
    assert "other-name has the content of" in said.out + said.err
    assert metadata(cache)["model_name"] == str(gpt2_like)


@pytest.mark.parametrize("content", [b"", b"nonsense", b'{"max_length": 7, "dtype": "../../etc"}'])
def test_nothing_is_read_from_it(build, source, content):
    cache = build(source)
    (cache.folder / "metadata.json").write_bytes(content)
    again = build(source)
    assert again.snapshot.digest == cache.snapshot.digest
    assert open_cache(cache.folder).summary == cache.summary
