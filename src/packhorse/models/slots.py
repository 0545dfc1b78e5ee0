"""Position ids -> segments that stand row by row, every row padded to the same number of slots.

The other layouts follow the text, so their shapes change from batch to batch, and a compiler would start anew for each.
Here a row of T tokens has one of few numbers of slots, whatever documents it holds. With segments of 2, 5 slots, and
`_` for an empty place:

    row          aaaaabbb      position ids    01234012
    slots        aa aa a_ bb b_

A slot where a document begins starts with an empty memory, or, where the row goes on with the document that the row
before it ended with, with the memory that was carried over (`MemoryState`).

Shapes: B rows, T tokens of a row, P slots of a row, N = B P slots, S places of a slot, R = N.
"""

from dataclasses import dataclass, fields, replace
from typing import Self

import torch
from torch import Tensor

from packhorse.models.config import RotaryRestart
from packhorse.models.segments import split_into_segments

BUCKETS = (1.5, 3.0, 8.0)
"""Numbers of slots, in those that a row of one document needs."""


@dataclass(frozen=True, kw_only=True)
class SlottedSegments:
    """Any mixture of documents, in shapes that depend on the number of slots only."""

    width: int
    shape: tuple[int, int]
    starts_BP: Tensor
    """Whether a slot begins with an empty memory; so does one in which nothing stands."""
    index_BP: Tensor
    """Which segment of its document (of its part in this row) a slot is."""
    slot_of_token: Tensor
    token_of_slot: Tensor
    is_empty: Tensor
    last_B: Tensor
    """The last slot of every row in which something stands, among all N."""

    def to(self, device: torch.device | str) -> Self:
        """The same segments with their indices on `device`."""
        tensors = {f.name: getattr(self, f.name) for f in fields(self) if isinstance(getattr(self, f.name), Tensor)}
        return replace(self, **{name: tensor.to(device, non_blocking=True) for name, tensor in tensors.items()})

    def fold(self, x_BTHK: Tensor) -> Tensor:
        """Tokens -> [N, S, H, K]; empty places are zero."""
        return _Move.apply(x_BTHK.flatten(0, 1), self.token_of_slot, self.is_empty, self.slot_of_token, None).unflatten(
            0, (-1, self.width)
        )

    def unfold(self, x_NSHK: Tensor) -> Tensor:
        """The inverse of `fold`."""
        moved = _Move.apply(x_NSHK.flatten(0, 1), self.slot_of_token, None, self.token_of_slot, self.is_empty)
        return moved.unflatten(0, self.shape)

    def split(self, x_N: Tensor) -> tuple[Tensor, Tensor]:
        """Nothing, and everything: which slots have a past is data here, and not a shape. See `starts`."""
        return x_N[:0], x_N

    def join(self, first: Tensor, rest_R: Tensor) -> Tensor:
        """The inverse of `split`."""
        return rest_R

    @property
    def starts(self) -> Tensor:
        """Which of R have no past, after all; [R, 1, 1, 1]."""
        return self.starts_BP.flatten()[:, None, None, None]

    def previous(self, x_N: Tensor) -> Tensor:
        """The slot before each; a row's first, with nothing before it, keeps its own."""
        x_BP = self._by_row(x_N)
        return torch.cat([x_BP[:, :1], x_BP[:, :-1]], dim=1).flatten(0, 1)

    def begin(self, x_R: Tensor, carried_B: Tensor) -> Tensor:
        """Values standing at `previous`, with what was carried over before each row's first."""
        x_BP = self._by_row(x_R)
        return torch.cat([carried_B.unsqueeze(1).to(x_R.dtype), x_BP[:, 1:]], dim=1).flatten(0, 1)

    def running_sum(self, x_R: Tensor, detach_every: int | None = None) -> Tensor:
        """Of values standing at `previous`: the sum over all earlier segments of the same document."""
        return self._walk(x_R, None, detach_every)

    def running_delta(self, erase_R: Tensor, x_R: Tensor, detach_every: int | None = None) -> Tensor:
        """The same where each step first erases: total = x + (1 - erase) total, with matrices."""
        return self._walk(x_R, erase_R, detach_every)

    def delay(self, x_R: Tensor, detach_every: int | None = None) -> Tensor:
        """The value one step earlier; 1, which nobody uses, where there is none to divide by."""
        x_BP, one = self._by_row(x_R), torch.ones_like(x_R[:1])
        delayed = [one.expand_as(x_BP[:, 0])]
        for step in range(1, x_BP.shape[1]):
            before = self._stopped(x_BP[:, step - 1], step, detach_every)
            unused_B = self.starts_BP[:, step] | self.starts_BP[:, step - 1]
            delayed.append(torch.where(_like(unused_B, before), one, before))
        return torch.stack(delayed, dim=1).flatten(0, 1)

    def positions(self, restart: RotaryRestart, device: torch.device) -> Tensor:
        """Rotary positions of a slot's places: [1, S], or [N, S]. A document that goes on counts from its row's start:
        distances are all that matters.
        """
        place_1S = torch.arange(self.width, device=device)[None]
        return place_1S if restart == "segment" else self.index_BP.flatten()[:, None] * self.width + place_1S

    def _walk(self, x_R: Tensor, erase_R: Tensor | None, detach_every: int | None) -> Tensor:
        x_BP = self._by_row(x_R)
        empty = torch.zeros_like(x_BP[:, 0])
        totals = [torch.where(_like(self.starts_BP[:, 0], empty), empty, x_BP[:, 0])]
        for step in range(1, x_BP.shape[1]):
            before = self._stopped(totals[-1], step, detach_every)
            total = before + x_BP[:, step]
            if erase_R is not None:
                total = total - self._by_row(erase_R)[:, step] @ before
            totals.append(torch.where(_like(self.starts_BP[:, step], total), empty, total))
        return torch.stack(totals, dim=1).flatten(0, 1)

    def _stopped(self, before: Tensor, step: int, detach_every: int | None) -> Tensor:
        """What a step goes on with, without its gradient where a document's segment is one that detaches."""
        if detach_every is None:
            return before
        written_B = self.index_BP[:, step] - 1
        stops_B = (written_B > 0) & (written_B % detach_every == 0)
        return torch.where(_like(stops_B, before), before.detach(), before)

    def _by_row(self, x_N: Tensor) -> Tensor:
        return x_N.unflatten(0, tuple(self.starts_BP.shape))


def lay_into_slots(
    shape: tuple[int, int],
    segment_length: int,
    position_ids: Tensor | None = None,
    goes_on_B: Tensor | None = None,
    slots: int | None = None,
) -> SlottedSegments | None:
    """The segments of a batch of packed rows, with indices on the CPU; None if `slots` are too few.

    Args:
        shape: rows, tokens of a row.
        segment_length: the longest segment.
        position_ids: [B, T] or [1, T], restarting wherever a document starts. Without, one document a row.
        goes_on_B: rows that begin inside a document, at one of its segments' borders.
        slots: of every row; as many as the fullest row needs, if not given.
    """
    rows, length = shape
    position_BT = torch.arange(length)[None] if position_ids is None else position_ids.cpu()
    position_BT = position_BT.expand(shape)
    new_BT = torch.ones(shape, dtype=torch.bool)
    new_BT[:, 1:] = position_BT[:, 1:] != position_BT[:, :-1] + 1
    column_T = torch.arange(length)
    offset_BT = column_T - torch.where(new_BT, column_T, 0).cummax(1).values
    slot_BT = ((offset_BT % segment_length) == 0).cumsum(1) - 1
    if slots is None:
        slots = int(slot_BT.max()) + 1
    elif int(slot_BT.max()) >= slots:
        return None

    row_B1 = torch.arange(rows)[:, None]
    starts_BP = torch.ones(rows, slots, dtype=torch.bool)
    first = offset_BT % segment_length == 0  # the token that opens a slot
    row_L, column_L = first.nonzero(as_tuple=True)
    starts_BP[row_L, slot_BT[row_L, column_L]] = new_BT[row_L, column_L]
    if goes_on_B is not None:
        starts_BP[:, 0] &= ~goes_on_B
    index_BP = torch.zeros(rows, slots, dtype=torch.long)
    index_BP[row_L, slot_BT[row_L, column_L]] = offset_BT[row_L, column_L] // segment_length
    slot_of_token = ((row_B1 * slots + slot_BT) * segment_length + offset_BT % segment_length).flatten()
    is_empty = torch.ones(rows * slots * segment_length, dtype=torch.bool)
    is_empty[slot_of_token] = False
    token_of_slot = torch.zeros_like(is_empty, dtype=torch.long)
    token_of_slot[slot_of_token] = torch.arange(rows * length)
    return SlottedSegments(
        width=segment_length,
        shape=(rows, length),
        starts_BP=starts_BP,
        index_BP=index_BP,
        slot_of_token=slot_of_token,
        token_of_slot=token_of_slot,
        is_empty=is_empty,
        last_B=torch.arange(rows) * slots + slot_BT[:, -1],
    )


def segments_in_buckets(shape: tuple[int, int], segment_length: int, position_ids: Tensor):
    """Segments in one of at most three numbers of slots, so that a compiler sees at most three shapes.

    A batch with a row of more than eight times as many segments as one document would have is laid out as
    `split_into_segments` does, and should not be compiled: padding it would cost more than compiling saves.
    """
    least = -(-shape[1] // segment_length)
    for factor in BUCKETS:
        found = lay_into_slots(shape, segment_length, position_ids, slots=-int(-least * factor // 1))
        if found is not None:
            return found
    return split_into_segments(shape, segment_length, position_ids)


def _like(flag_B: Tensor, x_B: Tensor) -> Tensor:
    return flag_B.view(-1, *[1] * (x_B.dim() - 1))


class _Move(torch.autograd.Function):
    """Rows -> rows[source], zero where `unfilled` says so. No row goes to two places, so going back is a gather too."""

    @staticmethod
    def forward(ctx, rows, source, unfilled, back_source, back_unfilled):
        ctx.tables = (source, unfilled, back_source, back_unfilled)
        moved = rows.index_select(0, source)
        return moved if unfilled is None else moved.masked_fill(_like(unfilled, moved), 0)

    @staticmethod
    def backward(ctx, gradient):
        source, unfilled, back_source, back_unfilled = ctx.tables
        return _Move.apply(gradient, back_source, back_unfilled, source, unfilled), None, None, None, None
