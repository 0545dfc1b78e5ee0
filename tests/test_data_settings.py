"""Laws of the `data:` group: one cache, several by weight, and stages are the same thing."""

import csv
import json
import re

import numpy as np
import pytest

from packhorse.cache import DataSettings
from packhorse.cli import main
from packhorse.errors import SettingsError
from packhorse.training.memory_monitor import InfiniAttentionMonitor
from packhorse.training.monitors import RunReport
from packhorse.training.telling import weight_of
from test_training import datamodule, module, trainer, write_corpus

SHARES = (("web", 2), ("code", 1))
WEB = {"name": "web", "source": "web.jsonl", "weight": 3}
CODE = {"name": "code", "source": "code.jsonl", "weight": 1, "text_column": "content"}


def test_one_cache_is_a_mixture_of_one():
    data = DataSettings(source="folder/hills.jsonl", sequence_length=64)
    assert list(data.caches) == ["hills"]
    assert [(stage.start_training_step, stage.weights) for stage in data.stages] == [(1, {"hills": 1.0})]


def test_a_cache_of_a_mixture_has_what_all_have_and_its_own():
    data = DataSettings(mixture=[WEB, CODE], sequence_length=64, cache_dir="somewhere")
    assert [(each.name, each.source, each.text_column) for each in data.caches.values()] == [
        ("web", "web.jsonl", "text"),
        ("code", "code.jsonl", "content"),
    ]
    assert {(each.sequence_length, each.cache_dir) for each in data.caches.values()} == {(64, "somewhere")}
    assert data.stages[0].weights == {"web": 3, "code": 1}


def test_a_later_stage_names_what_is_known_and_describes_what_is_new():
    later = [{"name": "web", "weight": 1}, {"name": "books", "source": "books.parquet", "weight": 2}]
    data = DataSettings(
        mixture=[WEB, CODE], data_stages=[{"name": "end", "start_training_step": 100, "mixture": later}]
    )
    assert list(data.caches) == ["web", "code", "books"]
    assert [(stage.start_training_step, list(stage.weights)) for stage in data.stages] == [
        (1, ["web", "code"]),
        (100, ["web", "books"]),
    ]


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"mixture": [{"source": "x", "weight": 1}]}, "has name, weight, source"),
        ({"mixture": [{"name": "web", "weight": 1}]}, "needs a `source`"),
        ({"mixture": [WEB, {**WEB}]}, "described twice"),
        ({"mixture": [{**WEB, "weight": -1}]}, "weight of web must be 0 or more"),
        ({"mixture": [{**WEB, "tokenizer": "gpt2"}]}, "which all share"),
        ({"mixture": [{**WEB, "sorce": "x"}]}, "sorce"),
        ({"mixture": [WEB], "data_stages": [{"start_training_step": 5, "mixture": [WEB]}]}, "a stage has name"),
        (
            {"data_stages": [{"name": "a", "start_training_step": 5, "mixture": [WEB]}]},
            "the first must begin with step 1",
        ),
        (
            {"mixture": [WEB], "data_stages": [{"name": "a", "start_training_step": 1, "mixture": [CODE]}]},
            "each later than the one before",
        ),
        ({"skip_steps": [[5, 3]]}, "skip_steps is a list of"),
        ({"skip_steps": [[0, 3]]}, "counted from 1"),
        ({"on_growth": "grow"}, "on_growth must be adopt or pin"),
        ({"max_train_tokens": 0}, "max_train_tokens must be 1 or more"),
    ],
)
def test_what_makes_no_sense_is_refused(settings, message):
    with pytest.raises(SettingsError, match=message):
        DataSettings(**settings)


@pytest.fixture(scope="module")
def sources(tmp_path_factory):
    folder = tmp_path_factory.mktemp("sources")
    for name, seed in (("web", 1), ("code", 2), ("books", 3)):
        write_corpus(folder / f"{name}.jsonl", 60, seed=seed)
    datamodule(folder, folder / "web.jsonl").prepare_data()  # trains the tokenizer
    return folder


def mixture(sources, *weights):
    names = ("web", "code", "books")
    pairs = zip(names, weights, strict=False)
    return [{"name": name, "source": str(sources / f"{name}.jsonl"), "weight": weight} for name, weight in pairs]


def test_a_run_over_a_mixture_takes_each_cache_by_its_weight_and_goes_on_exactly(sources, tmp_path):
    stages = [{"name": "end", "start_training_step": 9, "mixture": mixture(sources, 0, 1, 1)[1:]}]
    for cache in stages[0]["mixture"][:1]:
        del cache["source"]

    def run(steps, start=None):
        data = datamodule(sources, "", mixture=mixture(sources, 1, 1), data_stages=stages)
        training = trainer(tmp_path, max_steps=12, max_epochs=-1)
        model = module()
        model.on_train_batch_end = lambda *_: (
            training.save_checkpoint(tmp_path / "saved.ckpt") if training.global_step == steps else None
        )
        training.fit(model, datamodule=data, ckpt_path=start)
        return data, training, model

    data, training, whole = run(steps=6)
    assert training.global_step == 12
    assert training.current_epoch == 1, "a mixture is one epoch of Lightning's, which is over"
    caches = data.order.sequence_numbers(0, 48)[:, 0]
    assert set(caches[:32]) == {0, 1}
    assert set(caches[32:]) == {1, 2}
    batch = data.rows("train")[data.order.sequence_numbers(28, 8)]
    stored = [cache.read([int(n)]).tokens[0] for c, n in data.order.sequence_numbers(28, 8)
              for cache in [list(data.caches.values())[c]]]  # fmt: skip
    np.testing.assert_array_equal(batch["input_ids"].numpy(), np.stack(stored))
    next_ones = data.rows("train")[data.order.sequence_numbers(4 * 12, 40)]["labels"].flatten()
    shares = next_ones[next_ones >= 0].bincount() / (next_ones >= 0).sum()
    entropy = -(shares * shares.log()).nansum()
    assert data.unigram_entropy(40) == pytest.approx(float(entropy), rel=1e-5), "of the caches as they are mixed now"
    _, _, resumed = run(steps=0, start=str(tmp_path / "saved.ckpt"))
    assert all((a == b).all() for a, b in zip(whole.parameters(), resumed.parameters(), strict=True))


def test_a_run_goes_on_without_a_cache_that_it_used(sources, tmp_path):
    first = trainer(tmp_path, max_steps=4, max_epochs=-1)
    first.fit(module(), datamodule=datamodule(sources, "", mixture=mixture(sources, 1, 1)))
    first.save_checkpoint(tmp_path / "saved.ckpt")
    data = datamodule(sources, "", mixture=mixture(sources, 0, 1, 1)[1:])
    going_on = trainer(tmp_path, max_steps=6, max_epochs=-1, callbacks=[RunReport()])
    going_on.fit(module(), datamodule=data, ckpt_path=str(tmp_path / "saved.ckpt"))
    assert set(data.order.sequence_numbers(0, 24)[:, 0]) == {0, 1, 2}, "web was the first cache of the run"
    code = data.caches["code"]
    expected = code.read(range(min(4, code.num_sequences("eval"))), "eval").tokens
    (monitor,) = (callback for callback in going_on.callbacks if isinstance(callback, InfiniAttentionMonitor))
    np.testing.assert_array_equal(monitor._batch["input_ids"].numpy(), expected)


def test_a_mixture_without_an_end_is_refused(sources, tmp_path):
    data = datamodule(sources, "", mixture=mixture(sources, 1, 1))
    with pytest.raises(SettingsError, match=r"Set `trainer.max_steps` or `data.max_train_tokens`"):
        trainer(tmp_path, max_epochs=2).fit(module(), datamodule=data)


@pytest.fixture
def mixed(sources, tmp_path):
    """The configuration of a run over two caches."""
    config = tmp_path / "config.yaml"
    values = {
        "data": {
            "mixture": mixture(sources, 2, 1),
            "tokenizer": str(sources / "tokenizer"),
            "sequence_length": 32,
            "cache_dir": str(tmp_path / "cache"),
            "workers": 0,
            "engine": "hf",
            "eval_share": 0.1,
            "micro_batch_size": 4,
            "max_train_tokens": 4 * 32 * 5,
        },
        "model": {
            "config": {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
        },
        "trainer": {
            "accelerator": "cpu",
            "logger": {"class_path": "lightning.pytorch.loggers.CSVLogger", "init_args": {"save_dir": str(tmp_path)}},
            "log_every_n_steps": 1,
        },
        "checkpoint": {"dirpath": str(tmp_path / "checkpoints")},
    }
    config.write_text(json.dumps(values))
    return config


def test_a_configuration_with_a_mixture_builds_tells_and_trains_all_its_caches(mixed, capsys):
    assert main(["cache", "build", "--config", str(mixed), "--json"]) == 0
    assert list(json.loads(capsys.readouterr().out)) == ["web", "code"]
    assert main(["fit", "--config", str(mixed)]) == 0
    said = capsys.readouterr().err
    assert "5 steps" in said
    plan, report = said.partition("Report")[::2]
    folders = [f"cache/{name}-[0-9a-f]+, found, weight {weight}, [0-9.]+ epochs" for name, weight in SHARES]
    assert all(re.search(f"  cache  .*{folder}", plan) for folder in folders), plan
    tokens = [
        re.search(f"  data  .*{name}: (.*) tokens in .*, weight {weight}\n", report)[1] for name, weight in SHARES
    ]
    (metrics,) = mixed.parent.rglob("metrics.csv")
    (row, *_) = csv.DictReader(metrics.open())
    assert float(row["cache/tokens"]) == sum(int(count.replace(",", "")) for count in tokens)


def test_preview_shows_each_cache_of_a_mixture(mixed, capsys):
    def told() -> str:
        assert main(["preview", "--config", str(mixed)]) == 0
        return capsys.readouterr().out

    before = told()
    for name, weight in SHARES:
        assert f"{name}.jsonl: 1 files" in before
        assert f"Source {name}, weight {weight}\n" in before
        assert re.search(f"  {name}, weight {weight}: about .* sequences of 32 tokens \\(an estimate;", before)
    assert "5 steps of 4 sequences" in before
    assert before.count("there is no cache yet") == 2
    assert main(["cache", "build", "--config", str(mixed)]) == 0
    assert told().count("is there)") == 2


def test_the_weights_of_a_cache_are_told_stage_by_stage():
    later = [{"name": "web", "weight": 3}, {"name": "books", "source": "books.parquet", "weight": 2}]
    stages = [{"name": "end", "start_training_step": 90_001, "mixture": later}]
    data = DataSettings(mixture=[WEB, CODE], data_stages=stages)
    assert {name: weight_of(name, data) for name in data.caches} == {
        "web": ", weight 3",
        "code": ", weight 1, from step 90,001 on 0",
        "books": ", weight 0, from step 90,001 on 2",
    }
    alone = DataSettings(source="hills.jsonl")
    assert weight_of("hills", alone) == ""
