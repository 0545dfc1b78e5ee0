"""The memory learns: a fact of an earlier segment, which local attention cannot see, is answered from memory."""

from contextlib import nullcontext

import pytest
import torch

from packhorse.evaluation.memory import read_with
from packhorse.models import InfiniLlamaConfig, InfiniLlamaForCausalLM, attention, gate_parameters

SEGMENT, LENGTH, NUM_VALUES, NUM_NOISE = 16, 64, 16, 32
QUESTION = NUM_VALUES + NUM_NOISE


@pytest.mark.parametrize("rule", ["linear", "delta"])
def test_a_model_recalls_from_an_earlier_segment_only_with_its_memory(rule):
    torch.set_num_threads(1)
    trained = train(max_steps=300, memory_update=rule)
    assert accuracy(trained) >= 0.99

    assert accuracy(trained, "on") >= 0.99
    assert accuracy(trained, "off") < 0.2, "the same weights with the memory knocked out must be near chance, 1 in 16"
    assert accuracy(trained, "shuffled") < 0.2, "and so with the memory of another row: it is the content that counts"


def test_local_attention_alone_cannot_solve_the_task():
    torch.set_num_threads(1)
    assert accuracy(train(max_steps=200, turn_on_memory=False)) < 0.2


def test_a_memory_that_is_written_without_gradients_learns_nothing_to_write(monkeypatch):
    """A large gate is no evidence: here gates open, and the answers are chance."""
    original = attention.memories_by_scan
    monkeypatch.setattr(attention, "memories_by_scan", lambda *x: tuple(part.detach() for part in original(*x)))
    monkeypatch.setattr(attention, "choose_backend", lambda *x: "scan")
    torch.set_num_threads(1)
    assert accuracy(train(max_steps=200)) < 0.2


def train(max_steps: int, **settings) -> InfiniLlamaForCausalLM:
    torch.manual_seed(0)
    config = InfiniLlamaConfig(
        vocab_size=QUESTION + 1,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=1,
        num_attention_heads=2,
        infini_attention={"segment_length": SEGMENT, **settings},
    )
    model = InfiniLlamaForCausalLM(config).train()
    gates = gate_parameters(model)
    others = [p for p in model.parameters() if not any(p is gate for gate in gates)]
    optimizer = torch.optim.AdamW(
        [{"params": others, "lr": 3e-3}, {"params": gates, "lr": 2e-2}], weight_decay=0.0, betas=(0.9, 0.95)
    )
    generator = torch.Generator().manual_seed(1)
    for step in range(max_steps):
        input_ids, answer = batch(32, generator)
        loss = torch.nn.functional.cross_entropy(model(input_ids, logits_to_keep=1).logits[:, -1], answer)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step % 25 == 24 and loss < 0.01:
            break
    return model


@torch.no_grad()
def accuracy(model: InfiniLlamaForCausalLM, mode: str | None = None) -> float:
    """Share of right answers; of whole rows, or streamed with the memory in a mode."""
    input_ids, answer = batch(256, torch.Generator().manual_seed(2))
    with nullcontext() if mode is None else read_with(model, mode) as cache:
        logits = model.eval()(input_ids, past_key_values=cache, logits_to_keep=1).logits[:, -1]
    return (logits.argmax(-1) == answer).float().mean().item()


def batch(rows: int, generator: torch.Generator) -> tuple[torch.Tensor, torch.Tensor]:
    """Noise, one value token anywhere before the last segment, and the question at the very end."""
    input_ids = torch.randint(NUM_VALUES, QUESTION, (rows, LENGTH), generator=generator)
    answer = torch.randint(0, NUM_VALUES, (rows,), generator=generator)
    place = torch.randint(0, LENGTH - SEGMENT, (rows,), generator=generator)
    input_ids[torch.arange(rows), place] = answer
    input_ids[:, -1] = QUESTION
    return input_ids, answer
