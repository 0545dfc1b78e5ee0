"""Laws of `copy` and `remove`: the copy is the cache, at any moment a whole one; and only a cache is removed."""

import gzip
import json
import os
import shutil
import time

import pytest

from conftest import all_tokens, file_bytes, make_texts, write_jsonl
from packhorse.cache import Cache, CacheSettings, copying, progress, store, update_cache
from packhorse.cache.build import Builder, Job
from packhorse.cache.check import check_cache
from packhorse.cache.claims import Claims
from packhorse.cache.copying import copy_cache
from packhorse.cache.plan import Plan
from packhorse.cache.record import read_record
from packhorse.cache.removal import PARTS, remove_cache
from packhorse.cache.selection import Selection
from packhorse.cache.snapshot import Index
from packhorse.cache.suspects import Suspects
from packhorse.cache.update import build_selection
from packhorse.cli import main
from packhorse.corpus.documents import TextFile
from packhorse.errors import CacheCorruptionError, CacheError, EngineMismatch, StorageIOError
from test_cache_check import file_of, tree


@pytest.fixture
def cache(build, tmp_path):
    return build(str(write_jsonl(tmp_path / "a.jsonl", make_texts(40, words=20))), sequences_per_chunk=12)


def content(folder):
    skipped = ("quarantine", "spool")
    files = (path for path in sorted(folder.rglob("*")) if path.is_file())
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for path in files
        if path.relative_to(folder).parts[0] not in skipped
    }


def grow(build, tmp_path):
    write_jsonl(tmp_path / "a.jsonl", make_texts(30, seed=3, words=20), "a")
    return build(str(tmp_path / "a.jsonl"), sequences_per_chunk=12)


def test_a_copy_is_the_cache_and_doing_it_again_writes_nothing(cache, tmp_path):
    before = tree(cache.folder)
    target = tmp_path / "copy"
    copied = copy_cache(cache.folder, str(target))
    assert content(target) == content(cache.folder)
    assert check_cache(target, "deep").is_good
    assert Cache(target).snapshot.digest == cache.snapshot.digest
    assert copied.files == len(content(target))
    state = tree(target)
    again = copy_cache(cache.folder, str(target))
    assert (again.files, again.skipped) == (0, copied.files)
    assert tree(target) == state
    assert tree(cache.folder) == before


def test_a_grown_cache_sends_only_what_is_new(cache, build, tmp_path):
    target = tmp_path / "copy"
    copy_cache(cache.folder, str(target))
    chunks = set(file_bytes(target))
    grown = grow(build, tmp_path)
    copied = copy_cache(cache.folder, str(target))
    new = set(file_bytes(grown.folder)) - chunks
    # New chunks and their records, a page of the plan, the index and the metadata.
    assert copied.files == 2 * len(new) + 3
    assert content(target) == content(grown.folder)


def test_a_copy_that_is_stopped_at_any_file_is_a_cache_and_is_finished_by_the_next(cache, tmp_path, monkeypatch):
    expected = content(cache.folder)
    tokens = all_tokens(cache)
    put = copying.Folder.put
    for stop in range(len(expected)):
        target, count = tmp_path / f"copy-{stop}", 0

        def failing(self, name, path, data, stop=stop):
            nonlocal count
            count += 1
            if count > stop:
                raise StorageIOError("the cable was pulled")
            put(self, name, path, data)

        with monkeypatch.context() as patch:
            patch.setattr(copying.Folder, "put", failing)
            with pytest.raises(StorageIOError):
                copy_cache(cache.folder, str(target))
        if (target / "recipe.json").exists():
            part = all_tokens(Cache(target))
            assert (part == tokens[: len(part)]).all()
        copy_cache(cache.folder, str(target))
        assert content(target) == expected


def test_what_is_committed_while_it_is_copied_is_left_for_the_next_time(cache, build, tmp_path, monkeypatch):
    target = tmp_path / "copy"
    put, digest = copying.Folder.put, cache.snapshot.digest
    grown = []

    def growing(self, name, path, data):
        if name.endswith(".chunk") and not grown:
            grown.append(grow(build, tmp_path))
        put(self, name, path, data)

    monkeypatch.setattr(copying.Folder, "put", growing)
    copy_cache(cache.folder, str(target))
    assert Cache(target).snapshot.digest == digest
    assert check_cache(target).is_good
    copy_cache(cache.folder, str(target))
    assert content(target) == content(grown[0].folder)
    assert check_cache(target).is_good


@pytest.mark.parametrize("reads", ["read_file", "read_record"])
@pytest.mark.parametrize("does", ["grow", "forget"])
def test_what_a_builder_replaces_while_it_is_listed_stops_no_copy(reads, does, cache, build, tmp_path, monkeypatch):
    read, done = getattr(copying, reads), []

    def read_beside_a_builder(where, what):
        if not done and (reads == "read_record" or where.suffix == ".idx"):
            done.append(does)
            if does == "grow":
                grow(build, tmp_path)
            else:
                Index(cache.folder).forget()
                Suspects(cache.folder).add(EngineMismatch(read_record(cache.folder, 0).engine, "a text"))
                Suspects(cache.folder).put_out_of_use(0)
        return read(where, what)

    monkeypatch.setattr(copying, reads, read_beside_a_builder)
    copy_cache(cache.folder, str(tmp_path / "copy"))
    assert done
    assert {f.kind for f in check_cache(tmp_path / "copy").findings} <= {"metadata", "index"}
    there = Cache(tmp_path / "copy").snapshot.num_chunks
    assert there >= cache.snapshot.num_chunks if does == "grow" else there == 0


def test_a_damaged_chunk_is_never_copied(cache, tmp_path):
    path = file_of(cache, 2)
    path.write_bytes(path.read_bytes()[:-1] + b"x")
    with pytest.raises(CacheCorruptionError, match="packhorse cache repair"):
        copy_cache(cache.folder, str(tmp_path / "copy"))
    assert Cache(tmp_path / "copy").snapshot.num_chunks == 2


def test_a_file_that_arrives_damaged_is_removed_again(cache, tmp_path, monkeypatch):
    put = copying.Folder.put

    def flip(self, name, path, data):
        put(self, name, path, data)
        if name.endswith(".chunk"):
            (self.root / name).write_bytes(bytes(100))

    monkeypatch.setattr(copying.Folder, "put", flip)
    with pytest.raises(StorageIOError, match="another content"):
        copy_cache(cache.folder, str(tmp_path / "copy"))
    assert file_bytes(tmp_path / "copy") == {}


def test_a_chunk_of_the_copy_that_is_cut_off_is_sent_again(cache, tmp_path):
    target = tmp_path / "copy"
    copy_cache(cache.folder, str(target))
    path = target / file_of(cache, 1).relative_to(cache.folder)
    path.write_bytes(path.read_bytes()[:-5])
    assert copy_cache(cache.folder, str(target)).files == 1
    assert content(target) == content(cache.folder)


def test_a_copy_goes_to_a_bucket_too(cache, build, tmp_path):
    import fsspec

    files = fsspec.filesystem("memory")
    copied = copy_cache(cache.folder, "memory://bucket/cache")
    grow(build, tmp_path)
    copy_cache(cache.folder, "memory://bucket/cache")
    expected = content(cache.folder)
    assert {name.removeprefix("/bucket/cache/"): files.cat(name) for name in files.find("/bucket/cache")} == expected
    assert copied.files < len(expected)
    files.rm("/bucket", recursive=True)


def test_a_copy_over_another_cache_or_other_files_is_refused(cache, build, tmp_path, capsys):
    other = build(str(tmp_path / "a.jsonl"), sequence_length=16, name="other")
    (tmp_path / "photos").mkdir()
    (tmp_path / "photos/beach.jpg").write_bytes(b"sand")
    before = tree(tmp_path)
    for target in (other.folder, tmp_path / "photos"):
        with pytest.raises(CacheError, match="Name another target"):
            copy_cache(cache.folder, str(target))
    assert main(["cache", "copy", str(cache.folder)]) == 2
    assert tree(tmp_path) == before
    assert main(["cache", "copy", str(cache.folder), "--to", str(tmp_path / "copy"), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["chunks"] == cache.snapshot.num_chunks


@pytest.mark.parametrize("inside", ["", "sub/folder"])
def test_a_copy_into_the_cache_itself_is_refused(cache, inside):
    before = tree(cache.folder)
    with pytest.raises(CacheError, match="is the cache itself, or inside of it"):
        copy_cache(cache.folder, str(cache.folder / inside))
    assert tree(cache.folder) == before


def test_a_copy_over_another_build_of_the_cache_is_refused(cache, build, tmp_path):
    target = tmp_path / "copy"
    copy_cache(cache.folder, str(target))
    shutil.rmtree(cache.folder)
    write_jsonl(tmp_path / "a.jsonl", make_texts(40, seed=5, words=20))
    again = build(str(tmp_path / "a.jsonl"), sequences_per_chunk=12)
    assert again.folder == cache.folder
    kept = tree(target)
    with pytest.raises(CacheError, match="holds another build of this cache"):
        copy_cache(again.folder, str(target))
    assert tree(target) == kept
    # The same build, of which the copy has a page more; and before, one page of which it has only a part.
    shutil.rmtree(target)
    copy_cache(again.folder, str(target))
    page = (target / "plan/000000.json").read_bytes()
    (target / "plan/000000.json").write_bytes(page[:50])
    assert copy_cache(again.folder, str(target)).files == 1
    shutil.copy(target / "plan/000000.json", target / "plan/000001.json")
    with pytest.raises(CacheError, match=r"plan/000001\.json"):
        copy_cache(again.folder, str(target))


# -- remove


def test_a_cache_is_removed_only_after_yes_and_nothing_beside_it(cache, build, tmp_path, capsys, monkeypatch):
    other = build(str(tmp_path / "a.jsonl"), sequence_length=16, name="other")
    before = tree(tmp_path)
    assert main(["cache", "remove", str(cache.folder)]) == 2
    assert "--yes" in capsys.readouterr().err
    assert tree(tmp_path) == before
    kept = tree(other.folder)
    assert main(["cache", "remove", str(cache.folder), "--yes"]) == 0
    assert not cache.folder.exists()
    assert tree(other.folder) == kept
    assert sorted(path.name for path in cache.folder.parent.iterdir()) == sorted(["tokenizers", other.folder.name])


@pytest.mark.parametrize(("inside", "name"), [(".", "."), ("chunks", ".."), ("chunks/000000", "../..")])
def test_a_cache_is_removed_from_inside_too(inside, name, cache, monkeypatch, capsys):
    monkeypatch.chdir(cache.folder / inside)
    assert main(["cache", "remove", name, "--yes"]) == 0
    assert cache.folder.name in capsys.readouterr().out
    assert sorted(path.name for path in cache.folder.parent.iterdir()) == ["tokenizers"]


@pytest.mark.parametrize(("answer", "gone"), [("yes\n", True), ("y\n", False), ("\n", False)])
def test_remove_asks_who_sits_at_a_terminal(cache, monkeypatch, answer, gone):
    import io

    class Terminal(io.StringIO):
        def isatty(self):
            return True

    monkeypatch.setattr("sys.stdin", Terminal(answer))
    assert main(["cache", "remove", str(cache.folder)]) == 0
    assert cache.folder.exists() != gone


def test_all_that_builds_make_is_of_the_cache_and_removed_with_it(tmp_path, gpt2_like, monkeypatch):
    monkeypatch.setattr(progress, "LINE_SECONDS", 0.0)  # else only long builds keep a log
    path = write_jsonl(tmp_path / "a.jsonl", make_texts(40, words=20))
    (tmp_path / "a.jsonl.gz").write_bytes(gzip.compress(path.read_bytes()))
    settings = CacheSettings(
        source=str(tmp_path / "a.jsonl.gz"),
        deduplicate="exact",
        tokenizer=str(gpt2_like),
        cache_dir=str(tmp_path / "cache"),
        workers=0,
    )
    folder = update_cache(settings, quiet=True).folder
    Suspects(folder).add(EngineMismatch("fastokens 0", "a text"))
    build_selection(settings, Selection(), start_over=True, quiet=True)
    assert {part.name for part in folder.iterdir()} == set(PARTS)
    remove_cache(folder)
    assert not folder.exists()


def test_what_is_not_only_a_cache_is_not_removed(cache, tmp_path):
    (cache.folder / "thesis.tex").write_text("ten years")
    with pytest.raises(CacheError, match=r"thesis\.tex"):
        remove_cache(cache.folder)
    (cache.folder / "thesis.tex").unlink()
    link = tmp_path / "link"
    link.symlink_to(cache.folder)
    with pytest.raises(CacheError, match="is a link"):
        remove_cache(link)
    with pytest.raises(CacheError):
        remove_cache(tmp_path)
    with Claims(cache.folder) as claims:
        assert claims.take(0)
        with pytest.raises(CacheError, match="A builder is at work"):
            remove_cache(cache.folder)
    young = cache.folder / f"chunks/000000/{store.TEMPORARY}1-a"
    young.write_bytes(b"half a chunk")
    with pytest.raises(CacheError, match="builder seems to be at work"):
        remove_cache(cache.folder)
    os.utime(young, (time.time() - 3600,) * 2)
    remove_cache(cache.folder)
    assert not cache.folder.exists()


def test_a_chunk_is_never_committed_into_a_cache_that_was_removed_meanwhile(cache):
    plan = Plan(cache.folder)
    files = {number: TextFile(path=file.path, kind=file.kind) for number, file in enumerate(plan.files)}
    commit = Builder(cache.folder, "hf", "default").make(Job(chunk=0, ranges=plan.entry(0), files=files))
    remove_cache(cache.folder)
    with pytest.raises(CacheError, match="was removed while it was being built"):
        commit()
    assert not cache.folder.exists()
