"""Optimizer steps -> tokens per second, time left, share of the device's peak.

Measured over the last steps, so a run that speeds up or slows down shows it; the first step (compilation, first
allocations) and validation do not count.
"""

import time
from collections import deque

import torch
from lightning import LightningModule, Trainer
from lightning.fabric.utilities.throughput import get_available_flops
from transformers import PreTrainedConfig


class Speed:
    """The clock of a run.

    Args:
        steps: Over how many steps it measures.
    """

    def __init__(self, steps: int = 50) -> None:
        self._marks: deque[tuple[float, int]] = deque(maxlen=steps + 1)
        self._paused = 0.0

    def mark(self, step: int, now: float | None = None) -> None:
        """A step is done."""
        self._marks.append(((time.monotonic() if now is None else now) - self._paused, step))

    def pause(self, seconds: float) -> None:
        """So long something else was done."""
        self._paused += seconds

    @property
    def steps_per_second(self) -> float:
        """0 until two steps are done."""
        if len(self._marks) < 2:
            return 0.0
        (start, first), (end, last) = self._marks[0], self._marks[-1]
        return (last - first) / max(end - start, 1e-9)

    def seconds_left(self, total: int) -> float | None:
        """Until step `total`, if there is one, without validation."""
        rate = self.steps_per_second
        return (total - self._marks[-1][1]) / rate if rate and total else None


def flops_per_token(config: PreTrainedConfig, parameters: int) -> float:
    """Floating-point operations that training spends on a token, forward and backward.

    6 per parameter of a matrix (the embedding is looked up, unless it is also the output layer), 12 per layer, width
    and half the segment for attention within it, and 12 per layer, width and head size for the memory.
    """
    width = config.num_attention_heads * config.head_dim
    embedding = 0 if config.tie_word_embeddings else config.vocab_size * config.hidden_size
    attention = 12 * config.num_hidden_layers * width * config.infini_attention.segment_length / 2
    memory = 12 * config.num_hidden_layers * width * config.head_dim
    return 6 * (parameters - embedding) + attention + memory


def peak_flops(trainer: Trainer) -> float | None:
    """Of all devices of the run together, for its precision; None where Lightning's table has none."""
    device = trainer.strategy.root_device
    if device.type != "cuda":
        return None
    dtypes = {"bf16": torch.bfloat16, "16-": torch.float16}
    dtype = next((dtype for name, dtype in dtypes.items() if str(trainer.precision).startswith(name)), torch.float32)
    peak = get_available_flops(device, dtype)
    return peak * trainer.world_size if peak else None


def model_flops(trainer: Trainer, module: LightningModule, tokens_per_second: float) -> float | None:
    """Share of the devices' peak that the model's own operations use (MFU), None where the peak is not known."""
    peak = peak_flops(trainer)
    if peak is None:
        return None
    # A sharded parameter has its whole size here.
    parameters = sum(parameter.numel() for parameter in module.model.parameters())
    return tokens_per_second * flops_per_token(module.model.config, parameters) / peak


def duration(seconds: float) -> str:
    """In the unit that a person would use."""
    if seconds < 90:
        return f"{seconds:.0f} s"
    if seconds < 5_400:
        return f"{seconds / 60:.0f} min"
    return f"{seconds / 3600:.1f} h"
