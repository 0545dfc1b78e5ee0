"""Which backend is the fastest at which shape, and does `auto` take it?

One attention layer, forward and backward, on this machine's CPU (or GPU), the best of several interleaved runs. `loop`
is the literal algorithm, `slots` the scan in the layout of compiled runs (here not compiled). `auto` must be within 5 %
of the best at every point. The last line is the worst ratio of what `auto` takes to the best.

    python benchmarks/bench_backends.py [--threads 2] [--device cpu] [--quick]
"""

import argparse
import time
from collections.abc import Callable

import torch
from report import print_header, print_result
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from packhorse.models import InfiniAttentionConfig, InfiniLlamaConfig, split_into_segments
from packhorse.models.attention import choose_backend
from packhorse.models.llama import InfiniLlamaAttention
from packhorse.models.slots import lay_into_slots

LENGTHS, SEGMENTS = (1024, 2048, 4096, 8192), (64, 256)
SHORT = ((128, 16), (256, 16), (256, 64), (512, 16), (512, 64))
"""Rows in which the attention form may pay."""
NUM_HEADS, HEAD_SIZE, TOKENS = 4, 64, 8192
BACKENDS = {"linear": ("loop", "scan", "slots", "attention"), "delta": ("loop", "scan", "slots")}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--repeats", type=int, default=9)
    parser.add_argument("--quick", action="store_true", help="two short shapes, once")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    print_header("torch", "transformers")
    print(
        f"{options.device}, {options.threads} threads, fp32, {NUM_HEADS} heads of {HEAD_SIZE}; "
        "milliseconds (ratio to the best)"
    )
    shapes = [*SHORT, *((length, segment) for length in LENGTHS for segment in SEGMENTS)]
    if options.quick:
        shapes, options.repeats = [(64, 16), (128, 64)], 1
    rows, worst = [], 0.0
    for rule in BACKENDS:
        for length, segment in shapes:
            row, ratio = measure(rule, length, segment, options)
            rows.append(row)
            worst = max(worst, ratio)
            print(row, flush=True)
    print_result(rows, worst, "torch", "transformers")


def measure(rule: str, length: int, segment: int, options: argparse.Namespace) -> tuple[str, float]:
    """A row of the table, and what `auto` costs beside the best."""
    batch = 1 if options.quick else max(1, TOKENS // length)
    seconds = {}
    runs = {
        name: make_run(rule, batch, length, segment, name, options.device)
        for name in BACKENDS[rule]
        if name != "attention" or length <= 2048  # beyond, all weights of a row take gigabytes
    }
    seconds = best_of(runs, options.repeats, options.device)
    auto = choose_backend(
        InfiniAttentionConfig(segment_length=segment, memory_update=rule),
        split_into_segments((batch, length), segment),
        length,
        HEAD_SIZE,
    )
    best = min(seconds, key=seconds.get)
    cells = [f"{name} {took * 1e3:.1f} ({took / seconds[best]:.2f})" for name, took in seconds.items()]
    ratio = seconds[auto] / seconds[best]
    told = f"auto {auto} {ratio:.2f}{'' if ratio <= 1.05 else ' MISSED'}"
    return f"{rule} {batch} x {length} / {segment}: {', '.join(cells)}; {told}", ratio


def make_run(rule: str, batch: int, length: int, segment: int, backend: str, device: str) -> Callable:
    """Forward and backward of one layer."""
    torch.manual_seed(0)
    settings = {"segment_length": segment, "memory_update": rule, "backend": backend if backend != "slots" else "scan"}
    sizes = {"hidden_size": NUM_HEADS * HEAD_SIZE, "num_attention_heads": NUM_HEADS, "num_hidden_layers": 1}
    config = InfiniLlamaConfig(**sizes, vocab_size=8, infini_attention=settings)
    layer = InfiniLlamaAttention(config, 0).to(device)
    hidden = torch.randn(batch, length, NUM_HEADS * HEAD_SIZE, device=device)
    segments = split_into_segments((batch, length), segment)
    if backend == "slots":
        segments = lay_into_slots((batch, length), segment)
    segments = segments.to(device)
    tables = LlamaRotaryEmbedding(config).to(device)(hidden, torch.arange(segments.width, device=device)[None])
    return lambda: layer(hidden, tables, segments)[0].sum().backward()


def best_of(runs: dict[str, Callable], repeats: int, device: str = "cpu") -> dict[str, float]:
    """Seconds of the fastest run of each; the contestants take turns, so that a busy moment hits them alike."""
    seconds = {name: float("inf") for name in runs}
    for attempt in range(repeats + 1):
        for name, run in runs.items():
            start = time.perf_counter()
            run()
            if device != "cpu":
                torch.cuda.synchronize()
            if attempt:
                seconds[name] = min(seconds[name], time.perf_counter() - start)
    return seconds


if __name__ == "__main__":
    main()
