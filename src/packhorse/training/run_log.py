"""What a run writes to its loggers, besides loss and validation: all that `health` and a glance at plots need.

tokens_per_second  steps_per_second  mfu          over the last steps; MFU where the device's peak is known
train/perplexity  lr/<group>                      of the step
run/epoch  run/steps                              epochs of the data so far; optimizer steps in all
cache/sequences  cache/tokens  cache/padding      of what is trained on, all caches together
run/ended                                         1: all steps are done; 0: stopped, or failed
"""

import time

from lightning import Callback, LightningModule, Trainer

from packhorse.training.loss import perplexity
from packhorse.training.speed import Speed, model_flops

FLUSH_SECONDS = 10.0
"""Loggers keep what they are given for minutes; whoever looks at a run wants to know now."""


class RunLog(Callback):
    """Writes throughput, learning rates and figures of the cache to the loggers, every `log_every_n_steps`."""

    def __init__(self) -> None:
        self.speed = Speed()
        self._step = 0
        self._flushed = self._validation = time.monotonic()

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Begin in the step from which the run goes on."""
        self._step = trainer.global_step

    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Validation is no training."""
        self._validation = time.monotonic()

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Validation is no training."""
        self.speed.pause(time.monotonic() - self._validation)

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, outputs, batch, batch_idx: int) -> None:
        """After an optimizer step: measure, and log every `log_every_n_steps`."""
        if trainer.global_step == self._step:
            return
        self._step = trainer.global_step
        self.speed.mark(self._step)
        if trainer.log_every_n_steps and self._step % trainer.log_every_n_steps == 0:
            pl_module.log_dict(self._values(trainer, pl_module), on_step=True, on_epoch=False)
            self._flush(trainer)

    def on_fit_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """All steps are done, perhaps before this run began; or a callback or `max_time` has ended it before."""
        plan = trainer.datamodule.plan
        self._end(trainer, {"run/ended": int(plan.is_over(trainer.global_step)), "run/steps": plan.steps})

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        """The run ends before its time."""
        if trainer.training:
            self._end(trainer, {"run/ended": 0})

    def tokens_per_second(self, trainer: Trainer) -> float:
        """Of all ranks, padding included."""
        plan = trainer.datamodule.plan
        return self.speed.steps_per_second * plan.global_batch * plan.sequence_length

    def _values(self, trainer: Trainer, module: LightningModule) -> dict[str, float]:
        plan, totals = trainer.datamodule.plan, [c.snapshot.totals for c in trainer.datamodule.caches.values()]
        tokens = sum(each.train_tokens + each.eval_tokens for each in totals)
        places = sum(each.train_sequences + each.eval_sequences for each in totals) * plan.sequence_length
        rate = self.tokens_per_second(trainer)
        values = {
            "tokens_per_second": rate,
            "steps_per_second": self.speed.steps_per_second,
            "train/perplexity": perplexity(module.step_loss),
            "run/steps": float(plan.steps),
            "run/epoch": plan.state.trained(trainer.global_step) / plan.sequences,
            "cache/sequences": float(plan.sequences),
            "cache/tokens": float(tokens),
            "cache/padding": 1 - tokens / places,
            **{f"lr/{group['name']}": group["lr"] for group in trainer.optimizers[0].param_groups},
        }
        mfu = model_flops(trainer, module, rate)
        return values if mfu is None else {**values, "mfu": mfu}

    def _flush(self, trainer: Trainer, *, now: bool = False) -> None:
        if trainer.is_global_zero and (now or time.monotonic() - self._flushed > FLUSH_SECONDS):
            self._flushed = time.monotonic()
            for logger in trainer.loggers:
                getattr(logger.experiment, "flush", logger.save)()

    def _end(self, trainer: Trainer, values: dict[str, float]) -> None:
        for logger in trainer.loggers:
            logger.log_metrics(values, step=trainer.global_step)
        self._flush(trainer, now=True)


def find_log(trainer: Trainer) -> RunLog | None:
    """The `RunLog` of a Trainer, if it has one."""
    return next((callback for callback in trainer.callbacks if isinstance(callback, RunLog)), None)
