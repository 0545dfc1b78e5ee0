"""Laws of crashes: whenever a builder dies, the next one finishes, and nobody can tell afterwards."""

import dataclasses
import json
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import numpy as np
import psutil
import pytest

from conftest import all_tokens, file_bytes, make_texts, payloads, texts_in, write_jsonl
from packhorse.cache import CacheSettings, open_cache, store, update_cache
from packhorse.cache.build import Builder, Job
from packhorse.cache.record import read_record
from packhorse.corpus.documents import TextFile
from packhorse.errors import (
    CacheError,
    CacheIncompleteError,
    PackhorseError,
    SourceError,
    StorageFullError,
    StorageIOError,
)

OPERATIONS = {"open", "write", "fsync", "link", "unlink", "mkdir", "replace", "rename"}


class Disk:
    """Stands in for `os` in the module that writes; something happens at one of its operations."""

    def __init__(self, at: int, happens) -> None:
        self.count, self.at, self.happens = 0, at, happens

    def __getattr__(self, name):
        real = getattr(os, name)
        if name not in OPERATIONS:
            return real

        def operation(*args, **kwargs):
            self.count += 1
            if self.count == self.at:
                self.happens(name, args)
            return real(*args, **kwargs)

        return operation


def die(name, args):
    """As by kill -9 or the power switch; a write may have got half of its bytes out."""
    if name == "write":
        os.write(args[0], bytes(args[1])[: len(args[1]) // 2])
    os.kill(os.getpid(), signal.SIGKILL)


def build_until(settings: CacheSettings, at: int) -> bool:
    """Build in a child process that dies at its disk operation number `at`; whether it came to the end before."""
    child = os.fork()
    if child == 0:
        try:
            store.os = Disk(at, die)
            update_cache(settings, quiet=True)
            os._exit(0)
        except BaseException:
            import traceback

            traceback.print_exc()
            os._exit(1)
    _, status = os.waitpid(child, 0)
    assert os.WIFSIGNALED(status) or os.WEXITSTATUS(status) == 0
    return not os.WIFSIGNALED(status)


def settings_for(folder: Path, source, tokenizer: Path, **more) -> CacheSettings:
    defaults = {
        **{"tokenizer": str(tokenizer), "cache_dir": str(folder), "sequence_length": 16, "sequences_per_chunk": 12},
        **{"eval_share": 0.2, "engine": "hf", "workers": 0},
    }
    return CacheSettings(source=source, **{**defaults, **more})


def same_cache(cache, expected) -> bool:
    return (
        payloads(cache) == payloads(expected)
        and file_bytes(cache.folder) == file_bytes(expected.folder)
        and cache.snapshot.digest == expected.snapshot.digest
        and np.array_equal(all_tokens(cache), all_tokens(expected))
        and np.array_equal(all_tokens(cache, "eval"), all_tokens(expected, "eval"))
    )


def visible_is_right(settings: CacheSettings, expected) -> None:
    """What can be opened after a crash is a beginning of what was meant, and complete."""
    try:
        cache = open_cache(settings)
    except CacheIncompleteError:
        return
    tokens = all_tokens(cache)
    assert np.array_equal(tokens, all_tokens(expected)[: len(tokens)])


@pytest.mark.parametrize("kind", ["jsonl", "stream", "jsonl.gz"])
def test_a_crash_at_any_disk_operation_is_finished_by_the_next_build(kind, fast_folder, gpt2_like):
    texts = make_texts(14, words=16)
    source = texts
    if kind != "stream":
        source = str(write_jsonl(fast_folder / "a.jsonl", texts))
    if kind == "jsonl.gz":
        import gzip

        Path(f"{source}.gz").write_bytes(gzip.compress(Path(source).read_bytes()))
        source += ".gz"
    expected = update_cache(settings_for(fast_folder / "expected", source, gpt2_like), quiet=True)
    assert expected.snapshot.num_chunks >= 2
    # A file in every place where one can die; of the other forms of source, a few.
    step = 1 if kind == "jsonl" else 4
    for at in range(1, 10_000, step):
        settings = settings_for(fast_folder / "crashed", source, gpt2_like)
        finished = build_until(settings, at)
        visible_is_right(settings, expected)
        if at % 3 == 0 and not finished:  # and once more on the way back
            build_until(settings, 1 + at * 7 % 40)
            visible_is_right(settings, expected)
        assert same_cache(update_cache(settings, quiet=True), expected), at
        assert same_cache(open_cache(settings), expected)
        shutil.rmtree(fast_folder / "crashed")
        if finished:
            break
    assert at > 60


def test_a_crash_while_a_cache_grows_leaves_what_was_there(fast_folder, gpt2_like):
    texts = make_texts(26, words=16)
    source = str(write_jsonl(fast_folder / "a.jsonl", texts[:14]))
    before = update_cache(settings_for(fast_folder / "before", source, gpt2_like), quiet=True)
    write_jsonl(fast_folder / "a.jsonl", texts[14:], "a")
    settings = settings_for(fast_folder / "crashed", source, gpt2_like)
    for at in range(1, 10_000, 3):
        shutil.copytree(fast_folder / "before", fast_folder / "crashed")
        finished = build_until(settings, at)
        now = open_cache(settings)
        n = before.snapshot.num_chunks
        assert now._reader.snapshot.num_chunks >= n
        old = before.num_sequences()
        assert np.array_equal(now.read(range(old)).tokens, all_tokens(before))
        grown = update_cache(settings, quiet=True)
        assert payloads(grown)[:n] == payloads(before)
        shutil.rmtree(fast_folder / "crashed")
        if finished:
            break


# -- a disk that refuses


def what_goes_wrong(settings: CacheSettings) -> Exception | None:
    try:
        update_cache(settings, quiet=True)
    except PackhorseError as error:
        return error
    return None


@pytest.mark.parametrize(
    ("code", "error"), [(28, StorageFullError), (122, StorageFullError), (5, StorageIOError), (30, StorageIOError)]
)
@pytest.mark.parametrize("operation", ["write", "fsync", "link", "mkdir"])
def test_a_disk_that_refuses_is_told_in_words_and_leaves_no_trace(
    code, error, operation, fast_folder, gpt2_like, monkeypatch
):
    source = str(write_jsonl(fast_folder / "a.jsonl", make_texts(14, words=16)))
    expected = update_cache(settings_for(fast_folder / "expected", source, gpt2_like), quiet=True)
    settings = settings_for(fast_folder / "full", source, gpt2_like)

    def refuse(name, args):
        if name == operation:
            raise OSError(code, os.strerror(code))
        disk.at = disk.count + 1

    hits = 0
    for at in range(1, 200, 11):
        disk = Disk(at, refuse)
        with monkeypatch.context() as patch:
            patch.setattr(store, "os", disk)
            patch.setattr(store, "_durable", set())
            caught = what_goes_wrong(settings)
        if caught is not None:
            hits += 1
            assert type(caught) is error
            assert "is intact" in str(caught)
            assert "Could not write" in str(caught)
        assert not list(fast_folder.rglob(".tmp-*"))
        visible_is_right(settings, expected)
        assert same_cache(update_cache(settings, quiet=True), expected)
        shutil.rmtree(fast_folder / "full")
    assert hits >= 3


class SmallDisk:
    """Has room for so many bytes."""

    def __init__(self, room: int) -> None:
        self.left = room

    def __getattr__(self, name):
        return getattr(os, name)

    def write(self, descriptor, data):
        if not self.left:
            raise OSError(28, "No space left on device")
        written = os.write(descriptor, data[: self.left])
        self.left -= written
        return written


def test_a_full_disk_after_any_number_of_bytes_leaves_no_half_file(fast_folder, gpt2_like, monkeypatch):
    source = str(write_jsonl(fast_folder / "a.jsonl", make_texts(14, words=16)))
    settings = settings_for(fast_folder / "full", source, gpt2_like)
    large = SmallDisk(10**9)
    with monkeypatch.context() as patch:
        patch.setattr(store, "os", large)
        expected = update_cache(settings_for(fast_folder / "expected", source, gpt2_like), quiet=True)
    needed = 10**9 - large.left
    for room in [*range(0, needed, needed // 20), *range(needed - 4_000, needed, 150)]:
        with monkeypatch.context() as patch:
            patch.setattr(store, "os", SmallDisk(room))
            caught = what_goes_wrong(settings)
        assert type(caught) is StorageFullError
        assert "Free some space" in str(caught)
        assert not list(fast_folder.rglob(".tmp-*"))
        visible_is_right(settings, expected)
        if room % 3 == 0:
            assert same_cache(update_cache(settings, quiet=True), expected)
        shutil.rmtree(fast_folder / "full", ignore_errors=True)


def test_a_file_system_without_hard_links_still_publishes_once(tmp_path, monkeypatch):
    def refuse(*_):
        raise OSError(95, "Operation not supported")

    monkeypatch.setattr(os, "link", refuse)
    assert store.publish(tmp_path / "a", b"first")
    assert not store.publish(tmp_path / "a", b"second")
    assert (tmp_path / "a").read_bytes() == b"first"
    assert os.listdir(tmp_path) == ["a"]


def test_a_committed_chunk_is_durable_before_its_record_is_visible(tmp_path, monkeypatch):
    """The order of a power cut's survival: content, name, folder; the record comes after all of these."""
    log = []

    class Logged(Disk):
        def __getattr__(self, name):
            real = getattr(os, name)

            def operation(*args, **kwargs):
                result = real(*args, **kwargs)
                if name == "open":
                    log.append(("open", result, str(args[0])))
                elif name in OPERATIONS:
                    log.append((name, *map(str, args)))
                return result

            return operation if name in OPERATIONS else real

    monkeypatch.setattr(store, "os", Logged(0, None))
    store.publish(tmp_path / "name", b"content")
    folder = next(entry[1] for entry in log if entry[0] == "open" and entry[2] == str(tmp_path))
    order = [(entry[0], entry[1]) for entry in log if entry[0] in ("fsync", "link", "unlink")]
    temporary = next(entry[1] for entry in log if entry[0] == "open" and ".tmp-" in entry[2])
    assert [name for name, _ in order] == ["fsync", "link", "fsync", "unlink"]
    assert order[0] == ("fsync", str(temporary))
    assert order[2] == ("fsync", str(folder))


# -- whole processes

SCRIPT = """
import json, sys
from packhorse.cache import CacheSettings, update_cache
settings = json.loads(sys.argv[1])
if settings["source"] == "texts":
    settings["source"] = json.load(open(sys.argv[2]))
print(update_cache(CacheSettings(**settings), quiet=True).snapshot.digest)
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


def test_an_error_in_a_worker_arrives_as_the_same_error(fast_folder, gpt2_like):
    path = write_jsonl(fast_folder / "a.jsonl", make_texts(300, words=16))
    with path.open("a") as file:
        file.write("{\n")
    settings = settings_for(fast_folder / "cache", str(path), gpt2_like, workers=2)
    with pytest.raises(SourceError, match=r"a\.jsonl, line 301 is not valid JSON"):
        update_cache(settings, quiet=True)
