"""Llama with Infini-attention, under the names that transformers' Auto classes know.

A plain Llama checkpoint loads as it is (only the gates are new), and with `first_segment: bypass` a document that fits
into one segment gets exactly the logits that plain Llama gives it.
"""

from transformers import AutoConfig, AutoModel, AutoModelForCausalLM, LlamaForCausalLM, LlamaModel
from transformers.models.llama.modeling_llama import LlamaAttention

from packhorse.models.attention import InfiniAttentionMixin
from packhorse.models.config import InfiniLlamaConfig
from packhorse.models.model import InfiniForCausalLMMixin, InfiniModelMixin, InfiniPreTrainedMixin


class InfiniLlamaAttention(InfiniAttentionMixin, LlamaAttention):
    """Llama's projections around Infini-attention."""


class InfiniLlamaModel(InfiniModelMixin, InfiniPreTrainedMixin, LlamaModel):
    """Token ids -> hidden states."""

    config_class = InfiniLlamaConfig
    infini_attention_class = InfiniLlamaAttention


class InfiniLlamaForCausalLM(InfiniForCausalLMMixin, InfiniPreTrainedMixin, LlamaForCausalLM):
    """Token ids -> logits."""

    config_class = InfiniLlamaConfig
    infini_model_class = InfiniLlamaModel


AutoConfig.register(InfiniLlamaConfig.model_type, InfiniLlamaConfig)
AutoModel.register(InfiniLlamaConfig, InfiniLlamaModel)
AutoModelForCausalLM.register(InfiniLlamaConfig, InfiniLlamaForCausalLM)
