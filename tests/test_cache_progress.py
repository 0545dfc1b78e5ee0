"""Laws of progress: what a build tells of itself adds up, and costs next to nothing."""

import subprocess
import sys
import time

import pytest

from conftest import small_chunks
from packhorse.cache import CacheSettings, progress, update_cache
from packhorse.cache.phases import PHASES, PhaseClock, shares
from packhorse.cache.progress import BuildProgress
from packhorse.cache.selection import Selection
from packhorse.cache.update import build_selection


@pytest.fixture
def settings(tmp_path, gpt2_like):
    return small_chunks(tmp_path, gpt2_like)


def slowly(items, seconds):
    for item in items:
        time.sleep(seconds)
        yield item


def test_phases_of_nested_generators_are_told_apart_and_add_up():
    clock, start = PhaseClock(), time.perf_counter()
    with clock.phase("pack"):
        for _ in clock.each("tokenize", slowly(clock.each("read", slowly(range(3), 0.02)), 0.01)):
            time.sleep(0.015)
    elapsed = time.perf_counter() - start
    assert sum(clock.seconds.values()) == pytest.approx(elapsed, rel=0.05)
    assert clock.seconds["read"] >= 0.06
    assert clock.seconds["tokenize"] >= 0.03
    assert clock.seconds["pack"] >= 0.045
    assert clock.seconds["tokenize"] < elapsed - 0.1  # what it waited for is not its own
    assert list(shares({"read": 1.0, "write": 3.0}).items()) == [("write", 0.75), ("read", 0.25)]


@pytest.mark.parametrize("workers", [0, 2])
def test_a_build_tells_rates_phases_bottleneck_machine_and_compression(workers, settings, capfd, monkeypatch):
    monkeypatch.setattr(progress, "LINE_SECONDS", 0.0)
    monkeypatch.setattr(progress, "MACHINE_SECONDS", 0.0)
    settings = CacheSettings(**{**vars(settings), "workers": workers})
    build_selection(settings, Selection())
    said = capfd.readouterr().err
    for word in ("documents/s", "M tokens/s", "MB/s", "s left", "utilisation", "smaller than int64", "than uint16"):
        assert word in said, word
    for word in (*PHASES, "the bottleneck is to", "CPU", "memory", "disk", "written", "network"):
        assert word in said, word


def test_the_phases_of_a_build_are_most_of_its_time(settings):
    seen = []

    class Kept(BuildProgress):
        def committed(self, record, seconds):
            super().committed(record, seconds)
            seen.append((record, seconds))

    from packhorse.cache import building

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(building, "BuildProgress", Kept)
        update_cache(settings, quiet=True)
    assert seen
    for record, seconds in seen:
        assert set(seconds) == set(PHASES)
        assert all(value > 0 for value in seconds.values())
        assert sum(seconds.values()) - seconds["write"] == pytest.approx(record.seconds, abs=0.05)


def test_a_long_build_has_a_live_dashboard_in_tensorboard(settings, monkeypatch):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    monkeypatch.setattr(progress, "LINE_SECONDS", 0.0)
    monkeypatch.setattr(progress, "MACHINE_SECONDS", 0.0)
    cache = update_cache(settings, quiet=True)
    (run,) = (cache.folder / "log").iterdir()
    events = EventAccumulator(str(run))
    events.Reload()
    tags = {tag.removeprefix("build/") for tag in events.Tags()["tensors"]}
    assert {"tokens_per_second", "bytes_per_second", "utilisation", "share_tokenize", "cpu", "memory_bytes"} <= tags
    assert {"smaller_than_int64", "smaller_than_uint16", "seconds_left", "disk_write_bytes_per_second"} <= tags
    assert len(events.Tensors("build/chunks")) > 1


def test_a_short_build_writes_no_dashboard_and_loads_no_library_for_it(settings):
    code = (
        "import sys\n"
        "from packhorse.cache import CacheSettings, update_cache\n"
        "cache = update_cache(CacheSettings(**eval(sys.argv[1])), quiet=True)\n"
        "print(*{name.partition('.')[0] for name in sys.modules}, (cache.folder / 'log').exists())\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, repr(vars(settings))], capture_output=True, text=True, check=True
    )
    *loaded, has_log = done.stdout.split()
    assert has_log == "False"
    assert not {"tensorboard", "torch", "rich"} & set(loaded)


def test_the_dashboard_loads_neither_torch_nor_tensorflow(tmp_path):
    code = (
        "import sys, pathlib\n"
        "from packhorse.cache.dashboard import Dashboard\n"
        "board = Dashboard(pathlib.Path(sys.argv[1])); board.show({'rate': 1.0}, 1); board.close()\n"
        "print(*{name.partition('.')[0] for name in sys.modules})\n"
    )
    done = subprocess.run([sys.executable, "-c", code, str(tmp_path)], capture_output=True, text=True, check=True)
    assert not {"torch", "tensorflow"} & set(done.stdout.split())
    assert list(tmp_path.rglob("events.out.*"))


def test_the_time_left_follows_the_rate_of_the_last_minutes(monkeypatch):
    now = [0.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    monkeypatch.setattr(progress, "WINDOW_SECONDS", 10.0)
    shown = BuildProgress(quiet=True)
    shown.planned(10, 100_000)
    with shown.shown():
        for second in range(1, 60):
            now[0] = float(second)
            shown.add(1, 10, 10 if second < 40 else 1_000)
    assert shown.seconds_left == pytest.approx((100_000 - shown.text_bytes) / 1_000, rel=0.1)
