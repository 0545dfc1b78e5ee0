"""Packed batches -> nats per token by segment and by position inside documents, with the memory on, off and shuffled.

In segment 0 the memory is empty, so on and off are the same there; what off loses later is what the memory is worth.
For shuffled, the documents of a batch that are longer than a segment are unpacked into rows of their own and read with
each other's memories; those without another one in their batch are left out, and so is segment 0.

Promises: sums and counts are kept apart and added up over ranks, so every token counts once and as much as any other.

Shapes: B rows, T tokens of a row, D documents, N predictions.
"""

from collections.abc import Iterator

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy
from transformers import PreTrainedModel

from packhorse.evaluation.memory import memory_modes, read_with
from packhorse.evaluation.spans import NUM_SPANS, span_name, span_of
from packhorse.evaluation.sums import TokenSums

MODES = ("on", "off", "shuffled")
SIDES = ("segment", "position")


class MemoryLoss(TokenSums):
    """Sums of losses for each mode of the memory, by spans of segments and of positions (`span_name`)."""

    def __init__(self, **kwargs) -> None:
        super().__init__((len(MODES), len(SIDES), NUM_SPANS), **kwargs)

    def update(self, mode: str, nll_N: Tensor, position_N: Tensor, segment_length: int) -> None:
        """Add predictions.

        Args:
            mode: One of `MODES`.
            nll_N: Their losses in nats.
            position_N: Where in their documents they are made.
            segment_length: Tokens of a segment.
        """
        place = MODES.index(mode)
        for side, number_N in enumerate((position_N // segment_length, position_N)):
            span_N = span_of(number_N)
            added = torch.zeros_like(self.nll_sum[place, side]).index_add_(0, span_N, nll_N.to(self.nll_sum.dtype))
            counted = torch.bincount(span_N, minlength=NUM_SPANS)
            self._add(_at(self.nll_sum, place, side, added), _at(self.tokens, place, side, counted))

    def compute(self) -> dict[str, dict[str, dict[str, tuple[float, int]]]]:
        """Side -> span -> mode -> nats per token, and of how many tokens; without what was never seen."""
        result: dict[str, dict[str, dict[str, tuple[float, int]]]] = {side: {} for side in SIDES}
        for place, side, span in self.tokens.nonzero().tolist():
            tokens = int(self.tokens[place, side, span])
            value = (float(self.nll_sum[place, side, span]) / tokens, tokens)
            result[SIDES[side]].setdefault(span_name(span), {})[MODES[place]] = value
        # nonzero goes by mode first; a table goes by span
        order = [span_name(span) for span in range(NUM_SPANS)]
        return {
            side: dict(sorted(spans.items(), key=lambda item: order.index(item[0]))) for side, spans in result.items()
        }


@torch.no_grad()
def memory_losses(model: PreTrainedModel, batch: dict[str, Tensor]) -> Iterator[tuple[str, Tensor, Tensor]]:
    """(mode, losses [N], positions [N]) of every prediction of a packed batch, for each mode that makes sense.

    Args:
        model: With Infini-attention, in evaluation mode.
        batch: `input_ids`, `position_ids`, `labels`, each [B, T]; `segments` if they are known.
    """
    settings = model.config.infini_attention
    modes = memory_modes(model)
    if "on" in modes:
        yield ("on", *_read_packed(model, batch))
    with read_with(model, "off"):
        yield ("off", *_read_packed(model, batch))
    if "shuffled" in modes:
        for group in _unpack(batch, settings.segment_length):
            nll_N, position_N = _read_shuffled(model, group)
            late = position_N >= settings.segment_length
            yield "shuffled", nll_N[late], position_N[late]


def table_lines(values: dict, segment_length: int) -> list[str]:
    """What `MemoryLoss.compute` gave, for a terminal."""
    titles = {"segment": f"segment of {segment_length} tokens", "position": "position in the document"}
    lines = []
    for side, spans in values.items():
        modes = [mode for mode in MODES if any(mode in cells for cells in spans.values())]
        lines += ["", f"Nats per token by {titles[side]}"]
        lines.append(f"  {side:>15} {'tokens':>12}" + "".join(f"{'memory ' + mode:>17}" for mode in modes))
        for span, cells in spans.items():
            tokens = max(count for _, count in cells.values())
            shown = "".join(f"{cells[mode][0]:>17.4f}" if mode in cells else f"{'-':>17}" for mode in modes)
            lines.append(f"  {span:>15} {tokens:>12,}{shown}")
    return lines[1:]


def _read_packed(model: PreTrainedModel, batch: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
    hidden = model.model(
        input_ids=batch["input_ids"],
        position_ids=batch["position_ids"],
        segments=batch.get("segments"),
        use_cache=False,
    ).last_hidden_state
    return _losses(model, hidden, batch["labels"], batch["position_ids"])


def _read_shuffled(model: PreTrainedModel, group: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
    with read_with(model, "shuffled") as cache:
        hidden = model.model(
            input_ids=group["input_ids"], attention_mask=group["attention_mask"], past_key_values=cache
        ).last_hidden_state
    return _losses(model, hidden, group["labels"], group["position_ids"])


def _losses(model: PreTrainedModel, hidden: Tensor, labels: Tensor, position_ids: Tensor) -> tuple[Tensor, Tensor]:
    is_real = labels != -100
    hidden_ND, label_N, weight_VD = hidden[is_real], labels[is_real], model.lm_head.weight
    tokens_at_once = max(1, 2**26 // len(weight_VD))  # logits of 256 MB
    nll = [
        cross_entropy((hidden_CD @ weight_VD.T).float(), label_C, reduction="none")
        for hidden_CD, label_C in zip(hidden_ND.split(tokens_at_once), label_N.split(tokens_at_once), strict=True)
    ]
    return torch.cat(nll) if nll else hidden.new_zeros(0), position_ids[is_real]


def _unpack(batch: dict[str, Tensor], longer_than: int) -> Iterator[dict[str, Tensor]]:
    """The batch's documents of more tokens than that, as rows filled up on the right, a batch's rows at once."""
    ids, positions, labels = batch["input_ids"], batch["position_ids"], batch["labels"]
    starts = (positions == 0).flatten().nonzero().squeeze(1).tolist()
    pieces = [slice(start, stop) for start, stop in zip(starts, [*starts[1:], ids.numel()], strict=True)]
    # Padding is a piece without labels. Neighbours are of like length: a much shorter one's memory is half empty.
    flat = labels.flatten()
    pieces = [p for p in pieces if p.stop - p.start > longer_than and bool((flat[p] != -100).any())]
    pieces.sort(key=lambda piece: piece.start - piece.stop)
    number = min(-(-len(pieces) // max(2, len(ids))), len(pieces) // 2)
    for i in range(number):
        group = pieces[len(pieces) * i // number : len(pieces) * (i + 1) // number]
        width = group[0].stop - group[0].start
        rows = {
            name: torch.stack([_fill_up(tensor.flatten()[piece], width, value) for piece in group])
            for name, tensor, value in (("input_ids", ids, 0), ("position_ids", positions, 0), ("labels", labels, -100))
        }
        mask = [_fill_up(torch.ones_like(ids.flatten()[piece]), width, 0) for piece in group]
        yield {**rows, "attention_mask": torch.stack(mask)}


def _fill_up(row: Tensor, width: int, value: int) -> Tensor:
    return torch.nn.functional.pad(row, (0, width - len(row)), value=value)


def _at(like: Tensor, mode: int, side: int, values: Tensor) -> Tensor:
    whole = torch.zeros_like(like)
    whole[mode, side] = values.to(like.dtype)
    return whole
