"""Packed rows and the lengths of their pieces -> input ids, position ids, labels.

    tokens           a  b  c  d  e  f  .  .      two pieces, of 4 and 2 tokens, and padding
    position_ids     0  1  2  3  0  1  0  1
    labels           b  c  d  -  f  -  -  -      - is -100: no loss

Promises: positions start at 0 in every piece and in the padding, so a model that separates documents where positions
restart separates these; no label crosses the border of a piece, and none is padding. Where pieces share tokens
(`packing: window`), each token of a document but its first is a label once. Nothing of it is stored on disk.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

IGNORE_INDEX = -100


class Batch(NamedTuple):
    """Three int64 arrays [B, T]."""

    input_ids: np.ndarray
    position_ids: np.ndarray
    labels: np.ndarray


def derive(
    tokens_BT: np.ndarray, piece_lengths: Sequence[np.ndarray], repeated: Sequence[np.ndarray] | None = None
) -> Batch:
    """What a causal language model needs to train on packed rows.

    Args:
        tokens_BT: [B, T] of any integer dtype; what follows the last piece of a row is padding.
        piece_lengths: For each row the lengths of its pieces, all positive; their sum is at most T.
        repeated: For each piece how many of its first tokens are those of another row: they are no labels here.

    Raises:
        ValueError: The lengths do not fit the rows.
    """
    num_rows, row_length = tokens_BT.shape
    pieces_per_row = np.array([len(lengths) for lengths in piece_lengths], np.int64)
    lengths = np.concatenate([np.empty(0, np.int64), *piece_lengths]).astype(np.int64)
    last_piece = np.cumsum(pieces_per_row)
    cumulated = np.concatenate([[0], np.cumsum(lengths)])
    before_row = cumulated[last_piece - pieces_per_row]
    end_of_row = cumulated[last_piece] - before_row  # where padding begins
    if len(piece_lengths) != num_rows or (lengths < 1).any() or (end_of_row > row_length).any():
        raise ValueError(
            f"Pieces do not fit {num_rows} rows of {row_length} tokens: {len(piece_lengths)} rows of pieces, shortest "
            f"piece {lengths.min(initial=row_length)}, most tokens in a row {end_of_row.max(initial=0)}."
        )
    row = np.repeat(np.arange(num_rows), pieces_per_row)
    end = cumulated[1:] - before_row[row]

    column = np.arange(row_length)
    starts_BT = np.zeros((num_rows, row_length + 1), np.int64)
    starts_BT[row, end] = end  # a piece, or the padding, begins where a piece ends
    position_ids = column - np.maximum.accumulate(starts_BT[:, :-1], axis=1)

    input_ids = tokens_BT.astype(np.int64)
    labels = np.full_like(input_ids, IGNORE_INDEX)
    labels[:, :-1] = input_ids[:, 1:]
    labels[row, end - 1] = IGNORE_INDEX
    labels[column >= end_of_row[:, None]] = IGNORE_INDEX
    if repeated is not None:
        # The label of a position is the next token: the last of n repeated tokens stands before a new one.
        known = np.maximum(np.concatenate([np.empty(0, np.int64), *repeated]) - 1, 0)
        steps_BT = np.zeros((num_rows, row_length + 1), np.int64)
        np.add.at(steps_BT, (row, end - lengths), 1)
        np.add.at(steps_BT, (row, end - lengths + known), -1)
        labels[np.cumsum(steps_BT, axis=1)[:, :-1] > 0] = IGNORE_INDEX
    return Batch(input_ids, position_ids, labels)
