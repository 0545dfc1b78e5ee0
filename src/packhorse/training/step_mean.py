"""Sums of micro-batches -> the mean loss of an optimizer step, and its gradient.

Micro-batches and ranks hold different numbers of tokens (padding, borders of documents), and none knows how many the
others have. So each divides its sum by the same number, the labels that it would have without padding; Lightning and
the strategy average the gradients over A micro-batches and W ranks; and before the optimizer's step they are
multiplied by what is missing:

    sum over A and W of nll / full / (A W)      x      A W full / tokens      =      all nll / all tokens

Promise: a step's loss and gradient are those of its whole global batch, however that is shared out. Cost: one
all-reduce of two numbers and one pass over the gradients per step; the device is never waited for.
"""

import torch
from lightning import Trainer
from torch import Tensor
from torch.optim import Optimizer


class StepMean:
    """Adds up the micro-batches of a step."""

    def __init__(self) -> None:
        self._sums: Tensor | None = None
        self._full = 0

    def add(self, nll_sum: Tensor, num_tokens: Tensor, full: int) -> Tensor:
        """What a micro-batch gives to autograd.

        Args:
            nll_sum: Its summed loss.
            num_tokens: How many labels that covers.
            full: How many it would cover without padding; the same for all micro-batches of a run.
        """
        assert self._sums is None or full == self._full
        widest = torch.float32 if nll_sum.device.type == "mps" else torch.float64  # Apple's GPUs have no float64
        sums = torch.stack([nll_sum.detach().to(widest), num_tokens.to(widest)])
        self._sums = sums if self._sums is None else self._sums + sums
        self._full = full
        return nll_sum / full

    def finish(self, trainer: Trainer, optimizer: Optimizer) -> Tensor:
        """Complete the gradients of a step, and begin the next one.

        Returns:
            The mean loss over all tokens of all ranks, in nats: a scalar, fp32.
        """
        assert self._sums is not None
        nll_sum, tokens = trainer.strategy.reduce(self._sums, reduce_op="sum").unbind()
        tokens = tokens.clamp(min=1)
        # Lightning divides by what it was told, also in a step that an epoch has cut short.
        factor = (trainer.world_size * trainer.accumulate_grad_batches * self._full / tokens).float()
        for gradients in _by_place(optimizer).values():
            torch._foreach_mul_(gradients, factor.to(gradients[0].device, gradients[0].dtype))
        self.reset()
        return (nll_sum / tokens).float()

    def reset(self) -> None:
        """Forget a step that was not finished."""
        self._sums = None


def _by_place(optimizer: Optimizer) -> dict[tuple[torch.device, torch.dtype], list[Tensor]]:
    """The gradients, or this rank's parts of them, by device and dtype."""
    places: dict[tuple[torch.device, torch.dtype], list[Tensor]] = {}
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if (gradient := parameter.grad) is not None:
                gradient = gradient.to_local() if hasattr(gradient, "to_local") else gradient
                places.setdefault((gradient.device, gradient.dtype), []).append(gradient)
    return places
