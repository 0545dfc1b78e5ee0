"""Tokens that arrive a few at a time -> what the whole text would have given, from a state of constant size.

`InfiniCache` is what `generate` carries from call to call. For each row of the batch and each layer it holds the open
segment, the memory of the closed ones, and nothing else:

    keys, values    S + 1 places, without rotary embedding      (S = segment_length)
    memory          [K, V] for each key/value head, fp32
    normalizer      [K]    for each key/value head, fp32

A call of any length is cut where some row's segment ends. Each piece is one `StreamStep`: put keys and values into the
open segment, attend to it, read the memory; rows whose segment is full now write it to the memory. Rows need not be in
step: with left padding each one ends its segments at another token. With S = 4 and `_` for padding:

    row 0    a a a a a a          first step  a a a a    second step  a a
    row 1    _ _ _ b b b                      b b b                   -

A row with fewer tokens than a step is wide puts the rest at place S, which nobody reads.

Shapes: B rows, T tokens of this call, P tokens of a step, S + 1 places, W places in use, H query heads, G key/value
heads, K head size.
"""

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention
from transformers.cache_utils import Cache, CacheLayerMixin
from transformers.models.llama.modeling_llama import rotate_half

from packhorse.models.config import InfiniAttentionConfig, RotaryRestart
from packhorse.models.gates import Gate
from packhorse.models.memory import normalise, read_memory, write_segment


@dataclass(frozen=True, kw_only=True)
class StreamStep:
    """What each row adds to its open segment, never beyond its end."""

    token_BP: Tensor
    """Which of the call's tokens; any, where a row has fewer than P."""
    place_BP: Tensor
    """Their places in the segment; S, the place that nobody reads, where a row has fewer than P."""
    start_B: Tensor
    """Position of the segment's first token in the text."""
    width: int
    """Places in use after this step."""
    has_past_B: Tensor
    """Rows whose memory holds something."""
    full_rows: Tensor | None
    """Rows whose segment is full after this step; None if there are none."""


class InfiniCacheLayer(CacheLayerMixin):
    """One layer's open segment and memory.

    Args:
        settings: Of the model.
        has_memory: Whether this layer has one.
    """

    def __init__(self, settings: InfiniAttentionConfig, has_memory: bool = True) -> None:
        super().__init__()
        self.settings, self.has_memory = settings, has_memory
        self.tensors: dict[str, Tensor] = {}

    def put(self, key_BPGK: Tensor, value_BPGK: Tensor, step: StreamStep) -> tuple[Tensor, Tensor]:
        """Add to the open segments; -> their keys and values so far, [B, W, G, K]."""
        if not self.is_initialized:
            self.lazy_initialization(key_BPGK, value_BPGK)
        at = (torch.arange(len(key_BPGK), device=key_BPGK.device)[:, None], step.place_BP)
        for name, new in (("keys", key_BPGK), ("values", value_BPGK)):
            self.tensors[name].index_put_(at, new.to(self.tensors[name].dtype))
        return tuple(self.tensors[name][:, : step.width].to(key_BPGK.dtype) for name in ("keys", "values"))

    def read(self, query_BPHK: Tensor) -> Tensor:
        """What the memory answers, [B, P, H, V]; zero while it is empty."""
        memory, normalizer = self.tensors["memory"], self.tensors["normalizer"]
        if self.settings.memory_qk_norm:
            query_BPHK = normalise(query_BPHK)
        return read_memory(query_BPHK, memory, normalizer, self.settings.memory_eps).transpose(1, 2)

    def write(self, full_rows: Tensor) -> None:
        """Write the full segments of these rows to their memory."""
        keys, values, memory, normalizer = (x[full_rows] for x in self.tensors.values())
        if self.settings.memory_qk_norm:
            keys = normalise(keys)
        added = write_segment(
            keys[:, :-1], values[:, :-1], memory, normalizer, self.settings.memory_update, self.settings.memory_eps
        )
        for name, new in zip(("memory", "normalizer"), added, strict=True):
            self.tensors[name].index_add_(0, full_rows, new)

    def lazy_initialization(self, key_BPGK: Tensor, value_BPGK: Tensor) -> None:
        """Room for everything there will ever be."""
        rows, _, num_groups, size = key_BPGK.shape
        places = self.settings.segment_length + 1
        wide = torch.promote_types(key_BPGK.dtype, torch.float32)
        self.tensors = {
            "keys": key_BPGK.new_zeros(rows, places, num_groups, size),
            "values": value_BPGK.new_zeros(rows, places, num_groups, size),
        }
        if self.has_memory:
            self.tensors |= {
                "memory": key_BPGK.new_zeros(rows, num_groups, size, size, dtype=wide),
                "normalizer": key_BPGK.new_zeros(rows, num_groups, size, dtype=wide),
            }
        self.is_initialized = True

    def reset(self) -> None:
        """As new."""
        self.tensors, self.is_initialized = {}, False

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Row i goes on with what row beam_idx[i] has read."""
        self.tensors = {name: x.index_select(0, beam_idx.to(x.device)) for name, x in self.tensors.items()}

    def update(self, key_states, value_states, *args, **kwargs):
        """Not the way in: plain attention would ask for keys of the whole text."""
        raise TypeError("An InfiniCache serves Infini-attention models only.")

    def get_seq_length(self) -> int:
        """Known to the cache, not to its layers."""
        raise TypeError("Ask the InfiniCache for its length.")

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """No mask is ever made for it."""
        raise TypeError("Infini-attention needs no mask from transformers.")

    def get_max_length(self) -> int:
        """-1: there is no end."""
        return -1


@dataclass(frozen=True, kw_only=True)
class StreamPlan:
    """One call's steps, the same for all layers, and what the layers carry.

    It goes to the layers where segments go in training, and not as `past_key_values`: a layer with gradient
    checkpointing would drop those.
    """

    states: list[InfiniCacheLayer]
    steps: list[StreamStep]
    result_BT: Tensor
    """Where each token stands in the steps' outputs, laid one after the other."""
    is_masked_BT: Tensor
    seen_B: Tensor
    """Tokens of each row after this call, on the CPU."""

    def positions(self, restart: RotaryRestart, device: torch.device) -> Tensor:
        """Rotary positions of a segment's places: [1, S + 1], or [steps B, S + 1] where no segment begins at 0."""
        place_1S = torch.arange(self.states[0].settings.segment_length + 1, device=device)[None]
        if restart == "segment" or not self.steps:
            return place_1S
        return torch.cat([step.start_B for step in self.steps]).to(device)[:, None] + place_1S


class InfiniCache(Cache):
    """The state of a text that is read in pieces: constant memory for any length.

    `generate` makes one by itself. By hand, under `torch.no_grad()`:

        cache = InfiniCache(model.config)
        for chunk in input_ids.split(1000, dim=1):
            logits = model(chunk, past_key_values=cache).logits

    It cannot be cut back to an earlier token (assisted decoding needs that): what was written stays written.
    """

    def __init__(self, config) -> None:
        settings: InfiniAttentionConfig = config.infini_attention
        has_memory = [settings.turn_on_memory and settings.has_memory(n) for n in range(config.num_hidden_layers)]
        super().__init__(layers=[InfiniCacheLayer(settings, has) for has in has_memory])
        self.segment_length = settings.segment_length
        self.num_columns = 0
        self.seen_B: Tensor | None = None

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Tokens seen in each row, padding included: where `generate` goes on in `input_ids`."""
        return self.num_columns

    @property
    def state_bytes(self) -> int:
        """Size of all tensors, constant from the first call on."""
        return sum(x.numel() * x.element_size() for layer in self.layers for x in layer.tensors.values())

    def plan(
        self, shape: tuple[int, int], attention_mask: Tensor | None, position_ids: Tensor | None, device: torch.device
    ) -> StreamPlan:
        """How the next tokens, [B, T], go into the open segments. Changes nothing yet.

        Args:
            shape: B, T.
            attention_mask: [B, T] or with all earlier tokens before them; 0 for padding anywhere.
            position_ids: [B, T], only to be checked: a row is one document here.
            device: where the indices are needed.
        """
        rows, length = shape
        seen_B = torch.zeros(rows, dtype=torch.long) if self.seen_B is None else self.seen_B
        if len(seen_B) != rows:
            raise ValueError(f"This InfiniCache holds {len(seen_B)} rows, but the batch has {rows}: make a new one.")
        if attention_mask is not None and attention_mask.shape[1] not in (length, self.num_columns + length):
            raise ValueError(
                f"attention_mask has {attention_mask.shape[1]} columns. It must have those of the {length} new tokens, "
                f"or of the {self.num_columns} seen ones and the new ones together."
            )
        real_BT = torch.ones(shape, dtype=torch.bool) if attention_mask is None else _last(attention_mask, length)
        if position_ids is not None:
            expected_BT = seen_B[:, None] + real_BT.cumsum(1) - 1
            if ((position_ids.cpu() != expected_BT) & real_BT).any():
                raise ValueError(
                    "With an InfiniCache each row is one document, and position_ids must count its tokens from 0. "
                    "Read packed rows without a cache."
                )
        steps, result_BT = _cut(seen_B, real_BT, self.segment_length, device)
        return StreamPlan(
            states=self.layers,
            steps=steps,
            result_BT=result_BT,
            is_masked_BT=(~real_BT).to(device),
            seen_B=seen_B + real_BT.sum(1),
        )

    def advance(self, plan: StreamPlan) -> None:
        """Take the plan's tokens as seen, once all layers have read them."""
        self.seen_B = plan.seen_B
        self.num_columns += plan.result_BT.shape[1]

    def reset(self) -> None:
        """As new, for another text."""
        super().reset()
        self.num_columns, self.seen_B = 0, None

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Row i goes on with what row beam_idx[i] has read."""
        super().reorder_cache(beam_idx)
        if self.seen_B is not None:
            self.seen_B = self.seen_B[beam_idx.cpu()]

    batch_select_indices = reorder_cache

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Each row `repeats` times, one after the other."""
        if self.seen_B is not None:
            self.reorder_cache(torch.arange(len(self.seen_B)).repeat_interleave(repeats))

    def crop(self, tokens_to_remove: int) -> None:
        """Refused: a memory cannot be read backwards."""
        raise ValueError("An InfiniCache cannot forget its last tokens: they may be in the memory already.")


def attend_by_stream(
    query_BTHK: Tensor,
    key_BTGK: Tensor,
    value_BTGK: Tensor,
    position_embeddings: tuple[Tensor, Tensor],
    gate: Gate | None,
    state: InfiniCacheLayer,
    plan: StreamPlan,
    scaling: float,
) -> Tensor:
    """The mixed output [B, T, H, K] of one layer, with `state` moved on; zero for masked tokens. No dropout.

    Without a gate there is no memory.
    """
    settings = state.settings
    row_B1 = torch.arange(len(query_BTHK), device=query_BTHK.device)[:, None]
    outputs = []
    for number, step in enumerate(plan.steps):
        query_BPHK, key_BPGK, value_BPGK = (x[row_B1, step.token_BP] for x in (query_BTHK, key_BTGK, value_BTGK))
        key_BWGK, value_BWGK = state.put(key_BPGK, value_BPGK, step)
        tables = [x if len(x) == 1 else x.split(len(row_B1))[number] for x in position_embeddings]
        mixed_BPHK = _attend_locally(query_BPHK, key_BWGK, value_BWGK, tables, step, scaling)
        if gate is not None:
            answer_BPHK = state.read(query_BPHK)
            local_BPHK = mixed_BPHK.to(answer_BPHK.dtype)
            mixed_BPHK = gate(local_BPHK, answer_BPHK)
            if settings.first_segment == "bypass":
                mixed_BPHK = torch.where(step.has_past_B[:, None, None, None], mixed_BPHK, local_BPHK)
            if step.full_rows is not None:
                state.write(step.full_rows)
        outputs.append(mixed_BPHK.to(query_BTHK.dtype))
    if not outputs:
        return torch.zeros_like(query_BTHK)
    output_BTHK = torch.cat(outputs, dim=1)[row_B1, plan.result_BT]
    return output_BTHK.masked_fill(plan.is_masked_BT[:, :, None, None], 0)


def _attend_locally(query_BPHK, key_BWGK, value_BWGK, tables, step: StreamStep, scaling) -> Tensor:
    row_B1 = torch.arange(len(query_BPHK), device=query_BPHK.device)[:, None]
    query_tables = (x.expand(len(row_B1), -1, -1)[row_B1, step.place_BP] for x in tables)
    query_BHPK = _rotate(query_BPHK, *query_tables)
    key_BGWK = _rotate(key_BWGK, *(x[:, : step.width] for x in tables))
    is_seen_BPW = torch.arange(step.width, device=query_BPHK.device) <= step.place_BP.unsqueeze(-1)
    return scaled_dot_product_attention(
        query_BHPK,
        key_BGWK,
        value_BWGK.transpose(1, 2),
        attn_mask=is_seen_BPW.unsqueeze(1),
        scale=scaling,
        enable_gqa=query_BHPK.shape[1] > key_BGWK.shape[1],
    ).transpose(1, 2)


def _rotate(x_BTHK: Tensor, cos_BTK: Tensor, sin_BTK: Tensor) -> Tensor:
    x_BHTK = x_BTHK.transpose(1, 2)
    return x_BHTK * cos_BTK.unsqueeze(1) + rotate_half(x_BHTK) * sin_BTK.unsqueeze(1)


def _last(attention_mask: Tensor, length: int) -> Tensor:
    return attention_mask[:, -length:].cpu().bool()


def _cut(seen_B: Tensor, real_BT: Tensor, segment_length: int, device: torch.device) -> tuple[list[StreamStep], Tensor]:
    count_B = real_BT.sum(1)
    token_by_rank_BT = (~real_BT).int().argsort(dim=1, stable=True)  # a row's real tokens first, in their order
    result_BT = torch.zeros_like(token_by_rank_BT)
    place_B, done_B = seen_B % segment_length, torch.zeros_like(count_B)
    steps, num_results = [], 0
    while (left_B := count_B - done_B).any():
        take_B = torch.minimum(left_B, segment_length - place_B)
        offset_P = torch.arange(int(take_B.max()))
        is_taken_BP = offset_P < take_B[:, None]
        token_BP = token_by_rank_BT.gather(1, (done_B[:, None] + offset_P).clamp(max=real_BT.shape[1] - 1))
        row_N, column_N = is_taken_BP.nonzero(as_tuple=True)
        result_BT[row_N, token_BP[row_N, column_N]] = num_results + column_N
        end_B = place_B + take_B
        full_rows = (end_B == segment_length).nonzero().squeeze(1)
        steps.append(
            StreamStep(
                token_BP=token_BP.to(device),
                place_BP=torch.where(is_taken_BP, place_B[:, None] + offset_P, segment_length).to(device),
                start_B=(seen_B + done_B - place_B).to(device),
                width=int(end_B.max()),
                has_past_B=(seen_B + done_B >= segment_length).to(device),
                full_rows=full_rows.to(device) if len(full_rows) else None,
            )
        )
        num_results += len(offset_P)
        done_B, place_B = done_B + take_B, end_B % segment_length
    return steps, result_BT.to(device)
