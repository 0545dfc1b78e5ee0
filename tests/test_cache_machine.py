"""Whatever is done to a cache, in whatever order, it gives the right tokens or an error, and can be made whole again.

A state machine builds, kills, grows, damages, checks, repairs, cleans up, pins and reads a cache, beside a model that
shares no code with it: the texts in the order of the source, and the sequences that were once pinned.
"""

import os
import shutil
import tempfile
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, settings, strategies
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from conftest import all_tokens, make_texts, texts_in, write_jsonl
from disk import Disk, kill_at, lives_through
from packhorse.cache import Cache, update_cache
from packhorse.cache.check import check_cache
from packhorse.cache.cleanup import clean, find_leftovers
from packhorse.cache.repair import repair_cache
from packhorse.errors import CacheError
from scenarios import settings_for

ROOT = Path("/dev/shm") if Path("/dev/shm").is_dir() else None
TEXTS = make_texts(400, seed=3, words=8)
DAMAGED = {
    "chunk": "chunks/*/*.chunk",
    "record": "records/*/*.json",
    "index": "index/*.idx",
    "metadata": "metadata.json",
    "tokenizer": "tokenizer/*.json",
    "recipe": "recipe.json",
}
"""Kind of a finding -> where such files lie. Pages of the plan are the one thing that nothing can bring back."""


class CacheMachine(RuleBasedStateMachine):
    """A cache of a growing file."""

    tokenizer: Path

    @initialize()
    def start(self) -> None:
        self.folder = Path(tempfile.mkdtemp(dir=ROOT, prefix="packhorse-"))
        self.source = write_jsonl(self.folder / "a.jsonl", TEXTS[:3])
        self.settings = settings_for(self.folder / "cache", str(self.source), self.tokenizer, sequences_per_chunk=6)
        self.written, self.built = 3, 0
        """Texts in the source; and those that a build that came to its end has seen."""
        self.damaged: dict[Path, str] = {}
        """Files that were damaged and not yet replaced, and their kinds."""
        self.pinned: list[tuple[int, str, np.ndarray]] = []

    def teardown(self) -> None:
        if hasattr(self, "folder"):
            shutil.rmtree(self.folder)

    @property
    def cache_folder(self) -> Path:
        """The folder of the cache, once there was one."""
        return next(path.parent for path in self.folder.glob("cache/*/chunks"))

    # -- what users and machines do

    @rule(number=strategies.integers(1, 12))
    def grow(self, number: int) -> None:
        write_jsonl(self.source, TEXTS[self.written : self.written + number], "a")
        self.written = min(self.written + number, len(TEXTS))

    @rule()
    def build(self) -> None:
        try:
            update_cache(self.settings, quiet=True)
        except CacheError:
            assert self.damaged
            return
        self.built = self.written

    @rule(operation=strategies.integers(1, 60))
    def kill(self, operation: int) -> None:
        disk = Disk(kill_at(operation))
        try:
            if lives_through(disk, lambda: update_cache(self.settings, quiet=True)):
                self.built = self.written
        except CacheError:
            assert self.damaged

    @precondition(lambda self: self.built)
    @rule(
        kind=strategies.sampled_from(list(DAMAGED)), which=strategies.integers(0, 99), how=strategies.integers(-2, 99)
    )
    def damage(self, kind: str, which: int, how: int) -> None:
        """A flipped bit, half of a file, or no file at all."""
        files = sorted(self.cache_folder.glob(DAMAGED[kind]))
        if not files or files[which % len(files)] in self.damaged:
            return
        path = files[which % len(files)]
        data = path.read_bytes()
        if how == -2:
            path.unlink()
        elif how == -1:
            path.write_bytes(data[: len(data) // 2])
        else:
            place = how * len(data) // 100
            path.write_bytes(data[:place] + bytes([data[place] ^ 16]) + data[place + 1 :])
        self.damaged[path] = kind

    @precondition(lambda self: self.built)
    @rule()
    def validate(self) -> None:
        report = check_cache(self.cache_folder)
        kinds = set(self.damaged.values())
        assert report.is_good or kinds
        if kinds and kinds <= {"chunk", "record"}:
            named = {int(path.name[:8]) for path in self.damaged}
            assert set(report.damaged_chunks) == named

    @precondition(lambda self: self.built)
    @rule()
    def repair(self) -> None:
        """What cannot be proven is left to the user, who moves it away and builds."""
        repair_cache(self.cache_folder, self.settings)
        if not check_cache(self.cache_folder).is_good:
            for path in self.damaged:
                path.unlink(missing_ok=True)
            if {"recipe", "tokenizer"} & {*self.damaged.values()}:
                shutil.rmtree(self.cache_folder / "tokenizer", ignore_errors=True)
                (self.cache_folder / "recipe.json").unlink(missing_ok=True)
        self.damaged.clear()
        self.build()
        assert check_cache(self.cache_folder).is_good

    @precondition(lambda self: self.built)
    @rule()
    def clean_up(self) -> None:
        """Years later, nothing goes that is needed."""
        for path in self.cache_folder.rglob("*"):
            os.utime(path, (0, 0))
        try:
            clean(find_leftovers(self.cache_folder, None), self.cache_folder)
        except CacheError:
            assert self.damaged

    @precondition(lambda self: self.built and not self.damaged)
    @rule()
    def pin(self) -> None:
        cache = Cache(self.cache_folder)
        self.pinned.append((cache.snapshot.num_chunks, cache.snapshot.digest, all_tokens(cache)))

    # -- what must hold

    @precondition(lambda self: self.built and not self.damaged)
    @rule()
    def holds_every_text_once(self) -> None:
        texts = texts_in(Cache(self.cache_folder))
        assert texts == TEXTS[: len(texts)]
        assert len(texts) >= self.built

    @invariant()
    def pinned_snapshots_never_change(self) -> None:
        for number, digest, tokens in self.pinned[-2:]:
            try:
                cache = Cache(self.cache_folder, num_chunks=number)
                found = all_tokens(cache)
            except CacheError:
                assert self.damaged
                continue
            assert np.array_equal(found, tokens)
            assert cache.snapshot.digest == digest or self.damaged


def run(tokenizer: Path, examples: int, steps: int, same_every_time: bool) -> None:
    machine = type("Machine", (CacheMachine,), {"tokenizer": tokenizer})
    checks = settings(
        max_examples=examples,
        stateful_step_count=steps,
        deadline=None,
        database=None,
        derandomize=same_every_time,
        print_blob=True,
        suppress_health_check=list(HealthCheck),
    )
    run_state_machine_as_test(machine, settings=checks)


def test_any_two_hundred_lives_of_a_cache(gpt2_like):
    run(gpt2_like, 200, 30, same_every_time=True)


@pytest.mark.slow
@pytest.mark.timeout(14_400)
def test_any_two_thousand_long_lives_of_a_cache(gpt2_like):
    run(gpt2_like, 2_000, 50, same_every_time=False)


def test_a_snapshot_keeps_its_digest_when_neither_record_nor_index_are_left_to_prove_it(gpt2_like):
    life = type("Machine", (CacheMachine,), {"tokenizer": gpt2_like})()
    life.start()
    life.build()
    life.pin()
    for kind in ("record", "index"):
        life.damage(kind=kind, which=0, how=0)
    life.repair()
    life.pinned_snapshots_never_change()
    life.teardown()
