"""Token ids -> hidden states -> logits, for any transformers family of Llama's build.

`InfiniModelMixin` and `InfiniForCausalLMMixin` go before a family's model classes; `llama.py` shows how little is left
to say. The model finds the segments of a batch once and hands them to every layer as a plain argument, so a layer that
is recomputed for gradient checkpointing sees what it saw before. Between two calls nothing is kept, except in the
`InfiniCache` that a caller hands in: `generate` makes one for itself, training never does.
"""

from torch import LongTensor, Tensor, is_grad_enabled, nn
from transformers import PreTrainedModel
from transformers.modeling_outputs import BaseModelOutputWithPast
from transformers.utils.output_capturing import capture_outputs

from packhorse.models.attention import InfiniAttentionMixin
from packhorse.models.config import InfiniAttentionConfig
from packhorse.models.gates import Gate
from packhorse.models.segments import Segments, split_into_segments
from packhorse.models.state import MemoryState
from packhorse.models.streaming import InfiniCache


class InfiniPreTrainedMixin:
    """What loading and initialising must know about the gates. Only to be inherited from."""

    # transformers 5.23 also keeps the dtype that a parameter was made with, but this list is what it promises to obey.
    _keep_in_fp32_modules_strict = ["self_attn.gate"]  # noqa: RUF012  (transformers reads a plain class attribute)
    # Local attention is always SDPA, over folded segments: transformers refuses what is named here.
    _supports_flash_attn = False
    _supports_flex_attn = False
    _supports_attention_backend = False

    def _init_weights(self, module) -> None:
        super()._init_weights(module)
        if isinstance(module, Gate):
            module.reset(self.config.infini_attention)


class InfiniModelMixin:
    """The decoder stack with Infini-attention in every layer. Only to be inherited from, before the family's model."""

    infini_attention_class: type[InfiniAttentionMixin]

    def __init__(self, config) -> None:
        super().__init__(config)
        for index, layer in enumerate(self.layers):
            layer.self_attn = self.infini_attention_class(config, index)
        self.post_init()

    @capture_outputs
    def forward(
        self,
        input_ids: LongTensor | None = None,
        attention_mask: Tensor | None = None,
        position_ids: LongTensor | None = None,
        past_key_values: InfiniCache | None = None,
        inputs_embeds: Tensor | None = None,
        use_cache: bool | None = None,
        segments: Segments | None = None,
        memory_state: MemoryState | None = None,
        **kwargs,
    ) -> BaseModelOutputWithPast:
        """Hidden states [B, T, hidden] of every token.

        Args:
            input_ids: [B, T].
            attention_mask: [B, T], 0 for padding on either side. A packed row needs none.
            position_ids: [B, T], restarting at 0 for every document of a packed row. Without them, one document a row.
            past_key_values: what earlier calls have read of the same rows; moved on by this call. Needs no_grad.
            inputs_embeds: [B, T, hidden], instead of `input_ids`.
            use_cache: True starts an `InfiniCache` if there is none, except where gradients are recorded.
            segments: what `split_into_segments` makes of the two above, if a data loader has done it already.
            memory_state: memories that rows of a long document go on with, in training; moved on by this call.
            kwargs: passed on to the layers.
        """
        if (input_ids is None) == (inputs_embeds is None):
            raise ValueError("Give either input_ids or inputs_embeds, and not both.")
        if past_key_values is None and memory_state is None and use_cache and not is_grad_enabled():
            past_key_values = InfiniCache(self.config)
        if past_key_values is not None:
            _check_cache(past_key_values, segments, memory_state)
        if attention_mask is not None and attention_mask.dim() != 2:
            raise ValueError(
                f"attention_mask must be [batch, tokens], got shape {tuple(attention_mask.shape)}: which token sees "
                "which follows from position_ids."
            )
        hidden_states = self.embed_tokens(input_ids) if inputs_embeds is None else inputs_embeds
        shape, device = hidden_states.shape[:2], hidden_states.device
        settings = self.config.infini_attention
        if past_key_values is not None:
            segments = past_key_values.plan(shape, attention_mask, position_ids, device)
        elif memory_state is not None:
            _check_state(settings, attention_mask, segments)
            segments, kwargs["carry"], seen_B = memory_state.begin(shape, settings.segment_length, position_ids)
            segments = segments.to(device)
        else:
            if segments is None:
                segments = split_into_segments(shape, settings.segment_length, position_ids, attention_mask)
            segments = segments.to(device)
        positions = segments.positions(settings.rotary_restart, device)
        position_embeddings = self.rotary_emb(hidden_states, position_ids=positions)

        for layer in self.layers:
            hidden_states = layer(
                hidden_states, position_embeddings=position_embeddings, segments=segments, use_cache=False, **kwargs
            )
        if past_key_values is not None:
            past_key_values.advance(segments)
        elif memory_state is not None:
            memory_state.advance(kwargs["carry"], seen_B)
        return BaseModelOutputWithPast(last_hidden_state=self.norm(hidden_states), past_key_values=past_key_values)


class InfiniForCausalLMMixin:
    """Logits, and generation from a state of constant size. Only to be inherited from."""

    infini_model_class: type[InfiniModelMixin]

    def __init__(self, config) -> None:
        # Past the family's own constructor, which would build a plain model first and throw it away.
        PreTrainedModel.__init__(self, config)
        self.model = self.infini_model_class(config)
        self.vocab_size = config.vocab_size
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.post_init()

    def _prepare_cache_for_generation(self, generation_config, model_kwargs: dict, *args, **kwargs) -> None:
        # Where transformers would make a cache that grows with the text.
        if generation_config.cache_implementation is not None:
            raise ValueError(
                f"cache_implementation {generation_config.cache_implementation!r} caches plain attention. Leave it "
                "out: Infini-attention brings its own cache, of constant size."
            )
        if (cache := model_kwargs.get("past_key_values")) is not None:
            _check_cache(cache)
        elif generation_config.use_cache is not False:
            model_kwargs["past_key_values"] = InfiniCache(self.config)


def _check_state(settings: InfiniAttentionConfig, attention_mask: Tensor | None, segments: Segments | None) -> None:
    if segments is not None or (attention_mask is not None and not bool(attention_mask.all())):
        raise ValueError(
            "With a memory_state give position_ids alone: rows are full, and it finds the segments by itself."
        )
    if settings.backend not in ("auto", "scan"):
        raise ValueError(f"backend {settings.backend!r} carries no memory from row to row. Set backend: auto.")


def _check_cache(cache: InfiniCache, segments: Segments | None = None, memory_state: MemoryState | None = None) -> None:
    if memory_state is not None:
        raise ValueError("Give either memory_state, to train, or past_key_values, to generate.")
    if not isinstance(cache, InfiniCache):
        raise ValueError(
            f"Infini-attention cannot continue from a {type(cache).__name__}: it keeps a memory, not all keys and "
            "values. Pass an InfiniCache, or leave past_key_values out."
        )
    if is_grad_enabled():
        raise ValueError(
            "An InfiniCache carries no gradients. Wrap the call in torch.no_grad(), or train on the whole text at once."
        )
    if segments is not None:
        raise ValueError("Give either segments or past_key_values: a cache finds the segments by itself.")
