"""Hidden states -> hidden states, with local attention inside a segment and a memory of the earlier ones.

    output = gate * memory + (1 - gate) * local            equation (10) of arXiv 2404.07143v2

`InfiniAttentionMixin` goes before a transformers attention class and uses its projections (and head norms, where it
has them); all it adds is one gate per query head. Local attention is the only place with rotary embeddings; positions
restart at every segment, which leaves its scores as they are. The segments come from the model, once for all layers.

Shapes: B rows, T tokens of a row, N segments, S places of a segment, R segments with a past, H query heads,
G key/value heads, K head size.
"""

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

from packhorse.models.config import InfiniAttentionConfig
from packhorse.models.gates import Gate
from packhorse.models.loop import attend_by_loop
from packhorse.models.memory import memories_by_scan, normalise, read_by_attention, read_memory, write_segment
from packhorse.models.segments import Segments
from packhorse.models.slots import SlottedSegments
from packhorse.models.state import Carry
from packhorse.models.streaming import StreamPlan, attend_by_stream


class InfiniAttentionMixin:
    """Infini-attention over the projections of a transformers attention class. Only to be inherited from."""

    def __init__(self, config, layer_idx: int) -> None:
        super().__init__(config, layer_idx)
        settings: InfiniAttentionConfig = config.infini_attention
        self.gate = None
        if settings.has_memory(layer_idx):
            self.gate = Gate(config.num_attention_heads, settings.balance_act_type)
            # A parameter that no loss reaches must not wait for a gradient: DistributedDataParallel would.
            self.gate.requires_grad_(settings.turn_on_memory)

    def forward(
        self,
        hidden_states: Tensor,
        position_embeddings: tuple[Tensor, Tensor],
        segments: Segments | StreamPlan,
        carry: Carry | None = None,
        **kwargs,
    ) -> tuple[Tensor, None]:
        """[B, T, hidden] -> [B, T, hidden]. The rotary tables are those of `segments.positions`."""
        settings: InfiniAttentionConfig = self.config.infini_attention
        gate = self.gate if settings.turn_on_memory else None
        query_BTHK, key_BTGK, value_BTGK = self._project(hidden_states)
        if isinstance(segments, StreamPlan):
            state = segments.states[self.layer_idx]
            mixed_BTHK = attend_by_stream(
                query_BTHK, key_BTGK, value_BTGK, position_embeddings, gate, state, segments, self.scaling
            )
        elif settings.backend == "loop":
            mixed_BTHK = attend_by_loop(
                query_BTHK, key_BTGK, value_BTGK, position_embeddings, gate, segments, settings, self.scaling
            )
        else:
            mixed_BTHK = self._attend(query_BTHK, key_BTGK, value_BTGK, position_embeddings, gate, segments, carry)
        return self.o_proj(mixed_BTHK.flatten(2)), None

    def _project(self, hidden_states: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        shape = (*hidden_states.shape[:2], -1, self.head_dim)
        query, key, value = (p(hidden_states).view(shape) for p in (self.q_proj, self.k_proj, self.v_proj))
        if hasattr(self, "q_norm"):
            query, key = self.q_norm(query), self.k_norm(key)
        return query, key, value

    def _attend(
        self, query_BTHK, key_BTGK, value_BTGK, position_embeddings, gate, segments: Segments, carry: Carry | None
    ) -> Tensor:
        settings = self.config.infini_attention
        query_NSHK, key_NSGK, value_NSGK = (segments.fold(x) for x in (query_BTHK, key_BTGK, value_BTGK))
        local_NSHK = self._attend_locally(query_NSHK, key_NSGK, value_NSGK, position_embeddings)
        if gate is None:
            return segments.unfold(local_NSHK)

        prepare = normalise if settings.memory_qk_norm else _keep
        if choose_backend(settings, segments, query_BTHK.shape[1], self.head_dim) == "attention":
            document_BT, index_BT = segments.places(query_BTHK.device)
            is_past_BTT = (document_BT[:, :, None] == document_BT[:, None]) & (index_BT[:, :, None] > index_BT[:, None])
            memory_BTHK = read_by_attention(
                prepare(query_BTHK), prepare(key_BTGK), value_BTGK, is_past_BTT, settings.memory_eps
            )
            _, memory_RSHK = segments.split(segments.fold(memory_BTHK))
        else:
            memory_RSHK = self._read_by_scan(query_NSHK, key_NSGK, value_NSGK, segments, carry)
        # Runs with R = 0 too: then the gates get a zero gradient instead of none, as data-parallel training needs it.
        first, rest_RSHK = segments.split(local_NSHK)
        mixed_RSHK = gate(rest_RSHK, memory_RSHK)
        if isinstance(segments, SlottedSegments) and settings.first_segment == "bypass":
            mixed_RSHK = torch.where(segments.starts, rest_RSHK.to(mixed_RSHK.dtype), mixed_RSHK)
        if settings.first_segment == "gated":
            first = first * (1 - gate.share(memory_RSHK))
        return segments.unfold(segments.join(first.to(local_NSHK.dtype), mixed_RSHK.to(local_NSHK.dtype)))

    def _read_by_scan(self, query_NSHK, key_NSGK, value_NSGK, segments: Segments, carry: Carry | None) -> Tensor:
        settings = self.config.infini_attention
        prepare = normalise if settings.memory_qk_norm else _keep
        rule, eps = settings.memory_update, settings.memory_eps
        memory_RGKV, normalizer_RGK = memories_by_scan(
            prepare(segments.previous(key_NSGK)),
            segments.previous(value_NSGK),
            segments,
            rule,
            eps,
            settings.detach_every_n_segments,
            carry.found.get(self.layer_idx) if carry is not None else None,
        )
        if carry is not None:
            with torch.no_grad():
                last = segments.last_B
                before = (memory_RGKV[last], normalizer_RGK[last])
                added = write_segment(prepare(key_NSGK[last]), value_NSGK[last], *before, rule, eps)
                carry.left[self.layer_idx] = tuple(x + more for x, more in zip(before, added, strict=True))
        query_RSHK = prepare(segments.split(query_NSHK)[1])
        return read_memory(query_RSHK, memory_RGKV, normalizer_RGK, eps).transpose(1, 2)

    def _attend_locally(self, query_NSHK, key_NSGK, value_NSGK, position_embeddings) -> Tensor:
        # Empty places stand after a segment's tokens, where causal attention never looks: no mask is needed.
        query_NHSK, key_NGSK = apply_rotary_pos_emb(
            query_NSHK.transpose(1, 2), key_NSGK.transpose(1, 2), *position_embeddings
        )
        local_NHSK = scaled_dot_product_attention(
            query_NHSK,
            key_NGSK,
            value_NSGK.transpose(1, 2),
            dropout_p=self.attention_dropout if self.training else 0.0,
            is_causal=True,
            scale=self.scaling,
            enable_gqa=self.num_key_value_groups > 1,
        )
        return local_NHSK.transpose(1, 2)


def choose_backend(settings: InfiniAttentionConfig, segments: Segments, row_length: int, head_size: int) -> str:
    """The faster of the two fast ways to read the memory.

    Per token and head the scan moves head_size^2 / segment numbers of state, the attention form row_length weights.
    They break even near 2 to 1 (`benchmarks/bench_backends.py`, CPU): only short rows of very short segments want
    the attention form.
    """
    if isinstance(segments, SlottedSegments):
        return "scan"
    if settings.backend != "auto":
        return settings.backend
    if settings.memory_update == "delta" or settings.detach_every_n_segments is not None:
        return "scan"
    return "attention" if 2 * row_length * segments.width <= head_size**2 else "scan"


def _keep(x: Tensor) -> Tensor:
    return x
