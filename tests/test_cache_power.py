"""Laws of power cuts: whatever the disk had not been told to keep is lost, and nobody can tell afterwards."""

import ast
import inspect
import random
import shutil
from pathlib import Path

import pytest

from disk import RecordedDisk, kill_at, lives_through
from packhorse.cache import open_cache, store
from packhorse.cache.record import committed_chunks
from packhorse.errors import PackhorseError
from power import PowerCut, Tree, write_tree
from scenarios import SCENARIOS, Stage, visible_is_right


class Outage:
    """One scenario on a disk that is recorded, and the power cuts that it may meet.

    Args:
        stage: The scenario.
        killed_at: Operations before which the process died, one run after the other.
        without: A line of the store whose sync is left out.
        most: States to look at after each operation.
    """

    def __init__(
        self, stage: Stage, killed_at: tuple[int, ...] = (), without: int | None = None, most: int = 16
    ) -> None:
        self.stage, self.most, self.draw = stage, most, random.Random(f"{killed_at} {without}")
        settings = stage.again("disk")
        self.root = Path(settings.cache_dir)
        self.power = PowerCut(self.root)
        self.disk = RecordedDisk(self.root, without)
        for number in killed_at:
            self.disk.start(kill_at(number))
            lives_through(self.disk, lambda: stage.act(settings))
        self.disk.start()
        lives_through(self.disk, lambda: stage.act(settings))
        self.expected = open_cache(stage.expected)

    def broken_promises(self) -> list[str]:
        """What the store promised and a power cut may break, after any operation."""
        return [wrong for _, _, broken in self._states() for wrong in broken]

    def sweep(self, seen: set, share: float = 1.0, only_finished: bool = False) -> list[str]:
        """Cut the power after every operation, and recover.

        Args:
            seen: States that were recovered from; those that are new are added.
            share: So many of them are taken, by chance.
            only_finished: Cut it only after all is done.

        Returns:
            What went wrong.
        """
        wrong = []
        for is_finished, tree, broken in self._states():
            wrong += broken
            state = is_finished, frozenset((_plain(path), content) for path, (_, content) in tree.items())
            if state not in seen and is_finished >= only_finished and self.draw.random() < share:
                seen.add(state)
                wrong += self._recover(tree, is_finished)
        return wrong

    def _states(self):
        for number, entry in enumerate(self.disk.log, 1):
            self.power.do(*entry)
            for tree in self.power.states(self.most, self.draw):
                yield number == len(self.disk.log), tree, self.power.broken(tree)

    def _recover(self, tree: Tree, is_finished: bool) -> list[str]:
        settings = self.stage.again("after")
        shutil.rmtree(settings.cache_dir)
        write_tree(tree, self.root, Path(settings.cache_dir))
        keeps = self.expected.snapshot.num_chunks if is_finished else self.stage.scenario.keeps
        try:
            visible_is_right(settings, self.expected, keeps, self.stage.scenario.is_damaged and not is_finished)
            if is_finished:
                assert len(committed_chunks(open_cache(settings).folder)) == keeps
            return [] if self.stage.recovers(settings) else ["other tokens"]
        except (AssertionError, PackhorseError, OSError, ValueError) as error:
            return [f"{type(error).__name__}: {error}"]


def _plain(path: str) -> str:
    """Without what is random in the names of temporary files and in quarantine."""
    return path.partition(".tmp-")[0] if "quarantine/" not in path else path.rpartition(".")[0]


def syncs() -> list[int]:
    """The lines of the store that ask for a sync."""
    calls = [node for node in ast.walk(ast.parse(inspect.getsource(store))) if isinstance(node, ast.Call)]
    lines, first = inspect.getsourcelines(store.sync_folder)
    own = range(first, first + len(lines))
    named = [(node.lineno, getattr(node.func, "attr", getattr(node.func, "id", ""))) for node in calls]
    return sorted({line for line, name in named if name in ("fsync", "sync_folder") and line not in own})


@pytest.mark.parametrize("name", SCENARIOS)
def test_a_power_cut_after_any_operation_loses_nothing_that_was_promised(name, fast_folder, gpt2_like):
    seen: set = set()
    assert not Outage(Stage(name, fast_folder, gpt2_like)).sweep(
        seen, share=0.05 if name in ("stream", "packed") else 0.1
    )
    assert len(seen) >= 5


@pytest.mark.parametrize("line", syncs())
def test_every_sync_of_the_store_is_missed_when_it_is_left_out(line, fast_folder, gpt2_like):
    outages = []
    for name in ("fresh", "file lost"):
        stage = Stage(name, fast_folder / name, gpt2_like)
        outages.append(Outage(stage, without=line))
        # The next process finds a folder, or the last record, whose name is not safe.
        done = outages[-1].disk.operations
        for last in (done.index("mkdir"), max(number for number, name in enumerate(done) if name == "link")):
            outages.append(Outage(stage, (last + 2,), without=line))
    assert any(line in outage.disk.synced_at for outage in outages)
    assert any(outage.broken_promises() for outage in outages)


def test_what_a_killed_builder_had_just_named_is_safe_before_another_counts_it(fast_folder, gpt2_like):
    stage = Stage("fresh", fast_folder, gpt2_like)
    done = Outage(stage).disk.operations
    last = max(number for number, name in enumerate(done) if name == "link")
    assert not Outage(stage, (last + 2,)).sweep(set(), only_finished=True)


@pytest.mark.slow
@pytest.mark.timeout(7200)
def test_twenty_thousand_power_cuts(fast_folder, gpt2_like):
    """Also of builds that were killed before: the power may go at any time of the recovery from a crash."""
    stages = [Stage(name, fast_folder / name, gpt2_like) for name in SCENARIOS]
    seen: set = set()
    for killed_at in [(), *((number,) for number in random.Random(0).sample(range(1, 80), 79))]:
        for stage in stages:
            assert not Outage(stage, killed_at, most=64).sweep(seen), (killed_at, stage.folder.name)
        print(f"killed at {killed_at}: {len(seen)} states", flush=True)
        if len(seen) >= 20_000:
            return
    raise AssertionError(f"only {len(seen)} states")
