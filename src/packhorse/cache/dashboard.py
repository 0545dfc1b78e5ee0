"""The figures of a build -> TensorBoard: `tensorboard --logdir <cache>/log` while it goes on."""

import os
import time
from pathlib import Path


class Dashboard:
    """Writes event files, one folder a builder. A build that is over soon never loads TensorBoard's library.

    Args:
        folder: The cache.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder / "log" / f"build-{time.strftime('%Y%m%d-%H%M%S')}-{os.getpid()}"
        self._writer = None

    def show(self, values: dict[str, float], step: int) -> None:
        """Add a point to every curve.

        Args:
            values: Name of the curve -> value.
            step: Seconds since the build began.
        """
        if self._writer is None:
            from tensorboard.summary import Writer  # neither torch nor tensorflow

            self._writer = Writer(str(self.folder))
        for name, value in values.items():
            self._writer.add_scalar(f"build/{name}", value, step)
        self._writer.flush()

    def close(self) -> None:
        """Write what is left."""
        if self._writer is not None:
            self._writer.close()
            self._writer = None
