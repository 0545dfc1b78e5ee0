"""Bytes -> files that survive: the only place of the cache that writes.

A file appears under its name complete or not at all, and once it is there it never changes:

    write a private temporary file -> fsync -> link it to its name -> fsync the folder -> remove the temporary name

`os.link` fails when the name exists, so publishing is put-if-absent: of several writers one wins, and the others
learn what it wrote. After `publish` returns, the file survives a power cut. A process that dies in between leaves
only a temporary file that nothing refers to.

Small JSON files (recipe, plan pages, commit records) are canonical (sorted keys, no spaces) and carry a SHA-256
over themselves, so that a flipped bit or a hand edit is found before anything is believed.
"""

import contextlib
import errno
import hashlib
import json
import os
import secrets
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from packhorse.cache.regular import open_file, read_file
from packhorse.errors import CacheCorruptionError, StorageFullError, StorageIOError

MAX_JSON_BYTES = 256 * 2**20
"""Larger metadata files are refused unread."""

LEFTOVER_SECONDS = 24 * 3600
"""Temporary files that are older belong to nobody."""

TEMPORARY = ".tmp-"
"""What the names of temporary files begin with."""
WRITE_BYTES = 2**19
"""Parts of a file are put together until they are so many."""

_NO_SPACE = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}
_NO_HARD_LINKS = {errno.EPERM, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS, errno.EMLINK}


_durable: set[Path] = set()
"""Folders whose names this process has made safe."""


def publish(path: Path, data: bytes | Iterable[bytes | memoryview]) -> bool:
    """Make `path` hold `data`, durably, unless it exists already.

    Returns:
        True when this call made the file, False when the name was taken (its content is not looked at).

    Raises:
        StorageFullError, StorageIOError: nothing was published and the temporary file is gone.
    """
    with disk_errors(path):
        temporary = _write_temporary(path, data)
        try:
            made = _link(temporary, path)
            sync_folder(path.parent)
        finally:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(temporary)
    return made


def replace(path: Path, data: bytes | Iterable[bytes]) -> None:
    """Make `path` hold `data`, whatever it held before: for what can be rebuilt, and for files outside of caches."""
    with disk_errors(path):
        temporary = _write_temporary(path, data)
        try:
            os.replace(temporary, path)
        except OSError:
            os.unlink(temporary)
            raise
        sync_folder(path.parent)


def note(path: Path, data: bytes, *, over: bool) -> bool:
    """Make `path` hold `data` for those who look now: for hints, which a power cut may take.

    Args:
        path: The file; it appears complete or not at all.
        data: Its content.
        over: Whatever it held before; else only if it did not exist.

    Returns:
        Whether this call made the file.
    """
    with disk_errors(path):
        temporary = _write_temporary(path, data, durable=False)
        try:
            if over:
                os.replace(temporary, path)
                return True
            return _link(temporary, path)
        finally:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(temporary)


def file_in_the_way(path: Path) -> Path | None:
    """The file that stands where a folder, or one above it, would be; None if there is none."""
    above = (path, *path.absolute().parents)
    return next((part for part in above if part.exists() and not part.is_dir()), None)


def make_folder(path: Path, within: Path | None = None) -> None:
    """Create a folder and its parents, durably.

    A folder above that may be passed but not read (mode 711, as /home often has) cannot be synced by anybody but its
    owner: then the name is as safe as that system makes it, and the work goes on.

    Args:
        path: The folder.
        within: A folder above it that must be there: it is not created.

    Raises:
        FileNotFoundError: `within` is not there.
    """
    if path.is_dir():
        if path not in _durable:
            # Who made it may have died before its name was safe.
            with disk_errors(path), contextlib.suppress(PermissionError):
                sync_folder(path.parent)
            _durable.add(path)
        return
    if path == within:
        raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), str(path))
    make_folder(path.parent, within)
    with disk_errors(path):
        with contextlib.suppress(FileExistsError):
            os.mkdir(path)
        if not path.is_dir():
            raise StorageIOError(f"{path} is a file, not a folder.\nName another folder, or move the file away.")
        with contextlib.suppress(PermissionError):
            sync_folder(path.parent)
    _durable.add(path)


def quarantine(path: Path, cache_folder: Path) -> Path:
    """Move a file that must not be used into the cache's quarantine; nothing is deleted.

    Returns:
        Where it is now, unless another process has moved it already.
    """
    target = cache_folder / "quarantine" / f"{path.name}.{secrets.token_hex(4)}"
    make_folder(target.parent, cache_folder)
    with disk_errors(path), contextlib.suppress(FileNotFoundError):
        os.replace(path, target)
        sync_folder(path.parent)
        sync_folder(target.parent)
    return target


def put_aside(folder: Path) -> Path:
    """Take a folder's name from it at once, so that it can be taken apart; where it is now."""
    aside = folder.with_name(f"{TEMPORARY}{folder.name}-{secrets.token_hex(4)}")
    folder.rename(aside)
    return aside


def renameable(folder: Path) -> Path:
    """The same folder by a name that it can lose: `.` and `..` are no names, and mean another folder afterwards."""
    return folder.resolve() if folder.name in ("", "..") else folder


def holds(path: Path, sha256: str) -> bool:
    """Whether a file is there, whole, with the content of that SHA-256; what only leads to one is not it."""
    try:
        with open(open_file(path), "rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest() == sha256
    except (OSError, CacheCorruptionError):
        return False


def remove(path: Path) -> None:
    """Remove a file that can be made again (a spool, a temporary file)."""
    with disk_errors(path), contextlib.suppress(FileNotFoundError):
        os.unlink(path)


def remove_folder(path: Path) -> None:
    """Remove a folder of scratch and all that is in it; a link is not followed."""
    with disk_errors(path), contextlib.suppress(FileNotFoundError):
        for inner in sorted(path.iterdir()):
            remove_folder(inner) if inner.is_dir() and not inner.is_symlink() else remove(inner)
        os.rmdir(path)


def remove_leftovers(folder: Path) -> None:
    """Remove the temporary files of writers that died: those that are older than any writing takes."""
    for path in folder.rglob(f"{TEMPORARY}*"):
        with contextlib.suppress(FileNotFoundError):
            if path.stat().st_mtime < time.time() - LEFTOVER_SECONDS:
                remove(path)


def settle(folder: Path) -> None:
    """Make safe every name that stands in a folder or below: who gave it may have been killed before that.

    A writer removes its temporary file only after its name is safe; so where none lies, nothing needs to be done. Of
    `replace` no trace is left, so the folders of derived files are synced in any case.
    """
    with disk_errors(folder):
        for place, _, names in os.walk(folder):
            is_derived = Path(place) in (folder, folder / "index")
            if is_derived or any(name.startswith(TEMPORARY) for name in names):
                sync_folder(Path(place))


def sync_folder(path: Path) -> None:
    """Make the names in a folder durable."""
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno != errno.EINVAL:  # some file systems cannot sync a folder
            raise
    finally:
        os.close(descriptor)


@contextlib.contextmanager
def disk_errors(path: Path) -> Iterator[None]:
    """Errors of the system while `path` is written, as errors of ours."""
    try:
        yield
    except OSError as error:
        if isinstance(error, FileNotFoundError | FileExistsError):
            raise
        kind = StorageFullError if error.errno in _NO_SPACE else StorageIOError
        raise kind(
            f"Could not write {path}: {error.strerror or error}.\n"
            "What was committed before is intact. "
            + ("Free some space" if kind is StorageFullError else "Check the disk and the permissions")
            + " and run the same command again: it goes on from there."
        ) from error


def canonical(value: dict[str, Any]) -> bytes:
    """The one byte string that stands for a JSON value."""
    return json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=True, allow_nan=False).encode()


def seal(value: dict[str, Any]) -> bytes:
    """Canonical JSON of `value` with a field `sha256` over the rest."""
    return canonical({**value, "sha256": hashlib.sha256(canonical(value)).hexdigest()})


def read_sealed(path: Path, most: int = MAX_JSON_BYTES) -> dict[str, Any]:
    """The value that `seal` wrote.

    Args:
        path: The file.
        most: Refuse it unread when it has more bytes.

    Raises:
        FileNotFoundError: there is no such file.
        CacheCorruptionError: the file is not exactly what `seal` writes.
    """
    data = read_file(path, most + 1)
    try:
        if len(data) > most:
            raise ValueError(f"larger than {most} bytes")
        value = json.loads(data)
        if not isinstance(value, dict):
            raise ValueError("not a JSON object")
        seal_ = value.pop("sha256", None)
        if seal_ != hashlib.sha256(canonical(value)).hexdigest() or seal(value) != data:
            raise ValueError("its SHA-256 does not match its content")
    except (ValueError, RecursionError) as error:
        raise CacheCorruptionError(
            f"{path} is damaged: {error}.\n`packhorse cache repair` rebuilds what can be rebuilt, and says what cannot."
        ) from None
    return value


def _write_temporary(path: Path, data: bytes | Iterable[bytes | memoryview], durable: bool = True) -> Path:
    # In the same folder as `path`: a rename or link must not cross file systems.
    temporary = path.parent / f"{TEMPORARY}{os.getpid()}-{secrets.token_hex(8)}"
    descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o644)
    try:
        try:
            for part in [data] if isinstance(data, bytes) else _joined(data):
                view = memoryview(part)
                while view:
                    view = view[os.write(descriptor, view) :]
            # Never repeated after an error: the kernel forgets pages that it failed to write.
            if durable:
                os.fsync(descriptor)
        finally:
            os.close(descriptor)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(temporary)
        raise
    return temporary


def _joined(parts: Iterable[bytes | memoryview]) -> Iterator[bytes]:
    """Small parts put together, large enough that a write pays and small enough that the memory is used again."""
    waiting: list[bytes] = []
    size = 0
    for part in parts:
        waiting.append(part)
        size += len(part)
        if size >= WRITE_BYTES:
            yield b"".join(waiting)
            waiting, size = [], 0
    if waiting:
        yield b"".join(waiting)


def _link(temporary: Path, path: Path) -> bool:
    """Give a file its name, unless the name is taken."""
    while True:
        try:
            os.link(temporary, path)
            return True
        except FileExistsError:
            # A lost reply of a network file system also looks like this: the inode tells who won.
            with contextlib.suppress(FileNotFoundError):  # another process has just moved it to the quarantine
                return path.lstat().st_ino == temporary.stat().st_ino
        except OSError as error:
            if error.errno not in _NO_HARD_LINKS:
                raise
            return _publish_without_links(temporary, path)


def _publish_without_links(temporary: Path, path: Path) -> bool:
    # Not put-if-absent in the last microsecond; harmless, since all writers of one name write equal content.
    if path.exists():
        return False
    os.rename(temporary, path)
    return True
