"""Documents <-> the .ds files of datatrove, which nanotron's Nanoset reads.

    NAME.ds             the ids of all documents, one after the other, 2 or 4 bytes each
    NAME.ds.index       where each document ends, in tokens, uint64
    NAME.ds.metadata    three lines of text: tokenizer|bytes of an id, tokens, tokens for people

Source: `datatrove/pipeline/tokens/tokenizer.py`.
"""

from array import array
from collections.abc import Iterable, Iterator
from pathlib import Path

import numpy as np

from packhorse.cache import store
from packhorse.corpus.files import probe_file, unreadable
from packhorse.errors import SourceError


def write_datatrove(documents: Iterable[np.ndarray], path: Path, vocab_size: int, tokenizer: str) -> tuple[int, int]:
    """Write `path` (NAME.ds) and the two files beside it.

    Returns:
        Documents and tokens.
    """
    dtype = np.dtype("<u2" if vocab_size <= 2**16 else "<u4")
    ends = array("Q")

    def parts() -> Iterator[bytes]:
        total = 0
        for document in documents:
            total += len(document)
            ends.append(total)
            yield document.astype(dtype).tobytes()

    store.make_folder(path.parent)
    store.replace(path, parts())
    store.replace(_beside(path, ".index"), np.frombuffer(ends, np.uint64).astype("<u8").tobytes() if ends else b"")
    total = int(ends[-1]) if ends else 0
    metadata = f"{tokenizer}|{dtype.itemsize}\n{total}\n{total / 1e6:.2f} MT"
    store.replace(_beside(path, ".metadata"), metadata.encode())
    return len(ends), total


class DatatroveDocuments:
    """Iterates over the documents of a .ds file, as ids: a source.

    Args:
        path: The .ds file; its index is beside it.
        token_bytes: Bytes of an id, where no metadata say so.

    Raises:
        SourceError: the files are missing, cut off, or do not fit.
    """

    def __init__(self, path: str | Path, token_bytes: int | None = None) -> None:
        self.path = Path(path).expanduser()
        self.dtype = np.dtype({2: "<u2", 4: "<u4"}[self._token_bytes(token_bytes)])
        try:
            index, size = _beside(self.path, ".index").read_bytes(), self.path.stat().st_size
        except OSError as error:
            raise unreadable(error, self.path, "*.ds") from None
        self.ends = np.frombuffer(index[: len(index) // 8 * 8], "<u8").astype(np.int64)
        total = int(self.ends[-1]) if len(self.ends) else 0
        if len(index) % 8 or (np.diff(self.ends, prepend=0) < 0).any() or size != total * self.dtype.itemsize:
            raise SourceError(
                f"{self.path} has {size} bytes; its index promises {total} ids of {self.dtype.itemsize} bytes.\n"
                "One of them is cut off or damaged, or `token_bytes` is another."
            )
        self.text_bytes = 4 * total

    @property
    def fingerprint(self) -> str:
        """Of the content."""
        return " ".join(probe_file(path)[1] for path in (self.path, _beside(self.path, ".index")))

    def __iter__(self) -> Iterator[np.ndarray]:
        with self.path.open("rb") as file:
            for length in np.diff(self.ends, prepend=0).tolist():
                data = file.read(length * self.dtype.itemsize)
                if len(data) != length * self.dtype.itemsize:
                    raise SourceError(f"{self.path} is cut off.")
                yield np.frombuffer(data, self.dtype)

    def _token_bytes(self, given: int | None) -> int:
        try:
            text = _beside(self.path, ".metadata").read_text(encoding="utf-8")
            found = text.splitlines()[0].rpartition("|")[2]
        except (OSError, UnicodeDecodeError, IndexError):
            found = ""
        size = given or (int(found) if found.isdigit() else 2)
        if size not in (2, 4):
            raise SourceError(f"Ids of {self.path} have 2 or 4 bytes, not {size}.")
        return size


def _beside(path: Path, suffix: str) -> Path:
    return path.with_name(path.name + suffix)
