"""The code reads as STYLE asks, as far as a machine can see."""

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]


@pytest.mark.parametrize("check", [["check"], ["format", "--check"]], ids=" ".join)
def test_ruff_has_nothing_to_say(check):
    run = subprocess.run([sys.executable, "-m", "ruff", *check, "."], cwd=ROOT, capture_output=True, text=True)
    assert run.returncode == 0, run.stdout
