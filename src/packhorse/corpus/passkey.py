"""A pass key hidden in filler -> ids of exact length, and where the key stands in them.

    [BOS] intro  examples  filler...  The pass key is 53817. Remember it. 53817 is the pass key.  ...filler
    What is the pass key? The pass key is 53817

Phrases and keys are encoded once, each by itself, and laid end to end as ids: nothing is decoded and encoded again, so
the length is exact and the answer has the very ids that stand in the text. The fact goes between two sentences of the
filler. `PasskeyText` is for evaluation; `PasskeyDocuments`, a source, for training: `class_path` in a configuration.
"""

import hashlib
import json
import random
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from packhorse.corpus.engines import load_reference
from packhorse.corpus.tokenizer import TokenizerContent, locate_tokenizer, read_tokenizer
from packhorse.errors import SettingsError, TokenizerError

INTRO = "There is a pass key hidden in this text. Find it and remember it."
FILLER = (
    "The hills are green.",
    "The sea is wide.",
    "The bread is warm.",
    "Here we walk on.",
    "The road goes round and round.",
)
EXAMPLES = ("gate code", "room number", "locker number")
"""What the solved examples before the text are about: their answers must not be mistaken for the pass key."""


@dataclass(frozen=True, kw_only=True)
class Passkey:
    """One text with a hidden key."""

    ids: np.ndarray
    """int64 [length]; the last of them are the answer."""
    fact_end: int
    """Where the last mention of the key in the text ends."""
    answer_start: int
    """Where the answer begins."""


class PasskeyText:
    """Lays texts with a hidden key.

    Args:
        tokenizer: What encodes the phrases; a fast tokenizer.

    Raises:
        TokenizerError: it is none.
    """

    def __init__(self, tokenizer: TokenizerContent) -> None:
        if not tokenizer.json:
            raise TokenizerError("The pass key test needs a fast tokenizer, with a tokenizer.json.")
        self.facts = tokenizer.facts
        self._engine = load_reference(tokenizer.json, True)
        self._known: dict[str, list[int]] = {}
        # SentencePiece puts the space before a word by itself; byte-level BPE takes it from the text.
        self._space = "" if self.ids("is key") == self.ids("is") + self.ids("key") else " "
        bos = [self.facts.bos_id] if self.facts.adds_bos else []
        self._intro = bos + self.ids(INTRO)
        self._filler = [self.phrase(sentence) for sentence in FILLER]
        self._ending = self.phrase("is the pass key.")

    def phrase(self, text: str) -> list[int]:
        """The ids of something that follows a word."""
        return self.ids(self._space + text)

    def fact(self, key: str, name: str = "pass key") -> list[int]:
        """Where the key is told, up to and with its second mention."""
        return self.phrase(f"The {name} is") + self.phrase(key) + self.ids(". Remember it.") + self.phrase(key)

    def question(self, name: str = "pass key") -> list[int]:
        """What the key answers."""
        return self.phrase(f"What is the {name}? The {name} is")

    def lay(
        self, length: int, depth: float, key: str, examples: tuple[str, ...] = (), ask_at: tuple[float, ...] = ()
    ) -> Passkey:
        """A text of exactly `length` ids whose last ones are the key.

        Args:
            length: With everything.
            depth: Where the fact stands: 0 directly behind the intro, 1 directly before the question.
            key: Its digits.
            examples: Keys of solved examples before the text, at most 3.
            ask_at: More questions, with their answers: where, as shares of what stands between fact and end.

        Raises:
            SettingsError: `length` is less than the text without filler.
        """
        before, asked = self._before(examples), self.question() + self.phrase(key) + self.ids(".")
        room = length - self.shortest(key, examples) - len(asked) * len(ask_at)
        if room < 0:
            raise SettingsError(
                f"A text with this pass key and {1 + len(ask_at)} questions needs {length - room} tokens with this "
                f"tokenizer, not {length}."
            )
        fact, answer = self.fact(key), self.phrase(key)
        filler, ends = self._fill(room)
        cuts = [_nearest(ends, depth * len(filler))]
        cuts += sorted(_nearest(ends, cuts[0] + share * (len(filler) - cuts[0])) for share in ask_at)
        parts = [before, filler[: cuts[0]], fact, self._ending]
        for start, stop in zip(cuts, [*cuts[1:], len(filler)], strict=True):
            parts += [filler[start:stop], asked]
        parts[-1] = self.question() + answer
        ids = np.array([i for part in parts for i in part], np.int64)
        return Passkey(ids=ids, fact_end=len(before) + cuts[0] + len(fact), answer_start=length - len(answer))

    def shortest(self, key: str, examples: tuple[str, ...] = ()) -> int:
        """The length of the text without filler."""
        fact = self.fact(key) + self._ending
        return len(self._before(examples) + fact + self.question() + self.phrase(key))

    def _before(self, examples: tuple[str, ...]) -> list[int]:
        before = list(self._intro)
        for name, key in zip(EXAMPLES, examples, strict=False):
            solved = self.fact(key, name) + self.ids(".") + self.question(name) + self.phrase(key) + self.ids(".")
            before += solved
        return before

    def _fill(self, length: int) -> tuple[list[int], list[int]]:
        """So many ids of filler, and where sentences end in it; the last one may be cut."""
        filler: list[int] = []
        ends = [0]
        while len(filler) < length:
            for sentence in self._filler:
                filler += sentence
                ends.append(len(filler))
        return filler[:length], [*(end for end in ends if end < length), length]

    def ids(self, text: str) -> list[int]:
        """The ids of a text that stands by itself."""
        if text not in self._known:
            self._known[text] = self._engine.encode([text])[0].tolist()
        return self._known[text]


def draw_key(draw: random.Random, digits: int) -> str:
    """A number of so many digits."""
    return str(draw.randrange(10 ** (digits - 1), 10**digits))


class PasskeyDocuments:
    """A source of ids: documents that hide a key and ask for it, to fine-tune on. BOS and EOS count in their length.

    Args:
        tokenizer: As in `data.tokenizer`: a name, a folder or a tokenizer.json.
        count: How many documents.
        length: Tokens of the longest.
        shortest: Tokens of the shortest; lengths are drawn evenly between the two. By default all have `length`.
        digits: Of a key.
        questions: How often a document asks for its key at most: at its end, and anywhere behind the fact.
        seed: Another seed, other documents.
    """

    def __init__(
        self,
        tokenizer: str,
        count: int,
        length: int,
        shortest: int | None = None,
        digits: int = 5,
        questions: int = 1,
        seed: int = 0,
    ) -> None:
        shortest = length if shortest is None else shortest
        if not (count > 0 and digits > 0 and questions > 0 and 0 < shortest <= length):
            raise SettingsError("count, digits and questions must be above 0, and shortest at most length.")
        self.tokenizer, self.count, self.lengths = tokenizer, count, (shortest, length)
        self.digits, self.questions, self.seed = digits, questions, seed

    @cached_property
    def content(self) -> TokenizerContent:
        """The tokenizer, read when it is needed."""
        return read_tokenizer(locate_tokenizer(self.tokenizer))

    @property
    def fingerprint(self) -> str:
        """Changes when the documents do."""
        text = [INTRO, FILLER, self.content.facts.fingerprint]
        settings = [self.count, self.lengths, self.digits, self.questions, self.seed]
        return hashlib.sha256(json.dumps([text, settings]).encode()).hexdigest()

    def __iter__(self) -> Iterator[np.ndarray]:
        draw, text, eos = random.Random(self.seed), PasskeyText(self.content), self.content.facts.eos_id
        tail = text.ids(".") + ([] if eos is None else [eos])
        for _ in range(self.count):
            length, key = draw.randint(*self.lengths) - len(tail), draw_key(draw, self.digits)
            asking = len(text.question() + text.phrase(key) + text.ids("."))
            more = min(draw.randrange(self.questions), max(0, length - text.shortest(key)) // asking)
            laid = text.lay(length, draw.random(), key, ask_at=tuple(draw.random() for _ in range(more)))
            yield np.concatenate([laid.ids, np.array(tail, np.int64)])


def _nearest(ends: list[int], place: float) -> int:
    return min(ends, key=lambda end: abs(end - place))
