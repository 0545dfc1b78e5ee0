"""Laws of bit rot: every flipped bit and every cut-off end, in files of every kind, is found before it is believed."""

import gzip
import random
from pathlib import Path

import pytest

from conftest import make_texts, write_jsonl
from packhorse.cache import store
from packhorse.cache.locations import Locations
from packhorse.cache.metadata import check_metadata
from packhorse.cache.plan import Plan
from packhorse.cache.reader import ChunkReader
from packhorse.cache.recipe import read_identity, tokenizer_json
from packhorse.cache.record import chunk_path, read_record
from packhorse.cache.snapshot import Index
from packhorse.cache.suspects import Suspects
from packhorse.corpus.sources import open_sources
from packhorse.errors import CacheError

KINDS = ("chunk", "record", "plan", "index", "recipe", "tokenizer", "metadata", "suspect", "text spool", "stream spool")


class Case:
    """A file, and what reads it."""

    def __init__(self, kind, build, folder):
        texts = make_texts(30, words=20)
        packed = folder / "a.jsonl.gz"
        packed.write_bytes(gzip.compress(write_jsonl(folder / "a.jsonl", texts).read_bytes()))
        source = texts if kind == "stream spool" else str(packed)
        self.cache = build(source, sequences_per_chunk=12, cache_dir=str(folder / "cache"))
        root = self.cache.folder
        self.record, self.sources = read_record(root, 1), open_sources(source)
        self.identity = read_identity(root)
        if kind.endswith("spool"):
            spooled = Locations(Plan(root), self.sources).locate(0)
            self.path = Path(spooled.path)
        elif kind == "suspect":
            store.make_folder(root / "suspects")
            self.path = root / "suspects/fastokens-0.json"
            store.publish(self.path, store.seal({"engine": "fastokens 0", "text": "00"}))
        else:
            self.path = {
                "chunk": chunk_path(root, 1, self.record.file_sha256),
                "record": root / "records/000000/00000001.json",
                "plan": root / "plan/000000.json",
                "index": next((root / "index").glob("*.idx")),
                "recipe": root / "recipe.json",
                "tokenizer": root / "tokenizer/tokenizer.json",
                "metadata": root / "metadata.json",
            }[kind]
        self.kind, self.data = kind, self.path.read_bytes()

    def read(self):
        """All that the file can tell, in a form that can be compared; raises a CacheError when it is refused."""
        root = self.cache.folder
        if self.kind == "chunk":
            index = bytes.fromhex(self.record.index_sha256)
            reader = ChunkReader(self.path, 1, self.record.recipe, index)
            reader.tokens(0)
            return reader.content_digest()
        if self.kind == "index":
            index = Index(root)
            return index.rows(0).tobytes(), index.totals(index.num_chunks), index.digest(index.num_chunks)
        if self.kind.endswith("spool"):
            return Path(Locations(Plan(root), self.sources).locate(0).path).read_bytes()
        return {
            "record": lambda: read_record(root, 1),
            "plan": lambda: Plan(root).pages,
            "recipe": lambda: read_identity(root),
            "tokenizer": lambda: tokenizer_json(root, self.identity),
            "metadata": lambda: check_metadata(root, self.identity.recipe, self.cache.snapshot.num_chunks),
            "suspect": lambda: Suspects(root).engines(),
        }[self.kind]()


def damaged(data, draw):
    """The same bytes with a few bits flipped, the end cut off or something added, or a stretch zeroed or moved."""
    kind = draw.randrange(10)
    if kind < 6:
        out = bytearray(data)
        for _ in range(1 if kind < 4 else draw.randrange(1, 9)):
            out[draw.randrange(len(out))] ^= 1 << draw.randrange(8)
    elif kind < 8:
        out = data[: draw.randrange(len(data))]
    elif kind == 8:
        start = draw.randrange(len(data))
        stop = min(len(data), start + draw.choice([1, 16, 512, 4096]))
        out = data[:start] + bytes(stop - start) + data[stop:]
    else:
        out = data + draw.randbytes(draw.randrange(1, 9))
    return bytes(out)


def sweep(case, count, seed):
    """So many damages: each is refused, or, in a spool, made good before it is read."""
    draw = random.Random(seed)
    expected, tries = case.read(), 0
    while tries < count:
        data = damaged(case.data, draw)
        if data == case.data:
            continue
        tries += 1
        case.path.write_bytes(data)
        if case.kind.endswith("spool"):
            assert case.read() == expected
            continue
        with pytest.raises(CacheError):
            case.read()
    case.path.write_bytes(case.data)
    assert case.read() == expected


@pytest.fixture
def case(request, build, fast_folder):
    return Case(request.param, build, fast_folder)


@pytest.mark.parametrize("case", KINDS, indirect=True)
def test_a_damaged_file_is_found_before_it_is_believed(case):
    sweep(case, 150, seed=0)


@pytest.mark.slow
@pytest.mark.parametrize("case", KINDS, indirect=True)
def test_ten_thousand_damages_of_every_kind_of_file_are_all_found(case):
    sweep(case, 10_000, seed=1)
