"""Laws of packing: nothing is lost, nothing is doubled, little is padded."""

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from packhorse.corpus import packing
from packhorse.corpus.packing import pack

PAD = 999_999


def pack_lengths(kind: str, lengths: list[int], sequence_length: int, overlap: int = 0):
    """Documents of these lengths; the tokens are numbered through, so that each can be told from all others."""
    ids = np.arange(sum(lengths), dtype=np.uint32)
    return pack(kind, ids, np.cumsum(lengths, dtype=np.int64), sequence_length, PAD, overlap=overlap)


def pieces_of(packed) -> list[tuple[int, int, np.ndarray]]:
    """(sequence, document, tokens) of each piece, read from the sequences."""
    pieces, number = [], 0
    for sequence, count in enumerate(packed.pieces_per_sequence):
        place = 0
        for _ in range(count):
            length = int(packed.piece_lengths[number])
            tokens = packed.tokens[sequence, place : place + length]
            pieces.append((sequence, int(packed.piece_documents[number]), tokens))
            place, number = place + length, number + 1
        assert (packed.tokens[sequence, place:] == PAD).all()
        assert (packed.tokens[sequence, :place] != PAD).all()
    assert number == len(packed.piece_lengths)
    return pieces


def rebuild(packed, kind: str, num_documents: int, sequence_length: int) -> list[np.ndarray]:
    """Documents from their pieces: in the order of sequences; for best_fit whole sequences first, then the rest."""
    parts: list[list[np.ndarray]] = [[] for _ in range(num_documents)]
    for _, document, tokens in pieces_of(packed):
        parts[document].append(tokens)
    if kind == "best_fit":
        parts = [sorted(own, key=lambda tokens: len(tokens) < sequence_length) for own in parts]
    return [np.concatenate(own) for own in parts]


def slow_best_fit(lengths: list[int], size: int) -> list[list[tuple[int, int]]]:
    """Sequences as lists of (document, length), by looking at all open sequences for each piece."""
    sequences: list[list[tuple[int, int]]] = []
    open_ones: list[list[int]] = []  # [space, sequence], the one that was touched last at the end
    windows: list[tuple[list, list]] = [([], [])]
    for document, length in enumerate(lengths):
        windows[-1][0].extend([(document, size)] * (length // size))
        if length % size:
            windows[-1][1].append((document, length % size))
        if len(windows[-1][1]) == packing.LOOK_AHEAD:
            windows.append(([], []))
    for whole, rests in windows:
        for document, length in whole + sorted(rests, key=lambda piece: (-piece[1], piece[0])):
            fitting = [entry for entry in open_ones if entry[0] >= length]
            if length < size and fitting:
                least = min(entry[0] for entry in fitting)
                entry = next(e for e in reversed(open_ones) if e[0] == least)
                open_ones.remove(entry)
            else:
                entry = [size, len(sequences)]
                sequences.append([])
            sequences[entry[1]].append((document, length))
            entry[0] -= length
            if entry[0] and len(sequences[entry[1]]) < packing.max_pieces(size):
                open_ones.append(entry)
            if len(open_ones) > packing.OPEN_SEQUENCES:
                least = min(entry[0] for entry in open_ones)
                open_ones.remove(next(e for e in reversed(open_ones) if e[0] == least))
    return sequences


documents = st.lists(st.one_of(st.integers(1, 12), st.integers(1, 60)), max_size=60)


@pytest.mark.parametrize("kind", ["best_fit", "concat", "pad"])
@settings(max_examples=60, deadline=None)
@given(lengths=documents, sequence_length=st.integers(2, 16))
def test_every_token_stands_in_exactly_one_place_and_documents_can_be_rebuilt(kind, lengths, sequence_length):
    packed = pack_lengths(kind, lengths, sequence_length)
    tokens = packed.tokens[packed.tokens != PAD]
    assert sorted(tokens.tolist()) == list(range(sum(lengths)))
    assert packed.num_tokens == sum(lengths)
    for document, tokens in enumerate(rebuild(packed, kind, len(lengths), sequence_length)):
        start = sum(lengths[:document])
        assert tokens.tolist() == list(range(start, start + lengths[document]))


@settings(max_examples=80, deadline=None)
@given(lengths=documents, size=st.integers(2, 16), bounds=st.tuples(*[st.integers(1, 9)] * 3))
def test_best_fit_packs_as_the_slow_obvious_model_does(lengths, size, bounds):
    with pytest.MonkeyPatch.context() as patch:
        for name, bound in zip(("OPEN_SEQUENCES", "LOOK_AHEAD", "MAX_PIECES"), bounds, strict=True):
            patch.setattr(packing, name, bound)
        packed = pack_lengths("best_fit", lengths, size)
        expected = slow_best_fit(lengths, size)
    got = [[] for _ in range(len(packed.tokens))]
    for sequence, document, tokens in pieces_of(packed):
        got[sequence].append((document, len(tokens)))
    assert got == expected


@settings(max_examples=60, deadline=None)
@given(lengths=documents, size=st.integers(2, 16))
def test_concat_puts_documents_end_to_end_and_pads_the_last_sequence_only(lengths, size):
    packed = pack_lengths("concat", lengths, size)
    flat = packed.tokens.reshape(-1)
    total = sum(lengths)
    assert flat[:total].tolist() == list(range(total))
    assert (flat[total:] == PAD).all()
    assert len(flat) - total < size


@settings(max_examples=60, deadline=None)
@given(lengths=documents, sequence_length=st.integers(2, 16))
def test_pad_gives_every_document_sequences_of_its_own_in_its_order(lengths, sequence_length):
    packed = pack_lengths("pad", lengths, sequence_length)
    assert (packed.pieces_per_sequence == 1).all()
    counts = [-(-length // sequence_length) for length in lengths]
    assert packed.piece_documents.tolist() == [i for i, count in enumerate(counts) for _ in range(count)]


@settings(max_examples=100, deadline=None)
@given(lengths=documents, sequence_length=st.integers(2, 16), data=st.data())
def test_window_pieces_share_just_the_overlap_with_the_piece_before(lengths, sequence_length, data):
    overlap = data.draw(st.integers(1, sequence_length - 1))
    packed = pack_lengths("window", lengths, sequence_length, overlap)
    own: list[list[np.ndarray]] = [[] for _ in lengths]
    for _, document, tokens in pieces_of(packed):
        own[document].append(tokens)
    for document, (length, pieces) in enumerate(zip(lengths, own, strict=True)):
        pieces.sort(key=lambda tokens: len(tokens) < sequence_length)
        for before, after in itertools.pairwise(pieces):
            assert len(before) == sequence_length
            assert len(after) > overlap
            assert before[-overlap:].tolist() == after[:overlap].tolist()
        tokens = np.concatenate([pieces[0], *(piece[overlap:] for piece in pieces[1:])])
        start = sum(lengths[:document])
        assert tokens.tolist() == list(range(start, start + length))


@pytest.mark.parametrize("kind", ["best_fit", "concat", "pad", "window"])
def test_nothing_packs_to_nothing(kind):
    packed = pack_lengths(kind, [], 8)
    assert packed.tokens.shape == (0, 8)
    assert len(packed.piece_lengths) == len(packed.piece_documents) == len(packed.pieces_per_sequence) == 0


def test_best_fit_cuts_only_documents_that_are_longer_than_a_sequence():
    lengths = [5, 3, 17, 8, 1, 24, 7]
    packed = pack_lengths("best_fit", lengths, 8)
    pieces = np.bincount(packed.piece_documents)
    assert pieces.tolist() == [1, 1, 3, 1, 1, 3, 1]


def test_no_sequence_has_more_than_max_pieces():
    packed = pack_lengths("best_fit", [1] * 1_000, 512)
    assert packed.pieces_per_sequence.max() == packing.MAX_PIECES


def test_the_same_documents_are_packed_the_same_way():
    lengths = np.random.default_rng(3).integers(1, 900, 3_000).tolist()
    first, second = (pack_lengths("best_fit", lengths, 512) for _ in range(2))
    assert np.array_equal(first.tokens, second.tokens)
    assert np.array_equal(first.piece_documents, second.piece_documents)


def test_long_sequences_of_tiny_documents_are_full():
    lengths = np.random.default_rng(1).integers(5, 60, 20_000).tolist()
    packed = pack_lengths("best_fit", lengths, 8_192)
    assert packed.num_tokens / packed.tokens.size >= 0.98


def test_best_fit_fills_99_7_percent_of_a_chunk_of_natural_lengths():
    # Lengths of web pages are about log-normal; 4,000 of them make about one chunk of 8,000 sequences.
    lengths = np.random.default_rng(0).lognormal(np.log(600), 1.0, 4_000).astype(int).clip(1).tolist()
    packed = pack_lengths("best_fit", lengths, 512)
    assert packed.num_tokens / packed.tokens.size >= 0.997


def test_an_unknown_packing_is_refused():
    with pytest.raises(ValueError, match="best_fit, concat, pad or window"):
        pack_lengths("first_fit", [1], 8)
