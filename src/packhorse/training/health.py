"""A run's folder -> is it well? From its logs and checkpoints alone, on any machine that sees them. Needs no torch.

    running    something was logged lately       silent    nothing for long, and no word of an end: killed, or hanging
    finished   all steps are done                stopped   told to stop, or failed

Exit status: 0 running or finished, 1 silent, stopped, a loss that is not a number, or a damaged checkpoint; 2 no run.
"""

import json
import math
import time
from pathlib import Path
from typing import Any

import yaml

from packhorse.errors import SettingsError
from packhorse.training.checkpoint_file import is_sound
from packhorse.training.run_logs import Point, RunLogs, find_run, read_run
from packhorse.usage import Parser

SILENT_SECONDS = 120.0
"""Loggers are flushed every 10 seconds; nobody is called silent sooner than this."""
FLAT = 0.005
"""A loss that changes by a smaller share from one tenth of the run to the next is flat."""


def run_health_command(arguments: list[str]) -> int:
    """Say how a run is; the result is the exit status."""
    parser = Parser(prog="main.py health", description=__doc__.partition("\n")[0])
    parser.add_argument("run", type=str, help="the folder of a run, or of several: the newest")
    parser.add_argument("--json", action="store_true", help="for scripts")
    parser.add_argument("--silent-seconds", type=float, default=SILENT_SECONDS, help="without news: silent")
    options = parser.parse_args(arguments)
    facts = health(Path(options.run), options.silent_seconds)
    print(json.dumps(facts) if options.json else "\n".join(_lines(facts)))
    return 0 if facts["well"] else 1


def health(folder: Path, silent_seconds: float = SILENT_SECONDS) -> dict[str, Any]:
    """What can be known of a run from its files.

    Args:
        folder: Of the run, or of several.
        silent_seconds: How long a run may log nothing; ten times the distance of its last points if that is more.

    Raises:
        SettingsError: there are no logs of a training in `folder`.
    """
    found = find_run(folder)
    if found is None:
        raise SettingsError(
            f"There are no logs of a training in {folder.absolute()}: no TensorBoard events and no metrics.csv."
        )
    logs = read_run(found)
    losses = logs.scalars.get("train/loss", [])
    # What is logged in a step has the number of the steps before it; an end, with their total, that of all.
    ends = ("run/ended", "run/steps")
    steps = (points[-1].step + (name not in ends) for name, points in logs.scalars.items() if name != "step")
    step = max(steps, default=0)
    rate, total = logs.last("steps_per_second"), logs.last("run/steps")
    state = _state(logs, silent_seconds)
    loss = losses[-1].value if losses else None
    checkpoint = _checkpoint(found)
    facts = {
        "run": str(found),
        "state": state,
        "seconds_since_news": round(time.time() - logs.written, 1),
        "step": min(step, int(total)) if total else step,
        "steps": int(total) if total else None,
        "epoch": logs.last("run/epoch"),
        "loss": loss,
        "trend": _trend(losses),
        "validation_loss": logs.last("val/loss"),
        "tokens_per_second": logs.last("tokens_per_second"),
        "seconds_left": round((total - step) / rate) if state == "running" and rate and total else None,
        "checkpoint": checkpoint,
        "seconds_to_checkpoint": _to_checkpoint(found, step, rate) if state == "running" else None,
    }
    sound = checkpoint is None or checkpoint["sound"]
    diverged = loss is not None and not math.isfinite(loss)
    return {**facts, "well": state in ("running", "finished") and sound and not diverged}


def _state(logs: RunLogs, silent_seconds: float) -> str:
    ended = logs.last("run/ended")
    if ended is not None:
        return "finished" if ended else "stopped"
    steps, rate = [point.step for point in logs.scalars.get("train/loss", [])[-2:]], logs.last("steps_per_second")
    between = (steps[1] - steps[0]) / rate if len(steps) == 2 and rate else 0.0
    return "silent" if time.time() - logs.written > max(silent_seconds, 10 * between) else "running"


def _trend(losses: list[Point]) -> str | None:
    """The last tenth of the points against the tenth before."""
    count = max(1, len(losses) // 10)
    if len(losses) < 2 * count:
        return None
    before, after = (sum(p.value for p in part) / count for part in (losses[-2 * count : -count], losses[-count:]))
    if not math.isfinite(after):
        return "not a number"
    if abs(after - before) <= FLAT * abs(before):
        return "flat"
    return "falling" if after < before else "rising"


def _checkpoint(run: Path) -> dict[str, Any] | None:
    folder = Path(_setting(run, "checkpoint", "dirpath") or run / "checkpoints")
    files = [path for path in folder.glob("*.ckpt") if path.is_file() and not path.is_symlink()]
    if not files:
        return None
    newest = max(files, key=lambda path: path.stat().st_mtime_ns)
    age = round(time.time() - newest.stat().st_mtime, 1)
    return {"path": str(newest), "seconds_old": age, "sound": is_sound(newest)}


def _to_checkpoint(run: Path, step: int, rate: float | None) -> int | None:
    every = _setting(run, "checkpoint", "every_n_train_steps")
    return round((every - step % every) / rate) if every and rate else None


def _setting(run: Path, group: str, name: str) -> Any:
    try:
        return yaml.safe_load((run / "config.yaml").read_text(encoding="utf-8"))[group][name]
    except (OSError, ValueError, TypeError, KeyError, yaml.YAMLError):
        return None


def _lines(facts: dict[str, Any]) -> list[str]:
    def shown(name: str, form: str, without: str = "unknown") -> str:
        return without if facts[name] is None else format(facts[name], form)

    total = "" if facts["steps"] is None else f" of {facts['steps']:,}"
    lines = [
        f"{facts['run']}: {facts['state']}, last news {facts['seconds_since_news']:,.0f} s ago",
        f"  step        {facts['step']:,}{total}, epoch {shown('epoch', '.2f')}",
        f"  loss        {shown('loss', '.3f')}, {facts['trend'] or 'too few points for a trend'}; "
        f"on evaluation text {shown('validation_loss', '.3f', 'not yet measured')}",
        f"  throughput  {shown('tokens_per_second', ',.0f')} tokens/s",
    ]
    if facts["seconds_left"] is not None:
        lines.append(f"  time left   {facts['seconds_left']:,} s")
    if checkpoint := facts["checkpoint"]:
        sound = "sound" if checkpoint["sound"] else "DAMAGED"
        lines.append(f"  checkpoint  {checkpoint['path']}, {checkpoint['seconds_old']:,.0f} s old, {sound}")
    else:
        lines.append("  checkpoint  none yet")
    if facts["seconds_to_checkpoint"] is not None:
        lines.append(f"              the next one in {facts['seconds_to_checkpoint']:,} s")
    return lines
