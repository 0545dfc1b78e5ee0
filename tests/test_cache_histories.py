"""Laws of histories: sources grow, limits and shards leave some of it; in the end every document is there once."""

import gzip
import json
import random
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from conftest import texts_in
from packhorse.cache import Cache, CacheSettings, update_cache
from packhorse.cache.check import check_cache
from packhorse.cache.selection import Selection
from packhorse.cache.update import build_selection
from packhorse.errors import SourceError

WORDS = "the of and to in a is that for it was on are".split()


class FromFile:
    """A stream of the rows of a file, which may have more of them every time."""

    def __init__(self, path: str) -> None:
        self.path = path

    def __iter__(self) -> Iterator[dict]:
        return map(json.loads, Path(self.path).read_text().splitlines())


class Corpus:
    """A folder of files and a stream beside it, and the rows that they have."""

    def __init__(self, folder: Path, draw: random.Random) -> None:
        self.folder, self.draw = folder, draw
        self.rows: list[dict] = []
        (folder / "files").mkdir(parents=True)
        self.stream = folder / "stream.rows"
        self.stream.touch()
        self.can_grow = [self.stream]
        self.add_file()

    @property
    def source(self) -> list:
        """What the settings name."""
        return [
            str(self.folder / "files"),
            {"class_path": "test_cache_histories.FromFile", "init_args": {"path": str(self.stream)}},
        ]

    def texts(self, least: int, once: bool) -> Counter:
        """The documents, and how often a cache has each."""
        kept = [row["text"] for row in self.rows if row["score"] >= least and row["text"] and row["text"].strip()]
        return Counter(set(kept) if once else kept)

    def add_file(self) -> None:
        """One more file, of any kind."""
        rows = self._new_rows()
        path = self.folder / "files" / f"{len(self.rows):06d}"
        lines = "".join(json.dumps(row) + "\n" for row in rows)
        match self.draw.choice(["jsonl", "jsonl.gz", "json", "parquet"]):
            case "jsonl":
                self.can_grow.append(path.with_suffix(".jsonl"))
                self.can_grow[-1].write_text(lines)
            case "jsonl.gz":
                path.with_suffix(".jsonl.gz").write_bytes(gzip.compress(lines.encode()))
            case "json":
                path.with_suffix(".json").write_text(json.dumps(rows))
            case "parquet":
                table = pa.table(
                    {"text": pa.array([r["text"] for r in rows], "string"), "score": [r["score"] for r in rows]}
                )
                pq.write_table(table, path.with_suffix(".parquet"), row_group_size=self.draw.choice([1, 7, 50]))

    def append(self) -> None:
        """More lines in a file, or more of the stream."""
        with self.draw.choice(self.can_grow).open("a") as file:
            file.writelines(json.dumps(row) + "\n" for row in self._new_rows())

    def _new_rows(self) -> list[dict]:
        first = len(self.rows)
        count = self.draw.randint(1 if first else 30, 60)
        self.rows += [{"text": self._text(first + i), "score": self.draw.randint(0, 3)} for i in range(count)]
        return self.rows[first:]

    def _text(self, number: int) -> str | None:
        kind = self.draw.random()
        if kind < 0.1:
            return None if kind < 0.03 else ""
        if kind < 0.2 and self.rows:
            return self.draw.choice(self.rows)["text"]
        words = self.draw.choices(WORDS, k=self.draw.choice([0, 1, 3, 10, 60]))
        return " ".join([str(number), *words])


def limits(draw: random.Random) -> dict:
    """Any limit, or none."""
    most = {
        "max_documents": draw.randint(1, 150),
        "max_tokens": draw.randint(1, 4_000),
        "max_chunks": draw.randint(1, 15),
    }
    name = draw.choice([*most, None])
    return {name: most[name]} if name else {}


def selection(draw: random.Random) -> Selection:
    """All chunks, or a part of them."""
    parts = (Selection(num_shards=2, shard_index=draw.randint(0, 1)), Selection(end_chunk=draw.randint(0, 8)))
    return draw.choice([Selection(), Selection(), *parts])


def live(seed: int, folder: Path, tokenizer: Path) -> tuple[Cache, Corpus, dict]:
    """A history, and what it ends with when nothing stands in the way any more."""
    draw = random.Random(seed)
    corpus = Corpus(folder, draw)
    packing = draw.choice(["best_fit", "concat", "pad", "window"])
    values = {
        **{"tokenizer": str(tokenizer), "cache_dir": str(folder / "cache"), "name": "history", "workers": 0},
        **{"sequence_length": 32, "sequences_per_chunk": draw.choice([3, 10, 60]), "eval_share": 0.1, "engine": "hf"},
        **{"packing": packing, "overlap": 8 if packing == "window" else 0, "validation": False},
        **{"filters": draw.choice([(), (), ("score >= 1",)]), "deduplicate": draw.choice(["none", "none", "exact"])},
    }
    for _ in range(draw.randint(1, 5)):
        draw.choice([corpus.add_file, corpus.append, lambda: None])()
        try:
            build_selection(CacheSettings(source=corpus.source, **values, **limits(draw)), selection(draw), quiet=True)
        except SourceError as error:
            if "no text" not in str(error):
                raise
    return update_cache(CacheSettings(source=corpus.source, **values), quiet=True), corpus, values


def holds_every_document_once(seed: int, folder: Path, tokenizer: Path) -> None:
    cache, corpus, values = live(seed, folder, tokenizer)
    assert Counter(texts_in(cache)) == corpus.texts(1 if values["filters"] else 0, values["deduplicate"] == "exact")
    report = check_cache(cache.folder, "deep", CacheSettings(source=corpus.source, **values).open_sources())
    assert report.is_good, report.lines()


@pytest.mark.parametrize("seed", range(10))
def test_every_document_is_there_once_after_any_history(seed, fast_folder, gpt2_like):
    holds_every_document_once(seed, fast_folder, gpt2_like)


@pytest.mark.slow
@pytest.mark.timeout(7200)
def test_every_document_is_there_once_after_five_hundred_histories(fast_folder, gpt2_like):
    for seed in range(1_000, 1_500):
        holds_every_document_once(seed, fast_folder / str(seed), gpt2_like)
