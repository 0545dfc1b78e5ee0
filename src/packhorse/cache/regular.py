"""A name in a cache -> the bytes of a regular file, whatever may lie there instead.

A symbolic link could lead anywhere, opening a pipe would wait for ever, and a file may be larger than the memory.
"""

import errno
import os
import stat
from collections.abc import Iterator
from pathlib import Path

from packhorse.errors import CacheCorruptionError

_FLAGS = os.O_RDONLY | os.O_CLOEXEC | getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_NONBLOCK", 0)


def open_file(path: Path) -> int:
    """A descriptor for reading a file of a cache.

    Raises:
        FileNotFoundError: there is no such file.
        CacheCorruptionError: it is something else.
    """
    try:
        descriptor = os.open(path, _FLAGS)
    except (FileNotFoundError, NotADirectoryError):
        raise
    except OSError as error:
        if error.errno == errno.ELOOP:
            raise CacheCorruptionError(f"{path} is a symbolic link, and those are not followed.") from None
        raise CacheCorruptionError(f"{path} cannot be opened: {error.strerror}.") from None
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise CacheCorruptionError(f"{path} is not a file.")
    return descriptor


def file_size(path: Path) -> int:
    """Bytes of a file of a cache, as `open_file` would find it; -1 for something that is no file.

    Raises:
        FileNotFoundError: there is nothing.
    """
    found = path.lstat()
    return found.st_size if stat.S_ISREG(found.st_mode) else -1


def read_file(path: Path, most: int) -> bytes:
    """The first bytes of a file of a cache, at most so many.

    Raises:
        FileNotFoundError, CacheCorruptionError: as `open_file`.
    """
    with open(open_file(path), "rb") as file:
        return file.read(most)


def read_parts(path: Path) -> Iterator[bytes]:
    """A file of a cache, a part at a time.

    Raises:
        FileNotFoundError, CacheCorruptionError: as `open_file`.
    """
    with open(open_file(path), "rb") as file:
        while part := file.read(2**20):
            yield part
