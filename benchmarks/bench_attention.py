"""What does Infini-attention cost beside plain Llama attention, and which backend is the cheapest at which shape?

Forward and backward on this machine's CPU, the best of several interleaved runs. `plain` is transformers' own attention
with SDPA and one causal document a row; `plain packed` is what transformers does when position ids restart (a mask).
The last table is a whole training step of the quickstart's size. The last line is its ratio Infini / plain.

    python benchmarks/bench_attention.py [--threads 2] [--quick]
"""

import argparse
import platform
import time
from collections.abc import Callable
from itertools import pairwise

import torch
import transformers
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.models.llama.modeling_llama import LlamaAttention, LlamaRotaryEmbedding

from packhorse.models import InfiniLlamaConfig, InfiniLlamaForCausalLM, split_into_segments
from packhorse.models.llama import InfiniLlamaAttention

# rows, tokens of a row, segment, head size, documents of a row
SHAPES = [
    (8, 512, 128, 64, 3),
    (8, 512, 128, 64, 1),
    (8, 512, 64, 64, 3),
    (8, 512, 64, 64, 1),
    (8, 256, 64, 128, 1),
    (8, 128, 16, 128, 1),
    (32, 64, 32, 128, 1),
    (32, 64, 16, 64, 1),
    (32, 64, 16, 32, 1),
    (4, 2048, 128, 64, 3),
    (4, 2048, 256, 64, 1),
    (1, 8192, 128, 64, 3),
    (1, 8192, 512, 64, 1),
]
NUM_HEADS = 4


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--quick", action="store_true", help="fewer repetitions, no rows longer than 512")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    print(f"machine: {platform.processor() or platform.machine()}, {options.threads} threads, CPU fp32")
    print(f"torch {torch.__version__}, transformers {transformers.__version__}, Python {platform.python_version()}")

    print("\none attention layer, forward + backward, milliseconds (ratio to plain)")
    print(f"{'B x T / S / d / documents':>28} {'plain':>8} {'local only':>15} {'scan':>15} {'attention':>15}")
    for shape in SHAPES:
        if not (options.quick and shape[1] > 512):
            print_layer_row(*shape, repeats=5 if options.quick else 15 if shape[1] <= 512 else 7)
    print_step_ratio(repeats=4 if options.quick else 10)


def print_layer_row(rows: int, length: int, segment: int, head_size: int, documents: int, repeats: int) -> None:
    torch.manual_seed(0)
    hidden = torch.randn(rows, length, NUM_HEADS * head_size)
    sizes = dict(hidden_size=NUM_HEADS * head_size, num_attention_heads=NUM_HEADS, num_hidden_layers=1, vocab_size=8)
    position_ids = packed_position_ids(rows, length, documents)
    runs: dict[str, Callable] = {}

    plain_config = LlamaConfig(**sizes, attn_implementation="sdpa")
    plain, rotary = LlamaAttention(plain_config, 0), LlamaRotaryEmbedding(plain_config)
    tables = rotary(hidden, torch.arange(length)[None])
    runs["plain"] = lambda: plain(hidden, tables)[0].sum().backward()
    for name, settings in {
        "local only": {"turn_on_memory": False},
        "scan": {"backend": "scan"},
        "attention": {"backend": "attention"},
    }.items():
        if name == "attention" and length > 2048:
            continue
        config = InfiniLlamaConfig(**sizes, infini_attention={"segment_length": segment, **settings})
        layer = InfiniLlamaAttention(config, 0)
        segments = split_into_segments((rows, length), segment, position_ids)
        places = rotary(hidden, torch.arange(segments.width)[None])
        runs[name] = lambda layer=layer, places=places, segments=segments: (
            layer(hidden, places, segments)[0].sum().backward()
        )
    seconds = best_of(runs, repeats)
    label = f"{rows} x {length} / {segment} / {head_size} / {documents}"
    cells = [f"{seconds['plain'] * 1e3:8.1f}"]
    for name in ("local only", "scan", "attention"):
        took = seconds.get(name)
        cells.append(f"{'-':>15}" if took is None else f"{took * 1e3:8.1f} ({took / seconds['plain']:4.2f})")
    print(f"{label:>28} {' '.join(cells)}", flush=True)


def print_step_ratio(repeats: int) -> None:
    rows, length, segment = 8, 512, 128
    sizes = dict(vocab_size=4096, hidden_size=256, intermediate_size=688, num_hidden_layers=4, num_attention_heads=4)
    input_ids = torch.randint(0, sizes["vocab_size"], (rows, length))
    position_ids = packed_position_ids(rows, length, 3)
    plain = LlamaForCausalLM(LlamaConfig(**sizes, attn_implementation="sdpa"))
    infini = InfiniLlamaForCausalLM(InfiniLlamaConfig(**sizes, infini_attention={"segment_length": segment}))

    def step(model, **kwargs) -> None:
        model.zero_grad()
        model(input_ids=input_ids, labels=input_ids, use_cache=False, **kwargs).loss.backward()

    seconds = best_of(
        {
            "plain": lambda: step(plain),
            "plain packed": lambda: step(plain, position_ids=position_ids),
            "infini packed": lambda: step(infini, position_ids=position_ids),
            "infini one document": lambda: step(infini),
        },
        repeats,
    )
    parameters = sum(parameter.numel() for parameter in infini.parameters()) / 1e6
    print(f"\none training step of a {parameters:.1f} M model, B = {rows}, T = {length}, S = {segment}, milliseconds")
    for name, took in seconds.items():
        print(f"{name:>28} {took * 1e3:8.1f} ({took / seconds['plain']:4.2f})")
    print(f"ratio={seconds['infini packed'] / seconds['plain']:.3f}")


def packed_position_ids(rows: int, length: int, documents: int) -> torch.Tensor:
    """Documents of differing lengths, the same every time."""
    generator = torch.Generator().manual_seed(1)
    packed = []
    for _ in range(rows):
        cuts = (torch.rand(documents - 1, generator=generator) * (length - 2)).long().add(1).sort().values.tolist()
        borders = sorted({0, *cuts, length})
        packed.append(torch.cat([torch.arange(b - a) for a, b in pairwise(borders)]))
    return torch.stack(packed)


def best_of(runs: dict[str, Callable], repeats: int) -> dict[str, float]:
    """Seconds of the fastest run of each; the contestants take turns, so that a busy moment hits them alike."""
    seconds = {name: float("inf") for name in runs}
    for attempt in range(repeats + 1):
        for name, run in runs.items():
            start = time.perf_counter()
            run()
            if attempt:
                seconds[name] = min(seconds[name], time.perf_counter() - start)
    return seconds


if __name__ == "__main__":
    main()
