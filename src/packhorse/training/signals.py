"""A signal -> a checkpoint and a clean end, on all ranks after the same optimizer step.

    SIGINT (Ctrl-C)   save and stop, exit status 130; pressed again: stop at once, without saving
    SIGTERM           save and stop, 143
    SIGUSR1           save, hand the job back to Slurm's queue, stop, 138

A handler only remembers the signal. After every optimizer step the ranks tell each other what they received, on a
process group of their own, and read the answer after the next step: nobody waits, and all read the same. (A handler
that talks to other ranks itself, as Lightning's does, meets them in the middle of another collective: in six of eight
real kills such a run hung until the time limit of the process group, or lost its state.)

A signal during validation is acted upon after the next step; before the first step signals do what they always do.
"""

import os
import re
import signal
import subprocess
import threading
import time

import torch
import torch.distributed as dist
from lightning import Callback, LightningModule, Trainer

from packhorse.cache.progress import say
from packhorse.training.checkpoints import recovery_of

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)
AGAIN_SECONDS = 1.0
"""A second Ctrl-C counts from here on: launchers pass on what the terminal has sent to all processes already."""


class Stopped(SystemExit):
    """A run that was told to stop, and has saved its state."""

    def __init__(self, signum: int) -> None:
        super().__init__(128 + signum)
        self.signum = signal.Signals(signum)


class StopSignals(Callback):
    """Ends a training that is told to stop, with a checkpoint if there is a `RecoveryCheckpoint`."""

    def __init__(self) -> None:
        self._received = self._step = 0
        self._received_at = 0.0
        self._group: dist.ProcessGroup | None = None
        self._votes: torch.Tensor | None = None
        self._vote: dist.Work | None = None

    def on_sanity_check_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Take over from Lightning's handlers as soon as they are there."""
        self._listen(trainer)

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Listen to signals, and prepare to agree on them."""
        self._listen(trainer)
        self._step = trainer.global_step
        if trainer.world_size > 1:
            self._group = dist.new_group(backend="gloo")
            # Ours replaces Lightning's question to rank 0, which stops the device after every micro-batch.
            trainer.fit_loop.epoch_loop._broadcast_sigterm_tensor = lambda: None

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, outputs, batch, batch_idx: int) -> None:
        """After an optimizer step: stop if all ranks know that one of them was told to."""
        if trainer.global_step == self._step:
            return
        self._step = trainer.global_step
        if signum := self._agreed():
            _stop(trainer, signum)

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Leave no question open."""
        if self._vote is not None:
            self._vote.wait()

    def _listen(self, trainer: Trainer) -> None:
        if threading.current_thread() is threading.main_thread():
            for signum in SIGNALS:
                signal.signal(signum, self._receive)  # Lightning restores what was there before

    def _receive(self, signum: int, frame) -> None:
        if self._received == signum == signal.SIGINT and time.monotonic() - self._received_at > AGAIN_SECONDS:
            raise KeyboardInterrupt
        if not self._received:
            self._received, self._received_at = signum, time.monotonic()
            again = "; Ctrl-C again: at once, without saving" if signum == signal.SIGINT else ""
            os.write(2, f"\n{signal.Signals(signum).name}: stopping after this step{again}.\n".encode())

    def _agreed(self) -> int:
        """The signal that any rank had received one step ago; alone, what was received now."""
        if self._group is None:
            return self._received
        if self._vote is not None:
            self._vote.wait()
            if agreed := int(self._votes):
                self._vote = None
                return agreed
        self._votes = torch.tensor(self._received, dtype=torch.int32)
        self._vote = dist.all_reduce(self._votes, dist.ReduceOp.MAX, group=self._group, async_op=True)
        return 0


def _stop(trainer: Trainer, signum: int) -> None:
    started = time.monotonic()
    recovery = recovery_of(trainer)
    for callback in recovery:
        callback.save_now(trainer)
    if trainer.is_global_zero:
        saved = f"Saved in {time.monotonic() - started:.1f} s." if recovery else "This run saves no checkpoints."
        say(saved)
        if signum == signal.SIGUSR1:
            _requeue()
    raise Stopped(signum)


def _requeue() -> None:
    """Ask Slurm to start the job again, if this is one."""
    job = os.environ.get("SLURM_ARRAY_JOB_ID", os.environ.get("SLURM_JOB_ID", ""))
    if "SLURM_ARRAY_JOB_ID" in os.environ:
        job += f"_{os.environ.get('SLURM_ARRAY_TASK_ID', '')}"
    if not re.fullmatch(r"\d+(_\d+)?", job):
        return
    try:
        subprocess.run(["scontrol", "requeue", job], check=True, timeout=60)
        say(f"Handed job {job} back to Slurm's queue.")
    except (OSError, subprocess.SubprocessError) as error:
        say(f"Slurm did not take job {job} back: {error}. Submit it again; it goes on with `--ckpt_path last`.")
