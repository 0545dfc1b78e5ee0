"""Every configuration that we ship loads, and makes the model that it says."""

from pathlib import Path

import pytest
import torch

from packhorse.cache.commands import load_verb, make_parser, read_settings
from packhorse.models import InfiniLlamaForCausalLM
from packhorse.training.cli import make_cli

CONFIGS = sorted((Path(__file__).parents[1] / "configs").rglob("*.yaml"))


@pytest.mark.parametrize("config", CONFIGS, ids=lambda path: path.stem)
def test_a_configuration_makes_its_model_and_data(config, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    cli = make_cli(["--config", str(config)], run=False)
    with torch.device("meta"):
        model = InfiniLlamaForCausalLM(cli.model.make_config(vocab_size=1_000))
    assert sum(p.numel() for p in model.parameters()) > 0
    assert not list(tmp_path.iterdir()), "loading a configuration writes nothing"


@pytest.mark.parametrize("config", CONFIGS, ids=lambda path: path.stem)
def test_cache_commands_read_the_same_data_group(config, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    options = make_parser(load_verb("status")).parse_args(["--config", str(config)])
    assert read_settings(options) == make_cli(["--config", str(config)], run=False).datamodule.settings


def test_there_are_configurations():
    assert CONFIGS
