"""The built-in sample corpus: text that every installation already has.

Python sources of the standard library, topped up from installed dependencies, about 20 MB. It is good for trying
things out: real, structured, with long documents and long-range references, and nothing has to be downloaded.
"""

import hashlib
import sysconfig
from collections.abc import Iterator
from functools import cached_property
from pathlib import Path

_DEPENDENCIES = ("torch", "transformers", "datasets", "lightning", "pyarrow", "numpy", "rich", "tokenizers")
_LEFT_OUT = {"__pycache__", "test", "tests", "testing", "idlelib", "site-packages", "dist-packages", "lib2to3"}


class SampleCorpus:
    """Iterates over the sample's documents, one source file each, in an order that does not change.

    Args:
        megabytes: How much text, in units of 1,000,000 bytes.
    """

    def __init__(self, megabytes: float = 20) -> None:
        self.megabytes = megabytes

    @cached_property
    def paths(self) -> list[tuple[Path, int]]:
        """The files and their sizes."""
        wanted, chosen = self.megabytes * 1e6, []
        for path in self._candidates():
            size = path.stat().st_size
            if wanted <= 0:
                break
            if 200 <= size <= 400_000:
                chosen.append((path, size))
                wanted -= size
        return chosen

    @property
    def fingerprint(self) -> str:
        """Changes when the files do (another Python, other dependencies)."""
        digest = hashlib.sha256()
        for path, size in self.paths:
            digest.update(f"{path}\0{size}\0".encode())
        return digest.hexdigest()

    @property
    def text_bytes(self) -> int:
        """How much text there really is."""
        return sum(size for _, size in self.paths)

    def __iter__(self) -> Iterator[str]:
        for path, _ in self.paths:
            yield path.read_text(encoding="utf-8", errors="replace")

    def _candidates(self) -> Iterator[Path]:
        yield from _python_files(Path(sysconfig.get_path("stdlib")))
        for name in _DEPENDENCIES:
            yield from _python_files(Path(sysconfig.get_path("purelib")) / name)


def _python_files(folder: Path) -> Iterator[Path]:
    if not folder.is_dir():
        return
    entries = sorted(folder.iterdir())
    yield from (entry for entry in entries if entry.suffix == ".py" and entry.is_file())
    for entry in entries:
        if entry.is_dir() and entry.name not in _LEFT_OUT:
            yield from _python_files(entry)
