"""Qwen2 (and 2.5) and Qwen3 with Infini-attention, under the names that transformers' Auto classes know.

Plain checkpoints load as they are, only the gates are new. Qwen2 has biases on its projections and Qwen3 a norm on
every query and key head; both come before the memory as well as before local attention. Qwen2's large key biases make
its keys much alike, so its memory tends to the mean of the values; Qwen3's norm helps.
"""

from transformers import (
    AutoConfig,
    AutoModel,
    AutoModelForCausalLM,
    Qwen2ForCausalLM,
    Qwen2Model,
    Qwen3ForCausalLM,
    Qwen3Model,
)
from transformers.models.qwen2.modeling_qwen2 import Qwen2Attention
from transformers.models.qwen3.modeling_qwen3 import Qwen3Attention

from packhorse.models.attention import InfiniAttentionMixin
from packhorse.models.config import InfiniQwen2Config, InfiniQwen3Config
from packhorse.models.model import InfiniForCausalLMMixin, InfiniModelMixin, InfiniPreTrainedMixin


class InfiniQwen2Attention(InfiniAttentionMixin, Qwen2Attention):
    """Qwen2's projections around Infini-attention."""


class InfiniQwen2Model(InfiniModelMixin, InfiniPreTrainedMixin, Qwen2Model):
    """Token ids -> hidden states."""

    config_class = InfiniQwen2Config
    infini_attention_class = InfiniQwen2Attention


class InfiniQwen2ForCausalLM(InfiniForCausalLMMixin, InfiniPreTrainedMixin, Qwen2ForCausalLM):
    """Token ids -> logits."""

    config_class = InfiniQwen2Config
    infini_model_class = InfiniQwen2Model


class InfiniQwen3Attention(InfiniAttentionMixin, Qwen3Attention):
    """Qwen3's projections and head norms around Infini-attention."""


class InfiniQwen3Model(InfiniModelMixin, InfiniPreTrainedMixin, Qwen3Model):
    """Token ids -> hidden states."""

    config_class = InfiniQwen3Config
    infini_attention_class = InfiniQwen3Attention


class InfiniQwen3ForCausalLM(InfiniForCausalLMMixin, InfiniPreTrainedMixin, Qwen3ForCausalLM):
    """Token ids -> logits."""

    config_class = InfiniQwen3Config
    infini_model_class = InfiniQwen3Model


AutoConfig.register(InfiniQwen2Config.model_type, InfiniQwen2Config)
AutoModel.register(InfiniQwen2Config, InfiniQwen2Model)
AutoModelForCausalLM.register(InfiniQwen2Config, InfiniQwen2ForCausalLM)
AutoConfig.register(InfiniQwen3Config.model_type, InfiniQwen3Config)
AutoModel.register(InfiniQwen3Config, InfiniQwen3Model)
AutoModelForCausalLM.register(InfiniQwen3Config, InfiniQwen3ForCausalLM)
