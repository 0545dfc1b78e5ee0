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
import shutil
import socket
import zipfile
from collections.abc import Callable, Iterator
from contextlib import suppress
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
    """Let `link` lead to `path` from now on; there is no instant at which it leads nowhere.

    Where the disk knows no symbolic links it is a hard link, or else a copy. Only a folder of shards that is a copy is
    gone for an instant: a folder cannot be replaced at once.
    """
    temporary, old = _temporary(link.parent), _temporary(link.parent)
    with disk_errors(link):
        try:
            _make_link(path, temporary)
            if link.is_dir() and not link.is_symlink():
                os.rename(link, old)
            os.replace(temporary, link)
        finally:
            _remove(temporary)
            _remove(old)
        sync_folder(link.parent)


def is_link(path: Path) -> bool:
    """Whether `path` was made by `link_checkpoint`: also hard links and copies have the time of what they lead to."""
    if path.is_symlink() or not path.exists():
        return path.is_symlink()
    times = {other: other.stat().st_mtime_ns for other in path.parent.glob("*.ckpt") if other.exists()}
    return any(time == times[path] for other, time in times.items() if other != path)


def remove_dead(folder: Path) -> None:
    """Remove the temporary files of writers on this machine that died: each is as large as a checkpoint."""
    for path in folder.glob(f"{_TEMPORARY}{socket.gethostname()}-*"):
        writer = path.name.split("-")[-2]
        if writer.isdecimal() and not _is_alive(int(writer)):
            _remove(path)


def _make_link(path: Path, link: Path) -> None:
    with suppress(OSError):
        return os.symlink(os.path.relpath(path, link.parent), link)
    with suppress(OSError):
        return os.link(path, link)
    return _copy(path, link)


def _copy(path: Path, copy: Path) -> None:
    if path.is_dir():
        copy.mkdir()
        for inner in path.iterdir():
            _copy(inner, copy / inner.name)
        sync_folder(copy)
    else:
        shutil.copyfile(path, copy)
        with copy.open("rb") as file:
            os.fsync(file.fileno())
    times = path.stat()
    os.utime(copy, ns=(times.st_atime_ns, times.st_mtime_ns))


def _remove(path: Path) -> None:
    shutil.rmtree(path) if path.is_dir() and not path.is_symlink() else path.unlink(missing_ok=True)


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
