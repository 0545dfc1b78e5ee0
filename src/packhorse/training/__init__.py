"""The hall: the only room that knows the others, and Lightning."""

from packhorse.training.checkpoints import RecoveryCheckpoint
from packhorse.training.datamodule import TokenDataModule
from packhorse.training.module import LanguageModule, ScheduleSettings
from packhorse.training.monitors import RunReport
from packhorse.training.plan import RunPlan

__all__ = ["LanguageModule", "RecoveryCheckpoint", "RunPlan", "RunReport", "ScheduleSettings", "TokenDataModule"]
