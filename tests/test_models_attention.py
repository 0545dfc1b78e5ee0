"""Laws of the attention layer: every backend says what the literal loop says, and nothing looks where it must not."""

from dataclasses import replace

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from packhorse.models import (
    InfiniLlamaConfig,
    InfiniLlamaForCausalLM,
    gate_parameters,
    memory,
    split_into_segments,
)
from packhorse.models.gates import activate_gate
from packhorse.models.memory import feature_map, retrieve, write
from packhorse.models.recurrence import RunningDelta

VOCAB = 61
FAST = [("scan", "linear"), ("attention", "linear"), ("scan", "delta")]
LENGTHS = ([5, 17, 7], [29], [8, 8, 13], [1, 1, 27])  # documents of four packed rows; segments of 8


@pytest.fixture(autouse=True)
def _one_thread_and_seed():
    torch.set_num_threads(1)
    torch.manual_seed(0)


def make_model(dtype=torch.float32, **settings) -> InfiniLlamaForCausalLM:
    settings = {"segment_length": 8, "balance_init_type": "randn", **settings}
    config = InfiniLlamaConfig(
        vocab_size=VOCAB,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        initializer_range=0.3,  # large enough that attention is far from uniform
        infini_attention=settings,
    )
    return InfiniLlamaForCausalLM(config).eval().to(dtype)


def with_settings(model, **settings):
    model.config.infini_attention = replace(model.config.infini_attention, **settings)
    return model


def packed(lengths=LENGTHS) -> tuple[torch.Tensor, torch.Tensor]:
    position_ids = torch.stack([torch.cat([torch.arange(n) for n in row]) for row in lengths])
    return torch.randint(0, VOCAB, position_ids.shape), position_ids


def logits_and_gradients(model, **inputs) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    model.zero_grad()
    logits = model(**inputs).logits
    weight = torch.linspace(-1, 1, logits.numel(), dtype=logits.dtype).view_as(logits)
    (logits * weight).sum().div(logits.shape[1]).backward()
    return logits.detach(), {name: parameter.grad.clone() for name, parameter in model.named_parameters()}


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.float64, 1e-10)])
@pytest.mark.parametrize("first_segment", ["bypass", "gated"])
@pytest.mark.parametrize("rows", ["ragged", "regular", "one ragged"])
@pytest.mark.parametrize(("backend", "rule"), FAST)
def test_every_backend_equals_the_literal_loop_in_values_and_gradients(
    backend, rule, rows, first_segment, dtype, tolerance
):
    model = make_model(dtype, first_segment=first_segment, memory_update=rule)
    input_ids, position_ids = packed()
    inputs = {
        "ragged": {"input_ids": input_ids, "position_ids": position_ids},
        "regular": {"input_ids": input_ids[:, :24]},
        "one ragged": {"input_ids": input_ids},
    }[rows]
    expected, expected_gradients = logits_and_gradients(with_settings(model, backend="loop"), **inputs)
    got, gradients = logits_and_gradients(with_settings(model, backend=backend), **inputs)
    torch.testing.assert_close(got, expected, rtol=tolerance, atol=tolerance)
    assert any(gradient.abs().max() > 0 for name, gradient in gradients.items() if name.endswith("gate.weight"))
    for name, gradient in gradients.items():  # relative to the largest: sums run in another order
        scale = expected_gradients[name].abs().max().clamp(min=1)
        torch.testing.assert_close(gradient / scale, expected_gradients[name] / scale, rtol=0, atol=tolerance, msg=name)


@pytest.mark.parametrize("rule", ["linear", "delta"])
def test_the_memory_matters_in_these_models(rule):
    model, (input_ids, position_ids) = make_model(memory_update=rule), packed()
    on = model(input_ids, position_ids=position_ids).logits
    off = with_settings(model, turn_on_memory=False)(input_ids, position_ids=position_ids).logits
    has_past = position_ids >= 8
    assert (on - off)[has_past].abs().amax(-1).min() > 1e-3
    torch.testing.assert_close(on[~has_past], off[~has_past], rtol=0, atol=1e-5)


@pytest.mark.parametrize("rule", ["linear", "delta"])
def test_query_heads_read_the_memory_of_their_neighbours_in_the_key_value_head(rule):
    """Grouped heads with two query heads a group equal full heads whose keys and values are repeated in place."""
    grouped = make_model(first_segment="gated", memory_update=rule)
    values = {**grouped.config.to_dict(), "num_key_value_heads": 4}
    full = InfiniLlamaForCausalLM(InfiniLlamaConfig(**values)).eval()
    weights = grouped.state_dict()
    for name in weights:
        if "k_proj" in name or "v_proj" in name:
            weights[name] = weights[name].unflatten(0, (2, 8)).repeat_interleave(2, dim=0).flatten(0, 1)
    full.load_state_dict(weights)
    input_ids, position_ids = packed()
    torch.testing.assert_close(
        grouped(input_ids, position_ids=position_ids).logits,
        full(input_ids, position_ids=position_ids).logits,
        rtol=1e-5,
        atol=1e-5,
    )


@pytest.mark.parametrize(("backend", "rule"), FAST)
def test_normalised_queries_and_keys_do_not_feel_their_size(backend, rule):
    """With `memory_qk_norm` every backend agrees, and ten times the keys is the same memory."""
    model, (input_ids, position_ids) = make_model(memory_qk_norm=True, memory_update=rule, backend=backend), packed()
    inputs = {"input_ids": input_ids, "position_ids": position_ids}
    got, gradients = logits_and_gradients(model, **inputs)
    expected, expected_gradients = logits_and_gradients(with_settings(model, backend="loop"), **inputs)
    torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-5)
    for name, gradient in gradients.items():
        scale = expected_gradients[name].abs().max().clamp(min=1)
        torch.testing.assert_close(gradient / scale, expected_gradients[name] / scale, rtol=0, atol=1e-5, msg=name)
    for layer in model.model.layers:  # what local attention sees, q times k, stays as it is
        layer.self_attn.k_proj.weight.data.mul_(10)
        layer.self_attn.q_proj.weight.data.div_(10)
    with_settings(model, backend=backend)
    torch.testing.assert_close(model(**inputs).logits, got, rtol=1e-3, atol=1e-3)
    without = with_settings(model, memory_qk_norm=False)(**inputs).logits
    assert (without - got).abs().max() > 0.1


def test_the_delta_rule_writes_what_the_linear_rule_does_not():
    """The two agree until a document's second segment has been written: nothing stands before the first."""
    model, (input_ids, position_ids) = make_model(memory_update="linear"), packed()
    linear = model(input_ids, position_ids=position_ids).logits
    delta = with_settings(model, memory_update="delta")(input_ids, position_ids=position_ids).logits
    moved = (linear - delta).abs().amax(-1)
    assert moved[position_ids >= 16].min() > 1e-3
    torch.testing.assert_close(linear[position_ids < 16], delta[position_ids < 16], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("lengths", [(3,), (1, 1), (4, 4, 4), (5, 2, 2, 1)])
def test_the_running_delta_is_the_gradient_of_its_own_recurrence(lengths):
    def steps(x):
        return x.split(lengths)

    total = sum(lengths)
    erase = torch.randn(total, 2, 3, 3, dtype=torch.float64, requires_grad=True)
    x = torch.randn(total, 2, 3, 4, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda erase, x: RunningDelta.apply(erase, x, steps, None), (erase, x))


def test_a_backward_under_autocast_leaves_the_running_delta_in_fp32():
    gradients = []
    for enabled in (False, True):
        torch.manual_seed(0)
        erase, x = torch.randn(6, 2, 8, 8, requires_grad=True), torch.randn(6, 2, 8, 8, requires_grad=True)
        total = RunningDelta.apply(erase, x, lambda y: y.split((2, 2, 2)), None)
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=enabled):
            gradients.append(torch.autograd.grad(total.square().sum(), (erase, x)))
    assert all(torch.equal(one, other) for one, other in zip(*gradients, strict=True))


@pytest.mark.parametrize("rule", ["linear", "delta"])
def test_segments_of_one_token_give_numbers(rule):
    model, (input_ids, position_ids) = make_model(segment_length=1, memory_update=rule), packed()
    logits, gradients = logits_and_gradients(model, input_ids=input_ids, position_ids=position_ids)
    assert logits.isfinite().all()
    assert logits.abs().max() < 100
    assert all(gradient.isfinite().all() for gradient in gradients.values())


@pytest.mark.parametrize(("backend", "rule"), FAST)
def test_a_packed_document_gets_the_logits_it_gets_alone(backend, rule):
    model, (input_ids, position_ids) = make_model(backend=backend, memory_update=rule), packed()
    together = model(input_ids, position_ids=position_ids).logits
    without_restarts = model(input_ids).logits
    for row, lengths in enumerate(LENGTHS):
        start = 0
        for number, length in enumerate(lengths):
            document = slice(start, start + length)
            alone = model(input_ids[row : row + 1, document]).logits[0]
            torch.testing.assert_close(together[row, document], alone, rtol=1e-5, atol=1e-5)
            if number > 0:  # the control: without restarts a later document hears the earlier ones
                assert (without_restarts[row, document] - alone).abs().max() > 1e-2
            start += length


@pytest.mark.parametrize(("backend", "rule"), FAST)
def test_a_token_changes_nothing_before_it_and_nothing_in_other_documents(backend, rule):
    model, (input_ids, position_ids) = make_model(backend=backend, memory_update=rule), packed(LENGTHS[:2])
    before = model(input_ids, position_ids=position_ids).logits
    document = (position_ids == 0).cumsum(1)
    for row, place in [(0, 3), (0, 6), (0, 14), (0, 21), (1, 0), (1, 9), (1, 23)]:
        changed = input_ids.clone()
        changed[row, place] = (changed[row, place] + 1) % VOCAB
        moved = (model(changed, position_ids=position_ids).logits - before).abs().amax(-1) > 1e-6
        follows = (torch.arange(29) >= place) & (document[row] == document[row, place])
        assert not moved[1 - row].any()
        assert moved[row, follows].all(), "a document must reach all of its own later tokens"
        assert not moved[row, ~follows].any()


@pytest.mark.parametrize("rule", ["linear", "delta"])
@pytest.mark.parametrize("length", [16, 19, 24])
def test_a_later_segments_loss_teaches_the_keys_and_values_of_an_earlier_one(length, rule):
    """No detached memory: without this gradient a memory never learns what to write."""
    model = make_model(memory_update=rule)
    embeddings = torch.randn(1, length, 32, requires_grad=True)
    attention = model.model.layers[0].self_attn
    segments = split_into_segments((1, length), 8)
    tables = model.model.rotary_emb(embeddings, torch.arange(8)[None])
    written = {}
    for name in ("k_proj", "v_proj"):
        getattr(attention, name).register_forward_hook(lambda *args, name=name: written.update({name: args[2]}))
    output, _ = attention(embeddings, tables, segments)
    gradients = torch.autograd.grad(output[:, 8:].square().sum(), [written["k_proj"], written["v_proj"]])
    for gradient in gradients:
        assert (gradient[:, :8].abs().amax(-1) > 1e-7).all()


@pytest.mark.parametrize("every", [1, 2, 3])
@pytest.mark.parametrize("rows", ["ragged", "regular"])
@pytest.mark.parametrize("rule", ["linear", "delta"])
def test_detaching_changes_no_value_and_stops_the_gradients_that_the_loop_stops(rule, rows, every):
    model = make_model(torch.float64, memory_update=rule, segment_length=4)
    input_ids, position_ids = packed()
    inputs = {"input_ids": input_ids[:, :24]}
    if rows == "ragged":
        inputs = {"input_ids": input_ids, "position_ids": position_ids}
    whole, all_gradients = logits_and_gradients(model, **inputs)
    with_settings(model, detach_every_n_segments=every, backend="loop")
    expected, expected_gradients = logits_and_gradients(model, **inputs)
    got, gradients = logits_and_gradients(with_settings(model, backend="auto"), **inputs)
    torch.testing.assert_close(got, whole, rtol=1e-10, atol=1e-10)
    torch.testing.assert_close(got, expected, rtol=1e-10, atol=1e-10)
    for name, gradient in gradients.items():
        torch.testing.assert_close(gradient, expected_gradients[name], rtol=1e-8, atol=1e-8, msg=name)
    name = "model.layers.0.self_attn.k_proj.weight"
    assert (gradients[name] - all_gradients[name]).abs().max() > 1e-4


@pytest.mark.parametrize(("every", "taught"), [(1, "001"), (2, "001"), (3, "111"), (None, "111")])
@pytest.mark.parametrize("rule", ["linear", "delta"])
def test_a_detached_memory_still_teaches_the_segment_before(rule, every, taught):
    """The loss of the fourth segment; where n = 2 divides the third one's index, the memory it is added to stops."""
    model = make_model(memory_update=rule, detach_every_n_segments=every)
    embeddings = torch.randn(1, 32, 32, requires_grad=True)
    attention, written = model.model.layers[0].self_attn, []
    attention.v_proj.register_forward_hook(lambda *args: written.append(args[2]))
    output, _ = attention(
        embeddings, model.model.rotary_emb(embeddings, torch.arange(8)[None]), split_into_segments((1, 32), 8)
    )
    gradient = torch.autograd.grad(output[:, 24:].square().sum(), written)[0].abs().amax(-1).view(4, 8)
    for index, is_taught in enumerate(taught):
        assert (gradient[index] > 1e-7).all() if is_taught == "1" else (gradient[index] == 0).all()


@pytest.mark.parametrize("rule", ["linear", "delta"])
def test_extreme_activations_and_equal_keys_give_numbers(rule):
    model, (input_ids, position_ids) = make_model(memory_update=rule), packed()
    for factor in (1e4, -1e4, 0.0):
        for layer in model.model.layers:
            layer.self_attn.k_proj.weight.data.mul_(0).add_(factor)
            layer.self_attn.q_proj.weight.data.mul_(0).add_(-factor)
        logits, gradients = logits_and_gradients(model, input_ids=input_ids, position_ids=position_ids)
        assert logits.isfinite().all()
        assert all(gradient.isfinite().all() for gradient in gradients.values())


def test_a_read_of_keys_that_vanished_is_zero():
    feature = feature_map(torch.full((1, 4, 8), -1e4))
    memory, normalizer = write(feature, torch.ones(1, 4, 8))
    assert (retrieve(feature, memory, normalizer, eps=1e-6) == 0).all()


def test_the_feature_map_is_elu_plus_one_without_its_rounding():
    x = torch.tensor([-50.0, -18.0, -1.0, 0.0, 1.0, 300.0], dtype=torch.float64)
    torch.testing.assert_close(feature_map(x)[2:], torch.nn.functional.elu(x)[2:] + 1)
    assert (feature_map(x.float()) > 0).all()
    assert (torch.nn.functional.elu(x.float()) + 1)[0] == 0, "the reason why it is not used"
    assert torch.autograd.gradcheck(feature_map, (torch.randn(7, dtype=torch.float64, requires_grad=True),))


def test_autocast_leaves_the_memory_in_fp32(monkeypatch):
    """The sums over hundreds of segments are the place where bf16 loses what was written."""
    written = []
    original = memory.write
    monkeypatch.setattr(memory, "write", lambda *segment: written.append(original(*segment)) or written[-1])
    with torch.autocast("cpu", dtype=torch.bfloat16):
        logits = make_model(segment_length=4, backend="scan")(torch.randint(0, VOCAB, (1, 64))).logits
    assert logits.dtype == torch.bfloat16, "autocast was on"
    assert [x.dtype for pair in written for x in pair] == [torch.float32] * 4


def test_gate_activations_have_their_published_values():
    gate = torch.tensor([-4.0, -2.5, 0.0, 1.0, 2.5, 4.0])
    torch.testing.assert_close(activate_gate(gate, "hard_sigmoid"), torch.tensor([0.0, 0.0, 0.5, 0.7, 1.0, 1.0]))
    torch.testing.assert_close(activate_gate(gate, "orig_sigmoid"), 1 / (1 + torch.exp(-gate)))
    torch.testing.assert_close(activate_gate(gate, "orig_tanh"), torch.tanh(gate))
    torch.testing.assert_close(activate_gate(gate, "tanh_abs"), torch.tanh(gate).abs())


@pytest.mark.parametrize("kind", ["orig_sigmoid", "hard_sigmoid", "orig_tanh", "tanh_abs"])
def test_every_gate_activation_mixes_as_the_loop_does(kind):
    model, (input_ids, position_ids) = make_model(balance_act_type=kind, first_segment="gated"), packed()
    got = with_settings(model, backend="scan")(input_ids, position_ids=position_ids).logits
    expected = with_settings(model, backend="loop")(input_ids, position_ids=position_ids).logits
    torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("backend", ["scan", "attention", "loop"])
@pytest.mark.parametrize("length", [8, 5])
def test_gates_get_a_gradient_when_no_document_has_two_segments(backend, length):
    """A parameter without a gradient stops data-parallel training."""
    model = make_model(backend=backend)
    model(torch.randint(0, VOCAB, (2, length)), position_ids=torch.arange(length)[None]).logits.sum().backward()
    assert all((gate.grad == 0).all() for gate in gate_parameters(model))


def test_two_forwards_are_equal_because_no_state_is_kept():
    model, (input_ids, position_ids) = make_model().train(), packed()
    state = {name: value.clone() for name, value in model.state_dict().items()}
    first = model(input_ids, position_ids=position_ids).logits
    assert torch.equal(first, model(input_ids, position_ids=position_ids).logits)
    assert all(torch.equal(value, state[name]) for name, value in model.state_dict().items())


def test_without_memory_a_segment_equals_a_plain_llama_that_sees_nothing_else():
    model = make_model(turn_on_memory=False)
    plain = LlamaForCausalLM(LlamaConfig(**{**model.config.to_dict(), "infini_attention": None})).eval()
    plain.load_state_dict(
        {name: value for name, value in model.state_dict().items() if not name.endswith("gate.weight")}
    )
    input_ids = torch.randint(0, VOCAB, (2, 24))
    together = model(input_ids).logits
    for start in (0, 8, 16):
        torch.testing.assert_close(
            together[:, start : start + 8], plain(input_ids[:, start : start + 8]).logits, rtol=1e-5, atol=1e-5
        )
    assert not any(gate.requires_grad for gate in gate_parameters(model))


@pytest.mark.parametrize(("backend", "update"), FAST)
def test_documents_that_are_all_shorter_than_a_segment_can_be_trained_on(backend, update):
    model = make_model(backend=backend, memory_update=update).train()
    input_ids, position_ids = packed([[3, 5, 2], [7, 3]])
    model.model(input_ids=input_ids, position_ids=position_ids).last_hidden_state.sum().backward()
    assert all(torch.isfinite(p.grad).all() for p in model.model.parameters() if p.grad is not None)
    assert model.model.embed_tokens.weight.grad.abs().sum() > 0
