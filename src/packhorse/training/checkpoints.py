"""Which checkpoints a run leaves behind.

A recovery checkpoint, from which a run goes on, every so many steps and at the end; the best one by validation loss.
At every instant there is a good one: a new file is durable and read back before the old one is removed, and
`last.ckpt` leads to the new one before that.
"""

from pathlib import Path
from typing import Literal

from lightning import LightningModule, Trainer
from lightning.fabric.plugins.io.torch_io import TorchCheckpointIO
from lightning.pytorch.callbacks import ModelCheckpoint

from packhorse.training.checkpoint_file import link_checkpoint
from packhorse.training.checkpoint_io import CrashSafeCheckpointIO


class RecoveryCheckpoint(ModelCheckpoint):
    """Lightning's `ModelCheckpoint`, which survives crashes and also saves the end of a run between two saves."""

    _superseded: tuple[str, ...] = ()

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Let checkpoints be written crash-safely, unless the Trainer was given a way of its own."""
        make_crash_safe(trainer)
        super().setup(trainer, pl_module, stage)

    def save_now(self, trainer: Trainer) -> None:
        """Save the current step, unless it was saved."""
        if trainer.global_step and self._last_global_step_saved != trainer.global_step and not trainer.fast_dev_run:
            candidates = self._monitor_candidates(trainer)
            self._save_topk_checkpoint(trainer, candidates)
            self._save_last_checkpoint(trainer, candidates)

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Save the last step, unless it was saved."""
        self.save_now(trainer)
        super().on_train_end(trainer, pl_module)

    def _save_last_checkpoint(self, trainer: Trainer, monitor_candidates) -> None:
        # Lightning removes the old file before the link to it is moved; we keep it until then.
        super()._save_last_checkpoint(trainer, monitor_candidates)
        superseded, self._superseded = self._superseded, ()
        for path in superseded:
            super()._remove_checkpoint(trainer, path)

    def _remove_checkpoint(self, trainer: Trainer, filepath: str) -> None:
        self._superseded = (*self._superseded, filepath)

    @staticmethod
    def _link_checkpoint(trainer: Trainer, filepath: str, linkpath: str) -> None:
        if trainer.is_global_zero and Path(filepath).absolute() != Path(linkpath).absolute():
            link_checkpoint(Path(filepath), Path(linkpath))
        trainer.strategy.barrier()


class BestCheckpoint(ModelCheckpoint):
    """Keeps the state with the lowest validation loss as `best.ckpt`; without validation there is none.

    Args:
        dirpath: The folder; by default that of the run.
        filename: Its name, without `.ckpt`.
        monitor: The metric.
        mode: `min` when less is better.
        save_top_k: 0 for none.
        save_weights_only: Leave out the state of the optimizer; `fit` cannot go on from such a file.
    """

    def __init__(
        self,
        dirpath: str | None = None,
        filename: str = "best",
        monitor: str = "val/loss",
        mode: Literal["min", "max"] = "min",
        save_top_k: Literal[0, 1] = 1,
        save_weights_only: bool = False,
    ) -> None:
        super().__init__(
            dirpath,
            filename,
            monitor,
            mode=mode,
            save_top_k=save_top_k,
            save_weights_only=save_weights_only,
            save_on_train_epoch_end=False,
            enable_version_counter=False,
        )

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Let checkpoints be written crash-safely, unless the Trainer was given a way of its own."""
        make_crash_safe(trainer)
        super().setup(trainer, pl_module, stage)


def make_crash_safe(trainer: Trainer) -> None:
    """Replace Lightning's own way of writing checkpoints, which can leave the only one empty; no other way."""
    if type(trainer.strategy.checkpoint_io) is TorchCheckpointIO:
        trainer.strategy.checkpoint_io = CrashSafeCheckpointIO()
