"""Loggers -> a folder that belongs to this run alone.

Lightning numbers runs by looking which `version_N` is the highest: two that start together get the same one, and
write over each other's checkpoints. Here a number is taken by making its folder, which only one process can.
"""

import contextlib
import itertools
import os
from pathlib import Path

from lightning import Trainer
from lightning.pytorch.loggers import CSVLogger, Logger, TensorBoardLogger

from packhorse.cache.store import disk_errors, make_folder
from packhorse.training.checkpoints import recovery_of


def claim_run_folder(trainer: Trainer) -> None:
    """Give the loggers that number their runs a number that nobody else has; loggers of one folder share it."""
    claimed: dict[Path, int] = {}
    for logger in trainer.loggers:
        # Lightning's properties would choose a number themselves.
        if isinstance(logger, TensorBoardLogger | CSVLogger) and logger._version is None and _is_local(logger):
            folder = Path(logger.root_dir)
            if folder not in claimed:
                claimed[folder] = _claim(folder, int(logger._get_next_version()))
            logger._version = claimed[folder]


def runs_folder(trainer: Trainer) -> Path | None:
    """The folder of this run and its earlier versions; None if they are kept at an address, such as s3://..."""
    for callback in recovery_of(trainer):
        if callback.dirpath:
            return None if "://" in str(callback.dirpath) else Path(callback.dirpath)
    for logger in trainer.loggers:
        if isinstance(logger, TensorBoardLogger | CSVLogger):
            return Path(logger.root_dir)
    return Path(trainer.default_root_dir)


def _claim(folder: Path, first: int) -> int:
    make_folder(folder)
    with disk_errors(folder):
        for version in itertools.count(first):
            with contextlib.suppress(FileExistsError):
                os.mkdir(folder / f"version_{version}")
                return version
    raise AssertionError


def _is_local(logger: Logger) -> bool:
    return "://" not in str(logger.save_dir)
