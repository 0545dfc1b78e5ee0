r"""Documents <-> the .bin and .idx files of Megatron-LM.

    NAME.bin    the ids of all sequences, one after the other
    NAME.idx    offset  size  field
                0       9     magic                b"MMIDIDX\0\0"
                9       8     version              1
                17      1     kind of id           see DTYPES
                18      8     sequences  n
                26      8     documents  m         one more than there are: the last is where they end
                34      4 n   length of each sequence, int32
                -       8 n   where each begins in the .bin, in bytes, int64
                -       8 m   first sequence of each document, int64

Written here, a document is one sequence. Source: `megatron/core/datasets/indexed_dataset.py` of Megatron-LM.
"""

import struct
from array import array
from collections.abc import Iterable, Iterator
from pathlib import Path

import numpy as np

from packhorse.cache import store
from packhorse.corpus.files import probe_file, unreadable
from packhorse.errors import SourceError

MAGIC = b"MMIDIDX\0\0"
HEADER = struct.Struct("<9sQBQQ")
DTYPES = {1: "u1", 2: "i1", 3: "<i2", 4: "<i4", 5: "<i8", 8: "<u2"}
LARGEST_16 = 65_500
"""With a smaller vocabulary Megatron stores ids in 16 bits."""


def write_megatron(documents: Iterable[np.ndarray], prefix: Path, vocab_size: int) -> tuple[int, int]:
    """Write `prefix`.bin and `prefix`.idx; of the documents only their lengths are kept in memory.

    Returns:
        Documents and tokens.
    """
    code = 8 if vocab_size < LARGEST_16 else 4
    dtype = np.dtype(DTYPES[code])
    lengths = array("i")

    def parts() -> Iterator[bytes]:
        for document in documents:
            lengths.append(len(document))
            yield document.astype(dtype).tobytes()

    store.make_folder(prefix.parent)
    store.replace(_file(prefix, ".bin"), parts())
    sizes = np.frombuffer(lengths, np.int32).astype("<i4") if lengths else np.empty(0, "<i4")
    pointers = (np.cumsum(sizes, dtype="<i8") - sizes) * dtype.itemsize
    header = HEADER.pack(MAGIC, 1, code, len(sizes), len(sizes) + 1)
    index = [header, sizes.tobytes(), pointers.tobytes(), np.arange(len(sizes) + 1, dtype="<i8").tobytes()]
    store.replace(_file(prefix, ".idx"), index)
    return len(sizes), int(sizes.sum(dtype=np.int64))


class MegatronDocuments:
    """Iterates over the documents of a .bin and .idx pair, as ids: a source.

    Args:
        path: The .bin or the .idx file, or what both begin with.

    Raises:
        SourceError: the files are missing, cut off, or not of this form.
    """

    def __init__(self, path: str | Path) -> None:
        prefix = Path(path).expanduser()
        self.prefix = prefix.with_suffix("") if prefix.suffix in (".bin", ".idx") else prefix
        self.dtype, self.starts, self.lengths, self.documents = _read_index(self.prefix)
        self.text_bytes = 4 * int(self.lengths.sum(dtype=np.int64))

    @property
    def fingerprint(self) -> str:
        """Of the content of both files."""
        return " ".join(probe_file(_file(self.prefix, suffix))[1] for suffix in (".bin", ".idx"))

    def __iter__(self) -> Iterator[np.ndarray]:
        with _file(self.prefix, ".bin").open("rb") as file:
            for first, stop in zip(self.documents[:-1].tolist(), self.documents[1:].tolist(), strict=True):
                sequences = []
                for number in range(first, stop):
                    file.seek(int(self.starts[number]))
                    data = file.read(int(self.lengths[number]) * self.dtype.itemsize)
                    if len(data) != int(self.lengths[number]) * self.dtype.itemsize:
                        raise SourceError(f"{_file(self.prefix, '.bin')} is cut off.")
                    sequences.append(np.frombuffer(data, self.dtype))
                yield np.concatenate(sequences) if sequences else np.empty(0, self.dtype)


def _file(prefix: Path, suffix: str) -> Path:
    return prefix.with_name(prefix.name + suffix)


def _read_index(prefix: Path) -> tuple[np.dtype, np.ndarray, np.ndarray, np.ndarray]:
    path = _file(prefix, ".idx")
    try:
        data, size = path.read_bytes(), _file(prefix, ".bin").stat().st_size
    except OSError as error:
        raise unreadable(error, prefix, "*.idx") from None
    magic, version, code, count, num_documents = HEADER.unpack_from(data) if len(data) >= HEADER.size else (b"",) * 5
    if magic != MAGIC or version != 1 or code not in DTYPES:
        raise SourceError(f"{path} is not an index of Megatron-LM, or of ids that are no whole numbers.")
    ends = [HEADER.size + width for width in (4 * count, 12 * count, 12 * count + 8 * num_documents)]
    # Behind them there may be one byte a sequence: its mode.
    if len(data) not in (ends[2], ends[2] + count):
        raise SourceError(f"{path} has {len(data)} bytes; its header promises {ends[2]}: it is cut off or damaged.")
    dtype = np.dtype(DTYPES[code])
    lengths = np.frombuffer(data, "<i4", count, HEADER.size)
    starts = np.frombuffer(data, "<i8", count, ends[0])
    documents = np.frombuffer(data, "<i8", num_documents, ends[1])
    stops = starts + lengths.astype(np.int64) * dtype.itemsize
    is_sound = (lengths >= 0).all() and (starts >= 0).all() and (stops <= size).all() and (stops >= 0).all()
    if (
        not is_sound
        or not num_documents
        or documents[0] != 0
        or documents[-1] != count
        or (np.diff(documents) < 0).any()
    ):
        raise SourceError(
            f"{path} does not fit {_file(prefix, '.bin')} of {size} bytes: one of them is cut off or damaged."
        )
    return dtype, starts, lengths, documents
