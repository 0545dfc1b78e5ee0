"""Infini-attention for transformers models: tokens -> logits."""

from packhorse.models.config import InfiniAttentionConfig, InfiniLlamaConfig, InfiniQwen2Config, InfiniQwen3Config
from packhorse.models.gates import gate_parameters, gate_values
from packhorse.models.llama import InfiniLlamaForCausalLM, InfiniLlamaModel
from packhorse.models.qwen import (
    InfiniQwen2ForCausalLM,
    InfiniQwen2Model,
    InfiniQwen3ForCausalLM,
    InfiniQwen3Model,
)
from packhorse.models.segments import split_into_segments
from packhorse.models.slots import segments_in_buckets
from packhorse.models.state import MemoryState
from packhorse.models.streaming import InfiniCache

__all__ = [
    "InfiniAttentionConfig",
    "InfiniCache",
    "InfiniLlamaConfig",
    "InfiniLlamaForCausalLM",
    "InfiniLlamaModel",
    "InfiniQwen2Config",
    "InfiniQwen2ForCausalLM",
    "InfiniQwen2Model",
    "InfiniQwen3Config",
    "InfiniQwen3ForCausalLM",
    "InfiniQwen3Model",
    "MemoryState",
    "gate_parameters",
    "gate_values",
    "segments_in_buckets",
    "split_into_segments",
]
