"""A checkpoint on disk: it appears whole or not at all, and damage is found before anything of it is believed.

    write a private temporary file, hashing -> fsync -> read it back -> rename it to its name -> fsync the folder

    offset   bytes  what
    0        n      what `torch.save` wrote: a zip, whose readers ignore what follows it
    n        16     b"PACKHORSE-XXH128"
    n + 16   16     XXH3-128 of the first n bytes, big endian

Promises: whatever was under the name before stays there until the new file is durable and was read back; a process
that dies in between leaves a temporary file that nothing refers to. Files of others, without the last 32 bytes, are
checked by the CRCs of their zip. Needs no torch.
"""

import os
import secrets
import socket
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import BinaryIO

import xxhash

from packhorse.cache.store import disk_errors, make_folder, sync_folder
from packhorse.errors import CheckpointCorruptError

_MAGIC = b"PACKHORSE-XXH128"
_TRAILER_BYTES = len(_MAGIC) + 16
_READ_BYTES = 2**22
_TEMPORARY = ".tmp-checkpoint-"


def publish_checkpoint(path: Path, write: Callable[[BinaryIO], None]) -> None:
    """Make `path` hold what `write` writes, durably and verified; what it held before stays until then.

    Raises:
        StorageFullError, StorageIOError: nothing was published and the temporary file is gone.
        CheckpointCorruptError: what was read back is not what was written.
    """
    path = path.absolute()
    make_folder(path.parent)
    # In the same folder: a rename must not cross file systems, where it would be a copy that can be cut short.
    temporary = _temporary(path.parent)
    with disk_errors(path):
        try:
            _write(temporary, write)
            check_checkpoint(temporary)
            os.replace(temporary, path)
        except BaseException:
            temporary.unlink(missing_ok=True)
            raise
        sync_folder(path.parent)


def check_checkpoint(path: Path) -> None:
    """Read a checkpoint and verify every byte.

    Raises:
        FileNotFoundError: there is no such file.
        CheckpointCorruptError: it is damaged or cut short.
    """
    with path.open("rb") as file:
        size = os.fstat(file.fileno()).st_size
        file.seek(max(0, size - _TRAILER_BYTES))
        trailer = file.read()
        file.seek(0)
        if trailer.startswith(_MAGIC):
            sound = _hash_of(file, size - _TRAILER_BYTES) == trailer[len(_MAGIC) :]
        else:
            sound = _is_sound_zip(file)
    if not sound:
        raise CheckpointCorruptError(f"The checkpoint {path} ({size:,} bytes) is damaged or cut short.")


def is_sound(path: Path) -> bool:
    """Whether `path` is a checkpoint and every byte of it is as it was written."""
    try:
        check_checkpoint(path)
    except (OSError, CheckpointCorruptError):
        return False
    return True


def sound_checkpoints(folder: Path) -> Iterator[Path]:
    """The checkpoints of a folder that are sound, newest first; each is read when it is asked for."""
    files = [path for path in folder.glob("*.ckpt") if path.is_file() and not path.is_symlink()]
    yield from filter(is_sound, sorted(files, key=lambda path: path.stat().st_mtime_ns, reverse=True))


def link_checkpoint(path: Path, link: Path) -> None:
    """Let the symbolic link `link` lead to `path` from now on; there is no instant at which it leads nowhere."""
    temporary = _temporary(link.parent)
    with disk_errors(link):
        os.symlink(os.path.relpath(path, link.parent), temporary)
        os.replace(temporary, link)
        sync_folder(link.parent)


def remove_dead(folder: Path) -> None:
    """Remove the temporary files of writers on this machine that died: each is as large as a checkpoint."""
    for path in folder.glob(f"{_TEMPORARY}{socket.gethostname()}-*"):
        writer = path.name.split("-")[-2]
        if writer.isdecimal() and not _is_alive(int(writer)):
            path.unlink(missing_ok=True)


def _temporary(folder: Path) -> Path:
    return folder / f"{_TEMPORARY}{socket.gethostname()}-{os.getpid()}-{secrets.token_hex(8)}"


def _is_alive(process: int) -> bool:
    try:
        os.kill(process, 0)
    except (ProcessLookupError, OverflowError):
        return False
    except PermissionError:
        return True
    return True


class _HashingWriter:
    """Hashes what passes through; keeps the error of the disk, which torch replaces by one that says nothing."""

    def __init__(self, file: BinaryIO) -> None:
        self.file, self.hash, self.error = file, xxhash.xxh3_128(), None

    def write(self, data: bytes) -> int:
        try:
            self.hash.update(data)
            return self.file.write(data)
        except OSError as error:
            self.error = error
            raise

    def flush(self) -> None:
        self.file.flush()


def _write(path: Path, write: Callable[[BinaryIO], None]) -> None:
    with path.open("xb") as file:
        writer = _HashingWriter(file)
        try:
            write(writer)
        except RuntimeError as error:
            raise (writer.error or error) from error
        file.write(_MAGIC + writer.hash.digest())
        file.flush()
        os.fsync(file.fileno())


def _hash_of(file: BinaryIO, size: int) -> bytes:
    total = xxhash.xxh3_128()
    while size > 0 and (data := file.read(min(size, _READ_BYTES))):
        total.update(data)
        size -= len(data)
    return total.digest()


def _is_sound_zip(file: BinaryIO) -> bool:
    try:
        with zipfile.ZipFile(file) as content:
            return content.testzip() is None
    except (zipfile.BadZipFile, zipfile.LargeZipFile, OSError, EOFError, ValueError, RuntimeError):
        return False
