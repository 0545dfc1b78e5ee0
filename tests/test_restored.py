"""Laws of a model that comes back: it reads and writes as it was trained, from a run and from an exported folder."""

import json
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer
from transformers import AutoModelForCausalLM, AutoTokenizer

from conftest import TINY_MODEL, make_texts, tiny_data, write_jsonl
from packhorse.cli import main
from packhorse.corpus.bos import with_bos
from packhorse.corpus.passkey import PasskeyText
from packhorse.corpus.tokenizer import TokenizerContent, read_tokenizer
from packhorse.errors import SettingsError, TokenizerError
from packhorse.models import InfiniCache
from packhorse.training.restore import CheckpointSettings, Restored, restore


@pytest.fixture(scope="module")
def made() -> Iterator[list[InfiniCache]]:
    """Every cache that a model makes for itself."""
    caches: list[InfiniCache] = []

    class Counted(InfiniCache):
        def __init__(self, config) -> None:
            super().__init__(config)
            caches.append(self)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("packhorse.models.model.InfiniCache", Counted)
        yield caches


@pytest.fixture(scope="module")
def named_bos(gpt2_like, tmp_path_factory) -> Path:
    """A tokenizer that names a BOS which its template does not put before a text."""
    folder = tmp_path_factory.mktemp("named") / "tokenizer"
    shutil.copytree(gpt2_like, folder)
    config = json.loads((folder / "tokenizer_config.json").read_text()) | {"bos_token": "<|endoftext|>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return folder


@pytest.fixture(scope="module")
def run(tmp_path_factory, named_bos, made) -> Path:
    """The folder of a run of two steps, validated, whose recipe puts BOS before every text."""
    folder = tmp_path_factory.mktemp("run")
    write_jsonl(folder / "corpus.jsonl", make_texts(60, seed=5, words=20))
    trainer = {"accelerator": "cpu", "max_steps": 2, "logger": False, "default_root_dir": str(folder / "run")}
    own = {"tokenizer": str(named_bos), "train_tokenizer": None, "add_bos": True, "prompts": ["the of"]}
    value = {
        "data": tiny_data(folder, packing="concat", eval_share=0.1, **own),
        "model": {**TINY_MODEL, "config": {**TINY_MODEL["config"], "vocab_size": 800}},  # for other tokenizers as well
        "trainer": {**trainer, "val_check_interval": 2, "enable_model_summary": False},
        "checkpoint": {"dirpath": str(folder)},
    }
    (folder / "config.yaml").write_text(json.dumps(value))  # JSON is YAML
    before = len(made)
    assert main(["fit", "--config", str(folder / "config.yaml")]) == 0
    assert len(made) == before, "training and validation make no cache"
    return folder


def predict(run: Path, checkpoint: Path) -> int:
    return main(["predict", "--config", str(run / "config.yaml"), "--ckpt_path", str(checkpoint)])


def export(checkpoint: Path, folder: Path) -> Path:
    assert main(["export", "--ckpt_path", str(checkpoint), "--folder", str(folder)]) == 0
    return folder


def opened(path: Path) -> Restored:
    return restore(CheckpointSettings(ckpt_path=str(path)))


def changed(run: Path, path: Path, **own) -> Path:
    """The checkpoint of the run with other values under `packhorse`; `...` takes one away."""
    checkpoint = torch.load(run / "last.ckpt", weights_only=True)
    kept = {name: value for name, value in checkpoint["packhorse"].items() if name not in own}
    checkpoint["packhorse"] = {**kept, **{name: value for name, value in own.items() if value is not ...}}
    torch.save(checkpoint, path)
    return path


def test_what_was_trained_without_a_cache_generates_with_one_of_constant_size(run, tmp_path, made):
    before = len(made)
    assert predict(run, run / "last.ckpt") == 0
    assert len(made) == before + 1

    folder = export(run / "last.ckpt", tmp_path / "exported")
    for name in ("config.json", "generation_config.json"):
        assert json.loads((folder / name).read_text())["use_cache"] is True, name
    model = AutoModelForCausalLM.from_pretrained(folder)
    for length in (4, 60):
        model.generate(torch.ones(1, length, dtype=torch.long), max_new_tokens=2, pad_token_id=0)
    assert len(made) == before + 3
    assert made[-1].state_bytes == made[-2].state_bytes


def test_what_was_saved_to_be_used_without_a_cache_generates_with_one(run, tmp_path, made):
    config = torch.load(run / "last.ckpt", weights_only=True)["packhorse"]["config"] | {"use_cache": False}
    checkpoint, before = changed(run, tmp_path / "older.ckpt", config=config), len(made)
    assert predict(run, checkpoint) == 0
    assert len(made) == before + 1

    older = export(checkpoint, tmp_path / "older")
    for name in ("config.json", "generation_config.json"):
        assert '"use_cache": true' in (older / name).read_text(), name
        (older / name).write_text((older / name).read_text().replace('"use_cache": true', '"use_cache": false'))
    assert '"use_cache": true' in (export(older, tmp_path / "newer") / "generation_config.json").read_text()


def first_ids(tokenizer: TokenizerContent, text: str, bos_id: int | None) -> list[int]:
    plain = Tokenizer.from_str(tokenizer.json).encode(text, add_special_tokens=False).ids
    return plain if bos_id is None else [bos_id, *plain]


def test_prompts_begin_as_the_texts_of_the_training(run, named_bos):
    bos_id = read_tokenizer(named_bos).facts.bos_id
    assert bos_id is not None
    assert opened(run / "last.ckpt").encode("the of") == first_ids(read_tokenizer(named_bos), "the of", bos_id)


@pytest.mark.parametrize("by_itself", [True, False], ids=["template", "no template"])
@pytest.mark.parametrize("add_bos", [True, False], ids=["BOS", "no BOS"])
def test_prompts_pass_keys_and_exports_have_the_bos_of_the_recipe(
    run, llama_like, named_bos, tmp_path, by_itself, add_bos
):
    tokenizer = read_tokenizer(llama_like if by_itself else named_bos)
    bos_id = tokenizer.facts.bos_id if add_bos else None
    config = torch.load(run / "last.ckpt", weights_only=True)["packhorse"]["config"]
    config["bos_token_id"] = tokenizer.facts.bos_id  # as a pretrained model's makers left it
    checkpoint = changed(run, tmp_path / "other.ckpt", config=config, tokenizer=tokenizer.files, bos_id=bos_id)
    folder = export(checkpoint, tmp_path / "exported")

    expected = first_ids(tokenizer, "the of", bos_id)
    for restored in (opened(checkpoint), opened(folder)):
        assert restored.encode("the of") == expected
        first = PasskeyText(restored.tokenizer).lay(200, 0.5, "12345").ids[0]
        assert (first == tokenizer.facts.bos_id) == add_bos
    assert AutoTokenizer.from_pretrained(folder)("the of").input_ids == expected
    assert json.loads((folder / "tokenizer_config.json").read_text())["add_bos_token"] == add_bos
    if by_itself == add_bos:
        assert (folder / "tokenizer.json").read_bytes() == tokenizer.files["tokenizer.json"], "it needs no change"


@pytest.mark.parametrize(("configured", "begins"), [("its own", True), (None, False), (7, False)])
def test_a_checkpoint_that_does_not_tell_its_bos_has_that_of_its_configuration(
    run, named_bos, tmp_path, configured, begins
):
    """7 is no BOS of this tokenizer: the makers of a pretrained model left it there."""
    bos_id = read_tokenizer(named_bos).facts.bos_id
    config = torch.load(run / "last.ckpt", weights_only=True)["packhorse"]["config"]
    assert config["bos_token_id"] == bos_id
    config["bos_token_id"] = bos_id if configured == "its own" else configured
    older = changed(run, tmp_path / "older.ckpt", config=config, bos_id=...)
    assert (opened(older).encode("the")[0] == bos_id) == begins


def test_an_empty_prompt_is_continued_after_a_bos_and_refused_without(run, tmp_path, capsys):
    prompts = ["predict", "--config", str(run / "config.yaml"), "--ckpt_path", str(run / "last.ckpt")]
    assert main([*prompts, "--data.prompts", '[""]']) == 0
    capsys.readouterr()
    assert main([*prompts, "--data.prompts", '["the", ""]', "--data.add_bos", "false"]) == 2
    assert "'' has no tokens" in capsys.readouterr().err

    assert opened(run / "last.ckpt").encode("")
    with pytest.raises(SettingsError, match="'' has no tokens"):
        opened(changed(run, tmp_path / "other.ckpt", bos_id=None)).encode("")


def test_a_tokenizer_without_the_bos_of_the_training_is_refused(gpt2_like):
    with pytest.raises(TokenizerError, match="99999 before every text"):
        with_bos(read_tokenizer(gpt2_like), 99_999)
