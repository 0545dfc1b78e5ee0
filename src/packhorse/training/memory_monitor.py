"""What gates and memories do during a run -> TensorBoard, or the numbers of it to any other logger.

    gates/      mean, share closed (below 0.1) and open (above 0.9), gradient, how far they moved beside what the
                learning rates so far allowed; histogram; heat map, one row for each layer, one column for each head
    memory/     norm, stable rank, smallest normaliser, size of reads beside local outputs, and the loss with memory
                minus the loss without on a fixed validation batch: below zero if the memory helps

`model.infini_attention.logging` attaches it, `logging_interval` is its interval. Between two intervals it costs a few
operations on the gates; at one, three forward passes over at most 8 validation rows.
"""

from typing import Any

import numpy as np
import torch
from lightning import Callback, LightningModule, Trainer
from torch import Tensor

from packhorse.models import gate_parameters, gate_values
from packhorse.models.gates import whole
from packhorse.training.gate_budget import CLOSED, OPEN
from packhorse.training.memory_facts import memory_gain, observe_memory

ROWS = 8
CELL_PIXELS = 16
COLOURS = np.array([[68, 1, 84], [59, 82, 139], [33, 145, 140], [94, 201, 98], [253, 231, 37]], np.float64)
"""From low to high; readable in grey and by the colour-blind."""


class InfiniAttentionMonitor(Callback):
    """Logs gates and memories every so many optimizer steps.

    Args:
        interval: Optimizer steps from one log to the next.
        log_grad: Also the gradient of every gate, as a histogram and a heat map.
        log_segment_acts: Also the sizes of reads and local outputs in each segment.
    """

    def __init__(self, interval: int = 100, log_grad: bool = False, log_segment_acts: bool = False) -> None:
        self.interval, self.log_grad, self.log_segment_acts = interval, log_grad, log_segment_acts
        self._step = 0
        self._spent = 0.0
        self._moved: Tensor | None = None
        self._before: Tensor | None = None
        self._batch: dict[str, Any] | None = None

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Remember where the gates are."""
        self._step = trainer.global_step
        self._before = _flat(gate_parameters(pl_module.model))
        if self._moved is None:
            self._moved = torch.zeros_like(self._before)
        self._moved = self._moved.to(self._before)
        self._batch = _fixed_batch(trainer, pl_module)

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, outputs, batch, batch_idx: int) -> None:
        """After an optimizer step: add up how far the gates moved, and log when it is time."""
        if trainer.global_step == self._step:
            return
        self._step = trainer.global_step
        now = _flat(gate_parameters(pl_module.model))
        self._moved += (now - self._before).abs()
        self._before = now
        self._spent += pl_module.balance_factor_lr * pl_module.gate_schedule.factor(self._step - 1)
        if self._step % self.interval == 0 and trainer.loggers:
            self._log(trainer, pl_module)

    def state_dict(self) -> dict[str, Any]:
        """How far the gates moved, and what the learning rates allowed, since the run began."""
        return {"spent": self._spent, "moved": None if self._moved is None else self._moved.tolist()}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go on counting."""
        self._spent = state_dict["spent"]
        self._moved = None if state_dict["moved"] is None else torch.tensor(state_dict["moved"])

    def _log(self, trainer: Trainer, pl_module: LightningModule) -> None:
        shares_LH = gate_values(pl_module.model).cpu()
        gradients_LH = _gradients(pl_module.model)
        scalars = {
            "gates/closed": (shares_LH.abs() < CLOSED).float().mean(),
            "gates/open": (shares_LH.abs() > OPEN).float().mean(),
            "gates/moved": self._moved.mean(),
            "gates/moved_most": self._moved.max(),
            "gates/budget_so_far": self._spent,
            **{f"gates/mean_{layer:02}": share for layer, share in enumerate(shares_LH.mean(1))},
        }
        pictures = {"gates": shares_LH}
        if gradients_LH is not None:
            scalars["gates/gradient"] = gradients_LH.norm()
            if self.log_grad:
                pictures["gates/gradient"] = gradients_LH
        scalars |= self._memory_scalars(trainer, pl_module)
        for logger in trainer.loggers:
            logger.log_metrics({name: float(value) for name, value in scalars.items()}, step=self._step)
            for name, values_LH in pictures.items():
                _show(logger.experiment, name, values_LH, self._step)

    def _memory_scalars(self, trainer: Trainer, pl_module: LightningModule) -> dict[str, Any]:
        if self._batch is None:
            return {}
        model, batch = pl_module.model, self._batch
        scalars: dict[str, Any] = {}
        was_training = model.training
        model.eval()
        try:
            with torch.no_grad(), trainer.precision_plugin.forward_context():
                scalars["memory/loss_gain"] = memory_gain(pl_module, batch)
                facts = observe_memory(model, batch["input_ids"])
        finally:
            model.train(was_training)
        scalars |= {
            "memory/norm": facts.norm_LG.mean(),
            "memory/stable_rank": facts.stable_rank_LG.mean(),
            "memory/least_normalizer": facts.least_normalizer_L.min(),
            "memory/read_over_local": facts.read_LN.mean() / facts.local_LN.mean(),
        }
        for layer, (norm, rank) in enumerate(zip(facts.norm_LG.mean(1), facts.stable_rank_LG.mean(1), strict=True)):
            scalars |= {f"memory/norm_{layer:02}": norm, f"memory/stable_rank_{layer:02}": rank}
        if self.log_segment_acts:
            for segment, (read, local) in enumerate(zip(facts.read_LN.mean(0), facts.local_LN.mean(0), strict=True), 1):
                scalars |= {f"segments/read_{segment:03}": read, f"segments/local_{segment:03}": local}
        return scalars


def heat_map(values_LH: Tensor) -> np.ndarray:
    """Values -> a picture, uint8 [3, height, width]: one cell each, from the lowest colour to the highest.

    Shares of memory are coloured from 0 to 1; anything with negative values from its own minimum to its maximum.
    """
    values = values_LH.numpy().astype(np.float64)
    low, high = (0.0, 1.0) if values.min() >= 0 else (values.min(), values.max())
    place = (np.clip((values - low) / max(high - low, 1e-30), 0, 1)) * (len(COLOURS) - 1)
    pixels = np.stack([np.interp(place, np.arange(len(COLOURS)), colour) for colour in COLOURS.T])
    return pixels.round().astype(np.uint8).repeat(CELL_PIXELS, axis=1).repeat(CELL_PIXELS, axis=2)


def _show(experiment: Any, name: str, values_LH: Tensor, step: int) -> None:
    """TensorBoard's writer takes pictures; other loggers got the numbers."""
    if hasattr(experiment, "add_histogram") and hasattr(experiment, "add_image"):
        experiment.add_histogram(f"{name}/histogram", values_LH, step)
        experiment.add_image(f"{name}/heat_map", heat_map(values_LH), step)


def _fixed_batch(trainer: Trainer, module: LightningModule) -> dict[str, Any] | None:
    """The first validation rows, on the device; None if there are none, or none is longer than a segment."""
    data = trainer.datamodule
    rows = min(ROWS, data.settings.micro_batch_size, data.cache.num_sequences("eval"))
    if not rows or data.plan.sequence_length <= module.model.config.infini_attention.segment_length:
        return None
    batch = module.on_before_batch_transfer(data.rows("eval")[np.arange(rows)], 0)
    return trainer.strategy.batch_to_device(batch)


def _gradients(model: torch.nn.Module) -> Tensor | None:
    gradients = [gate.grad for gate in gate_parameters(model)]
    if any(gradient is None for gradient in gradients):
        return None
    return torch.stack([whole(gradient).float().cpu() for gradient in gradients])


@torch.no_grad()
def _flat(gates: list[torch.nn.Parameter]) -> Tensor:
    return torch.cat([whole(gate).detach().float() for gate in gates])
