"""Laws of segments in slots: the same values and gradients as every other layout, in few shapes."""

from itertools import pairwise

import pytest
import torch

from packhorse.models import segments_in_buckets, split_into_segments
from packhorse.models.segments import RaggedSegments
from packhorse.models.slots import SlottedSegments, lay_into_slots
from test_models_attention import LENGTHS, VOCAB, logits_and_gradients, make_model, packed, with_settings


@pytest.fixture(autouse=True)
def _one_thread_and_seed():
    torch.set_num_threads(1)
    torch.manual_seed(0)


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.float64, 1e-10)])
@pytest.mark.parametrize("slots", [None, 9])
@pytest.mark.parametrize("first_segment", ["bypass", "gated"])
@pytest.mark.parametrize("rule", ["linear", "delta"])
def test_slots_equal_the_literal_loop_in_values_and_gradients(rule, first_segment, slots, dtype, tolerance):
    model = make_model(dtype, first_segment=first_segment, memory_update=rule)
    input_ids, position_ids = packed()
    expected, expected_gradients = logits_and_gradients(
        with_settings(model, backend="loop"), input_ids=input_ids, position_ids=position_ids
    )
    segments = lay_into_slots(tuple(input_ids.shape), 8, position_ids, slots=slots)
    got, gradients = logits_and_gradients(with_settings(model, backend="auto"), input_ids=input_ids, segments=segments)
    torch.testing.assert_close(got, expected, rtol=tolerance, atol=tolerance)
    for name, gradient in gradients.items():
        scale = expected_gradients[name].abs().max().clamp(min=1)
        torch.testing.assert_close(gradient / scale, expected_gradients[name] / scale, rtol=0, atol=tolerance, msg=name)


@pytest.mark.parametrize("every", [1, 2, 3])
@pytest.mark.parametrize("rule", ["linear", "delta"])
def test_slots_stop_the_gradients_that_the_loop_stops(rule, every):
    model = make_model(torch.float64, memory_update=rule, segment_length=4, detach_every_n_segments=every)
    input_ids, position_ids = packed()
    segments = lay_into_slots(tuple(input_ids.shape), 4, position_ids)
    _, expected = logits_and_gradients(
        with_settings(model, backend="loop"), input_ids=input_ids, position_ids=position_ids
    )
    _, gradients = logits_and_gradients(with_settings(model, backend="auto"), input_ids=input_ids, segments=segments)
    for name, gradient in gradients.items():
        torch.testing.assert_close(gradient, expected[name], rtol=1e-8, atol=1e-8, msg=name)


def test_rotary_positions_of_slots_are_those_of_their_tokens():
    _, position_ids = packed()
    segments = lay_into_slots(tuple(position_ids.shape), 8, position_ids)
    positions = segments.positions("document", torch.device("cpu"))
    assert torch.equal(segments.unfold(positions), position_ids)


def test_no_token_is_lost_on_the_way_into_slots_and_back():
    _, position_ids = packed()
    x = torch.randn(4, 29, 2, 3)
    segments = lay_into_slots((4, 29), 8, position_ids, slots=7)
    folded = segments.fold(x)
    assert folded.shape == (4 * 7, 8, 2, 3)
    assert torch.equal(segments.unfold(folded), x)
    assert (folded.flatten(0, 1)[segments.is_empty] == 0).all()


def test_any_documents_have_one_of_three_numbers_of_slots():
    generator = torch.Generator().manual_seed(0)
    seen = set()
    for longest in [1, 2, 5, 17, 60, 200] * 20:
        cuts = torch.randint(1, longest + 1, (3, 256), generator=generator).cumsum(1)
        position_ids = torch.stack([positions(row[row < 256].tolist(), 256) for row in cuts])
        segments = segments_in_buckets((3, 256), 64, position_ids)
        if isinstance(segments, SlottedSegments):
            seen.add(tuple(segments.starts_BP.shape))
        else:
            assert isinstance(segments, RaggedSegments)
            assert sum(segments.group_sizes) > 8 * 4, "only where padding would be many times the text"
    assert seen == {(3, 6), (3, 12), (3, 32)}


def positions(cuts: list[int], length: int) -> torch.Tensor:
    borders = [0, *cuts, length]
    return torch.cat([torch.arange(b - a) for a, b in pairwise(borders)])


def test_a_run_compiles_at_most_three_times_whatever_its_documents():
    graphs = []

    def count(graph, inputs):
        graphs.append(graph)
        return graph.forward

    torch._dynamo.reset()
    model = make_model(memory_update="delta").train()
    model.model.layers = model.model.layers[:1]  # time goes into tracing
    compiled = torch.compile(model, backend=count, fullgraph=True, dynamic=False)
    generator = torch.Generator().manual_seed(0)
    shapes = set()
    for longest in [3, 40, 8, 12, 5, 25, 2, 40, 4, 16]:
        cuts = torch.randint(1, longest + 1, (2, 16), generator=generator).cumsum(1)
        position_ids = torch.stack([positions(row[row < 16].tolist(), 16) for row in cuts])
        input_ids = torch.randint(0, VOCAB, (2, 16), generator=generator)
        segments = segments_in_buckets((2, 16), 8, position_ids)
        shapes.add(segments.starts_BP.shape)
        loss = compiled(input_ids, labels=input_ids, segments=segments).loss
        loss.backward()
        eager = model(input_ids, labels=input_ids, position_ids=position_ids).loss
        torch.testing.assert_close(loss, eager, rtol=1e-4, atol=1e-5)
    assert len(shapes) == 3
    assert len(graphs) == 3
    torch._dynamo.reset()


def test_without_slots_every_mixture_of_documents_compiles_anew():
    """The control: this is what the slots are for."""
    shapes = {split_into_segments((1, 29), 8, packed([lengths])[1]).group_sizes for lengths in LENGTHS}
    assert len(shapes) == len(LENGTHS)


def test_more_segments_than_slots_are_refused_by_the_layout():
    _, position_ids = packed([[1] * 29])
    assert lay_into_slots((1, 29), 8, position_ids, slots=28) is None
    assert lay_into_slots((1, 29), 8, position_ids, slots=29).starts_BP.all()
