"""Infini-attention for transformers models: tokens -> logits."""

from packhorse.models.config import InfiniAttentionConfig, InfiniLlamaConfig
from packhorse.models.gates import gate_parameters, gate_values
from packhorse.models.llama import InfiniLlamaForCausalLM, InfiniLlamaModel
from packhorse.models.segments import split_into_segments

__all__ = [
    "InfiniAttentionConfig",
    "InfiniLlamaConfig",
    "InfiniLlamaForCausalLM",
    "InfiniLlamaModel",
    "gate_parameters",
    "gate_values",
    "split_into_segments",
]
