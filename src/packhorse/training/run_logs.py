"""Files of TensorBoard and CSV loggers -> the scalars of a run. Needs no torch."""

import csv
from pathlib import Path
from typing import NamedTuple


class Point(NamedTuple):
    """One value of a scalar."""

    step: int
    value: float


class RunLogs(NamedTuple):
    """What the loggers of one run have written."""

    folder: Path
    scalars: dict[str, list[Point]]
    """By name, oldest first."""
    written: float
    """When something was written last, seconds since 1970."""

    def last(self, name: str) -> float | None:
        """The newest value of a scalar."""
        return self.scalars[name][-1].value if self.scalars.get(name) else None


def find_run(folder: Path) -> Path | None:
    """The folder with logs of a training in or below `folder` that was written to last."""
    files = [*folder.rglob("events.out.tfevents.*"), *folder.rglob("metrics.csv")]
    files.sort(key=lambda path: path.stat().st_mtime, reverse=True)
    return next((run for run in dict.fromkeys(path.parent for path in files) if _is_training(run)), None)


def read_run(folder: Path) -> RunLogs:
    """Read the logs of one run; what is cut short is read as far as it goes."""
    scalars: dict[str, list[Point]] = {}
    events, table = sorted(folder.glob("events.out.tfevents.*")), folder / "metrics.csv"
    for path in events:
        _read_events(path, scalars)
    if not events and table.exists():
        _read_table(table, scalars)
    files = [*events, *([table] if table.exists() else [])]
    return RunLogs(folder, scalars, max((path.stat().st_mtime for path in files), default=0.0))


def _is_training(folder: Path) -> bool:
    """Other commands log too; they save no configuration and no checkpoints, and learn nothing."""
    saved = (folder / "config.yaml", folder / "checkpoints")
    return any(path.exists() for path in saved) or "train/loss" in read_run(folder).scalars


def _read_events(path: Path, scalars: dict[str, list[Point]]) -> None:
    # Costs a third of a second; no torch, no tensorflow.
    from tensorboard.backend.event_processing.event_file_loader import EventFileLoader
    from tensorboard.util import tensor_util

    for event in EventFileLoader(str(path)).Load():
        for value in event.summary.value:
            if value.HasField("tensor") and not value.tensor.tensor_shape.dim and value.tensor.dtype == 1:
                number = float(tensor_util.make_ndarray(value.tensor))
                scalars.setdefault(value.tag, []).append(Point(event.step, number))


def _read_table(path: Path, scalars: dict[str, list[Point]]) -> None:
    with path.open(newline="", encoding="utf-8") as file:
        for row in csv.DictReader(file):
            for name, text in row.items():
                try:
                    scalars.setdefault(name, []).append(Point(int(row["step"]), float(text)))
                except (TypeError, ValueError, KeyError):
                    continue  # an empty field, or a line that is being written
