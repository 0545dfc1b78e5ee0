"""Lightning's checkpoints, written so that there is always a good one, and read without running anything in them."""

import pickle
from pathlib import Path
from typing import Any

import torch
from lightning.fabric.plugins.io.torch_io import TorchCheckpointIO
from lightning.fabric.utilities.load import _METADATA_FILENAME

from packhorse.errors import CheckpointCorruptError, CheckpointError
from packhorse.training.checkpoint_file import check_checkpoint, publish_checkpoint, sound_checkpoints


class CrashSafeCheckpointIO(TorchCheckpointIO):
    """Saves local checkpoints by `publish_checkpoint`; addresses with `://` are left to Lightning.

    When `save_checkpoint` returns, the file is durable and was read back: only then are older ones removed.
    """

    def save_checkpoint(self, checkpoint: dict[str, Any], path: str | Path, storage_options: Any | None = None) -> None:
        """Save a checkpoint; what was under the name before stays until the new one is safe.

        Raises:
            StorageFullError, StorageIOError: nothing was saved, and nothing was lost.
        """
        if _is_remote(path):
            super().save_checkpoint(checkpoint, path, storage_options)
        else:
            publish_checkpoint(Path(path), lambda file: torch.save(checkpoint, file))

    def load_checkpoint(
        self, path: str | Path, map_location: Any = "cpu", weights_only: bool | None = None
    ) -> dict[str, Any]:
        """Verify and load a checkpoint.

        Raises:
            CheckpointCorruptError: it is damaged; the message names the newest good one beside it.
            CheckpointError: there is none, or it holds objects that loading would have to run.
        """
        if _is_remote(path):
            return super().load_checkpoint(path, map_location, weights_only is not False)
        return load_checkpoint(Path(path), map_location, weights_only is not False)


def load_checkpoint(path: Path, map_location: Any = "cpu", weights_only: bool = True) -> dict[str, Any]:
    """Verify and load a checkpoint; see `CrashSafeCheckpointIO.load_checkpoint`."""
    try:
        check_checkpoint(path)
        return torch.load(path, map_location=map_location, weights_only=weights_only)
    except FileNotFoundError:
        raise CheckpointError(f"The checkpoint {path} does not exist.\n{_advice(path)}") from None
    except CheckpointCorruptError as error:
        raise CheckpointCorruptError(f"{error}\n{_advice(path)}") from None
    except pickle.UnpicklingError as error:
        raise CheckpointError(
            f"The checkpoint {path} holds more than tensors and plain values, and loading it would run code of its "
            f"maker: {str(error).splitlines()[0]}\nIf you trust it, set `weights_only: false`."
        ) from error
    except (RuntimeError, ValueError, KeyError, EOFError) as error:
        raise CheckpointCorruptError(
            f"{path} is no checkpoint that torch can read: {str(error).splitlines()[0]}\n{_advice(path)}"
        ) from error


def read_outline(path: Path) -> Any:
    """What a checkpoint holds, while its tensors stay on the disk; None where only loading it will tell.

    Args:
        path: A file, or a folder of shards, where it is what stands beside them.
    """
    try:
        file = path / _METADATA_FILENAME if path.is_dir() else path
        return torch.load(file, map_location="cpu", mmap=True, weights_only=True)
    except (OSError, RuntimeError, ValueError, KeyError, EOFError, pickle.UnpicklingError):
        return None


def _advice(path: Path) -> str:
    for other in sound_checkpoints(path.parent):
        if other.resolve() != path.resolve():
            return f"The newest good one beside it is {other}: go on with `--ckpt_path {other}`."
    return f"There is no other good checkpoint in {path.parent}."


def _is_remote(path: str | Path) -> bool:
    return "://" in str(path)
