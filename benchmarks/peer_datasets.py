"""The peer of `bench_build.py`: how a training script usually turns text into tensors.

    load_dataset -> map(tokenize) -> map(group) -> torch.save

The recipe is that of transformers' `run_clm.py`, with EOS after every document and the current, fast way to join lists
(`itertools.chain`; with `sum(lists, [])`, which is also seen, grouping takes many times as long). Tensors are taken out
of the table all at once, which is the fastest way that `datasets` has.

    python benchmarks/peer_datasets.py SOURCE TOKENIZER_JSON TARGET --eos-id 0

The last line is JSON: tokens, rows, seconds by stage. With `--warm-up FILE` the same stages first run on a small file,
twice: the first time starts everything up, the second tells what they cost without any work to speak of
(`overhead_seconds`: forking two pools of processes, hashing the functions).
"""

import argparse
import itertools
import json
import time
from pathlib import Path


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("source", type=Path)
    parser.add_argument("tokenizer", type=Path)
    parser.add_argument("target", type=Path, help="a folder for everything that is written")
    parser.add_argument("--eos-id", type=int, required=True)
    parser.add_argument("--text-column", default="text")
    parser.add_argument("--sequence-length", type=int, default=512)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--warm-up", type=Path)
    options = parser.parse_args()

    from transformers import PreTrainedTokenizerFast

    # These two inputs are all that GPT-2, Llama and Qwen tokenizers give.
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_file=str(options.tokenizer), model_input_names=["input_ids", "attention_mask"]
    )
    result: dict[str, float] = {}
    if options.warm_up:
        for _ in range(2):
            began = time.perf_counter()
            warm = prepare(load(options.warm_up, options), tokenizer, options, options.target / "warm-up.pt")
        result["overhead_seconds"] = time.perf_counter() - began - warm["load_seconds"]
    data = load(options.source, options)
    result |= prepare(data, tokenizer, options, options.target / "tensors.pt")
    print(json.dumps(result))


def load(source: Path, options: argparse.Namespace):
    from datasets import load_dataset

    start = time.perf_counter()
    kind = "parquet" if source.suffix == ".parquet" else "json"
    data = load_dataset(kind, data_files=str(source), split="train", cache_dir=str(options.target / "datasets"))
    data = data.select_columns([options.text_column])
    return data, time.perf_counter() - start


def prepare(loaded, tokenizer, options: argparse.Namespace, target: Path) -> dict[str, float]:
    import torch

    data, load_seconds = loaded
    column, length, eos_id = options.text_column, options.sequence_length, options.eos_id

    def tokenize(batch):
        encoded = tokenizer([text for text in batch[column] if text], add_special_tokens=False)
        return {
            "input_ids": [[*ids, eos_id] for ids in encoded["input_ids"]],
            "attention_mask": [[*mask, 1] for mask in encoded["attention_mask"]],
        }

    def group(batch):
        joined = {name: list(itertools.chain(*lists)) for name, lists in batch.items()}
        # The last, incomplete row of every batch is dropped.
        total = len(joined["input_ids"]) // length * length
        rows = {name: [ids[i : i + length] for i in range(0, total, length)] for name, ids in joined.items()}
        rows["labels"] = rows["input_ids"].copy()
        return rows

    times = [time.perf_counter()]
    # The folder is fresh, so there is nothing to load from a cache; the second warm-up must not find the first.
    how = {"batched": True, "num_proc": options.workers, "load_from_cache_file": False}
    tokenized = data.map(tokenize, remove_columns=data.column_names, **how)
    times.append(time.perf_counter())
    grouped = tokenized.map(group, **how)
    times.append(time.perf_counter())
    tensors = grouped.with_format("torch")[:]
    torch.save(tensors, target)
    times.append(time.perf_counter())
    return {
        "load_seconds": load_seconds,
        "tokenize_seconds": times[1] - times[0],
        "group_seconds": times[2] - times[1],
        "save_seconds": times[3] - times[2],
        "work_seconds": times[3] - times[0],
        "tokens": sum(len(chunk.flatten()) for chunk in tokenized.data.column("input_ids").chunks),
        "rows": len(tensors["input_ids"]),
        "batches": -(-len(data) // 1_000) + options.workers,
    }


if __name__ == "__main__":
    main()
