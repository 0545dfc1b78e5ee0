"""A model and a few rows -> what its memories look like, and what they are worth.

The rows are read once as `generate` reads a prompt, segment by segment, each row as one text. That leaves the memories
to be looked at and shows every gate's two inputs on the way. Nothing of the model is changed.

Shapes: B rows, T tokens, L layers with a memory, G key/value heads, K head size.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from packhorse.evaluation.memory import read_with
from packhorse.models import InfiniCache
from packhorse.models.gates import Gate

POWER_STEPS = 30


@dataclass(frozen=True)
class MemoryFacts:
    """All in fp32, averaged over rows; where a layer has several numbers, also over those that are not named."""

    norm_LG: Tensor
    """Frobenius norm of the memory."""
    stable_rank_LG: Tensor
    """Squared Frobenius norm over squared largest singular value: how many directions are in use, at most K."""
    least_normalizer_L: Tensor
    """The smallest entry of any normaliser: what a read is divided by cannot be much smaller."""
    read_LN: Tensor
    """Mean size of what the memory answers, for the second segment on; by segment."""
    local_LN: Tensor
    """Mean size of what local attention says, likewise."""


@torch.no_grad()
def observe_memory(model: nn.Module, input_ids_BT: Tensor) -> MemoryFacts:
    """What stands in the memories after these rows. They must be longer than a segment."""
    gates = [module for module in model.modules() if isinstance(module, Gate)]
    sizes: list[list[tuple[Tensor, Tensor]]] = [[] for _ in gates]
    cache = InfiniCache(model.config)
    hooks = [
        gate.register_forward_hook(lambda _, seen, __, own=own: own.append((_size(seen[1]), _size(seen[0]))))
        for gate, own in zip(gates, sizes, strict=True)
    ]
    try:
        model.model(input_ids=input_ids_BT, past_key_values=cache)
    finally:
        for hook in hooks:
            hook.remove()
    states = [
        layer.tensors for number, layer in enumerate(cache.layers) if model.config.infini_attention.has_memory(number)
    ]
    memory_LBGKK = torch.stack([state["memory"] for state in states]).float()
    norm_LBG = memory_LBGKK.flatten(-2).norm(dim=-1)
    by_segment = torch.tensor([[list(map(float, pair)) for pair in layer[1:]] for layer in sizes])
    return MemoryFacts(
        norm_LG=norm_LBG.mean(1),
        stable_rank_LG=(norm_LBG / _largest_singular_value(memory_LBGKK)).square().nan_to_num().mean(1),
        least_normalizer_L=torch.stack([state["normalizer"].float().amin() for state in states]),
        read_LN=by_segment[..., 0],
        local_LN=by_segment[..., 1],
    )


@torch.no_grad()
def memory_gain(module: Any, batch: dict[str, Any]) -> float:
    """Loss with the memory minus loss without it, in nats per token: below zero if the memory helps.

    Args:
        module: A LanguageModule.
        batch: On its device.
    """
    with_memory, tokens = module(batch)
    with read_with(module.model, "off"):
        without, _ = module(batch)
    return float((with_memory - without) / tokens.clamp(min=1))


def _size(x_BPHK: Tensor) -> Tensor:
    return x_BPHK.float().norm(dim=-1).mean()


def _largest_singular_value(matrices: Tensor) -> Tensor:
    """By power iteration: a decomposition of hundreds of matrices would cost more than the rest."""
    vector = torch.ones_like(matrices[..., :1])
    for _ in range(POWER_STEPS):
        vector = matrices.transpose(-1, -2) @ (matrices @ vector)
        vector = vector / vector.norm(dim=-2, keepdim=True).clamp(min=1e-30)
    return (matrices @ vector).squeeze(-1).norm(dim=-1)
