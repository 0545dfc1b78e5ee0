"""Laws of `validate`: it finds whatever is damaged, says what and how, and changes nothing."""

import json
import shutil
import struct
import zlib
from dataclasses import asdict, replace

import numpy as np
import pytest

from conftest import make_texts, write_jsonl
from packhorse.cache import CacheSettings, store
from packhorse.cache.check import check_cache
from packhorse.cache.chunk import encode_chunk
from packhorse.cache.record import chunk_path, read_record, record_path
from packhorse.cache.repair import repair_cache
from packhorse.cache.restore import restore
from packhorse.cache.snapshot import HEADER, ROW, Index
from packhorse.cli import main
from packhorse.errors import CacheIncompleteError

DEPTHS = ("quick", "full", "deep")


@pytest.fixture
def cache(build, tmp_path):
    """A few chunks of a few sequences."""
    made = build(str(write_jsonl(tmp_path / "a.jsonl", make_texts(40, words=20))), sequences_per_chunk=12)
    assert made.snapshot.num_chunks >= 4
    return made


def tree(folder):
    """Every file and folder below one: what it is, its content, its time."""
    return {
        str(path.relative_to(folder)): (
            path.stat().st_mtime_ns,
            path.stat().st_ino,
            path.is_file() and path.read_bytes(),
        )
        for path in sorted(folder.rglob("*"))
    }


def sources(tmp_path):
    return CacheSettings(source=str(tmp_path / "a.jsonl"), tokenizer="x").open_sources()


def file_of(cache, chunk):
    return chunk_path(cache.folder, chunk, read_record(cache.folder, chunk).file_sha256)


def flip(path, place):
    data = bytearray(path.read_bytes())
    data[place] ^= 0x10
    path.write_bytes(data)


def found(cache, depth="full", **more):
    """(kind, chunk) of everything that is found, and nothing was changed by looking."""
    before = tree(cache.folder)
    report = check_cache(cache.folder, depth, **more)
    assert tree(cache.folder) == before
    assert all(finding.remedy for finding in report.findings)
    return {(finding.kind, finding.chunk) for finding in report.findings}


@pytest.mark.parametrize("depth", DEPTHS)
@pytest.mark.parametrize(
    "settings",
    [{"packing": "best_fit"}, {"packing": "concat"}, {"packing": "pad"}, {"packing": "window", "overlap": 7}],
    ids=lambda settings: settings["packing"],
)
def test_nothing_is_found_where_nothing_is_wrong(depth, settings, build, tmp_path):
    texts = [*make_texts(30, words=30), "", " ", "long " * 300]
    cache = build(str(write_jsonl(tmp_path / "a.jsonl", texts)), **settings)
    before = tree(tmp_path)
    report = check_cache(cache.folder, depth, sources(tmp_path))
    assert tree(tmp_path) == before
    assert report.is_good, report.lines()
    assert report.notes == []
    assert report.retokenized == (cache.summary.documents if depth == "deep" else 0)


def test_a_truncated_document_is_compared_as_far_as_it_goes(build, tmp_path):
    source = str(write_jsonl(tmp_path / "a.jsonl", make_texts(30, words=40)))
    cache = build(source, packing="pad", long_documents="truncate")
    assert cache.summary.truncated_documents
    assert found(cache, "deep", sources=sources(tmp_path)) == set()


def test_every_kind_of_damage_is_found_at_the_depth_that_reads_it(cache):
    folder = cache.folder
    small = {
        "recipe.json": ("recipe", None),
        "tokenizer/tokenizer.json": ("tokenizer", None),
        "plan/000000.json": ("plan", None),
        "records/000000/00000002.json": ("record", 2),
        "metadata.json": ("metadata", None),
        str(next((folder / "index").iterdir()).relative_to(folder)): ("index", None),
    }
    for name, expected in small.items():
        data = (folder / name).read_bytes()
        for damage in (bytes([data[0] ^ 1]) + data[1:], data[:-1], data[: len(data) // 2], b""):
            (folder / name).write_bytes(damage)
            assert found(cache, "quick") == {expected}, name
        if name not in ("recipe.json", "metadata.json", "plan/000000.json"):
            (folder / name).unlink()
            assert found(cache, "quick") == {expected}, name
        (folder / name).write_bytes(data)
    path = file_of(cache, 1)
    data = path.read_bytes()
    path.write_bytes(data[:-1])
    assert found(cache, "quick") == {("chunk", 1)}
    path.write_bytes(data[:-1] + bytes([data[-1] ^ 1]))
    assert found(cache, "quick") == set()
    assert found(cache, "full") == {("chunk", 1)}
    path.unlink()
    assert found(cache, "quick") == {("chunk", 1)}


def test_a_damaged_chunk_is_described_by_its_blocks_and_sequences(cache):
    reader = cache.chunk(1)
    flip(file_of(cache, 1), reader._offsets[0] + 5)
    flip(file_of(cache, 1), reader._offsets[-1] - 1)
    (finding,) = check_cache(cache.folder).findings
    count = reader.header.num_blocks
    last = reader.header.num_sequences - 1
    assert f"2 of {count} blocks do not match their checksum: 0 (sequences 0 to {last}), {count - 1}" in finding.problem


def test_an_index_page_of_other_payloads_is_found_though_all_its_checksums_are_right(cache):
    (path,) = (cache.folder / "index").iterdir()
    head, rows = path.read_bytes()[: HEADER.size], np.frombuffer(path.read_bytes()[HEADER.size :], ROW).copy()
    rows[-1]["digest"] = np.void(bytes(32))
    head = head[:88] + bytes(32) + struct.pack("<I", zlib.crc32(rows.tobytes()))
    path.write_bytes(head + struct.pack("<I", zlib.crc32(head)) + rows.tobytes())
    assert found(cache, "quick") == {("index", cache.snapshot.num_chunks - 1)}


def test_a_record_of_another_payload_is_found_without_an_index_too(cache):
    path = record_path(cache.folder, 1)
    path.write_bytes(store.seal({**store.read_sealed(path), "payload_sha256": "0" * 64}))
    shutil.rmtree(cache.folder / "index")
    (cache.folder / "metadata.json").unlink()
    assert found(cache, "quick") == set()
    (finding,) = check_cache(cache.folder).findings
    assert (finding.chunk, finding.problem.endswith("holds other tokens than its record says.")) == (1, True)


def test_chunks_that_are_planned_but_not_built_are_no_damage(cache, build, tmp_path):
    for chunk in range(2, cache.snapshot.num_chunks):
        file_of(cache, chunk).unlink()
        record_path(cache.folder, chunk).unlink()
    shutil.rmtree(cache.folder / "index")
    (cache.folder / "metadata.json").unlink()
    Index(cache.folder).extend(2, lambda record: True)
    assert found(cache, "deep") == set()


def test_without_its_source_a_chunk_is_not_tokenized_again_and_that_is_said(cache, tmp_path):
    (tmp_path / "a.jsonl").rename(tmp_path / "gone.jsonl")
    report = check_cache(cache.folder, "deep")
    assert report.is_good
    assert report.retokenized == 0
    assert len(report.notes) == report.chunks
    assert "a.jsonl is gone" in report.notes[0]


def test_a_stream_is_tokenized_again_without_a_trace(build, tmp_path):
    texts = make_texts(60, words=20)
    cache = build(texts, sequences_per_chunk=12)
    stream = CacheSettings(source=texts, tokenizer="x").open_sources()
    before = tree(tmp_path)
    report = check_cache(cache.folder, "deep", stream)
    assert tree(tmp_path) == before
    assert (report.is_good, report.retokenized) == (True, 60)


# -- a page of the plan that is gone


@pytest.mark.parametrize("index", [True, False], ids=["with index", "without index"])
@pytest.mark.parametrize("number", [0, 1])
def test_a_missing_page_of_the_plan_is_named_by_every_command_and_nothing_is_changed(
    number, index, cache, build, tmp_path, capsys
):
    write_jsonl(tmp_path / "a.jsonl", make_texts(40, seed=5, words=20), "a")
    build(str(tmp_path / "a.jsonl"), sequences_per_chunk=12)
    page = cache.folder / f"plan/{number:06d}.json"
    page.rename(tmp_path / "copy")
    if not index:
        shutil.rmtree(cache.folder / "index")
    before = tree(cache.folder)
    for depth in DEPTHS:
        (finding,) = [each for each in check_cache(cache.folder, depth).findings if each.kind != "index"]
        assert (finding.kind, finding.path) == ("plan", page)
        assert "Bring the page back from a copy" in str(finding)
    for command, status in {"status": 2, "validate": 1, "repair": 1}.items():
        assert main(["cache", command, str(cache.folder)]) == status
        said = capsys.readouterr()
        assert f"{page} is missing" in said.out + said.err
        assert "planned chunks are there" not in said.out
    assert main(["cache", "inspect", str(cache.folder)]) == 0
    assert tree(cache.folder) == before
    (tmp_path / "copy").rename(page)
    assert repair_cache(cache.folder).is_good


def test_the_only_page_of_the_plan_is_missed_too(cache, capsys):
    (cache.folder / "plan/000000.json").unlink()
    flip(file_of(cache, 1), -1)
    assert ("plan", None) in found(cache)
    assert main(["cache", "status", str(cache.folder)]) == 2
    assert main(["cache", "repair", str(cache.folder)]) == 1
    assert "has 0 chunks, and no chunk 1" in capsys.readouterr().out
    assert main(["cache", "inspect", str(cache.folder)]) == 0


# -- chunks that were built wrongly, with hashes that are right


def built_wrongly(cache, tmp_path, chunk, change):
    """Replace a chunk by one whose content was changed before it was encoded; all hashes are right."""
    from packhorse.cache.chunk import ChunkContent
    from packhorse.corpus.packing import Packed

    record, reader = read_record(cache.folder, chunk), cache.chunk(chunk)
    counts, count = reader.side("pieces_per_sequence"), reader.header.num_train
    split = int(counts[:count].sum())
    sides = []
    for rows, pieces in ((slice(0, count), slice(0, split)), (slice(count, None), slice(split, None))):
        sides.append(
            Packed(
                tokens=reader.all_tokens()[rows].copy(),
                pieces_per_sequence=counts[rows].copy(),
                piece_lengths=reader.side("piece_lengths")[pieces].copy(),
                piece_documents=reader.side("piece_documents")[pieces].copy(),
            )
        )
    rows, is_eval = reader.side("document_rows").copy(), reader.side("document_sides").copy()
    content = ChunkContent(train=sides[0], eval=sides[1], document_rows=rows, document_sides=is_eval)
    change(content)
    encoded = encode_chunk(content, chunk, cache.recipe.digest, cache.recipe.vocab_size, "default")
    hashes = {name: getattr(encoded, name) for name in ("payload_sha256", "file_sha256", "index_sha256")}
    file_of(cache, chunk).unlink()
    record = replace(record, **hashes, file_bytes=encoded.num_bytes)
    chunk_path(cache.folder, chunk, record.file_sha256).write_bytes(b"".join(encoded.parts))
    record_path(cache.folder, chunk).write_bytes(store.seal(asdict(record)))
    Index(cache.folder).forget()
    Index(cache.folder).extend(len(list(cache.folder.glob("records/*/*"))), lambda record: True)
    (cache.folder / "metadata.json").unlink()


def wrong(name, place, value):
    def change(content):
        array = getattr(content.train, name) if hasattr(content.train, name) else getattr(content, name)
        array[place] = value(array[place]) if callable(value) else value

    return change


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        (wrong("tokens", (0, 0), 60_000), "the vocabulary has"),
        (wrong("tokens", (-1, -1), 5), "padded with something else"),
        (wrong("piece_lengths", 0, lambda length: length + 40), "more than its length"),
        (wrong("piece_lengths", 0, lambda length: length - 1), "train and eval tokens"),
        (wrong("piece_documents", 0, 10_000), "is of document 10000"),
        (wrong("document_rows", 0, 500), "not in the order of the source"),
        (wrong("document_sides", 0, lambda side: 1 - side), "the wrong side of the split"),
        (wrong("pieces_per_sequence", 0, lambda count: count + 1), "pieces in all"),
        (wrong("tokens", (0, 0), lambda token: token ^ 1), "other tokens of row"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_deep_finds_what_hashes_cannot(cache, tmp_path, change, problem):
    built_wrongly(cache, tmp_path, cache.snapshot.num_chunks - 1, change)
    report = check_cache(cache.folder, "full")
    assert report.is_good, report.lines()
    report = check_cache(cache.folder, "deep", sources(tmp_path))
    assert [finding.chunk for finding in report.findings] == [cache.snapshot.num_chunks - 1] * len(report.findings)
    assert problem in " ".join(finding.problem for finding in report.findings)


# -- the command


def test_validate_has_three_depths_and_ends_with_status_1_when_something_is_damaged(cache, gpt2_like, tmp_path, capsys):
    for option in ([], ["--quick"], ["--deep"]):
        assert main(["cache", "validate", str(cache.folder), *option]) == 0
    capsys.readouterr()
    flip(file_of(cache, 1), -1)
    assert main(["cache", "validate", str(cache.folder), "--quick"]) == 0
    assert main(["cache", "validate", str(cache.folder)]) == 1
    out = capsys.readouterr().out
    assert "chunk 1: " in out
    assert "packhorse cache repair" in out
    assert main(["cache", "validate", str(cache.folder), "--json"]) == 1
    value = json.loads(capsys.readouterr().out)
    assert list(value["damaged"]) == ["1"]
    assert main(["cache", "validate", str(tmp_path / "nothing")]) == 2
    assert main(["cache", "validate", str(cache.folder), "--quick", "--deep"]) == 2


def test_a_folder_without_a_cache_is_an_error_and_no_report(tmp_path):
    with pytest.raises(CacheIncompleteError):
        check_cache(tmp_path)


def test_documents_are_restored_as_they_were(cache):
    texts = make_texts(40, words=20)
    restored = [restore(cache.chunk(n), cache.recipe) for n in range(cache.snapshot.num_chunks)]
    ids = [own.document(n) for own in restored for n in range(len(own.ends))]
    assert [cache.decode(document[:-1]) for document in ids] == texts
    assert all(document[-1] == cache.recipe.eos_id for document in ids)
    assert sum(own.is_eval.sum() for own in restored) == cache.summary.eval_documents
