"""The gates: one number per query head that says how much of the memory it hears.

They want an optimizer group of their own: a learning rate some hundred times the others', because a gate has to travel
by about 4 and an Adam step is at most the learning rate, and no weight decay, which pulls every gate back to one half.
"""

import torch
from torch import Tensor, nn
from transformers import initialization as init

from packhorse.models.config import BalanceAct, InfiniAttentionConfig


class Gate(nn.Module):
    """One layer's gates, in fp32 whatever the model is cast to.

    A module of its own, so that tools which name modules find it: peft keeps it with `modules_to_save: [gate]`.

    Args:
        num_heads: Query heads.
        kind: Gate parameter -> share of memory.
    """

    def __init__(self, num_heads: int, kind: BalanceAct) -> None:
        super().__init__()
        self.kind = kind
        self.weight = nn.Parameter(torch.zeros(num_heads, dtype=torch.float32))

    def forward(self, local: Tensor, answer: Tensor) -> Tensor:
        """Equation (10) of [..., H, K] local outputs and the memory's answers, in the dtype of the answers."""
        return torch.lerp(local.to(answer.dtype), answer, self.share(answer))

    def share(self, like: Tensor) -> Tensor:
        """The share of memory of each head, [H, 1], in the dtype of `like`."""
        return activate_gate(self.weight, self.kind).to(like.dtype).unsqueeze(-1)

    def reset(self, settings: InfiniAttentionConfig) -> None:
        """The start that the configuration asks for; gates that came from a checkpoint stay."""
        if settings.balance_init_type == "randn":
            init.normal_(self.weight)
        else:
            init.constant_(self.weight, settings.balance_init_value)

    def _apply(self, fn, recurse: bool = True):
        # `model.bfloat16()` and Lightning's bf16-true cast every parameter. A gate in bf16 stops moving as soon as its
        # step is smaller than the spacing of bf16 numbers (1/64 at 2), so it stays as it was.
        before = self.weight.data
        super()._apply(fn, recurse)
        if self.weight.dtype in (torch.bfloat16, torch.float16) and not before.is_meta:
            self.weight.data = before.to(self.weight.device, torch.float32)
        return self


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
    """The gates of every layer that has a memory, first layer first: an optimizer group of their own."""
    return [module.weight for module in model.modules() if isinstance(module, Gate)]


@torch.no_grad()
def gate_values(model: nn.Module) -> Tensor:
    """The share of memory in every head's output, [layers with a memory, heads], in fp32: for logs and pictures."""
    shares = [
        activate_gate(whole(gate.weight).float(), gate.kind) for gate in model.modules() if isinstance(gate, Gate)
    ]
    return torch.stack(shares)


def whole(weight: Tensor) -> Tensor:
    """All of a parameter that may be sharded over devices (FSDP)."""
    return weight.full_tensor() if hasattr(weight, "full_tensor") else weight
