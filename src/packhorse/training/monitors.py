"""What a run tells: the plan before step 1, progress where there is no terminal, and a report at the end."""

import sys
import time
from collections import deque
from pathlib import Path

import torch
from lightning import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.utilities import rank_zero_only
from lightning.pytorch.utilities.exceptions import SIGTERMException

from packhorse.cache.progress import say
from packhorse.models import gate_values
from packhorse.training.checkpoints import recovery_of
from packhorse.training.run_log import find_log
from packhorse.training.signals import Stopped
from packhorse.training.speed import duration
from packhorse.training.telling import plan_lines, report_lines

MEASURED_STEPS = 20
"""After so many steps the time that is left is told as measured, where the plan could only expect."""


REHEARSAL_SECONDS = 0.2
"""Micro-batches are tried before the run for at least so long."""


class RunReport(Callback):
    """Prints the plan before the first step and a report after the last one, in words.

    Args:
        every_seconds: Where standard error is not a terminal, a line of progress this often.
    """

    def __init__(self, every_seconds: float = 15.0) -> None:
        self.every_seconds = every_seconds
        self.command = "packhorse" if Path(sys.argv[0]).name == "packhorse" else "python main.py"
        self._first_loss: torch.Tensor | None = None
        self._recent: deque[torch.Tensor] = deque(maxlen=200)
        self._first_step = self._step = 0

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Print the plan."""
        self.entropy = trainer.datamodule.unigram_entropy()
        self._first_step = self._step = trainer.global_step
        seconds, activations = _rehearse(trainer, pl_module)
        say_once("\n".join(["", "Plan", *plan_lines(trainer, pl_module, seconds, activations), ""]))
        self._start = self._last_line = time.monotonic()

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, outputs, batch, batch_idx: int) -> None:
        """Remember the loss of a step, and say how far the run is."""
        if trainer.global_step == self._step:
            return
        self._step, loss = trainer.global_step, pl_module.step_loss
        self._first_loss = loss if self._first_loss is None else self._first_loss
        self._recent.append(loss)
        if trainer.log_every_n_steps and trainer.global_step % trainer.log_every_n_steps == 0:
            self._log(pl_module)
        done = trainer.global_step - self._first_step
        now = trainer.progress_bar_callback is None and time.monotonic() - self._last_line >= self.every_seconds
        if now or done == MEASURED_STEPS:
            self._last_line = time.monotonic()
            say_once(self._progress(trainer))

    def on_fit_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Print the report, when the last checkpoint is written."""
        if self._first_loss is None:
            total = trainer.datamodule.plan.steps
            say_once(
                f"Nothing was trained: the run is in step {trainer.global_step:,} of {total:,}. "
                "To go on, raise what ends it (`max_epochs`, `max_steps`, `data.max_train_tokens`, "
                "`limit_train_batches`), or add text."
            )
            return
        # A live bar would paint over the report; Lightning stops it only later.
        getattr(trainer.progress_bar_callback, "_stop_progress", lambda: None)()
        lines = report_lines(
            trainer,
            pl_module,
            steps=trainer.global_step - self._first_step,
            rate=self._rate(trainer),
            first_loss=float(self._first_loss),
            last_loss=self._mean_loss(),
            entropy=self.entropy,
        )
        plan, step = trainer.datamodule.plan, trainer.global_step
        if plan.steps and not plan.is_over(step):
            lines.append(f"  ended       in step {step:,} of {plan.steps:,}: by `max_time`, a limit or a callback")
        checkpoint = _last_checkpoint(trainer)
        if checkpoint:
            lines.append(f"  checkpoint  {checkpoint}")
        if trainer.log_dir is not None:
            lines.append(f"  logs        {_relative(Path(trainer.log_dir))}")
        lines += ["", "Next"]
        if checkpoint:
            lines.append(f"  {self.command} predict --config {_config_of(trainer)} --ckpt_path {checkpoint}")
        if trainer.log_dir is not None:
            lines.append(f"  tensorboard --logdir {_relative(Path(trainer.log_dir))}")
        say_once("\n".join(["", "Report", *lines]))

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        """When the user or the system stops a run: say how it goes on."""
        if not trainer.training or not isinstance(exception, KeyboardInterrupt | SIGTERMException | Stopped):
            return
        checkpoint = _last_checkpoint(trainer)
        if checkpoint is None:
            say_once(f"Stopped in step {trainer.global_step:,}, before the first checkpoint. The cache stays.")
        else:
            say_once(
                f"Stopped in step {trainer.global_step:,}. To go on from the last checkpoint:\n"
                f"  {self.command} fit --config {_config_of(trainer)} --ckpt_path {checkpoint}"
            )

    def _log(self, pl_module: LightningModule) -> None:
        gates = gate_values(pl_module.model)
        values = {"gates/mean": gates.mean(), "gates/min": gates.min(), "gates/max": gates.max()}
        pl_module.log_dict(values, on_step=True, on_epoch=False)

    def _progress(self, trainer: Trainer) -> str:
        plan, log = trainer.datamodule.plan, find_log(trainer)
        line = f"step {plan.place(trainer.global_step)}, loss {self._mean_loss():.3f}"
        left = None if log is None else log.speed.seconds_left(plan.steps)
        if left is None:
            return line
        return f"{line}, {log.tokens_per_second(trainer):,.0f} tokens/s, {duration(left)} left"

    def _rate(self, trainer: Trainer) -> float:
        plan = trainer.datamodule.plan
        steps = trainer.global_step - self._first_step
        return steps * plan.global_batch * plan.sequence_length / max(time.monotonic() - self._start, 1e-9)

    def _mean_loss(self) -> float:
        """Over the last tenth of what is remembered, at least one and at most 20 steps."""
        count = max(1, len(self._recent) // 10)
        return float(torch.stack(list(self._recent)[-count:]).float().mean())


@rank_zero_only
def say_once(text: str) -> None:
    """Say something on the first rank only."""
    say(text)


def _rehearse(trainer: Trainer, module: LightningModule) -> tuple[float | None, int | None]:
    """Seconds and bytes of activations of one micro-batch, by trying it; leaves no trace.

    Only where nothing is wrapped around the module: a rehearsal outside of DDP or FSDP would not be the real thing.
    """
    if trainer.world_size > 1:
        return None, None
    data = trainer.datamodule
    numbers = data.next_sequences(data.settings.micro_batch_size)
    batch = module.on_before_batch_transfer(data.rows("train")[numbers], 0)
    batch = trainer.strategy.batch_to_device(batch)
    saved: dict[int, int] = {}

    def remember(tensor: torch.Tensor) -> torch.Tensor:
        saved[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    weights = {p.untyped_storage().data_ptr() for p in module.parameters()}
    seconds = []
    with torch.random.fork_rng():
        while sum(seconds) < REHEARSAL_SECONDS:  # the first one warms up; of slow ones it tells enough
            start = time.monotonic()
            with (
                trainer.precision_plugin.forward_context(),
                torch.autograd.graph.saved_tensors_hooks(remember, lambda tensor: tensor),
            ):
                nll, tokens = module(batch)
            torch.autograd.grad(nll / tokens, [p for p in module.parameters() if p.requires_grad], allow_unused=True)
            if module.device.type == "cuda":
                torch.cuda.synchronize()
            seconds.append(time.monotonic() - start)
    return min(seconds), sum(size for pointer, size in saved.items() if pointer not in weights)


def _last_checkpoint(trainer: Trainer) -> str | None:
    for callback in recovery_of(trainer) or trainer.checkpoint_callbacks:
        if isinstance(callback, ModelCheckpoint):
            path = callback.last_model_path or callback.best_model_path
            if path:
                return str(_relative(Path(path)))
    return None


def _relative(path: Path) -> Path:
    path = path.absolute()
    return path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else path


def _config_of(trainer: Trainer) -> str:
    return str(_relative(Path(trainer.log_dir or trainer.default_root_dir) / "config.yaml"))
