"""When a run validates: every so many micro-batches of the whole run, and at its end.

Lightning counts `val_check_interval` within an epoch, and refuses an epoch that is shorter. Our epochs follow the data
and the run's last one has what is left, so a number of micro-batches is counted over the run instead.
"""

import math

from lightning import Trainer

from packhorse.errors import SettingsError


def count_over_the_run(trainer: Trainer) -> None:
    """Let an interval that is a number of micro-batches go on from epoch to epoch.

    Raises:
        SettingsError: It shall count within every so many epochs.
    """
    interval = getattr(trainer, "val_check_interval", None)  # there is none when it is a time
    if not isinstance(interval, int):
        return
    if trainer.check_val_every_n_epoch not in (None, 1):
        raise SettingsError(
            f"`trainer.val_check_interval: {interval}` counts the micro-batches of the whole run, so "
            f"`trainer.check_val_every_n_epoch: {trainer.check_val_every_n_epoch}` has no meaning.\n"
            "Leave one of the two out, or give the interval as a share of an epoch, such as 0.5."
        )
    trainer.check_val_every_n_epoch = None


def validate_now(trainer: Trainer) -> None:
    """Let Lightning validate after the micro-batch in hand, which is the last one of the run."""
    trainer.val_check_batch = 1
    trainer._last_val_time = -math.inf  # where the interval is a time


def ask_for_sequences_again(trainer: Trainer) -> None:
    """Let Lightning take up other evaluation sequences when it validates next; it would ask once in an epoch."""
    trainer.fit_loop.epoch_loop.val_loop._last_val_dl_reload_epoch = -math.inf
