"""Laws of sources: every form of the same texts gives the same documents; what is no text is counted, not fatal."""

import bz2
import functools
import gzip
import json
import logging
import lzma
import os
import socket
import time
import urllib.request
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from conftest import documents_in, make_texts, texts_in, write_jsonl, write_parquet
from packhorse.corpus.sources import Files, Stream, open_sources
from packhorse.errors import PackhorseError, SourceError, StorageIOError

TEXTS = [text.strip() for text in make_texts(40, seed=7, words=12)]
LINES = [text.replace("\n", " ") for text in TEXTS]


def made_of(name: str, folder: Path):
    """A source of TEXTS (or LINES) in one of its forms, and the documents that it should give."""

    rows = [{"text": text} for text in TEXTS]
    lines = "".join(json.dumps(row) + "\n" for row in rows).encode()
    if name == "parquet":
        return write_parquet(folder / "a.parquet", TEXTS, rows=7), TEXTS
    if name == "parquet of bytes":
        return write_parquet(folder / "a.parquet", [t.encode() for t in TEXTS]), TEXTS
    if name == "parquet with a dictionary":
        return write_parquet(folder / "a.parquet", pa.array(TEXTS).dictionary_encode()), TEXTS
    if name == "jsonl":
        return write_jsonl(folder / "a.jsonl", TEXTS), TEXTS
    if name == "jsonl without a last line end":
        (folder / "a.jsonl").write_bytes(lines.rstrip(b"\n"))
        return folder / "a.jsonl", TEXTS
    if name == "jsonl with CRLF, BOM and blank lines":
        (folder / "a.ndjson").write_bytes(b"\xef\xbb\xbf" + lines.replace(b"\n", b"\r\n\r\n"))
        return folder / "a.ndjson", TEXTS
    if name == "json array":
        (folder / "a.json").write_text(json.dumps(rows, indent=2))
        return folder / "a.json", TEXTS
    packed = {
        "json.gz": gzip.compress(lines),
        "jsonl.bz2": bz2.compress(lines),
        "jsonl.xz": lzma.compress(lines),
        "jsonl.zst": pa.compress(lines, "zstd", asbytes=True),
    }
    if name in packed:
        (folder / f"a.{name}").write_bytes(packed[name])
        return folder / f"a.{name}", TEXTS
    if name == "json array in gz":
        (folder / "a.json.gz").write_bytes(gzip.compress(json.dumps(rows).encode()))
        return folder / "a.json.gz", TEXTS
    if name == "txt":
        (folder / "a.txt").write_text("\n".join(LINES) + "\n")
        return folder / "a.txt", LINES
    if name == "txt with a BOM":
        (folder / "a.txt").write_text("\n".join(LINES) + "\n", encoding="utf-8-sig")
        return folder / "a.txt", LINES
    if name == "txt.gz":
        (folder / "a.txt.gz").write_bytes(gzip.compress("\n".join(LINES).encode()))
        return folder / "a.txt.gz", LINES
    if name == "datasets, saved to disk":
        import datasets

        datasets.Dataset.from_dict({"text": TEXTS}).save_to_disk(folder / "saved")
        return folder / "saved", TEXTS
    if name == "datasets, in memory":
        import datasets

        return datasets.Dataset.from_dict({"text": TEXTS}), TEXTS
    write_jsonl(folder / "1.jsonl", TEXTS[:10])
    write_parquet(folder / "2.parquet", TEXTS[10:25])
    (folder / ".hidden.jsonl").write_text("{")
    (folder / "README.md").write_text("not a source")
    if name == "folder":
        (folder / "3").mkdir()
        write_jsonl(folder / "3/4.jsonl", TEXTS[25:])
        return folder, TEXTS
    if name == "glob":
        write_parquet(folder / "3.parquet", TEXTS[25:])
        return str(folder / "?.parquet"), TEXTS[10:]
    if name == "several":
        return [str(folder / "1.jsonl"), {"path": str(folder / "2.parquet")}, folder / "1.jsonl"], TEXTS[:25] + TEXTS[
            :10
        ]
    raise AssertionError(name)


FORMS = [
    *("parquet", "parquet of bytes", "parquet with a dictionary", "jsonl", "jsonl without a last line end"),
    *("jsonl with CRLF, BOM and blank lines", "json array", "json.gz", "jsonl.bz2", "jsonl.xz", "jsonl.zst"),
    *(
        "json array in gz",
        "txt",
        "txt.gz",
        "txt with a BOM",
        "datasets, saved to disk",
        "datasets, in memory",
        "folder",
        "glob",
        "several",
    ),
]


@pytest.mark.parametrize("form", FORMS)
def test_every_form_of_the_same_texts_gives_the_same_documents(form, tmp_path, build):
    (tmp_path / "source").mkdir()
    source, expected = made_of(form, tmp_path / "source")
    cache = build(source if not isinstance(source, Path) else str(source))
    assert texts_in(cache) == expected
    assert not list(cache.folder.glob("spool/*"))


def test_parts_of_a_stream_that_are_equal_are_all_built(build):
    texts = ["salt and wool", "and yet"] * 40
    cache = build(texts, sequences_per_chunk=1)
    assert texts_in(cache) == texts
    assert cache.snapshot.num_chunks > 3
    assert not list(cache.folder.glob("spool/*"))


def stories():
    """A generator function."""
    yield from TEXTS


class Stories:
    """An iterable class, as users write it."""

    def __init__(self, count: int, fingerprint: str | None = None) -> None:
        self.count = count
        if fingerprint:
            self.fingerprint = fingerprint

    def __iter__(self):
        return ({"text": text, "more": 1} for text in TEXTS[: self.count])


ITERABLES = {
    "a list": (TEXTS, TEXTS),
    "a tuple": (tuple(TEXTS), TEXTS),
    "questions": (["How are you?", "Fine [so far]."], ["How are you?", "Fine [so far]."]),
    "a generator function": (stories, TEXTS),
    "a function that gives a list": (lambda: TEXTS, TEXTS),
    "rows": ([{"text": text, "path": "a.py"} for text in TEXTS], TEXTS),
    "an object": (Stories(9), TEXTS[:9]),
    "an object with a fingerprint": (Stories(9, "v1"), TEXTS[:9]),
    "a class by its name": ({"class_path": f"{__name__}.Stories", "init_args": {"count": 11}}, TEXTS[:11]),
    "a function by its name": ({"class_path": f"{__name__}.stories"}, TEXTS),
}


@pytest.mark.parametrize("name", ITERABLES)
def test_iterables_and_functions_are_sources(name, build):
    source, expected = ITERABLES[name]
    cache = build(source)
    assert texts_in(cache) == expected
    assert texts_in(build(source)) == expected


def test_a_generator_is_read_once_and_never_silently_from_its_middle(build, tmp_path, gpt2_like):
    assert texts_in(build(stories())) == TEXTS
    # Training a tokenizer on it needs the texts a second time.
    with pytest.raises(SourceError, match="only once"):
        build(stories(), tokenizer=str(tmp_path / "trained"), train_tokenizer=300)
    assert texts_in(build(stories, tokenizer=str(tmp_path / "trained"), train_tokenizer=300)) == TEXTS


@pytest.mark.parametrize(("streaming", "split"), [(False, "train"), (False, "train[5:25]"), (True, "train")])
def test_a_hub_data_set_goes_through_datasets(streaming, split, tmp_path, build, monkeypatch):
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "hf"))
    file = write_parquet(tmp_path / "a.parquet", TEXTS, rows=9)
    spec = {
        "path": "parquet",
        "data_files": str(file),
        "split": split,
        "streaming": streaming,
        "cache_dir": str(tmp_path),
    }
    expected = TEXTS if split == "train" else TEXTS[5:25]
    assert texts_in(build(spec)) == expected
    assert texts_in(build(spec)) == expected
    # A slice is read as a stream; it must be taken up behind another source as well.
    other = write_jsonl(tmp_path / "b.jsonl", ["first of all"])
    assert texts_in(build([str(other), spec], name="two")) == ["first of all", *expected]


def test_rows_of_text_that_datasets_reads_are_taken_up_when_their_file_grows(tmp_path, build, monkeypatch):
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "hf"))
    file = tmp_path / "a.csv"
    file.write_text("text;n\nfirst, of all;1\nsecond;2\n")
    spec = {"path": "csv", "data_files": {"train": [str(tmp_path / "*.csv")]}, "delimiter": ";"}
    before = build(spec)
    assert texts_in(before) == ["first, of all", "second"]
    file.write_text(file.read_text() + "third;3\n")
    after = build(spec)
    assert after.folder == before.folder
    assert texts_in(after) == ["first, of all", "second", "third"]


def test_what_datasets_reads_may_be_named_by_paths_and_from_home(tmp_path, build, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "a.csv").write_text("text\nfirst\n")
    write_parquet(tmp_path / "b.parquet", ["second"])
    for name, files in (("one", tmp_path / "a.csv"), ("two", {"train": [Path("~/a.csv")]}), ("three", "~/a.csv")):
        spec = {"path": "csv", "data_files": files, "cache_dir": tmp_path / "hf"}
        assert texts_in(build(spec, name=name)) == ["first"]
    for path in (tmp_path / "b.parquet", Path("~/b.parquet")):
        assert texts_in(build({"path": path})) == ["second"]
    with (tmp_path / "a.csv").open("a") as file:
        file.write("third\n")
    assert texts_in(build(spec, name="three")) == ["first", "third"]


def test_a_text_file_of_any_name_is_cut_by_datasets_as_the_settings_say(tmp_path, build):
    (tmp_path / "a.md").write_text("# One\n\ntwo\n")
    spec = {"path": "text", "data_files": str(tmp_path / "*.md")}
    assert texts_in(build(spec, sample_by="document")) == ["# One\n\ntwo\n"]


def test_files_of_a_folder_that_are_not_read_are_told_once(tmp_path, build, caplog):
    (folder := tmp_path / "mixed").mkdir()
    write_jsonl(folder / "a.jsonl", TEXTS)
    for name in ("a.csv", "b.md", "c.md", "d.md", ".hidden"):
        (folder / name).write_text("not read")
    build(str(folder))
    build(str(folder))
    told = [record.message for record in caplog.records if "not read" in record.message]
    assert told == [f"{folder}: 4 of 5 files are of an unknown kind and are not read (a.csv, b.md, c.md, ...)."]


@pytest.mark.parametrize(
    ("sample_by", "expected"), [("paragraph", ["a\nb", "c", "d\ne"]), ("document", ["a\nb\n\nc\n\nd\ne\n"])]
)
def test_a_text_file_is_cut_into_what_is_asked_for(sample_by, expected, tmp_path, build):
    (tmp_path / "a.txt").write_text("a\nb\n\nc\n\nd\ne\n")
    assert texts_in(build(str(tmp_path / "a.txt"), sample_by=sample_by)) == expected


@pytest.mark.parametrize("suffix", ["jsonl", "txt"])
def test_only_a_line_feed_ends_a_line(suffix, tmp_path, build):
    texts = ["one\u2028still one\x85and here\x0b\x0c\x1c\u2029", "two"]
    path = tmp_path / f"a.{suffix}"
    lines = [json.dumps({"text": t}, ensure_ascii=False) for t in texts] if suffix == "jsonl" else texts
    path.write_bytes("".join(line + "\n" for line in lines).encode())
    assert texts_in(build(str(path))) == texts


def invalid_rows(form: str, folder: Path):

    if form == "parquet":
        values = [b"good", None, b"", b" \n", b"\xff\xfe bad", b"also good", b"\xed\xa0\x80"]
        return write_parquet(folder / "a.parquet", pa.array(values, pa.binary()))
    if form == "parquet, a string column with wrong bytes":
        values = pa.array([b"good", None, b"", b" \n", b"\xff\xfe bad", b"also good", b"\xed\xa0\x80"], pa.binary())
        buffers = values.buffers()
        return write_parquet(folder / "a.parquet", pa.Array.from_buffers(pa.string(), len(values), buffers))
    if form == "jsonl":
        rows = [
            '{"text": "good"}',
            '{"text": null}',
            '{"text": ""}',
            "",
            '{"text": "\\ud800"}',
            '{"text": "also good"}',
        ]
        (folder / "a.jsonl").write_bytes("\n".join(rows).encode() + b'\n{"text": "\xff"}\n')
    if form == "txt":
        (folder / "a.jsonl").unlink(missing_ok=True)
        (folder / "a.txt").write_bytes(b"good\n\n \n\xff\xfe\nalso good\n\xed\xa0\x80\n")
        return folder / "a.txt"
    if form == "iterable":
        return ["good", None, "", " \n", "\ud800", "also good", "\udfff x"]
    return folder / "a.jsonl"


@pytest.mark.parametrize("form", ["parquet", "parquet, a string column with wrong bytes", "jsonl", "txt", "iterable"])
def test_null_empty_and_invalid_rows_are_counted_and_not_fatal(form, tmp_path, build):
    source = invalid_rows(form, tmp_path)
    cache = build(str(source) if isinstance(source, Path) else source, eval_share=0.0)
    assert texts_in(cache) == ["good", "also good"]
    assert (cache.summary.rows_null, cache.summary.rows_empty, cache.summary.rows_invalid) == (int(form != "txt"), 2, 2)


@pytest.mark.parametrize("form", ["parquet", "jsonl", "iterable"])
def test_lists_of_ids_are_taken_as_they_are(form, tmp_path, build, gpt2_like):
    draw = np.random.default_rng(0)
    ids = [draw.integers(1, 500, n).tolist() for n in draw.integers(1, 90, 50)]
    source = {
        "parquet": lambda: str(write_parquet(tmp_path / "a.parquet", ids, rows=8)),
        "jsonl": lambda: str(write_jsonl(tmp_path / "a.jsonl", ids)),
        "iterable": lambda: [np.array(i, np.uint16) for i in ids],
    }[form]()
    cache = build(source)
    eos = cache.recipe.eos_id
    # One that ends with EOS already does not get another.
    assert documents_in(cache) == [own if own[-1] == eos else [*own, eos] for own in ids]


@pytest.mark.parametrize("form", ["dictionary", "plain", "int32", "arrow", "fixed"])
def test_chunks_of_ids_are_as_large_as_asked_for_however_the_file_encodes_them(form, tmp_path, build):
    """A dictionary of few ids takes two bytes for each, plain ids eight."""
    draw = np.random.default_rng(0)
    kind = pa.list_(pa.int64(), 200) if form == "fixed" else pa.list_(pa.int32() if form == "int32" else pa.int64())
    table = pa.table({"text": pa.array([draw.integers(1, 500, 200).tolist() for _ in range(400)], kind)})
    path = tmp_path / ("a.arrow" if form == "arrow" else "a.parquet")
    if form == "arrow":
        with pa.ipc.new_file(path, table.schema) as writer:
            writer.write_table(table)
    else:
        pq.write_table(table, path, row_group_size=10, use_dictionary=form == "dictionary")
    cache = build(str(path), eval_share=0.0, sequences_per_chunk=250, packing="concat")
    assert cache.num_sequences("train") == pytest.approx(400 * 201 / 32, abs=20)
    assert cache.snapshot.num_chunks == 10


def test_what_datasets_computes_of_a_saved_data_set_is_not_part_of_it(tmp_path):
    import datasets

    datasets.Dataset.from_dict({"text": TEXTS}).save_to_disk(tmp_path / "saved")
    before = open_sources(str(tmp_path / "saved"))
    datasets.load_from_disk(str(tmp_path / "saved")).map(lambda row: {"text": row["text"] + "!"})
    assert len(list((tmp_path / "saved").glob("*.arrow"))) == 2
    assert open_sources(str(tmp_path / "saved")) == before
    (tmp_path / "saved" / "state.json").write_text("{}")
    with pytest.raises(SourceError, match=r"state\.json cannot be read"):
        open_sources(str(tmp_path / "saved"))


def test_a_cache_inside_of_its_source_is_no_text(tmp_path, build):
    write_jsonl(tmp_path / "a.jsonl", TEXTS)
    (tmp_path / "tokenizers").mkdir()
    write_jsonl(tmp_path / "tokenizers" / "b.jsonl", ["about tokenizers"])
    first = build(str(tmp_path), cache_dir=str(tmp_path / "runs" / "cache"))
    again = build(str(tmp_path), cache_dir=str(tmp_path / "runs" / "cache"))
    assert texts_in(again) == texts_in(first) == [*TEXTS, "about tokenizers"]


def test_links_to_folders_are_followed_once(tmp_path):
    (tmp_path / "source").mkdir()
    (tmp_path / "else").mkdir()
    write_jsonl(tmp_path / "else" / "a.jsonl", TEXTS)
    (tmp_path / "source" / "linked").symlink_to(tmp_path / "else")
    (tmp_path / "else" / "back").symlink_to(tmp_path / "source")
    (source,) = open_sources(str(tmp_path / "source"))
    assert [file.file.path for file in source.files] == [str(tmp_path / "source" / "linked" / "a.jsonl")]


class Final:
    """Ids that are what they should be."""

    is_final = True

    def __iter__(self):
        yield from FINAL


FINAL = [[0, 5, 6, 0], [5, 6], [7], [0]] * 20


@pytest.mark.parametrize("more", [{}, {"deduplicate": "exact"}, {"workers": 2, "engine": "auto"}], ids=str)
def test_final_ids_are_taken_as_they_are(build, llama_like, more):
    source = {"class_path": f"{__name__}.Final"}
    cache = build(source, tokenizer=str(llama_like), eval_share=0.0, sequences_per_chunk=2, **more)
    assert documents_in(cache) == (FINAL[:4] if "deduplicate" in more else FINAL)
    assert None not in (cache.recipe.bos_id, cache.recipe.eos_id)


@pytest.mark.parametrize("bad", [[1, 100_000], [-1], [2**40]])
def test_ids_outside_of_the_vocabulary_are_refused(bad, tmp_path, build):
    with pytest.raises(SourceError, match="the vocabulary has"):
        build(str(write_jsonl(tmp_path / "a.jsonl", [[1, 2], bad])))


@pytest.mark.parametrize("bad", [[1.5], ["a"], [[1], [2, 3]], [True], [None], 7, {"a": 1}])
def test_what_is_neither_text_nor_ids_is_counted_and_never_rounded(bad, tmp_path, build):
    cache = build(str(write_jsonl(tmp_path / "a.jsonl", [[1, 2], bad, [3]])), eval_share=0.0)
    assert cache.summary.documents == 2
    assert cache.summary.rows_invalid == 1


def test_texts_mixed_with_ids_are_refused(tmp_path, build):
    with pytest.raises(SourceError, match="mix"):
        build(str(write_jsonl(tmp_path / "a.jsonl", [[1, 2], "text"])))
    with pytest.raises(SourceError, match="mix"):
        build([[1, 2], "text"], name="other")


def test_max_documents_takes_the_first_rows(tmp_path, build):
    files = [str(write_jsonl(tmp_path / "a.jsonl", TEXTS[:15])), str(write_parquet(tmp_path / "b.parquet", TEXTS[15:]))]
    assert texts_in(build(files, max_documents=22)) == TEXTS[:22]
    assert texts_in(build(TEXTS, max_documents=22, name="list")) == TEXTS[:22]


@pytest.mark.parametrize("kind", ["jsonl", "parquet", "rows"])
def test_max_documents_counts_rows_whatever_becomes_of_them(kind, tmp_path, build):
    texts = [None, "", "same", "same", *TEXTS]
    rows = [{"text": text, "number": number} for number, text in enumerate(texts)]
    (tmp_path / "a.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    source = {"jsonl": str(tmp_path / "a.jsonl"), "parquet": str(write_parquet(tmp_path / "a.parquet", texts))}
    settings = {"filters": ("number != 6",), "deduplicate": "exact", "max_documents": 10}
    assert texts_in(build(source.get(kind, rows), **settings)) == ["same", *TEXTS[:2], *TEXTS[3:6]]


# -- bad input


def truncated_parquet(folder):
    path = write_parquet(folder / "a.parquet", TEXTS)
    path.write_bytes(path.read_bytes()[:-40])
    return str(path)


def second_file_truncated(folder):
    write_parquet(folder / "0.parquet", TEXTS)
    return str(Path(truncated_parquet(folder)).parent)


def wrong_json(folder):
    path = write_jsonl(folder / "a.jsonl", TEXTS[:6])
    with path.open("a") as file:
        file.write('\n{"text": "no end\n')
    return str(path)


def cut_gz(folder):
    (folder / "a.jsonl.gz").write_bytes(gzip.compress(b'{"text": "a"}\n' * 2_000)[:-30])
    return str(folder / "a.jsonl.gz")


def damaged_gz(folder):
    data = bytearray(gzip.compress(os.urandom(3_000), mtime=0))
    data[100:140] = bytes(40)
    (folder / "a.txt.gz").write_bytes(data)
    return str(folder / "a.txt.gz")


def cut_zst(folder):

    data = pa.compress(b'{"text": "a"}\n' * 2_000 + os.urandom(900), "zstd", asbytes=True)
    (folder / "a.jsonl.zst").write_bytes(data[:-30])
    return str(folder / "a.jsonl.zst")


def splits(folder):
    (folder / "train").mkdir()
    (folder / "dataset_dict.json").write_text("{}")
    return str(folder)


def pdf(folder):
    (folder / "a.pdf").write_bytes(b"%PDF")
    return str(folder / "a.pdf")


def csv(folder):
    (folder / "a.csv").write_text("text\na b\n")
    return str(folder / "a.csv")


def utf16(suffix):
    def write(folder):
        (folder / f"a{suffix}").write_text('{"text": "from another system"}\n', encoding="utf-16")
        return str(folder)

    return write


def utf16_gz(folder):
    (folder / "a.txt.gz").write_bytes(gzip.compress("from another system\n".encode("utf-16")))
    return str(folder)


def write_arrow(folder, column):
    with pa.ipc.new_file(folder / "a.arrow", (table := pa.table({"text": column})).schema) as writer:
        writer.write_table(table)
    return folder / "a.arrow"


def empty_file(folder):
    (folder / "a.jsonl").touch()
    return str(folder / "a.jsonl")


BAD = {
    "missing file": (lambda folder: str(folder / "no.parquet"), r"no\.parquet does not exist"),
    "empty folder": (lambda folder: str(folder), "no file that can be read"),
    "glob without files": (lambda folder: str(folder / "*.parquet"), "no file that can be read"),
    "missing column": (
        lambda folder: str(write_parquet(folder / "a.parquet", TEXTS, column="body")),
        "It has: body, number",
    ),
    "missing key": (
        lambda folder: {"path": str(write_jsonl(folder / "a.jsonl", TEXTS)), "text_column": "x"},
        "It has: text",
    ),
    "views of lists": (
        lambda folder: str(write_arrow(folder, pa.array([[1, 2]], pa.list_view(pa.int32())))),
        "neither texts nor lists of ids",
    ),
    "a dictionary of numbers": (
        lambda folder: str(write_arrow(folder, pa.array([1, 2]).dictionary_encode())),
        "neither texts nor lists of ids",
    ),
    "numbers": (lambda folder: str(write_parquet(folder / "a.parquet", [1, 2])), "neither texts nor lists of ids"),
    "truncated parquet": (truncated_parquet, r"a\.parquet cannot be read: it is damaged or cut off"),
    "a later file is truncated": (second_file_truncated, r"a\.parquet cannot be read"),
    "invalid JSON": (wrong_json, r"a\.jsonl, line 8 is not valid JSON"),
    "cut gz": (cut_gz, "damaged or cut off"),
    "damaged gz": (damaged_gz, "damaged or cut off"),
    "cut zst": (cut_zst, "damaged or cut off|not valid JSON"),
    "unknown suffix": (pdf, r"unknown kind(.|\n)*\{path: text, data_files: .*a\.pdf\}"),
    "a table of text": (csv, r"unknown kind(.|\n)*\{path: csv, data_files: .*a\.csv\}"),
    "UTF-16": (
        utf16(".txt"),
        "UTF-16, and text must be UTF-8.\nConvert it: iconv -f UTF-16 -t UTF-8 a.txt > a.utf8.txt",
    ),
    "compressed UTF-16": (utf16_gz, "iconv -f UTF-16 -t UTF-8 a.txt > a.utf8.txt"),
    "UTF-16 JSON": (utf16(".jsonl"), "UTF-16"),
    "a URL": (lambda folder: "https://example.org/a.jsonl", r"a URL.*\{path: json, data_files: https://example"),
    "a URL that is not there": (
        lambda folder: {"path": "json", "data_files": "memory://nowhere.jsonl"},
        r"`datasets` cannot read memory://nowhere\.jsonl as json",
    ),
    "nothing": (lambda folder: [], "no text"),
    "only empty texts": (lambda folder: ["", None], "2 rows left out"),
    "empty file": (empty_file, "no text"),
    "a number": (lambda folder: 7, "A source is a path"),
    "a mapping without a path": (lambda folder: {"name": "x"}, "A source is a path"),
    "no such class": (lambda folder: {"class_path": "nowhere.Nothing"}, r"nowhere\.Nothing cannot be made"),
    "no such attribute": (lambda folder: {"class_path": "json.Nothing"}, "cannot be made"),
    "no class path": (lambda folder: {"class_path": "Nothing"}, "cannot be made"),
    "wrong arguments": (lambda folder: {"class_path": f"{__name__}.Stories", "init_args": {"n": 1}}, "cannot be made"),
    "not an iterable": (lambda folder: {"class_path": "fractions.Fraction"}, "not an iterable"),
    "lists of lists": (lambda folder: [[[1], [2, 3]]], r"gave list: a document is a text, a row, or a list of ids"),
    "a row of lists of lists": (lambda folder: [{"text": [[1], [2, 3]]}], r"gave list: a document is a text"),
    "no such data set": (lambda folder: "no-such/data-set", "neither a local file or folder"),
    "no such argument": (lambda folder: {"path": "parquet", "splitt": "train"}, "no argument splitt"),
    "splits": (splits, "several splits"),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_input_is_refused_in_words_and_leaves_no_chunk(name, tmp_path, build):
    (tmp_path / "source").mkdir()
    make, message = BAD[name]
    with pytest.raises(PackhorseError, match=message) as caught:
        build(make(tmp_path / "source"))
    assert not isinstance(caught.value, StorageIOError)
    assert name == "only empty texts" or not list((tmp_path / "cache").rglob("*.chunk"))


def test_a_list_of_names_is_a_list_of_sources_and_a_list_of_texts_is_not(tmp_path):
    path = str(write_jsonl(tmp_path / "a.jsonl", TEXTS))
    assert all(isinstance(source, Files) for source in open_sources([path, path]))
    assert isinstance(open_sources(["Is it?", "x*y [1] and so on"])[0], Stream)
    with pytest.raises(SourceError, match="does not exist"):
        open_sources([path, "./typo"])


def test_a_source_by_class_path_refuses_keys_that_nobody_would_read():
    """`--data.source.init_args.megabytes=1` on the command line leaves such a key behind."""
    spec = {"class_path": "packhorse.corpus.sample.SampleCorpus", "init_args.megabytes": 1}
    with pytest.raises(SourceError, match=r"has no init_args\.megabytes"):
        open_sources(spec)


def test_a_line_of_invalid_json_stops_a_build_until_it_is_to_be_skipped(build, tmp_path):
    texts = make_texts(1200, seed=7)  # the error stands behind what is looked at before anything is made
    path = write_jsonl(tmp_path / "a.jsonl", texts[:900])
    with path.open("a") as file:
        file.write('{"text": "cut off\n[1, 2]\n')
    write_jsonl(path, texts[900:], mode="a")
    with pytest.raises(SourceError, match=r"line 901 is not valid JSON(.|\n)*invalid_rows: skip"):
        build(str(path))
    built = {p.name: p.stat().st_mtime_ns for p in tmp_path.rglob("*.chunk")}
    assert built
    cache = build(str(path), invalid_rows="skip")
    assert texts_in(cache) == texts
    assert cache.summary.rows_invalid == 2
    assert built.items() <= {p.name: p.stat().st_mtime_ns for p in tmp_path.rglob("*.chunk")}.items()


@pytest.mark.parametrize(
    "source", [lambda: iter([]), lambda: [], lambda: lambda: iter([])], ids=["once", "list", "function"]
)
def test_an_empty_stream_leaves_no_empty_cache(build, tmp_path, source):
    with pytest.raises(SourceError, match="have no text"):
        build(source())
    assert not list(tmp_path.rglob("recipe.json"))


def test_a_source_that_can_be_read_once_is_not_read_to_see_whether_it_is_empty(build):
    texts = make_texts(30)
    assert texts_in(build(iter(texts))) == texts


@pytest.mark.skipif(not Path("/proc/self/maps").exists(), reason="needs Linux")
def test_a_parquet_file_is_read_not_mapped(tmp_path, build):
    """The memory of a worker would grow with the file, and a file that is cut off would kill it."""
    path = write_parquet(tmp_path / "a.parquet", make_texts(100))
    build(str(path))
    assert str(path) not in Path("/proc/self/maps").read_text()


def test_a_hub_data_set_is_kept_in_the_download_folder_and_asked_for_again(build, tmp_path, monkeypatch):
    import datasets
    import huggingface_hub.constants as constants

    texts = make_texts(40, seed=9)
    path = str(write_parquet(tmp_path / "a.parquet", texts))
    plain, calls, pauses = datasets.load_dataset, [], []

    @functools.wraps(plain)
    def load(*arguments, **more):
        calls.append(more)
        if len(calls) < 3:
            raise ConnectionError("the line is dead")
        return plain(*arguments, **more)

    monkeypatch.setattr(datasets, "load_dataset", load)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    for name in ("HF_HUB_DOWNLOAD_TIMEOUT", "HF_HUB_ETAG_TIMEOUT"):
        monkeypatch.setattr(constants, name, 10)
    monkeypatch.setattr(time, "sleep", pauses.append)
    spec = {"path": "parquet", "data_files": path}
    folder = tmp_path / "downloads"
    cache = build(spec, download_folder=str(folder), download_timeout=7.5)
    assert sorted(texts_in(cache)) == sorted(texts)
    assert pauses == [1, 2]
    assert constants.HF_HUB_DOWNLOAD_TIMEOUT == 7.5
    assert list(folder.rglob("*.arrow"))
    calls.clear()
    with pytest.raises(SourceError, match="the line is dead"):
        build({**spec, "data_files": [path]}, download_retries=1, name="other")
    assert len(calls) == 2


@pytest.mark.parametrize(
    ("finds", "proxies", "is_offline"),
    [(False, {}, True), (True, {}, False), (False, {"https": "http://proxy"}, False)],
)
def test_without_a_network_the_hub_is_not_asked_for_half_a_minute(finds, proxies, is_offline, monkeypatch):
    import datasets
    import huggingface_hub.constants as constants

    from packhorse.corpus import hub

    flags, pauses = [], []

    def load(**_):
        flags.append((datasets.config.HF_HUB_OFFLINE, constants.HF_HUB_OFFLINE))
        raise ConnectionError("there is no network")

    def find(host, port):
        assert host == "huggingface.co"
        if not finds:
            raise OSError("Name or service not known")
        return ["an address"]

    monkeypatch.setattr(socket, "getaddrinfo", find)
    monkeypatch.setattr(urllib.request, "getproxies", lambda: proxies)
    load = functools.wraps(datasets.load_dataset)(load)
    monkeypatch.setattr(datasets, "load_dataset", load)
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(constants, "ENDPOINT", "https://huggingface.co")
    monkeypatch.setattr(hub.time, "sleep", pauses.append)
    (source,) = open_sources("my-own/books", downloads=hub.Downloads(retries=4))
    with pytest.raises(SourceError, match="nor can it be loaded"):
        source.open()
    assert set(flags) == {(is_offline, is_offline)}
    assert pauses == ([1, 2] if is_offline else [1, 2, 4, 8])
    assert (datasets.config.HF_HUB_OFFLINE, constants.HF_HUB_OFFLINE) == (False, False)


def test_a_name_that_may_be_a_mistyped_path_is_told_so_before_the_hub_is_asked_in_silence(monkeypatch, caplog):
    import datasets
    import huggingface_hub.constants as constants

    from packhorse.corpus import hub

    def load(path, split, streaming):
        client = logging.getLogger("huggingface_hub.utils._http")
        client.warning("'[Errno -2]' thrown while requesting HEAD https://huggingface.co/x")
        client.warning("Retrying in 8s [Retry 5/5].")
        client.warning("Something else")
        raise ConnectionError("there is no network")

    monkeypatch.setattr(datasets, "load_dataset", load)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(hub.time, "sleep", lambda seconds: None)
    (source,) = open_sources("my-own/texts", downloads=hub.Downloads(retries=1))
    with pytest.raises(SourceError, match="nor can it be loaded"):
        source.open()
    assert [record.getMessage() for record in caplog.records] == [
        "my-own/texts is no local path: trying the Hugging Face hub.",
        "Something else",
        "The Hugging Face hub cannot be reached (ConnectionError): trying again in 1 s.",
        "Something else",
    ]


def test_streaming_may_be_set_for_all_hub_data_sets_and_again_for_each():
    from packhorse.corpus.hub import Downloads
    from packhorse.corpus.sources import Deferred

    streamed = Downloads(streaming=True)
    kinds = [
        type(open_sources(spec, downloads=downloads)[0])
        for spec in ({"path": "a/b"}, {"path": "a/b", "streaming": True}, {"path": "a/b", "streaming": False})
        for downloads in (Downloads(), streamed)
    ]
    assert kinds == [Deferred, Stream, Stream, Stream, Deferred, Deferred]
