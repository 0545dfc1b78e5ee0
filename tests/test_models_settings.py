"""Laws of the settings: each does what it says, and what cannot be is refused by name."""

import pytest
import torch
from lightning.pytorch.plugins import HalfPrecision
from transformers import AutoModelForCausalLM

from packhorse.errors import SettingsError
from packhorse.models import (
    InfiniAttentionConfig,
    InfiniCache,
    InfiniLlamaConfig,
    InfiniLlamaForCausalLM,
    gate_parameters,
    gate_values,
)
from packhorse.training import LanguageModule
from packhorse.training.schedule import ScheduleSettings

VOCAB = 61
SIZES = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "initializer_range": 0.3,
}
LENGTHS = (5, 17, 7, 24)


@pytest.fixture(autouse=True)
def _one_thread_and_seed():
    torch.set_num_threads(1)
    torch.manual_seed(0)


def make_model(sizes=SIZES, **settings) -> InfiniLlamaForCausalLM:
    settings = {"segment_length": 8, "balance_init_type": "randn", **settings}
    return InfiniLlamaForCausalLM(InfiniLlamaConfig(**sizes, infini_attention=settings)).eval()


def packed() -> dict[str, torch.Tensor]:
    position_ids = torch.cat([torch.arange(length) for length in LENGTHS])[None]
    return {"input_ids": torch.randint(0, VOCAB, position_ids.shape), "position_ids": position_ids}


def copy_of(model, **settings) -> InfiniLlamaForCausalLM:
    """The same weights under other settings."""
    other = make_model(**{**model.config.to_dict()["infini_attention"], **settings})
    other.load_state_dict(model.state_dict(), strict=False)
    return other


def layer_outputs(model, inputs) -> list[torch.Tensor]:
    """What the attention of each layer says."""
    outputs = []
    for layer in model.model.layers:
        layer.self_attn.register_forward_hook(lambda *call: outputs.append(call[-1][0]))
    model(**inputs)
    return outputs


@pytest.mark.parametrize("backend", ["scan", "loop"])
def test_only_the_named_layers_have_a_memory_and_gates(backend):
    model, inputs = make_model(memory_layers=[1]), packed()
    assert [name for name, _ in model.named_parameters() if "self_attn.gate" in name] == [
        "model.layers.1.self_attn.gate.weight"
    ]
    assert gate_values(model).shape == (1, 4)
    outputs = layer_outputs(model, inputs)
    without = layer_outputs(copy_of(model, turn_on_memory=False), inputs)
    for got, expected in zip(outputs, layer_outputs(copy_of(model, backend=backend), inputs), strict=True):
        torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-5)
    assert torch.equal(outputs[0], without[0]), "layer 0 is local attention alone"
    assert (outputs[1] - without[1]).abs().max() > 1e-2, "layer 1 hears its memory"


def test_a_subset_of_layers_streams_saves_and_loads(tmp_path):
    model = make_model(memory_layers=(0, 2), memory_update="delta")
    input_ids = torch.randint(0, VOCAB, (2, 29))
    with torch.no_grad():
        cache = InfiniCache(model.config)
        streamed = torch.cat([model(x, past_key_values=cache).logits for x in input_ids.split(5, 1)], 1)
    torch.testing.assert_close(streamed, model(input_ids).logits, rtol=1e-4, atol=1e-5)
    assert ["memory" in layer.tensors for layer in cache.layers] == [True, False, True]
    model.save_pretrained(tmp_path)
    loaded, report = AutoModelForCausalLM.from_pretrained(tmp_path, output_loading_info=True)
    assert not report["missing_keys"]
    assert not report["unexpected_keys"]
    assert loaded.config.infini_attention.memory_layers == (0, 2)
    assert torch.equal(loaded(input_ids).logits, model(input_ids).logits)


@pytest.mark.parametrize("backend", ["scan", "loop", "stream"])
@pytest.mark.parametrize("shape", ["packed", "one document"])
def test_rotary_positions_restart_where_they_are_told_to(backend, shape):
    """Positions matter by their distances only, so both give the same values; the positions themselves differ."""
    model = make_model(backend="scan")
    inputs = packed() if shape == "packed" and backend != "stream" else {"input_ids": torch.randint(0, VOCAB, (2, 32))}
    expected = model(**inputs).logits
    other, seen = copy_of(model, rotary_restart="document", backend=backend if backend != "stream" else "scan"), []
    other.model.rotary_emb.register_forward_pre_hook(
        lambda module, args, kwargs: seen.append(kwargs["position_ids"]), with_kwargs=True
    )
    if backend == "stream":
        with torch.no_grad():
            cache = InfiniCache(other.config)
            got = torch.cat([other(x, past_key_values=cache).logits for x in inputs["input_ids"].split(13, 1)], 1)
    else:
        got = other(**inputs).logits
    longest = max(LENGTHS) if inputs.get("position_ids") is not None else 32
    assert max(int(x.max()) for x in seen) in (longest - 1, longest), "the last token's, or one unused place behind it"
    torch.testing.assert_close(got, expected, rtol=1e-4, atol=2e-5)


def test_rotary_positions_of_a_document_are_those_of_its_tokens():
    """Broken distances would show: positions counted from each segment's end would not."""
    model = make_model(rotary_restart="document")
    got = {}
    attention = model.model.layers[0].self_attn
    attention.register_forward_pre_hook(lambda m, a, k: got.update(k), with_kwargs=True)
    inputs = packed()
    model(**inputs)
    cos_BTK = got["segments"].unfold(got["position_embeddings"][0])
    expected, _ = model.model.rotary_emb(cos_BTK, position_ids=inputs["position_ids"])
    assert torch.equal(cos_BTK, expected)


def test_positions_that_change_with_the_batch_are_refused():
    rope = {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}
    with pytest.raises(ValueError, match=r"rotary_restart 'document'.*dynamic"):
        InfiniLlamaConfig(**SIZES, rope_parameters=rope, infini_attention={"rotary_restart": "document"})
    InfiniLlamaConfig(**SIZES, rope_parameters=rope)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"memory_layers": [0, 3]}, r"names \[3\], but the model has 3 layers"),
        ({"memory_layers": [1, 1]}, "memory_layers are different"),
        ({"memory_layers": []}, "turn_on_memory"),
        ({"memory_layers": [-1]}, "from 0 on"),
        ({"rotary_restart": "row"}, "rotary_restart must be one of"),
        ({"logging_interval": 0}, "logging_interval"),
    ],
)
def test_a_wrong_setting_is_refused_by_name(settings, message):
    with pytest.raises(ValueError, match=message):
        InfiniLlamaConfig(**SIZES, infini_attention=settings)


NANOTRON = {
    "segment_length": 64,
    "turn_on_memory": True,
    "balance_factor_lr": 0.00015,
    "balance_factor_weight_decay": 0.0,
    "balance_act_type": "hard_sigmoid",
    "balance_init_type": "zeros",
    "logging": True,
    "logging_interval": 2000,
    "log_grad": False,
    "log_segment_acts": False,
}


def test_the_infini_attention_block_of_a_nanotron_configuration_is_accepted_as_it_is():
    module = LanguageModule(infini_attention=InfiniAttentionConfig(**NANOTRON))
    assert module.balance_factor_lr == 0.00015
    assert module.balance_factor_weight_decay == 0.0
    assert InfiniLlamaConfig(**SIZES, infini_attention=NANOTRON).infini_attention.logging_interval == 2000


def test_the_module_takes_the_groups_of_a_yaml_as_plain_mappings():
    module = LanguageModule(infini_attention={"segment_length": 8}, schedule={"shape": "linear", "warmup_steps": 3})
    assert module.infini_attention == InfiniAttentionConfig(segment_length=8)
    assert module.schedule_settings == ScheduleSettings(shape="linear", warmup_steps=3)
    for group in ("infini_attention", "schedule"):
        with pytest.raises(ValueError, match=f"{group} has no field segments. It has: "):
            LanguageModule(**{group: {"segments": 8}})


def test_the_gates_learning_rate_may_stand_in_either_group_but_not_in_both():
    assert LanguageModule(balance_factor_lr=0.5).balance_factor_lr == 0.5
    assert LanguageModule().balance_factor_lr == 1e-2
    both = InfiniAttentionConfig(balance_factor_lr=0.5, balance_factor_weight_decay=None)
    assert LanguageModule(infini_attention=both, balance_factor_lr=0.5).balance_factor_lr == 0.5
    assert LanguageModule(infini_attention=both).balance_factor_weight_decay == 0.0
    with pytest.raises(SettingsError, match=r"0\.1 in `model` and 0\.5 in `model\.infini_attention`"):
        LanguageModule(infini_attention=both, balance_factor_lr=0.1)


def test_gates_stay_in_fp32_under_the_trainers_bf16_true():
    """What the plugin of `trainer.precision: bf16-true` does: another default dtype, then a cast of the module."""
    plugin = HalfPrecision("bf16-true")
    with plugin.module_init_context():
        model = make_model()
    model = plugin.convert_module(model).train()
    optimizer = torch.optim.AdamW([{"params": gate_parameters(model), "lr": 1e-3}], weight_decay=0.0)
    before = [gate.detach().clone() for gate in gate_parameters(model)]
    with plugin.forward_context():
        loss = model(**packed(), labels=torch.randint(0, VOCAB, (1, sum(LENGTHS)))).loss
    loss.backward()
    optimizer.step()
    assert model.dtype == torch.bfloat16
    for gate, start in zip(gate_parameters(model), before, strict=True):
        assert gate.dtype == torch.float32 == optimizer.state[gate]["exp_avg"].dtype
        moved = (gate - start).abs()
        torch.testing.assert_close(moved, torch.full_like(moved, 1e-3), rtol=1e-2, atol=1e-5)


def test_a_llama_with_layers_of_another_kind_is_refused():
    sizes = {**SIZES, "layer_types": ["full_attention", "sliding_attention", "full_attention"]}
    with pytest.raises(ValueError, match=r"sliding_attention.*segment"):
        InfiniLlamaConfig(**sizes)


def test_lora_finds_the_projections_and_keeps_the_gates(tmp_path):
    """Runs where peft is installed; it is not one of our dependencies."""
    peft = pytest.importorskip("peft")
    model = make_model(first_segment="gated")
    names = ["q_proj", "k_proj", "v_proj", "o_proj"]
    tuned = peft.get_peft_model(model, peft.LoraConfig(target_modules=names, modules_to_save=["gate"]))
    inputs = packed()
    tuned.train()(**inputs, labels=inputs["input_ids"]).loss.backward()
    learning = [name for name, p in tuned.named_parameters() if p.grad is not None and p.grad.abs().sum() > 0]
    assert sum("lora_B" in name for name in learning) == 3 * 4
    assert sum(".gate." in name for name in learning) == 3
    with torch.no_grad():
        for gate in (p for p in gate_parameters(tuned) if p.requires_grad):
            gate.add_(1)
    tuned.save_pretrained(tmp_path)
    torch.manual_seed(0)
    loaded = peft.PeftModel.from_pretrained(make_model(first_segment="gated"), tmp_path).eval()
    torch.testing.assert_close(loaded(**inputs).logits, tuned.eval()(**inputs).logits)
