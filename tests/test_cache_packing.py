"""Laws of the packings of a cache, from text to labels."""

import numpy as np
import pytest

from conftest import documents_in, make_texts, texts_in, write_jsonl
from packhorse.cache.record import read_record
from packhorse.errors import SettingsError
from packhorse.training.batches import derive

TEXTS = make_texts(60, seed=5, words=30)


@pytest.fixture
def source(tmp_path) -> str:
    return str(write_jsonl(tmp_path / "a.jsonl", TEXTS))


@pytest.mark.parametrize("packing", [{"packing": "pad"}, {"packing": "window", "overlap": 9}])
def test_every_packing_holds_every_document(build, source, packing):
    assert texts_in(build(source, **packing)) == TEXTS


def test_pad_puts_no_two_documents_into_one_sequence(build, source):
    cache = build(source, packing="pad")
    rows = cache.read(np.arange(cache.num_sequences()))
    assert all(len(lengths) == 1 for lengths in rows.piece_lengths)


def test_truncate_keeps_the_first_sequence_of_each_document_and_counts_what_is_dropped(build, source):
    whole = documents_in(build(source, packing="pad"))
    cache = build(source, packing="pad", long_documents="truncate")
    assert documents_in(cache) == [document[:32] for document in whole]
    summary = cache.summary
    assert summary.truncated_documents == sum(len(document) > 32 for document in whole) > 0
    assert summary.truncated_tokens == sum(max(0, len(document) - 32) for document in whole)
    assert summary.tokens + summary.truncated_tokens == sum(map(len, whole))
    assert any("truncated" in line for line in summary.lines())


@pytest.mark.parametrize("overlap", [1, 2, 9, 31])
def test_with_window_every_token_but_the_first_of_a_document_is_a_label_once(build, source, overlap):
    cache = build(source, packing="window", overlap=overlap, eval_share=0.0)
    rows = cache.read(np.arange(cache.num_sequences()))
    labels = derive(rows.tokens, rows.piece_lengths, rows.repeated).labels
    documents = documents_in(cache)
    assert any(len(document) > 2 * 32 for document in documents)
    assert np.sort(labels[labels >= 0]).tolist() == sorted(i for document in documents for i in document[1:])
    assert cache.summary.repeated_tokens == sum(int(own.sum()) for own in rows.repeated) > 0
    assert cache.summary.tokens - cache.summary.repeated_tokens == sum(map(len, documents))


@pytest.mark.parametrize("packing", [{}, {"packing": "window", "overlap": 1_000}], ids=str)
def test_sequences_of_131_072_tokens_go_the_whole_way(build, tmp_path, packing):
    text = " ".join(make_texts(800, seed=6))
    texts = [text * 6, text, text * 3 + " end", *TEXTS]
    source = str(write_jsonl(tmp_path / "long.jsonl", texts))
    settings = {"sequence_length": 131_072, "sequences_per_chunk": 8_000, "eval_share": 0.0, "engine": "fastokens"}
    cache = build(source, **settings, **packing)
    documents = documents_in(cache)
    assert max(map(len, documents)) > 2 * 131_072
    assert texts_in(cache) == texts
    rows = cache.read(np.arange(cache.num_sequences()))
    batch = derive(rows.tokens, rows.piece_lengths, rows.repeated)
    assert batch.input_ids.shape == (cache.num_sequences(), 131_072)
    assert int((batch.labels >= 0).sum()) >= sum(len(document) - 1 for document in documents) - cache.summary.pieces
    if packing:
        assert int((batch.labels >= 0).sum()) == sum(len(document) - 1 for document in documents)


def test_window_pieces_tell_what_they_repeat(build, source):
    cache = build(source, packing="window", overlap=9)
    rows = cache.read(np.arange(cache.num_sequences()))
    for number, expected in enumerate(rows.repeated):
        assert [piece.repeated for piece in cache.pieces(number)] == expected.tolist()


def test_other_packings_repeat_nothing(build, source):
    cache = build(source, packing="concat")
    assert cache.read([0]).repeated is None
    assert all(piece.repeated == 0 for piece in cache.pieces(0))
    assert read_record(cache.folder, 0).repeated_tokens == 0


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"packing": "window"}, "overlap must be from 1 to 31"),
        ({"packing": "window", "overlap": 32}, "overlap must be from 1 to 31"),
        ({"overlap": 4}, "overlap must be 0 unless"),
        ({"long_documents": "truncate"}, "needs `packing: pad`"),
    ],
)
def test_packing_settings_that_make_no_sense_are_refused(build, source, settings, message):
    with pytest.raises(SettingsError, match=message):
        build(source, **settings)
