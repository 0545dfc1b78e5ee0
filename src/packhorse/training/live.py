"""A run over caches that are still being built: what is new is taken up at the beginning of a step.

It is the same growth as when a run goes on from a checkpoint, only that it happens while the run goes on. All ranks
agree on what is there on all of them before they take it up. A run whose total follows the data waits before its last
step for what is still to come.
"""

import time
from collections.abc import Mapping
from dataclasses import replace

import torch
from lightning import Trainer

from packhorse.cache import Cache, CacheSettings
from packhorse.cache.background import BackgroundBuilder, take_up
from packhorse.cache.integrity import Integrity
from packhorse.cache.selection import Selection
from packhorse.cache.update import build_selection
from packhorse.errors import CacheError

EVERY_STEPS = 10
"""Between two looks for new chunks; with several ranks a look costs a small collective."""
POLL_SECONDS = 0.2


def build_first(settings: CacheSettings, chunks: int, sequences: int) -> tuple[Cache, Integrity]:
    """Build what a run over a cache can begin with.

    Filters and an uneven split may leave little or nothing of the first chunks to train on: then more of them are
    built, until there is enough or no more text.

    Args:
        settings: The cache.
        chunks: So many at least.
        sequences: Train sequences that they should have together.
    """
    built = 0
    while True:
        cache, integrity = build_selection(settings, Selection(end_chunk=chunks - 1))
        built += integrity.built
        if cache.num_sequences("train") >= sequences or cache.snapshot.num_chunks < chunks:
            return cache, replace(integrity, built=built)
        chunks = 2 * cache.snapshot.num_chunks


class LiveCaches:
    """The caches of a run, while a builder adds to them.

    Args:
        caches: By name; those of other ranks may have more or fewer chunks.
        builder: On the rank that has it.
        trainer: Of the run.
    """

    def __init__(self, caches: Mapping[str, Cache], builder: BackgroundBuilder | None, trainer: Trainer) -> None:
        self._folders = {name: cache.folder for name, cache in caches.items()}
        self._builder, self._trainer = builder, trainer

    def look(self) -> tuple[dict[str, int], bool]:
        """Chunks that all ranks have of each cache, and whether there is more to come.

        Raises:
            CacheError: The builder failed; on all ranks at once.
        """
        builder = self._builder
        status = None if builder is None else builder.status  # before the chunks: those of its last moment count
        state = [builder is not None and status not in (None, 0), builder is not None and status is None]
        counts = [take_up(folder) for folder in self._folders.values()]
        failed, running, *counts = self._agree([*map(int, state), *(-count for count in counts)])
        if failed:
            raise builder.error() if builder is not None else CacheError("The builder beside this training failed.")
        return dict(zip(self._folders, (-count for count in counts), strict=True)), bool(running)

    def wait_for(self, wanted: Mapping[str, int]) -> None:
        """Wait until the caches have so many chunks, or no more come."""
        while True:
            there, running = self.look()
            if not running or all(there.get(name, count) >= count for name, count in wanted.items()):
                return
            time.sleep(POLL_SECONDS)

    def _agree(self, values: list[int]) -> list[int]:
        """The highest of each value over all ranks."""
        if self._trainer.world_size == 1:
            return values
        tensor = torch.tensor(values, device=self._trainer.strategy.root_device)
        torch.distributed.all_reduce(tensor, torch.distributed.ReduceOp.MAX)
        return tensor.tolist()


def set_epoch_length(trainer: Trainer, batches: int) -> None:
    """Tell Lightning that its current epoch has another number of micro-batches."""
    loop = trainer.fit_loop
    loop.max_batches = batches
    if isinstance(interval := getattr(trainer, "val_check_interval", None), float):
        trainer.val_check_batch = max(1, int(batches * interval))
    if loop._data_fetcher is not None:
        loop._data_fetcher.length = batches
