"""Laws of the Llama model: transformers' own where memory has nothing to say, and it loads, saves and pads like it."""

import subprocess
import sys

import pytest
import torch
from transformers import AutoConfig, AutoModel, AutoModelForCausalLM, DynamicCache, LlamaConfig, LlamaForCausalLM

from packhorse.models import (
    InfiniAttentionConfig,
    InfiniLlamaConfig,
    InfiniLlamaForCausalLM,
    InfiniLlamaModel,
    gate_parameters,
    gate_values,
    split_into_segments,
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
    "eos_token_id": None,
}


@pytest.fixture(autouse=True)
def _one_thread_and_seed():
    torch.set_num_threads(1)
    torch.manual_seed(0)


def make_model(**settings) -> InfiniLlamaForCausalLM:
    sizes = {name: settings.pop(name) for name in list(settings) if name not in InfiniAttentionConfig.__annotations__}
    infini_attention = {"segment_length": 8, "balance_init_type": "randn", **settings}
    return InfiniLlamaForCausalLM(InfiniLlamaConfig(**{**SIZES, **sizes}, infini_attention=infini_attention)).eval()


@pytest.fixture
def plain_checkpoint(tmp_path):
    plain = LlamaForCausalLM(LlamaConfig(**SIZES)).eval()
    plain.save_pretrained(tmp_path / "plain")
    return plain, tmp_path / "plain"


@pytest.mark.parametrize("length", [1, 5, 8])
def test_a_document_of_one_segment_gets_exactly_llamas_logits(plain_checkpoint, length):
    plain, path = plain_checkpoint
    config = InfiniLlamaConfig.from_base(plain.config, {"segment_length": 8, "balance_init_type": "randn"})
    model = InfiniLlamaForCausalLM.from_pretrained(path, config=config).eval()
    input_ids = torch.randint(0, VOCAB, (3, length))
    assert torch.equal(model(input_ids).logits, plain(input_ids).logits)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_a_document_of_one_segment_gets_exactly_llamas_logits_in_every_dtype(plain_checkpoint, dtype):
    plain, path = plain_checkpoint
    config = InfiniLlamaConfig.from_base(plain.config, {"segment_length": 8, "balance_init_type": "randn"})
    model = InfiniLlamaForCausalLM.from_pretrained(path, config=config, dtype=dtype).eval()
    input_ids = torch.randint(0, VOCAB, (3, 8))
    expected = LlamaForCausalLM.from_pretrained(path, dtype=dtype).eval()(input_ids).logits
    assert torch.equal(model(input_ids).logits, expected)


def test_a_plain_checkpoint_loads_and_only_gates_are_new(plain_checkpoint):
    plain, path = plain_checkpoint
    config = InfiniLlamaConfig.from_base(plain.config, {"balance_init_type": "constant", "balance_init_value": -4.0})
    model, report = InfiniLlamaForCausalLM.from_pretrained(path, config=config, output_loading_info=True)
    assert set(report["missing_keys"]) == {f"model.layers.{layer}.self_attn.gate.weight" for layer in range(2)}
    assert not report["unexpected_keys"]
    assert not report["mismatched_keys"]
    assert all((gate == -4).all() for gate in gate_parameters(model))
    for name, value in plain.state_dict().items():
        assert torch.equal(model.state_dict()[name], value)


@pytest.mark.parametrize(
    ("settings", "check"),
    [
        ({"balance_init_type": "zeros"}, lambda gates: (gates == 0).all()),
        ({"balance_init_type": "constant", "balance_init_value": 1.5}, lambda gates: (gates == 1.5).all()),
        ({"balance_init_type": "randn"}, lambda gates: 0.5 < gates.std() < 1.6 and len(gates.unique()) == 32),
    ],
)
def test_gates_start_as_configured(settings, check):
    model = make_model(**settings, hidden_size=64, num_attention_heads=16)
    assert check(torch.cat(gate_parameters(model)))
    assert gate_values(model).shape == (2, 16)


def test_save_load_and_the_auto_classes_round_trip_to_the_same_logits(tmp_path):
    model = make_model(balance_act_type="hard_sigmoid", first_segment="gated", memory_eps=1e-5)
    model.save_pretrained(tmp_path)
    input_ids = torch.randint(0, VOCAB, (2, 21))
    expected = model(input_ids).logits
    assert AutoConfig.from_pretrained(tmp_path).infini_attention == model.config.infini_attention
    for loader in (InfiniLlamaForCausalLM, AutoModelForCausalLM):
        loaded = loader.from_pretrained(tmp_path)
        assert type(loaded) is InfiniLlamaForCausalLM
        assert torch.equal(loaded(input_ids).logits, expected)
    body = AutoModel.from_pretrained(tmp_path)
    assert type(body) is InfiniLlamaModel
    assert torch.equal(body(input_ids).last_hidden_state, model.model(input_ids).last_hidden_state)
    assert type(AutoModelForCausalLM.from_config(model.config)) is InfiniLlamaForCausalLM


def test_gates_stay_in_fp32_however_the_model_is_cast(tmp_path):
    model = make_model(balance_init_type="constant", balance_init_value=2.001)
    model.save_pretrained(tmp_path)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.bfloat16)
    for cast in (loaded, make_model(**{"balance_init_type": "constant", "balance_init_value": 2.001}).bfloat16()):
        assert cast.dtype == torch.bfloat16
        assert "self_attn.gate" in cast._keep_in_fp32_modules_strict, "what transformers' loaders promise to respect"
        for gate in gate_parameters(cast):
            assert gate.dtype == torch.float32
            assert (gate == torch.tensor(2.001)).all(), "a trip through bf16 would round it to 2"
        assert cast(torch.randint(0, VOCAB, (1, 20))).logits.dtype == torch.bfloat16


@pytest.mark.parametrize("backend", ["scan", "attention", "loop"])
@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("positions", ["none", "from the mask"])
def test_a_padded_row_gets_the_logits_it_gets_alone(side, positions, backend):
    model = make_model(backend=backend)
    lengths, longest = [3, 8, 19, 24], 24
    texts = [torch.randint(0, VOCAB, (length,)) for length in lengths]
    input_ids = torch.full((4, longest), 7)
    attention_mask = torch.zeros(4, longest, dtype=torch.long)
    places = [slice(longest - n, longest) if side == "left" else slice(0, n) for n in lengths]
    for row, (text, place) in enumerate(zip(texts, places, strict=True)):
        input_ids[row, place], attention_mask[row, place] = text, 1
    inputs = {"attention_mask": attention_mask}
    if positions == "from the mask":
        inputs["position_ids"] = (attention_mask.cumsum(-1) - 1).clamp(min=0)
    logits = model(input_ids, **inputs).logits
    for row, (text, place) in enumerate(zip(texts, places, strict=True)):
        torch.testing.assert_close(logits[row, place], model(text[None]).logits[0], rtol=1e-5, atol=1e-5)
    assert logits.isfinite().all()
    if side == "left":  # the control: without the mask, padding is text
        assert (model(input_ids).logits[0, places[0]] - logits[0, places[0]]).abs().max() > 1e-2


def test_padding_that_restarts_at_zero_is_a_document_nobody_reads():
    model = make_model()
    text, tail = torch.randint(0, VOCAB, (1, 19)), torch.randint(0, VOCAB, (2, 5))
    position_ids = torch.cat([torch.arange(19), torch.arange(5)]).expand(2, -1)
    logits = model(torch.cat([text.expand(2, -1), tail], dim=1), position_ids=position_ids).logits[:, :19]
    assert torch.equal(logits[0], logits[1])
    torch.testing.assert_close(logits[:1], model(text).logits, rtol=1e-5, atol=1e-5)


def test_segments_found_beforehand_give_the_same_logits():
    model = make_model()
    position_ids = torch.cat([torch.arange(11), torch.arange(9)])[None]
    input_ids = torch.randint(0, VOCAB, (2, 20))
    segments = split_into_segments((2, 20), 8, position_ids)
    assert torch.equal(model(input_ids, segments=segments).logits, model(input_ids, position_ids=position_ids).logits)


@pytest.mark.parametrize(("backend", "rule"), [("scan", "linear"), ("attention", "linear"), ("scan", "delta")])
def test_gradient_checkpointing_gives_the_same_gradients(backend, rule):
    model = make_model(backend=backend, memory_update=rule).train()
    position_ids = torch.cat([torch.arange(11), torch.arange(18)])[None]
    input_ids = torch.randint(0, VOCAB, (2, 29))
    gradients, layer_calls = [], []
    model.model.layers[0].input_layernorm.register_forward_hook(lambda *_: layer_calls.append(1))
    for checkpointing in (False, True):
        model.gradient_checkpointing_enable() if checkpointing else model.gradient_checkpointing_disable()
        model.zero_grad()
        model(input_ids, position_ids=position_ids, labels=input_ids).loss.backward()
        gradients.append([parameter.grad.clone() for parameter in model.parameters()])
    assert len(layer_calls) == 3, "once plainly, twice with recomputation"
    assert all(torch.equal(one, other) for one, other in zip(*gradients, strict=True))


@pytest.mark.parametrize("rule", ["linear", "delta"])
def test_the_model_compiles_into_one_graph(rule):
    model = make_model(memory_update=rule).train()
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    input_ids = torch.randint(0, VOCAB, (2, 24))
    packed = split_into_segments((2, 24), 8, torch.cat([torch.arange(11), torch.arange(13)])[None])
    for inputs in ({}, {"segments": packed}):
        loss = compiled(input_ids, labels=input_ids, **inputs).loss
        loss.backward()
        torch.testing.assert_close(loss, model(input_ids, labels=input_ids, **inputs).loss)


def test_tied_embeddings_are_one_parameter_before_and_after_loading(tmp_path):
    model = make_model(tie_word_embeddings=True)
    model.save_pretrained(tmp_path)
    for each in (model, AutoModelForCausalLM.from_pretrained(tmp_path)):
        assert each.lm_head.weight is each.model.embed_tokens.weight
        assert "lm_head.weight" not in dict(each.named_parameters())


def test_training_makes_no_cache_whatever_the_configuration_says():
    model = make_model()
    assert model.config.use_cache
    input_ids = torch.randint(0, VOCAB, (1, 9))
    for mode in (model.train(), model.eval()):
        assert mode(input_ids, use_cache=True).past_key_values is None
        with torch.no_grad():
            assert mode(input_ids).past_key_values is None


@pytest.mark.parametrize("use_cache", [None, True, False])
def test_greedy_generation_equals_reading_everything_again(use_cache):
    model = make_model()
    prompt = torch.randint(0, VOCAB, (2, 13))
    options = {} if use_cache is None else {"use_cache": use_cache}
    generated = model.generate(prompt, max_new_tokens=7, do_sample=False, **options)
    expected = prompt
    for _ in range(7):
        expected = torch.cat([expected, model(expected).logits[:, -1:].argmax(-1)], dim=1)
    assert torch.equal(generated, expected)


def test_left_padded_prompts_generate_what_each_generates_alone():
    model = make_model()
    short, long = torch.randint(0, VOCAB, (1, 5)), torch.randint(0, VOCAB, (1, 18))
    input_ids = torch.cat([torch.cat([torch.full((1, 13), 7), short], dim=1), long])
    attention_mask = torch.ones_like(input_ids)
    attention_mask[0, :13] = 0
    together = model.generate(input_ids, attention_mask=attention_mask, max_new_tokens=6, do_sample=False)
    for row, prompt in enumerate((short, long)):
        alone = model.generate(prompt, max_new_tokens=6, do_sample=False)
        assert torch.equal(together[row, -6:], alone[0, -6:])


def test_sampling_and_beams_run():
    model, prompt = make_model(), torch.randint(0, VOCAB, (1, 10))
    assert model.generate(prompt, max_new_tokens=5, do_sample=True, top_k=5, num_return_sequences=2).shape == (2, 15)
    assert model.generate(prompt, max_new_tokens=5, do_sample=False, num_beams=3).shape == (1, 15)


def test_what_would_be_answered_wrongly_is_refused():
    model, prompt = make_model(), torch.randint(0, VOCAB, (1, 10))
    with pytest.raises(ValueError, match="InfiniCache"):
        model(prompt, past_key_values=DynamicCache())
    with pytest.raises(ValueError, match="InfiniCache"):
        model.generate(prompt, past_key_values=DynamicCache(), max_new_tokens=2)
    with pytest.raises(ValueError, match="constant size"):
        model.generate(prompt, cache_implementation="static", max_new_tokens=2)
    with pytest.raises(ValueError, match="attention_mask"):
        model(prompt, attention_mask=torch.ones(1, 1, 10, 10))
    with pytest.raises(ValueError, match="hides every token"):
        model(prompt, attention_mask=torch.zeros(1, 10))
    with pytest.raises(ValueError, match="input_ids"):
        model.model()


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"segment_length": 0}, "segment_length"),
        ({"memory_eps": 0.0}, "memory_eps"),
        ({"balance_act_type": "sigmoid"}, "balance_act_type must be one of orig_sigmoid"),
        ({"memory_update": "hebbian"}, "memory_update"),
        ({"memory_update": "delta", "backend": "attention"}, "what stood before"),
        ({"detach_every_n_segments": 0}, "detach_every_n_segments must be"),
        ({"detach_every_n_segments": 2, "backend": "attention"}, "has no memory"),
        ({"balance_init_value": -4.0}, "balance_init_type"),
        ({"segment_size": 8}, "has no field segment_size"),
        ({"balance_act_type": "tanh_abs"}, "never move"),
        (
            {"balance_act_type": "hard_sigmoid", "balance_init_type": "constant", "balance_init_value": -4.0},
            "never move",
        ),
    ],
)
def test_a_wrong_setting_is_refused_by_name(settings, message):
    with pytest.raises(ValueError, match=message):
        InfiniLlamaConfig(**SIZES, infini_attention=settings)


def test_the_models_room_imports_no_other_room_and_no_lightning():
    code = (
        "import sys, packhorse.models\n"
        "rooms = {name.split('.')[1] for name in sys.modules if name.startswith('packhorse.')}\n"
        "assert rooms == {'models'}, rooms\n"
        "assert not {'lightning', 'pytorch_lightning', 'datasets'} & set(sys.modules)\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
