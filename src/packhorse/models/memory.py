"""Queries, keys and values of segments -> what the earlier segments of the same document answer.

The compressive memory of Infini-attention (Munkhdalai et al., 2024, arXiv 2404.07143v2) as pure functions. For each
key/value head it is a matrix M and a normaliser z, both sums over the past:

    sigma(x) = elu(x) + 1
    read     sigma(Q) M / (sigma(Q) z)                        equation (7)
    write    M += sigma(K)^T V,   z += sum_t sigma(K_t)       equation (8), the linear rule
    or       M += sigma(K)^T (V - read of M with K)           equation (9), the delta rule; z as above

A segment reads before it is written, so no token ever reads itself or its future. Queries and keys carry no rotary
embedding here: a memory has no positions. Everything is computed in fp32 at least, whatever autocast says, because
z is a long sum and bf16 loses several percent of it after a few hundred segments.

Shapes: R segments with a past, S tokens of a segment, T tokens of a row, B rows, H query heads, G key/value heads
(each serves H / G neighbouring query heads), K key size, V value size.
"""

import torch
from torch import Tensor
from torch.nn.functional import rms_norm

from packhorse.models.config import MemoryUpdate
from packhorse.models.segments import Segments


def feature_map(x: Tensor) -> Tensor:
    """sigma(x) = x + 1 above zero, exp(x) below: positive, also where `elu(x) + 1` rounds to zero."""
    return _FeatureMap.apply(x)


def normalise(x_BTHK: Tensor) -> Tensor:
    """Queries or keys for `memory_qk_norm`: root mean square 1 over each head, in fp32 at least."""
    wide = x_BTHK.to(torch.promote_types(x_BTHK.dtype, torch.float32))
    return rms_norm(wide, wide.shape[-1:], eps=1e-6)


def retrieve(query_feature: Tensor, memory: Tensor, normalizer: Tensor, eps: float) -> Tensor:
    """Equation (7): [..., S, K] queries read [..., K, V]; zero where nothing was written."""
    return (query_feature @ memory) / (query_feature @ normalizer.unsqueeze(-1) + eps)


def write(key_feature: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
    """Equation (8), and (9) if `value` is what is new about it: what one segment adds to memory and normaliser."""
    return key_feature.transpose(-1, -2) @ value, key_feature.sum(-2)


def read_memory(query_RSHK: Tensor, memory_RGKV: Tensor, normalizer_RGK: Tensor, eps: float) -> Tensor:
    """What each segment's queries read from its memory, [R, H, S, V]."""
    with torch.autocast(query_RSHK.device.type, enabled=False):
        query_feature = feature_map(_heads_first(query_RSHK))
        grouped = _group_heads(query_feature, memory_RGKV.shape[1])
        answer = retrieve(grouped, memory_RGKV, normalizer_RGK, eps)
        return answer.view(*query_feature.shape[:-1], memory_RGKV.shape[-1])


def write_segment(
    key_RSGK: Tensor, value_RSGV: Tensor, memory_RGKV: Tensor, normalizer_RGK: Tensor, rule: MemoryUpdate, eps: float
) -> tuple[Tensor, Tensor]:
    """What each segment, all its places taken, adds to its memory and normaliser."""
    with torch.autocast(key_RSGK.device.type, enabled=False):
        key_feature, value = feature_map(_heads_first(key_RSGK)), _heads_first(value_RSGV)
        if rule == "delta":
            value = value - retrieve(key_feature, memory_RGKV, normalizer_RGK, eps)
        return write(key_feature, value)


def memories_by_scan(
    key_RSGK: Tensor,
    value_RSGV: Tensor,
    segments: Segments,
    rule: MemoryUpdate,
    eps: float,
    detach_every: int | None = None,
    carried: tuple[Tensor, Tensor] | None = None,
) -> tuple[Tensor, Tensor]:
    """All segments at once: one write each, a running sum over the past. -> [R, G, K, V] and [R, G, K].

    Cost per token: K V for the write; K V numbers are kept for each segment and G. The delta rule looks like a loop
    over segments, but z does not depend on M, so what a segment erases is known beforehand:

        M' = M + sigma(K)^T (V - W M) = (I - sigma(K)^T W) M + sigma(K)^T V      with W = sigma(K) / (sigma(K) z)

    Both products are made for all segments at once, at K K more per token. What is left to do one after the other is
    one [K, K] times [K, V] for each segment.

    Args:
        key_RSGK: keys of the segment before each of those that have a past.
        value_RSGV: values of the segment before each.
        segments: which segment follows which.
        rule: `linear` or `delta`.
        eps: added to the normaliser.
        detach_every: how many segments a gradient may pass; None for all.
        carried: memory and normaliser from before each row, [B, ...]; only for segments that stand in slots.
    """
    with torch.autocast(key_RSGK.device.type, enabled=False):
        key_feature = feature_map(_heads_first(key_RSGK))
        written, normalizer = write(key_feature, _heads_first(value_RSGV))
        if carried is not None:
            written, normalizer = segments.begin(written, carried[0]), segments.begin(normalizer, carried[1])
        normalizer = segments.running_sum(normalizer, detach_every)
        if rule == "delta":
            normalizer_before = segments.delay(normalizer, detach_every)
            answer_weight = key_feature / (key_feature @ normalizer_before.unsqueeze(-1) + eps)
            memory = segments.running_delta(key_feature.transpose(-1, -2) @ answer_weight, written, detach_every)
        else:
            memory = segments.running_sum(written, detach_every)
    return memory, normalizer


def read_by_attention(
    query_BTHK: Tensor, key_BTGK: Tensor, value_BTGV: Tensor, is_past_BTT: Tensor, eps: float
) -> Tensor:
    """The same read without a memory: every token weighs every past token itself. -> [B, T, H, V].

    sigma(q) sum_j sigma(k_j)^T v_j = sum_j (sigma(q) . sigma(k_j)) v_j. Cost per token: T (K + V), good for short rows.

    Args:
        query_BTHK: queries of whole rows.
        key_BTGK: keys of whole rows.
        value_BTGV: values of whole rows.
        is_past_BTT: True where token j (last axis) is in an earlier segment of the document of token i.
        eps: added to the normaliser.
    """
    with torch.autocast(query_BTHK.device.type, enabled=False):
        query_feature, key_feature = feature_map(_heads_first(query_BTHK)), feature_map(_heads_first(key_BTGK))
        batch, num_heads, length, _ = query_feature.shape
        grouped = _group_heads(query_feature, key_feature.shape[1])
        weight = (grouped @ key_feature.transpose(-1, -2)).view(batch, num_heads, length, length)
        weight = weight.masked_fill(~is_past_BTT.unsqueeze(1), 0)
        weight = weight / (weight.sum(-1, keepdim=True) + eps)
        answer = _group_heads(weight, key_feature.shape[1]) @ _heads_first(value_BTGV)
        return answer.view(batch, num_heads, length, value_BTGV.shape[-1]).transpose(1, 2)


def _heads_first(x_RSHK: Tensor) -> Tensor:
    # Contiguous before the feature map, so that autograd keeps one copy and not two.
    wide = torch.promote_types(x_RSHK.dtype, torch.float32)
    return x_RSHK.transpose(1, 2).to(wide).contiguous()


def _group_heads(x_RHSK: Tensor, num_groups: int) -> Tensor:
    """Query heads that share a key/value head -> more queries of it: [R, G, (H / G) S, K]."""
    segments, heads, places, size = x_RHSK.shape
    return x_RHSK.reshape(segments, num_groups, heads // num_groups * places, size)


class _FeatureMap(torch.autograd.Function):
    """exp(min(x, 0)) + max(x, 0). Its slope is min(sigma, 1), so only the result is kept."""

    @staticmethod
    def forward(ctx, x):
        feature = x.clamp(max=0).exp_().add_(x.clamp(min=0))
        ctx.save_for_backward(feature)
        return feature

    @staticmethod
    def backward(ctx, gradient):
        (feature,) = ctx.saved_tensors
        return gradient * feature.clamp(max=1)
