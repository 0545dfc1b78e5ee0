"""Laws of losses by segment: every prediction counts once, where it stands, whatever the batch and the rank."""

import json
import os
import subprocess
import sys
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from torch.nn.functional import cross_entropy

from conftest import make_texts, tiny_data, write_jsonl
from packhorse.evaluation.perplexity import MemoryLoss, memory_losses, table_lines
from packhorse.models import InfiniLlamaConfig, InfiniLlamaForCausalLM
from packhorse.training.batches import derive

SEGMENT = 8
ROOT = Path(__file__).parents[1]


@pytest.fixture(autouse=True)
def _one_thread():
    torch.set_num_threads(1)
    torch.manual_seed(0)


def make_model(**settings) -> InfiniLlamaForCausalLM:
    config = InfiniLlamaConfig(
        vocab_size=61,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        initializer_range=0.3,
        infini_attention={"segment_length": SEGMENT, "balance_init_type": "randn", **settings},
    )
    return InfiniLlamaForCausalLM(config).eval()


def make_batch(*pieces_of_rows: list[int], width: int = 40) -> dict[str, torch.Tensor]:
    tokens = torch.randint(0, 61, (len(pieces_of_rows), width)).numpy()
    batch = derive(tokens, [torch.tensor(pieces).numpy() for pieces in pieces_of_rows])
    return {name: torch.from_numpy(array) for name, array in batch._asdict().items()}


def documents(batch) -> list[torch.Tensor]:
    """The documents of a batch, one by one."""
    found = []
    for ids, positions, labels in zip(*(batch[name] for name in ("input_ids", "position_ids", "labels")), strict=True):
        starts = [*(positions == 0).nonzero().flatten().tolist(), len(ids)]
        for start, stop in pairwise(starts):
            if (labels[start:stop] >= 0).any():
                found.append(ids[start:stop])
    return found


@torch.no_grad()
def nll_alone(model, ids) -> torch.Tensor:
    return cross_entropy(model(ids[None]).logits[0, :-1], ids[1:], reduction="none")


def test_on_and_off_are_what_each_document_gets_alone():
    model, batch = make_model(memory_update="delta"), make_batch([30, 6], [17, 20, 3], [40])
    got = {mode: (nll, position) for mode, nll, position in memory_losses(model, batch) if mode != "shuffled"}
    off = make_model(turn_on_memory=False)
    off.load_state_dict(model.state_dict())
    for mode, alone in (("on", model), ("off", off)):
        nll, position = got[mode]
        expected = torch.cat([nll_alone(alone, ids) for ids in documents(batch)])
        torch.testing.assert_close(nll, expected, rtol=1e-4, atol=1e-5)
        assert position.tolist() == [place for ids in documents(batch) for place in range(len(ids) - 1)]
    first = got["on"][1] < SEGMENT
    torch.testing.assert_close(got["on"][0][first], got["off"][0][first], rtol=1e-4, atol=1e-5)
    assert (got["on"][0] - got["off"][0])[~first].abs().min() > 1e-6


@pytest.mark.parametrize("rule", ["linear", "delta"])
def test_shuffled_covers_the_long_documents_that_have_a_neighbour(rule):
    model, batch = make_model(memory_update=rule), make_batch([30, 6], [17, 20, 3], [40])
    shuffled = [(nll, position) for mode, nll, position in memory_losses(model, batch) if mode == "shuffled"]
    positions = torch.cat([position for _, position in shuffled])
    expected = [place for length in (40, 30, 20, 17) for place in range(SEGMENT, length - 1)]
    assert positions.tolist() == expected, "none of segment 0, none of documents of one segment"
    on = {len(ids): nll_alone(model, ids)[SEGMENT:] for ids in documents(batch) if len(ids) > SEGMENT}
    right = torch.cat([on[length] for length in (40, 30, 20, 17)])
    assert (torch.cat([nll for nll, _ in shuffled]) - right).abs().min() > 1e-7
    assert not [1 for mode, *_ in memory_losses(model, make_batch([40])) if mode == "shuffled"], "nobody to swap with"


def test_copies_of_one_document_lend_each_other_what_they_have():
    """The control: shuffled differs because the memory is another's, not because it is streamed."""
    model, batch = make_model(), make_batch([40], [40])
    batch = {name: tensor[:1].expand(2, -1) for name, tensor in batch.items()}
    values = {mode: (nll, position) for mode, nll, position in memory_losses(model, batch)}
    late = values["on"][1] >= SEGMENT
    torch.testing.assert_close(values["shuffled"][0], values["on"][0][late], rtol=1e-4, atol=1e-5)


def test_a_model_without_memory_has_one_way_to_read():
    assert [mode for mode, *_ in memory_losses(make_model(turn_on_memory=False), make_batch([40]))] == ["off"]


def test_sums_are_the_same_however_predictions_are_shared_out():
    nll, position = torch.rand(1_000), torch.randint(0, 100, (1_000,))
    whole, parts = MemoryLoss(), [MemoryLoss(), MemoryLoss()]
    whole.update("on", nll, position, SEGMENT)
    for number, (part, places) in enumerate(zip(nll.split(17), position.split(17), strict=True)):
        parts[number % 2].update("on", part, places, SEGMENT)
    for name in ("nll_sum", "tokens"):
        reduce = parts[0]._reductions[name]
        torch.testing.assert_close(reduce(torch.stack([getattr(part, name) for part in parts])), getattr(whole, name))
    values = whole.compute()
    assert list(values["segment"]) == ["0", "1", "2-3", "4-7", "8-15"]
    third = (position >= 2 * SEGMENT) & (position < 4 * SEGMENT)
    loss, tokens = values["segment"]["2-3"]["on"]
    assert tokens == int(third.sum())
    assert loss == pytest.approx(float(nll[third].mean()), rel=1e-6)
    assert sum(cells["on"][1] for cells in values["position"].values()) == 1_000


def test_a_table_has_a_line_for_every_span_and_a_column_for_every_mode():
    metric = MemoryLoss()
    for mode, nll, position in memory_losses(make_model(), make_batch([40], [40])):
        metric.update(mode, nll, position, SEGMENT)
    text = "\n".join(table_lines(metric.compute(), SEGMENT))
    for word in ("memory on", "memory off", "memory shuffled", "segment of 8 tokens", "position", "4-7", "32-63"):
        assert word in text
    (first,) = [line for line in text.splitlines() if line.split()[:1] == ["0"] and line.endswith("-")][:1]
    assert first.split()[2] == first.split()[3], "in segment 0 the memory is empty"


def test_the_sums_survive_a_cast_to_bf16():
    metric = MemoryLoss().to(torch.bfloat16)
    metric.update("on", torch.full((5_000,), 1.001), torch.zeros(5_000, dtype=torch.long), SEGMENT)
    assert metric.compute()["segment"]["0"]["on"] == (pytest.approx(1.001, rel=1e-6), 5_000)


@pytest.mark.slow
def test_two_processes_tell_what_one_tells(tmp_path):
    """Real processes, gloo: the table of `test`, but for documents that lend each other memories in other batches."""
    write_jsonl(tmp_path / "corpus.jsonl", make_texts(300))
    config = {
        "data": tiny_data(tmp_path, sequence_length=64, micro_batch_size=4, eval_share=0.3),
        "model": {
            "config": {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2},
            "infini_attention": {"segment_length": 8, "balance_init_type": "randn"},
            "schedule": {"warmup_steps": 0},
        },
        "trainer": {"accelerator": "cpu", "max_steps": 3, "logger": False, "limit_val_batches": 0},
        "checkpoint": {"dirpath": str(tmp_path / "checkpoints")},
    }
    (tmp_path / "config.yaml").write_text(json.dumps(config))

    def tell(command: str, *arguments: str) -> list[list[str]]:
        line = [sys.executable, str(ROOT / "main.py"), command, "--config", "config.yaml", *arguments]
        environment = {**os.environ, "PYTHONPATH": str(ROOT / "src")}
        done = subprocess.run(line, cwd=tmp_path, env=environment, capture_output=True, text=True, check=True)
        _, _, table = done.stdout.partition("Nats per token by segment")
        return [words for words in map(str.split, table.splitlines()) if len(words) == 5 and words[0][0].isdigit()]

    tell("fit")
    one = tell("test", "--ckpt_path", "checkpoints/last.ckpt")
    two = tell("test", "--ckpt_path", "checkpoints/last.ckpt", "--trainer.devices=2", "--trainer.strategy=ddp")
    assert len(one) == len(two) > 8
    for alone, together in zip(one, two, strict=True):
        assert alone[:2] == together[:2], "spans and how many tokens are in them"
        assert [float(x) for x in alone[2:4]] == pytest.approx([float(x) for x in together[2:4]], abs=2e-4)
