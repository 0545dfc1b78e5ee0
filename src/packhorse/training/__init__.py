"""The hall: the only room that knows the others, and Lightning.

The public names are loaded when they are used: what needs no torch stays quick.
"""

import importlib

_PUBLIC = {
    "BestCheckpoint": "packhorse.training.checkpoints",
    "LanguageModule": "packhorse.training.module",
    "RecoveryCheckpoint": "packhorse.training.checkpoints",
    "RunLog": "packhorse.training.run_log",
    "RunPlan": "packhorse.training.plan",
    "RunReport": "packhorse.training.monitors",
    "ScheduleSettings": "packhorse.training.schedule",
    "StopSignals": "packhorse.training.signals",
    "TokenDataModule": "packhorse.training.datamodule",
}

__all__ = list(_PUBLIC)


def __getattr__(name: str):
    if name not in _PUBLIC:
        raise AttributeError(f"module 'packhorse.training' has no attribute {name!r}")
    return getattr(importlib.import_module(_PUBLIC[name]), name)
