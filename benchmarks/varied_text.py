"""Text -> as much text as is wanted, in which no document and no rare word comes twice.

Copies of a text would flatter a tokenizer that remembers words: from the second copy on it has seen them all. So every
copy gets words of its own:

    the first copy    the   archdeacon   of the   old   cathedral
    another copy      the   archedral    of the   new   chapter

Rare words, which occur less than `RARE` times, are most of the different words, and those that another text of that
size would not have. They are put together from the beginning of one word and the end of another of about its length,
and used in one copy only. So every copy brings as many rare words that were never seen as the first one; real text
brings ever fewer. Words that are more frequent change places with others of about their frequency, so that documents
differ throughout; the 100 most frequent stay. Half-words are tokenized a little worse than words: tokens per byte grow
by some percent, and `bench_build` prints by how much.
"""

import random
import re
from collections import Counter
from collections.abc import Iterator, Sequence

RARE = 20
STAYING = 100
NEIGHBOURS = 50
"""Words of about the same frequency that change places."""
_WORD = re.compile(r"[^\W\d_]+|[\W\d_]+")


def vary(documents: Sequence[str], copies: int) -> Iterator[list[str]]:
    """The documents, then copies of them in other words; the same every time.

    Args:
        documents: Any texts.
        copies: How many lists to give, the original included.
    """
    numbers: dict[str, int] = {}
    split = [[numbers.setdefault(part, len(numbers)) for part in _WORD.findall(text)] for text in documents]
    words = list(numbers)
    counts = Counter(number for parts in split for number in parts)
    ranked = [number for number, _ in counts.most_common() if words[number][0].isalpha()]
    frequent = [number for number in ranked[STAYING:] if counts[number] >= RARE]
    rare = [number for number in ranked if counts[number] < RARE and len(words[number]) > 2]
    seen = set(words)
    yield list(documents)
    for copy in range(1, copies):
        generator = random.Random(copy)
        table = list(words)
        for start in range(0, len(frequent), NEIGHBOURS):
            places = frequent[start : start + NEIGHBOURS]
            for place, other in zip(places, generator.sample(places, len(places)), strict=True):
                table[place] = words[other]
        for number, word in zip(rare, _new_words([words[n] for n in rare], seen, generator), strict=True):
            table[number] = word
        yield ["".join([table[number] for number in parts]) for parts in split]


def _new_words(words: list[str], seen: set[str], generator: random.Random) -> Iterator[str]:
    """For each word another one that is not in `seen`, which grows."""
    ends = generator.sample(words, len(words))
    for number, word in enumerate(words):
        half = (len(word) + 1) // 2
        for attempt in range(1_000):
            # Short words have few others of their length: in time, take a longer one.
            longer = attempt // 50
            end = ends[(number + attempt) % len(ends)]
            new = word[: half + longer] + end[max(0, len(end) - len(word) + half - longer) :]
            if new not in seen:
                break
        else:
            new = f"{word}{end}{len(seen)}"
        seen.add(new)
        yield new
