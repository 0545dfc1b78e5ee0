"""Laws of text files: documents do not depend on where ranges are cut, nor on how lines end."""

import re
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from packhorse.corpus import lines
from packhorse.corpus.documents import Skipped, TextFile, count_rows, find_row, read_documents
from packhorse.corpus.lines import find_cut, pieces

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
