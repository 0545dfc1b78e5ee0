"""Laws of status and grow: they tell what is true of every chunk, and growing says what is new."""

import dataclasses
import json
import threading
import time
from pathlib import Path

import pytest

from conftest import make_texts, payloads, write_jsonl
from packhorse.cache import CacheSettings, build, building, open_cache, store, update_cache
from packhorse.cache.claims import Claims
from packhorse.cache.commands.grow import grow
from packhorse.cache.commands.status import status
from packhorse.cache.record import chunk_path, read_record, record_path
from packhorse.cache.selection import Selection
from packhorse.cache.update import build_selection
from packhorse.cli import main
from packhorse.errors import CacheIncompleteError


@pytest.fixture
def settings(tmp_path, gpt2_like):
    (tmp_path / "texts").mkdir()
    write_jsonl(tmp_path / "texts/a.jsonl", make_texts(160, seed=4, words=20))
    return CacheSettings(
        source=str(tmp_path / "texts"),
        tokenizer=str(gpt2_like),
        cache_dir=str(tmp_path / "cache"),
        name="status",
        sequence_length=32,
        sequences_per_chunk=20,
        engine="hf",
        workers=0,
    )


def test_status_tells_the_state_of_every_chunk(settings):
    cache = update_cache(settings, quiet=True)
    folder, planned = cache.folder, cache.snapshot.num_chunks
    path = {chunk: chunk_path(folder, chunk, read_record(folder, chunk).file_sha256) for chunk in range(planned)}
    path[1].unlink()
    path[2].write_bytes(path[2].read_bytes() + b"x")
    record_path(folder, planned - 1).unlink()
    with Claims(folder) as other:
        assert other.take(planned - 1)
        other.tell({"chunks": 7, "bytes_per_second": 2e6, "tokens_per_second": 5e5})
        outcome = status(folder)
    values = outcome.values
    assert (values["lost"], values["damaged"], values["claimed"]) == ([1], [2], [planned - 1])
    assert values["missing"] == [1, 2, planned - 1]
    (builder,) = values["builders"]
    assert builder["chunks"] == [planned - 1]
    assert builder["heartbeat_seconds"] < 60
    text = "\n".join(outcome.lines)
    assert f"{planned - 3} of {planned} planned chunks are there" in text
    assert "7 chunks done, 0.50 M tokens/s, 2.0 MB/s" in text
    assert "left at 2.0 MB of text per second" in text
    assert "times smaller than int64" in text
    assert "times smaller than uint16" in text
    update_cache(settings, quiet=True)
    outcome = status(settings)
    assert outcome.values["missing"] == outcome.values["builders"] == []
    assert f"All {planned} planned chunks are there." in outcome.lines


@pytest.mark.parametrize("damage", ["flipped", "empty", "folder", "swapped"])
def test_a_damaged_record_makes_its_chunk_damaged_and_the_chunks_before_it_are_summarised(damage, settings):
    cache = update_cache(settings, quiet=True)
    folder, planned = cache.folder, cache.snapshot.num_chunks
    paths = [record_path(folder, chunk) for chunk in (2, 4)]
    data = [path.read_bytes() for path in paths]
    if damage == "swapped":
        paths[1].write_bytes(data[0])
    if damage == "folder":
        paths[0].unlink()
        paths[0].mkdir()
    else:
        paths[0].write_bytes({"flipped": b"[" + data[0][1:], "empty": b"", "swapped": data[1]}[damage])
    damaged = [2, 4] if damage == "swapped" else [2]
    outcome = status(folder)
    assert (outcome.values["damaged"], outcome.values["missing"]) == (damaged, damaged)
    assert outcome.values["tokens"] == sum(read_record(folder, chunk).tokens for chunk in (0, 1))
    assert outcome.values["snapshot"] == cache.snapshot.digest_of(2)
    assert f"{planned - len(damaged)} of {planned} planned chunks are there" in "\n".join(outcome.lines)


@pytest.mark.parametrize("damage", [lambda data: b"[" + data[1:], lambda data: b"", lambda data: data[:-7]])
def test_a_damaged_index_is_told_and_damages_no_chunk(damage, settings):
    cache = update_cache(settings, quiet=True)
    before = status(cache.folder)
    (page,) = (cache.folder / "index").iterdir()
    page.write_bytes(damage(page.read_bytes()))
    outcome = status(cache.folder)
    assert outcome.values == before.values
    assert [line for line in outcome.lines if line not in before.lines] == [outcome.lines[-1]]
    assert outcome.lines[-1].startswith(f"{page} is damaged")


def test_status_without_builders_says_what_the_rest_takes(settings):
    build_selection(settings, Selection(end_chunk=1), quiet=True)
    assert any("nobody is building; one core takes about" in line for line in status(settings).lines)


@pytest.mark.parametrize("content", [b"", b"[1]", b"\xff", b'{"pid": "x", "bytes_per_second": 1e999, "host": [1]}'])
def test_status_survives_what_a_builder_tells(content, settings):
    folder = build_selection(settings, Selection(end_chunk=1), quiet=True)[0].folder
    with Claims(folder) as other:
        other.take(3)
        (folder / "claims" / f"{other.name}.json").write_bytes(content)
        assert len(status(folder).values["builders"]) == 1


def test_watch_looks_until_everything_is_built(settings, capsys):
    folder = build_selection(settings, Selection(end_chunk=1), quiet=True)[0].folder

    def finish():
        time.sleep(0.5)
        update_cache(settings, quiet=True)

    thread = threading.Thread(target=finish)
    thread.start()
    assert main(["cache", "status", str(folder), "--watch", "0.1", "--json"]) == 0
    thread.join()
    said = capsys.readouterr()
    assert json.loads(said.out)["missing"] == []
    assert said.err.count("planned chunks are there") >= 2


def test_chunks_of_a_build_that_was_interrupted_can_be_read(settings, monkeypatch):
    monkeypatch.setattr(building, "GROWTH_SECONDS", 1e9)
    commit, left = build.commit, [5]

    def interrupt(*arguments):
        left[0] -= 1
        if not left[0]:
            raise KeyboardInterrupt
        return commit(*arguments)

    monkeypatch.setattr(build, "commit", interrupt)
    with pytest.raises(KeyboardInterrupt):
        update_cache(settings, quiet=True)
    assert open_cache(settings).snapshot.num_chunks == 4
    outcome = status(settings)
    assert "4 of" in outcome.lines[-3]
    assert outcome.lines[-3].endswith("the first 4 without a gap")
    assert outcome.values["missing"][0] == 4


def test_what_holds_caches_or_is_nothing_is_told_so(settings, capsys):
    cache = update_cache(settings, quiet=True)
    with pytest.raises(CacheIncompleteError, match=f"It holds caches: {cache.folder.name}. Name one"):
        open_cache(settings.cache_dir)
    assert main(["cache", "list", f"{settings.cache_dir}/nowhere"]) == 2
    assert "There is no folder" in capsys.readouterr().err


def test_builders_tell_their_rate_while_they_build(settings, monkeypatch):
    monkeypatch.setattr(building, "TELL_SECONDS", 0.0)
    seen = []
    plain = store.publish

    def look(path, data):
        if "records" in path.parts:
            seen.extend(Claims(path.parents[2]).builders())
        return plain(path, data)

    monkeypatch.setattr(store, "publish", look)
    update_cache(settings, quiet=True)
    assert 0 in seen[0].chunks
    assert seen[-1].tells["bytes_per_second"] > 0
    assert seen[-1].tells["pid"] > 0


def test_grow_says_what_is_new_and_leaves_what_was_there(settings):
    with pytest.raises(CacheIncompleteError, match="build one first"):
        grow(settings)
    before = payloads(update_cache(settings, quiet=True))
    assert any("nothing new" in line for line in grow(settings).lines)
    limited = dataclasses.replace(settings, max_documents=1_000)
    assert any("nothing new within max_documents 1,000: raise that" in line for line in grow(limited).lines)
    write_jsonl(Path(settings.source) / "b.jsonl", make_texts(60, seed=9, words=20))
    outcome = grow(settings)
    assert outcome.values["new_files"] == [str(Path(settings.source) / "b.jsonl")]
    new = outcome.values["new_chunks"]
    assert new[0] == len(before)
    assert f"new: {len(new)} chunks ({new[0]}-{new[-1]}) from 1 new file (b.jsonl), " in outcome.lines[1]
    assert payloads(open_cache(settings))[: len(before)] == before
    write_jsonl(Path(settings.source) / "b.jsonl", make_texts(60, seed=10, words=20), "a")
    assert outcome.values["new_chunks"]
    assert grow(dataclasses.replace(settings)).values["new_chunks"]


def test_grow_tells_an_appended_file_as_longer_and_how_much_was_appended(settings):
    update_cache(settings, quiet=True)
    path = Path(settings.source) / "a.jsonl"
    before = path.stat().st_size
    write_jsonl(path, ["one line"], "a")
    outcome = grow(settings)
    chunk = outcome.values["planned"] - 1
    added = path.stat().st_size - before
    assert outcome.lines[1] == f"new: 1 chunk ({chunk}) from 1 longer file (a.jsonl), {added} bytes"
    assert (outcome.values["new_files"], outcome.values["longer_files"]) == ([], [str(path)])


def test_grow_counts_the_rows_of_tables_and_names_new_and_longer_files(settings):
    update_cache(settings, quiet=True)
    write_jsonl(Path(settings.source) / "a.jsonl", make_texts(40, seed=8, words=20), "a")
    write_jsonl(Path(settings.source) / "c.jsonl", make_texts(40, seed=9, words=20))
    line = grow(settings).lines[1]
    assert "from 1 new file (c.jsonl) and 1 longer file (a.jsonl), " in line
    texts = dataclasses.replace(settings, source=make_texts(40, seed=10), name="stream", max_documents=30)
    update_cache(texts, quiet=True)
    assert grow(dataclasses.replace(texts, max_documents=None)).lines[1].endswith("from more of known sources, 10 rows")
