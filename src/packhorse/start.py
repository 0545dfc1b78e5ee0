"""A quick start: imports without searches for garbage, and libraries that take no more than a build needs."""

import gc
import os
from collections.abc import Iterator
from contextlib import contextmanager


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
