"""A model or a checkpoint against the configuration: what cannot go on is refused in words, before weights load.

What is known early enough is refused before the caches are built, which may take hours.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from lightning import LightningModule
from transformers import PreTrainedConfig

from packhorse.cache import DataSettings
from packhorse.cache.recipe import make_recipe
from packhorse.cache.tokenizers import resolve_tokenizer
from packhorse.errors import CheckpointError, TokenizerError
from packhorse.training.state import CacheState, check_recipe

ANY_VOCABULARY = 2**20
"""Where that of the tokenizer is not known yet."""

SHAPES = (
    "model_type",
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "tie_word_embeddings",
    "attention_bias",
    "mlp_bias",
)
"""Fields of a configuration that decide which weights there are."""

HYPERPARAMETERS = ("weight_decay", "betas", "eps", "momentum")
"""What the configuration says about an optimizer, and its state repeats; the learning rate is the schedule's."""


def check_contents(checkpoint: Any, name: str, *, goes_on: bool) -> None:
    """Refuse a checkpoint that is not of a Packhorse run, or holds too little.

    Args:
        checkpoint: What was loaded.
        name: What the message calls it.
        goes_on: Whether a run shall go on from it.

    Raises:
        CheckpointError: the message says what it lacks.
    """
    own = checkpoint.get("packhorse") if isinstance(checkpoint, Mapping) else None
    if not isinstance(own, Mapping) or "config" not in own:
        raise CheckpointError(f"{name} is a checkpoint, but not of a Packhorse run: it has no model configuration.")
    if goes_on and "lr_schedulers" not in checkpoint:  # as `save_weights_only` leaves it
        raise CheckpointError(
            f"{name} holds the weights of a model, but not the state of a run.\nGo on from another checkpoint. To "
            "begin a new run with these weights, `export` them to a folder and set `model.pretrained` to it."
        )


def check_shapes(saved: dict[str, Any], config: PreTrainedConfig) -> None:
    """Refuse a checkpoint whose weights are not those of the configured model.

    Raises:
        CheckpointError: the message names every field that differs.
    """
    then, now = _shapes(saved), _shapes(config.to_dict())
    differing = [
        f"  {name}: in the checkpoint {value}, configured {now.get(name)}"
        for name, value in then.items()
        if value != now.get(name)
    ]
    if differing:
        raise CheckpointError(
            "The checkpoint is of another model than the configured one:\n" + "\n".join(differing) + "\n"
            "Take the configuration that was saved beside the checkpoint (`--config RUN/config.yaml`), or begin a new "
            "run without `--ckpt_path`."
        )


def check_model(module: LightningModule, settings: DataSettings) -> None:
    """Refuse a model that cannot be made, or is too small for its tokenizer, before hours of building.

    Args:
        module: What is trained; of one that is not ours nothing is known.
        settings: The `data:` group.

    Raises:
        SettingsError: Its settings make no model.
        TokenizerError: The tokenizer has more ids than the model has entries.
    """
    size = getattr(module, "declared_vocab_size", None)
    if hasattr(module, "make_config"):
        module.make_config(size or ANY_VOCABULARY)
    if size is None:
        return
    tokenizer, _ = resolve_tokenizer(settings.cache)
    if tokenizer.vocab_size > size:
        raise TokenizerError(
            f"The tokenizer {settings.tokenizer} has ids up to {tokenizer.vocab_size - 1:,}, but the model's "
            f"vocabulary has {size:,} entries.\nLeave `vocab_size` out (it follows the tokenizer), or take the "
            "model's own tokenizer."
        )


def check_before_building(
    saved: dict[str, Any],
    known: Sequence[CacheState],
    settings: DataSettings,
    make_config: Callable[[int], PreTrainedConfig],
) -> None:
    """Refuse a checkpoint of another model, or of caches of other recipes, than those that would be built.

    Args:
        saved: The configuration of its model.
        known: The caches of its run.
        settings: The `data:` group.
        make_config: Size of a vocabulary -> the configuration of the model.

    Raises:
        CheckpointError: It is of another model.
        SnapshotMismatch: It is of another cache.
    """
    tokenizer, _ = resolve_tokenizer(settings.cache)
    check_shapes(saved, make_config(tokenizer.vocab_size))
    wanted = {name: make_recipe(each, tokenizer).id for name, each in settings.caches.items()}
    for cache in known:
        # If there is one, its name may be another for the same thing.
        alone = next(iter(wanted.values())) if len(known) == len(wanted) == 1 else ""
        check_recipe(cache, alone or wanted.get(cache.name, ""))


def hyperparameters(groups: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """What an optimizer was configured with, group by group, to be set again when its state is restored."""
    return [{name: group[name] for name in HYPERPARAMETERS if name in group} for group in groups]


def _shapes(config: dict[str, Any]) -> dict[str, Any]:
    layers = (config.get("infini_attention") or {}).get("memory_layers")
    if layers is not None:
        layers = None if len(layers) == config["num_hidden_layers"] else sorted(layers)  # all of them, named or not
    return {**{name: config[name] for name in SHAPES if name in config}, "infini_attention.memory_layers": layers}
