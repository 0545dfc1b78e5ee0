"""Engines that gave wrong ids: what they made is out of use until it is built again.

suspects/<engine>.json    the engine, and the text that it got wrong
"""

import re
from collections.abc import Callable
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from packhorse.cache import store
from packhorse.cache.plan import Plan
from packhorse.cache.record import Record, chunk_path, read_record, record_path
from packhorse.errors import EngineMismatch


class Suspects:
    """The suspect engines of a cache.

    Args:
        folder: The cache.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def engines(self) -> set[str]:
        """Name and version of each, as records have them."""
        root = self.folder / "suspects"
        return {str(store.read_sealed(path).get("engine")) for path in root.glob("*.json")} if root.is_dir() else set()

    def trust(self, plan: Plan, recipe_digest: str) -> Callable[[Record], bool]:
        """Whether a record is of this plan and recipe, by an engine that was never wrong: what an index takes up."""
        engines = self.engines()
        return lambda record: (
            record.recipe == recipe_digest
            and record.ranges == plan.entry(record.chunk)
            and record.engine not in engines
        )

    def add(self, error: EngineMismatch) -> None:
        """Remember an engine that was wrong, and the text."""
        store.make_folder(self.folder / "suspects")
        name = re.sub(r"[^A-Za-z0-9.]+", "-", error.engine)
        value = {"engine": error.engine, "text": error.text.encode("utf-8", "surrogatepass").hex()}
        store.publish(self.folder / "suspects" / f"{name}.json", store.seal(value))

    def instead_of(self, engine: str) -> str:
        """What may tokenize: what the settings say, but for an engine that was wrong before."""
        if engine != "hf":
            with suppress(PackageNotFoundError):
                if f"fastokens {version('fastokens')}" in self.engines():
                    return "hf"
        return engine

    def put_out_of_use(self, chunk: int) -> None:
        """Move a chunk and its record into quarantine, the record first: it must not be found again."""
        with suppress(FileNotFoundError):  # another process was faster
            record = read_record(self.folder, chunk)
            store.quarantine(record_path(self.folder, chunk), self.folder)
            store.quarantine(chunk_path(self.folder, chunk, record.file_sha256), self.folder)
