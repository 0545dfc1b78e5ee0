"""Token ids -> hidden states -> logits, for any transformers family of Llama's build.

`InfiniModelMixin` and `InfiniForCausalLMMixin` go before a family's model classes; `llama.py` shows how little is left
to say. The model finds the segments of a batch once and hands them to every layer as a plain argument, so a layer that
is recomputed for gradient checkpointing sees what it saw before. No state is kept between two calls.
"""

from torch import LongTensor, Tensor, arange, nn
from transformers import PreTrainedModel
from transformers.modeling_outputs import BaseModelOutputWithPast
from transformers.utils.output_capturing import capture_outputs

from packhorse.models.attention import InfiniAttentionMixin
from packhorse.models.segments import Segments, split_into_segments


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
        if isinstance(module, InfiniAttentionMixin):
            module.reset_gate()


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
        past_key_values: None = None,
        inputs_embeds: Tensor | None = None,
        use_cache: bool | None = None,
        segments: Segments | None = None,
        **kwargs,
    ) -> BaseModelOutputWithPast:
        """Hidden states [B, T, hidden] of every token.

        Args:
            input_ids: [B, T].
            attention_mask: [B, T], 0 for padding on either side. A packed row needs none.
            position_ids: [B, T], restarting at 0 for every document of a packed row. Without them, one document a row.
            past_key_values: not supported; must be None.
            inputs_embeds: [B, T, hidden], instead of `input_ids`.
            use_cache: has no effect, nothing is cached.
            segments: what `split_into_segments` makes of the two above, if a data loader has done it already.
            kwargs: passed on to the layers.
        """
        if (input_ids is None) == (inputs_embeds is None):
            raise ValueError("Give either input_ids or inputs_embeds, and not both.")
        if past_key_values is not None:
            raise ValueError("Infini-attention cannot continue from a key/value cache: pass the whole text again.")
        if attention_mask is not None and attention_mask.dim() != 2:
            raise ValueError(
                f"attention_mask must be [batch, tokens], got shape {tuple(attention_mask.shape)}: which token sees "
                "which follows from position_ids."
            )
        hidden_states = self.embed_tokens(input_ids) if inputs_embeds is None else inputs_embeds
        if segments is None:
            segment_length = self.config.infini_attention.segment_length
            segments = split_into_segments(hidden_states.shape[:2], segment_length, position_ids, attention_mask)
        segments = segments.to(hidden_states.device)
        place_1S = arange(segments.width, device=hidden_states.device)[None]
        position_embeddings = self.rotary_emb(hidden_states, position_ids=place_1S)

        for layer in self.layers:
            hidden_states = layer(
                hidden_states, position_embeddings=position_embeddings, segments=segments, use_cache=False, **kwargs
            )
        return BaseModelOutputWithPast(last_hidden_state=self.norm(hidden_states))


class InfiniForCausalLMMixin:
    """Logits, and generation without a cache: every new token reads the whole text. Only to be inherited from."""

    infini_model_class: type[InfiniModelMixin]

    def __init__(self, config) -> None:
        # Past the family's own constructor, which would build a plain model first and throw it away.
        PreTrainedModel.__init__(self, config)
        self.model = self.infini_model_class(config)
        self.vocab_size = config.vocab_size
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.post_init()

    def _prepare_cache_for_generation(self, generation_config, model_kwargs: dict, *args, **kwargs) -> None:
        # The only place where transformers decides between feeding one token and feeding the whole text.
        if model_kwargs.get("past_key_values") is not None:
            raise ValueError("Infini-attention cannot continue from a key/value cache: pass the whole text again.")
        if model_kwargs.get("inputs_embeds") is not None:
            raise ValueError(
                "generate() without a cache needs input_ids: it cannot embed new tokens after inputs_embeds."
            )
        generation_config.use_cache = False
