"""Laws of the conversion: a nanotron model's tensors give the logits that nanotron's equations give."""

import math

import pytest
import torch

from packhorse.models import InfiniLlamaConfig, InfiniLlamaForCausalLM, gate_parameters
from packhorse.models.nanotron import convert_nanotron

HIDDEN, HEADS, GROUPS, SIZE, INNER, VOCAB, SEGMENT, LAYERS = 32, 4, 2, 8, 48, 61, 8, 2


def tensors() -> dict[str, torch.Tensor]:
    """What a nanotron checkpoint holds."""
    torch.manual_seed(0)

    def draw(*shape):
        return torch.randn(*shape) * 0.3

    found = {
        "model.token_position_embeddings.pp_block.token_embedding.weight": draw(VOCAB, HIDDEN),
        "model.final_layer_norm.pp_block.weight": 1 + draw(HIDDEN),
        "model.lm_head.pp_block.weight": draw(VOCAB, HIDDEN),
    }
    for layer in range(LAYERS):
        found |= {
            f"model.decoder.{layer}.pp_block.{name}": value
            for name, value in {
                "attn.qkv_proj.weight": draw((HEADS + 2 * GROUPS) * SIZE, HIDDEN),
                "attn.o_proj.weight": draw(HIDDEN, HEADS * SIZE),
                "attn.balance_factors": draw(HEADS),
                "mlp.gate_up_proj.weight": draw(2 * INNER, HIDDEN),
                "mlp.down_proj.weight": draw(HIDDEN, INNER),
                "input_layernorm.weight": 1 + draw(HIDDEN),
                "post_attention_layernorm.weight": 1 + draw(HIDDEN),
            }.items()
        }
    return found


def config() -> InfiniLlamaConfig:
    return InfiniLlamaConfig(
        vocab_size=VOCAB,
        hidden_size=HIDDEN,
        intermediate_size=INNER,
        num_hidden_layers=LAYERS,
        num_attention_heads=HEADS,
        num_key_value_heads=GROUPS,
        infini_attention={
            "segment_length": SEGMENT,
            "memory_update": "delta",
            "first_segment": "gated",
            "balance_act_type": "hard_sigmoid",
        },
    )


def norm(x, weight):
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6) * weight


def turn_pairs(x_HSK):
    """Rotary embedding of neighbouring pairs, positions from 0 in every segment."""
    frequency = 10_000.0 ** (-torch.arange(0, SIZE, 2) / SIZE)
    turn = torch.polar(torch.ones(1), torch.arange(x_HSK.shape[1])[:, None] * frequency)
    return torch.view_as_real(torch.view_as_complex(x_HSK.unflatten(-1, (-1, 2)).contiguous()) * turn).flatten(-2)


def nanotron_logits(found, input_ids):
    """The equations, one text, with nanotron's tensors as they are."""
    x = found["model.token_position_embeddings.pp_block.token_embedding.weight"][input_ids]
    for layer in range(LAYERS):
        own = {name.split("pp_block.")[1]: t for name, t in found.items() if f"decoder.{layer}." in name}
        h = norm(x, own["input_layernorm.weight"]) @ own["attn.qkv_proj.weight"].T
        q, k, v = h.unflatten(-1, (-1, SIZE)).transpose(0, 1).split([HEADS, GROUPS, GROUPS])
        k, v = (t.repeat_interleave(HEADS // GROUPS, 0) for t in (k, v))
        gate = (0.2 * own["attn.balance_factors"] + 0.5).clamp(0, 1)[:, None, None]
        memory, total, outputs = torch.zeros(HEADS, SIZE, SIZE), torch.zeros(HEADS, SIZE, 1), []
        for qs, ks, vs in zip(*(t.split(SEGMENT, 1) for t in (q, k, v)), strict=True):
            scores = turn_pairs(qs) @ turn_pairs(ks).mT / math.sqrt(SIZE)
            future = torch.ones(scores.shape[-2:]).triu(1).bool()
            local = scores.masked_fill(future, -math.inf).softmax(-1) @ vs
            sq, sk = (torch.nn.functional.elu(t) + 1 for t in (qs, ks))
            read = sq @ memory / (sq @ total + 1e-6)
            outputs.append(gate * read + (1 - gate) * local)
            new = vs - sk @ memory / (sk @ total + 1e-6)
            memory, total = memory + sk.mT @ new, total + sk.sum(1).unsqueeze(-1)
        x = x + torch.cat(outputs, 1).transpose(0, 1).flatten(1) @ own["attn.o_proj.weight"].T
        up = norm(x, own["post_attention_layernorm.weight"]) @ own["mlp.gate_up_proj.weight"].T
        x = x + (torch.nn.functional.silu(up[:, :INNER]) * up[:, INNER:]) @ own["mlp.down_proj.weight"].T
    return norm(x, found["model.final_layer_norm.pp_block.weight"]) @ found["model.lm_head.pp_block.weight"].T


def test_a_converted_checkpoint_gives_the_logits_of_nanotrons_equations():
    found = tensors()
    model = InfiniLlamaForCausalLM(config()).eval()
    model.load_state_dict(convert_nanotron(found, model.config))
    input_ids = torch.randint(0, VOCAB, (29,))
    expected = nanotron_logits(found, input_ids)
    torch.testing.assert_close(model(input_ids[None]).logits[0], expected, rtol=1e-4, atol=1e-4)
    model.load_state_dict(convert_nanotron(found, model.config, rope_interleaved=False))
    assert (model(input_ids[None]).logits[0] - expected).abs().max() > 1e-2, (
        "the control: rows of a head in their order"
    )


def test_balance_factors_become_gates_in_fp32():
    found = {name: x.bfloat16() for name, x in tensors().items()}
    found["model.decoder.1.pp_block.attn.balance_factors"] = torch.full((1, HEADS, 1, 1), 2.5, dtype=torch.bfloat16)
    model = InfiniLlamaForCausalLM(config())
    model.load_state_dict(convert_nanotron(found, model.config))
    assert gate_parameters(model)[1].tolist() == [2.5] * HEADS
    assert gate_parameters(model)[0].dtype == torch.float32


def test_a_checkpoint_without_its_gates_is_refused():
    found = {name: x for name, x in tensors().items() if "decoder.1.pp_block.attn.balance" not in name}
    with pytest.raises(ValueError, match=r"balance_factors of layers \[1\] are missing"):
        convert_nanotron(found, config())


@pytest.mark.parametrize("name", ["model.decoder.0.pp_block.attn.rotary", "optimizer.state"])
def test_an_unknown_tensor_is_refused_by_name(name):
    with pytest.raises(ValueError, match=name.split(".")[-1]):
        convert_nanotron({**tensors(), name: torch.zeros(1)}, config())
