"""What each segment writes -> what stands in the memory after it, document by document.

    RunningSum      total = total + x                        the linear rule
    RunningDelta    total = total - erase @ total + x        the delta rule

Both walk over `steps(x)`: views of the first entries of all documents, of the second ones, and so on, longer documents
first, so that a step goes on with the head of the one before. No document's total ever contains another's, not even
to be subtracted. The gradient is the same walk backwards; with `detach_every` = n it goes no further at every n-th
step. Autograd's own record of these loops would keep a copy of everything at each step; here only totals are kept.

Shapes: R entries, G heads, K and V sizes of a matrix.
"""

from collections.abc import Callable
from itertools import pairwise

import torch
from torch import Tensor

Steps = Callable[[Tensor], tuple[Tensor, ...]]


def delay(steps: tuple[Tensor, ...], detach_every: int | None) -> list[Tensor]:
    """For each step what stood before it; the first keeps its own."""
    delayed = [*steps[:1]]
    for step, (before, after) in enumerate(pairwise(steps), start=1):
        before = before[: len(after)]
        delayed.append(before.detach() if _stops(step, detach_every) else before)
    return delayed


class RunningSum(torch.autograd.Function):
    """`apply(x_R, steps, detach_every)`: one addition per entry, one launch per step."""

    @staticmethod
    def forward(ctx, x_R: Tensor, steps: Steps, detach_every: int | None) -> Tensor:
        """The totals, [R, ...]."""
        ctx.steps, ctx.detach_every = steps, detach_every
        total_R = x_R.clone()
        for before, after in pairwise(steps(total_R)):
            after += before[: len(after)]
        return total_R

    @staticmethod
    def backward(ctx, gradient_R: Tensor) -> tuple[Tensor, None, None]:
        """Each entry's gradient is the sum over all later totals."""
        total_R = gradient_R.clone()
        totals = ctx.steps(total_R)
        for step in reversed(range(1, len(totals))):
            if not _stops(step, ctx.detach_every):
                totals[step - 1][: len(totals[step])] += totals[step]
        return total_R, None, None


class RunningDelta(torch.autograd.Function):
    """`apply(erase_RGKK, x_RGKV, steps, detach_every)`: one small product per entry. The first erases nothing."""

    @staticmethod
    def forward(ctx, erase_RGKK: Tensor, x_RGKV: Tensor, steps: Steps, detach_every: int | None) -> Tensor:
        """The totals, [R, G, K, V]."""
        ctx.steps, ctx.detach_every = steps, detach_every
        total_RGKV = x_RGKV.clone()
        for (before, after), erase in zip(pairwise(steps(total_RGKV)), steps(erase_RGKK)[1:], strict=True):
            before = before[: len(after)]
            after += before - erase @ before
        ctx.save_for_backward(erase_RGKK, total_RGKV)
        return total_RGKV

    @staticmethod
    def backward(ctx, gradient_RGKV: Tensor) -> tuple[Tensor, Tensor, None, None]:
        """The running gradient g is that of x; that of erase is -g (the total before)^T."""
        erase_RGKK, total_RGKV = ctx.saved_tensors
        gradient_RGKV, erase_gradient_RGKK = gradient_RGKV.clone(), torch.zeros_like(erase_RGKK)
        gradients, totals = ctx.steps(gradient_RGKV), ctx.steps(total_RGKV)
        erases, erase_gradients = ctx.steps(erase_RGKK), ctx.steps(erase_gradient_RGKK)
        with torch.autocast(gradient_RGKV.device.type, enabled=False):
            for step in reversed(range(1, len(totals))):
                gradient, size = gradients[step], len(gradients[step])
                erase_gradients[step].copy_(gradient @ totals[step - 1][:size].transpose(-1, -2)).neg_()
                if not _stops(step, ctx.detach_every):
                    gradients[step - 1][:size] += gradient - erases[step].transpose(-1, -2) @ gradient
        return erase_gradient_RGKK, gradient_RGKV, None, None


def _stops(step: int, detach_every: int | None) -> bool:
    return detach_every is not None and step % detach_every == 0
