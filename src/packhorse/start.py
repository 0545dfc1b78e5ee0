"""A quick start: imports without searches for garbage, and libraries that take no more than a build needs."""

import atexit
import gc
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import NoReturn


@contextmanager
def imports() -> Iterator[None]:
    """What is imported meanwhile stays for good: looking for garbage in it takes a fifth of the start of a training."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        if was_enabled:
            gc.enable()


def set_up_libraries() -> None:
    """What the libraries of a `cache` command are to do when they are loaded, unless the user has said otherwise."""
    # numpy's threads spin when they start, and a build computes nothing that needs them.
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
    # Huge pages for Arrow: clearing the first of them takes longer than reading the first chunk.
    os.environ.setdefault("MIMALLOC_ALLOW_THP", "0")


def leave(status: int) -> NoReturn:
    """End this process without taking apart what libraries have loaded: the system takes all of it back faster."""
    atexit._run_exitfuncs()
    with suppress(BrokenPipeError):  # the reader of our output went away, as `head` does
        sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)
