"""How long does `fit` take to its first optimizer step when the cache is there, beside bare imports? And how long do
steps wait for data?

A process that imports torch, lightning and transformers and does nothing, and `python main.py fit` on a finished cache,
take turns; both are timed from outside, from the start of the process to a line that it prints (`fit` after its first
optimizer step, through a callback). The model is the quickstart's. Then `fit` trains a little, and the share of the
training time that went into reading and looking up is told.

    python benchmarks/bench_start.py
    python benchmarks/bench_start.py --config configs/llama_200m_infini.yaml -- --data.source my.parquet

The last line is the ratio of the medians, first step / bare imports.
"""

import argparse
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import lightning
from report import as_installed, median, print_header, print_result

PACKAGES = ("torch", "lightning", "transformers")
ROOT = Path(__file__).resolve().parents[1]
IMPORTS = "import torch, lightning, transformers; print('MARK', flush=True)"
FIT = """
import os, sys, time
sys.path[:0] = [{benchmarks!r}]
from packhorse.cli import main
sys.exit(main({arguments!r}))
"""


class FirstStep(lightning.Callback):
    """Tells when the first optimizer step is done, and at the end how long data were waited for."""

    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
        self.began = getattr(self, "began", time.monotonic())

    def on_before_zero_grad(self, trainer, pl_module, optimizer):
        # Lightning calls this before the gradients of the next step; the step before it is done.
        if trainer.global_step == 1 and not hasattr(self, "first"):
            self.first = self.tell()

    def on_train_end(self, trainer, pl_module):
        if not hasattr(self, "first"):
            self.tell()
        seconds = time.monotonic() - self.began
        rows = trainer.train_dataloader.dataset
        print(f"WAITED {rows.seconds / seconds:.6f}", flush=True)

    def tell(self) -> bool:
        print("MARK", flush=True)
        return True


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--config", default=str(ROOT / "configs" / "quickstart.yaml"))
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=30, help="steps over which waiting is measured")
    parser.add_argument("rest", nargs="*", help="after `--`: other settings, as for fit")
    options = parser.parse_args()
    print_header(*PACKAGES)
    with tempfile.TemporaryDirectory(prefix="bench_start-") as name:
        arguments = ["fit", "--config", options.config, *settings(Path(name)), *options.rest]
        fit(arguments, 1, Path(name))  # builds the cache
        bare, first = [], []
        for _ in range(options.rounds):
            bare.append(mark([sys.executable, "-c", IMPORTS], Path(name))[0])
            first.append(fit(arguments, 1, Path(name))[0])
        _, output = fit(arguments, options.steps, Path(name))
    waited = next(float(line.split()[1]) for line in output if line.startswith("WAITED"))
    rows = [
        f"bare imports {median(bare):.2f} s",
        f"fit to its first optimizer step {median(first):.2f} s",
        f"share of training spent in waiting for data {waited:.3%}",
    ]
    print("\n".join(rows))
    print_result(rows, median(first) / median(bare), *PACKAGES)


def settings(folder: Path) -> list[str]:
    """What the benchmark changes of a configuration."""
    return [
        f"--data.cache_dir={folder / 'cache'}",
        f"--data.tokenizer={folder / 'tokenizer'}",
        f"--trainer.default_root_dir={folder}",
        "--trainer.logger=false",
        "--trainer.callbacks+=bench_start.FirstStep",
        "--trainer.limit_val_batches=0",
        f"--checkpoint.dirpath={folder / 'checkpoints'}",
        "--checkpoint.every_n_train_steps=1000000",
    ]


def fit(arguments: list[str], steps: int, folder: Path) -> tuple[float, list[str]]:
    """Seconds from the start of `fit` to its first step, and what it printed."""
    code = FIT.format(benchmarks=str(ROOT / "benchmarks"), arguments=[*arguments, f"--trainer.max_steps={steps}"])
    return mark([sys.executable, "-c", code], folder)


def mark(command: list[str], folder: Path) -> tuple[float, list[str]]:
    """Seconds from the start of a process to its line MARK, and all that it printed."""
    start, seconds, lines = time.monotonic(), None, []
    with (folder / "log").open("w") as log:
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=log, text=True, env=as_installed())
        for line in process.stdout:
            if line.startswith("MARK") and seconds is None:
                seconds = time.monotonic() - start
            lines.append(line)
    if process.wait() != 0 or seconds is None:
        raise SystemExit(f"{command[2][-500:]} failed:\n{(folder / 'log').read_text()[-2000:]}")
    return seconds, lines


if __name__ == "__main__":
    main()
