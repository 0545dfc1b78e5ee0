"""The gates: one number per query head that says how much of the memory it hears.

They want an optimizer group of their own: a learning rate some hundred times the others', because a gate has to travel
by about 4 and an Adam step is at most the learning rate, and no weight decay, which pulls every gate back to one half.
"""

import torch
from torch import Tensor, nn

from packhorse.models.config import BalanceAct


def activate_gate(gate_H: Tensor, kind: BalanceAct) -> Tensor:
    """Gate parameter -> share of the memory in the output."""
    match kind:
        case "orig_sigmoid":
            return gate_H.sigmoid()
        case "hard_sigmoid":
            return (0.2 * gate_H + 0.5).clamp(0, 1)
        case "orig_tanh":
            return gate_H.tanh()
        case "tanh_abs":
            return gate_H.tanh().abs()
        case _:
            raise ValueError(f"No gate activation is called {kind!r}.")


def gate_parameters(model: nn.Module) -> list[nn.Parameter]:
    """The gate of every layer, first layer first: what an optimizer group of its own should hold."""
    return [parameter for name, parameter in model.named_parameters() if name.endswith("self_attn.gate")]


@torch.no_grad()
def gate_values(model: nn.Module) -> Tensor:
    """The share of memory in every head's output, [layers, heads], in fp32: for logs and pictures."""
    kind = model.config.infini_attention.balance_act_type
    return torch.stack([activate_gate(gate.float(), kind) for gate in gate_parameters(model)])
