"""Which checkpoints a run leaves behind."""

from lightning import LightningModule, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint


class RecoveryCheckpoint(ModelCheckpoint):
    """Lightning's `ModelCheckpoint`, which also saves the end of a run that falls between two saves."""

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Save the last step, unless it was saved."""
        if trainer.global_step and self._last_global_step_saved != trainer.global_step and not trainer.fast_dev_run:
            candidates = self._monitor_candidates(trainer)
            self._save_topk_checkpoint(trainer, candidates)
            self._save_last_checkpoint(trainer, candidates)
        super().on_train_end(trainer, pl_module)
