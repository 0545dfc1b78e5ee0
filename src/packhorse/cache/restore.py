"""A chunk -> the documents that its sequences were packed from.

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


def restore(reader: ChunkReader, recipe: Recipe) -> Restored:
    """Put the documents of a chunk together again: reads and verifies the whole chunk."""
    tokens = reader.all_tokens()
    lengths = reader.side("piece_lengths").astype(np.int64)
    documents = reader.side("piece_documents").astype(np.int64)
    starts = piece_starts(reader)
    is_rest = (lengths < recipe.sequence_length) & (recipe.packing != "concat")
    order = np.lexsort((np.arange(len(lengths)), is_rest, documents))
    lengths, documents, starts = lengths[order], documents[order], starts[order]
    if recipe.overlap:
        is_further = np.diff(documents, prepend=-1) == 0
        lengths, starts = lengths - recipe.overlap * is_further, starts + recipe.overlap * is_further
    ends = np.cumsum(lengths)
    places = np.repeat(starts - (ends - lengths), lengths) + np.arange(int(ends[-1]) if len(ends) else 0)
    per_document = np.bincount(documents, weights=lengths, minlength=reader.header.num_documents)
    return Restored(
        ids=tokens.reshape(-1)[places],
        ends=np.cumsum(per_document.astype(np.int64)),
        rows=reader.side("document_rows"),
        is_eval=reader.side("document_sides").astype(bool),
    )


def piece_starts(reader: ChunkReader) -> np.ndarray:
    """Where the pieces of a chunk begin in its sequences, laid end to end: int64 [num_pieces]."""
    lengths = reader.side("piece_lengths").astype(np.int64)
    counts = reader.side("pieces_per_sequence").astype(np.int64)
    sequences = np.repeat(np.arange(len(counts)), counts)
    before = np.cumsum(lengths) - lengths
    first = np.repeat(np.cumsum(counts) - counts, counts)
    return sequences * reader.header.sequence_length + before - before[first] if len(lengths) else lengths
