"""Texts -> ids: the engines behind one call.

`encode(texts) -> (ids, ends)`: all ids in one flat uint32 array, and where each text ends in it. The reference is
Hugging Face `tokenizers`; `fastokens` reads the same tokenizer.json and gives the same ids about a hundred times
as fast. That is believed only as long as it is seen: `make_engine` compares both on a probe set before work starts,
`Verified` on the first documents and on one in 2,000 while it runs.
"""

import hashlib
from collections.abc import Sequence
from contextlib import suppress
from functools import lru_cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Protocol

import numpy as np

from packhorse.errors import EngineMismatch, TokenizerError

SAMPLE_EVERY = 2_000
"""One document in so many is encoded by the reference as well."""
FIRST_DOCUMENTS = 8
"""So are the first ones that an engine gets."""
LONGEST_SAMPLE = 2**20
"""Longer documents are not compared: the reference would take minutes for a book of books."""

PROBES: tuple[str, ...] = (
    "Hello, world! It's 10:30, isn't it? We'll see; they've said I'D GO.",
    "  leading and trailing   spaces  ",
    "tabs\tand\nnew lines\r\nand\n\n\nblank lines \n  indented\n",
    "def f(x: int) -> str:\n    return f'{x!r:>10}'  # comment\n",
    "3.14159 1,000,000 0x1F 2026-11-21 +49 (0)30 ½ ² ٣ 四",
    "naïve café Zürich Ærøskøbing œuvre ﬁne",
    "e\u0301 vs \u00e9, A\u030a vs \u00c5, o\u0323\u0302",
    "Привет мир. Γειά σου Κόσμε. שלום עולם. مرحبا بالعالم",
    "你好,世界。こんにちは世界。안녕하세요 세계",
    "नमस्ते दुनिया สวัสดีชาวโลก",
    "🙂👩‍👩‍👧‍👦🏳️‍🌈 emoji, \u200bzero\u200dwidth\ufeff, \u00a0nbsp\u3000wide",
    "a" * 300 + " " * 40 + "!" * 40 + "\n" * 20,
    "<s></s><unk><pad><|endoftext|><|im_end|><|begin_of_text|><bos><eos>[PAD][CLS]",
    "▁lower ▁one Ġtwo ##three <0x0A> <0xFF>",
    "\x00\x01\x7f\x80\x9f control \u2028 line \u2029 paragraph \x85",
    "https://example.org/a/b?c=d&e=%20f#g mail@example.org @name #tag $5 €6 50%",
    "{'json': [1, 2.5, null], \"k\": \"\\u00e9\\n\"} <p class='x'>html</p>",
    "x",
    " ",
    "\n",
)
"""Texts on which tokenizers tend to disagree. Their ids, hashed, are part of a cache's recipe."""


class Engine(Protocol):
    """Encodes texts; `name` and `version` go into the commit records."""

    name: str
    version: str

    def encode(self, texts: Sequence[str]) -> tuple[np.ndarray, np.ndarray]:
        """Ids of all texts, without BOS or EOS.

        Returns:
            ids uint32 [num_ids], ends int64 [num_texts]: text i has ids[ends[i - 1] : ends[i]].
        """
        ...


class Reference:
    """Hugging Face `tokenizers`."""

    name = "hf"

    def __init__(self, tokenizer_json: str, split_special_tokens: bool) -> None:
        import tokenizers

        self.version = tokenizers.__version__
        self._tokenizer = tokenizers.Tokenizer.from_str(tokenizer_json)
        self._tokenizer.encode_special_tokens = split_special_tokens

    def encode(self, texts: Sequence[str]) -> tuple[np.ndarray, np.ndarray]:
        return _flatten([e.ids for e in self._tokenizer.encode_batch_fast(list(texts), add_special_tokens=False)])


class Fastokens:
    """`fastokens`: the same ids, much faster, as a flat buffer."""

    name = "fastokens"

    def __init__(self, tokenizer_json: str, split_special_tokens: bool) -> None:
        import fastokens

        self.version = version("fastokens")
        self._split_special_tokens = split_special_tokens
        self._tokenizer = fastokens.Tokenizer.from_json_str(tokenizer_json)

    def encode(self, texts: Sequence[str]) -> tuple[np.ndarray, np.ndarray]:
        ids, offsets = self._tokenizer.encode_batch_flat(
            texts, add_special_tokens=False, split_special_tokens=self._split_special_tokens
        )
        return np.frombuffer(ids, "<u4"), np.frombuffer(offsets, "<u8")[1:].astype(np.int64)


class Slow:
    """A tokenizer that exists in Python only: one document at a time, through transformers."""

    name = "slow"

    def __init__(self, folder: str, split_special_tokens: bool) -> None:
        import transformers

        self.version = transformers.__version__
        self._tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
        self._options = {"add_special_tokens": False, "split_special_tokens": split_special_tokens}

    def encode(self, texts: Sequence[str]) -> tuple[np.ndarray, np.ndarray]:
        return _flatten([self._tokenizer.encode(text, **self._options) for text in texts])


class Verified:
    """An engine that is compared with the reference, on its first documents and on one in `SAMPLE_EVERY`.

    Raises:
        EngineMismatch: from `encode`, with the document; nothing that the engine gave may be used.
    """

    def __init__(self, engine: Engine, reference: Engine) -> None:
        self.name, self.version = engine.name, engine.version
        self.bare, self._reference = engine, reference
        self._seen = 0

    def encode(self, texts: Sequence[str]) -> tuple[np.ndarray, np.ndarray]:
        ids, ends = self.bare.encode(texts)
        first = range(max(0, min(FIRST_DOCUMENTS - self._seen, len(texts))))
        later = range(-self._seen % SAMPLE_EVERY, len(texts), SAMPLE_EVERY)
        sample = sorted(i for i in {*first, *later} if len(texts[i]) <= LONGEST_SAMPLE)
        self._seen += len(texts)
        if sample:
            expected, expected_ends = self._reference.encode([texts[i] for i in sample])
            for place, i in enumerate(sample):
                got = ids[ends[i - 1] if i else 0 : ends[i]]
                want = expected[expected_ends[place - 1] if place else 0 : expected_ends[place]]
                if not np.array_equal(got, want):
                    raise EngineMismatch(f"{self.name} {self.version}", texts[i])
        return ids, ends


def make_engine(wanted: str, tokenizer_json: str, split_special_tokens: bool, folder: str) -> tuple[Engine, str | None]:
    """The engine for a tokenizer: the wanted one if it proves itself on the probe set.

    Args:
        wanted: `auto`, `fastokens` or `hf`.
        tokenizer_json: The tokenizer; empty if it exists in Python only.
        split_special_tokens: Whether special tokens written in a text are text.
        folder: Where the tokenizer's files are.

    Returns:
        The engine, and a message when it is not what was hoped for.

    Raises:
        TokenizerError: `fastokens` was asked for by name and cannot be used.
    """
    if not tokenizer_json:
        message = "The tokenizer exists in Python only: it is slow. A tokenizer.json would be much faster."
        return Slow(folder, split_special_tokens), message
    reference = load_reference(tokenizer_json, split_special_tokens)
    if wanted == "hf":
        return reference, None
    try:
        engine = load_fastokens(tokenizer_json, split_special_tokens)
        got, got_ends = engine.encode(PROBES)
    except (PackageNotFoundError, ImportError) as error:
        problem = f"it is not installed ({error})"
    except Exception as error:
        # Whatever an engine does not like about a tokenizer: the reference reads them all.
        problem = f"it cannot use this tokenizer ({type(error).__name__}: {str(error)[:200]})"
    else:
        want, want_ends = reference.encode(PROBES)
        if np.array_equal(got_ends, want_ends) and np.array_equal(got, want):
            return Verified(engine, reference), None
        starts, want_starts = np.r_[0, got_ends[:-1]], np.r_[0, want_ends[:-1]]
        different = next(
            text
            for text, a, b, c, d in zip(PROBES, starts, got_ends, want_starts, want_ends, strict=True)
            if not np.array_equal(got[a:b], want[c:d])
        )
        problem = f"it gives other ids than the reference, for example for {different[:80]!r}"
    if wanted == "fastokens":
        raise TokenizerError(f"The engine fastokens cannot be used: {problem}. Set `engine: auto` or `engine: hf`.")
    return reference, f"The fast engine fastokens is not used: {problem}. Going on with the Hugging Face reference."


@lru_cache(maxsize=1)
def load_reference(tokenizer_json: str, split_special_tokens: bool) -> Reference:
    """The reference; loading takes a while, so the last one is kept."""
    return Reference(tokenizer_json, split_special_tokens)


@lru_cache(maxsize=1)
def load_fastokens(tokenizer_json: str, split_special_tokens: bool) -> Fastokens:
    """The fast engine, the last one kept."""
    return Fastokens(tokenizer_json, split_special_tokens)


def load_early(tokenizer_json: Path, split_special_tokens: bool) -> None:
    """Have the engines loaded when they are needed; whether they can be used is found out then."""
    with suppress(Exception):
        text = tokenizer_json.read_bytes().decode()
        load_fastokens(text, split_special_tokens)
        load_reference(text, split_special_tokens)


def probe_digest(engine: Engine) -> str:
    """SHA-256 of the ids that an engine gives for the probe set."""
    # `Verified` is to begin its sample with the first real document.
    ids, ends = (engine.bare if isinstance(engine, Verified) else engine).encode(PROBES)
    return hashlib.sha256(ids.astype("<u4").tobytes() + ends.astype("<i8").tobytes()).hexdigest()


def _flatten(lists: list[list[int]]) -> tuple[np.ndarray, np.ndarray]:
    ends = np.cumsum([len(ids) for ids in lists], dtype=np.int64)
    flat = np.empty(int(ends[-1]) if len(ends) else 0, np.uint32)
    start = 0
    for ids in lists:
        flat[start : start + len(ids)] = ids
        start += len(ids)
    return flat, ends
