"""Laws of a disk that refuses: it is told in words, nothing half-done stays, and the next run goes on."""

import errno
import itertools
import os
import re
import shutil
from pathlib import Path

import pytest

from conftest import make_texts, write_jsonl
from disk import Disk, use
from packhorse.cache import building, open_cache, store, update_cache
from packhorse.cli import main
from packhorse.errors import PackhorseError, StorageFullError, StorageIOError
from scenarios import SCENARIOS, Stage, same_cache, settings_for, visible_is_right

REFUSED = {"write", "fsync", "link", "replace", "rename", "mkdir", "open"}
ERRORS = {
    errno.ENOSPC: StorageFullError,
    errno.EDQUOT: StorageFullError,
    errno.EIO: StorageIOError,
    errno.EROFS: StorageIOError,
}


class RefusingDisk(Disk):
    """Refuses its operation of that number, or all from there on.

    Args:
        number: Which one; of those in `REFUSED`.
        code: The error.
        for_ever: Whether those after it are refused too.
    """

    def __init__(self, number: int, code: int, for_ever: bool) -> None:
        super().__init__()
        self.left, self.code, self.for_ever = number, code, for_ever
        self.open_files: dict[int, str] = {}
        self.only_claims = True
        """Whether nothing was refused but claims, which builders can do without."""
        self.lost: set[str] = set()
        """Files whose sync failed: the kernel may have forgotten what was written."""

    def do(self, name, real, args):
        if name == "fsync":
            assert self.open_files[args[0]] not in self.lost, "synced again"
        if name in ("link", "replace", "rename"):
            assert str(args[0]) not in self.lost, "published after its sync failed"
        self.left -= name in REFUSED
        if name in REFUSED and (self.left == 0 or (self.left < 0 and self.for_ever)):
            if name == "fsync" and not os.path.isdir(self.open_files[args[0]]):
                self.lost.add(self.open_files[args[0]])
            self.only_claims &= "/claims/" in str(self.open_files.get(args[0], args[0]))
            raise OSError(self.code, os.strerror(self.code))
        result = real(*args)
        if name == "open":
            self.open_files[result] = str(args[0])
        return result


def temporary(folder: Path | str) -> set[str]:
    """Names of temporary files."""
    return {path.name for path in Path(folder).rglob(".tmp-*")}


def refuse(stage: Stage, number: int, code: int, for_ever: bool) -> bool:
    """Let the disk refuse an operation, then go on; whether there was one of that number."""
    settings, disk = stage.again("refused"), RefusingDisk(number, code, for_ever)
    where = number, errno.errorcode[code], for_ever
    try:
        with use(disk):
            stage.act(settings)
        caught = None
    except PackhorseError as error:
        caught = error
    if disk.left > 0:
        return False
    if caught is not None or not disk.only_claims:
        assert type(caught) is ERRORS[code], where
        assert "Could not write" in str(caught)
        assert "is intact" in str(caught)
    assert temporary(settings.cache_dir) <= temporary(stage.folder / "before"), where
    visible_is_right(settings, open_cache(stage.expected), stage.scenario.keeps, stage.scenario.is_damaged)
    assert stage.recovers(settings), where
    return True


@pytest.mark.parametrize("name", SCENARIOS)
def test_a_disk_that_refuses_is_told_in_words_and_leaves_no_trace(name, fast_folder, gpt2_like):
    stage, kinds = Stage(name, fast_folder, gpt2_like), itertools.cycle(itertools.product(ERRORS, (False, True)))
    for number in itertools.count(1, 4):
        if not refuse(stage, number, *next(kinds)):
            break
    assert number > 12


@pytest.mark.slow
@pytest.mark.timeout(7200)
@pytest.mark.parametrize("name", SCENARIOS)
def test_every_operation_that_a_disk_refuses_once_or_for_ever(name, fast_folder, gpt2_like):
    stage, count = Stage(name, fast_folder, gpt2_like), 0
    for code, for_ever in itertools.product(ERRORS, (False, True)):
        for number in itertools.count(1):
            if not refuse(stage, number, code, for_ever):
                break
            count += 1
    print(f"{name}: {count} refusals", flush=True)


class SmallDisk:
    """Has room for so many bytes; claims, which builders can do without, take none."""

    def __init__(self, room: int) -> None:
        self.left, self.claims = room, set()

    def __getattr__(self, name):
        return getattr(os, name)

    def open(self, path, *how):
        descriptor = os.open(path, *how)
        (self.claims.add if "/claims/" in str(path) else self.claims.discard)(descriptor)
        return descriptor

    def write(self, descriptor, data):
        if descriptor in self.claims:
            return os.write(descriptor, data)
        if not self.left:
            raise OSError(28, "No space left on device")
        written = os.write(descriptor, data[: self.left])
        self.left -= written
        return written


@pytest.mark.parametrize("inside", [".", "caches", "deeper/caches"])
@pytest.mark.parametrize("verb", ["build", "status", "estimate", "list"])
def test_a_file_in_the_place_of_the_folder_of_caches_is_refused_in_words(verb, inside, tmp_path, gpt2_like, capsys):
    (tmp_path / "file").write_text("mine")
    source = str(write_jsonl(tmp_path / "a.jsonl", ["some text"]))
    arguments = ["--data.source", source, "--data.tokenizer", str(gpt2_like)]
    assert main(["cache", verb, *arguments, "--data.cache_dir", str(tmp_path / "file" / inside)]) == 2
    assert re.search(r"cache_dir.*cannot be a folder: .*/file is a file", capsys.readouterr().err)
    assert (tmp_path / "file").read_text() == "mine"


def test_a_full_disk_after_any_number_of_bytes_leaves_no_half_file(fast_folder, gpt2_like, monkeypatch):
    monkeypatch.setattr(building, "GROWTH_SECONDS", 1e9)  # How many bytes are needed shall not depend on the clock.
    source = str(write_jsonl(fast_folder / "a.jsonl", make_texts(14, words=16)))
    settings = settings_for(fast_folder / "full", source, gpt2_like)
    with use(SmallDisk(10**9)) as large:
        expected = update_cache(settings_for(fast_folder / "expected", source, gpt2_like), quiet=True)
    needed = 10**9 - large.left - 100  # Records hold the seconds that a chunk took, with more digits or fewer.
    for room in [*range(0, needed, needed // 20), *range(needed - 4_000, needed, 300)]:
        with use(SmallDisk(room)), pytest.raises(StorageFullError, match="Free some space"):
            update_cache(settings, quiet=True)
        assert not list(fast_folder.rglob(".tmp-*"))
        visible_is_right(settings, expected)
        if room % 3 == 0:
            assert same_cache(update_cache(settings, quiet=True), expected)
        shutil.rmtree(fast_folder / "full", ignore_errors=True)


@pytest.mark.parametrize("code", [errno.EACCES, errno.EPERM])
@pytest.mark.parametrize("is_there", [True, False])
def test_a_folder_above_that_may_be_passed_but_not_read_stops_nobody(is_there, code, tmp_path, gpt2_like):
    above = tmp_path / "home"
    (above / "cache" if is_there else above).mkdir(parents=True)
    source = str(write_jsonl(tmp_path / "a.jsonl", make_texts(14, words=16)))
    refused = []

    def before(count, name, args):
        if name == "open" and args[0] == above:
            refused.append(args)
            raise OSError(code, os.strerror(code))

    with use(Disk(before)):
        cache = update_cache(settings_for(above / "cache", source, gpt2_like), quiet=True)
    assert cache.num_sequences()
    assert refused


def test_a_folder_that_may_not_be_made_is_told_in_words(tmp_path):
    def before(count, name, args):
        if name == "mkdir":
            raise PermissionError(errno.EACCES, "Permission denied")

    with use(Disk(before)), pytest.raises(StorageIOError, match=r"Could not write .*/mine: Permission denied"):
        store.make_folder(tmp_path / "mine")


def test_a_file_system_without_hard_links_still_publishes_once(tmp_path, monkeypatch):
    def refuse(*_):
        raise OSError(95, "Operation not supported")

    monkeypatch.setattr(os, "link", refuse)
    assert store.publish(tmp_path / "a", b"first")
    assert not store.publish(tmp_path / "a", b"second")
    assert (tmp_path / "a").read_bytes() == b"first"
    assert os.listdir(tmp_path) == ["a"]
