"""Laws of columns: a name is a name, whatever is in it; what parquet keeps as several columns is one."""

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from conftest import make_texts, payloads
from packhorse.corpus.documents import Skipped, TextFile, read_documents
from packhorse.corpus.tables import column_bytes, open_parquet

TEXTS = make_texts(400, seed=5, words=20)
IDS = [[number % 500, *range(1, 40)] for number in range(400)]


@pytest.mark.parametrize("cells", [TEXTS, IDS], ids=["texts", "lists of ids"])
def test_chunks_are_the_same_whatever_the_column_is_called(cells, build, tmp_path):
    found = []
    for name in ("text", "meta.text", "a.b.c"):
        path = tmp_path / f"{name}.parquet"
        pq.write_table(pa.table({"meta": [{"text": 1}] * 400, name: cells}), path, row_group_size=20)
        found.append(payloads(build(str(path), text_column=name, name=name)))
    assert len(found[0]) > 5
    assert found[1:] == found[:1] * 2


# A column, and a part of a struct, may have one path in parquet's metadata.
STRUCT = {"a": [{"b": number - 100, "c": "zz"} for number in range(100)]}
COLUMN = {"a.b": list(range(100))}
TEXT = {"text": [f"number {number}" for number in range(100)]}


@pytest.mark.parametrize("columns", [STRUCT | COLUMN, COLUMN | STRUCT], ids=["struct first", "column first"])
def test_a_column_is_not_taken_for_the_part_of_a_struct(columns, tmp_path):
    ids = {"a.ids": [[1, 2, 3]] * 100}
    pq.write_table(pa.table({**columns, **ids, **TEXT}), tmp_path / "a.parquet")
    opened = open_parquet(str(tmp_path / "a.parquet"))
    whole = opened.metadata.row_group(0)
    sizes = [whole.column(i).total_uncompressed_size for i in range(whole.num_columns)]
    assert [column_bytes(opened, 0, name) for name in (*columns, "a.ids", "text")] == (
        [sizes[0] + sizes[1], *sizes[2:]] if "a" == next(iter(columns)) else [sizes[0], sizes[1] + sizes[2], *sizes[3:]]
    )
    file = TextFile(path=str(tmp_path / "a.parquet"), kind="parquet", filters=("`a.b` >= 90",))
    found = [text for batch in read_documents(file, 0, 100, Skipped()) for text in batch.texts]
    assert found == TEXT["text"][90:]


@pytest.mark.parametrize("order", [1, -1])
def test_a_column_of_text_is_read_beside_a_struct_that_has_a_part_of_its_name(order, tmp_path):
    columns = {"a": [{"b": "no"}] * 100, "a.b": TEXT["text"]}
    pq.write_table(pa.table(dict(list(columns.items())[::order])), tmp_path / "a.parquet")
    file = TextFile(path=str(tmp_path / "a.parquet"), kind="parquet", column="a.b")
    found = [text for batch in read_documents(file, 0, 100, Skipped()) for text in batch.texts]
    assert found == TEXT["text"]
