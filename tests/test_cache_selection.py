"""Laws of parts: whichever chunks a builder asks for, all parts together are the whole, byte for byte."""

import dataclasses
import json
import shutil
from collections import namedtuple
from pathlib import Path

import pytest

from conftest import file_bytes, make_texts, payloads, small_chunks, texts_in, write_jsonl, write_parquet
from packhorse.cache import open_cache, store, update_cache
from packhorse.cache.claims import Claims
from packhorse.cache.record import chunk_path, committed_chunks, read_record, record_path
from packhorse.cache.selection import Selection, ranges
from packhorse.cache.update import build_selection
from packhorse.cli import main
from packhorse.errors import CacheError, CacheIncompleteError, SettingsError, StorageFullError, StorageIOError

TEXTS = make_texts(200, seed=21, words=20)


@pytest.fixture
def settings(tmp_path, gpt2_like):
    return small_chunks(tmp_path, gpt2_like, TEXTS, eval_share=0.1)


@pytest.fixture
def whole(settings, tmp_path):
    cache = update_cache(dataclasses.replace(settings, cache_dir=str(tmp_path / "whole")), quiet=True)
    assert cache.snapshot.num_chunks >= 8
    return cache


def part(settings, quiet=True, **selection):
    return build_selection(settings, Selection(**selection), quiet=quiet)


@pytest.mark.parametrize(
    "parts",
    [
        [{"start_chunk": 3}, {"end_chunk": 2}],
        [{"num_shards": 3, "shard_index": index} for index in (2, 0, 1)],
        [{"start_chunk": 2, "end_chunk": 4}, {"start_chunk": 1, "num_shards": 2}, {"mode": "inverse"}],
        [{"end_chunk": 0}, {"mode": "inverse", "start_chunk": 1, "end_chunk": 5}, {}],
    ],
)
@pytest.mark.parametrize("kind", ["file", "stream"])
def test_parts_in_any_order_make_the_whole_byte_for_byte(kind, parts, settings, tmp_path):
    if kind == "stream":
        settings = dataclasses.replace(settings, source=TEXTS, name="texts")
    whole = update_cache(dataclasses.replace(settings, cache_dir=str(tmp_path / "whole")), quiet=True)
    built, count = 0, whole.snapshot.num_chunks
    for selection in parts:
        cache, integrity = part(settings, **selection)
        built += integrity.built
        wanted = [c for c in range(integrity.states.planned) if c in Selection(**selection)]
        assert set(wanted) <= set(integrity.states.built)
    if parts[-1].get("mode") == "inverse" and kind == "stream":
        cache, integrity = part(settings)  # what was not planned yet is no gap
        built += integrity.built
    assert built == cache.snapshot.num_chunks  # none twice
    assert abs(built - count) <= 1
    assert texts_in(cache) == TEXTS
    assert not list((cache.folder / "spool").glob("*"))
    if kind == "file":  # a stream that is planned bit by bit may be cut at other places
        assert payloads(cache) == payloads(whole)
        assert file_bytes(cache.folder) == file_bytes(whole.folder)
        assert cache.snapshot.digest == whole.snapshot.digest


def test_a_part_of_a_stream_plans_no_more_of_it_than_it_needs(settings):
    settings = dataclasses.replace(settings, source=TEXTS, name="texts", sequences_per_chunk=4)
    some = part(settings, end_chunk=1)[1].states
    assert some.built == [0, 1]
    assert some.planned < part(settings)[1].states.planned


def test_inverse_finds_the_gaps_says_them_and_fills_only_those(settings, whole, capsys):
    cache, _ = part(settings)
    count = cache.snapshot.num_chunks
    for chunk in (2, 3, 5):
        path = chunk_path(cache.folder, chunk, read_record(cache.folder, chunk).file_sha256)
        if chunk == 3:
            path.unlink()
        elif chunk == 5:
            path.write_bytes(path.read_bytes()[:-1])
        else:
            record_path(cache.folder, chunk).unlink()
    cache, integrity = part(settings, quiet=False, mode="inverse")
    said = capsys.readouterr().err
    assert f"Found {count - 3} chunks (0-1, 4, 6-{count - 1}), missing 3 (2-3, 5): about" in said
    assert "MB on disk and" in said
    assert integrity.built == 3
    assert file_bytes(cache.folder) == file_bytes(whole.folder)
    assert cache.snapshot.digest == whole.snapshot.digest
    part(settings, quiet=False, mode="inverse")
    assert "none is missing" in capsys.readouterr().err


def test_inverse_never_extends_the_plan(settings):
    before, _ = part(settings)
    write_jsonl(Path(settings.source), make_texts(80, seed=5), "a")
    after, integrity = part(settings, mode="inverse")
    assert integrity.built == 0
    assert after.snapshot.digest == before.snapshot.digest
    assert part(settings)[1].built > 0


def test_inverse_of_no_cache_or_no_plan_is_refused_and_writes_nothing(settings, tmp_path):
    with pytest.raises(CacheIncompleteError, match="no gaps"):
        part(settings, mode="inverse")
    assert not list((tmp_path / "cache").rglob("recipe.json"))
    cache, _ = part(settings)
    for name in ("chunks", "records", "index", "plan"):
        shutil.rmtree(cache.folder / name)
    with pytest.raises(CacheIncompleteError, match="no plan yet"):
        part(settings, mode="inverse")


def test_gaps_are_filled_lowest_first(settings, monkeypatch):
    cache, _ = part(settings)
    for chunk in (7, 1, 4):
        record_path(cache.folder, chunk).unlink()
    order = []
    plain = store.publish

    def note(path, *arguments, **options):
        if "records" in path.parts:
            order.append(int(path.stem))
        return plain(path, *arguments, **options)

    monkeypatch.setattr(store, "publish", note)
    part(settings, mode="inverse")
    assert order == [1, 4, 7]


@pytest.mark.parametrize(
    ("selection", "said"),
    [
        ({"start_chunk": 5, "end_chunk": 4}, "from 5 to 4"),
        ({"start_chunk": -1}, "from -1"),
        ({"num_shards": 2, "shard_index": 2}, "from 0 to 1"),
        ({"num_shards": 0}, "num_shards 0"),
    ],
)
def test_selections_that_make_no_sense_are_refused(selection, said):
    with pytest.raises(SettingsError, match=said):
        Selection(**selection)


def test_sequences_that_are_padded_cannot_be_limited_by_number(settings):
    with pytest.raises(SettingsError, match="max_documents instead"):
        dataclasses.replace(settings, packing="pad", max_sequences=10)


def test_nothing_is_started_over_beside_a_builder(settings):
    before = part(settings)[0]
    with Claims(before.folder) as other:
        assert other.take(0)
        with pytest.raises(CacheError, match="is being built by"):
            build_selection(settings, Selection(), start_over=True, quiet=True)
    assert payloads(open_cache(settings)) == payloads(before)


def test_a_start_behind_the_plan_is_refused(settings):
    with pytest.raises(SettingsError, match="start_chunk is 1000: the plan"):
        part(settings, start_chunk=1000)


# -- limits


@pytest.mark.parametrize("kind", ["jsonl", "parquet", "stream"])
@pytest.mark.parametrize("name", ["max_chunks", "max_sequences", "max_tokens", "max_documents"])
def test_raising_a_limit_extends_the_cache_and_rebuilds_nothing(name, kind, settings, tmp_path):
    # All texts are alike, so that what a sample says of the rate is true.
    texts = [f"{n:03} wool hay salt corn rice tea silk " * 5 for n in range(100)]
    path = tmp_path / f"b.{kind}"
    source = {"stream": lambda: texts, "jsonl": lambda: str(write_jsonl(path, texts))}.get(
        kind, lambda: str(write_parquet(path, texts))
    )()
    settings = dataclasses.replace(settings, source=source, name="limited", eval_share=0.0)
    full = update_cache(dataclasses.replace(settings, cache_dir=str(tmp_path / "full")), quiet=True)
    totals = {
        "max_chunks": full.snapshot.num_chunks,
        "max_sequences": full.num_sequences(),
        "max_tokens": full.summary.tokens,
        "max_documents": full.summary.documents,
    }
    counted = {"max_chunks": "chunks", "max_sequences": "train_sequences", "max_tokens": "tokens"}
    before = []
    for share in (0.25, 0.25, 0.6, 3):
        limit = int(totals[name] * share)
        cache = update_cache(dataclasses.replace(settings, **{name: limit}), quiet=True)
        found = getattr(cache.summary, counted.get(name, "documents"))
        assert found == pytest.approx(min(limit, totals[name]), rel=0.1)
        assert payloads(cache)[: len(before)] == before
        if share == 0.25 and before:
            assert payloads(cache) == before  # the same limit again adds no crumb
        before = payloads(cache)
    assert cache.summary.documents == 100


def test_a_limit_below_what_is_there_removes_nothing(settings):
    before = payloads(update_cache(settings, quiet=True))
    assert payloads(update_cache(dataclasses.replace(settings, max_tokens=10, max_chunks=1), quiet=True)) == before


# -- integrity


def test_every_build_ends_with_what_it_verified(settings):
    planned = len(payloads(update_cache(dataclasses.replace(settings, name="count"), quiet=True)))
    settings = dataclasses.replace(settings, name="other")
    assert part(settings, end_chunk=1)[1].line() == (
        f"2/{planned} chunks, all hashes verified; {planned - 2} left: 2-{planned - 1}"
    )
    assert (
        part(settings, end_chunk=2)[1]
        .line()
        .startswith(
            f"3/{planned} chunks: 1 built now, all hashes verified; 2 from before, records and sizes as committed; "
        )
    )
    part(settings)
    assert "records and sizes as committed" in part(settings)[1].line()
    cache = open_cache(settings)
    shutil.rmtree(cache.folder)
    assert part(settings)[1].line() == f"{planned}/{planned} chunks, all hashes verified"
    shutil.rmtree(cache.folder)
    assert "not read back" in part(dataclasses.replace(settings, validation=False))[1].line()


def test_a_chunk_that_the_disk_did_not_keep_is_never_committed(settings, monkeypatch):
    plain = store.publish

    def forget(path, data):
        made = plain(path, data)
        if path.suffix == ".chunk":
            content = bytearray(path.read_bytes())
            content[len(content) // 2] ^= 1
            path.write_bytes(content)
        return made

    with monkeypatch.context() as patch:
        patch.setattr(store, "publish", forget)
        with pytest.raises(StorageIOError, match="another content than was written"):
            part(settings)
    folder = next(Path(settings.cache_dir).iterdir())
    assert committed_chunks(folder) == []
    assert len(list((folder / "quarantine").iterdir())) == 1
    assert part(settings)[1].line().endswith("all hashes verified")


# -- the command


def test_force_builds_everything_anew_and_keeps_the_old_in_quarantine(settings, tmp_path, capsys):
    config = tmp_path / "config.yaml"
    config.write_text(json.dumps({"data": dataclasses.asdict(settings)}))
    assert main(["cache", "build", "--config", str(config)]) == 0
    before = open_cache(settings)
    files, digest = file_bytes(before.folder), before.snapshot.digest
    assert main(["cache", "build", "--config", str(config), "--force"]) == 0
    after = open_cache(settings)
    assert file_bytes(after.folder) == files
    assert after.snapshot.digest == digest
    kept = {path.name: path.read_bytes() for path in (after.folder / "quarantine").rglob("*.chunk")}
    assert kept == {name.rpartition("/")[2]: data for name, data in files.items()}
    assert main(["cache", "build", "--config", str(config), "--force", "--end-chunk", "3"]) == 2
    assert main(["cache", "build", "--config", str(config), "--resume=false"]) == 2
    assert "--force" in capsys.readouterr().err


def test_the_command_builds_a_part_and_says_what_is_left(settings, tmp_path, capsys):
    config = tmp_path / "config.yaml"
    config.write_text(json.dumps({"data": dataclasses.asdict(settings)}))
    command = ["cache", "build", "--config", str(config)]
    assert main([*command, "--start-chunk", "1", "--end-chunk", "2", "--resume", "--json"]) == 0
    said = json.loads(capsys.readouterr().out)
    assert said["built"] == 2
    assert said["missing"] == [0, *range(3, said["planned"])]
    assert main([*command, "--num-shards=2", "--shard-index=1"]) == 0
    assert "left: 0, 4, 6" in capsys.readouterr().out
    assert main(["cache", "build", "--config", str(config), "--mode", "inverse"]) == 0
    assert f"{said['planned']}/{said['planned']} chunks" in capsys.readouterr().out


def test_ranges_are_short():
    assert ranges([0, 1, 2, 5, 7, 8]) == "0-2, 5, 7-8"


def test_what_is_planned_is_judged_by_the_chunks_that_are_there_and_not_by_other_settings(settings, whole, monkeypatch):
    bytes_of = [chunk_path(whole.folder, n, read_record(whole.folder, n).file_sha256).stat().st_size for n in range(8)]
    part(settings, end_chunk=1)
    usage = namedtuple("usage", "total used free")
    for share, fits in ((0.6, False), (3.0, True)):
        monkeypatch.setattr(shutil, "disk_usage", lambda path, share=share: usage(10**9, 0, int(sum(bytes_of) * share)))
        # A limit that is below what is planned takes nothing of it away.
        limited = dataclasses.replace(settings, max_documents=10)
        if fits:
            assert part(limited)[1].states.unfinished == []
        else:
            with pytest.raises(StorageFullError, match=r"nothing was built(.|\n)*--end-chunk"):
                part(limited)
            assert part(settings, end_chunk=1)[1].states.planned == whole.snapshot.num_chunks
