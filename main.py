"""python main.py fit | validate | test | predict | preview | cache ... --config configs/X.yaml"""

import sys
from pathlib import Path

# Works from a clone, installed or not.
sys.path.insert(0, str(Path(__file__).resolve().parent / "src"))

from packhorse.cli import run

if __name__ == "__main__":
    run()
