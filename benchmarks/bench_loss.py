"""How much memory does the loss take over a vocabulary of Qwen's size, beside the full logits?

One forward and backward pass from hidden states to both gradients, each contestant in a process of its own. Counted is
the peak of the process above what it held before: logits, softmax, and what the gradients take.

    full logits   F.cross_entropy(hidden @ weight.T, labels)
    chunked       ours: the logits of a few hundred tokens at a time

    python benchmarks/bench_loss.py
    python benchmarks/bench_loss.py --tokens 1024 --dtype bfloat16

8,192 tokens take 16 GB and minutes on a CPU. The last line is the ratio of the peaks, ours / full logits.
"""

import argparse
import os
import subprocess
import sys
import threading
import time

from report import print_header, print_result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=8_192)
    parser.add_argument("--vocabulary", type=int, default=151_936)
    parser.add_argument("--width", type=int, default=1_024)
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], default="float32")
    parser.add_argument("--only", choices=["full logits", "chunked"], help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.only:
        print(measure(options))
        return
    print_header("torch")
    peaks = []
    for name in ("full logits", "chunked"):
        run = subprocess.run([sys.executable, *sys.argv, "--only", name], capture_output=True, text=True, check=True)
        loss, peak, seconds = map(float, run.stdout.split())
        peaks.append(peak)
        print(f"{name:<12} loss {loss:.6f}  peak {peak / 2**20:10,.0f} MiB  {seconds:8.1f} s")
    what = f"{options.tokens:,} tokens x {options.vocabulary:,} entries, width {options.width:,}, {options.dtype}"
    print_result(
        [f"peak memory of the loss, {what}: {peaks[1] / 1e9:.2f} GB against {peaks[0] / 1e9:.2f}"],
        peaks[1] / peaks[0],
        "torch",
    )


def measure(options: argparse.Namespace) -> str:
    """Loss, peak bytes above the inputs, seconds."""
    import torch

    from packhorse.training.loss import chunked_cross_entropy

    dtype = getattr(torch, options.dtype)
    torch.manual_seed(0)
    hidden = torch.randn(options.tokens, options.width).to(dtype).requires_grad_()
    weight = (torch.randn(options.vocabulary, options.width) * 0.02).to(dtype).requires_grad_()
    labels = torch.randint(options.vocabulary, (options.tokens,))
    start = time.monotonic()
    with PeakMemory() as memory:
        if options.only == "chunked":
            nll, tokens = chunked_cross_entropy(hidden, weight, labels)
            loss = nll / tokens
        else:
            loss = torch.nn.functional.cross_entropy((hidden @ weight.T).float(), labels)
        loss.backward()
    return f"{float(loss)} {memory.peak} {time.monotonic() - start}"


class PeakMemory:
    """The most that this process holds while it is open, above what it held before, in bytes."""

    def __enter__(self) -> "PeakMemory":
        self._before = self.peak_now = resident()
        self._done = threading.Event()
        self._watch = threading.Thread(target=self._look, daemon=True)
        self._watch.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._done.set()
        self._watch.join()
        self.peak = max(self.peak_now, resident()) - self._before

    def _look(self) -> None:
        while not self._done.wait(0.002):
            self.peak_now = max(self.peak_now, resident())


def resident() -> int:
    """Bytes of memory that this process holds."""
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGESIZE")


if __name__ == "__main__":
    main()
