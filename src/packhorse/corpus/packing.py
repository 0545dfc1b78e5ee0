"""Documents' ids -> packed sequences.

`best_fit` cuts a document into whole sequences and a rest; rests go where they leave the least space, so that few
documents are cut and little is padded. `concat` puts documents end to end and cuts every `sequence_length` tokens.
`pad` gives every document sequences of its own. `window` is `best_fit`, but each piece of a document begins with the
last `overlap` tokens of the piece before. None loses a token. With sequence_length = 6 (a dot is padding):

    documents    aaa bcdefghi jj kkkk
    best_fit     bcdefg kkkkhi aaajj.
    concat       aaabcd efghij jkkkk.
    pad          aaa... bcdefg hi.... jj.... kkkk..
    window       bcdefg fghi.. kkkkjj aaa...             overlap = 2: f and g stand in two sequences

A piece is a run of tokens of one document in one sequence. What comes out depends on the documents alone, in their
order: nothing is carried over from, or into, another call.
"""

import heapq
from dataclasses import dataclass

import numpy as np

OPEN_SEQUENCES = 8_192
"""`best_fit`: sequences that are still being filled; beyond this the fullest is closed."""
LOOK_AHEAD = 8_192
"""`best_fit`: rests that are sorted, longest first, before they are placed."""
MAX_PIECES = 128
"""`best_fit`: pieces in one sequence, or a quarter of its length if that is more; a row of hundreds of tiny documents
makes steps uneven."""


@dataclass(frozen=True, kw_only=True)
class Packed:
    """Sequences, and which document each of their pieces is from."""

    tokens: np.ndarray
    """[num_sequences, sequence_length] of the ids' dtype, padded at the end."""
    pieces_per_sequence: np.ndarray
    """uint32 [num_sequences]."""
    piece_lengths: np.ndarray
    """uint32 [num_pieces], in the order of the sequences."""
    piece_documents: np.ndarray
    """uint32 [num_pieces]: the number of the document in the input. Its pieces in the order of the sequences are the
    document, except that `best_fit` and `window` may put the rest, its only piece shorter than a sequence, before the
    others. With `window`, all of its pieces but the first begin with `overlap` tokens of the one before."""

    @property
    def num_tokens(self) -> int:
        """Tokens without padding; those that `window` repeats count every time."""
        return int(self.piece_lengths.sum())


def pack(
    packing: str,
    ids: np.ndarray,
    ends: np.ndarray,
    sequence_length: int,
    pad_id: int,
    starts: np.ndarray | None = None,
    overlap: int = 0,
) -> Packed:
    """Pack documents into sequences.

    Args:
        packing: `best_fit`, `concat`, `pad` or `window`.
        ids: [num_tokens] of any unsigned integer: all documents, one after the other.
        ends: int64 [num_documents]: where each ends in `ids`; none is empty.
        sequence_length: Tokens per sequence.
        pad_id: What fills the end of a sequence.
        starts: int64 [num_documents]: where each begins; by default where the one before ends.
        overlap: For `window`: tokens that neighbouring pieces of a document share; below the sequence length.

    Returns:
        The sequences; every token of the documents stands in exactly one of them, but for what `window` repeats.
    """
    lengths = np.diff(ends, prepend=0) if starts is None else ends - starts
    if packing == "concat":
        placed = _concat(lengths, sequence_length)
    elif packing == "pad":
        placed = _pad(lengths, sequence_length)
    elif packing in ("best_fit", "window"):
        placed = _best_fit(lengths, sequence_length, overlap if packing == "window" else 0)
    else:
        raise ValueError(f"packing must be best_fit, concat, pad or window, not {packing!r}.")
    return _lay_out(*placed, ids, ends - lengths, sequence_length, pad_id)


def places_taken(packing: str, lengths: np.ndarray, sequence_length: int, overlap: int = 0) -> np.ndarray:
    """Places in sequences that documents take by themselves, int64: `pad` fills up their last, `window` repeats."""
    if packing == "pad":
        return -(-lengths // sequence_length) * sequence_length
    return lengths + np.maximum(0, -(-(lengths - sequence_length) // (sequence_length - overlap))) * overlap


def _concat(lengths: np.ndarray, sequence_length: int) -> tuple[np.ndarray, ...]:
    """Cut the stream at document ends and at every multiple of the sequence length."""
    document_ends = np.cumsum(lengths)
    total = int(document_ends[-1]) if len(document_ends) else 0
    cuts = np.union1d(document_ends, np.append(np.arange(sequence_length, total, sequence_length), total))
    starts = np.concatenate([[0], cuts[:-1]]).astype(np.int64)[: len(cuts)]
    keep = cuts > starts
    cuts, starts = cuts[keep], starts[keep]
    documents = np.searchsorted(document_ends, starts, side="right")
    inside = starts - (document_ends - lengths)[documents] if len(starts) else starts
    return starts // sequence_length, documents, inside, cuts - starts


def _pad(lengths: np.ndarray, sequence_length: int) -> tuple[np.ndarray, ...]:
    """A new sequence for every document, and for every `sequence_length` tokens of it."""
    counts = -(-lengths // sequence_length)
    documents = np.repeat(np.arange(len(lengths)), counts)
    sequences = np.arange(len(documents))
    starts = (sequences - np.repeat(np.cumsum(counts) - counts, counts)) * sequence_length
    return sequences, documents, starts, np.minimum(lengths[documents] - starts, sequence_length)


def _best_fit(lengths: np.ndarray, sequence_length: int, overlap: int) -> tuple[np.ndarray, ...]:
    """Bounded best fit; see Ding et al. 2024, "Fewer Truncations Improve Language Modeling" (arXiv 2404.10830)."""
    step = sequence_length - overlap
    # Whole sequences begin every `step` tokens, as long as they are whole; the rest is what no sequence has yet.
    wholes = np.maximum(0, (lengths - overlap) // step)
    rests = np.where((wholes * step + overlap < lengths) | (wholes == 0), lengths - wholes * step, 0)
    cut = np.flatnonzero(rests)
    # A window of documents ends with the last of LOOK_AHEAD rests.
    stops = [*(cut[LOOK_AHEAD - 1 :: LOOK_AHEAD] + 1).tolist(), len(lengths)]
    placing = _Placing(sequence_length)
    parts: list[tuple[np.ndarray, ...]] = []
    for start, stop in zip([0, *stops], stops, strict=False):
        whole = np.repeat(np.arange(start, stop), wholes[start:stop])
        first = np.cumsum(wholes[start:stop]) - wholes[start:stop]
        place = np.arange(len(whole)) - np.repeat(first, wholes[start:stop])
        parts.append((placing.whole(len(whole)), whole, place * step, np.full(len(whole), sequence_length)))
        documents = start + np.flatnonzero(rests[start:stop])
        documents = documents[np.argsort(-rests[documents], kind="stable")]
        sizes = rests[documents]
        parts.append((placing.best_fit(sizes.tolist()), documents, lengths[documents] - sizes, sizes))
    sequences, documents, starts, sizes = (
        np.concatenate(column).astype(np.int64) for column in zip(*parts, strict=True)
    )
    # Pieces of one sequence side by side, in the order in which they were placed.
    order = np.argsort(sequences, kind="stable")
    return sequences[order], documents[order], starts[order], sizes[order]


def max_pieces(sequence_length: int) -> int:
    """Pieces that `best_fit` puts into one sequence at most."""
    return max(MAX_PIECES, sequence_length // 4)


class _Placing:
    """Which sequence each piece goes to, one after the other."""

    def __init__(self, sequence_length: int) -> None:
        self.sequence_length, self.max_pieces = sequence_length, max_pieces(sequence_length)
        self.count = 0
        # Open sequences by the space that is left. `spaces` is a bit set of the spaces that occur: the lowest set bit
        # at or above a length is the best fit.
        self.by_space: dict[int, list[int]] = {}
        self.spaces = 0
        self.num_open = 0
        self.pieces: dict[int, int] = {}
        self.fullest: list[int] = []  # heap of spaces, may name spaces that no longer occur

    def whole(self, number: int) -> np.ndarray:
        """So many pieces that fill a sequence each."""
        self.count += number
        return np.arange(self.count - number, self.count)

    def best_fit(self, sizes: list[int]) -> np.ndarray:
        """Pieces that are shorter than a sequence: each goes where it leaves the least space."""
        placed = []
        pieces = self.pieces
        for size in sizes:
            fitting = self.spaces >> size
            if fitting:
                space = size + (fitting & -fitting).bit_length() - 1
                sequence = self._take(space)
                pieces[sequence] += 1
            else:
                space, sequence = self.sequence_length, self.count
                self.count += 1
                pieces[sequence] = 1
            placed.append(sequence)
            left = space - size
            if not left or pieces[sequence] == self.max_pieces:
                del pieces[sequence]
                continue
            if left in self.by_space:
                self.by_space[left].append(sequence)
            else:
                self.by_space[left] = [sequence]
                self.spaces |= 1 << left
                heapq.heappush(self.fullest, left)
            self.num_open += 1
            if self.num_open > OPEN_SEQUENCES:
                while self.fullest[0] not in self.by_space:
                    heapq.heappop(self.fullest)
                del pieces[self._take(self.fullest[0])]
        return np.array(placed, np.int64)

    def _take(self, space: int) -> int:
        """An open sequence with so much space; it is no longer open."""
        waiting = self.by_space[space]
        sequence = waiting.pop()
        if not waiting:
            del self.by_space[space]
            self.spaces ^= 1 << space
        self.num_open -= 1
        return sequence


def _lay_out(
    sequences: np.ndarray,
    documents: np.ndarray,
    starts: np.ndarray,
    lengths: np.ndarray,
    ids: np.ndarray,
    document_starts: np.ndarray,
    sequence_length: int,
    pad_id: int,
) -> Packed:
    """Copy the pieces to their places."""
    count = int(sequences[-1]) + 1 if len(sequences) else 0
    tokens = np.empty(count * sequence_length, ids.dtype)
    if count:
        filled = np.cumsum(lengths) - lengths
        first = np.searchsorted(sequences, sequences, side="left")
        place = sequences * sequence_length + filled - filled[first]
        source = document_starts[documents] + starts
        # Copying slices in a loop is several times as fast as gathering single ids. What stands side by side here and
        # there, like the whole sequences of one document, is one slice.
        apart = (np.diff(place) != lengths[:-1]) | (np.diff(source) != lengths[:-1])
        runs = np.flatnonzero(np.append(True, apart))
        run_lengths = np.add.reduceat(lengths, runs)
        for to, at, length in zip(place[runs].tolist(), source[runs].tolist(), run_lengths.tolist(), strict=True):
            tokens[to : to + length] = ids[at : at + length]
        used = np.bincount(sequences, weights=lengths, minlength=count).astype(np.int64)
        for row in np.flatnonzero(used < sequence_length).tolist():
            tokens[row * sequence_length + used[row] : (row + 1) * sequence_length] = pad_id
    return Packed(
        tokens=tokens.reshape(count, sequence_length),
        pieces_per_sequence=np.bincount(sequences, minlength=count).astype(np.uint32),
        piece_lengths=lengths.astype(np.uint32),
        piece_documents=documents.astype(np.uint32),
    )
