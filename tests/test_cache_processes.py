"""Laws of whole processes: killed, stopped, or many at once, they make the cache that one alone makes."""

import dataclasses
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import threading
import time
from contextlib import contextmanager, suppress
from pathlib import Path

import psutil
import pytest

from conftest import make_texts, texts_in, write_jsonl
from packhorse.cache import CacheSettings, building, open_cache, update_cache
from packhorse.cache.build import Builder, Job
from packhorse.cache.record import read_record
from packhorse.corpus.documents import TextFile
from packhorse.errors import CacheError, SourceError
from scenarios import same_cache, settings_for, visible_is_right

SCRIPT = """
import json, sys
from packhorse.cache import CacheSettings
from packhorse.cache.selection import Selection
from packhorse.cache.update import build_selection
settings = json.loads(sys.argv[1])
selection = Selection(**settings.pop("selection", {}))
if settings["source"] == "texts":
    settings["source"] = json.load(open(sys.argv[2]))
print(build_selection(CacheSettings(**settings), selection, quiet=True)[0].snapshot.digest)
"""


def start(settings: dict, *more: str) -> subprocess.Popen:
    return subprocess.Popen(
        [sys.executable, "-c", SCRIPT, json.dumps(settings), *more],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )


@pytest.fixture
def large(fast_folder, gpt2_like):
    """Settings of a build of about thirty chunks, and the cache that it should give."""
    source = str(write_jsonl(fast_folder / "a.jsonl", make_texts(900, words=60)))
    settings = {
        **{"source": source, "tokenizer": str(gpt2_like), "cache_dir": str(fast_folder / "killed"), "workers": 2},
        **{"sequence_length": 64, "sequences_per_chunk": 50, "engine": "auto"},
    }
    expected = {**settings, "cache_dir": str(fast_folder / "expected"), "workers": 0, "engine": "hf"}
    return settings, update_cache(CacheSettings(**expected), quiet=True)


def test_a_build_with_workers_that_is_killed_again_and_again_ends_as_if_never_disturbed(large):
    settings, expected = large
    assert expected.snapshot.num_chunks >= 15
    for seconds in (0.5, 0.9, 1.2):
        process = start(settings)
        time.sleep(seconds)
        process.kill()
        process.communicate()
        visible_is_right(CacheSettings(**settings), expected)
    assert same_cache(update_cache(CacheSettings(**settings), quiet=True), expected)


def kill_in_the_middle(settings: dict, draw: random.Random, seconds: float) -> bool:
    """Kill a build, or one of its workers, at a random instant after its cache exists; whether it was alive."""
    process = start(settings)
    while process.poll() is None and not any(Path(settings["cache_dir"]).glob("*/recipe.json")):
        time.sleep(0.001)
    time.sleep(draw.uniform(0, seconds))
    victims = [psutil.Process(process.pid)] if process.poll() is None else []
    if victims and draw.random() < 0.3:
        with suppress(psutil.NoSuchProcess):
            victims = victims[0].children() or victims
    for victim in victims:
        with suppress(psutil.NoSuchProcess):
            victim.kill()
    process.communicate()
    return bool(victims)


@pytest.mark.slow
@pytest.mark.timeout(14_400)
def test_five_hundred_builds_that_were_killed_at_random_instants_end_as_if_never_disturbed(large):
    settings, expected = large
    draw, kills, caches = random.Random(0), 0, 0
    begin = time.monotonic()
    assert start(settings).wait() == 0
    seconds = time.monotonic() - begin
    while kills < 500:
        shutil.rmtree(settings["cache_dir"])
        for _ in range(draw.randint(1, 4)):
            kills += kill_in_the_middle(settings, draw, seconds)
            visible_is_right(CacheSettings(**settings), expected)
        assert same_cache(update_cache(CacheSettings(**settings), quiet=True), expected), kills
        caches += 1
        print(f"{kills} kills, {caches} caches", flush=True)


def test_a_killed_worker_is_a_clear_error_and_the_next_run_finishes(large):
    settings, expected = large
    caught = []

    def kill_one():
        me = psutil.Process()
        while not caught:
            for child in me.children():
                if "packhorse.cache.worker" in " ".join(child.cmdline()) and any(
                    Path(settings["cache_dir"]).glob("*/records/*/*.json")
                ):
                    child.kill()
                    caught.append(child.pid)
                    return
            time.sleep(0.005)

    killer = threading.Thread(target=kill_one, daemon=True)
    killer.start()
    with pytest.raises(CacheError, match=r"killed by signal 9[\s\S]*Run the same command again"):
        update_cache(CacheSettings(**settings), quiet=True)
    assert caught
    assert same_cache(update_cache(CacheSettings(**settings), quiet=True), expected)


@pytest.mark.parametrize("kind", ["file", "texts"])
def test_two_builders_at_once_make_one_consistent_cache(kind, large, fast_folder):
    settings, expected = large
    if kind == "texts":
        lines = Path(settings["source"]).read_text().splitlines()
        (fast_folder / "texts.json").write_text(json.dumps([json.loads(line)["text"] for line in lines]))
        settings = {**settings, "source": "texts"}
    settings = {**settings, "workers": 0}
    builders = [start(settings, str(fast_folder / "texts.json")) for _ in range(3)]
    outputs = [builder.communicate() for builder in builders]
    assert [builder.returncode for builder in builders] == [0, 0, 0], outputs[0][1] + outputs[1][1] + outputs[2][1]
    assert len({out for out, _ in outputs}) == 1
    cache = open_cache(next(Path(settings["cache_dir"]).glob("*/recipe.json")).parent)
    if kind == "file":
        assert same_cache(cache, expected)
    assert cache.summary.documents == expected.summary.documents
    assert cache.summary.tokens == expected.summary.tokens


@contextmanager
def builders_of(settings: list[dict]):
    """Processes that are not left alone when a test fails."""
    builders = [start(setting) for setting in settings]
    try:
        yield builders
    finally:
        for builder in builders:
            builder.kill()
            builder.wait()


def disturb(builders: list, settings: list[dict], draw: random.Random) -> tuple[int, int]:
    """Kill and stop builders at random, and replace the killed ones, until all are done; how often."""
    kills = stops = 0
    while any(builder.poll() != 0 for builder in builders):
        time.sleep(draw.uniform(0, 0.2))
        number = draw.randrange(len(builders))
        builder = builders[number]
        if builder.poll() is not None:
            if builder.returncode != 0:
                assert builder.returncode == -signal.SIGKILL, builder.communicate()[1]
                builders[number] = start(settings[number])
        elif draw.random() < 0.5 and kills < 40:
            builder.kill()
            builder.wait()
            kills += 1
        elif stops < 40:
            builder.send_signal(signal.SIGSTOP)
            time.sleep(draw.uniform(0, 0.5))
            builder.send_signal(signal.SIGCONT)
            stops += 1
    return kills, stops


@pytest.mark.slow
@pytest.mark.timeout(7200)
@pytest.mark.parametrize("seed", range(5))
def test_eight_builders_that_are_killed_and_stopped_make_each_chunk_once(seed, large):
    settings, _ = large
    write_jsonl(Path(settings["source"]), make_texts(32_000, words=60))
    settings = {**settings, "workers": 0, "engine": "hf"}
    expected = update_cache(CacheSettings(**{**settings, "cache_dir": f"{settings['cache_dir']}-expected"}), quiet=True)
    draw, last = random.Random(seed), expected.snapshot.num_chunks - 1
    # Three ask for everything, the others for overlapping ranges and for every third chunk.
    selections = [{}, {}, {}, {"num_shards": 3, "shard_index": seed % 3}]
    selections += [{"start_chunk": (a := draw.randint(0, last)), "end_chunk": draw.randint(a, last)} for _ in range(4)]
    each = [{**settings, "selection": selection} for selection in selections]
    with builders_of(each) as builders:
        kills, stops = disturb(builders, each, draw)
    print(f"seed {seed}: {kills} kills, {stops} stops, {expected.snapshot.num_chunks} chunks", flush=True)
    assert kills + stops > 10
    cache = open_cache(next(Path(settings["cache_dir"]).glob("*/recipe.json")).parent)
    assert same_cache(cache, expected)


class Disturbed:
    """Texts; when number `at` is read for the first time, another builder does the whole work meanwhile."""

    def __init__(self, texts: list[str], at: int) -> None:
        self.texts, self.at, self.meanwhile = texts, at, None

    def __iter__(self):
        for number, text in enumerate(self.texts):
            if number == self.at and self.meanwhile is not None:
                meanwhile, self.meanwhile = self.meanwhile, None
                meanwhile()
            yield text


@pytest.mark.parametrize("at", [5, 60, 130, 199])
def test_who_is_overtaken_adopts_the_others_plan_and_nothing_is_taken_twice(at, fast_folder, gpt2_like):
    texts = make_texts(200, words=16)
    source = Disturbed(texts, at)
    settings = settings_for(fast_folder / "cache", source, gpt2_like, name="texts", max_documents=None)
    # The other one knows only some of the texts yet, so that its pages are not those of the first.
    other = Disturbed(texts[: at + 40], -1)
    source.meanwhile = lambda: update_cache(dataclasses.replace(settings, source=other), quiet=True)
    cache = update_cache(settings, quiet=True)
    assert source.meanwhile is None
    assert texts_in(cache) == texts


def test_a_page_that_another_builder_adds_while_the_chunks_are_counted_is_built_too(
    fast_folder, gpt2_like, monkeypatch
):
    settings = settings_for(fast_folder / "cache", make_texts(40, words=16), gpt2_like)
    count, alone = building.find_states, []

    def disturbed(*what):
        states = count(*what)
        if not alone:
            alone.append(True)
            update_cache(settings, quiet=True)
            shutil.rmtree(next((fast_folder / "cache").glob("*/records")))  # it has only just begun
        return states

    monkeypatch.setattr(building, "find_states", disturbed)
    cache = update_cache(settings, quiet=True)
    assert texts_in(cache) == settings.source


def test_what_dead_builders_left_is_removed_once_nobody_can_be_writing_it(fast_folder, gpt2_like):
    settings = settings_for(fast_folder / "cache", make_texts(40, words=16), gpt2_like, max_documents=20)
    cache = update_cache(settings, quiet=True)
    old, new = (cache.folder / f"chunks/000000/.tmp-{number}" for number in (1, 2))
    for path in (old, new):
        path.write_bytes(b"half a chunk")
    os.utime(old, (time.time() - 2 * 24 * 3600,) * 2)
    update_cache(dataclasses.replace(settings, max_documents=None), quiet=True)
    assert not old.exists()
    assert new.exists()


def test_a_spool_that_a_faster_builder_has_removed_is_no_error(fast_folder, gpt2_like):
    settings = settings_for(fast_folder / "cache", make_texts(40, words=16), gpt2_like)
    cache = update_cache(settings, quiet=True)
    assert not list((cache.folder / "spool").iterdir())
    gone = TextFile(path=str(cache.folder / "spool/gone.parquet"), kind="parquet", column="document")
    builder = Builder(cache.folder, "hf", "default")
    assert builder.build(Job(chunk=0, ranges=[(0, 0, 9)], files={0: gone})) == read_record(cache.folder, 0)
    with pytest.raises(SourceError, match=r"gone\.parquet"):
        builder.build(Job(chunk=99, ranges=[(0, 0, 9)], files={0: gone}))


def test_a_worker_whose_parent_is_gone_stops_in_the_middle_of_a_chunk(fast_folder, gpt2_like):
    path = write_jsonl(fast_folder / "a.jsonl", make_texts(10, words=16))
    cache = update_cache(settings_for(fast_folder / "cache", str(path), gpt2_like), quiet=True)
    write_jsonl(path, make_texts(60_000))
    job = {"chunk": 99, "ranges": [(0, 0, path.stat().st_size)], "files": {0: TextFile(path=str(path), kind="jsonl")}}
    setting = {"folder": str(cache.folder), "engine": "hf", "compression": "default", "read_back": False}
    worker = subprocess.Popen(
        [sys.executable, "-m", "packhorse.cache.worker", "0"], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    worker.stdin.write(json.dumps({**setting, "job": dataclasses.asdict(Job(**job))}).encode() + b"\n")
    worker.stdin.flush()
    assert b"progress" in worker.stdout.readline()
    worker.stdout.close()
    worker.stdin.close()
    worker.wait()
    with pytest.raises(FileNotFoundError):
        read_record(cache.folder, 99)


def test_an_error_in_a_worker_arrives_as_the_same_error(fast_folder, gpt2_like):
    path = write_jsonl(fast_folder / "a.jsonl", make_texts(300, words=16))
    with path.open("a") as file:
        file.write("{\n")
    settings = settings_for(fast_folder / "cache", str(path), gpt2_like, workers=2)
    with pytest.raises(SourceError, match=r"a\.jsonl, line 301 is not valid JSON"):
        update_cache(settings, quiet=True)
