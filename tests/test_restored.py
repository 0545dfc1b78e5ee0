"""Laws of a model that comes back: it reads and writes as it was trained, from a run and from an exported folder."""

import json
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from conftest import TINY_MODEL, make_texts, tiny_data, write_jsonl
from packhorse.cli import main
from packhorse.models import InfiniCache


@pytest.fixture
def config(tmp_path) -> Path:
    """A run of two steps on a corpus of its own."""
    write_jsonl(tmp_path / "corpus.jsonl", make_texts(60, seed=5, words=20))
    trainer = {"accelerator": "cpu", "max_steps": 2, "logger": False, "default_root_dir": str(tmp_path / "run")}
    value = {
        "data": tiny_data(tmp_path, packing="concat", eval_share=0.1, prompts=["the of"]),
        "model": TINY_MODEL,
        "trainer": {**trainer, "val_check_interval": 2, "enable_model_summary": False},
        "checkpoint": {"dirpath": str(tmp_path / "run" / "checkpoints")},
    }
    path = tmp_path / "config.yaml"
    path.write_text(json.dumps(value))  # JSON is YAML
    return path


@pytest.fixture
def made(monkeypatch) -> list[InfiniCache]:
    """Every cache that a model makes for itself."""
    caches: list[InfiniCache] = []

    class Counted(InfiniCache):
        def __init__(self, config) -> None:
            super().__init__(config)
            caches.append(self)

    monkeypatch.setattr("packhorse.models.model.InfiniCache", Counted)
    return caches


def test_training_makes_no_cache_and_what_it_leaves_generates_with_one_of_constant_size(config, tmp_path, made):
    assert main(["fit", "--config", str(config)]) == 0
    checkpoint = str(tmp_path / "run" / "checkpoints" / "last.ckpt")
    assert main(["validate", "--config", str(config), "--ckpt_path", checkpoint]) == 0
    assert not made

    assert main(["predict", "--config", str(config), "--ckpt_path", checkpoint]) == 0
    assert len(made) == 1

    folder = tmp_path / "exported"
    assert main(["export", "--ckpt_path", checkpoint, "--folder", str(folder)]) == 0
    for name in ("config.json", "generation_config.json"):
        assert json.loads((folder / name).read_text())["use_cache"] is True, name
    model = AutoModelForCausalLM.from_pretrained(folder)
    sizes = set()
    for length in (4, 60):
        model.generate(torch.ones(1, length, dtype=torch.long), max_new_tokens=2, pad_token_id=0)
        sizes.add(made[-1].state_bytes)
    assert (len(made), len(sizes)) == (3, 1)


def test_a_checkpoint_that_was_saved_without_caches_generates_with_one(config, tmp_path, made):
    assert main(["fit", "--config", str(config)]) == 0
    path = tmp_path / "run" / "checkpoints" / "last.ckpt"
    older = torch.load(path, weights_only=True)
    older["packhorse"]["config"]["use_cache"] = False
    torch.save(older, path)
    assert main(["predict", "--config", str(config), "--ckpt_path", str(path)]) == 0
    assert len(made) == 1

    first, second = tmp_path / "first", tmp_path / "second"
    assert main(["export", "--ckpt_path", str(path), "--folder", str(first)]) == 0
    for name in ("config.json", "generation_config.json"):
        assert json.loads((first / name).read_text())["use_cache"] is True, name
        (first / name).write_text((first / name).read_text().replace('"use_cache": true', '"use_cache": false'))
    assert main(["export", "--ckpt_path", str(first), "--folder", str(second)]) == 0
    assert json.loads((second / "generation_config.json").read_text())["use_cache"] is True
