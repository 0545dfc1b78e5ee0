"""A live line of a run: tokens per second, the epoch of the data as a fraction, the time left of the whole run."""

from typing import Any

from lightning import LightningModule, Trainer
from lightning.pytorch.callbacks import RichProgressBar

from packhorse.training.run_log import find_log
from packhorse.training.speed import duration


class RunProgressBar(RichProgressBar):
    """Lightning's bar of an epoch, with what one wants to know of the run."""

    def get_metrics(self, trainer: Trainer, pl_module: LightningModule) -> dict[str, str | float]:
        """What stands behind the bar; the number of the run is in the names of its files."""
        metrics = super().get_metrics(trainer, pl_module)
        metrics.pop("v_num", None)
        log = find_log(trainer)
        if log is None or not trainer.training:
            return metrics
        plan = trainer.datamodule.plan
        left = log.speed.seconds_left(plan.steps)
        seen = plan.state.trained(trainer.global_step) / plan.sequences
        return {
            "step": plan.place(trainer.global_step),
            "epoch": f"{seen:.2f}" + (f"/{plan.epochs:.2f}" if plan.steps else ""),
            "tokens/s": f"{log.tokens_per_second(trainer):,.0f}",
            **({} if left is None else {"left": duration(left)}),
            **metrics,
        }

    def on_train_batch_end(self, trainer: Trainer, *more: Any) -> None:
        """Go on to the end that the epoch has now: it may be longer, by chunks that were built meanwhile."""
        if self.progress is not None and self.train_progress_bar_id is not None:
            if self.train_progress_bar.total != self.total_train_batches:
                self.progress.update(self.train_progress_bar_id, total=self.total_train_batches)
        super().on_train_batch_end(trainer, *more)
