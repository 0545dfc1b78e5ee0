"""Laws of the monitor: it tells what is there, costs little, and changes nothing."""

from pathlib import Path

import numpy as np
import pytest
import torch
from lightning.pytorch.loggers import CSVLogger, TensorBoardLogger
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from packhorse.evaluation.memory import read_with
from packhorse.models import InfiniAttentionConfig, InfiniLlamaConfig, InfiniLlamaForCausalLM, gate_values
from packhorse.models.memory import feature_map
from packhorse.training.memory_facts import memory_gain, observe_memory
from packhorse.training.memory_monitor import InfiniAttentionMonitor, heat_map
from test_training import datamodule, module, trainer, write_corpus


@pytest.fixture(scope="module")
def room(tmp_path_factory):
    """A corpus, a tokenizer and a cache."""
    folder = tmp_path_factory.mktemp("room")
    datamodule(folder, write_corpus(folder / "hills.jsonl", 300)).prepare_data()
    return folder


def run(room, folder, logger=False, steps=6, **settings):
    """A short training; -> module, trainer."""
    settings = {"segment_length": 8, "logging_interval": 3, **settings}
    model = module(infini_attention=InfiniAttentionConfig(**settings), balance_factor_lr=0.1)
    runner = trainer(folder, max_epochs=-1, max_steps=steps, logger=logger, log_every_n_steps=1)
    runner.fit(model, datamodule=datamodule(room, room / "hills.jsonl"))
    return model, runner


def read_board(logger) -> EventAccumulator:
    board = EventAccumulator(logger.log_dir, size_guidance={"images": 0, "histograms": 0})
    board.Reload()
    return board


def make_model(**settings) -> InfiniLlamaForCausalLM:
    torch.manual_seed(0)
    sizes = {"vocab_size": 61, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "initializer_range": 0.3}
    infini_attention = {"segment_length": 8, "balance_init_type": "randn", **settings}
    return InfiniLlamaForCausalLM(InfiniLlamaConfig(**sizes, **heads, infini_attention=infini_attention)).eval()


def test_a_run_writes_everything_that_the_documentation_names_to_tensorboard(room, tmp_path):
    logger = TensorBoardLogger(tmp_path)
    model, _ = run(room, tmp_path, logger, log_grad=True, log_segment_acts=True)
    board = read_board(logger)
    wanted = {
        *(f"gates/{name}" for name in ("closed", "open", "gradient", "moved", "moved_most", "budget_so_far")),
        *(f"memory/{name}" for name in ("norm", "stable_rank", "least_normalizer", "read_over_local", "loss_gain")),
        *(f"{name}_{layer:02}" for name in ("gates/mean", "memory/norm") for layer in range(2)),
        *(f"segments/{name}_{segment:03}" for name in ("read", "local") for segment in (1, 2, 3)),
    }
    assert wanted <= set(board.Tags()["scalars"])
    assert {"gates/histogram", "gates/gradient/histogram"} <= set(board.Tags()["histograms"])
    assert {"gates/heat_map", "gates/gradient/heat_map"} <= set(board.Tags()["images"])
    assert [event.step for event in board.Scalars("memory/norm")] == [3, 6], "every logging_interval steps"
    moved, spent = (board.Scalars(f"gates/{name}")[-1].value for name in ("moved_most", "budget_so_far"))
    assert 0 < moved <= 1.05 * spent
    shares = [board.Scalars(f"gates/mean_{layer:02}")[-1].value for layer in range(2)]
    assert shares == pytest.approx(gate_values(model.model).mean(1).tolist(), abs=1e-5)
    (picture,) = board.Images("gates/heat_map")[-1:]
    assert (picture.height, picture.width) == (2 * 16, 2 * 16)


def test_what_is_not_asked_for_is_not_logged(room, tmp_path):
    logger = TensorBoardLogger(tmp_path)
    run(room, tmp_path, logger)
    tags = read_board(logger).Tags()
    assert "gates/gradient/heat_map" not in tags["images"]
    assert not any(name.startswith("segments/") for name in tags["scalars"])
    silent = TensorBoardLogger(tmp_path, name="silent")
    run(room, tmp_path, silent, logging=False)
    assert not any(name.startswith("memory/") for name in read_board(silent).Tags()["scalars"])


def test_a_logger_without_pictures_gets_the_numbers(room, tmp_path):
    logger = CSVLogger(tmp_path)
    run(room, tmp_path, logger)
    header = Path(logger.experiment.metrics_file_path).read_text().splitlines()[0]
    assert {"memory/stable_rank", "gates/open"} <= set(header.split(","))


def test_a_run_ends_with_the_same_weights_whether_it_is_watched_or_not(room, tmp_path):
    watched, _ = run(room, tmp_path, TensorBoardLogger(tmp_path), logging_interval=1)
    unwatched, _ = run(room, tmp_path, logging=False)
    for a, b in zip(watched.parameters(), unwatched.parameters(), strict=True):
        assert torch.equal(a, b)


def test_between_two_intervals_no_batch_is_read_and_no_memory_looked_at(room, tmp_path, monkeypatch):
    seen = []
    monkeypatch.setattr("packhorse.training.memory_monitor.observe_memory", lambda *args: seen.append(args))
    run(room, tmp_path, TensorBoardLogger(tmp_path), logging_interval=100)
    assert not seen


def test_the_count_of_movements_goes_on_after_a_resume(room, tmp_path):
    def monitor_of(runner):
        return next(x for x in runner.callbacks if isinstance(x, InfiniAttentionMonitor))

    _, first = run(room, tmp_path, steps=3)
    first.save_checkpoint(tmp_path / "half.ckpt")
    before = monitor_of(first)._moved.clone()
    resumed = module(
        infini_attention=InfiniAttentionConfig(segment_length=8, logging_interval=3), balance_factor_lr=0.1
    )
    runner = trainer(tmp_path, max_epochs=-1, max_steps=6)
    runner.fit(
        resumed, datamodule=datamodule(room, room / "hills.jsonl"), ckpt_path=tmp_path / "half.ckpt", weights_only=True
    )
    assert (monitor_of(runner)._moved > before).all()
    rest = sum(0.1 * resumed.gate_schedule.factor(step) for step in (3, 4, 5))
    assert monitor_of(runner)._spent == pytest.approx(monitor_of(first)._spent + rest)


@pytest.mark.parametrize("rule", ["linear", "delta"])
def test_what_is_told_of_a_memory_is_what_stands_in_it(rule):
    model = make_model(memory_update=rule, memory_layers=(0, 2))
    input_ids = torch.randint(0, 61, (3, 32))
    facts = observe_memory(model, input_ids)
    # The first layer's memory by its definition, from its own projections.
    layer = model.model.layers[0]
    hidden = layer.input_layernorm(model.model.embed_tokens(input_ids))
    shape = (3, 4, 8, 2, 8)
    key = feature_map(layer.self_attn.k_proj(hidden).view(shape).permute(1, 0, 3, 2, 4))
    value = layer.self_attn.v_proj(hidden).view(shape).permute(1, 0, 3, 2, 4)
    memory, normalizer = torch.zeros(3, 2, 8, 8), torch.zeros(3, 2, 8)
    for segment in range(4):
        new = value[segment]
        if rule == "delta" and segment:
            read = key[segment] @ memory / (key[segment] @ normalizer.unsqueeze(-1))
            new = new - read
        memory, normalizer = memory + key[segment].mT @ new, normalizer + key[segment].sum(-2)
    singular = torch.linalg.svdvals(memory)
    norm = singular.square().sum(-1).sqrt()
    torch.testing.assert_close(facts.norm_LG[0], norm.mean(0), rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(
        facts.stable_rank_LG[0], (norm / singular[..., 0]).square().mean(0), rtol=1e-2, atol=1e-3
    )
    assert facts.least_normalizer_L[0].item() == pytest.approx(normalizer.min().item(), rel=1e-4)
    assert facts.norm_LG.shape == (2, 2), "layers with a memory only"
    assert facts.read_LN.shape == facts.local_LN.shape == (2, 3)
    assert (facts.read_LN > 0).all()


def test_the_gain_of_a_memory_is_the_difference_of_two_losses(room, tmp_path):
    model, _ = run(room, tmp_path)
    data = datamodule(room, room / "hills.jsonl")
    data.prepare_data()
    data.setup("validate")
    batch = data.rows("eval")[np.arange(4)]
    gain = memory_gain(model, batch)
    with torch.no_grad():
        on, tokens = model(batch)
        with read_with(model.model, "off"):
            off, _ = model(batch)
    assert gain == pytest.approx(float((on - off) / tokens))
    assert gain != 0.0
    assert model.model.config.infini_attention.turn_on_memory, "and it is on again"


def test_a_heat_map_has_one_cell_for_each_value_between_the_lowest_and_the_highest_colour():
    picture = heat_map(torch.tensor([[0.0, 1.0, 0.5], [0.25, 0.75, 1.0]]))
    assert picture.shape == (3, 32, 48)
    assert picture.dtype == np.uint8
    assert tuple(picture[:, 0, 0]) == (68, 1, 84)
    assert tuple(picture[:, 15, 31]) == (253, 231, 37)
    assert tuple(heat_map(torch.tensor([[-2.0, 2.0]]))[:, 0, 0]) == (68, 1, 84), "gradients from their own lowest"
