"""A cache -> its documents as ids: what `repack` builds from, and `export` writes."""

from collections.abc import Iterator
from pathlib import Path

import numpy as np

from packhorse.cache.cache import Cache
from packhorse.cache.reader import Split
from packhorse.cache.restore import restore


class CachedDocuments:
    """Iterates over the documents of a cache, in its order, as ids with BOS and EOS as they were stored.

    A source: `source: {class_path: packhorse.cache.cached.CachedDocuments, init_args: {folder: runs/cache/...}}`.

    Args:
        folder: The cache.
        split: Only the documents of one side; by default all.
    """

    is_final = True
    """What `long_documents: truncate` has cut off has no EOS, and gets none."""

    def __init__(self, folder: str | Path, split: Split | None = None) -> None:
        self.cache, self.split = Cache(folder), split

    @property
    def fingerprint(self) -> str:
        """Equal for equal documents."""
        return f"{self.cache.snapshot.digest} {self.split or 'all'}"

    @property
    def text_bytes(self) -> int:
        """Four a token, as for all sources of ids."""
        totals = self.cache.snapshot.totals
        return 4 * (totals.train_tokens + totals.eval_tokens)

    def __iter__(self) -> Iterator[np.ndarray]:
        for chunk in range(self.cache.snapshot.num_chunks):
            restored = restore(self.cache.chunk(chunk), self.cache.recipe)
            for number, is_eval in enumerate(restored.is_eval.tolist()):
                if self.split is None or is_eval == (self.split == "eval"):
                    yield restored.document(number)
