"""What ends a training -> words, and an exit status.

Errors of torch that a user can mend become errors of ours. When this process fails alone, the processes that Lightning
has started from it are ended too: they would wait for it until the time limit of the process group.
"""

import contextlib
import re
import signal
from collections.abc import Iterator

import torch
from lightning import Trainer
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch.distributed import DistNetworkError

from packhorse.errors import DeviceMemoryError, PackhorseError, PortInUseError, RankError, SettingsError
from packhorse.training.ranks import is_watched
from packhorse.training.signals import Stopped

_LOST = re.compile(r"connection (closed|reset|refused)|broken pipe|timed out waiting|remote process exited", re.I)


@contextlib.contextmanager
def explained(trainer: Trainer, micro_batch: int, checkpointing: bool) -> Iterator[None]:
    """Turn what ends a training into something that helps.

    Args:
        trainer: The Trainer that runs inside.
        micro_batch: Sequences of a micro-batch.
        checkpointing: Whether activations are computed twice instead of kept.
    """
    try:
        try:
            yield
        except MisconfigurationException as error:
            raise SettingsError(str(error)) from error
        except torch.OutOfMemoryError as error:
            raise DeviceMemoryError(_advice(error, trainer, micro_batch, checkpointing)) from error
        except RuntimeError as error:
            raise _in_words(error) or error from error
    except BaseException as error:
        agreed = isinstance(error, Stopped | RankError) or getattr(error, "is_shared", False)
        if not agreed:
            _end_others(trainer)
        if torch.distributed.is_initialized():
            torch.distributed.destroy_process_group()  # its threads would abort the interpreter
        if agreed and is_watched(trainer):
            raise SystemExit(0) from error  # the first process speaks for those that it watches
        raise


def _in_words(error: RuntimeError) -> PackhorseError | None:
    text = str(error)
    if isinstance(error, DistNetworkError) and "EADDRINUSE" in text:
        port = re.search(r"port: (\d+)", text)
        return PortInUseError(
            f"The port {port[1] if port else ''} by which the processes of a training find each other is in use on "
            "this machine: another training, perhaps one that is still ending, has it.\nLet it end, or set the "
            "environment variable MASTER_PORT to another number (`torchrun --master_port`)."
        )
    if torch.distributed.is_initialized() and _LOST.search(text):
        return RankError(
            "Another process of this training has ended; its own message tells why.\n"
            f"What this one met: {text.splitlines()[0][:200]}"
        )
    return None


def _advice(error: torch.OutOfMemoryError, trainer: Trainer, micro_batch: int, checkpointing: bool) -> str:
    accumulation = trainer.accumulate_grad_batches
    ways = []
    if micro_batch > 1:
        ways.append(
            f"`--data.micro_batch_size {micro_batch // 2} --trainer.accumulate_grad_batches "
            f"{accumulation * micro_batch // (micro_batch // 2)}`: the same global batch in smaller parts "
            f"(now {micro_batch} and {accumulation})"
        )
    if not checkpointing:
        ways.append("`--model.gradient_checkpointing true`: activations are computed twice instead of kept")
    if trainer.precision == "32-true":
        ways.append("`--trainer.precision bf16-mixed`: activations of half the size")
    ways.append(
        "PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True in the environment: less lost between the parts of memory"
    )
    return (
        f"The device is out of memory in step {trainer.global_step:,}: {str(error).splitlines()[0][:300]}\n"
        "What helps, the first first:\n" + "\n".join(f"  {way}" for way in ways)
    )


def _end_others(trainer: Trainer) -> None:
    for process in getattr(trainer.strategy.launcher, "procs", []):
        if process.poll() is None:
            process.send_signal(signal.SIGKILL)
