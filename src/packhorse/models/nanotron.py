"""A nanotron Infini-attention checkpoint's tensors -> the names and layouts of InfiniLlamaForCausalLM.

    nanotron                                                       here
    model.token_position_embeddings.pp_block.token_embedding.weight    model.embed_tokens.weight
    model.decoder.<i>.pp_block.attn.qkv_proj.weight                    model.layers.<i>.self_attn.{q,k,v}_proj.weight
    model.decoder.<i>.pp_block.attn.o_proj.weight                      model.layers.<i>.self_attn.o_proj.weight
    model.decoder.<i>.pp_block.attn.balance_factors                    model.layers.<i>.self_attn.gate.weight
    model.decoder.<i>.pp_block.mlp.gate_up_proj.weight                 model.layers.<i>.mlp.{gate,up}_proj.weight
    model.decoder.<i>.pp_block.mlp.down_proj.weight                    model.layers.<i>.mlp.down_proj.weight
    model.decoder.<i>.pp_block.{input,post_attention}_layernorm.weight model.layers.<i>.<the same>
    model.final_layer_norm.pp_block.weight                             model.norm.weight
    model.lm_head.pp_block.weight                                      lm_head.weight

Nanotron's rotary embedding turns neighbouring pairs of a head's numbers, transformers' the first half against the
second, so the rows of queries and keys change places. The memory does not mind: its keys and queries change alike.
Tensor-parallel pieces must be joined before, on dimension 0 (1 for o_proj and down_proj).
"""

import re
from collections.abc import Mapping

from torch import Tensor

from packhorse.models.config import InfiniLlamaConfig

_WHOLE = {
    "model.token_position_embeddings.pp_block.token_embedding.weight": "model.embed_tokens.weight",
    "model.final_layer_norm.pp_block.weight": "model.norm.weight",
    "model.lm_head.pp_block.weight": "lm_head.weight",
}
_IN_LAYER = {
    "attn.o_proj.weight": "self_attn.o_proj.weight",
    "attn.balance_factors": "self_attn.gate.weight",
    "mlp.down_proj.weight": "mlp.down_proj.weight",
    "input_layernorm.weight": "input_layernorm.weight",
    "post_attention_layernorm.weight": "post_attention_layernorm.weight",
}
_LAYER = re.compile(r"model\.decoder\.(\d+)\.pp_block\.(.+)")


def convert_nanotron(
    tensors: Mapping[str, Tensor], config: InfiniLlamaConfig, rope_interleaved: bool = True
) -> dict[str, Tensor]:
    """A state dict for `InfiniLlamaForCausalLM(config).load_state_dict`, which refuses what is missing.

    Args:
        tensors: by nanotron's names, of the whole model.
        config: of the model; it needs `memory_update: delta` and `first_segment: gated` to compute what nanotron does.
        rope_interleaved: nanotron's model setting of this name; its default is True.

    Raises:
        ValueError: A name is unknown, or the gates are missing: they must not silently start anew.
    """
    converted: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        if name in _WHOLE:
            converted[_WHOLE[name]] = tensor
            continue
        match = _LAYER.fullmatch(name)
        if match is None:
            raise ValueError(f"{name} is not a name of a nanotron Llama. Known are those at the top of nanotron.py.")
        converted |= {
            f"model.layers.{match[1]}.{key}": value
            for key, value in _convert_layer(match[2], tensor, config, rope_interleaved).items()
        }
    if missing := [
        x for x in range(config.num_hidden_layers) if f"model.layers.{x}.self_attn.gate.weight" not in converted
    ]:
        raise ValueError(
            f"The balance_factors of layers {missing} are missing. Without them the gates would start anew, and the "
            "model would be another one."
        )
    return converted


def _convert_layer(name: str, tensor: Tensor, config: InfiniLlamaConfig, interleaved: bool) -> dict[str, Tensor]:
    if name in _IN_LAYER:
        # Nanotron keeps the factors with dimensions of 1 around, and in bf16; gates are fp32.
        return {_IN_LAYER[name]: tensor.flatten().float() if name == "attn.balance_factors" else tensor}
    if name == "attn.qkv_proj.weight":
        size = config.head_dim
        keys = config.num_key_value_heads * size
        query, key, value = tensor.split([config.num_attention_heads * size, keys, keys])
        if interleaved:
            query, key = _halves(query, size), _halves(key, size)
        return {f"self_attn.{x}_proj.weight": part for x, part in zip("qkv", (query, key, value), strict=True)}
    if name == "mlp.gate_up_proj.weight":
        gate, up = tensor.chunk(2)
        return {"mlp.gate_proj.weight": gate, "mlp.up_proj.weight": up}
    raise ValueError(
        f"{name} is not a name in a layer of a nanotron Llama: {', '.join(_IN_LAYER)}, or a joint projection."
    )


def _halves(weight: Tensor, head_size: int) -> Tensor:
    """Rows 0 1 2 3 4 5 of a head -> 0 2 4 1 3 5."""
    return weight.unflatten(0, (-1, head_size // 2, 2)).transpose(1, 2).flatten(0, 2)
