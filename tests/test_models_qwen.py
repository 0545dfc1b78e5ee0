"""Laws of the Qwen2 and Qwen3 models: those of Llama, and no sliding windows."""

from collections import namedtuple

import pytest
import torch
from transformers import (
    AutoConfig,
    AutoModel,
    AutoModelForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from packhorse.models import (
    InfiniQwen2Config,
    InfiniQwen2ForCausalLM,
    InfiniQwen2Model,
    InfiniQwen3Config,
    InfiniQwen3ForCausalLM,
    InfiniQwen3Model,
    gate_parameters,
)

VOCAB = 61
SIZES = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "initializer_range": 0.3,
}
Family = namedtuple("Family", "plain_config plain config model body sizes")
FAMILIES = {
    "qwen2": Family(Qwen2Config, Qwen2ForCausalLM, InfiniQwen2Config, InfiniQwen2ForCausalLM, InfiniQwen2Model, SIZES),
    "qwen3": Family(
        Qwen3Config,
        Qwen3ForCausalLM,
        InfiniQwen3Config,
        InfiniQwen3ForCausalLM,
        InfiniQwen3Model,
        {**SIZES, "head_dim": 12},  # Qwen3's head size is its own, not hidden_size / heads
    ),
}


@pytest.fixture(autouse=True)
def _one_thread_and_seed():
    torch.set_num_threads(1)
    torch.manual_seed(0)


@pytest.fixture(params=FAMILIES)
def family(request) -> Family:
    return FAMILIES[request.param]


def make_model(family: Family, **settings):
    infini_attention = {"segment_length": 8, "balance_init_type": "randn", **settings}
    model = family.model(family.config(**family.sizes, infini_attention=infini_attention)).eval()
    return randomise_small_parameters(model)


def randomise_small_parameters(model):
    """Biases start at 0 and norms at 1: a model that lost them would look right."""
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("bias") or "norm" in name:
                parameter.add_(torch.randn_like(parameter) / 2)
    return model


@pytest.mark.parametrize("tie", [False, True])
@pytest.mark.parametrize("length", [1, 5, 8])
def test_a_plain_checkpoint_loads_and_a_document_of_one_segment_gets_exactly_its_logits(family, length, tie, tmp_path):
    plain = family.plain(family.plain_config(**family.sizes, tie_word_embeddings=tie)).eval()
    randomise_small_parameters(plain).save_pretrained(tmp_path)
    config = family.config.from_base(
        AutoConfig.from_pretrained(tmp_path), {"segment_length": 8, "balance_init_type": "randn"}
    )
    model, report = family.model.from_pretrained(tmp_path, config=config, output_loading_info=True)
    assert set(report["missing_keys"]) == {f"model.layers.{layer}.self_attn.gate.weight" for layer in range(2)}
    assert not report["unexpected_keys"]
    input_ids = torch.randint(0, VOCAB, (3, length))
    assert torch.equal(model.eval()(input_ids).logits, plain(input_ids).logits)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_a_document_of_one_segment_gets_exactly_the_plain_logits_in_every_dtype(family, dtype, tmp_path):
    plain = randomise_small_parameters(family.plain(family.plain_config(**family.sizes)))
    plain.save_pretrained(tmp_path)
    config = family.config.from_base(plain.config, {"segment_length": 8, "balance_init_type": "randn"})
    input_ids = torch.randint(0, VOCAB, (3, 8))
    plain = family.plain.from_pretrained(tmp_path, dtype=dtype).eval()
    model = family.model.from_pretrained(tmp_path, config=config, dtype=dtype).eval()
    assert torch.equal(model(input_ids).logits, plain(input_ids).logits)


@pytest.mark.parametrize("rule", ["linear", "delta"])
def test_save_load_and_the_auto_classes_round_trip_to_the_same_logits(family, rule, tmp_path):
    model = make_model(family, memory_update=rule)
    model.save_pretrained(tmp_path)
    input_ids = torch.randint(0, VOCAB, (2, 21))
    assert type(AutoConfig.from_pretrained(tmp_path)) is family.config
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert type(loaded) is family.model
    assert type(AutoModel.from_pretrained(tmp_path)) is family.body
    assert loaded.config.infini_attention == model.config.infini_attention
    assert torch.equal(loaded(input_ids).logits, model(input_ids).logits)
    in_bf16 = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.bfloat16)
    assert in_bf16.dtype == torch.bfloat16
    assert all(gate.dtype == torch.float32 for gate in gate_parameters(in_bf16))


@pytest.mark.parametrize("backend", ["scan", "loop"])
@pytest.mark.parametrize("rule", ["linear", "delta"])
def test_a_packed_document_gets_the_logits_it_gets_alone(family, rule, backend):
    model = make_model(family, memory_update=rule, backend=backend)
    lengths = (5, 17, 7, 24)
    input_ids = torch.randint(0, VOCAB, (1, sum(lengths)))
    position_ids = torch.cat([torch.arange(length) for length in lengths])[None]
    together = model(input_ids, position_ids=position_ids).logits.split(lengths, dim=1)
    without_restarts = model(input_ids).logits.split(lengths, dim=1)
    for number, document in enumerate(input_ids.split(lengths, dim=1)):
        alone = model(document).logits
        torch.testing.assert_close(together[number], alone, rtol=1e-5, atol=1e-5)
        if number > 0:
            assert (without_restarts[number] - alone).abs().max() > 1e-2


def test_every_parameter_learns(family):
    """Biases and head norms are part of the memory path too."""
    model = make_model(family)
    model(torch.randint(0, VOCAB, (1, 29)), labels=torch.randint(0, VOCAB, (1, 29))).loss.backward()
    silent = {name for name, parameter in model.named_parameters() if not (parameter.grad.abs() > 0).any()}
    assert not silent


def test_sliding_windows_are_refused_with_the_reason(family):
    sizes = {**family.sizes, "use_sliding_window": True, "sliding_window": 4, "max_window_layers": 1}
    with pytest.raises(ValueError, match=r"use_sliding_window.*segment"):
        family.config(**sizes)
    with pytest.raises(ValueError, match=r"use_sliding_window.*segment"):
        family.config.from_base(family.plain_config(**sizes))
    with pytest.raises(ValueError, match=r"sliding_attention.*segment"):
        family.config(**family.sizes, layer_types=["full_attention", "sliding_attention"])
