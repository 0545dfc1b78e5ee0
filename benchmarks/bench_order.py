"""What does it cost to know the next sequence, in a run over ten billion of them that grew five times?

The order is a formula, so the answer must not depend on the size. Positions are asked for in batches of several sizes
at places all over the run, in the first epoch (through all growths) and in a later one; medians count. The state is
what a checkpoint keeps of it.

    python benchmarks/bench_order.py

The last line is the time of one sequence, in the costliest part of the run and in a batch of 4,096 (so many the loader
asks for at once), over 5 microseconds.
"""

import argparse
import json
import random
import time

from report import median, print_header, print_result

from packhorse.training.mixture import BLOCK
from packhorse.training.sampler import LOOK_AHEAD
from packhorse.training.state import RunState, Snapshots, StageStart, begin_run

PACKAGES = ("numpy",)
LIMIT_MICROSECONDS = 5.0
BATCHES = (8, 512, LOOK_AHEAD)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sequences", type=int, default=10_000_000_000)
    parser.add_argument("--growths", type=int, default=5)
    parser.add_argument("--batches", type=int, default=200, help="batches of each size that are asked for")
    options = parser.parse_args()
    print_header(*PACKAGES)
    state = grown(options.sequences, options.growths)
    size = state.caches[0].history[-1][1]
    rows, worst = [], 0.0
    parts = {"first epoch": (int(0.9 * options.sequences), size), "third epoch": (2 * size, 3 * size)}
    for part, (start, end) in parts.items():
        costs = {batch: microseconds(state, start, end, batch, options.batches) for batch in BATCHES}
        worst = max(worst, costs[LOOK_AHEAD])
        cells = ", ".join(f"{cost:.2f} in batches of {batch:,}" for batch, cost in costs.items())
        rows.append(f"{part}: microseconds per sequence {cells}")
        print(rows[-1], flush=True)
    rows.append(f"state: {len(json.dumps(state.to_dict(10**6)))} bytes")
    print(rows[-1])
    print_result(rows, worst / LIMIT_MICROSECONDS, *PACKAGES)


def grown(sequences: int, growths: int) -> RunState:
    """A run that grew by an eighth each time, all in its first epoch."""
    state = begin_run([snapshot(sequences)], [StageStart(step=0, shares={"web": BLOCK})], seed=0, global_batch=1_024)
    for number in range(1, growths + 1):
        step = int(0.9 * sequences * number / (growths + 1)) // 1_024
        state = state.with_snapshot(snapshot(sequences + number * sequences // 8), step)
    return state


def snapshot(sequences: int) -> Snapshots:
    """A cache of so many sequences that nobody has to build."""
    return Snapshots(
        name="web",
        num_chunks=sequences // 8_000,
        sequences=sequences,
        eval_sequences=2_048,
        digests=lambda num_chunks: f"{num_chunks:064x}",
    )


def microseconds(state: RunState, start: int, end: int, batch: int, count: int) -> float:
    """The median over batches at random places."""
    generator, times = random.Random(batch), []
    for _ in range(count):
        place = generator.randrange(start, end - batch)
        begin = time.perf_counter()
        state.order.sequence_numbers(place, batch)
        times.append((time.perf_counter() - begin) / batch)
    return 1e6 * median(times)


if __name__ == "__main__":
    main()
