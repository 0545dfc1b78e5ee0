"""Laws of export, import and repack: the ids that come out are those that went in, and others can read them."""

import errno
import json
import os
import struct

import numpy as np
import pytest
import yaml

from conftest import documents_in, file_bytes, make_texts, write_jsonl
from packhorse.cache import Cache, CacheSettings, update_cache
from packhorse.cache.cached import CachedDocuments
from packhorse.cache.check import check_cache
from packhorse.cache.data_settings import DataSettings
from packhorse.cache.datatrove import DatatroveDocuments
from packhorse.cache.estimate import estimate_cache
from packhorse.cache.megatron import MegatronDocuments
from packhorse.cache.rows import RowDocuments, export_rows
from packhorse.cache.update import folder_of
from packhorse.cli import main
from packhorse.corpus.sources import open_sources
from packhorse.errors import SourceError, StorageFullError
from packhorse.training.batches import derive

PACKINGS = [{"packing": "best_fit"}, {"packing": "concat"}, {"packing": "pad"}, {"packing": "window", "overlap": 5}]
NAMES = [settings["packing"] for settings in PACKINGS]


@pytest.fixture
def cache(request, build, tmp_path):
    settings = getattr(request, "param", {"packing": "best_fit"})
    return build(str(write_jsonl(tmp_path / "a.jsonl", make_texts(50, words=25))), sequences_per_chunk=25, **settings)


def export(cache, tmp_path, form):
    target = tmp_path / form
    assert main(["cache", "export", str(cache.folder), "--to", str(target), "--format", form]) == 0
    return target


def sides(cache):
    """The documents of each side, by an own way of putting them together (which `window` needs ours for)."""
    if cache.recipe.overlap:
        return {split: [ids.tolist() for ids in CachedDocuments(cache.folder, split)] for split in ("train", "eval")}
    found, place = {"train": [], "eval": []}, 0
    documents = documents_in(cache)
    for number in range(cache.snapshot.num_chunks):
        for is_eval in cache.chunk(number).side("document_sides").tolist():
            found["eval" if is_eval else "train"].append(documents[place])
            place += 1
    return found


@pytest.mark.parametrize("cache", PACKINGS, ids=NAMES, indirect=True)
def test_a_megatron_file_has_every_document_byte_for_byte(cache, tmp_path):
    """Read by the published layout alone: see megatron/core/datasets/indexed_dataset.py."""
    folder = export(cache, tmp_path, "megatron")
    for split, documents in sides(cache).items():
        index = (folder / f"{split}_text_document.idx").read_bytes()
        assert index[:9] == b"MMIDIDX\0\0"
        assert struct.unpack("<QBQQ", index[9:34]) == (1, 8, len(documents), len(documents) + 1)
        n = len(documents)
        lengths = struct.unpack(f"<{n}i", index[34 : 34 + 4 * n])
        pointers = struct.unpack(f"<{n}q", index[34 + 4 * n : 34 + 12 * n])
        assert struct.unpack(f"<{n + 1}q", index[34 + 12 * n :]) == tuple(range(n + 1))
        data = (folder / f"{split}_text_document.bin").read_bytes()
        read = [list(struct.unpack(f"<{k}H", data[p : p + 2 * k])) for p, k in zip(pointers, lengths, strict=True)]
        assert read == documents
        assert len(data) == 2 * sum(lengths)
        assert [ids.tolist() for ids in MegatronDocuments(folder / f"{split}_text_document.bin")] == documents


def test_a_datatrove_file_has_every_document_byte_for_byte(cache, tmp_path):
    folder = export(cache, tmp_path, "datatrove")
    for split, documents in sides(cache).items():
        data, index = (folder / f"{split}.ds").read_bytes(), (folder / f"{split}.ds.index").read_bytes()
        ends = struct.unpack(f"<{len(index) // 8}Q", index)
        ids = struct.unpack(f"<{len(data) // 2}H", data)
        assert [list(ids[a:b]) for a, b in zip((0, *ends), ends, strict=False)] == documents
        first, count, _ = (folder / f"{split}.ds.metadata").read_text().split("\n")
        assert first.rpartition("|")[2] == "2"
        assert int(count) == len(ids)
        assert [ids.tolist() for ids in DatatroveDocuments(folder / f"{split}.ds")] == documents


@pytest.mark.parametrize("cache", PACKINGS, ids=NAMES, indirect=True)
def test_datasets_reads_the_rows_with_the_labels_of_training(cache, tmp_path):
    from datasets import load_from_disk

    folder = export(cache, tmp_path, "datasets")
    both = load_from_disk(str(folder))
    assert list(both) == ["train", "eval"]
    for split, rows in both.items():
        assert rows.column_names == ["input_ids", "attention_mask", "labels"]
        read = cache.read(range(cache.num_sequences(split)), split=split)
        rows = rows.with_format("numpy")[:]
        assert np.array_equal(rows["input_ids"], read.tokens)
        used = [int(lengths.sum()) for lengths in read.piece_lengths]
        assert rows["attention_mask"].sum(1).tolist() == used
        batch = derive(read.tokens, read.piece_lengths, read.repeated if cache.recipe.overlap else None)
        # transformers shifts labels itself: what it compares is what training here compares.
        assert np.array_equal(rows["labels"][:, 1:], batch.labels[:, :-1])
        assert (rows["labels"][:, 0] == -100).all()
    assert json.loads((folder / "metadata.json").read_bytes())["total_sequences"] == sum(map(len, both.values()))
    assert (folder / "tokenizer/tokenizer.json").read_bytes() == (
        cache.tokenizer_folder / "tokenizer.json"
    ).read_bytes()


def test_a_side_without_sequences_is_an_empty_data_set(build, tmp_path):
    from datasets import load_from_disk

    cache = build(make_texts(20), eval_share=0.0)
    assert len(load_from_disk(str(export(cache, tmp_path, "datasets")))["eval"]) == 0


@pytest.mark.parametrize("inside", ["data", "data/deeper"])
@pytest.mark.parametrize("form", ["datasets", "megatron", "datatrove"])
def test_an_export_into_a_file_is_refused_in_words(form, inside, cache, tmp_path, capsys):
    (tmp_path / "file").write_text("mine")
    arguments = ["cache", "export", str(cache.folder), "--to", str(tmp_path / "file" / inside), "--format", form]
    assert main(arguments) == 2
    assert f"{tmp_path / 'file'} is a file" in capsys.readouterr().err
    assert (tmp_path / "file").read_text() == "mine"


def test_a_disk_that_is_full_ends_an_export_in_words_and_leaves_nothing(cache, tmp_path, monkeypatch):
    import datasets

    def refuse(*arguments, **more):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(datasets.DatasetDict, "save_to_disk", refuse)
    before = {path.name for path in tmp_path.iterdir()}
    with pytest.raises(StorageFullError, match=r"Could not write .*data: No space left"):
        export_rows(cache, tmp_path / "data")
    assert {path.name for path in tmp_path.iterdir()} == before


def test_an_export_never_overwrites_a_data_set_and_leaves_nothing_half_done(cache, tmp_path, capsys):
    folder = export(cache, tmp_path, "datasets")
    assert main(["cache", "export", str(cache.folder), "--to", str(folder)]) == 2
    assert "exists" in capsys.readouterr().err
    path = next((cache.folder / "chunks").rglob("*.chunk"))
    path.write_bytes(path.read_bytes()[:-1])
    before = {p.name for p in tmp_path.iterdir()}
    assert main(["cache", "export", str(cache.folder), "--to", str(tmp_path / "again")]) == 2
    assert {p.name for p in tmp_path.iterdir()} == before
    assert main(["cache", "export", str(cache.folder)]) == 2


@pytest.mark.parametrize("form", ["megatron", "datatrove"])
def test_what_was_exported_and_imported_is_the_same_documents(form, cache, build, tmp_path, gpt2_like):
    folder = export(cache, tmp_path, form)
    name = {"megatron": "train_text_document.idx", "datatrove": "train.ds"}[form]
    config = tmp_path / "config.yaml"
    value = {"tokenizer": str(gpt2_like), "sequence_length": 48, "cache_dir": str(tmp_path / "imported"), "workers": 0}
    config.write_text(json.dumps({"data": value}))
    arguments = ["cache", "import", "--config", str(config), "--files", str(folder / name), "--format", form]
    assert main(arguments) == 0
    (made,) = (path.parent for path in (tmp_path / "imported").glob("*/recipe.json"))
    assert documents_in(Cache(made)) == sides(cache)["train"]
    assert main(arguments) == 0
    assert Cache(made).summary.documents == len(sides(cache)["train"])


@pytest.mark.parametrize("form", ["megatron", "datatrove", "datasets"])
def test_a_folder_that_was_exported_is_no_source_but_its_files_are_named(form, cache, tmp_path, gpt2_like, capsys):
    folder = export(cache, tmp_path, form)
    name = {"megatron": "train_text_document.idx", "datatrove": "train.ds", "datasets": "train"}[form]
    config = tmp_path / "config.yaml"
    config.write_text(json.dumps({"data": {"tokenizer": str(gpt2_like), "cache_dir": str(tmp_path / "imported")}}))
    capsys.readouterr()
    assert main(["cache", "import", "--config", str(config), "--files", str(folder), "--format", form]) == 2
    said = capsys.readouterr().err
    assert str(folder / name) in said
    assert ".." not in said


def test_rows_are_imported_piece_by_piece_without_padding(cache, tmp_path, gpt2_like):
    folder = export(cache, tmp_path, "datasets")
    pieces = []
    read = cache.read(range(cache.num_sequences()))
    for tokens, lengths in zip(read.tokens.tolist(), read.piece_lengths, strict=True):
        ends = np.cumsum(lengths).tolist()
        pieces += [tokens[a:b] for a, b in zip([0, *ends], ends, strict=False)]
    assert [ids.tolist() for ids in RowDocuments(folder / "train")] == pieces
    config = tmp_path / "config.yaml"
    value = {"tokenizer": str(gpt2_like), "sequence_length": 48, "cache_dir": str(tmp_path / "imported"), "workers": 0}
    config.write_text(json.dumps({"data": {**value, "eval_share": 0.0}}))
    files = ["--files", str(folder / "train"), "--format", "datasets"]
    assert main(["cache", "import", "--config", str(config), *files]) == 0
    (made,) = (path.parent for path in (tmp_path / "imported").glob("*/recipe.json"))
    assert documents_in(Cache(made)) == pieces
    assert Cache(made).recipe.eos_id == cache.recipe.eos_id
    with pytest.raises(SourceError, match="several splits"):
        RowDocuments(folder)


@pytest.mark.parametrize(
    ("settings", "options"),
    [
        ({"packing": "best_fit"}, ["--sequence-length", "64"]),
        ({"packing": "concat"}, ["--packing", "best_fit"]),
        ({"packing": "window", "overlap": 5}, ["--packing", "pad", "--sequence-length", "16"]),
        ({"packing": "window", "overlap": 5}, ["--sequence-length", "16"]),
        ({"packing": "pad"}, ["--packing", "window", "--overlap", "3"]),
    ],
    ids=["best_fit", "concat", "window", "window as here", "pad"],
)
def test_a_repacked_cache_has_the_same_documents_without_a_tokenizer_at_work(
    settings, options, build, tmp_path, monkeypatch, capsys
):
    source = write_jsonl(tmp_path / "a.jsonl", make_texts(50, words=25))
    cache = build(str(source), sequences_per_chunk=25, **settings)
    from packhorse.corpus.engines import Reference

    expected = [ids.tolist() for ids in CachedDocuments(cache.folder)]
    seen = []
    encode = Reference.encode
    monkeypatch.setattr(Reference, "encode", lambda self, texts: seen.extend(texts) or encode(self, texts))
    assert main(["cache", "repack", str(cache.folder), *options, "--json"]) == 0
    made = Cache(json.loads(capsys.readouterr().out)["folder"])
    assert [ids.tolist() for ids in CachedDocuments(made.folder)] == expected
    assert made.recipe.tokenizer == cache.recipe.tokenizer
    assert made.recipe.overlap == {"window": 5, "pad": 3}.get(settings["packing"], 0) * (
        made.recipe.packing == "window"
    )
    assert not set(seen) & {json.loads(line)["text"] for line in source.read_text().splitlines()}
    # What grew here grows there.
    write_jsonl(source, make_texts(20, seed=5, words=25), "a")
    build(str(source), sequences_per_chunk=25, **settings)
    assert main(["cache", "repack", str(cache.folder), *options, "--json"]) == 0
    assert sorted(ids.tolist() for ids in CachedDocuments(made.folder)) == sorted(
        ids.tolist() for ids in CachedDocuments(cache.folder)
    )


@pytest.mark.parametrize(
    "verb", [["export", "--format", "megatron"], ["export", "--format", "datatrove"], ["copy"]], ids=str
)
def test_what_is_written_of_a_mixture_has_a_folder_for_each_cache(verb, tmp_path, gpt2_like):
    values = {"tokenizer": str(gpt2_like), "sequence_length": 32, "cache_dir": str(tmp_path / "cache"), "workers": 0}
    values["mixture"] = [
        {"name": name, "weight": 1, "source": str(write_jsonl(tmp_path / f"{name}.jsonl", make_texts(20, seed=seed)))}
        for seed, name in enumerate(("web", "code"))
    ]
    caches = [update_cache(settings, quiet=True) for settings in DataSettings(**values).caches.values()]
    config = tmp_path / "config.yaml"
    config.write_text(json.dumps({"data": values}))
    assert main(["cache", *verb, "--config", str(config), "--to", f"{tmp_path / 'together'}/"]) == 0
    assert {path.name for path in (tmp_path / "together").iterdir()} == {"web", "code"}
    for cache, name in zip(caches, ("web", "code"), strict=True):
        assert main(["cache", verb[0], str(cache.folder), *verb[1:], "--to", str(tmp_path / "alone" / name)]) == 0
        alone, together = tmp_path / "alone" / name, tmp_path / "together" / name
        files = {path.relative_to(alone) for path in alone.rglob("*") if path.is_file()}
        assert files
        assert all((alone / path).read_bytes() == (together / path).read_bytes() for path in files)


TRUNCATED = {"packing": "pad", "long_documents": "truncate", "sequence_length": 16}


@pytest.mark.parametrize("cache", [TRUNCATED], ids=["truncate"], indirect=True)
@pytest.mark.parametrize("options", [["--sequence-length", "64"], ["--packing", "best_fit"]], ids=["longer", "packed"])
def test_a_truncated_document_is_repacked_without_an_end(cache, options, capsys):
    expected = [ids.tolist() for ids in CachedDocuments(cache.folder)]
    assert {ids[-1] == cache.recipe.eos_id for ids in expected} == {True, False}
    assert main(["cache", "repack", str(cache.folder), *options, "--json"]) == 0
    made = Cache(json.loads(capsys.readouterr().out)["folder"])
    assert [ids.tolist() for ids in CachedDocuments(made.folder)] == expected
    assert made.recipe.eos_id == cache.recipe.eos_id
    source = {"class_path": "packhorse.cache.cached.CachedDocuments", "init_args": {"folder": str(cache.folder)}}
    report = check_cache(made.folder, "deep", open_sources(source))
    assert report.is_good
    assert report.retokenized
    settings = CacheSettings(source=source, tokenizer=str(cache.tokenizer_folder), packing="pad", sequence_length=16)
    assert estimate_cache(settings).sequences.estimate == len(expected)


@pytest.mark.parametrize("form", ["datasets", "megatron", "datatrove"])
def test_the_settings_that_an_import_prints_find_its_cache(form, cache, tmp_path, gpt2_like, capsys):
    name = {"datasets": "train", "megatron": "train_text_document.bin", "datatrove": "train.ds"}[form]
    files = ["--files", str(export(cache, tmp_path, form) / name), "--format", form]
    config = tmp_path / "config.yaml"
    value = {"tokenizer": str(gpt2_like), "sequence_length": 48, "cache_dir": str(tmp_path / "imported"), "workers": 0}
    config.write_text(json.dumps({"data": value}))
    capsys.readouterr()
    assert main(["cache", "import", "--config", str(config), *files]) == 0
    (printed,) = (line for line in capsys.readouterr().out.splitlines() if line.startswith("To train on it: "))
    settings = yaml.safe_load("{" + printed.removeprefix("To train on it: ") + "}")
    (made,) = (path.parent for path in (tmp_path / "imported").glob("*/recipe.json"))
    assert folder_of(CacheSettings(**value, **settings)) == made
    before = file_bytes(made)
    assert update_cache(CacheSettings(**value, **settings), quiet=True).folder == made
    assert file_bytes(made) == before


@pytest.mark.parametrize("damage", ["cut", "header", "promise"])
def test_foreign_files_that_do_not_fit_are_refused(damage, cache, tmp_path):
    megatron, datatrove = export(cache, tmp_path, "megatron"), export(cache, tmp_path, "datatrove")
    index, ends = megatron / "train_text_document.idx", datatrove / "train.ds.index"
    for path, place, source in (
        (index, 26, lambda: MegatronDocuments(index)),
        (ends, 3, lambda: DatatroveDocuments(datatrove / "train.ds")),
    ):
        data = bytearray(path.read_bytes())
        if damage == "cut":
            data = data[:-3]
        elif damage == "header":
            data[place] ^= 0x80
        else:
            data = data[: len(data) // 2] + b"\xff" * (len(data) - len(data) // 2)
        path.write_bytes(data)
        with pytest.raises(SourceError):
            source()
        path.unlink()
        with pytest.raises(SourceError, match="cannot be read"):
            source()
