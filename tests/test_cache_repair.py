"""Laws of `repair`: what it mends is proven to be what it was, and what it cannot prove it leaves alone."""

import json
import os
import shutil
from contextlib import suppress

import pytest

from conftest import all_tokens, make_texts, write_jsonl
from disk import Disk, kill_at, lives_through
from packhorse.cache import Cache, CacheSettings, store
from packhorse.cache.check import check_cache
from packhorse.cache.cleanup import clean, find_leftovers
from packhorse.cache.commands.status import status
from packhorse.cache.record import read_record, record_path
from packhorse.cache.repair import repair_cache
from packhorse.cli import main
from packhorse.errors import CacheError
from test_cache_check import file_of, flip, tree


@pytest.fixture
def cache(build, tmp_path):
    """A few chunks of a few sequences."""
    made = build(str(write_jsonl(tmp_path / "a.jsonl", make_texts(40, words=20))), sequences_per_chunk=12)
    assert made.snapshot.num_chunks >= 4
    return made


@pytest.fixture
def settings(cache, tmp_path, gpt2_like):
    values = {"sequence_length": 32, "eval_share": 0.1, "cache_dir": str(tmp_path / "cache"), "workers": 0}
    return CacheSettings(source=str(tmp_path / "a.jsonl"), tokenizer=str(gpt2_like), **values)


def content(folder, leftovers=True):
    """Everything of a cache but what is timed, derived from that, or moved out of the way."""
    files = {}
    for path in sorted(folder.rglob("*")):
        name = str(path.relative_to(folder))
        if not leftovers and (store.TEMPORARY in name or name.startswith("spool")):
            continue
        if path.is_file() and not name.startswith(("quarantine", "metadata")):
            files[name] = path.read_bytes()
        if name.startswith("records") and path.is_file():
            files[name] = {**store.read_sealed(path), "seconds": 0, "engine": ""}
    return files


def cut(path):
    path.write_bytes(path.read_bytes()[:-7])


def break_at_the_end(path):
    flip(path, -1)


def break_at_the_beginning(path):
    flip(path, 0)


@pytest.mark.parametrize("damage", [cut, break_at_the_end, break_at_the_beginning, os.unlink], ids=lambda f: f.__name__)
@pytest.mark.parametrize(
    "names",
    [
        ["chunks/000000/00000001-*.chunk"],
        ["records/000000/00000001.json"],
        ["records/000000/00000001.json", "chunks/000000/00000001-*.chunk", "chunks/000000/00000003-*.chunk"],
        ["index/*.idx"],
        ["metadata.json"],
        ["index/*.idx", "chunks/000000/00000000-*.chunk"],
    ],
    ids=" ".join,
)
def test_what_is_damaged_is_afterwards_what_it_was(names, damage, cache):
    before, digest, tokens = content(cache.folder), cache.snapshot.digest, all_tokens(cache)
    paths = [next(cache.folder.glob(name)) for name in names]
    for path in paths:
        damage(path)
    broken = {
        path.read_bytes() for path in paths if path.exists() and path.parent.name not in ("index", cache.folder.name)
    }
    result = repair_cache(cache.folder)
    assert result.refused == []
    assert result.is_good
    assert content(cache.folder) == before
    assert Cache(cache.folder).snapshot.digest == digest
    assert (all_tokens(Cache(cache.folder)) == tokens).all()
    quarantine = cache.folder / "quarantine"
    assert {path.read_bytes() for path in quarantine.iterdir()} == broken if broken else not quarantine.exists()
    assert len(list((cache.folder / "spool").glob("*"))) == 0


def test_repairing_what_is_whole_changes_nothing(cache, tmp_path):
    before = tree(tmp_path)
    result = repair_cache(cache.folder)
    assert result.is_good
    assert result.mended == []
    assert tree(tmp_path) == before


def test_only_what_is_damaged_is_touched(cache):
    flip(file_of(cache, 1), -1)
    before = tree(cache.folder)
    repair_cache(cache.folder)
    changed = {name for name, state in tree(cache.folder).items() if before.get(name) != state}
    assert not {name for name in changed if name.startswith(("records/000000/", "index/", "plan/", "recipe"))}
    assert {name for name in changed if name.endswith(".chunk")} == {str(file_of(cache, 1).relative_to(cache.folder))}


@pytest.mark.parametrize("what", ["chunk", "record"])
def test_a_chunk_whose_source_changed_is_refused_and_nothing_of_it_is_changed(what, cache, tmp_path):
    source = tmp_path / "a.jsonl"
    flip(file_of(cache, 1) if what == "chunk" else record_path(cache.folder, 1), -3)
    data = source.read_bytes()
    for changed in (data.replace(b"the", b"teh"), data[: len(data) // 3], None):
        source.unlink() if changed is None else source.write_bytes(changed)
        before = tree(cache.folder)
        result = repair_cache(cache.folder)
        assert not result.is_good
        assert "a.jsonl" in " ".join(result.refused)
        after = tree(cache.folder)
        assert {k: v for k, v in after.items() if not k.startswith("spool")} == before | {
            k: v for k, v in after.items() if k == "spool" and k not in before
        }
    source.write_bytes(data)
    assert repair_cache(cache.folder).is_good


@pytest.mark.parametrize("what", ["chunk", "record"])
def test_other_tokens_than_were_committed_are_refused(what, cache, monkeypatch):
    from packhorse.cache import build as builder

    flip(file_of(cache, 1) if what == "chunk" else record_path(cache.folder, 1), -3)

    def tokenize_wrongly(*args, **kwargs):
        for tokens in tokenize(*args, **kwargs):
            tokens.ids[0] ^= 1
            yield tokens

    tokenize = builder.tokenize
    monkeypatch.setattr(builder, "tokenize", tokenize_wrongly)
    before = content(cache.folder) if what == "chunk" else tree(cache.folder)
    result = repair_cache(cache.folder)
    assert not result.is_good
    assert "other tokens than were committed" in result.refused[0]
    assert (
        content(cache.folder) if what == "chunk" else {k: v for k, v in tree(cache.folder).items() if "spool" not in k}
    ) == before
    monkeypatch.undo()
    assert repair_cache(cache.folder).is_good


def test_a_record_can_be_proven_by_the_snapshot_alone(cache):
    record_path(cache.folder, 2).unlink()
    assert "the digest of the snapshot is what it was" in " ".join(repair_cache(cache.folder).mended)
    record_path(cache.folder, 2).unlink()
    shutil.rmtree(cache.folder / "index")
    # Now nothing tells that there was a chunk: it is planned and not built.
    assert read_record(cache.folder, 1)


def test_an_old_record_of_another_codec_is_replaced_by_the_one_that_the_index_knows(cache, build, tmp_path):
    other = build(str(tmp_path / "a.jsonl"), sequences_per_chunk=12, compression="none", name="other")
    before, digest = content(cache.folder), cache.snapshot.digest
    shutil.copy(record_path(other.folder, 1), record_path(cache.folder, 1))
    assert {(f.kind, f.chunk) for f in check_cache(cache.folder).findings} == {("chunk", 1), ("index", 1)}
    result = repair_cache(cache.folder)
    assert result.is_good, result.lines()
    assert Cache(cache.folder).snapshot.digest == digest
    assert content(cache.folder) == before


@pytest.mark.parametrize("record", [0, 2])
def test_one_repair_mends_all_that_is_damaged(record, cache, settings, build, tmp_path):
    before = content(cache.folder)
    flip(file_of(cache, 1), -1)
    flip(cache.folder / "tokenizer/tokenizer.json", 5)
    record_path(cache.folder, record).unlink()
    shutil.rmtree(cache.folder / "index")
    (cache.folder / "metadata.json").unlink()
    result = repair_cache(cache.folder, settings)
    assert (result.is_good, result.refused) == (True, []), result.lines()
    # Without an index nothing tells that there was a record: its chunk is planned and not built.
    assert Cache(cache.folder).snapshot.num_chunks == record
    build(str(tmp_path / "a.jsonl"), sequences_per_chunk=12)
    assert content(cache.folder) == before


def test_the_index_is_derived_as_far_as_there_are_records(cache, tmp_path):
    digest = cache.snapshot.digest_of(2)
    flip(next((cache.folder / "index").iterdir()), -1)
    flip(record_path(cache.folder, 2), 0)
    (tmp_path / "a.jsonl").rename(tmp_path / "gone.jsonl")
    result = repair_cache(cache.folder)
    assert result.after.damaged_chunks == [2]
    assert "a.jsonl is gone" in " ".join(result.refused)
    assert Cache(cache.folder).snapshot.digest == digest
    (tmp_path / "gone.jsonl").rename(tmp_path / "a.jsonl")
    assert repair_cache(cache.folder).is_good


def test_two_swapped_chunks_are_both_built_again(cache):
    before = content(cache.folder)
    paths = [file_of(cache, 0), file_of(cache, 1)]
    data = [path.read_bytes() for path in paths]
    paths[0].write_bytes(data[1])
    paths[1].write_bytes(data[0])
    assert repair_cache(cache.folder).is_good
    assert content(cache.folder) == before


@pytest.mark.parametrize("name", ["recipe.json", "tokenizer/tokenizer.json", "tokenizer/tokenizer_config.json"])
@pytest.mark.parametrize("damage", [break_at_the_beginning, os.unlink], ids=lambda f: f.__name__)
def test_recipe_and_tokenizer_come_from_the_settings_if_they_are_the_same(name, damage, cache, settings):
    before = content(cache.folder)
    damage(cache.folder / name)
    assert not repair_cache(cache.folder).is_good
    assert "give --config" in " ".join(repair_cache(cache.folder).refused)
    wrong = CacheSettings(source=settings.source, tokenizer=settings.tokenizer, sequence_length=64)
    assert not repair_cache(cache.folder, wrong).is_good
    assert repair_cache(cache.folder, settings).is_good
    assert content(cache.folder) == before


def test_a_recipe_of_another_cache_is_found_and_replaced(cache, build, settings, tmp_path):
    other = build(str(tmp_path / "a.jsonl"), packing="concat", name="other")
    before = content(cache.folder)
    shutil.copy(other.folder / "recipe.json", cache.folder / "recipe.json")
    (finding,) = check_cache(cache.folder, "quick").findings
    assert "is that of another cache" in finding.problem
    assert repair_cache(cache.folder, settings).is_good
    assert content(cache.folder) == before


def test_a_stream_is_read_again_and_its_spool_leaves_no_trace(build):
    texts = make_texts(60, words=20)
    cache = build(texts, sequences_per_chunk=12)
    before = content(cache.folder)
    flip(file_of(cache, 1), -1)
    assert "no longer name that source" in " ".join(repair_cache(cache.folder).refused)
    settings = CacheSettings(source=texts, tokenizer="x", sequence_length=32, eval_share=0.1)
    assert repair_cache(cache.folder, settings).is_good
    assert content(cache.folder) == before


@pytest.mark.timeout(60)
@pytest.mark.parametrize("kind", ["pipe", "folder"])
@pytest.mark.parametrize("name", ["chunks/000000/00000001-*", "records/000000/00000001.json"])
def test_what_is_no_file_goes_to_quarantine_and_is_never_waited_for(name, kind, cache):
    before = content(cache.folder)
    path = next(cache.folder.glob(name))
    path.unlink()
    (os.mkfifo if kind == "pipe" else os.mkdir)(path)
    assert repair_cache(cache.folder).is_good
    assert content(cache.folder) == before
    (moved,) = (cache.folder / "quarantine").iterdir()
    assert moved.is_fifo() if kind == "pipe" else moved.is_dir()


@pytest.mark.parametrize("is_there", [True, False], ids=["to the file", "to nothing"])
@pytest.mark.parametrize("name", ["chunks/000000/00000001-*", "records/000000/00000001.json"])
def test_a_link_goes_to_quarantine_and_the_file_is_there_again(name, is_there, cache, tmp_path):
    before = content(cache.folder)
    path = next(cache.folder.glob(name))
    path.rename(tmp_path / "elsewhere")
    path.symlink_to(tmp_path / ("elsewhere" if is_there else "nowhere"))
    assert repair_cache(cache.folder).is_good
    assert content(cache.folder) == before
    assert not path.is_symlink()
    (moved,) = (cache.folder / "quarantine").iterdir()
    assert moved.is_symlink()


@pytest.mark.parametrize("name", ["recipe.json", "tokenizer/tokenizer.json"])
def test_a_link_that_leads_nowhere_is_replaced_from_the_settings(name, cache, settings, tmp_path):
    before = content(cache.folder)
    (cache.folder / name).unlink()
    (cache.folder / name).symlink_to(tmp_path / "nowhere")
    assert repair_cache(cache.folder, settings).is_good
    assert content(cache.folder) == before


@pytest.mark.parametrize(
    "name", ["000000/00000050.json", "000007/00000001.json", "000000/1.json", "099999/99999999.json"]
)
@pytest.mark.parametrize("kind", ["nonsense", "copy", "folder", "other recipe"])
def test_a_stray_record_hinders_no_build_and_goes_to_quarantine(name, kind, cache, build, tmp_path):
    before, digest = content(cache.folder), cache.snapshot.digest
    stray = cache.folder / "records" / name
    stray.parent.mkdir(exist_ok=True)
    value = store.read_sealed(record_path(cache.folder, 0))
    if kind == "folder":
        stray.mkdir()
    elif kind == "nonsense":
        stray.write_bytes(b"nonsense")
    else:
        more = {"chunk": int(stray.stem), "recipe": "0" * 64} if kind == "other recipe" else {}
        stray.write_bytes(store.seal({**value, **more}))
    assert build(str(tmp_path / "a.jsonl"), sequences_per_chunk=12).snapshot.digest == digest
    outcome = status(cache.folder)
    assert (outcome.values["planned"], outcome.values["missing"]) == (cache.snapshot.num_chunks, [])
    (finding,) = check_cache(cache.folder).findings
    assert (finding.kind, finding.path) == ("stray", stray)
    result = repair_cache(cache.folder)
    assert (result.is_good, result.refused) == (True, [])
    assert not stray.exists()
    assert content(cache.folder) == before
    assert len(list((cache.folder / "quarantine").iterdir())) == 1


def test_a_chunk_file_in_a_folder_of_other_numbers_is_not_there(cache, build, tmp_path):
    before, path = content(cache.folder), file_of(cache, 1)
    (cache.folder / "chunks/000007").mkdir()
    path.rename(cache.folder / "chunks/000007" / path.name)
    assert status(cache.folder).values["lost"] == [1]
    build(str(tmp_path / "a.jsonl"), sequences_per_chunk=12)
    assert before.items() <= content(cache.folder).items()


def test_many_damaged_chunks_are_built_by_workers(cache):
    before = content(cache.folder)
    shutil.rmtree(cache.folder / "chunks")
    assert repair_cache(cache.folder).is_good
    assert content(cache.folder) == before


def test_repair_is_a_command_and_ends_with_status_1_when_something_stays_damaged(cache, tmp_path, capsys):
    assert main(["cache", "repair", str(cache.folder)]) == 0
    assert "Nothing is damaged" in capsys.readouterr().out
    flip(file_of(cache, 1), -1)
    assert main(["cache", "repair", str(cache.folder), "--json"]) == 0
    value = json.loads(capsys.readouterr().out)
    assert (value["damaged_before"], value["damaged"], value["refused"]) == ([1], {}, [])
    flip(file_of(cache, 1), -1)
    (tmp_path / "a.jsonl").unlink()
    assert main(["cache", "repair", str(cache.folder)]) == 1
    assert "Left as it is: chunk 1: The source file" in capsys.readouterr().out


# -- crashes


def crash_everywhere(folder, make, act, step):
    """Do it on a fresh copy, dying before each disk operation; then once more to the end. Yields after each."""
    number = 1
    while True:
        copy = folder / "copy"
        make(copy)
        finished = lives_through(Disk(kill_at(number)), lambda: act(copy))  # noqa: B023
        yield copy
        act(copy)
        yield copy
        shutil.rmtree(copy)
        if finished:
            return
        number += step


DAMAGES = {
    "chunk": ["chunks/000000/00000001-*"],
    "record and chunk": ["records/*/00000002.json", "chunks/*/00000000-*"],
    "index": ["index/*"],
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_repair_that_dies_at_some_disk_operation_is_finished_by_the_next(damage, build, fast_folder):
    repair_while_dying(damage, 9, build, fast_folder)


@pytest.mark.slow
@pytest.mark.parametrize("damage", DAMAGES)
def test_a_repair_that_dies_at_any_disk_operation_is_finished_by_the_next(damage, build, fast_folder):
    repair_while_dying(damage, 1, build, fast_folder)


def repair_while_dying(damage, step, build, fast_folder):
    source = str(write_jsonl(fast_folder / "a.jsonl", make_texts(30, words=20)))
    cache = build(source, sequences_per_chunk=12, cache_dir=str(fast_folder / "cache"))
    before, tokens, digest = content(cache.folder), all_tokens(cache), cache.snapshot.digest

    def make(copy):
        shutil.copytree(cache.folder, copy)
        for pattern in DAMAGES[damage]:
            flip(next(copy.glob(pattern)), -3)

    for turn, copy in enumerate(crash_everywhere(fast_folder, make, repair_cache, step)):
        with suppress(CacheError):
            read = all_tokens(Cache(copy))
            assert (read == tokens[: len(read)]).all()
        if turn % 2:
            assert content(copy, leftovers=False) == before
            assert Cache(copy).snapshot.digest == digest
            assert check_cache(copy).is_good


def test_a_cleanup_that_dies_at_any_disk_operation_is_finished_by_the_next(build, fast_folder):
    source = str(write_jsonl(fast_folder / "a.jsonl", make_texts(20, words=20)))
    cache = build(source, sequences_per_chunk=12, cache_dir=str(fast_folder / "cache"))
    tokens = all_tokens(cache)

    def make(copy):
        shutil.copytree(cache.folder, copy)
        for name in ("chunks/000000/.tmp-1-a", "chunks/000000/00000001-0123456789abcdef.chunk", "spool/repair-1-2/a"):
            (copy / name).parent.mkdir(parents=True, exist_ok=True)
            (copy / name).write_bytes(b"left")

    def act(copy):
        clean(find_leftovers(copy, min_age_seconds=-1), copy)

    for turn, copy in enumerate(crash_everywhere(fast_folder, make, act, 1)):
        assert (all_tokens(Cache(copy)) == tokens).all()
        assert check_cache(copy).is_good
        assert turn % 2 == 0 or find_leftovers(copy, min_age_seconds=-1) == []
    assert turn > 3
