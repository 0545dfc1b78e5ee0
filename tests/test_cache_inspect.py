"""Laws of `inspect` and `list`: every piece leads back to its text, and every cache of a folder is told of."""

import json

import numpy as np
import pytest

from conftest import make_texts, write_jsonl, write_parquet
from packhorse.cache.catalogue import list_caches
from packhorse.cache.histogram import document_lengths, draw, length_bins, share_bins, utilisations
from packhorse.cache.origin import origins
from packhorse.cache.restore import arrange
from packhorse.cli import main
from test_cache_check import tree

TEXTS = make_texts(60, seed=7, words=25)


@pytest.fixture
def cache(build, tmp_path):
    files = [
        str(write_parquet(tmp_path / "a.parquet", TEXTS[:30], rows=7)),
        str(write_jsonl(tmp_path / "b.jsonl", TEXTS[30:])),
    ]
    return build(files, sequences_per_chunk=20)


@pytest.mark.parametrize("split", ["train", "eval"])
def test_every_piece_leads_back_to_the_place_of_its_text(cache, tmp_path, split):
    lines = (tmp_path / "b.jsonl").read_bytes()
    seen = 0
    for number in range(cache.num_sequences(split)):
        tokens = cache.read([number], split=split).tokens[0]
        place = 0
        for origin in origins(cache, number, split):
            word, _, where = origin.place.partition(" ")
            if origin.path.endswith(".parquet"):
                assert word == "row"
                text = TEXTS[int(where)]
            else:
                assert word == "byte"
                text = json.loads(lines[int(where) :].split(b"\n")[0])["text"]
            ids = [*cache.encode(text), cache.recipe.eos_id]
            assert origin.document_tokens == len(ids)
            assert tokens[place : place + origin.length].tolist() == ids[origin.offset : origin.offset + origin.length]
            place += origin.length
            seen += 1
    assert seen > 0


@pytest.mark.parametrize(
    "settings",
    [{"packing": "best_fit"}, {"packing": "concat"}, {"packing": "pad"}, {"packing": "window", "overlap": 9}],
    ids=lambda settings: settings["packing"],
)
def test_pieces_of_a_document_follow_each_other_whatever_the_packing(settings, build, tmp_path):
    cache = build(str(write_jsonl(tmp_path / "c.jsonl", make_texts(30, words=60))), **settings)
    for number in range(cache.snapshot.num_chunks):
        pieces = arrange(cache.chunk(number), cache.recipe)
        for document in range(cache.chunk(number).header.num_documents):
            own = np.flatnonzero(pieces.documents == document)
            own = own[np.argsort(pieces.offsets[own])]
            ends = pieces.offsets[own] + pieces.lengths[own]
            assert pieces.offsets[own[0]] == 0
            assert (pieces.offsets[own[1:]] + pieces.repeated[own[1:]] == ends[:-1]).all()
            assert (pieces.repeated[own[1:]] == settings.get("overlap", 0)).all()


def test_inspect_says_what_cannot_be_read_any_more(cache, tmp_path):
    (tmp_path / "b.jsonl").unlink()
    last = origins(cache, cache.num_sequences() - 1, "train")[-1]
    assert last.path.endswith("b.jsonl")
    assert "cannot be read here" in last.place


def test_a_part_of_a_stream_is_counted_from_the_beginning_of_the_stream(build):
    cache = build(TEXTS, sequences_per_chunk=10)
    found = {}
    for number in range(cache.num_sequences()):
        for origin in origins(cache, number, "train"):
            found[int(origin.place.removeprefix("row "))] = origin
    assert len(found) > 40
    for row, origin in found.items():
        assert len(cache.encode(TEXTS[row])) + 1 == origin.document_tokens


def test_histograms_count_everything_once(cache):
    lengths, shares = document_lengths(cache), utilisations(cache)
    assert len(lengths) == cache.summary.documents
    assert lengths.sum() == cache.summary.tokens
    assert len(shares) == cache.num_sequences() + cache.num_sequences("eval")
    assert sum(count for _, count in length_bins(lengths)) == len(lengths)
    assert sum(count for _, count in share_bins(shares)) == len(shares)
    assert length_bins(np.array([1, 2, 3, 4])) == [("1 to 1", 1), ("2 to 3", 2), ("4 to 7", 1)]
    assert share_bins(np.array([0.95, 1.0, 0.899])) == [("80 to 89 %", 1), ("90 to 99 %", 1), ("100 %", 1)]
    assert draw("x", [("a", 2), ("b", 1)]) == ["x", f"  a  {'#' * 40} 2", f"  b  {'#' * 20} 1"]


def test_inspect_is_a_command_that_changes_nothing(cache, capsys):
    before = tree(cache.folder)
    assert main(["cache", "inspect", str(cache.folder), "--sequence", "3"]) == 0
    out = capsys.readouterr().out
    for part in ("train sequence 3 of", "Tokens per document", "Utilisation of sequences", "of chunk 0"):
        assert part in out, part
    assert main(["cache", "inspect", str(cache.folder), "--split", "eval", "--json"]) == 0
    assert len(json.loads(capsys.readouterr().out)["tokens"]) == 32
    assert tree(cache.folder) == before
    assert main(["cache", "inspect", str(cache.folder), "--sequence", "100000"]) == 2


def test_list_tells_of_every_cache_of_a_folder_and_of_damaged_ones(cache, build, tmp_path, capsys):
    other = build(str(tmp_path / "b.jsonl"), sequence_length=64, packing="concat", name="other")
    damaged = build(str(tmp_path / "b.jsonl"), sequence_length=16, name="third")
    (damaged.folder / "recipe.json").write_bytes(b"{}")
    entries = {entry.folder: entry for entry in list_caches(tmp_path / "cache")}
    assert set(entries) == {str(own.folder) for own in (cache, other, damaged)}
    entry = entries[str(other.folder)]
    assert (entry.tokens, entry.sequence_length, entry.packing) == (other.summary.tokens, 64, "concat")
    assert entry.bytes == sum(path.stat().st_size for path in other.folder.rglob("*") if path.is_file())
    assert "damaged" in entries[str(damaged.folder)].problem
    assert main(["cache", "list", str(tmp_path / "cache")]) == 0
    out = capsys.readouterr().out
    assert "3 caches" in out
    assert "64 tokens, concat" in out
    (tmp_path / "nothing").mkdir()
    assert main(["cache", "list", str(tmp_path / "nothing"), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["caches"] == []
