"""Laws of hostile metadata: whatever a file says, it is refused in words and in no time, or it is harmless.

Mutations know the structure: values of other types, huge and negative numbers, NaN, deep nesting, duplicate and unknown
keys, fields swapped or missing; most are sealed again, so that only their sense can give them away.
"""

import json
import random
import resource
import time

import pytest

from conftest import all_tokens, make_texts, write_jsonl
from packhorse.cache import Cache, store
from packhorse.cache.check import check_cache
from packhorse.cache.plan import Plan
from packhorse.errors import CacheError

VALUES = [
    *(None, True, False, 0, 1, -1, 2, 2**31, 2**32, 2**63 - 1, 2**63, 2**64, -(2**63), 10**400, 0.5, -0.0, 1e308),
    *(
        "",
        "a",
        "0" * 64,
        "0" * 64 + "\n",
        "../../x",
        "/etc/passwd",
        "a\0b",
        "\ud800",
        "é" * 9,
        "none",
        "1",
        "x" * 10_000,
    ),
    *([], {}, [[]], [1], [[0, 0, 1]], [[0, 1, 1]], [[9, 0, 5]], [[0, 0, 2**70]], {"a": 1}, [None] * 50),
]
TEXTS = [
    *("NaN", "Infinity", "-Infinity", "1e999", "9" * 5_000, "[" * 100_000, '{"a":' * 20_000, "nul", '"\\ud800"', ""),
    *('{"a":1,"a":2}', "[" * 500 + "]" * 500, "1.0", "1e2", "-0", '"' + "z" * 100_000 + '"'),
]


def places(value, path=()):
    """The paths of everything in a JSON value."""
    yield path
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, item in items:
        yield from places(item, (*path, key))


def mutate(value, draw):
    """Another value, and the path that was changed."""
    value = json.loads(json.dumps(value))
    path = draw.choice(list(places(value))[1:])
    parent = value
    for key in path[:-1]:
        parent = parent[key]
    kind = draw.randrange(7)
    if kind == 0:
        del parent[path[-1]]
    elif kind == 1 and isinstance(parent, dict):
        parent[draw.choice(["sha", "x", "Chunk", "", "__class__"])] = draw.choice(VALUES)
    elif kind == 2 and isinstance(parent, dict):
        other = draw.choice(sorted(parent))
        parent[path[-1]], parent[other] = parent[other], parent[path[-1]]
    elif kind == 3 and type(parent[path[-1]]) is int:
        parent[path[-1]] += draw.choice([1, -1, 7, 2**20, 2**40])
    else:
        parent[path[-1]] = draw.choice(VALUES)
    return value, path


def write(path, value, draw):
    """Write it: mostly sealed, sometimes with what no seal allows."""
    data = None
    try:
        data = store.seal(value)
    except (ValueError, TypeError):
        data = json.dumps(value).encode("utf-8", "surrogatepass")
    kind = draw.randrange(10)
    if kind == 0:
        at = draw.randrange(len(data))
        text = draw.choice(TEXTS).encode()
        data = data[: data.index(b":", at % 20) + 1] + text + data[data.index(b",") :] if b"," in data else text
    elif kind == 1:
        data = data[:-1] + b',"format":1}'
    elif kind == 2:
        data = draw.choice([b"\xef\xbb\xbf", b" ", b"\xff\xfe"]) + data
    path.write_bytes(data)
    return data


@pytest.fixture
def cache(build, fast_folder):
    source = write_jsonl(fast_folder / "a.jsonl", make_texts(24, words=20))
    return build(str(source), sequences_per_chunk=12, cache_dir=str(fast_folder / "cache"))


DECIDING = {
    "recipe": ("recipe", "tokenizer_files"),
    "plan": ("format", "page", "first_chunk", "first_file", "entries"),
    "record": (
        *("format", "recipe", "chunk", "ranges", "payload_sha256", "file_sha256", "file_bytes", "index_sha256"),
        *("train_sequences", "eval_sequences", "train_tokens", "eval_tokens", "pieces", "documents", "eval_documents"),
    ),
}
"""What tokens, counts and proofs depend on. The rest is for people, or proven when it is used (the files of a plan)."""
FILES = {"recipe": "recipe.json", "plan": "plan/000000.json", "record": "records/000000/00000001.json"}


def is_accepted(cache, tokens):
    """Whether a cache is taken for whole; what it gives is then what it was."""
    try:
        opened = Cache(cache.folder)
        Plan(cache.folder)
        assert all_tokens(opened).tolist() == tokens
        _ = opened.decode([1, 2]), opened.summary
        return check_cache(cache.folder, "full").is_good
    except CacheError:
        return False


def fuzz(cache, name, count, seed=0):
    """Mutate a file so often: no exception but a CacheError, in no time; what is accepted decides what it did."""
    draw = random.Random(seed)
    path = cache.folder / FILES[name]
    data = path.read_bytes()
    original, tokens = store.read_sealed(path), all_tokens(cache).tolist()
    slowest, before = 0.0, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    for _ in range(count):
        value, place = mutate(original, draw)
        written = write(path, value, draw)
        start = time.process_time()
        if is_accepted(cache, tokens) and written != data:
            changed = {key for key in DECIDING[name] if value.get(key) != original.get(key)}
            assert not changed or path.read_bytes() == data, (place, {key: value.get(key) for key in changed})
        slowest = max(slowest, time.process_time() - start)
    path.write_bytes(data)
    assert slowest < 2.0
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 256 * 1024


@pytest.mark.parametrize("name", FILES)
def test_hostile_metadata_is_refused_in_words_or_harmless(cache, name):
    fuzz(cache, name, 250)


@pytest.mark.slow
@pytest.mark.parametrize("name", FILES)
def test_ten_thousand_hostile_metadata_files_are_refused_in_words_or_harmless(cache, name):
    fuzz(cache, name, 10_000, seed=1)


@pytest.mark.parametrize("name", FILES)
def test_a_metadata_file_of_any_size_is_refused_without_reading_all_of_it(cache, name):
    path = cache.folder / FILES[name]
    with path.open("r+b") as file:
        file.truncate(2**40)  # takes no space on the disk
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    if name == "plan":
        return  # up to 256 MB are a plan
    with pytest.raises(CacheError, match="larger than"):
        _ = Cache(cache.folder).summary
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 64 * 1024
