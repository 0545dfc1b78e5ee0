"""A model and its tokenizer -> how often it finds a key that was hidden far back in a text.

For every length and depth some texts are laid (`PasskeyText`), and all of them read in each mode of the memory. The
texts are read in pieces, so a length of a million tokens takes no more memory than one of a thousand.

    exact       greedy writing would begin with the key: every one of its tokens is the likeliest after the right ones
                before it. (So one reading tells what token-by-token generation would give.)
    tokens      share of the key's tokens that are the likeliest, after the right ones before them
    distance    segments from the end of the key in the text to the place where it is asked for; at 0 local attention
                may see it, from 1 on only the memory can know
    chance      what the best fixed guess would reach
    interval    Wilson's, 95 %
"""

import random
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from math import sqrt
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel

from packhorse.corpus.passkey import EXAMPLES, Passkey, PasskeyText, draw_key
from packhorse.errors import SettingsError
from packhorse.evaluation.memory import memory_modes, read_with
from packhorse.evaluation.spans import span_name, span_of


@dataclass(frozen=True, kw_only=True)
class PasskeySettings:
    """What is asked."""

    lengths: list[int]
    """Tokens of a text, with the answer."""
    depths: int = 21
    """Places of the key, evenly from the beginning to the end; 1 is the middle."""
    samples: int = 50
    """Texts for each length and depth."""
    digits: int = 5
    """Of a key."""
    shots: int = 0
    """Solved examples before the text, at most 3."""
    seed: int = 0
    """Another seed, other keys."""
    batch_size: int = 25
    """Texts that are read together."""
    chunk_tokens: int = 4_096
    """Tokens of a text that are read at once."""

    def __post_init__(self) -> None:
        for name in ("depths", "digits", "batch_size", "chunk_tokens"):
            if getattr(self, name) < 1:
                raise SettingsError(f"{name} must be at least 1, got {getattr(self, name)}.")
        if not self.lengths or min(self.lengths) < 1:
            raise SettingsError(f"lengths must be one or more numbers above 0, got {self.lengths}.")
        if self.samples < 2 or self.batch_size < 2:
            raise SettingsError("samples and batch_size must be at least 2: texts lend each other their memories.")
        if not 0 <= self.shots <= len(EXAMPLES):
            raise SettingsError(f"shots must be from 0 to {len(EXAMPLES)}, got {self.shots}.")

    @property
    def shares(self) -> list[float]:
        """Depths from 0 to 1."""
        return [0.5] if self.depths == 1 else [i / (self.depths - 1) for i in range(self.depths)]


@dataclass(kw_only=True)
class Score:
    """Hits among trials."""

    trials: int = 0
    exact: int = 0
    tokens: int = 0
    token_hits: int = 0

    def add(self, hits: Tensor) -> None:
        """Count one text, by its answer's tokens."""
        self.trials += 1
        self.exact += int(hits.all())
        self.tokens += len(hits)
        self.token_hits += int(hits.sum())

    @property
    def share(self) -> float:
        """Exact matches."""
        return self.exact / self.trials if self.trials else float("nan")

    @property
    def token_share(self) -> float:
        """Tokens of the answers that were right."""
        return self.token_hits / self.tokens if self.tokens else float("nan")

    def to_dict(self) -> dict[str, Any]:
        """Shares with their intervals, for JSON."""
        return {
            "trials": self.trials,
            "exact_match": self.share,
            "exact_match_interval": wilson(self.exact, self.trials),
            "token_accuracy": self.token_share,
            "token_accuracy_interval": wilson(self.token_hits, self.tokens),
        }


@dataclass(kw_only=True)
class PasskeyResult:
    """Scores of each mode by length and depth, and by length and segment distance."""

    settings: PasskeySettings
    segment_length: int | None
    modes: tuple[str, ...]
    chance_exact: float
    chance_token: float
    cells: dict[tuple[int, float, str], Score] = field(default_factory=dict)
    distances: dict[tuple[int, int, str], Score] = field(default_factory=dict)
    """The second number is a span of segments, see `span_name`."""

    def remembered(self, length: int, mode: str) -> Score:
        """All texts of a length whose key is one or more segments back."""
        total = Score()
        for (of, span, by), score in self.distances.items():
            if (of, by) == (length, mode) and span > 0:
                total = Score(**{name: value + getattr(score, name) for name, value in asdict(total).items()})
        return total

    def to_dict(self) -> dict[str, Any]:
        """Everything, for JSON."""
        return {
            "settings": asdict(self.settings),
            "segment_length": self.segment_length,
            "chance": {"exact_match": self.chance_exact, "token_accuracy": self.chance_token},
            "one_or_more_segments_back": [
                {"length": length, "memory": mode, **self.remembered(length, mode).to_dict()}
                for length in self.settings.lengths
                for mode in self.modes
            ],
            "by_distance": [
                {"length": length, "segments_back": span_name(span), "memory": mode, **score.to_dict()}
                for (length, span, mode), score in sorted(self.distances.items())
            ],
            "by_depth": [
                {"length": length, "depth": depth, "memory": mode, **score.to_dict()}
                for (length, depth, mode), score in self.cells.items()
            ],
        }


@torch.no_grad()
def evaluate_passkey(
    model: PreTrainedModel,
    text: PasskeyText,
    settings: PasskeySettings,
    tell: Callable[[int, int], None] = lambda done, total: None,
) -> PasskeyResult:
    """Ask for every key in every mode.

    Args:
        model: Any causal language model, with Infini-attention or without; should be in evaluation mode.
        text: Lays the texts, with the model's tokenizer.
        settings: What to ask.
        tell: Called after each batch with the tokens read so far, and in all.
    """
    infini = getattr(model.config, "infini_attention", None)
    segment_length = None if infini is None else infini.segment_length
    result = PasskeyResult(
        settings=settings,
        segment_length=segment_length,
        modes=memory_modes(model),
        chance_exact=1 / (9 * 10 ** (settings.digits - 1)),
        chance_token=_token_chance(text, settings.digits),
    )
    for length in settings.lengths:  # before hours of reading the ones before it
        next(_batches(text, settings, length, 0.5))
    total, done = sum(settings.lengths) * settings.samples * settings.depths, 0
    for length in settings.lengths:
        for depth in settings.shares:
            for batch in _batches(text, settings, length, depth):
                for mode in result.modes:
                    for laid, hits in zip(batch, find_keys(model, batch, mode, settings.chunk_tokens), strict=True):
                        span = int(span_of(torch.tensor(_distance(laid, segment_length))))
                        result.cells.setdefault((length, depth, mode), Score()).add(hits)
                        result.distances.setdefault((length, span, mode), Score()).add(hits)
                done += len(batch) * length
                tell(done, total)
    return result


def find_keys(model: PreTrainedModel, batch: list[Passkey], mode: str, chunk_tokens: int) -> list[Tensor]:
    """For each text, which tokens of its answer the model holds for the likeliest, bool [tokens of the answer]."""
    input_ids = torch.from_numpy(np.stack([laid.ids for laid in batch])).to(model.device)
    length = input_ids.shape[1]
    answers = [length - laid.answer_start for laid in batch]
    # The last piece has all answers, and the token before them: what does not fill a piece comes first.
    size = max(chunk_tokens, max(answers) + 1)
    pieces = input_ids.split([length % size, *[size] * (length // size)], dim=1)
    with read_with(model, mode) as cache:
        for piece in pieces[not length % size : -1]:
            model(piece, past_key_values=cache, logits_to_keep=1)
        logits = model(pieces[-1], past_key_values=cache, logits_to_keep=max(answers) + 1).logits
    likeliest = logits[:, :-1].argmax(-1)
    return [(likeliest[row, -n:] == input_ids[row, -n:]).cpu() for row, n in enumerate(answers)]


def wilson(hits: int, trials: int, z: float = 1.96) -> tuple[float, float]:
    """Wilson's interval of a share (Wilson 1927): 95 % for z = 1.96. Sound for shares of 0 and 1 as well."""
    if not trials:
        return (0.0, 1.0)
    share, scale = hits / trials, 1 + z**2 / trials
    centre = (share + z**2 / (2 * trials)) / scale
    half = z * sqrt(share * (1 - share) / trials + (z / (2 * trials)) ** 2) / scale
    return (max(0.0, centre - half), min(1.0, centre + half))


def _batches(text: PasskeyText, settings: PasskeySettings, length: int, depth: float) -> Iterator[list[Passkey]]:
    draw = random.Random(f"{settings.seed} {length} {depth}")
    # Of even size, and two texts at least: one alone could not be shuffled.
    number = min(-(-settings.samples // settings.batch_size), settings.samples // 2)
    sizes = [settings.samples * (i + 1) // number - settings.samples * i // number for i in range(number)]
    for size in sizes:
        keys = [[draw_key(draw, settings.digits) for _ in range(1 + settings.shots)] for _ in range(size)]
        yield [text.lay(length, depth, key, tuple(examples)) for key, *examples in keys]


def _distance(laid: Passkey, segment_length: int | None) -> int:
    if segment_length is None:
        return 0
    return (laid.answer_start - 1) // segment_length - (laid.fact_end - 1) // segment_length


def _token_chance(text: PasskeyText, digits: int, draws: int = 5_000) -> float:
    """The share of tokens that the likeliest token at each place of an answer gets right."""
    draw = random.Random(0)
    answers = [text.phrase(draw_key(draw, digits)) for _ in range(draws)]
    longest = max(map(len, answers))
    places = [Counter(answer[place] for answer in answers if place < len(answer)) for place in range(longest)]
    return sum(place.most_common(1)[0][1] for place in places) / sum(map(len, answers))
