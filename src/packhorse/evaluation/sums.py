"""Losses of many tokens -> sums that are the same however batches and ranks share the tokens out."""

import torch
from torch import Tensor
from torchmetrics import Metric


class TokenSums(Metric):
    """Summed losses and how many tokens they are of, over all batches and ranks; to be inherited from.

    Sums are float64, so the billionth token still counts.

    Args:
        shape: So many sums are kept apart.
    """

    is_differentiable = False
    higher_is_better = False
    full_state_update = False

    nll_sum: Tensor
    tokens: Tensor

    def __init__(self, shape: tuple[int, ...] = (), **kwargs) -> None:
        super().__init__(**kwargs)
        widest = torch.float32 if torch.backends.mps.is_available() else torch.float64  # Apple's GPUs have no float64
        self.add_state("nll_sum", torch.zeros(shape, dtype=widest), dist_reduce_fx="sum")
        self.add_state("tokens", torch.zeros(shape, dtype=torch.int64), dist_reduce_fx="sum")

    def _apply(self, fn, *args, **kwargs) -> "TokenSums":
        # Follow the module to its device but not to its dtype: in bf16, 4,000 plus 1 is 4,000.
        return super()._apply(lambda state: state.to(fn(state).device), *args, **kwargs)

    def _add(self, nll_sum: Tensor | float, tokens: Tensor | int) -> None:
        # Not in place: states that a validation has reset are inference tensors, which cannot be changed in training.
        self.nll_sum = self.nll_sum + nll_sum
        self.tokens = self.tokens + tokens
