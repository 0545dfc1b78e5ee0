"""Memories after one row of a long document -> before its next row.

Training on a document that is longer than a row: row b of the next batch goes on where row b of this one ended.

    state = MemoryState()
    for batch in rows_of_long_documents:                       # position_ids count on from row to row
        loss = model(**batch, memory_state=state).loss         # `state` is moved on by the call
        loss.backward()

A row whose positions begin at 0 starts with an empty memory, whatever the state holds: that is the reset. What goes
over is detached, so a loss teaches the segments of its own row. Rows of one document must end where a segment ends.

Shapes: B rows, T tokens of a row, G key/value heads, K head size.
"""

from dataclasses import dataclass, field

import torch
from torch import Tensor

from packhorse.models.slots import SlottedSegments, lay_into_slots

LayerMemory = tuple[Tensor, Tensor]
"""Memory [B, G, K, K] and normaliser [B, G, K], fp32."""


@dataclass(frozen=True)
class Carry:
    """What one call's layers find and leave. A layer that is computed again for its gradient leaves the same again."""

    found: dict[int, LayerMemory]
    left: dict[int, LayerMemory] = field(default_factory=dict)


class MemoryState:
    """The memories of the documents that the rows of a batch ended with, layer by layer; empty at first."""

    def __init__(self) -> None:
        self.layers: dict[int, LayerMemory] = {}
        self.seen_B: Tensor | None = None
        """How many tokens of its last document each row has seen, on the CPU."""

    def begin(
        self, shape: tuple[int, int], segment_length: int, position_ids: Tensor | None
    ) -> tuple[SlottedSegments, Carry, Tensor]:
        """How a call reads these rows: segments, what its layers carry, and what `advance` wants to know.

        Raises:
            ValueError: A row does not go on where the last one ended.
        """
        rows, length = shape
        seen_B = torch.zeros(rows, dtype=torch.long) if self.seen_B is None else self.seen_B
        if len(seen_B) != rows:
            raise ValueError(f"This MemoryState holds {len(seen_B)} rows, but the batch has {rows}: make a new one.")
        position_BT = seen_B[:, None] + torch.arange(length) if position_ids is None else position_ids.cpu()
        position_BT = position_BT.expand(shape)
        start_B = position_BT[:, 0]
        goes_on_B = start_B > 0
        if (wrong := goes_on_B & (start_B != seen_B)).any():
            row = int(wrong.nonzero()[0])
            raise ValueError(
                f"Row {row} begins at position {int(start_B[row])} of its document, but the row before it ended at "
                f"{int(seen_B[row])}. Rows of a document must stand at the same place of consecutive batches."
            )
        if (wrong := goes_on_B & (start_B % segment_length > 0)).any():
            raise ValueError(
                f"Row {int(wrong.nonzero()[0])} begins in the middle of a segment of {segment_length} tokens. Make the "
                "sequence length a multiple of segment_length."
            )
        segments = lay_into_slots(shape, segment_length, position_BT, goes_on_B)
        assert segments is not None
        return segments, Carry(self.layers), position_BT[:, -1] + 1

    def advance(self, carry: Carry, seen_B: Tensor) -> None:
        """Take a call as done."""
        self.layers, self.seen_B = carry.left, seen_B

    def reset(self) -> None:
        """As new: before validation, or when the rows belong to other documents."""
        self.layers, self.seen_B = {}, None
