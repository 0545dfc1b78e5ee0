"""Laws of the command line: exit statuses, messages, and what is not written."""

import json
import subprocess
import sys
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from packhorse.cache import store
from packhorse.cli import main

ROOT = Path(__file__).parents[1]


def files(folder: Path) -> set[Path]:
    return {path for path in folder.rglob("*") if path.is_file()}


@pytest.fixture
def corpus(tmp_path):
    path = tmp_path / "corpus.jsonl"
    rows = [{"text": f"document {i}: " + "salt wool hay " * (i % 7 + 3), "id": i} for i in range(120)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


@pytest.fixture
def config(tmp_path, corpus):
    path = tmp_path / "config.yaml"
    value = {
        "data": {
            "source": str(corpus),
            "tokenizer": str(tmp_path / "tokenizer"),
            "train_tokenizer": 300,
            "sequence_length": 32,
            "cache_dir": str(tmp_path / "cache"),
            "workers": 0,
            "packing": "concat",
            "eval_share": 0.1,
            "micro_batch_size": 2,
            "prompts": ["document 1"],
        },
        "model": {
            "config": {
                "hidden_size": 32,
                "intermediate_size": 64,
                "num_hidden_layers": 1,
                "num_attention_heads": 2,
                "num_key_value_heads": 2,
            },
            "infini_attention": {"segment_length": 8},
        },
        "trainer": {"accelerator": "cpu", "max_steps": 3, "logger": False, "default_root_dir": str(tmp_path / "run")},
        "checkpoint": {"dirpath": str(tmp_path / "run" / "checkpoints")},
    }
    path.write_text(json.dumps(value))  # JSON is YAML
    return path


def build(config: Path, *arguments: str) -> int:
    return main(["cache", "build", "--config", str(config), *arguments])


def test_fit_validate_and_predict_take_one_configuration(config, tmp_path, capsys):
    assert main(["fit", "--config", str(config)]) == 0
    said = capsys.readouterr().err
    assert "Plan" in said
    assert "3 of 2 sequences" in said
    for word in ("utilisation", "bytes per token", "unigram entropy", "tokens/s", "last.ckpt", "Next"):
        assert word in said.partition("Report")[2], word
    checkpoint = str(tmp_path / "run" / "checkpoints" / "last.ckpt")
    assert main(["validate", "--config", str(config), "--ckpt_path", checkpoint]) == 0
    assert "val/perplexity" in capsys.readouterr().out
    assert main(["predict", "--config", str(config), "--ckpt_path", checkpoint]) == 0
    assert capsys.readouterr().out.startswith("document 1")


def test_a_second_fit_finds_the_cache_and_says_how_long_that_took(config, capsys):
    assert build(config) == 0
    capsys.readouterr()
    assert main(["fit", "--config", str(config)]) == 0
    said = capsys.readouterr().err
    assert "found; opened in" in said
    assert "Building" not in said


def test_preview_shows_what_would_happen_and_writes_nothing(config, tmp_path, capsys):
    before = files(tmp_path)
    assert main(["preview", "--config", str(config)]) == 0
    out = capsys.readouterr().out
    for part in ("id", "text", "document 0", "tokens:", "300 entries", "hidden size 32", "segments of 8", "parameters"):
        assert part in out, part
    assert "about" in out
    assert "3 steps of 2 sequences" in out
    assert files(tmp_path) == before


def test_cache_commands_tell_the_same_in_json(config, capsys):
    assert build(config, "--json") == 0
    built = json.loads(capsys.readouterr().out)
    assert main(["cache", "status", "--config", str(config), "--json"]) == 0
    status = json.loads(capsys.readouterr().out)
    assert status["missing"] == []
    assert {key: status[key] for key in built} == built
    assert main(["cache", "validate", "--config", str(config)]) == 0
    assert "1/1 chunks, all hashes verified" in capsys.readouterr().out


def test_validate_finds_a_damaged_chunk_with_status_1_and_changes_nothing(config, tmp_path, capsys):
    build(config)
    (chunk,) = (tmp_path / "cache").rglob("*.chunk")
    data = bytearray(chunk.read_bytes())
    data[len(data) // 2] ^= 1
    chunk.write_bytes(data)
    assert main(["cache", "validate", "--config", str(config)]) == 1
    assert "chunk 0" in capsys.readouterr().out
    assert chunk.read_bytes() == bytes(data)


def test_cache_commands_never_import_torch(config):
    code = (
        "import sys; from packhorse.cli import main; "
        f"assert main(['cache', 'build', '--config', {str(config)!r}]) == 0; "
        "print([m for m in ('torch', 'lightning', 'transformers', 'datasets') if m in sys.modules])"
    )
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert out.splitlines()[-1] == "[]"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--data.source", "nowhere.jsonl"], "nowhere.jsonl does not exist"),
        (["--data.text_column", "body"], "It has: text, id"),
        (["--data.tokenizer", "nowhere/", "--data.train_tokenizer", "null"], "no such file"),
        (["--data.sequence_length", "64", "--data.cache_dir", "{cache}"], "sequence_length: on disk 32, asked for 64"),
    ],
    ids=["missing source", "missing column", "missing tokenizer", "another recipe"],
)
def test_bad_input_is_refused_with_status_2_and_nothing_changed(config, tmp_path, capsys, arguments, message):
    build(config)
    (folder,) = (path.parent for path in (tmp_path / "cache").glob("*/recipe.json"))
    before = files(tmp_path)
    capsys.readouterr()
    assert build(config, *(argument.format(cache=folder) for argument in arguments)) == 2
    assert message in capsys.readouterr().err
    assert files(tmp_path) == before


def test_broken_files_are_refused_with_status_2(config, tmp_path, capsys):
    cut = tmp_path / "cut.parquet"
    pq.write_table(pa.table({"text": ["salt"] * 1000}), cut)
    cut.write_bytes(cut.read_bytes()[:-20])
    empty = tmp_path / "empty.jsonl"
    empty.write_text("")
    bad = tmp_path / "bad.jsonl"
    bad.write_text('{"text": "salt"}\n{"text": "wool}\n')
    build(config)  # the tokenizer exists now
    for path, message in ((cut, "damaged or cut off"), (empty, "no text"), (bad, "line 2 is not valid JSON")):
        assert build(config, "--data.source", str(path)) == 2, path
        assert message in capsys.readouterr().err


def test_a_full_disk_ends_with_status_2_and_the_next_build_goes_on(config, monkeypatch, capsys):
    def full(descriptor, data):
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(store.os, "write", full)
        assert build(config) == 2
        assert "StorageFullError" in capsys.readouterr().err
    assert build(config) == 0


def test_a_vocabulary_larger_than_the_models_is_refused_with_status_2(config, tmp_path, capsys):
    value = json.loads(config.read_text())
    value["model"]["config"]["vocab_size"] = 100
    config.write_text(json.dumps(value))
    assert main(["fit", "--config", str(config)]) == 2
    assert "ids up to 299, but the model's vocabulary has 100 entries" in capsys.readouterr().err
    assert not list((tmp_path / "cache").rglob("*.chunk"))


@pytest.mark.parametrize("argument", ["--data.sequence_lenght=3", "--trainer.max_epoch=3", "--model.segment=3"])
def test_a_misspelt_setting_is_refused_with_status_2(config, capsys, argument):
    with pytest.raises(SystemExit) as stop:
        main(["fit", "--config", str(config), argument])
    assert stop.value.code == 2
    assert argument[2:].partition("=")[0].rpartition(".")[2] in capsys.readouterr().err


def test_a_misspelt_setting_is_refused_by_cache_commands_too(config, capsys):
    with pytest.raises(SystemExit) as stop:
        build(config, "--data.sequence_lenght=3")
    assert stop.value.code == 2


def test_values_that_make_no_sense_are_refused_with_status_2(config, capsys):
    assert build(config, "--data.sequence_length=1") == 2
    assert "from 2 to 131,072" in capsys.readouterr().err


def test_help_shows_the_docstring_of_a_setting(capsys):
    with pytest.raises(SystemExit) as stop:
        main(["cache", "build", "--help"])
    assert stop.value.code == 0
    assert "Tokens per sequence" in capsys.readouterr().out
    assert main([]) == 0
    assert "preview" in capsys.readouterr().out
