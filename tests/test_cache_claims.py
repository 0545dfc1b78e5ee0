"""Laws of company: several builders of one folder share the work, and nobody waits for the dead."""

import dataclasses
import json
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import numpy as np
import pytest

from conftest import all_tokens, file_bytes, payloads, small_chunks
from packhorse.cache import building, claims, open_cache, store, update_cache
from packhorse.cache.build import Builder, Job
from packhorse.cache.claims import Claims
from packhorse.cache.plan import Plan
from packhorse.cache.selection import Selection
from packhorse.cache.snapshot import Index
from packhorse.cache.update import build_selection
from packhorse.corpus.documents import TextFile


@pytest.fixture
def settings(fast_folder, gpt2_like):
    return small_chunks(fast_folder, gpt2_like)


@pytest.fixture
def whole(settings, fast_folder):
    return update_cache(dataclasses.replace(settings, cache_dir=str(fast_folder / "whole")), quiet=True)


@pytest.fixture
def begun(settings):
    """The folder of a cache of which only chunk 0 is built."""
    return build_selection(settings, Selection(end_chunk=0), quiet=True)[0].folder


def go_on(settings):
    return build_selection(settings, Selection(), quiet=True)


def build_one(folder: Path, settings, chunk: int) -> None:
    entry = Plan(folder).entry(chunk)
    files = {0: TextFile(path=settings.source, kind="jsonl")}
    Builder(folder, "hf", "default").build(Job(chunk=chunk, ranges=entry, files=files))


def kill_a_builder_with(folder: Path, chunks: list[int]) -> None:
    ready, say = os.pipe()
    child = os.fork()
    if child == 0:
        claim = Claims(folder)
        assert all(claim.take(chunk) for chunk in chunks)
        os.write(say, b"x")
        time.sleep(60)
    os.read(ready, 1)
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)


def test_builders_at_once_build_no_chunk_twice(settings, whole):
    code = (
        "import json, sys\n"
        "from packhorse.cache import CacheSettings\n"
        "from packhorse.cache.selection import Selection\n"
        "from packhorse.cache.update import build_selection\n"
        "cache, integrity = build_selection(CacheSettings(**json.loads(sys.argv[1])), Selection(), quiet=True)\n"
        "print(integrity.built, len(integrity.states.unfinished), cache.snapshot.digest)\n"
    )
    command = [sys.executable, "-c", code, json.dumps(dataclasses.asdict(settings))]
    builders = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for _ in range(3)]
    results = [builder.communicate()[0].split() for builder in builders]
    assert sum(int(built) for built, _, _ in results) == whole.snapshot.num_chunks
    assert {(left, digest) for _, left, digest in results} == {("0", whole.snapshot.digest)}
    folder = open_cache(settings).folder
    assert file_bytes(folder) == file_bytes(whole.folder)
    assert list((folder / "claims").iterdir()) == []


def test_what_a_dead_builder_of_this_machine_had_in_hand_is_taken_over_at_once(settings, begun, whole):
    kill_a_builder_with(begun, [1, 2, 5])
    assert len(list((begun / "claims").glob("*.claim"))) == 3
    start = time.monotonic()
    cache, integrity = go_on(settings)
    assert time.monotonic() - start < claims.LEASE_SECONDS / 4
    assert integrity.built == whole.snapshot.num_chunks - 1
    assert payloads(cache) == payloads(whole)
    assert list((begun / "claims").iterdir()) == []


def foreign_lease(folder: Path, name: str) -> Path:
    """The lease of a builder of another machine, as `filelock` writes it."""
    folder.mkdir(exist_ok=True)
    path = folder / f"{name}.lease"
    lease = claims._lease_of(path)
    lease.acquire()
    text = path.read_text()
    lease.release(force=True)
    assert "host=" in text
    lines = ["host=elsewhere" if line.startswith("host=") else line for line in text.splitlines()]
    path.write_text("\n".join(lines) + "\n")
    return path


def test_a_claim_of_another_machine_is_taken_over_when_its_lease_runs_out_and_not_before(
    settings, begun, whole, monkeypatch
):
    monkeypatch.setattr(claims, "LEASE_SECONDS", 1.5)
    monkeypatch.setattr(claims, "ASK_SECONDS", 0.1)
    monkeypatch.setattr(building, "WAIT_SECONDS", 0.1)
    foreign_lease(begun / "claims", "elsewhere-1-abc")
    (begun / "claims" / "00000002.claim").write_text("elsewhere-1-abc")
    start = time.monotonic()
    cache, integrity = go_on(settings)
    assert time.monotonic() - start >= 1.5
    assert integrity.built == whole.snapshot.num_chunks - 1
    assert payloads(cache) == payloads(whole)


def test_a_chunk_that_another_builder_has_in_hand_is_waited_for_and_not_built_again(
    settings, begun, whole, monkeypatch
):
    monkeypatch.setattr(building, "WAIT_SECONDS", 0.05)
    other = Claims(begun)
    assert other.take(3)

    def finish():
        time.sleep(1)
        build_one(begun, settings, 3)
        other.__exit__(None)

    thread = threading.Thread(target=finish)
    thread.start()
    cache, integrity = go_on(settings)
    thread.join()
    assert integrity.built == whole.snapshot.num_chunks - 2
    assert cache.snapshot.digest == whole.snapshot.digest


def test_a_builder_that_fails_frees_what_it_had_in_hand(settings, begun, monkeypatch):
    def fail(*_, **__):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(Builder, "make", fail)
        with pytest.raises(KeyboardInterrupt):
            go_on(settings)
    assert list((begun / "claims").iterdir()) == []


def test_the_beginning_can_be_read_while_the_rest_is_built(settings, whole, monkeypatch):
    monkeypatch.setattr(building, "GROWTH_SECONDS", 0.0)
    seen = []
    plain, expected = store.publish, all_tokens(whole)

    def look(path, data):
        if "records" in path.parts and int(path.stem) >= 2:
            cache = open_cache(settings)
            tokens = all_tokens(cache)
            assert np.array_equal(tokens, expected[: len(tokens)])
            seen.append(Index(cache.folder).num_chunks)
        return plain(path, data)

    monkeypatch.setattr(store, "publish", look)
    cache, _ = go_on(settings)
    assert seen == list(range(2, whole.snapshot.num_chunks))
    assert cache.snapshot.digest == whole.snapshot.digest


@pytest.mark.parametrize("content", ["", "../../recipe", "x" * 100_000, "\x00", "nobody-1-2"])
def test_a_claim_that_makes_no_sense_stops_nobody(content, settings, begun, whole):
    (begun / "claims" / "00000001.claim").write_text(content)
    cache, _ = go_on(settings)
    assert payloads(cache) == payloads(whole)


def test_builders_without_leases_only_do_work_twice(settings, begun, whole, monkeypatch):
    import filelock

    def refuse(*_, **__):
        raise OSError(38, "Function not implemented")

    monkeypatch.setattr(filelock.SoftFileLease, "acquire", refuse)
    other = Claims(begun)
    assert other.take(3)
    cache, integrity = go_on(settings)
    assert integrity.built == whole.snapshot.num_chunks - 1
    assert payloads(cache) == payloads(whole)
