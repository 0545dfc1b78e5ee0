"""What every benchmark prints: the machine, the versions, a row for RESULTS.md, and `ratio=` as its last line."""

import datetime
import os
import platform
import shlex
import statistics
import sys
from importlib.metadata import version
from pathlib import Path


def print_header(*packages: str) -> None:
    """Machine and versions."""
    print(f"machine: {machine()}")
    print(f"versions: {versions(packages)}", flush=True)


def print_result(rows: list[str], ratio: float, *packages: str) -> None:
    """One row for RESULTS.md, then the ratio.

    Args:
        rows: What was measured, one contestant or setting each.
        ratio: What the benchmark is about.
        packages: Those whose versions matter.
    """
    # Paths say nothing on another machine.
    command = shlex.join([Path(word).name if "/" in word else word for word in sys.argv])
    cells = [datetime.date.today().isoformat(), machine(), versions(packages), f"`{command}`", "<br>".join(rows)]
    print(f"\n| {' | '.join(cells)} |")
    print(f"ratio={ratio:.3f}", flush=True)


def as_installed() -> dict[str, str]:
    """The environment for a command, where Python keeps what it has compiled: an installed package is compiled."""
    return {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}


def machine() -> str:
    """Model of the processor, and how many cores may be used."""
    name = platform.processor() or platform.machine()
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        name = next(line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        pass
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return f"{cores} cores of {name}, {platform.system()}"


def versions(packages: tuple[str, ...]) -> str:
    """Python, Packhorse, and the packages that matter."""
    named = [f"{package} {version(package)}" for package in ("packhorse", *packages)]
    return f"Python {platform.python_version()}, {', '.join(named)}"


def median(values: list[float]) -> float:
    """The middle one: a busy moment of the machine spoils a run, not the result."""
    return statistics.median(values)
