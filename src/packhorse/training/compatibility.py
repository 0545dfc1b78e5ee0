"""A checkpoint's model against the configured one: what cannot go on is refused in words, before its weights load."""

from collections.abc import Mapping
from typing import Any

from transformers import PreTrainedConfig

from packhorse.errors import CheckpointError

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


def hyperparameters(groups: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """What an optimizer was configured with, group by group, to be set again when its state is restored."""
    return [{name: group[name] for name in HYPERPARAMETERS if name in group} for group in groups]


def _shapes(config: dict[str, Any]) -> dict[str, Any]:
    layers = (config.get("infini_attention") or {}).get("memory_layers")
    if layers is not None:
        layers = None if len(layers) == config["num_hidden_layers"] else sorted(layers)  # all of them, named or not
    return {**{name: config[name] for name in SHAPES if name in config}, "infini_attention.memory_layers": layers}
