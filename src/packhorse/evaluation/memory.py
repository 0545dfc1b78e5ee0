"""A model -> what reads a text with it: with its memory, without, or with the memory of another text.

The three together say what the memory is worth. Without it a model whose gates are open also loses the share of its
output that came from there; with another text's memory it gets as much as ever, but of the wrong content.

    on          as it was trained
    off         local attention alone
    shuffled    every row of a batch is answered by the memory of the row before it; it writes its own
    full        plain attention, for models without Infini-attention: the baseline
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

from torch import Tensor
from transformers import Cache, DynamicCache, PreTrainedModel

from packhorse.models import InfiniCache
from packhorse.models.streaming import InfiniCacheLayer


def memory_modes(model: PreTrainedModel) -> tuple[str, ...]:
    """The ways of reading that tell something about this model."""
    settings = getattr(model.config, "infini_attention", None)
    if settings is None:
        return ("full",)
    return ("on", "off", "shuffled") if settings.turn_on_memory else ("off",)


@contextmanager
def read_with(model: PreTrainedModel, mode: str) -> Iterator[Cache]:
    """A new cache for a batch of texts, of constant size; the model is in this mode as long as the context is open."""
    if mode == "full":
        yield DynamicCache(config=model.config)
        return
    settings = model.config.infini_attention
    if mode == "off":
        model.config.infini_attention = replace(settings, turn_on_memory=False)
    try:
        yield ShuffledCache(model.config) if mode == "shuffled" else InfiniCache(model.config)
    finally:
        model.config.infini_attention = settings


class ShuffledCache(InfiniCache):
    """An `InfiniCache` whose rows are answered by each other's memories; it needs two rows at least."""

    def __init__(self, config) -> None:
        super().__init__(config)
        for layer in self.layers:
            layer.__class__ = _ShuffledLayer


class _ShuffledLayer(InfiniCacheLayer):
    def read(self, query_BPHK: Tensor) -> Tensor:
        if len(query_BPHK) < 2:
            raise ValueError("One text alone would be answered by its own memory: shuffling needs two or more.")
        own = self.tensors
        others = {name: own[name].roll(1, dims=0) for name in ("memory", "normalizer")}
        self.tensors = {**own, **others}
        try:
            return super().read(query_BPHK)
        finally:
            self.tensors = own
