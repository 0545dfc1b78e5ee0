"""Laws of crashes: whenever a builder dies, the next one finishes, and nobody can tell afterwards."""

import itertools
import os
import shutil
import signal
import traceback

import pytest

from disk import Disk, kill_at, use
from packhorse.cache import CacheSettings, open_cache
from scenarios import SCENARIOS, Stage, visible_is_right


def kill() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def ends(stage: Stage, settings: CacheSettings, number: int) -> bool:
    """Act in a child process that dies before its disk operation of that number; whether it came to its end."""
    child = os.fork()
    if child == 0:
        try:
            with use(Disk(kill_at(number, kill))):
                stage.act(settings)
            os._exit(0)
        except BaseException:
            traceback.print_exc()
            os._exit(1)
    _, status = os.waitpid(child, 0)
    assert os.WIFSIGNALED(status) or os.WEXITSTATUS(status) == 0
    return not os.WIFSIGNALED(status)


def visible(stage: Stage, settings: CacheSettings) -> None:
    visible_is_right(settings, open_cache(stage.expected), stage.scenario.keeps, stage.scenario.is_damaged)


@pytest.mark.parametrize("name", SCENARIOS)
def test_a_crash_at_any_disk_operation_is_finished_by_the_next_build(name, fast_folder, gpt2_like):
    """A few of the places where one can die, one of them twice; all of them are a slow test."""
    stage = Stage(name, fast_folder, gpt2_like)
    for number in itertools.count(2, 9):
        settings = stage.again("crashed")
        if ends(stage, settings, number):
            break
        visible(stage, settings)
        if number % 2:
            ends(stage, settings, 1 + number * 7 % 40)
            visible(stage, settings)
        assert stage.recovers(settings), number
    assert number > 10


@pytest.mark.slow
@pytest.mark.timeout(14_400)
@pytest.mark.parametrize("name", SCENARIOS)
def test_a_second_crash_anywhere_in_the_recovery_from_a_crash_anywhere_is_finished_too(name, fast_folder, gpt2_like):
    stage, crashes = Stage(name, fast_folder, gpt2_like), 0
    for first in itertools.count(1):
        settings = stage.again("crashed")
        if ends(stage, settings, first):
            break
        visible(stage, settings)
        once = fast_folder / "once"
        shutil.copytree(settings.cache_dir, once)
        for second in itertools.count(1):
            shutil.rmtree(settings.cache_dir)
            shutil.copytree(once, settings.cache_dir)
            is_finished = ends(stage, settings, second)
            visible(stage, settings)
            assert stage.recovers(settings), (first, second)
            if is_finished:
                break
        shutil.rmtree(once)
        crashes += second
    print(f"{name}: {first - 1} operations, {crashes} crashes", flush=True)
