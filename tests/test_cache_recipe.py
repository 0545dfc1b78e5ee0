"""Laws of recipes: another recipe is another cache, the same one is found again, and refusals say why."""

import hashlib
import json
import shutil
from dataclasses import MISSING, asdict, fields

import numpy as np
import pytest

from conftest import all_tokens, documents_in, make_texts, payloads, texts_in, write_jsonl
from packhorse.cache import CacheSettings, DataSettings, build_cache, open_cache, store
from packhorse.cache.record import Record, read_record, record_path
from packhorse.errors import (
    CacheCorruptionError,
    CacheIncompleteError,
    RecipeMismatch,
    SourceError,
    TokenizerError,
)

TEXTS = make_texts(40, seed=2, words=15)
OLD_FIELDS = (
    "format tokenizer tokenizer_probe vocab_size bos_id eos_id pad_id split_special_tokens text_column sample_by "
    "sequence_length packing eval_share"
).split()
"""Of the first recipes that were written."""


@pytest.fixture
def source(tmp_path) -> str:
    return str(write_jsonl(tmp_path / "a.jsonl", TEXTS))


def test_every_recipe_has_a_folder_of_its_own(build, source, qwen_like, llama_like):
    variants = [
        *({}, {"sequence_length": 16}, {"packing": "concat"}, {"eval_share": 0.2}, {"add_eos": False}),
        *({"split_special_tokens": False}, {"tokenizer": str(qwen_like)}, {"tokenizer": str(llama_like)}),
        {"tokenizer": str(llama_like), "add_bos": False},
    ]
    caches = [build(source, **variant) for variant in variants]
    assert len({cache.folder for cache in caches}) == len(variants)
    for cache, variant in zip(caches, variants, strict=True):
        assert build(source, **variant).snapshot.digest == cache.snapshot.digest


def test_what_does_not_decide_tokens_is_not_in_the_recipe(build, source):
    first = build(source)
    for variant in ({"compression": "max"}, {"engine": "fastokens"}, {"sequences_per_chunk": 7}, {"workers": 1}):
        again = build(source, **variant)
        assert again.folder == first.folder
        assert again.snapshot.digest == first.snapshot.digest


def test_fields_that_are_added_to_recipes_and_records_leave_old_caches_as_they_are(build, source):
    cache = build(source)
    recipe, path = cache.recipe, record_path(cache.folder, 0)
    plain = {name: value for name, value in asdict(recipe).items() if name in OLD_FIELDS}
    assert recipe.digest == hashlib.sha256(store.canonical(plain)).hexdigest()
    assert store.read_sealed(cache.folder / "recipe.json")["recipe"] == plain
    record, expected = store.read_sealed(path), read_record(cache.folder, 0)
    added = {field.name for field in fields(Record) if field.default is not MISSING} - {"format"}
    store.replace(path, store.seal({name: value for name, value in record.items() if name not in added}))
    assert read_record(cache.folder, 0) == expected
    assert open_cache(cache.folder).summary == cache.summary


def test_a_cache_named_by_its_folder_is_refused_with_field_and_both_values(build, source):
    cache = build(source)
    settings = {"cache_dir": str(cache.folder), "sequence_length": 64, "packing": "concat"}
    with pytest.raises(RecipeMismatch) as caught:
        build(source, **settings)
    message = str(caught.value)
    assert str(cache.folder) in message
    assert "sequence_length: on disk 32, asked for 64" in message
    assert "packing: on disk best_fit, asked for concat" in message
    assert "cache_dir" in message
    assert "on_mismatch: rebuild" in message
    assert payloads(build(source, cache_dir=str(cache.folder))) == payloads(cache)


def test_on_mismatch_rebuild_moves_the_old_one_away_whole(build, source):
    cache = build(source)
    before = all_tokens(cache)
    for number in (1, 2):
        new = build(source, cache_dir=str(cache.folder), sequence_length=16 * number, on_mismatch="rebuild", name="x")
        assert new.sequence_length == 16 * number
    old = open_cache(cache.folder.with_name(f"{cache.folder.name}.old-1"))
    assert np.array_equal(all_tokens(old), before)


def test_on_mismatch_rebuild_moves_the_folder_that_one_is_in(build, source, monkeypatch):
    cache = build(source)
    before = all_tokens(cache)
    monkeypatch.chdir(cache.folder)
    new = build(source, cache_dir=".", sequence_length=16, on_mismatch="rebuild")
    assert open_cache(cache.folder).recipe == new.recipe
    old = open_cache(cache.folder.with_name(f"{cache.folder.name}.old-1"))
    assert np.array_equal(all_tokens(old), before)


def test_the_same_tokenizer_under_another_name_finds_the_same_cache(build, source, gpt2_like, tmp_path):
    cache = build(source)
    shutil.copytree(gpt2_like, tmp_path / "other name")
    text = json.loads((tmp_path / "other name/tokenizer.json").read_text())
    (tmp_path / "other name/tokenizer.json").write_text(json.dumps(text, indent=1))
    again = build(source, tokenizer=str(tmp_path / "other name"))
    assert again.folder == cache.folder
    assert build(source, tokenizer=str(gpt2_like / "tokenizer.json")).folder == cache.folder


def test_a_retrained_tokenizer_under_the_old_name_gets_another_cache(build, source, gpt2_like, tmp_path):
    shutil.copytree(gpt2_like, tmp_path / "mine")
    cache = build(source, tokenizer=str(tmp_path / "mine"))
    text = json.loads((tmp_path / "mine/tokenizer.json").read_text())
    text["model"]["merges"] = text["model"]["merges"][:-50]
    (tmp_path / "mine/tokenizer.json").write_text(json.dumps(text))
    assert build(source, tokenizer=str(tmp_path / "mine")).folder != cache.folder


def test_a_cache_copied_under_the_name_of_another_is_refused(build, source):
    first, second = build(source), build(source, packing="concat")
    shutil.rmtree(second.folder)
    shutil.copytree(first.folder, second.folder)
    with pytest.raises(RecipeMismatch, match="packing: on disk best_fit, asked for concat"):
        build(source, packing="concat")


def test_what_is_remembered_of_a_tokenizer_is_read_again_when_it_is_damaged(build, source, tmp_path):
    cache = build(source)
    (memo,) = (tmp_path / "cache/tokenizers").iterdir()
    data = memo.read_bytes()
    for damaged in (b"", data[:-9], data.replace(b'"vocab_size":600', b'"vocab_size":601')):
        memo.write_bytes(damaged)
        assert build(source).folder == cache.folder
        assert memo.read_bytes() == data


def test_documents_are_enclosed_as_the_recipe_says(build, source, llama_like):
    for bos, eos in ((True, True), (False, True), (True, False), (None, True)):
        cache = build(source, tokenizer=str(llama_like), add_bos=bos, add_eos=eos)
        for ids in documents_in(cache):
            assert (ids[0] == cache.recipe.bos_id) == (bos is not False)
            assert (ids[-1] == cache.recipe.eos_id) == eos
        assert [text.strip() for text in texts_in(cache)] == [text.strip() for text in TEXTS]


def test_special_tokens_written_in_a_text_stay_text_by_default(build):
    texts = ["an <|endoftext|> in the middle", "<|endoftext|>"]
    cache = build(texts, eval_share=0.0)
    eos = cache.recipe.eos_id
    assert (all_tokens(cache) == eos).sum() - (cache.summary.slots - cache.summary.tokens) == 2
    assert texts_in(cache) == texts
    control = build(texts, eval_share=0.0, split_special_tokens=False, add_eos=True)
    assert (all_tokens(control) == eos).sum() - (control.summary.slots - control.summary.tokens) == 4


def test_bos_that_the_tokenizer_has_not_is_refused(build, source):
    with pytest.raises(TokenizerError, match="add_bos: false"):
        build(source, add_bos=True)


def test_no_tokenizer_is_refused(tmp_path, source):
    with pytest.raises(TokenizerError, match="No tokenizer is named"):
        build_cache(source, cache_dir=str(tmp_path))


@pytest.mark.parametrize(
    ("name", "value"),
    [
        *(("sequence_length", 1), ("sequence_length", 200_000), ("eval_share", 1.0), ("eval_share", -0.1)),
        *(("sequences_per_chunk", 0), ("max_documents", 0), ("workers", -1), ("train_tokenizer", 100)),
        *(("packing", "first_fit"), ("compression", "zip"), ("engine", "rust"), ("sample_by", "word")),
        *(("on_mismatch", "ignore"), ("name", "a/b"), ("name", ".hidden"), ("name", "")),
    ],
)
def test_settings_that_make_no_sense_are_refused_where_they_are_set(name, value):
    for kind in (CacheSettings, DataSettings):
        with pytest.raises(ValueError, match=name):
            kind(tokenizer="x", **{name: value})


def test_data_settings_hold_the_settings_of_the_cache():
    data = DataSettings(source="x", sequence_length=64, micro_batch_size=2)
    assert data.cache == CacheSettings(source="x", sequence_length=64)
    with pytest.raises(ValueError, match="micro_batch_size"):
        DataSettings(micro_batch_size=0)


def test_a_cache_that_does_not_exist_is_said_to_be_missing(tmp_path, source, gpt2_like):
    settings = CacheSettings(source=source, tokenizer=str(gpt2_like), cache_dir=str(tmp_path / "none"))
    for what in (settings, tmp_path / "none"):
        with pytest.raises(CacheIncompleteError, match="packhorse cache build"):
            open_cache(what)
    assert not list((tmp_path / "none").rglob("*.chunk"))


def test_a_format_that_is_not_known_is_refused(build, source):
    cache = build(source)
    value = store.read_sealed(cache.folder / "recipe.json")
    value["recipe"]["format"] = 99
    value["recipe"]["something_new"] = 1
    (cache.folder / "recipe.json").write_bytes(store.seal(value))
    with pytest.raises(CacheCorruptionError, match="format 99"):
        open_cache(cache.folder)


def test_a_tokenizer_is_trained_once_on_the_source(build, source, tmp_path):
    settings = {"tokenizer": str(tmp_path / "trained"), "train_tokenizer": 300}
    cache = build(source, **settings)
    assert cache.vocab_size == 300
    stamp = (tmp_path / "trained/tokenizer.json").stat().st_mtime_ns
    assert build(source, **settings).folder == cache.folder
    assert (tmp_path / "trained/tokenizer.json").stat().st_mtime_ns == stamp
    with pytest.raises(TokenizerError, match="was trained for 300 entries"):
        build(source, **{**settings, "train_tokenizer": 301})
    (tmp_path / "trained/tokenizer_config.json").unlink()
    assert build(source, **settings).vocab_size == 300
    with pytest.raises(SourceError, match="no text to train"):
        build([""], tokenizer=str(tmp_path / "second"), train_tokenizer=300)


def test_the_tokenizer_copy_in_a_cache_is_read_by_transformers(build, source, gpt2_like):
    from transformers import AutoTokenizer

    cache = build(source)
    tokenizer = AutoTokenizer.from_pretrained(cache.tokenizer_folder)
    assert tokenizer.eos_token_id == cache.recipe.eos_id
    assert tokenizer.decode(tokenizer(TEXTS[0])["input_ids"]) == TEXTS[0]
