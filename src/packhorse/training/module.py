"""Batches -> loss: the LightningModule around a language model with Infini-attention.

The model is made in `configure_model`, when the cache is open and its vocabulary is known. The loss never holds the
logits of a batch, so vocabularies of 150,000 entries cost little memory. Gates are a parameter group of their own.
"""

import os
from collections.abc import Callable
from functools import cached_property
from typing import Any, Literal

import torch
from lightning import Callback, LightningModule
from lightning.pytorch.cli import OptimizerCallable
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities import rank_zero_warn
from torch import Tensor
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR
from transformers import PreTrainedConfig, PreTrainedModel

from packhorse.cache.progress import say
from packhorse.corpus.hub import offline_without_network
from packhorse.errors import SettingsError, TokenizerError
from packhorse.evaluation.perplexity import MemoryLoss, memory_losses, table_lines
from packhorse.models import (
    InfiniAttentionConfig,
    gate_parameters,
    segments_in_buckets,
    split_into_segments,
)
from packhorse.models.config import as_settings
from packhorse.models.slots import SlottedSegments
from packhorse.training.compatibility import check_contents, check_shapes, hyperparameters
from packhorse.training.families import FAMILIES, allow_cache, check_config, family_of, plain_config
from packhorse.training.gate_budget import gate_schedule
from packhorse.training.loss import TokenLoss, chunked_cross_entropy
from packhorse.training.memory_monitor import InfiniAttentionMonitor
from packhorse.training.permutation import derive_key
from packhorse.training.schedule import Schedule, ScheduleSettings, set_learning_rates
from packhorse.training.sharding import shard
from packhorse.training.step_mean import StepMean
from packhorse.training.validation import validate_now


class AdamW(torch.optim.AdamW):
    """`torch.optim.AdamW` with the defaults of language models."""

    def __init__(self, params, lr: float = 3e-4, betas: tuple[float, float] = (0.9, 0.95), weight_decay: float = 0.1):
        super().__init__(params, lr=lr, betas=betas, weight_decay=weight_decay)


class LanguageModule(LightningModule):
    """Trains a language model with Infini-attention on packed sequences.

    Args:
        config: Fields of the family's transformers configuration for a new model: hidden_size, num_hidden_layers, ...
            `vocab_size` follows the tokenizer unless it is given here.
        family: What a new model is built like.
        pretrained: A Llama, Qwen2 or Qwen3 checkpoint to continue from, a folder or a hub name, instead of `config`.
        infini_attention: How attention splits a document into segments and what it remembers.
        optimizer: Any torch optimizer by class path; weight decay applies to matrices only.
        schedule: How the learning rate goes over the run.
        balance_factor_lr: Peak learning rate of the gates, which have to travel far; 0.01 if neither this nor
            `infini_attention.balance_factor_lr` says otherwise.
        balance_factor_weight_decay: Weight decay of the gates, here or in `infini_attention`; it pulls them to one
            half, so 0 if neither is given.
        gradient_checkpointing: Compute activations twice instead of keeping them.
        compile: A backend of torch.compile for training steps, such as inductor. Packed rows are then laid into at most
            three shapes, so it compiles at most three times.
    """

    def __init__(
        self,
        config: dict[str, Any] | None = None,
        family: Literal["llama", "qwen2", "qwen3"] = "llama",
        pretrained: str | None = None,
        infini_attention: InfiniAttentionConfig = InfiniAttentionConfig(),  # noqa: B008 (it is frozen)
        optimizer: OptimizerCallable = AdamW,
        schedule: ScheduleSettings = ScheduleSettings(),  # noqa: B008 (it is frozen)
        balance_factor_lr: float | None = None,
        balance_factor_weight_decay: float | None = None,
        gradient_checkpointing: bool = False,
        compile: str | None = None,
    ) -> None:
        super().__init__()
        # LightningCLI makes these of a YAML; from Python they may come as the YAML has them.
        infini_attention = as_settings(InfiniAttentionConfig, infini_attention, "infini_attention")
        schedule = as_settings(ScheduleSettings, schedule, "schedule")
        if config and pretrained:
            raise SettingsError("Give either `config`, for a new model, or `pretrained`, to continue from one.")
        check_config(config or {}, family)
        self.model_config, self.family = dict(config or {}), family
        self.pretrained = pretrained and os.path.expanduser(pretrained)
        self.infini_attention, self.schedule_settings = infini_attention, schedule
        self.optimizer_callable = optimizer
        self.balance_factor_lr = _said_once(infini_attention, "balance_factor_lr", balance_factor_lr, 1e-2)
        self.balance_factor_weight_decay = _said_once(
            infini_attention, "balance_factor_weight_decay", balance_factor_weight_decay, 0.0
        )
        self.gradient_checkpointing = gradient_checkpointing
        if compile is not None and infini_attention.backend not in ("auto", "scan"):
            raise SettingsError(
                f"`compile` lays segments into slots, which infini_attention.backend {infini_attention.backend!r} "
                "cannot read. Set `backend: auto`."
            )
        if compile is not None and compile not in (known := torch.compiler.list_backends(exclude_tags=None)):
            raise SettingsError(f"`compile: {compile}` is no backend of torch.compile. There are: {', '.join(known)}.")
        self.compile_backend = compile
        self._compiled: Callable | None = None
        self.model: PreTrainedModel | None = None
        self.schedule: Schedule | None = None
        self.eval_loss = TokenLoss()
        self.memory_loss = MemoryLoss()
        self.step_loss: Tensor | None = None
        """Mean over all tokens of the last optimizer step, on all ranks the same."""
        self._step_mean = StepMean()
        self._forward = self._summed_loss
        self._restored_config: dict[str, Any] | None = None
        self._restored_schedule: dict[str, Any] | None = None
        self._peaks: list[float] = []
        self._change: Any = None

    @property
    def declared_vocab_size(self) -> int | None:
        """The model's vocabulary, if it is fixed before the tokenizer is known."""
        if self.pretrained is not None:
            return self._plain_config.vocab_size
        return self.model_config.get("vocab_size")

    def make_config(self, vocab_size: int, special_ids: dict[str, int | None] | None = None) -> PreTrainedConfig:
        """The configuration of the model for a vocabulary.

        Args:
            vocab_size: Of the tokenizer.
            special_ids: bos_token_id, eos_token_id and pad_token_id for a new model.

        Raises:
            SettingsError: The settings make no model.
        """
        try:
            if self.pretrained is not None:
                return FAMILIES[family_of(self._plain_config)][0].from_base(self._plain_config, self.infini_attention)
            values = {"vocab_size": vocab_size, **(special_ids or {}), **self.model_config}
            return FAMILIES[self.family][0](**values, infini_attention=self.infini_attention)
        except SettingsError:
            raise
        except ValueError as error:
            raise SettingsError(f"`model` makes no sense: {error}") from None

    @cached_property
    def _plain_config(self) -> PreTrainedConfig:
        """Of the checkpoint to continue from; asked for several times before a run begins, perhaps from the hub."""
        assert self.pretrained is not None
        return plain_config(self.pretrained)

    def configure_model(self) -> None:
        """Make the model, once."""
        if self.model is not None or (self._trainer is None and self._restored_config is None):
            return
        if self._restored_config is not None:
            config_class, model_class = FAMILIES[self._restored_config["model_type"].removeprefix("infini_")]
            self.model = model_class(config_class(**self._restored_config))
        else:
            if getattr(self.trainer, "datamodule", None) is None:
                raise SettingsError(
                    "A LanguageModule trains on a TokenDataModule: `trainer.fit(module, datamodule=...)`."
                )
            recipe = self.trainer.datamodule.cache.recipe
            ids = {"bos_token_id": recipe.bos_id, "eos_token_id": recipe.eos_id, "pad_token_id": recipe.pad_id}
            config = self.make_config(recipe.vocab_size, ids)
            if config.vocab_size < recipe.vocab_size:
                raise TokenizerError(
                    f"The cache has ids up to {recipe.vocab_size - 1:,}, but the model's vocabulary has "
                    f"{config.vocab_size:,} entries.\nLeave `vocab_size` out: it follows the tokenizer."
                )
            model_class = FAMILIES[family_of(config)][1]
            if self.pretrained is None:
                self.model = model_class(config)
            else:
                with offline_without_network(self.pretrained):
                    self.model = model_class.from_pretrained(self.pretrained, config=config, dtype=torch.float32)
        allow_cache(self.model)
        self.model.train()
        if self.gradient_checkpointing:
            self.model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        if self.compile_backend is not None:
            # The function, not the module: a compiled module would be a second one with the same parameters.
            self._compiled = torch.compile(self.model.model.forward, backend=self.compile_backend, dynamic=False)

        if getattr(self, "_device_mesh", None) is not None:  # only ModelParallelStrategy has one
            _check_sharded(self.trainer.state.fn)
            self._forward = shard(self.model, self.device_mesh, self._summed_loss)

    def configure_callbacks(self) -> list[Callback]:
        """The monitor of gates and memory, as `infini_attention` asks for it."""
        settings = self.infini_attention
        if not (settings.logging and settings.turn_on_memory):
            return []
        return [InfiniAttentionMonitor(settings.logging_interval, settings.log_grad, settings.log_segment_acts)]

    def configure_optimizers(self) -> dict[str, Any]:
        """Matrices with weight decay, vectors without, gates with a learning rate of their own."""
        assert self.model is not None
        gates = gate_parameters(self.model)
        own = {id(gate) for gate in gates}
        others = [p for p in self.model.parameters() if p.requires_grad and id(p) not in own]
        groups = [
            {"params": [p for p in others if p.ndim >= 2], "name": "matrices"},
            {"params": [p for p in others if p.ndim < 2], "weight_decay": 0.0, "name": "vectors"},
            {
                "params": gates,
                "lr": self.balance_factor_lr,
                "weight_decay": self.balance_factor_weight_decay,
                "name": "gates",
            },
        ]
        try:
            optimizer = self.optimizer_callable([group for group in groups if group["params"]])
        except ValueError as error:
            raise SettingsError(f"`model.optimizer` makes no sense: {error}.") from error
        self._peaks = [group["lr"] for group in optimizer.param_groups]
        self._hyperparameters = hyperparameters(optimizer.param_groups)
        self.schedule = self.schedule_settings.make(*self._total_steps())
        # Plain functions, looked up at every call: the schedule may learn of more steps later.
        factors = {"gates": lambda step: self.gate_schedule.factor(step)}
        scheduler = LambdaLR(
            optimizer,
            [factors.get(group["name"], lambda step: self.schedule.factor(step)) for group in optimizer.param_groups],
        )
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}

    @property
    def gate_schedule(self) -> Schedule:
        """The gates' schedule: the run's, down to the same learning rate as everything else."""
        assert self.schedule is not None
        return gate_schedule(self.schedule, self._peaks[0], self.balance_factor_lr)

    def on_train_start(self) -> None:
        """Go on with the learning rate of the run, which may have more steps now, and say what has changed."""
        if self._restored_schedule is not None:
            self.schedule = self.schedule_settings.restore(self._restored_schedule)
            self._restored_schedule = None
        total, full_total = self._total_steps()
        self.schedule = self.schedule.grow(self.trainer.global_step, total)
        set_learning_rates(self.trainer, self._peaks)
        for group, configured in zip(self.trainer.optimizers[0].param_groups, self._hyperparameters, strict=True):
            group.update(configured)  # a restored state brings those of the checkpoint
        if self.schedule.warmup_steps >= total > 0:
            of_full = f" ({full_total:,} steps over the full data set)" if full_total > total else ""
            rank_zero_warn(
                f"Warm-up takes {self.schedule.warmup_steps:,} steps{of_full}, the whole run only {total:,}: "
                "the peak learning rate is never reached."
            )
        self._follow_the_data()

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        """Make what is random in a step, such as dropout, depend on the step alone: a resumed run draws the same."""
        step, part = self.trainer.global_step, batch_idx % self.trainer.accumulate_grad_batches
        torch.manual_seed(derive_key(getattr(self.trainer.datamodule, "seed", 0), step, part))
        self._follow_the_data()

    def forward(self, batch: dict[str, Any]) -> tuple[Tensor, Tensor]:
        """Summed loss in nats, and over how many tokens."""
        return self._forward(batch)

    def _summed_loss(self, batch: dict[str, Any]) -> tuple[Tensor, Tensor]:
        assert self.model is not None
        body: Callable = self.model.model
        if self._compiled is not None and self.training and isinstance(batch.get("segments"), SlottedSegments):
            body = self._compiled
        hidden = body(
            input_ids=batch["input_ids"],
            position_ids=batch["position_ids"],
            segments=batch.get("segments"),
            use_cache=False,
        ).last_hidden_state
        return chunked_cross_entropy(hidden, self.model.lm_head.weight, batch["labels"])

    def on_before_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        """Find the segments while the batch is on the CPU: it needs sizes, and a GPU would have to wait for them."""
        if isinstance(batch, dict) and "position_ids" in batch and "segments" not in batch:
            assert self.model is not None
            segment_length = self.model.config.infini_attention.segment_length
            find = split_into_segments if self.compile_backend is None else segments_in_buckets
            batch = {**batch, "segments": find(batch["input_ids"].shape, segment_length, batch["position_ids"])}
        return batch

    def on_train_epoch_start(self) -> None:
        """Begin with a whole step."""
        self._step_mean.reset()

    def training_step(self, batch: dict[str, Any], batch_idx: int) -> Tensor:
        """The micro-batch's part of the mean over all tokens of the step."""
        return self._step_mean.add(*self(batch), full=batch["labels"].numel())

    def on_before_optimizer_step(self, optimizer: Optimizer) -> None:
        """Make the gradients those of the mean over all tokens of the global batch, and log that mean."""
        self.step_loss = self._step_mean.finish(self.trainer, optimizer)
        self.log("train/loss", self.step_loss, prog_bar=True)

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        """After the run's last step, whatever the interval: validate."""
        plan = getattr(self.trainer.datamodule, "plan", None)
        if plan is not None and plan.is_over(self.trainer.global_step):
            validate_now(self.trainer)

    def validation_step(self, batch: dict[str, Any], batch_idx: int) -> None:
        """Adds the batch to the token-weighted loss."""
        self.eval_loss.update(*self(batch))

    def test_step(self, batch: dict[str, Any], batch_idx: int) -> None:
        """Adds the batch to the token-weighted loss, and to those by segment: with memory, without, with another's."""
        assert self.model is not None
        segment_length = self.model.config.infini_attention.segment_length
        for number, (mode, nll_N, position_N) in enumerate(memory_losses(self.model, batch)):
            self.memory_loss.update(mode, nll_N, position_N, segment_length)
            if number == 0:  # the model as it is
                self.eval_loss.update(nll_N.double().sum(), len(nll_N))

    def on_validation_epoch_end(self) -> None:
        """Log loss and perplexity over all tokens of all ranks."""
        self._log_eval("val")

    def on_test_epoch_end(self) -> None:
        """Log loss and perplexity over all tokens of all ranks, and tell what the memory is worth."""
        self._log_eval("test")
        values = self.memory_loss.compute()
        if self.trainer.is_global_zero:
            print("\n".join(table_lines(values, self.model.config.infini_attention.segment_length)))
        for span, cells in values["segment"].items():
            for mode, (nll, _) in cells.items():
                self.log(f"test/segment {span}/memory {mode}", nll, sync_dist=True, logger=True, prog_bar=False)
        self.memory_loss.reset()

    def predict_step(self, batch: str, batch_idx: int) -> str:
        """Continue a prompt."""
        data = self.trainer.datamodule
        return batch + self.continue_text(data, batch)

    @torch.no_grad()
    def continue_text(self, data, prompt: str, max_new_tokens: int = 64, **options: Any) -> str:
        """What the model writes after a prompt.

        Args:
            data: The DataModule, whose tokenizer is used.
            prompt: The text to continue.
            max_new_tokens: How much to write at most.
            options: Of `model.generate`, such as `do_sample` and `temperature`.
        """
        assert self.model is not None
        was_training = self.model.training
        self.model.eval()
        ids = torch.tensor([data.encode(prompt)], device=self.device)
        out = self.model.generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=max_new_tokens, **{"do_sample": False, **options}
        )
        self.model.train(was_training)
        return data.decode(out[0, ids.shape[1] :].tolist())

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Keep the model's configuration and tokenizer, so that a checkpoint can be opened without YAML and cache."""
        assert self.model is not None
        checkpoint["packhorse"] = {"config": self.model.config.to_dict()}
        if self.schedule is not None:
            checkpoint["packhorse"]["schedule"] = self.schedule.to_dict()
        if (cache := getattr(self.trainer.datamodule, "cache", None)) is not None:
            files = sorted(cache.tokenizer_folder.iterdir())
            checkpoint["packhorse"]["tokenizer"] = {file.name: file.read_bytes() for file in files if file.is_file()}
            checkpoint["packhorse"]["bos_id"] = cache.recipe.bos_id

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Make the model of the checkpoint, if there is none yet."""
        is_fitting = self._trainer is not None and self.trainer.state.fn == TrainerFn.FITTING
        path = None if self._trainer is None else self.trainer.ckpt_path
        check_contents(checkpoint, str(path or "This"), goes_on=is_fitting)
        self._restored_config = checkpoint["packhorse"]["config"]
        if is_fitting:
            self._restored_schedule = checkpoint["packhorse"].get("schedule")
        if self.model is None:
            self.configure_model()
        else:
            check_shapes(self._restored_config, self.model.config)

    def _log_eval(self, name: str) -> None:
        # The metric is the same on all ranks; `sync_dist` only tells Lightning that it need not warn.
        self.log(f"{name}/loss", self.eval_loss.compute().float(), prog_bar=True, sync_dist=True)
        self.log(f"{name}/perplexity", self.eval_loss.perplexity.float(), sync_dist=True)
        self.eval_loss.reset()

    def _follow_the_data(self) -> None:
        """When the run has turned out to be longer: go on with the learning rate, only slower, and say so."""
        change = getattr(self.trainer.datamodule, "change", None)
        if change is None or change is self._change:
            return
        self._change = change
        self.schedule = self.schedule.grow(self.trainer.global_step, change.after.steps)
        if self.trainer.is_global_zero:
            say("\n".join(change.lines(self.trainer.optimizers[0].param_groups[0]["lr"])))

    def _total_steps(self) -> tuple[int, int]:
        """Steps of the run, and of one over the full data set, of which the cache may hold only a part."""
        data = self.trainer.datamodule
        if not hasattr(data, "plan"):
            # Never with our own loaders: asking for it builds the loader before a resume.
            total = int(self.trainer.estimated_stepping_batches)
            return total, total
        full = data.settings.full_dataset_sequences
        return data.plan.steps, data.plan.steps if full is None else data.plan.of_full_data(full)


def _check_sharded(function: TrainerFn) -> None:
    """What reads a model again and again in ways of its own, on each rank as its text demands, needs all of it."""
    if function in (TrainerFn.TESTING, TrainerFn.PREDICTING):
        raise SettingsError(
            f"`{function.value}` needs the whole model on each device, not parts of it.\nLeave the strategy "
            "(`ModelParallelStrategy`) out, with `trainer.devices: 1` if need be; `validate` and `fit` work with it."
        )


def _said_once(settings: InfiniAttentionConfig, name: str, value: float | None, default: float) -> float:
    """A setting that may stand in either of two groups, but not twice with two values."""
    given = {
        place: x
        for place, x in (("model", value), ("model.infini_attention", getattr(settings, name)))
        if x is not None
    }
    if len(set(given.values())) > 1:
        raise SettingsError(
            f"{name} is {given['model']} in `model` and {given['model.infini_attention']} in "
            "`model.infini_attention`. Leave one of the two out."
        )
    if (said := next(iter(given.values()), default)) < 0:
        raise SettingsError(f"{name} must be 0 or more, not {said}.")
    return said
