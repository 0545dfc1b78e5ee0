"""Laws of lanes: each row once, and a document's rows one after the other in one place."""

import numpy as np
import pytest
import torch

from packhorse.models import InfiniLlamaConfig, InfiniLlamaForCausalLM, MemoryState
from packhorse.training.lanes import LaneOrder


def batches(order: LaneOrder) -> np.ndarray:
    return np.stack([order(step) for step in range(len(order))])


@pytest.mark.parametrize("lanes", [1, 3, 8, 100])
def test_every_row_stands_in_an_epoch_exactly_once(lanes):
    lengths = np.random.default_rng(0).integers(1, 20, size=60)
    table = batches(LaneOrder(lengths, lanes, seed=3))
    rows = table[table >= 0]
    assert sorted(rows) == list(range(lengths.sum()))


def test_a_documents_rows_follow_each_other_in_one_lane():
    lengths = np.random.default_rng(1).integers(1, 20, size=60)
    table = batches(LaneOrder(lengths, 7, seed=3))
    ends = set(np.cumsum(lengths) - 1)
    for step, lane in zip(*np.nonzero(table >= 0), strict=True):
        row = table[step, lane]
        if row not in ends:
            assert table[step + 1, lane] == row + 1


def test_lanes_end_at_most_one_document_apart():
    lengths = np.random.default_rng(2).integers(1, 20, size=200)
    idle = (batches(LaneOrder(lengths, 7, seed=0)) < 0).sum(0)
    assert idle.max() <= lengths.max()


def test_the_order_is_a_function_of_its_arguments_and_epochs_differ():
    lengths = list(range(1, 30))
    assert np.array_equal(batches(LaneOrder(lengths, 4, 0)), batches(LaneOrder(tuple(lengths), 4, 0)))
    assert not np.array_equal(batches(LaneOrder(lengths, 4, 0))[:5], batches(LaneOrder(lengths, 4, 1))[:5])
    assert not np.array_equal(batches(LaneOrder(lengths, 4, 0))[:5], batches(LaneOrder(lengths, 4, 0, epoch=1))[:5])


def test_what_makes_no_sense_is_refused():
    for lengths, lanes in (([], 2), ([1, 0], 2), ([3], 0)):
        with pytest.raises(ValueError, match="at least one"):
            LaneOrder(lengths, lanes, 0)
    with pytest.raises(IndexError, match="no step 3"):
        LaneOrder([3], 2, 0)(3)


def test_documents_read_in_lanes_get_the_logits_that_each_gets_as_one_row():
    """Order, positions, reset and carried memory together."""
    torch.manual_seed(0)
    sizes = {"vocab_size": 61, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
    settings = {"segment_length": 8, "balance_init_type": "randn", "memory_update": "delta"}
    config = InfiniLlamaConfig(**sizes, num_attention_heads=4, initializer_range=0.3, infini_attention=settings)
    model = InfiniLlamaForCausalLM(config).eval()
    lengths, width = [4, 2, 1, 3, 2, 1], 16
    rows = torch.randint(0, 61, (sum(lengths), width))
    first = np.cumsum(lengths) - lengths
    begins = np.repeat(first, lengths)
    order, state, logits = LaneOrder(lengths, 3, seed=0), MemoryState(), {}
    for step in range(len(order)):
        numbers = order(step).clip(0)  # an idle lane reads some row, which nobody looks at
        place = np.where(order(step) >= 0, numbers - begins[numbers], 0)
        position_ids = torch.from_numpy(place * width)[:, None] + torch.arange(width)
        out = model(rows[numbers], position_ids=position_ids, memory_state=state).logits
        logits |= {int(n): out[lane] for lane, n in enumerate(order(step)) if n >= 0}
    for start, length in zip(first, lengths, strict=True):
        whole = model(rows[start : start + length].view(1, -1)).logits[0].split(width)
        for offset, expected in enumerate(whole):
            torch.testing.assert_close(logits[int(start) + offset], expected, rtol=1e-4, atol=1e-5)
