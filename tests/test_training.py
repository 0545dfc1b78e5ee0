"""Laws of the hall: what a run trains on, for how long, and what it tells."""

import json
from pathlib import Path

import lightning
import numpy as np
import pytest
import torch
import transformers
from lightning.pytorch.callbacks import Callback

from conftest import tiny_data
from packhorse.errors import CacheIncompleteError, CheckpointError, SettingsError, TokenizerError
from packhorse.models import InfiniAttentionConfig, InfiniLlamaConfig, InfiniLlamaForCausalLM, gate_parameters
from packhorse.training import LanguageModule, RecoveryCheckpoint, ScheduleSettings, TokenDataModule
from packhorse.training.compatibility import check_shapes
from packhorse.training.mixture import RunOrder
from packhorse.training.module import AdamW
from packhorse.training.order import TrainingOrder
from packhorse.training.sampler import TrainSampler

WORDS = "the mule carries salt over hills and comes home with wool for winter".split()


def write_corpus(path: Path, documents: int, seed: int = 0) -> Path:
    rng = np.random.default_rng(seed)
    rows = (" ".join(rng.choice(WORDS, size=int(rng.integers(5, 60)))) for _ in range(documents))
    path.write_text("".join(json.dumps({"text": row}) + "\n" for row in rows))
    return path


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    return write_corpus(tmp_path_factory.mktemp("corpus") / "hills.jsonl", 300)


@pytest.fixture(scope="module")
def room(tmp_path_factory, corpus):
    """A folder with a tokenizer and a cache, shared by the tests that change nothing."""
    folder = tmp_path_factory.mktemp("room")
    datamodule(folder, corpus).prepare_data()
    return folder


def datamodule(folder, corpus, **settings) -> TokenDataModule:
    values = {
        **{"source": str(corpus), "eval_share": 0.1, "micro_batch_size": 4, "engine": "hf"},
        **settings,
    }
    return TokenDataModule(**tiny_data(folder, **values))


def module(**settings) -> LanguageModule:
    values = {
        "config": {
            "hidden_size": 32,
            "intermediate_size": 64,
            "num_hidden_layers": 2,
            "num_attention_heads": 2,
            "num_key_value_heads": 1,
        },
        "infini_attention": InfiniAttentionConfig(segment_length=8),
        "optimizer": lambda params: AdamW(params, lr=1e-2),
        **settings,
    }
    lightning.seed_everything(0, verbose=False)
    return LanguageModule(**values)


def trainer(folder, **settings) -> lightning.Trainer:
    values = {
        "accelerator": "cpu",
        "max_epochs": 1,
        "logger": False,
        "enable_checkpointing": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "num_sanity_val_steps": 0,
        "limit_val_batches": 0,
        "default_root_dir": str(folder),
        **settings,
    }
    return lightning.Trainer(**values)


class Seen(Callback):
    """Remembers the batches of a run."""

    def __init__(self) -> None:
        self.batches: list[torch.Tensor] = []
        self.epochs: list[int] = []
        self.steps: list[int] = []

    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
        self.batches.append(batch["input_ids"].clone())
        self.epochs.append(trainer.current_epoch)

    def on_train_epoch_end(self, trainer, pl_module):
        self.steps.append(trainer.global_step)


def rows_of(batches) -> list[tuple[int, ...]]:
    return [tuple(row.tolist()) for batch in batches for row in batch]


def test_a_run_trains_each_sequence_once_per_epoch_and_batches_straddle_epochs(room, corpus, tmp_path):
    data, seen = datamodule(room, corpus), Seen()
    run = trainer(tmp_path, max_epochs=3, callbacks=[seen])
    run.fit(module(), datamodule=data)
    sequences = data.cache.num_sequences("train")
    assert sequences % 4, "the test needs a last batch that is not full"
    assert run.global_step == 3 * sequences // 4 == data.plan.steps
    rows = rows_of(seen.batches)
    stored = rows_of([torch.from_numpy(data.cache.read(np.arange(sequences)).tokens.astype(np.int64))])
    assert sorted(rows[:sequences]) == sorted(stored)
    assert sorted(rows[sequences : 2 * sequences]) == sorted(stored)
    assert rows[:sequences] != rows[sequences : 2 * sequences]
    assert seen.steps == [(epoch + 1) * sequences // 4 for epoch in range(3)], "an epoch ends with its last whole batch"


@pytest.mark.parametrize(("micro_batch", "world_size", "accumulation"), [(8, 1, 1), (2, 1, 4), (4, 2, 1), (1, 4, 2)])
def test_the_order_of_a_step_is_the_same_however_it_is_shared_out(micro_batch, world_size, accumulation):
    order = RunOrder((TrainingOrder(seed=3, history=((0, 100),)),), ((0, (2048,)),))

    def steps(micro_batch, world_size, accumulation):
        ranks = [
            list(
                TrainSampler(
                    order=lambda: order,
                    trained=40,
                    accumulation=accumulation,
                    micro_batch=micro_batch,
                    rank=rank,
                    world_size=world_size,
                    length=20 * accumulation,
                )
            )
            for rank in range(world_size)
        ]
        return np.array(ranks).transpose(1, 0, 2, 3).reshape(20, -1, 2)

    expected = np.stack([order.sequence_numbers(8 * step, 8) for step in range(5, 25)])
    np.testing.assert_array_equal(steps(micro_batch, world_size, accumulation), expected)


def test_a_run_that_was_stopped_goes_on_as_if_it_had_not_been(room, corpus, tmp_path, recwarn):
    whole, first, second = Seen(), Seen(), Seen()
    undisturbed = module(schedule=ScheduleSettings(warmup_steps=2))
    trainer(tmp_path, max_epochs=2, callbacks=[whole]).fit(undisturbed, datamodule=datamodule(room, corpus))

    checkpoint = RecoveryCheckpoint(dirpath=tmp_path / "ckpt", every_n_train_steps=7, save_top_k=-1)

    class Stop(Callback):
        def on_train_batch_end(self, trainer, *_):
            if trainer.global_step == 9:
                raise KeyboardInterrupt

    run = trainer(tmp_path, max_epochs=2, callbacks=[first, checkpoint, Stop()], enable_checkpointing=True)
    with pytest.raises(SystemExit):
        run.fit(module(schedule=ScheduleSettings(warmup_steps=2)), datamodule=datamodule(room, corpus))
    resumed = module(schedule=ScheduleSettings(warmup_steps=2))
    run = trainer(tmp_path, max_epochs=2, callbacks=[second])
    (saved,) = (tmp_path / "ckpt").glob("*step=7.ckpt")
    run.fit(resumed, datamodule=datamodule(room, corpus), ckpt_path=str(saved))
    assert not [warning for warning in recwarn if "not resumable" in str(warning.message)], "it is"
    assert rows_of(first.batches[:7] + second.batches) == rows_of(whole.batches)
    for a, b in zip(undisturbed.parameters(), resumed.parameters(), strict=True):
        assert torch.equal(a, b)


def test_max_steps_ends_a_run_and_is_the_length_of_its_schedule(room, corpus, tmp_path):
    data, model = datamodule(room, corpus), module()
    run = trainer(tmp_path, max_steps=5, max_epochs=-1)
    run.fit(model, datamodule=data)
    assert run.global_step == data.plan.steps == model.schedule.total == 5


def test_gates_have_their_own_learning_rate_and_no_weight_decay(room, corpus, tmp_path):
    model = module(balance_factor_lr=0.25)
    run = trainer(tmp_path, max_steps=1)
    run.fit(model, datamodule=datamodule(room, corpus))
    groups = {group["name"]: group for group in run.optimizers[0].param_groups}
    assert groups["gates"]["params"] == gate_parameters(model.model)
    assert groups["gates"]["initial_lr"] == 0.25
    assert groups["gates"]["weight_decay"] == 0 == groups["vectors"]["weight_decay"]
    assert groups["matrices"]["weight_decay"] == 0.1
    grouped = sum(p.numel() for group in groups.values() for p in group["params"])
    assert grouped == sum(p.numel() for p in model.parameters())


def test_the_loss_falls_below_the_unigram_entropy(corpus, room, tmp_path):
    data, model = datamodule(room, corpus), module()
    run = trainer(tmp_path, max_epochs=5, limit_val_batches=None)
    run.fit(model, datamodule=data)
    assert float(run.callback_metrics["val/loss"]) < data.unigram_entropy() - 0.3


def test_validation_weighs_tokens_not_batches(room, corpus, tmp_path):
    data, model = datamodule(room, corpus, micro_batch_size=3), module()
    run = trainer(tmp_path, limit_val_batches=None)
    (metrics,) = run.validate(model, datamodule=data, verbose=False)
    numbers = np.arange(data.cache.num_sequences("eval"))
    assert len(numbers) % 3, "the test needs a last batch that is not full"
    batch = data.rows("eval")[numbers]
    with torch.no_grad():
        logits = model.model(input_ids=batch["input_ids"], position_ids=batch["position_ids"]).logits
        expected = torch.nn.functional.cross_entropy(logits.flatten(0, 1), batch["labels"].flatten())
    assert metrics["val/loss"] == pytest.approx(float(expected), rel=1e-5)
    assert metrics["val/perplexity"] == pytest.approx(float(expected.exp()), rel=1e-4)


@pytest.mark.parametrize(("micro_batch", "accumulation"), [(4, 1), (1, 4)])
@pytest.mark.filterwarnings("ignore:.*padding:UserWarning")  # which the test needs
def test_a_step_follows_the_mean_over_all_its_tokens_however_they_are_shared_out(tmp_path, micro_batch, accumulation):
    few, many = [{"text": "salt"}] * 60, [{"text": " ".join(WORDS)}] * 60
    (tmp_path / "hills.jsonl").write_text("".join(json.dumps(row) + "\n" for row in few + many))
    constant = ScheduleSettings(shape="constant", warmup_steps=0)
    model = module(optimizer=lambda params: torch.optim.SGD(params, lr=1.0), balance_factor_lr=1.0, schedule=constant)
    data = datamodule(tmp_path, tmp_path / "hills.jsonl", micro_batch_size=micro_batch, packing="pad")
    before, seen = {}, Seen()

    class Before(Callback):
        def on_train_start(self, trainer, pl_module):
            before.update({name: p.detach().clone() for name, p in pl_module.model.named_parameters()})

    run = trainer(tmp_path, max_steps=1, accumulate_grad_batches=accumulation, callbacks=[Before(), seen])
    run.fit(model, datamodule=data)
    after = {name: p.detach().clone() for name, p in model.model.named_parameters()}

    batch = data.rows("train")[data.order.sequence_numbers(0, 4)]
    assert rows_of(seen.batches) == rows_of([batch["input_ids"]])
    counts = (batch["labels"] >= 0).sum(1)
    assert counts.max() > 4 * counts.min(), "the test needs micro-batches of different weight"
    model.model.load_state_dict(before, strict=False)
    logits = model.model(input_ids=batch["input_ids"], position_ids=batch["position_ids"]).logits
    loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), batch["labels"].flatten())
    assert float(run.callback_metrics["train/loss"]) == float(model.step_loss) == pytest.approx(float(loss), rel=1e-6)
    names = list(before)
    gradients = torch.autograd.grad(loss, [model.model.get_parameter(name) for name in names])
    for name, gradient in zip(names, gradients, strict=True):
        torch.testing.assert_close(before[name] - after[name], gradient, rtol=1e-4, atol=1e-6)


def test_a_resumed_run_has_the_hyperparameters_that_are_configured_now(room, corpus, tmp_path):
    def run_of(steps, ckpt_path=None, **optimizer):
        run = trainer(tmp_path, max_steps=steps, enable_checkpointing=True, callbacks=[RecoveryCheckpoint(tmp_path)])
        model = module(optimizer=lambda params: AdamW(params, lr=1e-2, **optimizer))
        run.fit(model, datamodule=datamodule(room, corpus), ckpt_path=ckpt_path)
        run.save_checkpoint(tmp_path / "end.ckpt")
        return {group["name"]: group for group in run.optimizers[0].param_groups}

    run_of(2, weight_decay=0.1, betas=(0.9, 0.95))
    groups = run_of(4, tmp_path / "end.ckpt", weight_decay=0.3, betas=(0.8, 0.9))
    assert (groups["matrices"]["weight_decay"], groups["vectors"]["weight_decay"]) == (0.3, 0)
    assert groups["matrices"]["betas"] == (0.8, 0.9)


def test_a_checkpoint_of_another_model_is_refused_with_every_difference(room, corpus, tmp_path):
    run = trainer(tmp_path, max_steps=1)
    run.fit(module(), datamodule=datamodule(room, corpus))
    run.save_checkpoint(tmp_path / "end.ckpt")
    other = module()
    other.model_config.update(hidden_size=64, num_hidden_layers=3)
    with pytest.raises(CheckpointError, match=r"(?s)hidden_size: .* 32, configured 64.*layers: .* 2, configured 3"):
        trainer(tmp_path).fit(other, datamodule=datamodule(room, corpus), ckpt_path=tmp_path / "end.ckpt")


def test_a_checkpoint_with_other_biases_or_gates_is_of_another_model():
    def config(layers=None, **settings):
        sizes = {"vocab_size": 8, "hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 2}
        attention = {"num_attention_heads": 2, "infini_attention": {"memory_layers": layers}}
        return InfiniLlamaConfig(**sizes, **attention, **settings)

    saved = config().to_dict()
    for other, message in (
        (config(attention_bias=True), "attention_bias: in the checkpoint False, configured True"),
        (config(mlp_bias=True), "mlp_bias: in the checkpoint False, configured True"),
        (config([1]), r"infini_attention.memory_layers: in the checkpoint None, configured \[1\]"),
    ):
        weights = InfiniLlamaForCausalLM(other).state_dict().keys()
        assert weights != InfiniLlamaForCausalLM(config()).state_dict().keys()
        with pytest.raises(CheckpointError, match=message):
            check_shapes(saved, other)
    check_shapes(saved, config([1, 0]))


def test_in_bf16_the_gates_stay_in_fp32_and_move(room, corpus, tmp_path):
    model = module()
    run = trainer(tmp_path, max_steps=3, precision="bf16-true")
    run.fit(model, datamodule=datamodule(room, corpus))
    gates = {id(gate) for gate in gate_parameters(model.model)}
    assert {p.dtype for p in model.model.parameters() if id(p) not in gates} == {torch.bfloat16}
    assert {gate.dtype for gate in gate_parameters(model.model)} == {torch.float32}
    assert all(run.optimizers[0].state[gate]["exp_avg"].abs().sum() > 0 for gate in gate_parameters(model.model))
    assert torch.isfinite(model.step_loss)


def test_a_model_can_be_validated_before_it_is_trained(room, corpus, tmp_path):
    data, model = datamodule(room, corpus), module()
    trainer(tmp_path, limit_val_batches=None).validate(model, datamodule=data, verbose=False)
    run = trainer(tmp_path, max_steps=2, limit_val_batches=None, num_sanity_val_steps=1)
    run.fit(model, datamodule=data)
    assert run.global_step == 2


def test_unigram_entropy_is_that_of_the_labels(room, corpus, tmp_path):
    data = datamodule(room, corpus)
    data.prepare_data()
    data.setup("validate")
    counts: dict[int, int] = {}
    stored = data.cache.read(np.arange(data.cache.num_sequences()))
    for row, lengths in zip(stored.tokens, stored.piece_lengths, strict=True):
        start = 0
        for length in lengths:
            for token in row[start + 1 : start + length]:
                counts[int(token)] = counts.get(int(token), 0) + 1
            start += int(length)
    total = sum(counts.values())
    expected = -sum(n / total * np.log(n / total) for n in counts.values())
    assert data.unigram_entropy(10**6) == pytest.approx(expected)


def test_the_validation_set_stays_when_the_cache_grows(tmp_path):
    corpus = write_corpus(tmp_path / "hills.jsonl", 200)
    before = datamodule(tmp_path, corpus, eval_sequences=6)
    trainer(tmp_path, limit_val_batches=None).validate(module(), datamodule=before, verbose=False)
    with corpus.open("a") as file:
        file.write(write_corpus(tmp_path / "more.txt", 200, seed=1).read_text())
    after = datamodule(tmp_path, corpus, eval_sequences=6)
    trainer(tmp_path, limit_val_batches=None).validate(module(), datamodule=after, verbose=False)
    assert after.cache.num_sequences("train") > before.cache.num_sequences("train")
    old, new = (rows_of(batch["input_ids"] for batch in data.val_dataloader()) for data in (before, after))
    assert old == new
    assert len(old) == 6


def test_a_model_with_too_small_a_vocabulary_is_refused_before_the_cache_is_built(corpus, tmp_path):
    model = module()
    model.model_config["vocab_size"] = 100
    with pytest.raises(TokenizerError, match="100 entries"):
        trainer(tmp_path).fit(model, datamodule=datamodule(tmp_path, corpus))
    assert not list((tmp_path / "cache").glob("*/chunks"))


def test_fewer_sequences_than_a_batch_are_refused(room, corpus, tmp_path):
    with pytest.raises(ValueError, match="fewer than one global batch"):
        trainer(tmp_path).fit(module(), datamodule=datamodule(room, corpus, micro_batch_size=10_000))


def test_of_two_limits_the_smaller_ends_a_run_also_when_it_goes_on_with_other_batches(room, corpus, tmp_path):
    first = trainer(tmp_path, max_steps=10, max_epochs=-1)
    first.fit(module(), datamodule=datamodule(room, corpus))
    first.save_checkpoint(tmp_path / "saved.ckpt")
    tokens = 120 * tiny_data(room)["sequence_length"]  # 15 steps of 8 sequences, but 20 after 10 of 4
    for max_steps, batch, steps in ((18, 8, 18), (30, 8, 20), (30, 4, 30), (31, 4, 30)):
        going_on = trainer(tmp_path, max_steps=max_steps, max_epochs=-1)
        data = datamodule(room, corpus, micro_batch_size=batch, max_train_tokens=tokens)
        going_on.fit(module(), datamodule=data, ckpt_path=str(tmp_path / "saved.ckpt"), weights_only=True)
        assert going_on.global_step == data.plan.steps == steps
    going_on.fit(module(), datamodule=datamodule(room, corpus))
    assert going_on.global_step == 31, "the limit of the Trainer alone"


def test_much_padding_is_told_before_training(tmp_path):
    corpus = write_corpus(tmp_path / "few.jsonl", 6)
    data = datamodule(tmp_path, corpus, sequence_length=300, micro_batch_size=1)
    with pytest.warns(UserWarning, match="the rest is padding"):
        trainer(tmp_path, max_steps=1).fit(module(), datamodule=data)


def test_a_datamodule_says_what_to_do_before_its_cache_is_open(room, corpus):
    with pytest.raises(CacheIncompleteError, match="prepare_data"):
        datamodule(room, corpus).vocab_size  # noqa: B018


def test_a_misspelt_model_field_is_refused():
    with pytest.raises(ValueError, match="hiden_size"):
        LanguageModule(config={"hiden_size": 3})


def test_a_checkpoint_holds_what_is_needed_to_load_it_without_settings(room, corpus, tmp_path):
    checkpoint = RecoveryCheckpoint(dirpath=tmp_path / "ckpt", every_n_train_steps=3, save_last=True)
    model = module()
    run = trainer(tmp_path, max_steps=4, callbacks=[checkpoint], enable_checkpointing=True)
    run.fit(model, datamodule=datamodule(room, corpus))
    loaded = LanguageModule.load_from_checkpoint(tmp_path / "ckpt" / "last.ckpt", weights_only=True)
    assert torch.load(tmp_path / "ckpt" / "last.ckpt", weights_only=True)["global_step"] == 4, "the last step is saved"
    for a, b in zip(model.model.parameters(), loaded.model.parameters(), strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("family", ["Llama", "Qwen2", "Qwen3"])
def test_a_pretrained_checkpoint_is_continued_with_its_own_vocabulary(room, corpus, tmp_path, family, monkeypatch):
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "head_dim": 16}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 2, "vocab_size": 512}
    plain = getattr(transformers, f"{family}ForCausalLM")(getattr(transformers, f"{family}Config")(**sizes, **heads))
    plain.save_pretrained(tmp_path / "plain")
    monkeypatch.setenv("HOME", str(tmp_path))
    model = module(config=None, pretrained="~/plain")
    data = datamodule(room, corpus)
    trainer(tmp_path, max_steps=1, limit_train_batches=1).fit(model, datamodule=data)
    assert type(model.model).__name__ == f"Infini{family}ForCausalLM"
    assert model.model.config.vocab_size == 512 > data.vocab_size
    assert model.model.config.infini_attention.segment_length == 8


@pytest.mark.parametrize("family", ["qwen2", "qwen3"])
def test_other_families_are_trained_saved_and_loaded(room, corpus, tmp_path, family):
    checkpoint = RecoveryCheckpoint(dirpath=tmp_path / "ckpt", save_last=True)
    model = module(family=family)
    run = trainer(tmp_path, max_steps=2, callbacks=[checkpoint], enable_checkpointing=True)
    run.fit(model, datamodule=datamodule(room, corpus))
    loaded = LanguageModule.load_from_checkpoint(tmp_path / "ckpt" / "last.ckpt", weights_only=True)
    assert loaded.model.config.model_type == f"infini_{family}"


def test_a_checkpoint_of_an_unknown_family_is_refused(tmp_path):
    transformers.GPT2Config().save_pretrained(tmp_path)
    with pytest.raises(SettingsError, match="gpt2"):
        module(config=None, pretrained=str(tmp_path)).make_config(10)


def test_text_is_continued_from_a_prompt(room, corpus, tmp_path):
    data, model = datamodule(room, corpus, prompts=("the mule", "wool for")), module()
    out = trainer(tmp_path).predict(model, datamodule=data)
    assert [text[:8] for text in out] == ["the mule", "wool for"]
    assert all(len(text) > 8 for text in out)


@pytest.mark.parametrize(
    "config",
    [
        {"hidden_size": 31, "num_attention_heads": 4},
        {"hidden_size": 30, "num_attention_heads": 2, "num_key_value_heads": 2},
        {"hidden_size": 32, "num_attention_heads": 4, "num_key_value_heads": 3},
    ],
    ids=["no multiple", "odd heads", "uneven groups"],
)
def test_heads_that_do_not_fit_are_refused_before_anything_is_built(config):
    with pytest.raises(SettingsError, match="must be a multiple"):
        LanguageModule(config=config)
    LanguageModule(config={"hidden_size": 36, "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 16})


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("num_attention_heads", 0),
        ("num_hidden_layers", 0),
        ("intermediate_size", -64),
        ("num_key_value_heads", True),
        ("hidden_size", None),
        ("rms_norm_eps", "tiny"),
        ("hidden_act", "sillu"),
        ("dtype", "float7"),
    ],
)
def test_values_of_a_model_that_make_no_sense_are_refused_by_name(name, value):
    with pytest.raises(SettingsError, match=f"`config.*({name}|{value})"):
        LanguageModule(config={name: value})


@pytest.mark.parametrize("name", ["balance_factor_lr", "balance_factor_weight_decay"])
def test_gates_are_not_trained_backwards(name):
    with pytest.raises(SettingsError, match=f"{name} must be 0 or more"):
        LanguageModule(**{name: -0.1})
