"""Laws of column filters: the same rows from every kind of source, nothing evaluated, nothing read in vain."""

import json
import math

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from conftest import payloads, texts_in, write_jsonl
from packhorse.cache.record import read_record
from packhorse.corpus import masks
from packhorse.corpus.documents import Skipped, TextFile, read_documents
from packhorse.corpus.filters import Comparison, normal_filters, parse_filters, passes
from packhorse.errors import SettingsError, SourceError

ROWS = [
    {
        "text": f"document number {number} about something",
        "score": None if number % 7 == 0 else number % 5,
        "share": math.nan if number % 11 == 0 else number / 100,
        "language": ["en", "de", None, "naïve 'q'"][number % 4],
        "is_good": number % 3 == 0,
    }
    for number in range(200)
]
FILTERS = [
    ["score >= 3"],
    ["score != 2"],
    ["score == null"],
    ["score != null and score < 2"],
    ["share > 0.5", "share <= 1"],
    ["share != 0.25"],
    ["language == 'en'"],
    ['language >= "de" and language != "en"'],
    ["language == 'naïve \\'q\\''"],
    ["is_good == true"],
    ["is_good != true", "score > -1"],
    ["score == 99"],
    ["`score` == 3.0"],
]


def expected(filters: list[str]) -> list[str]:
    """By Python's own comparisons, written out here."""
    named = {name: f"row[{name!r}]" for name in ROWS[0]}
    kept = []
    for row in ROWS:
        holds = True
        for part in (part.strip() for text in filters for part in text.split(" and ")):
            name, operator, literal = part.replace("`", "").split(" ", 2)
            value = row[name]
            if literal == "null":
                holds &= (value is None) == (operator == "==")
            else:
                literal = {"true": "True", "false": "False"}.get(literal, literal)
                holds &= value is not None and eval(f"{named[name]} {operator} {literal}")
        if holds:
            kept.append(row["text"])
    return kept


def read(file: TextFile, rows: int, batch_bytes: int = 300) -> tuple[list[str], list[int], Skipped]:
    skipped, texts, places = Skipped(), [], []
    for batch in read_documents(file, 0, rows, skipped, batch_bytes):
        texts += batch.texts
        places += batch.rows.tolist()
    return texts, places, skipped


@pytest.fixture(scope="module")
def files(tmp_path_factory) -> dict[str, tuple[str, int]]:
    """Kind -> (path, its end): the same rows."""
    folder = tmp_path_factory.mktemp("rows")
    table = pa.Table.from_pylist(ROWS)
    pq.write_table(table, folder / "a.parquet", row_group_size=30)
    with pa.OSFile(str(folder / "a.arrow"), "wb") as sink, pa.ipc.new_stream(sink, table.schema) as writer:
        writer.write_table(table.set_column(3, "language", table["language"].dictionary_encode()).cast(table.schema))
    (folder / "a.jsonl").write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    size = (folder / "a.jsonl").stat().st_size
    ends = {"parquet": len(ROWS), "arrow": len(ROWS), "jsonl": size}
    return {kind: (str(folder / f"a.{kind}"), end) for kind, end in ends.items()}


@pytest.mark.parametrize("filters", FILTERS, ids=" | ".join)
@pytest.mark.parametrize("kind", ["parquet", "arrow", "jsonl"])
def test_every_kind_of_file_gives_the_rows_that_pass_and_counts_the_others(files, kind, filters):
    path, end = files[kind]
    texts, places, skipped = read(TextFile(path=path, kind=kind, filters=tuple(filters)), end)
    assert texts == expected(filters)
    assert [ROWS[place]["text"] for place in places] == texts
    assert (skipped.rows, skipped.filtered) == (len(ROWS), len(ROWS) - len(texts))


def test_a_part_of_a_row_group_is_filtered_as_the_whole(files):
    path, _ = files["parquet"]
    file = TextFile(path=path, kind="parquet", filters=("score >= 3",))
    parts = [batch.texts for a, b in ((0, 17), (17, 95), (95, 200)) for batch in read_documents(file, a, b, Skipped())]
    assert [text for part in parts for text in part] == expected(["score >= 3"])


NUMBERS = {
    "int64": (pa.array([2**60, 2**60 + 2**40, None], pa.int64()), [f"> {2**60 + 0.5}", f"> {2**60}"]),
    "uint64": (pa.array([2**63, 2**63 + 2**20, None], pa.uint64()), [f"> {2**63 - 1}", "> 3", "> -1.5"]),
    "float16": (pa.array(np.float16([1.5, 3.5, np.nan])), ["> 3", "!= 1.5", ">= 1.5"]),
    "float32": (pa.array([0.9, 0.95, None], pa.float32()), [">= 0.9", "< 0.95", "!= 0.9"]),
}


@pytest.mark.parametrize("kind", NUMBERS)
def test_numbers_of_every_size_are_compared_as_python_compares_them(kind, tmp_path):
    numbers, tails = NUMBERS[kind]
    pq.write_table(pa.table({"text": ["a", "b", "c"], "n": numbers}), tmp_path / "a.parquet")
    for tail in tails:
        texts, _, _ = read(TextFile(path=str(tmp_path / "a.parquet"), kind="parquet", filters=(f"n {tail}",)), 3)
        values = [
            value if value is None else getattr(value, "item", lambda v=value: v)() for value in numbers.to_pylist()
        ]
        assert texts == [
            t for t, n in zip("abc", values, strict=True) if n is not None and eval(f"{n!r} {tail}", {"nan": np.nan})
        ]


@pytest.mark.parametrize("kind", ["files", "stream"])
def test_a_cache_holds_what_passes_and_its_records_count_the_rest(build, files, kind):
    filters = ("score >= 3", "language != 'de'")
    cache = build(files["jsonl"][0] if kind == "files" else [dict(row) for row in ROWS], filters=filters)
    assert sorted(texts_in(cache)) == sorted(expected(list(filters)))
    assert cache.summary.rows_filtered == len(ROWS) - len(expected(list(filters)))
    assert any("did not pass" in line for line in cache.summary.lines())
    source = files["jsonl"][0] if kind == "files" else [dict(row) for row in ROWS]
    again = build(source, filters=['language != "de" and score >= 3.0'])
    assert again.folder == cache.folder, "the same filters in other words are the same recipe"
    assert build(source, filters=["score >= 2"]).folder != cache.folder


def test_worker_processes_filter_as_this_one_does(build, files):
    path, _ = files["parquet"]
    first = build(path, filters=["score >= 1"], name="a")
    second = build(path, filters=["score >= 1"], name="b", workers=2)
    assert payloads(first) == payloads(second)


def test_chunks_are_as_large_as_without_filters(build, tmp_path):
    rows = [{"text": f"text {i} " * 20, "score": (i * 7) % 10} for i in range(2_000)]
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "b.parquet", row_group_size=100)
    cache = build(str(tmp_path / "b.parquet"), filters=["score == 0"], eval_share=0.0)
    sizes = [read_record(cache.folder, chunk).train_sequences for chunk in range(cache.snapshot.num_chunks)]
    assert len(sizes) > 5
    assert 12 <= np.mean(sizes[:-1]) <= 32, "20 were asked for"


def test_row_groups_that_statistics_exclude_are_not_read_and_no_column_in_vain(tmp_path, monkeypatch):
    rows = [{"text": f"text {i}", "score": i, "other": i} for i in range(100)]
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "c.parquet", row_group_size=10)
    reads = []
    plain = pq.ParquetFile.read_row_group

    def note(self, number, columns, **more):
        reads.append((number, tuple(columns)))
        return plain(self, number, columns=columns, **more)

    monkeypatch.setattr(pq.ParquetFile, "read_row_group", note)
    file = TextFile(path=str(tmp_path / "c.parquet"), kind="parquet", filters=("score >= 35", "score < 42"))
    _, places, _ = read(file, 100)
    assert places == list(range(35, 42))
    assert reads == [(3, ("score",)), (3, ("text",)), (4, ("score",)), (4, ("text",))]


@given(
    values=st.lists(st.one_of(st.none(), st.integers(-3, 3)), min_size=1, max_size=6),
    operator=st.sampled_from(["==", "!=", "<", "<=", ">", ">="]),
    literal=st.one_of(st.none(), st.integers(-4, 4)),
)
def test_a_row_group_is_excluded_only_if_no_row_passes(values, operator, literal, tmp_path_factory):
    if literal is None and operator not in ("==", "!="):
        return
    comparison = Comparison(column="x", operator=operator, value=literal)
    sink = pa.BufferOutputStream()
    pq.write_table(pa.table({"x": pa.array(values, pa.int64())}), sink)
    if masks.is_excluded(pq.ParquetFile(sink.getvalue()), 0, (comparison,)):
        assert not any(passes({"x": value}, (comparison,)) for value in values)


@pytest.mark.parametrize(
    ("filters", "message"),
    [
        (["unknown > 3"], "no column 'unknown' for the filter `unknown > 3`"),
        (["score >= 'x'"], "needs a text in the column 'score'"),
        (["language == 3"], "needs a number in the column 'language'"),
        (["is_good > 3"], "needs a number in the column 'is_good', which has boolean"),
    ],
)
@pytest.mark.parametrize("kind", ["parquet", "arrow", "jsonl"])
def test_unknown_columns_and_wrong_kinds_are_refused_before_work(build, files, tmp_path, kind, filters, message):
    with pytest.raises(SourceError, match=message):
        build(files[kind][0], filters=filters)
    assert not list(tmp_path.rglob("*.chunk"))
    assert not list(tmp_path.rglob("recipe.json"))


def test_streams_refuse_unknown_columns_and_rows_that_are_none(build):
    with pytest.raises(SourceError, match="no column 'unknown'"):
        build([dict(row) for row in ROWS], filters=["unknown > 3"])
    with pytest.raises(SourceError, match="gives str, not rows"):
        build([row["text"] for row in ROWS], filters=["score > 3"])


def test_plain_text_has_no_columns(build, tmp_path):
    (tmp_path / "a.txt").write_text("some text\n" * 50)
    with pytest.raises(SourceError, match="it is plain text"):
        build(str(tmp_path / "a.txt"), filters=["score > 3"])


def test_a_json_line_of_another_kind_is_named_by_its_number(tmp_path):
    path = write_jsonl(tmp_path / "a.jsonl", ["a"])
    with path.open("a") as file:
        file.write('{"text": "b", "score": 4}\n{"text": "c", "score": "4"}\n')
    with pytest.raises(SourceError, match=r"a\.jsonl, line 3: the filter `score > 3` needs a number"):
        read(TextFile(path=str(path), kind="jsonl", filters=("score > 3",)), path.stat().st_size)


@pytest.mark.parametrize(
    "text",
    [
        *("", "score", "score >", "score > 3 and", "and", "score > 3 or x < 2", "score => 3", "score = 3", "3 < score"),
        *("score > x", "score > (3)", "score > 'x", "score > 1e999", "score > 99999999999999999999", "score < null"),
        *("flag > true", "score > 3; import os", "__import__('os') == 3", "score > f'{x}'", "score > 3 x", "s > 0x1F"),
    ],
)
def test_what_is_no_filter_is_refused(text):
    with pytest.raises(SettingsError, match="cannot be used"):
        parse_filters((text,))


@given(st.text(max_size=40) | st.from_regex(r"\A[a-z `]{0,4} ?[=!<>]{1,2} ?['\"\\0-9a-z.+-]{0,8}\Z"))
def test_any_text_is_a_filter_or_refused(text):
    try:
        comparisons = parse_filters((text,))
    except SettingsError:
        return
    assert parse_filters((" and ".join(map(str, comparisons)),)) == comparisons


def test_one_text_instead_of_a_list_of_filters_is_refused(build):
    with pytest.raises(SettingsError, match="must be a list"):
        build("sample", filters="score > 3")


def test_normal_filters_do_not_depend_on_order_spelling_or_grouping():
    assert normal_filters(["b>3", "a == 'x' and c != null"]) == normal_filters(["c!=null", '`a`=="x" and b > 3.0'])
