"""Laws of the carried memory: rows of one document, one after the other, are one long row."""

import pytest
import torch

from packhorse.models import InfiniCache, MemoryState, split_into_segments
from test_models_attention import VOCAB, make_model, packed, with_settings


@pytest.fixture(autouse=True)
def _one_thread_and_seed():
    torch.set_num_threads(1)
    torch.manual_seed(0)


def read_rows(model, input_ids, length, state=None, **inputs):
    state = MemoryState() if state is None else state
    return torch.cat([model(row, memory_state=state, **inputs).logits for row in input_ids.split(length, 1)], 1)


@pytest.mark.parametrize("settings", [{}, {"first_segment": "gated"}, {"memory_qk_norm": True}, {"memory_layers": [1]}])
@pytest.mark.parametrize("rule", ["linear", "delta"])
@pytest.mark.parametrize("length", [8, 16, 24])
def test_rows_with_a_carried_memory_equal_one_long_row(length, rule, settings):
    model = make_model(memory_update=rule, **settings)
    input_ids = torch.randint(0, VOCAB, (2, 48))
    expected = model(input_ids).logits
    torch.testing.assert_close(read_rows(model, input_ids, length), expected, rtol=1e-5, atol=1e-5)
    apart = torch.cat([model(row).logits for row in input_ids.split(length, 1)], 1)
    assert (apart - expected)[:, length:].abs().amax(-1).min() > 1e-4, "the control: without the memory they differ"


@pytest.mark.parametrize("rule", ["linear", "delta"])
def test_a_row_may_end_one_document_and_begin_the_next(rule):
    """Row 0 goes on with a document of 40 tokens and then holds others; row 1 begins anew each time."""
    model = make_model(memory_update=rule)
    long, short = torch.randint(0, VOCAB, (1, 40)), torch.randint(0, VOCAB, (1, 24))
    other = torch.randint(0, VOCAB, (2, 32))
    first = torch.cat([long[:, :32], other[:1]])
    second = torch.cat([torch.cat([long[:, 32:], short], 1), other[1:]])
    position_ids = torch.stack([torch.cat([torch.arange(32, 40), torch.arange(24)]), torch.arange(32)])
    state = MemoryState()
    model(first, position_ids=torch.arange(32)[None], memory_state=state)
    got = model(second, position_ids=position_ids, memory_state=state).logits
    torch.testing.assert_close(got[:1, :8], model(long).logits[:, 32:], rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(got[:1, 8:], model(short).logits, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(got[1:], model(other[1:]).logits, rtol=1e-5, atol=1e-5)
    assert state.seen_B.tolist() == [24, 32]


@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize("rule", ["linear", "delta"])
def test_what_is_carried_is_detached_and_changes_no_gradient_of_its_own_row(rule, checkpointing):
    """The gradient of two rows is that of one long row whose memory is detached between them."""
    model = make_model(torch.float64, memory_update=rule, detach_every_n_segments=2).train()
    input_ids = torch.randint(0, VOCAB, (2, 32))
    # Segments 1 to 4; the memory that segment 3 is added to is detached: segment 4 reaches segment 3, as in row 2.
    model(input_ids).logits[:, 24:].square().sum().backward()
    whole = {name: p.grad.clone() for name, p in model.named_parameters()}
    model.zero_grad()
    if checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    with_settings(model, detach_every_n_segments=None)
    state = MemoryState()
    model(input_ids[:, :16], memory_state=state)
    kept = {layer: tuple(x.clone() for x in pair) for layer, pair in state.layers.items()}
    logits = model(input_ids[:, 16:], memory_state=state).logits[:, 8:]
    assert not any(x.requires_grad for pair in state.layers.values() for x in pair)
    logits.square().sum().backward()
    rows = {name: p.grad for name, p in model.named_parameters()}
    assert all((pair[0] - state.layers[layer][0]).abs().max() > 0 for layer, pair in kept.items()), "it moved on"
    name = "model.layers.1.self_attn.v_proj.weight"  # the last layer: nothing but its own memory leads to other rows
    torch.testing.assert_close(rows[name], whole[name], rtol=1e-8, atol=1e-8)
    assert rows["model.embed_tokens.weight"].abs().sum() > 0


def test_a_carried_memory_is_the_one_that_generation_would_have():
    model = make_model(memory_update="delta")
    input_ids = torch.randint(0, VOCAB, (2, 48))
    state = MemoryState()
    read_rows(model, input_ids, 16, state)
    with torch.no_grad():
        cache = InfiniCache(model.config)
        model(input_ids, past_key_values=cache)
    for number, layer in enumerate(cache.layers):
        memory, normalizer = state.layers[number]
        torch.testing.assert_close(memory, layer.tensors["memory"], rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(normalizer, layer.tensors["normalizer"], rtol=1e-4, atol=1e-4)


def test_a_state_that_was_reset_knows_nothing():
    model = make_model()
    input_ids = torch.randint(0, VOCAB, (2, 16))
    state = MemoryState()
    model(input_ids, memory_state=state)
    state.reset()
    torch.testing.assert_close(model(input_ids, memory_state=state).logits, model(input_ids).logits)


def test_rows_that_do_not_go_on_where_they_ended_are_refused():
    model, state = make_model(), MemoryState()
    input_ids = torch.randint(0, VOCAB, (2, 20))
    model(input_ids, memory_state=state)
    with pytest.raises(ValueError, match="middle of a segment of 8"):
        model(input_ids, memory_state=state)
    positions = torch.stack([torch.arange(20), torch.arange(16, 36)])
    with pytest.raises(ValueError, match=r"Row 1 begins at position 16.* ended at 20"):
        model(input_ids, position_ids=positions, memory_state=state)
    with pytest.raises(ValueError, match="holds 2 rows"):
        model(input_ids[:1], memory_state=state)
    with pytest.raises(ValueError, match="position_ids alone"):
        model(input_ids, memory_state=MemoryState(), segments=split_into_segments((2, 20), 8))
    with pytest.raises(ValueError, match="position_ids alone"):
        model(input_ids, memory_state=MemoryState(), attention_mask=torch.ones(2, 20).tril())
    with torch.no_grad(), pytest.raises(ValueError, match="either memory_state"):
        model(input_ids, memory_state=MemoryState(), past_key_values=InfiniCache(model.config))
    for backend in ("loop", "attention"):
        with pytest.raises(ValueError, match="carries no memory"):
            with_settings(make_model(), backend=backend)(input_ids, memory_state=MemoryState())
    assert state.seen_B.tolist() == [20, 20], "nothing of what was refused has been read"


def test_packed_rows_of_whole_documents_need_no_state():
    model, (input_ids, position_ids) = make_model(), packed()
    torch.testing.assert_close(
        model(input_ids, position_ids=position_ids, memory_state=MemoryState()).logits,
        model(input_ids, position_ids=position_ids).logits,
        rtol=1e-5,
        atol=1e-5,
    )
