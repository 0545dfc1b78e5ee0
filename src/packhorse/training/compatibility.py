"""A checkpoint's model against the configured one: what cannot go on is refused in words, before its weights load."""

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
