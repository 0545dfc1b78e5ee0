"""Laws of damage: whatever happens to the files of a cache, it gives the right tokens or an error, never wrong ones."""

import itertools
import os
import pickle
import shutil

import numpy as np
import pytest

from conftest import all_tokens, file_bytes, make_texts, payloads, write_jsonl
from packhorse.cache import Cache, snapshot, store
from packhorse.cache.check import check_cache
from packhorse.cache.plan import Plan
from packhorse.cache.record import chunk_path, read_record, record_path
from packhorse.cache.snapshot import Index
from packhorse.cache.states import find_states
from packhorse.errors import CacheCorruptionError, CacheError, CacheIncompleteError


@pytest.fixture
def cache(build, tmp_path):
    """Three chunks of a few sequences."""
    source = write_jsonl(tmp_path / "a.jsonl", make_texts(30, words=20))
    made = build(str(source), sequences_per_chunk=12, packing="concat")
    assert made.snapshot.num_chunks >= 3
    return made


def read_everything(folder):
    """All tokens of a cache; every derived and every original file is read on the way."""
    cache = Cache(folder)
    Plan(folder)
    _ = cache.summary
    _ = cache.snapshot.digest
    return all_tokens(cache), all_tokens(cache, "eval")


def damage(path):
    """Flip every byte, then cut the file everywhere, in place: writing it anew each time takes ten times as long."""
    data = path.read_bytes()
    with path.open("r+b", buffering=0) as file:
        for place in range(len(data)):
            os.pwrite(file.fileno(), bytes([data[place] ^ 0x40]), place)
            yield
            os.pwrite(file.fileno(), data[place : place + 1], place)
        for size in reversed(range(len(data))):
            file.truncate(size)
            yield


@pytest.mark.parametrize("pattern", ["recipe.json", "plan/*.json", "records/*/*01.json", "index/*.idx"])
def test_every_damaged_byte_of_a_metadata_file_is_refused(cache, pattern):
    path = next(iter(sorted(cache.folder.glob(pattern))))
    for _ in damage(path):
        with pytest.raises(CacheError) as caught:
            read_everything(cache.folder)
        assert path.name in str(caught.value) or isinstance(caught.value, CacheIncompleteError)


def test_an_index_page_under_a_wrong_name_is_refused(cache):
    page = next((cache.folder / "index").iterdir())
    count = cache.snapshot.num_chunks
    for name in (f"000000000-{count + 1:04d}.idx", f"000000000-{count - 1:04d}.idx"):
        page = page.rename(page.with_name(name))
        with pytest.raises(CacheCorruptionError, match=name):
            read_everything(cache.folder)


def test_a_damaged_byte_of_any_chunk_is_refused_and_the_rest_can_be_read(cache):
    path = next(iter(sorted((cache.folder / "chunks").rglob("00000001-*.chunk"))))
    for _ in itertools.islice(damage(path), 0, None, 7):
        with pytest.raises(CacheCorruptionError):
            _ = [Cache(cache.folder).chunk(n).content_digest() for n in range(3)]
    first = read_record(cache.folder, 0).train_sequences
    assert len(Cache(cache.folder).read(np.arange(first)).tokens) == first


def test_a_damaged_file_is_named_with_what_to_do(cache):
    path = next(iter((cache.folder / "chunks").rglob("*.chunk")))
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(CacheCorruptionError, match="packhorse cache validate") as caught:
        read_everything(cache.folder)
    assert str(path) in str(caught.value)


def test_two_chunk_files_that_were_swapped_are_refused(cache):
    paths = [chunk_path(cache.folder, n, read_record(cache.folder, n).file_sha256) for n in (0, 1)]
    data = [path.read_bytes() for path in paths]
    paths[0].write_bytes(data[1])
    paths[1].write_bytes(data[0])
    for number in (0, 1):
        with pytest.raises(CacheCorruptionError):
            Cache(cache.folder).chunk(number)


def test_a_chunk_of_another_cache_is_refused(cache, build, tmp_path):
    other = build(str(tmp_path / "a.jsonl"), sequences_per_chunk=12, packing="best_fit")
    path, foreign = (chunk_path(c.folder, 0, read_record(c.folder, 0).file_sha256) for c in (cache, other))
    path.write_bytes(foreign.read_bytes())
    with pytest.raises(CacheCorruptionError):
        Cache(cache.folder).read([0])


def test_a_record_that_was_copied_to_another_number_is_refused(cache, build, tmp_path):
    shutil.copy(record_path(cache.folder, 0), record_path(cache.folder, 1))
    with pytest.raises(CacheCorruptionError, match="record of chunk 0"):
        read_record(cache.folder, 1)
    shutil.rmtree(cache.folder / "index")
    with pytest.raises(CacheCorruptionError, match="record of chunk 0"):
        rebuilt(build, tmp_path)


def test_records_of_another_recipe_or_of_other_ranges_are_refused_by_the_next_build(cache, build, tmp_path):
    source = str(tmp_path / "a.jsonl")
    for settings in ({"packing": "best_fit"}, {"packing": "concat", "sequences_per_chunk": 7, "name": "other"}):
        other = build(source, **{"sequences_per_chunk": 12, **settings})
        copy = tmp_path / "copy"
        shutil.copytree(cache.folder, copy)
        shutil.rmtree(copy / "index")
        shutil.copy(record_path(other.folder, 1), record_path(copy, 1))
        shutil.copytree(other.folder / "chunks", copy / "chunks", dirs_exist_ok=True)
        with pytest.raises(CacheCorruptionError, match=r"another recipe|not of what is planned"):
            build(source, cache_dir=str(copy), packing="concat", sequences_per_chunk=12)
        shutil.rmtree(copy)


@pytest.mark.parametrize("kind", ["link", "folder", "pipe"])
def test_a_chunk_that_is_not_a_file_is_refused_and_never_waited_for(cache, tmp_path, kind):
    path = chunk_path(cache.folder, 0, read_record(cache.folder, 0).file_sha256)
    path.rename(tmp_path / "elsewhere")
    if kind == "link":
        path.symlink_to(tmp_path / "elsewhere")
    elif kind == "folder":
        path.mkdir()
    else:
        os.mkfifo(path)
    with pytest.raises(CacheError, match=path.name):
        Cache(cache.folder).read([0])


def test_a_chunk_that_is_a_link_is_told_so_and_built_again(cache, build, tmp_path):
    tokens, path = all_tokens(cache), chunk_path(cache.folder, 0, read_record(cache.folder, 0).file_sha256)
    path.rename(tmp_path / "elsewhere")
    path.symlink_to(tmp_path / "elsewhere")
    assert find_states(cache.folder, Plan(cache.folder), Index(cache.folder)).damaged == [0]
    with pytest.raises(CacheCorruptionError, match="is a symbolic link"):
        Cache(cache.folder).read([0])
    (finding,) = check_cache(cache.folder, "quick").findings
    assert "is a link" in finding.problem
    assert (all_tokens(rebuilt(build, tmp_path)) == tokens).all()
    assert not path.is_symlink()


# -- what is lost is built again


def rebuilt(build, tmp_path, source=None, **settings):
    return build(source or str(tmp_path / "a.jsonl"), **{"sequences_per_chunk": 12, "packing": "concat", **settings})


@pytest.mark.parametrize(
    "lost", ["index", "metadata.json", "records/000000/00000001.json", "records", "chunks", "tokenizer+recipe.json"]
)
def test_what_is_lost_is_built_again_just_as_it_was(cache, build, tmp_path, lost):
    before, tokens, digest = file_bytes(cache.folder), all_tokens(cache), cache.snapshot.digest
    for name in lost.split("+"):
        path = cache.folder / name
        shutil.rmtree(path) if path.is_dir() else path.unlink()
    again = rebuilt(build, tmp_path)
    assert file_bytes(again.folder) == before
    assert np.array_equal(all_tokens(again), tokens)
    assert again.snapshot.digest == digest
    assert (cache.folder / "metadata.json").exists()


def test_a_chunk_file_that_was_moved_away_is_built_again(cache, build, tmp_path):
    before = file_bytes(cache.folder)
    chunk_path(cache.folder, 1, read_record(cache.folder, 1).file_sha256).unlink()
    with pytest.raises(CacheIncompleteError, match="packhorse cache build"):
        Cache(cache.folder).chunk(1)
    assert file_bytes(rebuilt(build, tmp_path).folder) == before


def test_a_lost_chunk_may_be_built_again_with_another_codec(cache, build, tmp_path):
    tokens, hashes = all_tokens(cache), payloads(cache)
    chunk_path(cache.folder, 1, read_record(cache.folder, 1).file_sha256).unlink()
    again = rebuilt(build, tmp_path, compression="none")
    assert read_record(cache.folder, 1).codec == "none"
    assert payloads(again) == hashes
    assert np.array_equal(all_tokens(again), tokens)
    assert np.array_equal(all_tokens(Cache(cache.folder)), tokens)


def test_a_damaged_chunk_without_a_record_does_not_come_back_with_a_new_record(cache, build, tmp_path):
    before = file_bytes(cache.folder)
    path = chunk_path(cache.folder, 1, read_record(cache.folder, 1).file_sha256)
    data = path.read_bytes()
    path.write_bytes(data[:-9] + bytes(9))
    record_path(cache.folder, 1).unlink()
    assert file_bytes(rebuilt(build, tmp_path).folder) == before


def test_other_tokens_for_a_committed_chunk_are_an_error_and_overwrite_nothing(cache, build, tmp_path, monkeypatch):
    from packhorse.cache import build as builder
    from packhorse.errors import NonDeterministicBuildError

    path = chunk_path(cache.folder, 1, read_record(cache.folder, 1).file_sha256)
    record = record_path(cache.folder, 1).read_bytes()
    path.unlink()

    def tokenize_wrongly(*args, **kwargs):
        for tokens in tokenize(*args, **kwargs):
            tokens.ids[0] ^= 1
            yield tokens

    tokenize = builder.tokenize
    monkeypatch.setattr(builder, "tokenize", tokenize_wrongly)
    with pytest.raises(NonDeterministicBuildError, match="Nothing was overwritten"):
        rebuilt(build, tmp_path)
    assert record_path(cache.folder, 1).read_bytes() == record


def test_a_lost_page_of_the_plan_is_never_planned_anew_under_chunks_that_exist(cache, build, tmp_path):
    page = cache.folder / "plan/000000.json"
    data = page.read_bytes()
    page.unlink()
    with pytest.raises(CacheCorruptionError, match=r"000000\.json is missing"):
        rebuilt(build, tmp_path)
    assert not page.exists()
    page.write_bytes(data)
    write_jsonl(tmp_path / "a.jsonl", make_texts(30, seed=4, words=20), "a")
    rebuilt(build, tmp_path)
    page.unlink()
    shutil.rmtree(cache.folder / "records")
    shutil.rmtree(cache.folder / "index")
    with pytest.raises(CacheCorruptionError, match=r"000000\.json is missing"):
        rebuilt(build, tmp_path)


def test_a_damaged_tokenizer_copy_is_refused_before_anything_is_built_with_it(cache, build, tmp_path):
    path = cache.folder / "tokenizer/tokenizer.json"
    path.write_bytes(path.read_bytes().replace(b"the", b"teh", 1))
    write_jsonl(tmp_path / "a.jsonl", make_texts(30, seed=4), "a")
    with pytest.raises(CacheCorruptionError, match=r"tokenizer\.json is damaged"):
        rebuilt(build, tmp_path)


@pytest.mark.parametrize("page_chunks", [2, 4_096])
def test_a_cache_without_its_index_opens_from_its_records_and_writes_nothing(cache, monkeypatch, page_chunks):
    tokens, digest, summary = all_tokens(cache), cache.snapshot.digest, cache.summary
    monkeypatch.setattr(snapshot, "PAGE_CHUNKS", page_chunks)
    shutil.rmtree(cache.folder / "index")
    opened = Cache(cache.folder)
    assert np.array_equal(all_tokens(opened), tokens)
    assert np.array_equal(all_tokens(pickle.loads(pickle.dumps(opened))), tokens)
    assert (opened.snapshot.digest, opened.summary) == (digest, summary)
    assert not (cache.folder / "index").exists()
    part = Cache(cache.folder, num_chunks=2)
    assert part.snapshot.digest == Cache(cache.folder, num_chunks=2).snapshot.digest


def test_without_an_index_only_chunks_that_belong_here_are_taken(cache, build, tmp_path):
    other = build(str(tmp_path / "a.jsonl"), sequences_per_chunk=12, packing="best_fit")
    shutil.rmtree(cache.folder / "index")
    store.make_folder(cache.folder / "suspects")
    engine = read_record(cache.folder, 0).engine
    suspect = cache.folder / "suspects/x.json"
    store.publish(suspect, store.seal({"engine": engine, "text": ""}))
    assert Cache(cache.folder).snapshot.num_chunks == 0
    suspect.unlink()
    shutil.copy(record_path(other.folder, 1), record_path(cache.folder, 1))
    with pytest.raises(CacheCorruptionError, match="of another recipe"):
        Cache(cache.folder)


# -- valid, but not what it should be


def reseal(path, change):
    """Change the value of a sealed file, and seal it again: what an old or hostile writer could have written."""
    value = store.read_sealed(path)
    change(value)
    path.write_bytes(store.seal(value))


@pytest.mark.parametrize("name", ["../../elsewhere", "/etc/passwd", "..", "a/../../b", "", ".", "a//b"])
def test_names_of_tokenizer_files_never_lead_out_of_the_cache(cache, name):
    digest = "0" * 64
    reseal(cache.folder / "recipe.json", lambda value: value["tokenizer_files"].update({name: digest}))
    with pytest.raises(CacheCorruptionError, match="cannot be called"):
        Cache(cache.folder)


@pytest.mark.parametrize(
    ("field", "value"),
    [("probe", "../../elsewhere"), ("probe", "0" * 64 + "\n"), ("kind", "/../../x"), ("packed", ".exe"), ("size", -1)],
)
def test_a_page_of_the_plan_cannot_name_a_spool_outside_of_the_cache(cache, field, value):
    page = cache.folder / "plan/000000.json"
    reseal(page, lambda content: content["files"][0].update({field: value}))
    with pytest.raises(CacheCorruptionError, match="not a page of a plan"):
        Plan(cache.folder)


@pytest.mark.parametrize("name", ["recipe.json", "plan/000000.json", "records/000000/00000001.json", "index"])
def test_a_metadata_file_that_is_a_pipe_or_a_folder_is_refused_and_never_waited_for(cache, name):
    path = cache.folder / name
    path = next(path.iterdir()) if path.is_dir() else path
    path.unlink()
    for make in (os.mkfifo, os.mkdir):
        make(path)
        with pytest.raises(CacheCorruptionError, match=path.name):
            read_everything(cache.folder)
        os.rmdir(path) if path.is_dir() else path.unlink()


def test_a_record_with_another_number_of_sequences_is_refused_when_its_chunk_is_opened(cache):
    reseal(record_path(cache.folder, 0), lambda value: value.update(train_sequences=value["train_sequences"] - 1))
    shutil.rmtree(cache.folder / "index")
    Index(cache.folder).extend(1, lambda record: True)
    with pytest.raises(CacheCorruptionError, match="other numbers of sequences"):
        Cache(cache.folder).read([0])


def test_a_damaged_tokenizer_copy_decodes_nothing(cache):
    path = cache.folder / "tokenizer/tokenizer.json"
    path.write_bytes(path.read_bytes().replace(b"the", b"teh", 1))
    with pytest.raises(CacheCorruptionError, match=r"tokenizer\.json is damaged"):
        Cache(cache.folder).decode([1, 2, 3])


def test_a_page_of_the_plan_of_another_cache_is_refused_by_the_next_build(cache, build, tmp_path):
    texts = make_texts(200, seed=5, words=20)
    other = build(str(write_jsonl(tmp_path / "b.jsonl", texts)), sequences_per_chunk=12, packing="concat")
    assert other.snapshot.num_chunks > cache.snapshot.num_chunks
    shutil.copy(other.folder / "plan/000000.json", cache.folder / "plan/000000.json")
    before = file_bytes(cache.folder)
    with pytest.raises(CacheError, match=r"page 0 of the plan in .* is that of another cache"):
        rebuilt(build, tmp_path, source=[str(tmp_path / "a.jsonl"), str(tmp_path / "b.jsonl")])
    assert file_bytes(cache.folder) == before


def test_a_recipe_of_another_cache_is_refused_before_anything_is_built_or_read(cache, build, tmp_path):
    other = build(str(tmp_path / "a.jsonl"), sequences_per_chunk=12, packing="best_fit")
    shutil.copy(other.folder / "recipe.json", cache.folder / "recipe.json")
    with pytest.raises(CacheCorruptionError):
        Cache(cache.folder).read([0])
    write_jsonl(tmp_path / "a.jsonl", make_texts(30, seed=4, words=20), "a")
    before = file_bytes(cache.folder)
    with pytest.raises(CacheCorruptionError, match=r"recipe\.json in .* is that of another cache"):
        rebuilt(build, tmp_path, packing="best_fit", cache_dir=str(cache.folder))
    assert file_bytes(cache.folder) == before


def test_an_index_page_of_another_cache_is_refused_when_it_is_read(cache, build, tmp_path):
    other = build(str(tmp_path / "a.jsonl"), sequences_per_chunk=12, packing="concat", compression="none", name="other")
    page = next((cache.folder / "index").iterdir())
    shutil.copy(next((other.folder / "index").iterdir()), page)
    with pytest.raises(CacheError):
        Cache(cache.folder).read([0])


def test_the_memo_of_another_tokenizer_is_not_believed(cache, build, tmp_path, gpt2_like, qwen_like):
    source = str(tmp_path / "a.jsonl")
    digest = build(source, tokenizer=str(qwen_like), name="q").recipe.digest
    memos = sorted((cache.folder.parent / "tokenizers").iterdir())
    assert len(memos) == 2
    data = [memo.read_bytes() for memo in memos]
    for memo, other in zip(memos, reversed(data), strict=True):
        memo.write_bytes(other)
    assert build(source, tokenizer=str(qwen_like), name="q").recipe.digest == digest
    assert build(source, tokenizer=str(gpt2_like), name="g").recipe.digest != digest
    assert [memo.read_bytes() for memo in memos] == data


def test_a_file_that_was_put_beside_the_tokenizer_is_refused_before_anybody_reads_it(cache):
    (cache.folder / "tokenizer/added_tokens.json").write_text('{"the": 5}')
    with pytest.raises(CacheCorruptionError, match=r"added_tokens\.json is not a file of this cache's tokenizer"):
        Cache(cache.folder).decode([1, 2, 3])
