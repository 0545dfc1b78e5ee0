"""A chunk -> its pieces, and the documents that they were cut from.

The pieces of a document lie in several sequences; lineage tells which. In the order of the sequences they are the
document, except that `best_fit` and `window` may put the rest, the only piece shorter than a sequence, before the
others; and with `window` all pieces but the first begin with `overlap` tokens of the one before.

    sequences    bcdefg ddddhi aaacc.      ->      documents    aaa bcdefghi cc dddd
"""

from dataclasses import dataclass

import numpy as np

from packhorse.cache.reader import ChunkReader
from packhorse.cache.recipe import Recipe


@dataclass(frozen=True, kw_only=True)
class Pieces:
    """The pieces of a chunk, in the order of its sequences; all int64 [num_pieces]."""

    sequences: np.ndarray
    """The sequence that each lies in."""
    starts: np.ndarray
    """Where it begins in its sequence."""
    lengths: np.ndarray
    documents: np.ndarray
    """The document that it is of."""
    offsets: np.ndarray
    """Where it begins in its document."""
    repeated: np.ndarray
    """How many of its first tokens are those of the piece before."""


@dataclass(frozen=True, kw_only=True)
class Restored:
    """The documents of a chunk, in the order in which they stand in the source."""

    ids: np.ndarray
    """[num_tokens] in the narrowest unsigned integer: all documents, BOS and EOS included, one after the other."""
    ends: np.ndarray
    """int64 [num_documents]: where each ends in `ids`."""
    rows: np.ndarray
    """uint32 [num_documents]: its row in the chunk's source range."""
    is_eval: np.ndarray
    """bool [num_documents]: the side of the split."""

    def document(self, number: int) -> np.ndarray:
        """The ids of one document."""
        return self.ids[self.ends[number - 1] if number else 0 : self.ends[number]]


def arrange(reader: ChunkReader, recipe: Recipe) -> Pieces:
    """Where the pieces of a chunk stand, in its sequences and in its documents."""
    lengths = reader.side("piece_lengths").astype(np.int64)
    documents = reader.side("piece_documents").astype(np.int64)
    counts = reader.side("pieces_per_sequence").astype(np.int64)
    numbers = np.arange(len(lengths))
    is_rest = (lengths < recipe.sequence_length) & (recipe.packing != "concat")
    order = np.lexsort((numbers, is_rest, documents))
    is_further = np.diff(documents[order], prepend=-1) == 0
    repeated = np.zeros_like(lengths)
    repeated[order] = recipe.overlap * is_further
    new = (lengths - repeated)[order]
    before = np.cumsum(new) - new
    first = np.maximum.accumulate(np.where(is_further, 0, numbers))
    offsets = np.empty_like(lengths)
    offsets[order] = before - before[first] - repeated[order] if len(lengths) else before
    filled = np.cumsum(lengths) - lengths
    first_of_row = np.repeat(np.cumsum(counts) - counts, counts)
    return Pieces(
        sequences=np.repeat(np.arange(len(counts)), counts),
        starts=filled - filled[first_of_row] if len(lengths) else filled,
        lengths=lengths,
        documents=documents,
        offsets=offsets,
        repeated=repeated,
    )


def restore(reader: ChunkReader, recipe: Recipe) -> Restored:
    """Put the documents of a chunk together again: reads and verifies the whole chunk."""
    tokens, pieces = reader.all_tokens(), arrange(reader, recipe)
    order = np.lexsort((pieces.offsets, pieces.documents))
    lengths = (pieces.lengths - pieces.repeated)[order]
    starts = (pieces.sequences * recipe.sequence_length + pieces.starts + pieces.repeated)[order]
    ends = np.cumsum(lengths)
    places = np.repeat(starts - (ends - lengths), lengths) + np.arange(int(ends[-1]) if len(ends) else 0)
    per_document = np.bincount(pieces.documents[order], weights=lengths, minlength=reader.header.num_documents)
    return Restored(
        ids=tokens.reshape(-1)[places],
        ends=np.cumsum(per_document.astype(np.int64)),
        rows=reader.side("document_rows"),
        is_eval=reader.side("document_sides").astype(bool),
    )
