import time

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from packhorse.training.batches import IGNORE_INDEX, derive


def derive_slowly(tokens_BT, piece_lengths):
    """Piece by piece, token by token."""
    position_ids, labels = np.zeros(tokens_BT.shape, int), np.full(tokens_BT.shape, -100)
    for row, lengths in enumerate(piece_lengths):
        start = 0
        for length in lengths:
            for i in range(length):
                position_ids[row, start + i] = i
                if i + 1 < length:
                    labels[row, start + i] = tokens_BT[row, start + i + 1]
            start += length
        for i in range(tokens_BT.shape[1] - start):
            position_ids[row, start + i] = i
    return tokens_BT, position_ids, labels


@st.composite
def packed_rows(draw):
    row_length = draw(st.integers(1, 24))
    rows = []
    for _ in range(draw(st.integers(0, 5))):
        lengths, left = [], row_length
        while left and draw(st.booleans()):
            lengths.append(draw(st.integers(1, left)))
            left -= lengths[-1]
        rows.append(np.array(lengths, draw(st.sampled_from([np.uint16, np.int32, np.int64]))))
    tokens = np.random.default_rng(draw(st.integers(0, 99))).integers(0, 60_000, (len(rows), row_length))
    return tokens.astype(np.uint16), rows


@given(packed_rows())
def test_derived_rows_are_those_of_each_piece_alone(case):
    batch = derive(*case)
    for got, expected in zip(batch, derive_slowly(*case), strict=True):
        assert got.dtype == np.int64
        np.testing.assert_array_equal(got, expected)


def test_no_piece_predicts_the_next_one_and_nothing_predicts_padding():
    tokens = np.array([[10, 11, 12, 13, 20, 21, 99, 99]], np.uint16)
    batch = derive(tokens, [np.array([4, 2])])
    assert batch.input_ids.tolist() == tokens.tolist()
    assert batch.position_ids.tolist() == [[0, 1, 2, 3, 0, 1, 0, 1]]
    assert batch.labels.tolist() == [[11, 12, 13, IGNORE_INDEX, 21, IGNORE_INDEX, IGNORE_INDEX, IGNORE_INDEX]]


def test_ids_above_the_sign_bit_of_their_type_stay_positive():
    assert derive(np.array([[0, 65_535]], np.uint16), [np.array([2])]).labels[0, 0] == 65_535
    assert derive(np.array([[0, 2**32 - 1]], np.uint32), [np.array([2])]).labels[0, 0] == 2**32 - 1


@pytest.mark.parametrize("lengths", [[[5]], [[2, 3]], [[0, 4]], [[-1, 2]], [[4], [4]], []])
def test_pieces_that_do_not_fit_their_rows_are_refused(lengths):
    with pytest.raises(ValueError, match="do not fit"):
        derive(np.zeros((1, 4), np.uint16), [np.array(row) for row in lengths])


def test_a_batch_of_eight_rows_is_derived_in_a_fraction_of_a_millisecond():
    tokens = np.zeros((8, 512), np.uint16)
    pieces = [np.array([100, 200, 50, 30, 60, 70])] * 8
    seconds = []
    for _ in range(50):
        started = time.perf_counter()
        derive(tokens, pieces)
        seconds.append(time.perf_counter() - started)
    assert sorted(seconds)[10] < 0.3e-3  # 0.04 ms here
