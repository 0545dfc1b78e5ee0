"""Laws of reading: by number, in the order asked for, the same from any process; and every token has a source."""

import json
import os
import pickle
import subprocess
import sys

import numpy as np
import psutil
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer

from conftest import all_tokens, documents_in, make_texts, write_jsonl, write_parquet
from packhorse.cache import Cache, build_cache, open_cache, reader, snapshot
from packhorse.cache.record import read_record
from packhorse.cache.workers import usable_cores

TEXTS = make_texts(150, seed=6, words=20)


@pytest.fixture(scope="module")
def made(tmp_path_factory, gpt2_like):
    """A cache of several chunks, from a table and a text file."""
    folder = tmp_path_factory.mktemp("reader")
    files = [
        str(write_parquet(folder / "a.parquet", TEXTS[:90], rows=11)),
        str(write_jsonl(folder / "b.jsonl", TEXTS[90:])),
    ]
    options = {"sequence_length": 32, "sequences_per_chunk": 25, "eval_share": 0.2, "workers": 0, "engine": "hf"}
    return build_cache(files, tokenizer=str(gpt2_like), cache_dir=str(folder / "cache"), **options)


def test_a_cache_is_found_from_home_and_read_wherever_the_process_goes(made, tmp_path, monkeypatch):
    expected = all_tokens(made)
    monkeypatch.setenv("HOME", str(made.folder.parent))
    assert np.array_equal(all_tokens(open_cache(f"~/{made.folder.name}")), expected)
    monkeypatch.chdir(made.folder.parent)
    caches = [open_cache(made.folder.name), Cache(made.folder.name), Cache(f"~/{made.folder.name}")]
    monkeypatch.chdir(tmp_path)
    assert all(np.array_equal(all_tokens(cache), expected) for cache in caches)
    assert {cache.folder for cache in caches} == {made.folder}


def source_rows(cache, record):
    """The texts of a chunk's ranges, in order."""
    rows = []
    for file, start, stop in record.ranges:
        if file == 0:
            rows += TEXTS[start:stop]
        else:
            data = (cache.folder.parents[1] / "b.jsonl").read_bytes()[start:stop]
            rows += [json.loads(line)["text"] for line in data.splitlines()]
    return rows


def straightforward(cache, split):
    """(tokens, piece lengths) of all sequences, chunk by chunk, by decoding whole files."""
    tokens, lengths = [], []
    for number in range(cache.snapshot.num_chunks):
        chunk = cache.chunk(number)
        counts = chunk.side("pieces_per_sequence")
        ends = np.cumsum(counts)
        first, last = (0, chunk.header.num_train) if split == "train" else (chunk.header.num_train, len(counts))
        for row in range(first, last):
            tokens.append(chunk.tokens(row).tolist())
            lengths.append(chunk.side("piece_lengths")[ends[row] - counts[row] : ends[row]].tolist())
    return tokens, lengths


@pytest.mark.parametrize("split", ["train", "eval"])
def test_read_gives_what_the_chunks_hold_in_the_order_asked_for(made, split):
    tokens, lengths = straightforward(made, split)
    assert made.num_sequences(split) == len(tokens) > 0
    numbers = np.random.default_rng(0).integers(0, len(tokens), 500)
    got = made.read(numbers, split=split)
    assert got.tokens.tolist() == [tokens[n] for n in numbers]
    assert [own.tolist() for own in got.piece_lengths] == [lengths[n] for n in numbers]
    assert got.tokens.dtype == np.uint16


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_any_selection_is_the_selection_of_everything(made, data):
    count = made.num_sequences()
    numbers = data.draw(st.lists(st.integers(0, count - 1), max_size=20))
    assert np.array_equal(made.read(numbers).tokens, all_tokens(made)[numbers].reshape(-1, 32))


@pytest.mark.parametrize("bad", [[-1], [10**6], [0, -5], [2**40]])
def test_numbers_that_do_not_exist_are_an_index_error(made, bad):
    for split in ("train", "eval"):
        with pytest.raises(IndexError, match=f"{split} sequences go from 0 to"):
            made.read(bad, split=split)
    with pytest.raises(IndexError):
        made.read([made.num_sequences("eval")], split="eval")


def test_a_split_that_does_not_exist_is_refused(made):
    with pytest.raises(ValueError, match="train or eval"):
        made.read([0], split="validation")


def test_a_cache_can_be_pickled_into_another_process(made):
    made.read([0])  # with an open file
    copy = pickle.loads(pickle.dumps(made))
    assert np.array_equal(all_tokens(copy), all_tokens(made))


def test_every_piece_leads_back_to_its_row_and_holds_the_tokens_of_that_row(made):
    tokenizer = Tokenizer.from_file(str(made.tokenizer_folder / "tokenizer.json"))
    tokenizer.encode_special_tokens = True
    eos = made.recipe.eos_id
    seen = []
    for number in range(made.snapshot.num_chunks):
        chunk, record = made.chunk(number), read_record(made.folder, number)
        rows = source_rows(made, record)
        document_rows, ends = chunk.side("document_rows"), {}
        for row in range(chunk.header.num_sequences):
            tokens, place = chunk.tokens(row), 0
            for size, document in zip(chunk.piece_lengths(row), chunk.piece_documents(row), strict=True):
                expected = [*tokenizer.encode(rows[document_rows[document]], add_special_tokens=False).ids, eos]
                piece = tokens[place : place + size].tolist()
                # Cut at multiples of the sequence length: whole sequences in order, then the rest.
                start = ends.get(document, 0) if size == 32 else len(expected) - size
                assert piece == expected[start : start + size]
                if size == 32:
                    ends[document] = start + 32
                place += int(size)
        seen += [rows[i] for i in document_rows]
    assert seen == TEXTS


def test_the_sums_are_those_of_the_chunks(made):
    summary = made.summary
    chunks = [made.chunk(n) for n in range(made.snapshot.num_chunks)]
    assert summary.chunks == len(chunks)
    assert summary.documents == len(TEXTS)
    assert summary.tokens == sum(int(c.side("piece_lengths").sum()) for c in chunks)
    assert summary.slots == 32 * (summary.train_sequences + summary.eval_sequences)
    assert summary.pieces == sum(c.header.num_pieces for c in chunks)
    assert summary.train_sequences == made.num_sequences()
    assert summary.eval_sequences == made.num_sequences("eval")
    assert summary.text_bytes == sum(len(text.encode()) for text in TEXTS)
    assert 0.5 < summary.utilisation <= 1


def test_a_cache_shows_its_folder_and_its_sums(made):
    sums = made.summary
    for part in (
        str(made.folder),
        f"{sums.chunks} chunks",
        f"{sums.train_sequences:,} train",
        f"{sums.tokens:,} tokens",
    ):
        assert part in repr(made), part


def test_a_snapshot_of_some_chunks_is_a_beginning(made):
    for n in range(made.snapshot.num_chunks + 1):
        part = Cache(made.folder, num_chunks=n)
        count = part.num_sequences()
        assert count == sum(read_record(made.folder, c).train_sequences for c in range(n))
        assert np.array_equal(all_tokens(part), all_tokens(made)[:count])
    digests = {Cache(made.folder, num_chunks=n).snapshot.digest for n in range(made.snapshot.num_chunks + 1)}
    assert len(digests) == made.snapshot.num_chunks + 1


def test_an_index_of_many_pages_reads_the_same(made, build, tmp_path, monkeypatch):
    monkeypatch.setattr(snapshot, "PAGE_CHUNKS", 2)
    options = {"sequences_per_chunk": 25, "eval_share": 0.2, "name": "pages"}
    source = tmp_path / "a.jsonl"
    write_jsonl(source, TEXTS[:70])
    part = build(str(source), **options)
    expected = all_tokens(part)
    write_jsonl(source, TEXTS[70:], "a")
    whole = build(str(source), **options)
    assert len(list((whole.folder / "index").glob("*.idx"))) == -(-whole.snapshot.num_chunks // 2) > 2
    for split in ("train", "eval"):
        tokens, _ = straightforward(whole, split)
        assert all_tokens(whole, split).tolist() == tokens
    assert np.array_equal(all_tokens(Cache(whole.folder, num_chunks=part.snapshot.num_chunks)), expected)
    assert np.array_equal(all_tokens(part), expected)


@pytest.mark.parametrize("page_chunks", [2, 4_096])
def test_an_index_that_another_builder_extended_meanwhile_is_not_extended_twice(
    page_chunks, build, tmp_path, monkeypatch
):
    monkeypatch.setattr(snapshot, "PAGE_CHUNKS", page_chunks)
    source = write_jsonl(tmp_path / "a.jsonl", TEXTS[:50])
    stale = snapshot.Index(build(str(source)).folder)
    write_jsonl(source, TEXTS[50:], "a")
    whole = build(str(source))
    expected = (whole.snapshot.num_chunks, whole.snapshot.digest, whole.snapshot.totals)
    # The first time with a plan that has become longer as well, unseen.
    for planned in (stale.num_chunks + 1, whole.snapshot.num_chunks):
        pickle.loads(pickle.dumps(stale)).extend(planned, lambda record: True)
        again = snapshot.Snapshot(snapshot.Index(whole.folder))
        assert (again.num_chunks, again.digest, again.totals) == expected
    assert np.array_equal(all_tokens(Cache(whole.folder)), all_tokens(whole))


def test_a_vocabulary_of_more_than_16_bits_reads_back(build, tmp_path, gpt2_like):
    # Ids of a source of ids may be anything below the vocabulary, so a large one needs only a large added id.
    content = json.loads((gpt2_like / "tokenizer.json").read_text())
    content["model"]["vocab"]["largest"] = 151_668
    (tmp_path / "large").mkdir()
    (tmp_path / "large/tokenizer.json").write_text(json.dumps(content))
    config = json.dumps({"eos_token": "<|endoftext|>"})
    (tmp_path / "large/tokenizer_config.json").write_text(config)
    draw = np.random.default_rng(0)
    documents = [draw.integers(1, 151_669, n).tolist() for n in draw.integers(2, 200, 60)]
    cache = build(documents, tokenizer=str(tmp_path / "large"), packing="concat", eval_share=0.0)
    assert cache.vocab_size == 151_669
    tokens = cache.read(range(cache.num_sequences()))
    assert tokens.tokens.dtype == np.uint32
    assert documents_in(cache) == [[*own, cache.recipe.eos_id] for own in documents]


def test_many_open_chunks_are_closed_again(made, monkeypatch):
    monkeypatch.setattr(reader, "OPEN_CHUNKS", 2)
    cache = Cache(made.folder)
    assert cache.snapshot.num_chunks > 4
    before = psutil.Process().num_fds()
    assert np.array_equal(all_tokens(cache), all_tokens(made))
    assert len(cache._reader._open) == 2
    assert psutil.Process().num_fds() <= before + made.snapshot.num_chunks + 2


def test_usable_cores_are_at_least_one_and_no_more_than_allowed():
    cores = usable_cores()
    assert 1 <= len(cores) <= len(os.sched_getaffinity(0))
    assert set(cores) <= os.sched_getaffinity(0)


def test_pieces_lead_from_a_sequence_back_to_its_documents(made):
    for split in ("train", "eval"):
        for number in range(made.num_sequences(split)):
            tokens, end = made.read([number], split).tokens[0], 0
            for piece in made.pieces(number, split):
                start, end = end, end + piece.length
                ids = [i for i in tokens[start:end].tolist() if i != made.recipe.eos_id]
                text = source_rows(made, read_record(made.folder, piece.chunk))[piece.row]
                # A cut inside a character leaves part of it on either side.
                assert made.decode(ids).strip("\ufffd") in text


def test_a_process_ends_quietly_with_a_cache_in_its_hands(tmp_path, gpt2_like):
    code = f"""
import torch  # with which modules are gone before their objects
from packhorse import build_cache
documents, folder = ["one text", "another"], {str(tmp_path)!r}
cache = build_cache(documents, tokenizer={str(gpt2_like)!r}, sequence_length=16, cache_dir=folder)
cache.read([0])
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert "ignored" not in done.stderr
