"""`packhorse cache VERB --config X.yaml`: the same YAML as `fit`, without a trainer, a model, or torch.

A verb is a file of this folder with one function of the same name:

    def inspect(where: CacheSettings | Path, *, sequence: int = 0) -> Outcome

Its keyword parameters are the options of the command line, its docstring their help. It does its work through the rest
of the cache and returns what is to be said; how that is printed, for people or for scripts, is decided here.
"""

import importlib
import inspect
import json
import sys
from collections.abc import Callable
from pathlib import Path

from jsonargparse import ActionConfigFile, Namespace

from packhorse.cache.commands.outcome import Outcome
from packhorse.cache.data_settings import DataSettings, name_sources
from packhorse.cache.settings import CacheSettings
from packhorse.errors import PackhorseError, SettingsError
from packhorse.usage import Parser, nearest, read_docstrings

VERBS = {
    "build": "build the cache, or bring it up to date with its sources",
    "status": "tell what is planned, what is built, and who is building",
    "grow": "extend the plan by what the settings name newly, and build that",
    "estimate": "tell what a cache will take: tokens, sequences, chunks, bytes, time",
    "validate": "say exactly what is damaged, from sizes, hashes or contents; changes nothing",
    "repair": "build what is damaged again from its source, and prove it equal",
    "cleanup": "say what dead builders left and nobody needs; remove it with --yes",
    "list": "list the caches of a folder",
    "repack": "make a cache of another length or packing from this one, without tokenizing again",
    "import": "build a cache from ids of `datasets`, Megatron-LM or datatrove",
    "export": "write the cache for `datasets`, Megatron-LM or datatrove",
    "copy": "copy the cache to another folder or bucket, or what a copy lacks",
    "remove": "remove the cache for good, after asking",
    "inspect": "show a sequence as text, where it came from, and histograms",
}
"""Verb -> what it does, in the order of the help."""

OTHER_GROUPS = ("trainer", "model", "checkpoint", "seed_everything", "ckpt_path", "weights_only", "verbose")
"""Groups of a configuration that are not ours; they are read over."""


def run_cache_command(arguments: list[str]) -> int:
    """Run a verb; the result is the exit status."""
    if not arguments or arguments[0] not in VERBS:
        return _tell_verbs(arguments)
    read_docstrings(arguments)
    verb = load_verb(arguments[0])
    options = make_parser(verb).parse_args(_spelled(arguments[1:], verb))
    values, status = {}, 0
    try:
        wheres = _wheres(options)
        for name, where in wheres.items():
            outcome = verb(where, **_options_of(verb, options, name if len(wheres) > 1 else None))
            values[name], status = outcome.values, max(status, outcome.status)
            if not options.json:
                print("\n".join(outcome.lines))
    except PackhorseError as error:
        if options.json:
            print(json.dumps({"error": type(error).__name__, "message": str(error)}, indent=2))
        raise
    if options.json:
        print(json.dumps(values if len(values) > 1 else next(iter(values.values())), indent=2))
    return status


def load_verb(name: str) -> Callable[..., Outcome]:
    """The function of a verb; nothing is imported for the others."""
    # A file called like something that is used here would take its place.
    name = f"{name}_" if name in ("import", "inspect", "list") else name
    return getattr(importlib.import_module(f"{__name__}.{name}"), name)


def make_parser(verb: Callable[..., Outcome]) -> Parser:
    """A parser for the `data:` group of a configuration and the options of a verb."""
    description = inspect.getdoc(verb).split("\n\nArgs:")[0]
    parser = Parser(prog=f"packhorse cache {verb.__name__.strip('_')}", description=description)
    parser.add_argument(
        "folder", nargs="?", type=str | None, help="The folder of a cache, where no sources are needed."
    )
    parser.add_argument("-c", "--config", action=ActionConfigFile, help="A YAML file; several are merged.")
    parser.add_argument("--json", action="store_true", help="Print the result as JSON.")
    parser.add_function_arguments(verb, skip={"where"})
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
    name_sources(values)
    return DataSettings(**values)


def _tell_verbs(arguments: list[str]) -> int:
    """The help; or what may have been meant by a verb that there is not."""
    is_help = arguments[:1] in ([], ["-h"], ["--help"])
    near = None if is_help else nearest(arguments[0], VERBS)
    usage = "packhorse cache VERB --config X.yaml, or packhorse cache VERB FOLDER"
    told = "\n".join([usage, "", *(f"  {name:9} {description}" for name, description in VERBS.items())])
    told += "\n\nMore about one of them: packhorse cache VERB --help"
    if is_help:
        print(told)
        return 0
    meant = f" Did you mean {near}?" if near else f"\n\n{told}"
    print(f"There is no verb {arguments[0]!r} of `cache`.{meant}", file=sys.stderr)
    return 2


def _wheres(options: Namespace) -> dict[str, CacheSettings | Path]:
    """The cache that is meant; those of a mixture one after the other."""
    if options.folder is None:
        return dict(read_settings(options).caches)
    if options.config:
        raise SettingsError(f"Give either a folder or --config, not both: {options.folder}.")
    return {options.folder: Path(options.folder)}


def _options_of(verb: Callable, options: Namespace, cache: str | None) -> dict:
    """The options of a verb; what it writes of a cache of a mixture goes to a folder of the cache's name."""
    own = {name: options[name] for name in inspect.signature(verb).parameters if name != "where"}
    if cache and own.get("to"):
        own["to"] = f"{own['to'].rstrip('/')}/{cache}"
    return own


def _spelled(arguments: list[str], verb: Callable) -> list[str]:
    """`--start-chunk` is `--start_chunk`; what is yes or no says yes by its name alone, else what follows it."""
    parameters = inspect.signature(verb).parameters
    flags = {f"--{name}" for name, parameter in parameters.items() if parameter.annotation is bool}
    spelled, waiting = [], list(arguments)
    while waiting:
        name, equals, value = waiting.pop(0).partition("=")
        name = "--" + name[2:].replace("-", "_") if name.startswith("--") else name
        if name in flags and not equals:
            equals, value = "=", waiting.pop(0) if waiting[:1] in (["true"], ["false"]) else "true"
        spelled.append(name + equals + value)
    return spelled
