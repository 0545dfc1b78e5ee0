"""Position ids -> segments: for every token its document, its segment and its place.

A segment is `segment_length` tokens of one document; it never spans two. A document starts where a position does not
follow its neighbour's, so padding that restarts at 0 is a document of its own and nobody reads it. Tokens outside
`attention_mask` belong to no segment. With segment_length = 2, and `_` for an empty place:

    row          aaaaabbb                    position ids    01234012
    segments     aa bb | aa b_ | a_          in time order: all first ones, then all second ones, ...

Longer documents stand first in each group, so the successors of a group's segments are the next group, in the same
order. That makes every step of the memory a contiguous slice, and "segments that have a past" simply the tail.

Where every row is one document and segments fill it, all of this is a reshape: `RegularSegments`.

Shapes: B rows, T tokens of a row, N segments, S places of a segment, R segments with a past, D documents,
L tokens that are not masked, H heads, K head size.
"""

from dataclasses import dataclass, fields, replace
from itertools import accumulate
from typing import Self

import torch
from torch import Tensor

from packhorse.models.config import RotaryRestart
from packhorse.models.recurrence import RunningDelta, RunningSum, delay


@dataclass(frozen=True, kw_only=True)
class RegularSegments:
    """One document a row, cut without a rest: places are found by reshaping alone."""

    rows: int
    per_row: int
    width: int

    def to(self, device: torch.device | str) -> Self:
        """Itself: there is nothing to move."""
        return self

    def fold(self, x_BTHK: Tensor) -> Tensor:
        """Tokens -> [N, S, H, K]."""
        return x_BTHK.reshape(self.rows * self.per_row, self.width, *x_BTHK.shape[2:])

    def unfold(self, x_NSHK: Tensor) -> Tensor:
        """The inverse of `fold`."""
        return x_NSHK.reshape(self.rows, self.per_row * self.width, *x_NSHK.shape[2:])

    def split(self, x_N: Tensor) -> tuple[Tensor, Tensor]:
        """[N, ...] -> the first segment of every document, and the R segments that have a past."""
        first, rest = self._by_row(x_N).split([1, self.per_row - 1], dim=1)
        return first.flatten(0, 1), rest.flatten(0, 1)

    def join(self, first: Tensor, rest_R: Tensor) -> Tensor:
        """The inverse of `split`."""
        rest = rest_R.unflatten(0, (self.rows, self.per_row - 1))
        return torch.cat([first.unsqueeze(1), rest], dim=1).flatten(0, 1)

    def previous(self, x_N: Tensor) -> Tensor:
        """The segment before each of those with a past, in the same order."""
        return self._by_row(x_N)[:, :-1].flatten(0, 1)

    def running_sum(self, x_R: Tensor, detach_every: int | None = None) -> Tensor:
        """Of values standing at `previous`: the sum over all earlier segments of the same document."""
        if detach_every is not None:
            return RunningSum.apply(x_R, self.steps, detach_every)
        return x_R.unflatten(0, (self.rows, self.per_row - 1)).cumsum(1).flatten(0, 1)

    def running_delta(self, erase_R: Tensor, x_R: Tensor, detach_every: int | None = None) -> Tensor:
        """The same where each step first erases: total = x + (1 - erase) total, with matrices."""
        return RunningDelta.apply(erase_R, x_R, self.steps, detach_every)

    def delay(self, x_R: Tensor, detach_every: int | None = None) -> Tensor:
        """The value one step earlier; a document's first, with nothing before it, keeps its own."""
        if self.per_row == 1:
            return x_R
        return torch.stack(delay(self.steps(x_R), detach_every), dim=1).flatten(0, 1)

    def steps(self, x_R: Tensor) -> tuple[Tensor, ...]:
        """Views of the segments that are second, third, ... in their documents; each goes on with the one before."""
        return x_R.unflatten(0, (self.rows, self.per_row - 1)).unbind(1)

    def places(self, device: torch.device) -> tuple[Tensor, Tensor]:
        """(document, segment of the document) of every token, [1, T] because all rows are alike."""
        index_T = torch.arange(self.per_row * self.width, device=device) // self.width
        return torch.zeros_like(index_T)[None], index_T[None]

    def positions(self, restart: RotaryRestart, device: torch.device) -> Tensor:
        """Rotary positions of a segment's places: [1, S], or [N, S] where no segment begins at 0 but the first."""
        if restart == "segment":
            return torch.arange(self.width, device=device)[None]
        return torch.arange(self.per_row * self.width, device=device).view(-1, self.width).repeat(self.rows, 1)

    def _by_row(self, x_N: Tensor) -> Tensor:
        return x_N.unflatten(0, (self.rows, self.per_row))


@dataclass(frozen=True, kw_only=True)
class RaggedSegments:
    """Any mixture of documents. Each direction knows the other one's indices, so gradients are gathers as well."""

    width: int
    group_sizes: tuple[int, ...]
    """How many documents have a first, a second, a third ... segment."""
    document_BT: Tensor
    index_BT: Tensor
    """Segment within its document; -1 for a masked token, and so is its document."""
    slot_of_token: Tensor
    masked_tokens: Tensor
    token_of_slot: Tensor
    empty_slots: Tensor
    previous_R: Tensor
    next_N: Tensor
    last_segments: Tensor

    def to(self, device: torch.device | str) -> Self:
        """The same segments with their indices on `device`."""
        tensors = {f.name: getattr(self, f.name) for f in fields(self) if isinstance(getattr(self, f.name), Tensor)}
        return replace(self, **{name: tensor.to(device, non_blocking=True) for name, tensor in tensors.items()})

    def fold(self, x_BTHK: Tensor) -> Tensor:
        """Tokens -> [N, S, H, K]; empty places are zero."""
        there, back = (self.token_of_slot, self.empty_slots), (self.slot_of_token, self.masked_tokens)
        moved = _MoveRows.apply(x_BTHK.flatten(0, 1), *there, *back)
        return moved.unflatten(0, (sum(self.group_sizes), self.width))

    def unfold(self, x_NSHK: Tensor) -> Tensor:
        """The inverse of `fold`; masked tokens get zero."""
        there, back = (self.slot_of_token, self.masked_tokens), (self.token_of_slot, self.empty_slots)
        return _MoveRows.apply(x_NSHK.flatten(0, 1), *there, *back).unflatten(0, self.document_BT.shape)

    def split(self, x_N: Tensor) -> tuple[Tensor, Tensor]:
        """[N, ...] -> the first segment of every document, and the R segments that have a past."""
        return x_N.split([self.group_sizes[0], sum(self.group_sizes[1:])])

    def join(self, first: Tensor, rest_R: Tensor) -> Tensor:
        """The inverse of `split`."""
        return torch.cat([first, rest_R])

    def previous(self, x_N: Tensor) -> Tensor:
        """The segment before each of those with a past, in the same order. Its places are all taken."""
        none = self.last_segments[:0]
        return _MoveRows.apply(x_N, self.previous_R, none, self.next_N, self.last_segments)

    def running_sum(self, x_R: Tensor, detach_every: int | None = None) -> Tensor:
        """Of values standing at `previous`: the sum over all earlier segments of the same document."""
        return RunningSum.apply(x_R, self.steps, detach_every)

    def running_delta(self, erase_R: Tensor, x_R: Tensor, detach_every: int | None = None) -> Tensor:
        """The same where each step first erases: total = x + (1 - erase) total, with matrices."""
        return RunningDelta.apply(erase_R, x_R, self.steps, detach_every)

    def delay(self, x_R: Tensor, detach_every: int | None = None) -> Tensor:
        """The value one step earlier; a document's first, with nothing before it, keeps its own."""
        return torch.cat([*delay(self.steps(x_R), detach_every), x_R[:0]])

    def steps(self, x_R: Tensor) -> tuple[Tensor, ...]:
        """Views of the segments that are second, third, ... in their documents; each goes on with the one before."""
        return x_R.split(self.group_sizes[1:])

    def places(self, device: torch.device) -> tuple[Tensor, Tensor]:
        """(document, segment of the document) of every token, [B, T]."""
        return self.document_BT.to(device), self.index_BT.to(device)

    def positions(self, restart: RotaryRestart, device: torch.device) -> Tensor:
        """Rotary positions of a segment's places: [1, S], or [N, S] where no segment begins at 0 but the first."""
        place_1S = torch.arange(self.width, device=device)[None]
        if restart == "segment":
            return place_1S
        sizes = torch.tensor(self.group_sizes, device=device)
        index_N = torch.arange(len(sizes), device=device).repeat_interleave(sizes)
        return index_N[:, None] * self.width + place_1S


Segments = RegularSegments | RaggedSegments


def split_into_segments(
    shape: tuple[int, int],
    segment_length: int,
    position_ids: Tensor | None = None,
    attention_mask: Tensor | None = None,
) -> Segments:
    """The segments of a batch of `shape` (rows, tokens of a row), with its indices on the CPU.

    Without position ids each row is one document. The work happens on the CPU because group sizes must be known to
    Python: ids on a GPU are copied once. A data loader can call this and pass the result on as `segments`.

    Args:
        shape: rows, tokens of a row.
        segment_length: the longest segment.
        position_ids: [B, T] or [1, T], restarting wherever a document starts.
        attention_mask: [B, T], 0 where a token is padding, on either side.
    """
    rows, length = shape
    is_masked = attention_mask is not None and not bool(attention_mask.all())
    if position_ids is None and not is_masked and (length <= segment_length or length % segment_length == 0):
        width = min(length, segment_length)
        return RegularSegments(rows=rows, per_row=length // width, width=width)

    real_BT = attention_mask.cpu().bool() if is_masked else torch.ones(shape, dtype=torch.bool)
    position_BT = real_BT.cumsum(1) if position_ids is None else position_ids.cpu().expand(shape)
    token_L = real_BT.flatten().nonzero().squeeze(1)
    if len(token_L) == 0:
        raise ValueError(f"attention_mask hides every token of a batch of shape {tuple(shape)}; drop that batch.")
    document_L, offset_L, length_D = _documents(position_BT.flatten()[token_L], token_L // length)
    if not is_masked and len(length_D) == rows and (length <= segment_length or length % segment_length == 0):
        return split_into_segments(shape, segment_length)
    return _ragged(shape, segment_length, token_L, document_L, offset_L, length_D)


def _documents(position_L: Tensor, row_L: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    start_L = torch.ones_like(row_L, dtype=torch.bool)
    start_L[1:] = (row_L[1:] != row_L[:-1]) | (position_L[1:] != position_L[:-1] + 1)
    first_D = start_L.nonzero().squeeze(1)
    document_L = start_L.cumsum(0) - 1
    length_D = torch.diff(first_D, append=first_D.new_tensor([len(row_L)]))
    return document_L, torch.arange(len(row_L)) - first_D[document_L], length_D


def _ragged(
    shape: tuple[int, int],
    segment_length: int,
    token_L: Tensor,
    document_L: Tensor,
    offset_L: Tensor,
    length_D: Tensor,
) -> RaggedSegments:
    width = min(segment_length, int(length_D.max()))
    count_D = (length_D + width - 1) // width
    rank_D = torch.empty_like(count_D)
    rank_D[count_D.argsort(descending=True, stable=True)] = torch.arange(len(count_D))
    group_sizes = [int((count_D > index).sum()) for index in range(int(count_D.max()))]
    group_start = torch.tensor([0, *accumulate(group_sizes)])
    num_segments, num_tokens = sum(group_sizes), shape[0] * shape[1]

    index_L = offset_L // width
    slot_L = (group_start[index_L] + rank_D[document_L]) * width + offset_L % width
    # A segment of group i > 0 follows the one of the same rank in group i - 1.
    group_R = torch.repeat_interleave(
        torch.arange(1, len(group_sizes)), torch.tensor(group_sizes[1:], dtype=torch.long)
    )
    with_past_R = torch.arange(group_sizes[0], num_segments)
    previous_R = with_past_R - group_start[group_R] + group_start[group_R - 1]

    slot_of_token, masked_tokens = _invert(token_L, slot_L, num_tokens)
    token_of_slot, empty_slots = _invert(slot_L, token_L, num_segments * width)
    next_N, last_segments = _invert(previous_R, torch.arange(len(previous_R)), num_segments)
    return RaggedSegments(
        width=width,
        group_sizes=tuple(group_sizes),
        document_BT=torch.full((num_tokens,), -1).index_copy(0, token_L, document_L).view(shape),
        index_BT=torch.full((num_tokens,), -1).index_copy(0, token_L, index_L).view(shape),
        slot_of_token=slot_of_token,
        masked_tokens=masked_tokens,
        token_of_slot=token_of_slot,
        empty_slots=empty_slots,
        previous_R=previous_R,
        next_N=next_N,
        last_segments=last_segments,
    )


def _invert(at: Tensor, value: Tensor, size: int) -> tuple[Tensor, Tensor]:
    """A table of `size` with `value` standing `at` (0 elsewhere), and where nothing stands."""
    taken = torch.zeros(size, dtype=torch.bool)
    taken[at] = True
    return torch.zeros(size, dtype=torch.long).index_copy(0, at, value), (~taken).nonzero().squeeze(1)


class _MoveRows(torch.autograd.Function):
    """Rows -> rows[source], zero at `unfilled`. The gradient is the same move with the inverse table.

    Autograd's own backward of a gather adds into a zero tensor, which is slow on a CPU and unordered on a GPU. Here no
    row goes to two places, so going back is a gather too.
    """

    @staticmethod
    def forward(ctx, rows, source, unfilled, back_source, back_unfilled):
        ctx.save_for_backward(source, unfilled, back_source, back_unfilled)
        if not len(rows):  # no document has a second segment: nothing stands anywhere
            return rows.new_zeros(len(source), *rows.shape[1:])
        return rows.index_select(0, source).index_fill_(0, unfilled, 0)

    @staticmethod
    def backward(ctx, gradient):
        source, unfilled, back_source, back_unfilled = ctx.saved_tensors
        return _MoveRows.apply(gradient, back_source, back_unfilled, source, unfilled), None, None, None, None
