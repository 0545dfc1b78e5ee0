"""The peer of `bench_read.py` that also stores chunks: litdata, with its loader of tokens.

`optimize` writes the rows as raw ids, in chunks of as many rows as ours have by default; `StreamingDataset` gives a row
by its number. Nothing is compressed and no checksum is verified there: it has none. Needs `pip install litdata`.
"""

from collections.abc import Callable, Iterator
from functools import partial
from importlib.util import find_spec
from pathlib import Path

import numpy as np

ROWS_PER_CHUNK = 8_000
"""As `sequences_per_chunk` by default."""


def is_installed() -> bool:
    """Whether litdata can be imported."""
    return find_spec("litdata") is not None


def write_rows(raw: np.memmap, folder: Path) -> Callable[[np.ndarray], np.ndarray]:
    """Store rows as litdata does, and open them.

    Args:
        raw: [rows, sequence_length].
        folder: Where to; does not exist yet.

    Returns:
        Numbers of rows -> the rows, one below the other.
    """
    from litdata import StreamingDataset, TokensLoader, optimize

    length = raw.shape[1]
    optimize(
        partial(_rows, str(raw.filename), raw.dtype.str, raw.shape),
        [0],
        str(folder),
        num_workers=1,
        chunk_size=ROWS_PER_CHUNK * length,
        item_loader=TokensLoader(block_size=length),
    )
    data = StreamingDataset(str(folder), item_loader=TokensLoader(block_size=length))
    return lambda numbers: np.stack([data[int(number)] for number in numbers])


def _rows(path: str, dtype: str, shape: tuple[int, int], _: int) -> Iterator[np.ndarray]:
    for row in np.memmap(path, dtype, "r", shape=shape):
        yield np.array(row)
