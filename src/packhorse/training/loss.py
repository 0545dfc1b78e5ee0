"""Hidden states, output weights, labels -> loss, and many losses -> one honest mean.

A vocabulary of 152,000 makes the logits of 8,192 tokens 5 GB, three times over during training. Here they exist for a
few hundred tokens at a time, in the forward and again in the backward pass:

    hidden [N, D]  ->  chunk [c, D]  ->  logits [c, V]  ->  nll [c]  ->  one number
                       (c V numbers fit into `chunk_bytes`)

Promises: the loss and both gradients are those of `cross_entropy(hidden @ weight.T)` with softmax and all sums in
fp32, also for bf16 inputs; a validation loss is a mean over tokens, not over batches or ranks.
"""

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from packhorse.evaluation.sums import TokenSums


def chunked_cross_entropy(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    *,
    chunk_tokens: int | None = None,
    chunk_bytes: int = 256 * 1024**2,
    ignore_index: int = -100,
    skip_ignored: bool = False,
) -> tuple[Tensor, Tensor]:
    """The summed negative log-likelihood and how many labels it covers, without ever holding all logits.

    The product runs in the inputs' dtype (under autocast in autocast's), everything after it in fp32. The gradient of
    `weight` is added up in fp32 over the chunks. Peak memory beside inputs and gradients: about 2 * chunk_bytes, and
    for weights narrower than fp32 one fp32 copy of their gradient.
    With no label at all the sum is 0 and so are the gradients; divide by `num_tokens.clamp(min=1)`.

    Args:
        hidden: [N, D] or [..., N, D], what goes into the output layer.
        weight: [V, D], the output layer, or the embedding when they are tied.
        labels: [N] or [..., N] int64, already shifted.
        chunk_tokens: Tokens at a time; otherwise as many as have logits of `chunk_bytes` in fp32.
        chunk_bytes: See `chunk_tokens`.
        ignore_index: Labels that do not count.
        skip_ignored: Drop ignored tokens before the work instead of masking them. Pays when many are; costs a copy of
            `hidden`, a synchronisation with the device, and shapes that depend on the data.

    Returns:
        (nll_sum, num_tokens): scalars, fp32 (fp64 for fp64 inputs) and int64.
    """
    hidden_ND, labels_N = hidden.flatten(0, -2), labels.flatten()
    if len(hidden_ND) != len(labels_N) or hidden.shape[-1] != weight.shape[-1]:
        raise ValueError(
            f"hidden {tuple(hidden.shape)}, weight {tuple(weight.shape)} and labels {tuple(labels.shape)} do not fit: "
            "expected [..., N, D], [V, D] and [..., N]."
        )
    valid_N = labels_N != ignore_index
    num_tokens = valid_N.sum()
    if skip_ignored:
        hidden_ND, labels_N, valid_N = hidden_ND[valid_N], labels_N[valid_N], valid_N[valid_N]
    if chunk_tokens is None:
        chunk_tokens = max(1, chunk_bytes // (4 * len(weight)))
    device = hidden.device.type
    dtype = torch.promote_types(hidden.dtype, weight.dtype)
    if torch.is_autocast_enabled(device) and dtype != torch.float64:
        dtype = torch.get_autocast_dtype(device)
    labels_N = labels_N.masked_fill(~valid_N, 0)  # a label that can be looked up; its loss is masked
    return _ChunkedNLL.apply(hidden_ND, weight, labels_N, valid_N, chunk_tokens, dtype), num_tokens


class _ChunkedNLL(torch.autograd.Function):
    """Keeps one number per token, the log of the softmax's denominator, from which backward makes a chunk's softmax.

    Chunks under `torch.utils.checkpoint` would give the same loss, but autograd adds up the weight's gradient in the
    weight's dtype, chunk after chunk: in bf16 every addition rounds it to 8 bits.
    """

    @staticmethod
    def forward(ctx, hidden_ND, weight_VD, labels_N, valid_N, chunk_tokens, dtype):
        with torch.autocast(hidden_ND.device.type, enabled=False):
            weight = weight_VD.to(dtype)
            total_dtype = torch.promote_types(dtype, torch.float32)
            log_denominator_N = hidden_ND.new_empty(len(hidden_ND), dtype=total_dtype)
            nll_sum = hidden_ND.new_zeros((), dtype=total_dtype)
            for chunk in _chunks(len(hidden_ND), chunk_tokens):
                logits_CV = (hidden_ND[chunk].to(dtype) @ weight.T).to(total_dtype)
                label_logit_C = logits_CV.gather(1, labels_N[chunk, None]).squeeze(1)
                log_denominator_N[chunk] = torch.logsumexp(logits_CV, dim=1)
                nll_C = log_denominator_N[chunk] - label_logit_C
                nll_sum += nll_C.masked_fill(~valid_N[chunk], 0).sum()
        ctx.save_for_backward(hidden_ND, weight_VD, labels_N, valid_N, log_denominator_N)
        ctx.chunk_tokens, ctx.dtype = chunk_tokens, dtype
        return nll_sum

    @staticmethod
    @once_differentiable
    def backward(ctx, grad_nll):
        hidden_ND, weight_VD, labels_N, valid_N, log_denominator_N = ctx.saved_tensors
        want_hidden, want_weight = ctx.needs_input_grad[:2]
        with torch.autocast(hidden_ND.device.type, enabled=False):
            weight, total_dtype = weight_VD.to(ctx.dtype), log_denominator_N.dtype
            grad_hidden_ND = torch.empty_like(hidden_ND) if want_hidden else None
            grad_weight_VD = torch.zeros_like(weight_VD, dtype=total_dtype) if want_weight else None
            for chunk in _chunks(len(hidden_ND), ctx.chunk_tokens):
                hidden_CD = hidden_ND[chunk].to(ctx.dtype)
                grad_CV = (hidden_CD @ weight.T).to(total_dtype)
                grad_CV.sub_(log_denominator_N[chunk, None]).exp_()  # softmax
                grad_CV.scatter_add_(1, labels_N[chunk, None], grad_CV.new_full((len(grad_CV), 1), -1.0))
                grad_CV.mul_(grad_nll).masked_fill_(~valid_N[chunk, None], 0)
                grad_CV = grad_CV.to(ctx.dtype)
                if want_hidden:
                    grad_hidden_ND[chunk] = (grad_CV @ weight).to(hidden_ND.dtype)
                if want_weight and ctx.dtype == total_dtype:
                    grad_weight_VD.addmm_(grad_CV.T, hidden_CD)
                elif want_weight:
                    grad_weight_VD += grad_CV.T @ hidden_CD
            grad_weight_VD = grad_weight_VD.to(weight_VD.dtype) if want_weight else None
        return grad_hidden_ND, grad_weight_VD, None, None, None, None


def _chunks(num_tokens: int, chunk_tokens: int) -> list[slice]:
    return [slice(start, start + chunk_tokens) for start in range(0, num_tokens, chunk_tokens)]


class TokenLoss(TokenSums):
    """Summed losses and token counts -> nats per token over all batches and ranks.

    Rows with much padding count less, as they should; a mean of batch means would be wrong. Before the first token the
    result is nan: nothing was measured.
    """

    def update(self, nll_sum: Tensor | float, num_tokens: Tensor | int) -> None:
        """Add what `chunked_cross_entropy` returned."""
        self._add(nll_sum, num_tokens)

    def compute(self) -> Tensor:
        """Nats per token."""
        return self.nll_sum / self.tokens

    @property
    def perplexity(self) -> Tensor:
        """`perplexity` of the mean."""
        return perplexity(self.compute())


def perplexity(nll: Tensor) -> Tensor:
    """exp(nats per token), but never more than exp(80) = 5.5e34, so that fp32 and plots survive a diverged model."""
    return torch.exp(nll.clamp(max=80))
