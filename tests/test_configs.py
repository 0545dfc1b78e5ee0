"""Every configuration that we ship loads, and makes the model that it says."""

from pathlib import Path

import pytest
import torch
import yaml
from transformers import AutoModelForCausalLM, Qwen3Config

from packhorse.cache.commands import load_verb, make_parser, read_settings
from packhorse.models import gate_parameters
from packhorse.training.cli import make_cli
from packhorse.training.gate_budget import gate_budget, gate_schedule

FOLDER = Path(__file__).parents[1] / "configs"
CONFIGS = sorted(FOLDER.glob("*.yaml"))
LAYERS = sorted((FOLDER / "trainer").glob("*.yaml"))
QWEN3 = {  # as the checkpoint on the hub says
    "vocab_size": 151936,
    "hidden_size": 1024,
    "intermediate_size": 3072,
    "num_hidden_layers": 28,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "tie_word_embeddings": True,
}


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory):
    """A folder in place of a checkpoint on the hub."""
    folder = tmp_path_factory.mktemp("checkpoint")
    Qwen3Config(**QWEN3).save_pretrained(folder)
    return folder


def parse(config: Path, checkpoint: Path):
    """A command line with this configuration, without a hub."""
    local = ["--model.pretrained", str(checkpoint)] if "pretrained:" in config.read_text() else []
    return make_cli(["--config", str(config), *local], run=False)


def count(cli, vocab_size: int) -> tuple[int, int]:
    """Parameters without the gates, and gates."""
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(cli.model.make_config(vocab_size=vocab_size))
    gates = sum(gate.numel() for gate in gate_parameters(model))
    return sum(p.numel() for p in model.parameters()) - gates, gates


@pytest.mark.parametrize("config", CONFIGS, ids=lambda path: path.stem)
def test_a_configuration_makes_its_model_and_data(config, checkpoint, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    parameters, gates = count(parse(config, checkpoint), vocab_size=1_000)
    assert parameters > gates > 0
    assert not list(tmp_path.iterdir()), "loading a configuration writes nothing"


@pytest.mark.parametrize("config", CONFIGS, ids=lambda path: path.stem)
def test_cache_commands_read_the_same_data_group(config, checkpoint, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    options = make_parser(load_verb("status")).parse_args(["--config", str(config)])
    assert read_settings(options) == make_cli(["--config", str(config)], run=False).datamodule.settings


@pytest.mark.parametrize(
    ("name", "vocab_size", "parameters", "gates"),
    [
        ("llama_200m_infini", 49_152, 201_339_904, 6 * 8),
        ("local_fineweb_200m", 50_257, 203_602_944, 6 * 8),
        ("qwen3_0.6b_infini", 151_669, 596_049_920, 28 * 16),
    ],
)
def test_a_model_has_the_published_number_of_parameters(name, vocab_size, parameters, gates, checkpoint):
    assert count(parse(FOLDER / f"{name}.yaml", checkpoint), vocab_size) == (parameters, gates)


@pytest.mark.parametrize(
    ("name", "budget", "suffices"),
    [("llama_200m_infini", 3.8, True), ("local_fineweb_200m", 0.8, False), ("qwen3_0.6b_infini", 25.0, True)],
)
def test_the_gates_of_a_configuration_have_this_budget(name, budget, suffices, checkpoint):
    cli = parse(FOLDER / f"{name}.yaml", checkpoint)
    (group,) = cli.model.optimizer_callable([torch.nn.Parameter(torch.zeros(1))]).param_groups
    peak = cli.model.balance_factor_lr
    schedule = gate_schedule(cli.model.schedule_settings.make(cli.trainer.max_steps), group["lr"], peak)
    allowed = gate_budget(cli.model.infini_attention, schedule, peak)
    assert round(allowed.budget, 1) == budget
    assert allowed.suffices is suffices


def test_the_200m_model_is_trained_as_published(checkpoint):
    cli = parse(FOLDER / "llama_200m_infini.yaml", checkpoint)
    sequences = cli.datamodule.settings.micro_batch_size * cli.trainer.accumulate_grad_batches
    assert sequences * cli.datamodule.settings.sequence_length == 2_097_152
    schedule = cli.model.schedule_settings.make(cli.trainer.max_steps)
    peak = 3.75e-5
    rates = [peak * schedule.factor(step) for step in (0, 4_999, 5_000, 50_000)]
    assert rates == pytest.approx([peak / 5_000, peak, peak, peak / 10])
    (group,) = cli.model.optimizer_callable([torch.nn.Parameter(torch.zeros(1))]).param_groups
    assert (group["lr"], group["betas"], group["weight_decay"]) == (peak, (0.9, 0.95), 0.1)
    assert cli.trainer.gradient_clip_val == 1.0


def test_there_are_configurations():
    assert CONFIGS


@pytest.mark.parametrize("layer", LAYERS, ids=lambda path: path.stem)
def test_a_layer_over_a_configuration_makes_its_trainer(layer, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    here = ["--trainer.accelerator=cpu"]
    if "nccl" in layer.read_text():
        here.append("--trainer.strategy.init_args.process_group_backend=gloo")
    cli = make_cli(["--config", str(FOLDER / "quickstart.yaml"), "--config", str(layer), *here], run=False)
    said = yaml.safe_load(layer.read_text())["trainer"]
    # Without a GPU Lightning takes bf16 for fp16.
    assert cli.trainer.precision == said["precision"].replace("16-mixed", "bf16-mixed").replace("bfbf", "bf")
    assert cli.trainer.world_size == said.get("devices", 1)
    if "strategy" in said:
        assert type(cli.trainer.strategy).__name__ == said["strategy"]["class_path"].rpartition(".")[2]


def test_there_are_layers():
    assert LAYERS
