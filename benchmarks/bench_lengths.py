"""How do time and memory grow with the length of a text, beside full attention?

One layer, one row, forward and backward, fp32, each point in a process of its own, whose peak memory is the figure. A
straight line is fitted to the seconds of Infini-attention over all lengths; the largest distance of a point from it is
printed. Full attention is transformers' Llama with SDPA, up to `--full-up-to` tokens: its time grows with the square.
The last line is the ratio full / Infini-attention at the longest text that both have read.

    python benchmarks/bench_lengths.py [--threads 2] [--segment 256] [--longest 65536] [--full-up-to 16384]
"""

import argparse
import math
import multiprocessing
import resource
import time

import numpy as np
import torch
from report import print_header, print_result
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaAttention, LlamaRotaryEmbedding

from packhorse.models import InfiniLlamaConfig, split_into_segments
from packhorse.models.llama import InfiniLlamaAttention

NUM_HEADS, HEAD_SIZE = 4, 64
KINDS = ("linear", "delta", "full")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--segment", type=int, default=256)
    parser.add_argument("--shortest", type=int, default=1024)
    parser.add_argument("--longest", type=int, default=65536)
    parser.add_argument("--full-up-to", type=int, default=16384)
    parser.add_argument("--repeats", type=int, default=3)
    options = parser.parse_args()
    print_header("torch", "transformers")
    steps = int(math.log2(options.longest // options.shortest))
    lengths = [options.shortest * 2**step for step in range(steps + 1)]
    points: dict[str, dict[int, tuple[float, float]]] = {kind: {} for kind in KINDS}
    for length in lengths:
        for kind in KINDS:
            if kind != "full" or length <= options.full_up_to:
                points[kind][length] = in_a_process(kind, length, options)
        cells = [f"{kind} {p[length][0]:.3f} s {p[length][1]:,.0f} MB" for kind, p in points.items() if length in p]
        print(f"{length:>8,} tokens: {', '.join(cells)}", flush=True)
    rows = [row for kind in KINDS for row in fit(kind, points[kind])]
    both = max(points["full"])
    print_result(rows, points["full"][both][0] / points["linear"][both][0], "torch", "transformers")


def fit(kind: str, points: dict[int, tuple[float, float]]) -> list[str]:
    """The points in one line, and the line through them."""
    lengths, seconds = np.array(list(points)), np.array([took for took, _ in points.values()])
    told = ", ".join(f"{length:,}: {took:.2f} s {peak:,.0f} MB" for length, (took, peak) in points.items())
    if len(points) < 2:
        return [f"{kind}: {told}"]
    # Relative weights: otherwise only the longest text would count.
    slope, start = np.polyfit(lengths, seconds, 1, w=1 / seconds)
    off = np.abs((start + slope * lengths) / seconds - 1).max()
    power = np.polyfit(np.log(lengths), np.log(seconds), 1)[0]
    line = (
        f"{kind}: {slope * 1e6:.2f} microseconds a token, off a straight line by {off:.0%} at most, power {power:.2f}"
    )
    return [f"{kind}: {told}", line]


def in_a_process(kind: str, length: int, options: argparse.Namespace) -> tuple[float, float]:
    """`measure`, in a process that has done nothing else: memory that was freed would count for the next point."""
    with multiprocessing.get_context("fork").Pool(1) as pool:
        return pool.apply(measure, (kind, length, options))


def measure(kind: str, length: int, options: argparse.Namespace) -> tuple[float, float]:
    """Seconds of forward and backward, and the peak of this process in MB, less what it had before."""
    torch.set_num_threads(options.threads)
    sizes = {"hidden_size": NUM_HEADS * HEAD_SIZE, "num_attention_heads": NUM_HEADS, "num_hidden_layers": 1}
    hidden = torch.randn(1, length, NUM_HEADS * HEAD_SIZE)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    if kind == "full":
        config = LlamaConfig(**sizes, vocab_size=8, attn_implementation="sdpa")
        layer = LlamaAttention(config, 0)
        inputs = (LlamaRotaryEmbedding(config)(hidden, torch.arange(length)[None]),)
    else:
        settings = {"segment_length": options.segment, "memory_update": kind}
        config = InfiniLlamaConfig(**sizes, vocab_size=8, infini_attention=settings)
        layer = InfiniLlamaAttention(config, 0)
        segments = split_into_segments((1, length), options.segment)
        inputs = (LlamaRotaryEmbedding(config)(hidden, torch.arange(segments.width)[None]), segments)
    seconds = []
    for _ in range(options.repeats + 1):
        start = time.perf_counter()
        layer(hidden, *inputs)[0].sum().backward()
        seconds.append(time.perf_counter() - start)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
    return min(seconds[1:]), peak / 1024


if __name__ == "__main__":
    main()
