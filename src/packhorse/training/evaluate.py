"""`packhorse passkey | generate | benchmark | export --ckpt_path ...`: a checkpoint alone, no configuration, no cache.

A command is a function here; its keyword parameters are the options of the command line, its docstring their help.
`--ckpt_path` takes a file, a run's folder, `latest`, `last`, or a transformers folder (`resolve_checkpoint`).
"""

import inspect
import json
import os
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any, get_args, get_origin

from packhorse.cache.progress import say
from packhorse.cache.store import file_in_the_way
from packhorse.corpus.passkey import PasskeyText
from packhorse.errors import SettingsError
from packhorse.evaluation.benchmarks import BenchmarkSettings, check_lm_eval, run_benchmarks
from packhorse.evaluation.generation import GenerationSettings, generate_text
from packhorse.evaluation.passkey import PasskeySettings, evaluate_passkey
from packhorse.evaluation.report import result_lines, write_heat_map, write_json
from packhorse.training.restore import CheckpointSettings, restore
from packhorse.usage import Parser, read_docstrings

OTHER_NAMES = {
    "checkpoint_path": "ckpt_path",
    "context_length": "lengths",
    "context_lengths": "lengths",
    "num_shots": "shots",
    "num_digits": "digits",
    "num_samples": "samples",
    "save_path": "output",
}
"""Other names of options, as other passkey scripts spell them."""


def run_evaluation_command(arguments: list[str]) -> int:
    """Run a command; the result is the exit status."""
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    read_docstrings(arguments)
    command = COMMANDS[arguments[0]]
    groups = {name: p.annotation for name, p in parameters_of(command).items() if is_dataclass(p.annotation)}
    description = inspect.getdoc(command).split("\n\nArgs:")[0]
    parser = Parser(prog=f"packhorse {arguments[0]}", description=description)
    for group in groups.values():
        parser.add_class_arguments(group)
    parser.add_function_arguments(command, skip=set(groups))
    options = vars(parser.parse_args(spell(arguments[1:], command)))
    made = {name: group(**{f.name: options.pop(f.name) for f in fields(group)}) for name, group in groups.items()}
    command(**made, **options)
    return 0


def passkey(checkpoint: CheckpointSettings, settings: PasskeySettings, *, output: Path | None = None) -> None:
    """Hide a key in filler, ask for it, and tell how often it is found: with the memory, without, and with another's.

    Args:
        checkpoint: Which model.
        settings: What to ask.
        output: Folder for passkey.json and passkey.png; by default passkey/<checkpoint> in `runs`.
    """
    if output is not None:
        _check_folder(output)
    restored = restore(checkpoint)
    start = shown = time.monotonic()

    def tell(done: int, total: int) -> None:
        nonlocal shown
        if time.monotonic() - shown > 10:
            shown = time.monotonic()
            say(f"{done / total:.0%}, {done / (shown - start):,.0f} tokens/s")

    result = evaluate_passkey(restored.model, PasskeyText(restored.tokenizer), settings, tell)
    folder = output or checkpoint.runs / "passkey" / _label(restored.path)
    write_json(result, folder / "passkey.json", checkpoint=str(restored.path))
    drawn = write_heat_map(result, folder / "passkey.png")
    print("\n".join(result_lines(result)))
    print(f"\n{folder / 'passkey.json'}" + (f"\n{folder / 'passkey.png'}" if drawn else ""))
    if not drawn:
        say("No heat map: matplotlib is missing. `pip install packhorse[eval]` brings it.")


def generate(
    checkpoint: CheckpointSettings,
    settings: GenerationSettings,
    *,
    prompts: list[str] | None = None,
    file: Path | None = None,
) -> None:
    """Continue prompts, token by token, at constant memory. Only what is written goes to standard output.

    Args:
        checkpoint: Which model.
        settings: How to continue.
        prompts: Texts to continue, one after the other; here, or without the option's name.
        file: A file that is one prompt as a whole. Without prompts and file, standard input is the prompt.
    """
    prompts = _prompts(prompts, file)
    restored = restore(checkpoint)
    for number, prompt in enumerate(prompts):
        if number:
            print()
        ids, eos_id = restored.encode(prompt), restored.tokenizer.facts.eos_id
        for piece in generate_text(restored.model, ids, restored.decode, settings, eos_id=eos_id):
            print(piece, end="", flush=True)
        print()


def benchmark(checkpoint: CheckpointSettings, settings: BenchmarkSettings, *, output: Path | None = None) -> None:
    """Standard benchmarks through lm-eval: extra `eval`. Tasks are loaded from the Hugging Face hub.

    Args:
        checkpoint: Which model.
        settings: Which tasks.
        output: A file for the results as JSON.
    """
    check_lm_eval()
    restored = restore(checkpoint)
    with tempfile.TemporaryDirectory() as folder:
        for name, data in restored.tokenizer.files.items():
            (Path(folder) / name).write_bytes(data)
        results = run_benchmarks(restored.model, Path(folder), settings)
    for task, values in results.items():
        print(f"{task}: " + ", ".join(f"{name} {value:.4f}" for name, value in values.items()))
    if output is not None:
        output.parent.mkdir(parents=True, exist_ok=True)
        output.write_text(json.dumps({"checkpoint": str(restored.path), "results": results}, indent=1) + "\n")


def export(checkpoint: CheckpointSettings, folder: Path) -> None:
    """Make a transformers folder of a checkpoint: config.json, safetensors and tokenizer, for `AutoModelForCausalLM`.

    Args:
        checkpoint: Which model; `--dtype` is that of the weights.
        folder: A folder that is new or empty.
    """
    _check_folder(folder)
    if folder.exists() and any(folder.iterdir()):
        raise SettingsError(f"{folder} is not empty. Name a new folder: nothing is written over.")
    restored = restore(checkpoint)
    restored.model.save_pretrained(folder)
    for name, data in restored.tokenizer.files.items():
        (folder / Path(name).name).write_bytes(data)
    print(
        f"{folder}: load it after `import packhorse.models`, with AutoModelForCausalLM.from_pretrained({str(folder)!r})"
    )


COMMANDS: dict[str, Callable[..., None]] = {
    "passkey": passkey,
    "generate": generate,
    "benchmark": benchmark,
    "export": export,
}


def parameters_of(command: Callable) -> dict[str, inspect.Parameter]:
    """The parameters of a command, or of a dataclass."""
    return dict(inspect.signature(command).parameters)


def spell(arguments: list[str], command: Callable) -> list[str]:
    """`--context-length 256 512` is `--lengths=[256,512]`; words that follow no option are prompts."""
    parameters = parameters_of(command)
    for parameter in list(parameters.values()):
        parameters |= parameters_of(parameter.annotation) if is_dataclass(parameter.annotation) else {}
    lists = {name for name, parameter in parameters.items() if _is_list(parameter.annotation)}
    spelled, loose, waiting = [], [], list(arguments)
    while waiting:
        name, equals, value = waiting.pop(0).partition("=")
        if not name.startswith("--"):
            loose.append(name + equals + value)
            continue
        name = name[2:].replace("-", "_")
        name = name if name in parameters else OTHER_NAMES.get(name, name)
        values = [value] if equals else []
        while waiting and not waiting[0].startswith("--") and (name in lists or not values):
            values.append(waiting.pop(0))
        if name in lists and values:
            numbers = ",".join(values).strip("[]") if name == "lengths" else json.dumps(values)[1:-1]
            spelled.append(f"--{name}=[{numbers}]")
        else:
            spelled.append(f"--{name}" + "".join(f"={value}" for value in values))
    return [*spelled, f"--prompts={json.dumps(loose)}"] if loose and "prompts" in parameters else spelled + loose


def _is_list(annotation: Any) -> bool:
    return any(get_origin(part) is list for part in (annotation, *get_args(annotation)))


def _prompts(prompts: list[str] | None, file: Path | None) -> list[str]:
    if prompts and file:
        raise SettingsError("Give either prompts or --file, not both.")
    if file is None:
        prompts = prompts or [sys.stdin.read()]
    else:
        try:
            prompts = [file.expanduser().read_text(encoding="utf-8")]
        except (OSError, UnicodeDecodeError) as error:
            raise SettingsError(f"The prompt file {file} cannot be read: {error}") from None
    if not all(prompts):
        raise SettingsError("A prompt is empty. Give a text as an argument, by --file, or on standard input.")
    return prompts


def _check_folder(folder: Path) -> None:
    """Refuse a folder that cannot be made, before hours of work."""
    if file := file_in_the_way(folder):
        raise SettingsError(f"{file} is a file, so {folder} cannot be a folder. Name another.")


def _label(path: Path) -> str:
    """runs/mine/version_0/checkpoints/step=1.ckpt -> mine-version_0-step=1."""
    parts = [part for part in path.absolute().with_suffix("").parts[-4:] if part not in ("checkpoints", "/")]
    return "-".join(parts[-3:])
