"""Laws of compiled training: the same run, compiled a few times at most."""

import pytest
import torch
from torch._dynamo.utils import counters

from packhorse.errors import SettingsError
from packhorse.models import InfiniAttentionConfig
from test_training import datamodule, module, trainer, write_corpus


def test_a_compiled_run_trains_as_the_same_run_does_and_compiles_at_most_three_times(tmp_path):
    corpus = write_corpus(tmp_path / "hills.jsonl", 150)
    torch._dynamo.reset()
    counters.clear()
    weights = []
    for backend in (None, "eager"):
        settings = InfiniAttentionConfig(segment_length=8, memory_update="delta")
        config = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
        model = module(config=config, infini_attention=settings, compile=backend)
        trainer(tmp_path, max_steps=8, max_epochs=-1).fit(model, datamodule=datamodule(tmp_path, corpus))
        weights.append(model.state_dict())
    assert 1 <= counters["stats"]["unique_graphs"] <= 3
    assert not counters["graph_break"]
    assert weights[0].keys() == weights[1].keys(), "a checkpoint does not tell whether a run was compiled"
    for name, expected in weights[0].items():
        torch.testing.assert_close(weights[1][name], expected, rtol=1e-3, atol=1e-4, msg=name)
    torch._dynamo.reset()


def test_a_backend_that_cannot_read_slots_is_refused():
    with pytest.raises(SettingsError, match="backend 'loop'"):
        module(infini_attention=InfiniAttentionConfig(backend="loop"), compile="eager")
