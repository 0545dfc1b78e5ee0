"""A cache that grows while it is read: a builder in a process of its own, and the chunks that are there so far."""

import fcntl
import json
import os
import shutil
import subprocess
import sys
import tempfile
import threading
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path

import psutil

from packhorse.cache import store
from packhorse.cache.plan import Plan
from packhorse.cache.recipe import read_identity
from packhorse.cache.settings import CacheSettings
from packhorse.cache.snapshot import Index
from packhorse.cache.suspects import Suspects
from packhorse.cache.update import update_cache
from packhorse.errors import CacheError, PackhorseError, SettingsError


class BackgroundBuilder:
    """Brings caches up to date in another process, which ends with this one.

    Args:
        settings: The caches, in the order in which they are built.

    Raises:
        SettingsError: A source exists in this process only.
    """

    def __init__(self, settings: Sequence[CacheSettings]) -> None:
        try:
            data = json.dumps([asdict(each) for each in settings], default=os.fspath)
        except TypeError as error:
            raise SettingsError(
                f"The source cannot be read by another process ({error}).\nBuild the cache before training: leave "
                "`start_after_chunks` out."
            ) from None
        self._errors = tempfile.TemporaryFile()
        self._process = subprocess.Popen(
            [sys.executable, "-c", "from packhorse.cache.background import build; build()"],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=self._errors,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)},
            start_new_session=True,  # Ctrl-C is for the training: it decides what becomes of its builder
        )
        assert self._process.stdin is not None
        self._process.stdin.write(data.encode() + b"\n")
        self._process.stdin.flush()

    @property
    def status(self) -> int | None:
        """None while there is more to come, 0 when all is built, else it failed."""
        return self._process.poll()

    def error(self) -> CacheError:
        """Why it failed, in its own words."""
        self._errors.seek(0)
        said = self._errors.read()[-2_000:].decode(errors="replace").strip()
        return CacheError(f"The builder beside this training failed:\n{said or 'It was killed.'}")

    def stop(self) -> None:
        """End it; what was committed stays."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait()


class Lease:
    """Keeps a folder of temporary caches for as long as a process of some run uses it.

    Args:
        folder: The root of the caches.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        while not self._take():
            pass

    def release(self, remove: bool) -> None:
        """Give it up; with `remove`, nothing stays once the last one has given it up."""
        try:
            if remove:
                fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                # At once out of the way of a run that begins now.
                shutil.rmtree(store.put_aside(self._folder), ignore_errors=True)
        except (BlockingIOError, FileNotFoundError):
            pass  # others are still at work, and the last of them removes it; or somebody else has
        finally:
            self._file.close()

    def _take(self) -> bool:
        """Lock the file in the folder; False if the last user before removed both meanwhile."""
        path = self._folder / "in-use"
        with suppress(FileNotFoundError):
            store.make_folder(self._folder)
            store.note(path, b"", over=False)
            self._file = path.open("rb")
            fcntl.flock(self._file, fcntl.LOCK_SH)
            return os.path.samestat(os.fstat(self._file.fileno()), path.stat())
        return False


def build() -> None:
    """What the other process does: build what its input says, and end when the input ends."""
    settings = [CacheSettings(**each) for each in json.loads(sys.stdin.buffer.readline())]
    threading.Thread(target=_end_with_parent, daemon=True).start()
    try:
        for each in settings:
            update_cache(each, quiet=True)
    except PackhorseError as error:
        print(f"{type(error).__name__}: {error}", file=sys.stderr)
        raise SystemExit(2) from None


def take_up(folder: Path) -> int:
    """Put committed chunks that follow without a gap into the index; how many chunks it has now."""
    plan, index = Plan(folder), Index(folder)
    index.extend(plan.num_chunks, Suspects(folder).trust(plan, read_identity(folder).recipe.digest))
    return index.num_chunks


def _end_with_parent() -> None:
    os.read(0, 1)  # not through `sys.stdin`, whose lock would hinder an orderly end
    workers = psutil.Process().children()
    for worker in workers:
        worker.kill()
    psutil.wait_procs(workers)  # who removes the caches next must meet nobody who still writes
    os._exit(1)
