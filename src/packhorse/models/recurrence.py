"""What each segment writes -> what stands in the memory after it, document by document.

    RunningSum      total = total + x                        the linear rule
    RunningDelta    total = total - erase @ total + x        the delta rule

Both walk over `steps(x)`: views of the first entries of all documents, of the second ones, and so on, longer documents
first, so that a step goes on with the head of the one before. No document's total ever contains another's, not even
to be subtracted. The gradient is the same walk backwards. Autograd's own record of these loops would keep a copy of
everything at each step; here the totals are all that is kept.

Shapes: R entries, G heads, K and V sizes of a matrix.
"""

from collections.abc import Callable
from itertools import pairwise

import torch
from torch import Tensor

Steps = Callable[[Tensor], tuple[Tensor, ...]]


class RunningSum(torch.autograd.Function):
    """`apply(x_R, steps)`: one addition per entry, one launch per step."""

    @staticmethod
    def forward(ctx, x_R: Tensor, steps: Steps) -> Tensor:
        """The totals, [R, ...]."""
        ctx.steps = steps
        total_R = x_R.clone()
        for before, after in pairwise(steps(total_R)):
            after += before[: len(after)]
        return total_R

    @staticmethod
    def backward(ctx, gradient_R: Tensor) -> tuple[Tensor, None]:
        """Each entry's gradient is the sum over all later totals."""
        total_R = gradient_R.clone()
        for before, after in reversed(list(pairwise(ctx.steps(total_R)))):
            before[: len(after)] += after
        return total_R, None


class RunningDelta(torch.autograd.Function):
    """`apply(erase_RGKK, x_RGKV, steps)`: one small matrix product per entry. A document's first erases nothing."""

    @staticmethod
    def forward(ctx, erase_RGKK: Tensor, x_RGKV: Tensor, steps: Steps) -> Tensor:
        """The totals, [R, G, K, V]."""
        ctx.steps = steps
        total_RGKV = x_RGKV.clone()
        for (before, after), erase in zip(pairwise(steps(total_RGKV)), steps(erase_RGKK)[1:], strict=True):
            before = before[: len(after)]
            after += before - erase @ before
        ctx.save_for_backward(erase_RGKK, total_RGKV)
        return total_RGKV

    @staticmethod
    def backward(ctx, gradient_RGKV: Tensor) -> tuple[Tensor, Tensor, None]:
        """The running gradient g is that of x; that of erase is -g (the total before)^T."""
        erase_RGKK, total_RGKV = ctx.saved_tensors
        gradient_RGKV, erase_gradient_RGKK = gradient_RGKV.clone(), torch.zeros_like(erase_RGKK)
        gradients, totals = ctx.steps(gradient_RGKV), ctx.steps(total_RGKV)
        erases, erase_gradients = ctx.steps(erase_RGKK), ctx.steps(erase_gradient_RGKK)
        with torch.autocast(gradient_RGKV.device.type, enabled=False):
            for step in reversed(range(1, len(totals))):
                gradient, size = gradients[step], len(gradients[step])
                erase_gradients[step].copy_(gradient @ totals[step - 1][:size].transpose(-1, -2)).neg_()
                gradients[step - 1][:size] += gradient - erases[step].transpose(-1, -2) @ gradient
        return erase_gradient_RGKK, gradient_RGKV, None
