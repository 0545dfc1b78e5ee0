"""`packhorse cache <verb> --config ...`: the same YAML as `fit`, without a trainer, a model, or torch."""

import json
from dataclasses import asdict
from typing import Any

from jsonargparse import ActionConfigFile, ArgumentParser, Namespace, set_parsing_settings

from packhorse.cache.cache import Cache
from packhorse.cache.plan import Plan
from packhorse.cache.reader import ChunkReader
from packhorse.cache.record import chunk_path, committed_chunks, read_record
from packhorse.cache.settings import DataSettings
from packhorse.cache.update import open_cache, update_cache
from packhorse.corpus.sources import named_in_configuration
from packhorse.errors import CacheError, CacheIncompleteError

OTHER_GROUPS = ("trainer", "model", "checkpoint", "seed_everything", "ckpt_path", "weights_only", "verbose")
"""Groups of a configuration that are not ours; they are read over."""


def run_cache_command(arguments: list[str]) -> int:
    """Run a verb; the result is the exit status."""
    if not arguments or arguments[0] not in VERBS:
        lines = [f"  {name:9} {description}" for name, (_, description) in VERBS.items()]
        print("packhorse cache VERB --config X.yaml\n\n" + "\n".join(lines))
        return 0 if arguments[:1] in ([], ["-h"], ["--help"]) else 2
    run, description = VERBS[arguments[0]]
    options = make_parser(description).parse_args(arguments[1:])
    return run(read_settings(options), options.json)


def make_parser(description: str) -> ArgumentParser:
    """A parser for the `data:` group of a configuration."""
    set_parsing_settings(docstring_parse_attribute_docstrings=True)
    parser = ArgumentParser(description=description, allow_abbrev=False)
    parser.add_argument("-c", "--config", action=ActionConfigFile, help="A YAML file; several are merged.")
    parser.add_argument("--json", action="store_true", help="Print the result as JSON.")
    parser.add_class_arguments(DataSettings, "data")
    for group in OTHER_GROUPS:
        # Not `Any`, which would import what a class_path in it names, and with it torch.
        parser.add_argument(f"--{group}", type=dict | list | str | int | bool, help="Of no concern here.")
    return parser


def read_settings(options: Namespace) -> DataSettings:
    """The settings of the `data:` group; without a tokenizer, that of the model."""
    values = dict(vars(options.data))
    model = options.model if isinstance(options.model, dict) else {}
    if values["tokenizer"] is None:
        values["tokenizer"] = model.get("pretrained")
    values["source"] = named_in_configuration(values["source"])
    return DataSettings(**values)


def build(settings: DataSettings, as_json: bool) -> int:
    """Build the cache, or bring it up to date with its sources."""
    cache = update_cache(settings.cache)
    _tell(as_json, cache, [f"{cache.folder}", *cache.summary.lines()])
    return 0


def status(settings: DataSettings, as_json: bool) -> int:
    """Tell what is planned and what is built."""
    cache = open_cache(settings.cache)
    folder, plan = cache.folder, Plan(cache.folder)
    committed = set(committed_chunks(folder))
    missing = [chunk for chunk in range(plan.num_chunks) if chunk not in committed]
    lines = [f"{folder}", *cache.summary.lines()]
    if missing:
        lines.append(f"{len(missing)} of {plan.num_chunks} planned chunks are missing: {_ranges(missing)}")
    else:
        lines.append(f"All {plan.num_chunks} planned chunks are there.")
    _tell(as_json, cache, lines, planned=plan.num_chunks, missing=missing)
    return 0


def validate(settings: DataSettings, as_json: bool) -> int:
    """Read every chunk and verify every hash. Changes nothing."""
    cache = open_cache(settings.cache)
    folder = cache.folder
    # What the index knows must have its record; what is only planned need not be there yet.
    chunks = sorted({*committed_chunks(folder), *range(cache.snapshot.num_chunks)})
    damaged: dict[int, str] = {}
    for chunk in chunks:
        try:
            record = read_record(folder, chunk)
            path = chunk_path(folder, chunk, record.file_sha256)
            reader = ChunkReader(path, chunk, cache.recipe.digest, bytes.fromhex(record.index_sha256))
            if reader.content_digest() != record.payload_sha256:
                raise CacheIncompleteError(f"{path} holds other tokens than its record says.")
        except FileNotFoundError as error:
            damaged[chunk] = f"{error.filename} is missing. `packhorse cache build` makes it again."
        except CacheError as error:
            damaged[chunk] = str(error)
    good = len(chunks) - len(damaged)
    verdict = "all hashes verified" if not damaged else f"{len(damaged)} damaged"
    lines = [f"{good}/{len(chunks)} chunks, {verdict}", *(f"chunk {c}: {text}" for c, text in damaged.items())]
    _tell(as_json, cache, lines, damaged=damaged)
    return 1 if damaged else 0


VERBS = {
    "build": (build, build.__doc__),
    "status": (status, status.__doc__),
    "validate": (validate, validate.__doc__),
}


def _tell(as_json: bool, cache: Cache, lines: list[str], **more: Any) -> None:
    if not as_json:
        print("\n".join(lines))
        return
    summary = cache.summary
    value = {
        "folder": str(cache.folder),
        "recipe": asdict(cache.recipe),
        "snapshot": cache.snapshot.digest,
        **asdict(summary),
        "utilisation": summary.utilisation,
        "bytes_per_token": summary.bytes_per_token,
        **more,
    }
    print(json.dumps(value, indent=2))


def _ranges(numbers: list[int]) -> str:
    """1, 2, 3, 7 -> "1-3, 7"."""
    runs: list[list[int]] = []
    for number in numbers:
        if runs and number == runs[-1][1] + 1:
            runs[-1][1] = number
        else:
            runs.append([number, number])
    return ", ".join(str(a) if a == b else f"{a}-{b}" for a, b in runs)
