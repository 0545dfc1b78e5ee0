"""What a Trainer was told about how much to train -> a run that does exactly that, or words.

Lightning would take each of these settings without a word; the run would train on other sequences than it counts, or
with another learning rate than it says. They are refused before anything is built.
"""

from lightning import Trainer
from lightning.pytorch.callbacks import GradientAccumulationScheduler

from packhorse.cache import DataSettings
from packhorse.errors import SettingsError
from packhorse.training.schedule import ScheduleSettings


def check_limits(trainer: Trainer, data: DataSettings, schedule: ScheduleSettings | None) -> None:
    """Refuse what a run cannot keep to.

    Args:
        trainer: Whose settings are looked at.
        data: The `data:` group, which may limit a run too.
        schedule: Of the learning rate, where it is known.

    Raises:
        SettingsError: What, and what to set instead.
    """
    _check_batches(trainer)
    if trainer.overfit_batches:
        raise SettingsError(
            "`trainer.overfit_batches` does not know our order of training.\nTo train on little again and again, set "
            "`data.max_documents` (with a `data.name` of its own) and `trainer.max_epochs`."
        )
    if any(isinstance(callback, GradientAccumulationScheduler) for callback in trainer.callbacks):
        raise SettingsError(
            "`GradientAccumulationScheduler` changes the size of a step while the run counts on it.\nSet "
            "`trainer.accumulate_grad_batches`; a run that goes on from a checkpoint may have another."
        )
    if schedule is not None:
        _check_end(trainer, data, schedule)


def _check_batches(trainer: Trainer) -> None:
    limit, accumulation = trainer.limit_train_batches, trainer.accumulate_grad_batches
    if accumulation < 1:
        raise SettingsError(f"`trainer.accumulate_grad_batches` is {accumulation}: a step takes 1 micro-batch or more.")
    if isinstance(limit, float) and limit not in (0.0, 1.0):
        raise SettingsError(f"Give `limit_train_batches` as a number of micro-batches, not as the share {limit}.")
    if isinstance(limit, int) and limit % accumulation and not trainer.fast_dev_run:
        raise SettingsError(
            f"`trainer.limit_train_batches: {limit}` micro-batches are no whole number of steps of "
            f"`trainer.accumulate_grad_batches: {accumulation}`.\nSet it to "
            f"{-(-limit // accumulation) * accumulation}."
        )


def _check_end(trainer: Trainer, data: DataSettings, schedule: ScheduleSettings) -> None:
    """Without an end, a schedule that falls has nothing to fall to, and a share of the steps is nothing."""
    endless = trainer.max_epochs in (None, -1) and trainer.max_steps == -1 and data.max_train_tokens is None
    warm_share = schedule.warmup_steps is None and schedule.warmup_ratio > 0
    if endless and (schedule.shape != "constant" or warm_share):
        raise SettingsError(
            "Nothing says how long this run is, so its learning rate cannot follow it.\nSet `trainer.max_steps`, "
            "`trainer.max_epochs` or `data.max_train_tokens` (`trainer.max_time` may end it before); or "
            "`schedule.shape: constant` with `schedule.warmup_steps`."
        )
