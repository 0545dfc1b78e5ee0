"""Laws of `cleanup`: it takes what nobody needs, nothing that cannot be rebuilt, and nothing before it is told to."""

import json
import os
import time
from pathlib import Path

import pytest

from conftest import all_tokens, make_texts, write_jsonl
from packhorse.cache import Cache, store
from packhorse.cache.check import check_cache
from packhorse.cache.claims import Claims
from packhorse.cache.cleanup import clean, find_leftovers
from packhorse.cache.plan import Plan
from packhorse.cache.record import chunk_path, read_record, record_path
from packhorse.cli import main
from test_cache_check import file_of, tree


@pytest.fixture
def cache(build, tmp_path):
    return build(str(write_jsonl(tmp_path / "a.jsonl", make_texts(40, words=20))), sequences_per_chunk=12)


def age(path, days=2):
    os.utime(path, (time.time() - days * 24 * 3600,) * 2, follow_symlinks=False)


def put(path, data=b"something", days=2):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(data)
    age(path, days)
    return path


def names(cache, **more):
    return {str(leftover.path.relative_to(cache.folder)) for leftover in find_leftovers(cache.folder, **more)}


def test_a_cache_that_was_built_without_accident_has_no_leftovers(cache):
    for path in cache.folder.rglob("*"):
        age(path)
    assert names(cache) == set()


def test_what_dead_builders_left_is_found_once_it_is_old_and_goes_when_it_is_told(cache, capsys):
    tokens = all_tokens(cache)
    left = [
        put(cache.folder / "chunks/000000/.tmp-1-abc"),
        put(cache.folder / "records/000000/.tmp-2-abc"),
        put(cache.folder / "index/000000000-0001.idx"),
        put(cache.folder / f"spool/{'0' * 64}.jsonl"),
        put(cache.folder / "chunks/000000/00000001-0123456789abcdef.chunk"),
    ]
    put(cache.folder / "spool/repair-1-2/none/recipe.json")
    age(cache.folder / "spool/repair-1-2")
    young = put(cache.folder / "chunks/000000/.tmp-9-abc", days=0)
    before = tree(cache.folder)
    expected = {str(path.relative_to(cache.folder)) for path in left} | {"spool/repair-1-2"}
    assert names(cache) == expected
    assert main(["cache", "cleanup", str(cache.folder)]) == 0
    assert "Nothing was changed; say --yes to do it." in capsys.readouterr().out
    assert tree(cache.folder) == before
    assert main(["cache", "cleanup", str(cache.folder), "--yes", "--json"]) == 0
    assert len(json.loads(capsys.readouterr().out)["leftovers"]) == 6
    assert names(cache) == set()
    assert young.exists()
    assert not (cache.folder / "quarantine").exists()
    assert check_cache(cache.folder).is_good
    assert (all_tokens(Cache(cache.folder)) == tokens).all()


def test_a_chunk_file_without_a_record_may_be_the_only_copy_and_is_kept_in_quarantine(cache):
    path, data = file_of(cache, 2), file_of(cache, 2).read_bytes()
    age(path)
    record_path(cache.folder, 2).unlink()
    (leftover,) = find_leftovers(cache.folder)
    assert leftover.keep
    clean([leftover], cache.folder)
    assert not path.exists()
    assert [moved.read_bytes() for moved in (cache.folder / "quarantine").iterdir()] == [data]


def test_a_chunk_that_is_committed_while_it_is_moved_away_is_put_back(cache):
    path, data = file_of(cache, 2), file_of(cache, 2).read_bytes()
    where = record_path(cache.folder, 2)
    record = where.read_bytes()
    age(path)
    where.unlink()
    found = find_leftovers(cache.folder)
    where.write_bytes(record)  # by a builder that found the file in its place
    clean(found, cache.folder)
    assert path.read_bytes() == data


def test_a_file_stays_while_the_one_that_replaced_it_is_not_whole(cache):
    old = put(cache.folder / "chunks/000000/00000001-0123456789abcdef.chunk")
    path = file_of(cache, 1)
    path.write_bytes(path.read_bytes()[:-1])
    assert names(cache) == set()
    record_path(cache.folder, 1).write_bytes(b"damaged")
    assert names(cache) == set()
    assert old.exists()


def test_a_spool_stays_while_a_chunk_waits_for_it(build, tmp_path):
    cache = build(make_texts(60, words=20), sequences_per_chunk=12)
    plan = Plan(cache.folder)
    for number in range(2):
        put(cache.folder / f"spool/{plan.files[number].probe}.parquet")
    record_path(cache.folder, 1).unlink()
    assert names(cache) == {f"spool/{plan.files[0].probe}.parquet"}


def test_quarantine_is_emptied_only_when_asked_for_and_by_age(cache):
    moved = store.quarantine(file_of(cache, 1), cache.folder)
    age(moved)
    assert names(cache) == set()
    assert names(cache, quarantine_days=1) == set()  # moved just now, however old its content
    assert names(cache, quarantine_days=0) == {f"quarantine/{moved.name}"}


def test_links_are_removed_and_never_followed(cache, tmp_path):
    outside = put(tmp_path / "outside/precious")
    (cache.folder / "spool").mkdir(exist_ok=True)
    link = cache.folder / "spool/link"
    link.symlink_to(outside.parent)
    age(link)
    inner = cache.folder / "spool/repair-1/inner"
    inner.parent.mkdir()
    inner.symlink_to(outside.parent)
    age(inner.parent)
    clean(find_leftovers(cache.folder), cache.folder)
    assert not os.path.lexists(link)
    assert not inner.parent.exists()
    assert outside.exists()


@pytest.mark.parametrize("name", ["recipe.json", "plan/000000.json"])
def test_nothing_is_cleaned_where_nobody_knows_what_is_needed(cache, name, capsys):
    put(cache.folder / "chunks/000000/.tmp-1-abc")
    (cache.folder / name).write_bytes(b"{}")
    before = tree(cache.folder)
    assert main(["cache", "cleanup", str(cache.folder), "--yes"]) == 2
    assert tree(cache.folder) == before


def test_claims_of_dead_builders_go_and_those_of_living_ones_stay(cache):
    with Claims(cache.folder) as living:
        assert living.take(0)
        living.tell({"chunks": 1})
        age(cache.folder / "claims/00000000.claim")
        put(cache.folder / "claims/dead-1-ab.json")
        put(cache.folder / "claims/00000001.claim", b"dead-1-ab")
        put(cache.folder / "claims/00000002.claim", b"../../recipe")
        put(cache.folder / "claims/00000003.claim", b"dead-1-ab", days=0)
        assert names(cache) == {f"claims/{name}" for name in ("dead-1-ab.json", "00000001.claim", "00000002.claim")}
        clean(find_leftovers(cache.folder), cache.folder)
        assert living.owner(0) == living.name


@pytest.mark.parametrize("look", [1, 2, 3])
def test_what_builders_release_while_it_is_looked_at_is_left_out(look, cache, monkeypatch):
    names = ("claims/00000001.claim", "claims/dead-1-ab.json", "chunks/000000/.tmp-1-abc", f"spool/{'0' * 64}.jsonl")
    looks = {put(cache.folder / name): 0 for name in (*names, "spool/repair-1/inner", "quarantine/moved")}
    plain = Path.lstat

    def lstat(path):
        if path in looks:
            looks[path] += 1
            if looks[path] == look:
                path.unlink()
        return plain(path)

    age(cache.folder / "spool/repair-1")
    monkeypatch.setattr(Path, "lstat", lstat)
    clean(find_leftovers(cache.folder, quarantine_days=0, min_age_seconds=-1), cache.folder)
    monkeypatch.undo()
    assert find_leftovers(cache.folder, quarantine_days=0, min_age_seconds=-1) == []


def test_what_is_not_a_cache_is_left_alone(tmp_path):
    put(tmp_path / "home/.tmp-1-abc")
    assert main(["cache", "cleanup", str(tmp_path / "home"), "--yes"]) == 2
    assert (tmp_path / "home/.tmp-1-abc").exists()


def test_what_is_read_after_a_cleanup_is_what_was_read_before(cache, build, tmp_path):
    """Also the files of a chunk that another codec made are gone only when nothing names them."""
    tokens = all_tokens(cache)
    file_of(cache, 1).unlink()
    again = build(str(tmp_path / "a.jsonl"), sequences_per_chunk=12, compression="none")
    for path in cache.folder.rglob("*"):
        age(path)
    clean(find_leftovers(cache.folder), cache.folder)
    assert (all_tokens(Cache(cache.folder)) == tokens).all()
    assert check_cache(cache.folder).is_good
    assert chunk_path(cache.folder, 1, read_record(cache.folder, 1).file_sha256).exists()
    assert again.folder == cache.folder
