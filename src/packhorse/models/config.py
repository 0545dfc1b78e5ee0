"""Settings -> a transformers configuration that carries them.

`InfiniAttentionConfig` says what happens inside attention. `InfiniConfigMixin` nests it in a transformers
configuration under `infini_attention`, so that `save_pretrained` writes it and `from_pretrained` reads it back.
A model family needs three lines: see `InfiniLlamaConfig`.
"""

from dataclasses import asdict, dataclass, fields
from typing import Literal, Self, TypeVar, get_args, get_origin

from transformers import LlamaConfig, PreTrainedConfig, Qwen2Config, Qwen3Config

BalanceInit = Literal["zeros", "randn", "constant"]
BalanceAct = Literal["orig_sigmoid", "hard_sigmoid", "orig_tanh", "tanh_abs"]
FirstSegment = Literal["bypass", "gated"]
MemoryUpdate = Literal["linear", "delta"]
RotaryRestart = Literal["segment", "document"]
Backend = Literal["auto", "loop", "scan", "attention"]
Settings = TypeVar("Settings")


@dataclass(frozen=True, kw_only=True)
class InfiniAttentionConfig:
    """How attention splits a document into segments and what it remembers of the earlier ones."""

    segment_length: int = 64
    """Tokens of one segment: local attention sees this many, the memory is written once for each."""

    turn_on_memory: bool = True
    """False leaves local attention alone, ungated: the baseline that shows what the memory is worth."""

    memory_layers: tuple[int, ...] | None = None
    """Layers with a memory, counted from 0; the others have local attention alone and no gates. None for all."""

    balance_init_type: BalanceInit = "zeros"
    """Start of the gates. `constant` takes `balance_init_value`; -4 with `orig_sigmoid` suits a plain checkpoint."""

    balance_init_value: float = 0.0
    """Where the gates start, before their activation, with `balance_init_type: constant`."""

    balance_act_type: BalanceAct = "orig_sigmoid"
    """Gate parameter -> share of memory. `hard_sigmoid` is clamp(0.2 x + 0.5, 0, 1); `orig_tanh` may be negative."""

    first_segment: FirstSegment = "bypass"
    """While a document's memory is empty: `bypass` is plain local attention, `gated` scales it by 1 - gate."""

    memory_eps: float = 1e-6
    """Added to the normaliser of a read, so that keys which are all zero give zero and not NaN."""

    memory_update: MemoryUpdate = "linear"
    """How a segment is written: `linear` adds its values (equation 8), `delta` what they add to what the memory already
    answers for their keys (equation 9)."""

    memory_qk_norm: bool = False
    """Scale the memory's queries and keys to root mean square 1 for each head. It helps models without head norms whose
    keys are large or much alike (Qwen2's have big biases)."""

    rotary_restart: RotaryRestart = "segment"
    """Where rotary positions begin again. Local scores depend on distances only, so both give the same; `segment` keeps
    angles small however long a document is, `document` gives the positions that a plain checkpoint was trained with."""

    detach_every_n_segments: int | None = None
    """Stop gradients where every n-th segment is added to the memory: a loss then reaches 1 to n segments back. None
    teaches all segments, as the paper does."""

    backend: Backend = "auto"
    """Same values, other speed: `scan` over segments, masked `attention` (linear only), literal `loop`."""

    balance_factor_lr: float | None = None
    """Training: peak learning rate of the gates. None leaves it to the module, which has the same setting."""

    balance_factor_weight_decay: float | None = None
    """Training: weight decay of the gates. None leaves it to the module, which has the same setting."""

    logging: bool = True
    """Training: log gates and memory, to TensorBoard or to whatever logger there is."""

    logging_interval: int = 100
    """Training: optimizer steps from one such log to the next."""

    log_grad: bool = False
    """Training: also log the gradient of every gate, as a histogram and as a heat map."""

    log_segment_acts: bool = False
    """Training: also log how large memory reads and local outputs are in each segment of a document."""

    def __post_init__(self) -> None:
        if self.memory_layers is not None:
            object.__setattr__(self, "memory_layers", tuple(self.memory_layers))  # JSON has only lists
            if len(set(self.memory_layers)) < len(self.memory_layers) or min(self.memory_layers, default=-1) < 0:
                raise ValueError(
                    f"memory_layers are different layer numbers from 0 on, got {list(self.memory_layers)}. "
                    "Leave it out for a memory in every layer; turn_on_memory: false has none."
                )
        if self.logging_interval < 1:
            raise ValueError(f"logging_interval must be at least 1 step, got {self.logging_interval}.")
        if self.segment_length < 1:
            raise ValueError(f"segment_length must be at least 1, got {self.segment_length}.")
        if not self.memory_eps > 0:
            raise ValueError(f"memory_eps must be above 0, or an empty read is 0 / 0; got {self.memory_eps}.")
        for field in fields(self):
            allowed, value = get_args(field.type), getattr(self, field.name)
            if get_origin(field.type) is Literal and value not in allowed:
                raise ValueError(f"{field.name} must be one of {', '.join(allowed)}; got {value!r}.")
        if self.detach_every_n_segments is not None and self.detach_every_n_segments < 1:
            raise ValueError(f"detach_every_n_segments must be at least 1, got {self.detach_every_n_segments}.")
        if self.backend == "attention" and self.detach_every_n_segments is not None:
            raise ValueError(
                "backend 'attention' has no memory whose gradient detach_every_n_segments could stop. "
                "Set backend: auto, or leave detach_every_n_segments out."
            )
        if self.backend == "attention" and self.memory_update == "delta":
            raise ValueError(
                "backend 'attention' weighs every past token by itself, but with memory_update 'delta' what a segment "
                "writes depends on what stood before. Set backend: auto, or memory_update: linear."
            )
        if self.balance_init_value != 0.0 and self.balance_init_type != "constant":
            raise ValueError(
                f"balance_init_value is {self.balance_init_value}, but balance_init_type {self.balance_init_type!r} "
                "does not read it. Set balance_init_type: constant, or leave balance_init_value out."
            )
        if self.turn_on_memory and self._gates_are_stuck():
            raise ValueError(
                f"{self.balance_act_type} is flat where balance_init_type {self.balance_init_type!r} starts the gates "
                f"({self.balance_init_value}), so they would never move. Start hard_sigmoid between -2.5 and 2.5 and "
                "tanh_abs anywhere but at 0 (balance_init_type: constant with a balance_init_value, or randn)."
            )

    def has_memory(self, layer: int) -> bool:
        """Whether this layer, counted from 0, has a memory and gates."""
        return self.memory_layers is None or layer in self.memory_layers

    def _gates_are_stuck(self) -> bool:
        if self.balance_init_type == "randn":
            return False
        start = self.balance_init_value
        return {"hard_sigmoid": abs(start) >= 2.5, "tanh_abs": start == 0.0}.get(self.balance_act_type, False)


class InfiniConfigMixin:
    """Gives a transformers configuration an `infini_attention` part. Only to be inherited from, before the base."""

    def __post_init__(self, **kwargs) -> None:
        self.infini_attention = as_settings(InfiniAttentionConfig, self.infini_attention, "infini_attention")
        super().__post_init__(**kwargs)
        self._refuse_sliding_windows()
        self._refuse_layers_that_are_not_there()
        self._refuse_growing_positions()

    def to_dict(self) -> dict:
        """Everything as plain values, ready for JSON."""
        return {**super().to_dict(), "infini_attention": asdict(self.infini_attention)}

    @classmethod
    def from_base(cls, base: PreTrainedConfig, infini_attention: InfiniAttentionConfig | dict | None = None) -> Self:
        """This family's configuration with the sizes of a plain one, such as a downloaded checkpoint's."""
        values = base.to_dict()
        for name in ("model_type", "architectures", "transformers_version", "infini_attention"):
            values.pop(name, None)
        return cls(**values, infini_attention=infini_attention)

    def _refuse_sliding_windows(self) -> None:
        reason = (
            "Infini-attention looks at whole segments and remembers the earlier ones, and a window that slides across "
            "segments fits neither. Set use_sliding_window: false and leave layer_types out."
        )
        if getattr(self, "use_sliding_window", False):
            raise ValueError(f"This configuration has use_sliding_window: true. {reason}")
        if other := set(getattr(self, "layer_types", None) or ()) - {"full_attention"}:
            raise ValueError(f"This configuration has layers of type {', '.join(sorted(other))}. {reason}")

    def _refuse_layers_that_are_not_there(self) -> None:
        if strangers := [x for x in self.infini_attention.memory_layers or () if x >= self.num_hidden_layers]:
            raise ValueError(
                f"memory_layers names {strangers}, but the model has {self.num_hidden_layers} layers, 0 to "
                f"{self.num_hidden_layers - 1}."
            )

    def _refuse_growing_positions(self) -> None:
        kind = (getattr(self, "rope_parameters", None) or {}).get("rope_type", "default")
        if self.infini_attention.rotary_restart == "document" and kind in ("dynamic", "longrope"):
            raise ValueError(
                f"rotary_restart 'document' does not go with rope_type {kind!r}, which turns every token by another "
                "angle as soon as any text of the batch is long. Set rotary_restart: segment."
            )


class InfiniLlamaConfig(InfiniConfigMixin, LlamaConfig):
    """`LlamaConfig` with an `infini_attention` part."""

    model_type = "infini_llama"

    infini_attention: InfiniAttentionConfig | dict | None = None


class InfiniQwen2Config(InfiniConfigMixin, Qwen2Config):
    """`Qwen2Config` with an `infini_attention` part."""

    model_type = "infini_qwen2"

    infini_attention: InfiniAttentionConfig | dict | None = None


class InfiniQwen3Config(InfiniConfigMixin, Qwen3Config):
    """`Qwen3Config` with an `infini_attention` part."""

    model_type = "infini_qwen3"

    infini_attention: InfiniAttentionConfig | dict | None = None


def as_settings(kind: type[Settings], value: Settings | dict | None, name: str) -> Settings:
    """Settings, from themselves or from what a file has in their place.

    Args:
        kind: Their class.
        value: They, or their fields, or nothing for the defaults.
        name: What the group is called where it was written.

    Raises:
        ValueError: there is no such field, or its value makes no sense.
    """
    if isinstance(value, kind):
        return value
    value = dict(value or {})
    known = {field.name for field in fields(kind)}
    if unknown := sorted(set(value) - known):
        raise ValueError(f"{name} has no field {', '.join(unknown)}. It has: {', '.join(sorted(known))}.")
    return kind(**value)
