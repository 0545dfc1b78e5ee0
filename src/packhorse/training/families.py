"""What a new model can be built like, and which checkpoints can be continued."""

from dataclasses import fields
from typing import Any

from huggingface_hub.errors import StrictDataclassError
from transformers import AutoConfig, PreTrainedConfig, PreTrainedModel
from transformers.activations import ACT2FN

from packhorse.corpus.hub import offline_without_network
from packhorse.errors import SettingsError
from packhorse.models import (
    InfiniLlamaConfig,
    InfiniLlamaForCausalLM,
    InfiniQwen2Config,
    InfiniQwen2ForCausalLM,
    InfiniQwen3Config,
    InfiniQwen3ForCausalLM,
)

FAMILIES = {
    "llama": (InfiniLlamaConfig, InfiniLlamaForCausalLM),
    "qwen2": (InfiniQwen2Config, InfiniQwen2ForCausalLM),
    "qwen3": (InfiniQwen3Config, InfiniQwen3ForCausalLM),
}
"""A plain model's type -> its configuration and model with Infini-attention."""

_DERIVED = {"num_key_value_heads", "head_dim"}
_SIZES = _DERIVED | {
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "max_position_embeddings",
}


def check_config(config: dict[str, Any], family: str) -> None:
    """Refuse what transformers would swallow without a word, or stumble over later.

    Args:
        config: Fields of the family's transformers configuration.
        family: A key of `FAMILIES`.

    Raises:
        SettingsError: a field is not known, its value makes no sense, or heads do not fit.
    """
    known = {field.name for field in fields(FAMILIES[family][0])} - {"infini_attention"}
    if unknown := sorted(set(config) - known):
        raise SettingsError(f"`config` has no field {', '.join(unknown)}. Known are: {', '.join(sorted(known))}.")
    for name in sorted(_SIZES & set(config)):
        if not _is_size(config[name]) and not (config[name] is None and name in _DERIVED):
            raise SettingsError(f"`config.{name}` must be a whole number above 0, not {config[name]!r}.")
    try:
        made = FAMILIES[family][0](**config)
    except (StrictDataclassError, AttributeError) as error:  # a value of another type; a dtype that torch does not have
        raise SettingsError(f"`config` makes no sense: {' '.join(str(error).split())}") from None
    if made.hidden_act not in ACT2FN:
        raise SettingsError(f"`config.hidden_act` {made.hidden_act!r} is not one of {', '.join(sorted(ACT2FN))}.")
    hidden, heads, groups = made.hidden_size, made.num_attention_heads, made.num_key_value_heads
    width = getattr(made, "head_dim", None) or hidden // heads
    is_free = "head_dim" in config or family == "qwen3"
    if heads % groups or width % 2 or (hidden % heads and not is_free):
        raise SettingsError(
            f"`config` has hidden_size {hidden}, num_attention_heads {heads}, num_key_value_heads {groups}, so heads "
            f"of {width}.\nhidden_size must be a multiple of num_attention_heads (unless head_dim is given), that a "
            "multiple of num_key_value_heads, and the size of a head even, for rotary positions."
        )


def family_of(config: PreTrainedConfig) -> str:
    """The key in `FAMILIES` of a configuration, plain or with Infini-attention."""
    return config.model_type.removeprefix("infini_")


def plain_config(pretrained: str) -> PreTrainedConfig:
    """The configuration of a checkpoint that can be continued.

    Raises:
        SettingsError: there is none, or it is of another family.
    """
    try:
        with offline_without_network(pretrained):
            config = AutoConfig.from_pretrained(pretrained)
    except (OSError, ValueError) as error:
        raise SettingsError(f"The checkpoint {pretrained} cannot be loaded: {str(error).splitlines()[0]}") from None
    if family_of(config) not in FAMILIES:
        raise SettingsError(
            f"The checkpoint {pretrained} is a {config.model_type}; what can be continued is: {', '.join(FAMILIES)}."
        )
    return config


def allow_cache(model: PreTrainedModel) -> None:
    """Let a model generate at constant cost per token, whatever the configuration that it was trained with says.

    Many are saved with `use_cache: false`, for the sake of training; ours makes no cache in any case.
    """
    model.config.use_cache = model.generation_config.use_cache = True


def _is_size(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value > 0
