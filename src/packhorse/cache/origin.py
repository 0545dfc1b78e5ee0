"""A sequence of a cache -> its pieces, each with the document that it came from and that document's place."""

from dataclasses import dataclass
from pathlib import Path

import numpy as np

from packhorse.cache.cache import Cache
from packhorse.cache.locations import Locations
from packhorse.cache.plan import Plan
from packhorse.cache.reader import Split
from packhorse.cache.record import read_record
from packhorse.cache.restore import arrange
from packhorse.corpus.documents import TextFile, count_rows, find_row
from packhorse.corpus.sources import Source
from packhorse.errors import PackhorseError


@dataclass(frozen=True, kw_only=True)
class Origin:
    """A piece, and where it came from."""

    text: str
    """What its tokens mean."""
    length: int
    """Tokens."""
    chunk: int
    document: int
    """Number of the document in the chunk."""
    offset: int
    """Where the piece begins in its document, in tokens."""
    document_tokens: int
    """Of the whole document."""
    source: str
    """The key of the source."""
    path: str
    """Its file, where it was when it was planned; empty for a stream."""
    row: int
    """Row of the document in the chunk's source range, counted from 0."""
    place: str
    """`row 17`, or `byte 4096`, in the file; what is known when it cannot be read."""

    def __str__(self) -> str:
        end = self.offset + self.length
        return (
            f"tokens {self.offset} to {end - 1} of {self.document_tokens} of document {self.document} of chunk "
            f"{self.chunk}\n    {self.path or self.source}, {self.place}\n    {self.text[:300]!r}"
        )


def origins(cache: Cache, number: int, split: Split, sources: list[Source] | None = None) -> list[Origin]:
    """What a sequence is made of.

    Args:
        cache: The cache.
        number: The number of the sequence.
        split: On which side of the split.
        sources: What the settings name now; without them files are looked for where they were planned.

    Raises:
        IndexError: there is no such sequence.
    """
    chunks, rows = cache.snapshot.locate(np.array([number]), split)
    chunk = int(chunks[0])
    reader = cache.chunk(chunk)
    row = int(rows[0]) + (reader.header.num_train if split == "eval" else 0)
    tokens, pieces = reader.tokens(row), arrange(reader, cache.recipe)
    sizes = np.bincount(pieces.documents, weights=pieces.lengths - pieces.repeated).astype(int)
    finder = _Finder(cache.folder, chunk, sources)
    found = []
    for piece in np.flatnonzero(pieces.sequences == row).tolist():
        start, length, document = (int(a[piece]) for a in (pieces.starts, pieces.lengths, pieces.documents))
        document_row = int(reader.side("document_rows")[document])
        file, place = finder.find(document_row)
        found.append(
            Origin(
                text=cache.decode(tokens[start : start + length]),
                length=length,
                chunk=chunk,
                document=document,
                offset=int(pieces.offsets[piece]),
                document_tokens=int(sizes[document]),
                source=file.source if file else "",
                path=file.path if file else "",
                row=document_row,
                place=place,
            )
        )
    return found


class _Finder:
    """Finds rows of a chunk's source range in its files."""

    def __init__(self, folder: Path, chunk: int, sources: list[Source] | None) -> None:
        self.plan = Plan(folder)
        self.ranges = read_record(folder, chunk).ranges
        self._locations = Locations(self.plan, sources or [])

    def find(self, row: int):
        """The file of a row, and its place there in words."""
        left = row
        for number, start, stop in self.ranges:
            if number >= len(self.plan.files):
                return None, f"row {row}, of a file that a missing page of the plan names"
            planned = self.plan.files[number]
            if planned.kind in ("parquet", "arrow"):
                if left < stop - start:
                    return planned, f"row {planned.start + start + left}"
                left -= stop - start
                continue
            file = self._readable(number)
            if file is None:
                return planned, f"row {left} of bytes {start} to {stop - 1} (the file cannot be read here)"
            count = count_rows(file, start, stop)
            if left < count:
                return planned, f"byte {find_row(file, start, stop, left)}"
            left -= count
        return None, f"row {row}, beyond what is planned"

    def _readable(self, number: int) -> TextFile | None:
        """The file, if it is there and need not be unpacked: looking writes nothing."""
        if self.plan.files[number].packed:
            return None
        try:
            return self._locations.locate(number)
        except PackhorseError:
            return None
