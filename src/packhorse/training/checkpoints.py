"""Which checkpoints a run leaves behind.

A recovery checkpoint, from which a run goes on, every so many steps and at the end; the best one by validation loss.
At every instant there is a good one: a new file is durable and read back before the old one is removed, and
`last.ckpt` leads to the new one before that.
"""

from pathlib import Path
from typing import Any, Literal

from lightning import LightningModule, Trainer
from lightning.fabric.plugins.io.torch_io import TorchCheckpointIO
from lightning.pytorch.callbacks import ModelCheckpoint

from packhorse.training.checkpoint_file import is_link, link_checkpoint, remove_dead
from packhorse.training.checkpoint_io import CrashSafeCheckpointIO


class RecoveryCheckpoint(ModelCheckpoint):
    """Lightning's `ModelCheckpoint`, which survives crashes and also saves the end of a run between two saves."""

    _files: tuple[str, ...] = ()
    """What the run has saved and not yet removed; part of the checkpoint, so that a run that goes on cleans up."""

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Let checkpoints be written crash-safely, unless the Trainer was given a way of its own."""
        make_crash_safe(trainer)
        super().setup(trainer, pl_module, stage)
        if trainer.is_global_zero and stage == "fit" and "://" not in str(self.dirpath):
            remove_dead(Path(self.dirpath))

    def save_now(self, trainer: Trainer) -> None:
        """Save the current step, unless it was saved."""
        if trainer.global_step and self._last_global_step_saved != trainer.global_step and not trainer.fast_dev_run:
            candidates = self._monitor_candidates(trainer)
            self._save_topk_checkpoint(trainer, candidates)
            self._save_last_checkpoint(trainer, candidates)

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Save the last step, unless it was saved; a rehearsal (`fast_dev_run`) leaves the checkpoints alone."""
        if not trainer.fast_dev_run:
            self.save_now(trainer)
            super().on_train_end(trainer, pl_module)

    def state_dict(self) -> dict[str, Any]:
        """Lightning's, and the files that a later save replaces."""
        return {**super().state_dict(), "files": list(self._files)}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go on in the same folder, or begin in another, whose files are not those of the checkpoint."""
        super().load_state_dict(state_dict)
        if state_dict.get("dirpath") == self.dirpath:
            names = (Path(name) for name in state_dict.get("files", ()))
            # Whoever made the checkpoint must not choose what is removed elsewhere.
            own = (path for path in names if path.suffix == ".ckpt" and str(path.parent) == str(self.dirpath))
            self._files = tuple(map(str, own))

    def _save_checkpoint(self, trainer: Trainer, filepath: str) -> None:
        self._files = (*(path for path in self._files if path != filepath), filepath)
        super()._save_checkpoint(trainer, filepath)

    def _save_last_checkpoint(self, trainer: Trainer, monitor_candidates) -> None:
        # Lightning removes the old file before the link to it is moved; we keep it until then. It also leaves the file
        # from which a run went on, and that of a run that was killed in between, whose link it would leave leading
        # nowhere, beside a `last-v1.ckpt`.
        last = self.format_checkpoint_name(monitor_candidates, self.CHECKPOINT_NAME_LAST)
        if self.save_last == "link" and trainer.strategy.broadcast(is_link(Path(last))):
            self.last_model_path = last
        super()._save_last_checkpoint(trainer, monitor_candidates)
        if self.save_top_k == 1 and self.monitor is None and self._files:
            *superseded, newest = self._files
            for path in superseded:
                super()._remove_checkpoint(trainer, path)
            self._files = (newest,)

    def _remove_checkpoint(self, trainer: Trainer, filepath: str) -> None:
        if self.save_top_k != 1 or self.monitor is not None:
            super()._remove_checkpoint(trainer, filepath)

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


def recovery_of(trainer: Trainer) -> list[RecoveryCheckpoint]:
    """What the runs of a Trainer go on from; other checkpoints, such as the best, are kept for other ends."""
    return [callback for callback in trainer.checkpoint_callbacks if isinstance(callback, RecoveryCheckpoint)]


def make_crash_safe(trainer: Trainer) -> None:
    """Replace Lightning's own way of writing checkpoints, which can leave the only one empty; no other way."""
    if type(trainer.strategy.checkpoint_io) is TorchCheckpointIO:
        trainer.strategy.checkpoint_io = CrashSafeCheckpointIO()
