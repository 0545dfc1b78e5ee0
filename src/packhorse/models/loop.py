"""Infini-attention exactly as the paper tells it: document by document, segment by segment.

This is the specification that the fast backends are tested against. It shares neither their layout nor their sums;
it is slow, and it is meant to be read.

Shapes: B rows, T tokens of a row, S tokens of this segment, H query heads, G key/value heads, K head size.
"""

import torch
from torch import Tensor
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb, repeat_kv

from packhorse.models.config import InfiniAttentionConfig
from packhorse.models.gates import Gate
from packhorse.models.memory import feature_map, normalise, retrieve, write
from packhorse.models.segments import Segments


def attend_by_loop(
    query_BTHK: Tensor,
    key_BTGK: Tensor,
    value_BTGK: Tensor,
    position_embeddings: tuple[Tensor, Tensor],
    gate: Gate | None,
    segments: Segments,
    settings: InfiniAttentionConfig,
    scaling: float,
) -> Tensor:
    """The mixed output [B, T, H, K] of one layer; zero for masked tokens. No attention dropout. No gate: no memory."""
    num_repeats = query_BTHK.shape[2] // key_BTGK.shape[2]
    document_BT, index_BT = (x.expand(query_BTHK.shape[:2]) for x in segments.places(query_BTHK.device))
    output_BTHK = torch.zeros_like(query_BTHK)
    for row, (document_T, index_T) in enumerate(zip(document_BT, index_BT, strict=True)):
        for document in document_T[index_T >= 0].unique():
            memory = normalizer = None
            for index in range(int(index_T[document_T == document].max()) + 1):
                here = (row, ((document_T == document) & (index_T == index)).nonzero().squeeze(1))
                query_1HSK = query_BTHK[here].transpose(0, 1)[None]
                key_1HSK, value_1HSK = (
                    repeat_kv(x[here].transpose(0, 1)[None], num_repeats) for x in (key_BTGK, value_BTGK)
                )
                tables = _rotary_tables(position_embeddings, segments, here)
                local = _attend_locally(query_1HSK, key_1HSK, value_1HSK, tables, scaling)
                if gate is not None:
                    wide = torch.promote_types(local.dtype, torch.float32)
                    if settings.memory_qk_norm:
                        query_1HSK, key_1HSK = normalise(query_1HSK), normalise(key_1HSK)
                    with torch.autocast(local.device.type, enabled=False):
                        if memory is None:
                            answer = torch.zeros_like(local, dtype=wide)
                        else:
                            answer = retrieve(feature_map(query_1HSK.to(wide)), memory, normalizer, settings.memory_eps)
                        mixed = _mix(local.to(wide), answer, gate, settings, is_first=memory is None)
                        every = settings.detach_every_n_segments
                        if every is not None and index > 0 and index % every == 0:
                            memory, normalizer = memory.detach(), normalizer.detach()
                        key_feature, value = feature_map(key_1HSK.to(wide)), value_1HSK.to(wide)
                        if settings.memory_update == "delta" and memory is not None:
                            value = value - retrieve(key_feature, memory, normalizer, settings.memory_eps)
                        added, added_normalizer = write(key_feature, value)
                    memory = added if memory is None else memory + added
                    normalizer = added_normalizer if normalizer is None else normalizer + added_normalizer
                    local = mixed.to(local.dtype)
                output_BTHK = output_BTHK.index_put((torch.tensor(row), here[1]), local[0].transpose(0, 1))
    return output_BTHK


def _rotary_tables(position_embeddings, segments: Segments, here) -> list[Tensor]:
    """One entry for each token that stands `here`, [1, S, K]."""
    if len(position_embeddings[0]) == 1:  # positions begin again at every segment
        return [x[:, : len(here[1])] for x in position_embeddings]
    return [segments.unfold(x)[here][None] for x in position_embeddings]


def _attend_locally(query_1HSK, key_1HSK, value_1HSK, tables, scaling) -> Tensor:
    length = query_1HSK.shape[2]
    query_1HSK, key_1HSK = apply_rotary_pos_emb(query_1HSK, key_1HSK, *tables)
    score_1HSS = query_1HSK @ key_1HSK.transpose(-1, -2) * scaling
    is_future_SS = torch.ones(length, length, dtype=torch.bool, device=score_1HSS.device).triu(1)
    return score_1HSS.masked_fill(is_future_SS, float("-inf")).softmax(-1).to(value_1HSK.dtype) @ value_1HSK


def _mix(local, answer, gate, settings: InfiniAttentionConfig, is_first: bool) -> Tensor:
    gate_H11 = gate.share(answer).unsqueeze(-1)
    mixed = gate_H11 * answer + (1 - gate_H11) * local
    if is_first and settings.first_segment == "bypass":
        return local + 0 * mixed  # the gates keep a gradient, zero, as data-parallel training needs it
    return mixed
