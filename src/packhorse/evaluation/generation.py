"""A prompt's ids -> text, piece by piece as it is written, from a state of constant size."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from transformers import PreTrainedModel

from packhorse.errors import SettingsError
from packhorse.evaluation.memory import memory_modes, read_with


@dataclass(frozen=True, kw_only=True)
class GenerationSettings:
    """How a text is continued."""

    max_new_tokens: int = 256
    """So many tokens at most."""
    temperature: float = 0.0
    """0 takes the likeliest token each time; 1 draws from the model's distribution, less is bolder about the likely."""
    top_p: float = 1.0
    """Draw only from the likeliest tokens that together have this probability."""
    seed: int = 0
    """Of the draws."""

    def __post_init__(self) -> None:
        if self.max_new_tokens < 1 or self.temperature < 0 or not 0 < self.top_p <= 1:
            raise SettingsError(
                "max_new_tokens must be above 0, temperature 0 or more, top_p above 0 and at most 1; got "
                f"{self.max_new_tokens}, {self.temperature}, {self.top_p}."
            )


@torch.no_grad()
def generate_text(
    model: PreTrainedModel,
    prompt: list[int],
    decode: Callable[[list[int]], str],
    settings: GenerationSettings,
    *,
    eos_id: int | None = None,
    chunk_tokens: int = 4_096,
) -> Iterator[str]:
    """What the model writes after a prompt; a piece may hold several characters, never a part of one.

    Args:
        model: Any causal language model.
        prompt: Ids, one at least.
        decode: Ids -> text.
        settings: How to choose.
        eos_id: Ends the text.
        chunk_tokens: Tokens of the prompt that are read at once.
    """
    written: list[int] = []
    told = ""
    draw = torch.Generator(model.device).manual_seed(settings.seed)
    ids = torch.tensor([prompt], device=model.device)
    with read_with(model, memory_modes(model)[0]) as cache:
        for chunk in ids.split(chunk_tokens, dim=1):
            logits = model(chunk, past_key_values=cache, logits_to_keep=1).logits[0, -1]
        for number in range(settings.max_new_tokens):
            token = _choose(logits.float(), settings, draw)
            if token == eos_id:
                break
            written.append(token)
            text = decode(written)
            if not text.endswith("\ufffd"):  # else the rest of a character is still to come
                yield text[len(told) :]
                told = text
            if number + 1 < settings.max_new_tokens:
                logits = model(ids.new_tensor([[token]]), past_key_values=cache).logits[0, -1]
    if (rest := decode(written)[len(told) :]) and written:
        yield rest


def _choose(logits_V: torch.Tensor, settings: GenerationSettings, draw: torch.Generator) -> int:
    if settings.temperature == 0:
        return int(logits_V.argmax())
    share_V, token_V = (logits_V / settings.temperature).softmax(-1).sort(descending=True)
    # Keep those before whom the others do not yet reach top_p; the likeliest always stays.
    share_V[share_V.cumsum(-1) - share_V >= settings.top_p] = 0
    return int(token_V[share_V.multinomial(1, generator=draw)])
