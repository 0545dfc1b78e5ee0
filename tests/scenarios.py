"""What a cache goes through: a folder as it was before, and what is then asked of it.

Crashes, power cuts and disks that refuse are tried on each of these.
"""

import dataclasses
import gzip
import os
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path

import numpy as np

from conftest import all_tokens, file_bytes, make_texts, payloads, write_jsonl
from packhorse.cache import CacheSettings, open_cache, store, update_cache
from packhorse.cache.cleanup import clean, find_leftovers
from packhorse.cache.record import chunk_path, read_record, record_path
from packhorse.cache.repair import repair_cache
from packhorse.cache.selection import Selection
from packhorse.cache.update import build_selection, folder_of
from packhorse.errors import CacheError, CacheIncompleteError

TEXTS = make_texts(26, words=16)


def settings_for(folder: Path, source, tokenizer: Path, **more) -> CacheSettings:
    """A cache of a few chunks of a dozen short sequences."""
    defaults = {
        **{"tokenizer": str(tokenizer), "cache_dir": str(folder), "sequence_length": 16, "sequences_per_chunk": 9},
        **{"eval_share": 0.2, "engine": "hf", "workers": 0},
    }
    return CacheSettings(source=source, **{**defaults, **more})


def same_cache(cache, expected) -> bool:
    """Whether two caches hold the same, byte for byte."""
    return (
        payloads(cache) == payloads(expected)
        and file_bytes(cache.folder) == file_bytes(expected.folder)
        and cache.snapshot.digest == expected.snapshot.digest
        and np.array_equal(all_tokens(cache), all_tokens(expected))
        and np.array_equal(all_tokens(cache, "eval"), all_tokens(expected, "eval"))
    )


def visible_is_right(settings: CacheSettings, expected, at_least: int = 0, is_damaged: bool = False) -> None:
    """What can be opened is a beginning of what was meant, and complete; what is damaged is refused."""
    try:
        cache = open_cache(settings)
    except CacheIncompleteError:
        assert not at_least
        return
    assert cache.snapshot.num_chunks >= at_least
    try:
        tokens = all_tokens(cache)
    except CacheError:
        assert is_damaged
        return
    assert np.array_equal(tokens, all_tokens(expected)[: len(tokens)])


def build(settings: CacheSettings) -> None:
    """What most is about."""
    update_cache(settings, quiet=True)


@dataclass(frozen=True)
class Scenario:
    """Something that a cache goes through."""

    prepare: Callable[[Path, Path, Path], CacheSettings]
    """(folder of sources, cache_dir, tokenizer) -> what is asked for; makes what is there before."""
    act: Callable[[CacheSettings], object] = build
    """What is asked for."""
    recover: Callable[[CacheSettings], object] = build
    """What is done after a crash."""
    keeps: int = 0
    """Chunks that can be opened before, and therefore always."""
    is_damaged: bool = False
    """Whether chunks are there that cannot be read, until all is done."""


def fresh(sources: Path, folder: Path, tokenizer: Path) -> CacheSettings:
    return settings_for(folder, str(write_jsonl(sources / "a.jsonl", TEXTS[:14])), tokenizer)


def stream(sources: Path, folder: Path, tokenizer: Path) -> CacheSettings:
    return settings_for(folder, TEXTS[:14], tokenizer)


def packed(sources: Path, folder: Path, tokenizer: Path) -> CacheSettings:
    (sources / "a.jsonl.gz").write_bytes(
        gzip.compress(write_jsonl(sources / "a.jsonl", TEXTS[:14]).read_bytes(), mtime=0)
    )
    return settings_for(folder, str(sources / "a.jsonl.gz"), tokenizer)


def grown(sources: Path, folder: Path, tokenizer: Path) -> CacheSettings:
    settings = fresh(sources, folder, tokenizer)
    update_cache(settings, quiet=True)
    write_jsonl(sources / "a.jsonl", TEXTS[14:], "a")
    return settings


def whole(sources: Path, folder: Path, tokenizer: Path) -> CacheSettings:
    settings = fresh(sources, folder, tokenizer)
    update_cache(settings, quiet=True)
    return settings


def file_lost(sources: Path, folder: Path, tokenizer: Path) -> CacheSettings:
    """The file of a chunk is lost, and the codec is another one now: record, file and index are made anew."""
    settings = fresh(sources, folder, tokenizer)
    cache = update_cache(settings, quiet=True)
    chunk_path(cache.folder, 1, read_record(cache.folder, 1).file_sha256).unlink()
    return dataclasses.replace(settings, compression="none")


def file_damaged(sources: Path, folder: Path, tokenizer: Path) -> CacheSettings:
    """The record of a chunk is lost and its file damaged: another file takes its name."""
    settings = fresh(sources, folder, tokenizer)
    cache = update_cache(settings, quiet=True)
    path = chunk_path(cache.folder, 1, read_record(cache.folder, 1).file_sha256)
    path.write_bytes(path.read_bytes()[:-9] + bytes(9))
    record_path(cache.folder, 1).unlink()
    return settings


def engine_wrong(sources: Path, folder: Path, tokenizer: Path) -> CacheSettings:
    """All that the fast engine built is built again."""
    settings = dataclasses.replace(fresh(sources, folder, tokenizer), engine="auto")
    cache = update_cache(settings, quiet=True)
    store.make_folder(cache.folder / "suspects")
    value = {"engine": f"fastokens {version('fastokens')}", "text": ""}
    store.publish(cache.folder / "suspects" / "fastokens.json", store.seal(value))
    return settings


def all_damaged(sources: Path, folder: Path, tokenizer: Path) -> CacheSettings:
    """A record, a chunk, the index and the copy of the tokenizer are damaged."""
    settings = fresh(sources, folder, tokenizer)
    cache = update_cache(settings, quiet=True)
    chunk = chunk_path(cache.folder, 1, read_record(cache.folder, 1).file_sha256)
    index = next((cache.folder / "index").iterdir())
    for path in (record_path(cache.folder, 0), chunk, cache.folder / "tokenizer" / "tokenizer.json"):
        path.write_bytes(path.read_bytes()[:-9] + bytes(9))
    index.write_bytes(index.read_bytes()[:-1])
    return settings


def left_over(sources: Path, folder: Path, tokenizer: Path) -> CacheSettings:
    """Dead builders left temporary files, a page of the index, and a chunk without a record."""
    settings = fresh(sources, folder, tokenizer)
    cache = update_cache(settings, quiet=True)
    page = next((cache.folder / "index").iterdir())
    for path in (
        cache.folder / "chunks/000000/.tmp-1-a",
        cache.folder / "records/000000/.tmp-1-b",
        cache.folder / "chunks/000000/00000099-0123456789abcdef.chunk",
        page.with_name("000000000-0001.idx"),
    ):
        path.write_bytes(b"half")
        os.utime(path, (0, 0))
    return settings


def repair(settings: CacheSettings) -> None:
    """Repair, and go on."""
    repair_cache(folder_of(settings), settings)
    update_cache(settings, quiet=True)


def clean_up(settings: CacheSettings) -> None:
    """Remove what was left over."""
    folder = folder_of(settings)
    clean(find_leftovers(folder), folder)


def clean_and_build(settings: CacheSettings) -> None:
    """After a crash one cleans up again."""
    clean_up(settings)
    build(settings)


def start_over(settings: CacheSettings) -> None:
    """Build everything anew, although nothing is wrong."""
    build_selection(settings, Selection(), start_over=True, quiet=True)


SCENARIOS = {
    "fresh": Scenario(fresh),
    "stream": Scenario(stream),
    "packed": Scenario(packed),
    "grown": Scenario(grown, keeps=3),
    "file lost": Scenario(file_lost, is_damaged=True),
    "file damaged": Scenario(file_damaged, is_damaged=True),
    "engine wrong": Scenario(engine_wrong, is_damaged=True),
    "all damaged": Scenario(all_damaged, repair, recover=repair, is_damaged=True),
    "left over": Scenario(left_over, clean_up, recover=clean_and_build, keeps=3),
    "start over": Scenario(whole, start_over, is_damaged=True),
}


class Stage:
    """A scenario on a folder of its own, and what should come of it."""

    def __init__(self, name: str, folder: Path, tokenizer: Path) -> None:
        self.scenario = SCENARIOS[name]
        self.folder = folder
        sources = folder / "sources"
        sources.mkdir(parents=True)
        self.settings = self.scenario.prepare(sources, folder / "before", tokenizer)
        (folder / "before").mkdir(exist_ok=True)
        self.expected = self.again("expected")
        self.act(self.expected)

    def act(self, settings: CacheSettings) -> object:
        """Do what is asked for."""
        return self.scenario.act(settings)

    def recovers(self, settings: CacheSettings) -> bool:
        """Whether all is as it should be, after the next run."""
        self.scenario.recover(settings)
        return same_cache(open_cache(settings), open_cache(self.expected))

    def again(self, name: str) -> CacheSettings:
        """The settings for a fresh copy of what is there before, under another name."""
        copy = self.folder / name
        shutil.rmtree(copy, ignore_errors=True)
        shutil.copytree(self.folder / "before", copy)
        return dataclasses.replace(self.settings, cache_dir=str(copy))
