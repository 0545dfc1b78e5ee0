"""Laws of text files: documents do not depend on where ranges are cut, nor on how lines end; no line is worth less."""

import gzip
import json
import re
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from conftest import make_texts, texts_in
from packhorse.corpus import files, lines
from packhorse.corpus.documents import Skipped, TextFile, count_rows, find_row, read_documents
from packhorse.corpus.lines import find_cut, pieces
from packhorse.errors import SourceError

PARTS = ["a", "b c", "é", "\n", "\n\n", "\r\n", "\r\n\r\n"]
KINDS = ["line", "paragraph", "document"]


def texts_of(file: TextFile, start: int, stop: int) -> list[str]:
    return [text for batch in read_documents(file, start, stop, Skipped()) for text in batch.texts]


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    """Write a text file, and have it read a few bytes at a time."""
    path = tmp_path_factory.mktemp("lines") / "a.txt"
    plain = lines.BLOCK_BYTES

    def write(data: bytes, kind: str, block_bytes: int = plain) -> TextFile:
        path.write_bytes(data)
        lines.BLOCK_BYTES = block_bytes
        return TextFile(path=str(path), kind=kind)

    yield write
    lines.BLOCK_BYTES = plain


@settings(deadline=None)
@given(parts=st.lists(st.sampled_from([*PARTS, "\r"]), max_size=12), block_bytes=st.integers(1, 9))
@pytest.mark.parametrize("kind", KINDS)
def test_cuts_at_every_byte_give_the_documents_of_the_whole(kind, parts, block_bytes, written):
    data = "".join(parts).encode()
    file = written(data, kind, block_bytes)
    whole = list(pieces(file, 0, len(data)))
    assert b"".join(whole) == data
    cuts = [find_cut(file, place, len(data)) for place in range(len(data) + 3)]
    assert all(place <= cut or cut == len(data) for place, cut in enumerate(cuts))
    assert cuts == sorted(cuts)
    for first in {0, *cuts}:
        for second in {first, *(cut for cut in cuts if cut > first)}:
            parts = [(0, first), (first, second), (second, len(data))]
            assert [piece for a, b in parts for piece in pieces(file, a, b)] == whole
    places = [find_row(file, 0, len(data), rows) for rows in range(len(whole) + 1)]
    assert [data[a:b] for a, b in pairwise(places)] == whole
    assert all(count_rows(file, 0, place) == rows for rows, place in enumerate(places))


@settings(deadline=None)
@given(parts=st.lists(st.sampled_from(PARTS), max_size=12))
@pytest.mark.parametrize("kind", KINDS)
def test_lines_that_end_with_crlf_give_the_documents_of_those_that_end_with_lf(kind, parts, written):
    found = []
    for data in ("".join(parts), (lf := "".join(parts).replace("\r\n", "\n")), lf.replace("\n", "\r\n")):
        file = written(data.encode(), kind)
        found.append(texts_of(file, 0, len(data.encode())))
    assert found[1:] == found[:1] * 2


@settings(deadline=None)
@given(parts=st.lists(st.sampled_from(["a", "\n", "\n\n", " "]), max_size=14))
def test_paragraphs_of_lines_that_end_with_lf_are_cut_at_every_second_line_end(parts, written):
    """Caches that stand have these, from wherever their ranges begin."""
    data = "".join(parts).encode()
    file = written(data, "paragraph")
    for start in range(len(data)):
        assert list(pieces(file, start, len(data))) == re.findall(rb"(?s).*?\n\n|.+", data[start:])


@pytest.mark.parametrize("end", ["\n", "\r\n", "mixed"])
@pytest.mark.parametrize("sample_by", KINDS)
def test_documents_of_text_files_are_those_of_datasets(end, sample_by, tmp_path, written):
    import datasets

    text = "a\nb\n\nc é\n\n\nd\n\n\n\ne\nf\n\n  g\n"
    if end == "mixed":
        ends = iter(["\n", "\r\n", "\r\n"] * 9)
        text = re.sub("\n", lambda match: next(ends), text)
    else:
        text = text.replace("\n", end)
    file = written(text.encode(), sample_by)
    rows = datasets.load_dataset("text", data_files=file.path, sample_by=sample_by, split="train", streaming=True)
    # Line ends at the end of the last one are left out here, and so are rows without text.
    theirs = [row["text"] if sample_by == "document" else row["text"].rstrip("\n") for row in rows]
    assert texts_of(file, 0, len(text.encode())) == [text for text in theirs if text.strip()]


BAD_LINES = [b'{"text": "cut off', b"[1, 2]", b"\xff\xfe", b'{"text": "\xff"}', b"", b"7", b"[" * 100_000]


def json_lines(path, texts: list[str], bad: list[bytes]) -> str:
    data = b"".join(line + b"\n" for line in [*bad, *(json.dumps({"text": text}).encode() for text in texts)])
    path.write_bytes(gzip.compress(data) if path.suffix == ".gz" else data)
    return str(path)


@pytest.mark.parametrize("name", ["a.jsonl", "a.jsonl.gz"])
def test_the_first_lines_of_a_file_are_left_out_and_counted_as_the_others(name, build, tmp_path):
    texts = make_texts(20)
    cache = build(json_lines(tmp_path / name, texts, BAD_LINES), invalid_rows="skip", filters=["text != ''"])
    assert texts_in(cache) == texts
    assert (cache.summary.rows_invalid, cache.summary.rows_empty) == (len(BAD_LINES) - 1, 1)


@pytest.mark.parametrize("name", ["a.jsonl", "a.jsonl.gz"])
def test_a_first_line_of_invalid_json_stops_a_build_in_the_words_of_every_line(name, build, tmp_path):
    source = json_lines(tmp_path / name, make_texts(20), [b'{"text": "\xff"}', b"", BAD_LINES[0]])
    with pytest.raises(SourceError, match=r"line 3 is not valid JSON(.|\n)*invalid_rows: skip"):
        build(source)


def test_invalid_first_lines_of_any_file_stop_a_build_before_it_makes_anything(build, tmp_path):
    good = json_lines(tmp_path / "a.jsonl", make_texts(20), [])
    bad = json_lines(tmp_path / "b.jsonl", make_texts(20), BAD_LINES)
    with pytest.raises(SourceError, match=r"b\.jsonl, line 1 is not valid JSON"):
        build([good, bad])
    assert not list(tmp_path.rglob("recipe.json"))


def test_the_column_is_looked_for_in_the_first_valid_line(build, tmp_path):
    source = json_lines(tmp_path / "a.jsonl", make_texts(20), BAD_LINES)
    with pytest.raises(SourceError, match=r"no column 'body'\. It has: text"):
        build(source, text_column="body", invalid_rows="skip")
    with pytest.raises(SourceError, match=r"no column 'score' for the filter .* It has: text"):
        build(source, filters=["score > 1"], invalid_rows="skip")


@pytest.mark.parametrize("end", [b"", b"\n"])
def test_a_file_without_a_valid_line_is_not_read_to_its_end(end, build, tmp_path, monkeypatch):
    monkeypatch.setattr(files, "LOOK_BYTES", 300)
    (tmp_path / "a.jsonl").write_bytes((b"no json" + end) * 100)
    with pytest.raises(SourceError, match=r"No line in the first .* MB of .*a\.jsonl is a valid JSON object"):
        build(str(tmp_path / "a.jsonl"), invalid_rows="skip")
    (tmp_path / "b.jsonl").write_bytes((b"no json" + end) * 10)
    with pytest.raises(SourceError, match="have no text"):
        build(str(tmp_path / "b.jsonl"), invalid_rows="skip")
