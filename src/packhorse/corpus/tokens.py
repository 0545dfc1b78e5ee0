"""Documents -> tokens: ids with BOS and EOS in their places, and on which side of the split each document stands."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import numpy as np
import xxhash

from packhorse.corpus.documents import Documents, Skipped
from packhorse.corpus.engines import Engine
from packhorse.errors import SourceError


@dataclass(frozen=True, kw_only=True)
class Tokens:
    """The tokens of some documents."""

    ids: np.ndarray
    """[num_tokens] in the narrowest unsigned integer: all documents, one after the other."""
    ends: np.ndarray
    """int64 [num_documents]: where each ends in `ids`."""
    rows: np.ndarray
    """int64 [num_documents]: the place of each in its range."""
    is_eval: np.ndarray
    """bool [num_documents]: the side of the split."""
    text_bytes: int
    """UTF-8 bytes of the texts; 4 a token for sources of ids."""


def tokenize(
    batches: Iterable[Documents],
    engine: Engine | None,
    skipped: Skipped,
    *,
    bos_id: int | None,
    eos_id: int | None,
    eval_share: float,
    vocab_size: int,
) -> Iterator[Tokens]:
    """Tokenize documents, whole ones always: the ids of a text are not those of its parts.

    Args:
        batches: The documents.
        engine: Encodes texts; not needed for sources of ids.
        skipped: Counts documents that give no token.
        bos_id: Put before every document that is not final, if any.
        eos_id: Put after every document that is not final, if any. Documents of ids that already end with it are left
            alone.
        eval_share: This share of documents is for evaluation. A document's side is a hash of its content, so it
            stays whatever else is added, and copies of a document are on the same side.
        vocab_size: Ids of a source of ids must be below.

    Yields:
        One `Tokens` for each batch; documents without any token are left out.

    Raises:
        EngineMismatch: the engine differs from the reference.
        SourceError: a source of ids has one that is outside of the vocabulary.
    """
    threshold = int(eval_share * 2**64)
    narrow = narrowest(vocab_size)
    for batch in batches:
        before, after = (None, None) if batch.is_final else (bos_id, eos_id)
        if batch.texts is not None:
            assert engine is not None
            ids, ends = engine.encode(batch.texts)
            data = [text.encode() for text in batch.texts]  # after the engine: a text keeps the UTF-8 that it asked for
        else:
            data = [np.ascontiguousarray(ids, "<u4").tobytes() for ids in batch.ids]
            ids, ends = _join_ids(batch.ids, vocab_size, before, after)
        text_bytes = sum(map(len, data))
        is_eval = np.array([xxhash.xxh3_64_intdigest(d) < threshold for d in data], bool)
        lengths = np.diff(ends, prepend=0)
        if not lengths.all():
            skipped.empty += int((lengths == 0).sum())
        keep = lengths > 0
        ids, ends = _enclose(ids.astype(narrow, copy=False), lengths[keep], before, after)
        yield Tokens(ids=ids, ends=ends, rows=batch.rows[keep], is_eval=is_eval[keep], text_bytes=text_bytes)


def narrowest(vocab_size: int) -> type[np.unsignedinteger]:
    """The unsigned integer that holds every id of a vocabulary: half the memory is half the time."""
    return np.uint8 if vocab_size <= 2**8 else np.uint16 if vocab_size <= 2**16 else np.uint32


def _enclose(ids: np.ndarray, lengths: np.ndarray, bos_id: int | None, eos_id: int | None):
    """Put BOS and EOS around every document, without a loop over documents."""
    extra = (bos_id is not None) + (eos_id is not None)
    ends = np.cumsum(lengths + extra)
    if not extra:
        return ids, ends
    out = np.empty(int(ends[-1]) if len(ends) else 0, ids.dtype)
    text = np.ones(len(out), bool)
    if bos_id is not None:
        starts = ends - lengths - extra
        out[starts] = bos_id
        text[starts] = False
    if eos_id is not None:
        out[ends - 1] = eos_id
        text[ends - 1] = False
    out[text] = ids
    return out, ends


def _join_ids(documents: list[np.ndarray], vocab_size: int, bos_id: int | None, eos_id: int | None):
    """Documents of ids, without the BOS and EOS that they may already have."""
    bare = []
    for ids in documents:
        if len(ids) and not 0 <= int(ids.min()) <= int(ids.max()) < vocab_size:
            raise SourceError(
                f"A document has ids from {int(ids.min())} to {int(ids.max())}; the vocabulary has {vocab_size}."
            )
        start = 1 if len(ids) and bos_id is not None and ids[0] == bos_id else 0
        stop = len(ids) - 1 if len(ids) > start and eos_id is not None and ids[-1] == eos_id else len(ids)
        bare.append(ids[start:stop])
    ends = np.cumsum([len(ids) for ids in bare], dtype=np.int64)
    return (np.concatenate(bare) if bare else np.empty(0)).astype(np.uint32), ends
