"""The plan of a cache: which range of which file makes which chunk.

The plan is written before any token exists, so that chunks can be built in any order, by anybody. It is a row of
numbered pages. A page is never changed; it is published put-if-absent, and who loses adopts the winner's. When there
are new files, or more documents are wanted, another page is added. That is all that growth is.

    page 0   files 0, 1       chunks 0 to 4
    page 1   file  2          chunks 5 to 6      (added later)

A file is known by its content (size and probe), not by its name: a moved folder changes nothing, a file whose content
changed is refused, a text file to which lines were appended is continued.
"""

import re
from bisect import bisect_right
from dataclasses import asdict, dataclass, field
from pathlib import Path

from packhorse.cache import store
from packhorse.cache.typed import make, refuse_unless
from packhorse.corpus.files import COMPRESSIONS
from packhorse.errors import CacheCorruptionError

Range = tuple[int, int, int]
"""(file number, start, stop): rows of a table, or bytes."""


KINDS = ("parquet", "arrow", "jsonl", "line", "paragraph", "document")
PACKINGS = ("", *COMPRESSIONS, "array", "stream")

_HASH = re.compile(r"\A[0-9a-f]{64}\Z")


@dataclass(frozen=True, kw_only=True)
class PlannedFile:
    """A file as the plan knows it."""

    source: str
    """The key of its source."""
    path: str
    """Where it was when it was planned; empty for a part of a stream."""
    kind: str
    column: str
    packed: str
    """As in `SourceFile`; `stream` for a part of a stream."""
    size: int
    probe: str
    start: int = 0
    """For a part of a stream: its first document."""
    stop: int = 0
    """For a part of a stream: one past its last document."""
    is_final: bool = False
    """For a part of a stream: whether its documents have BOS and EOS where they belong."""


@dataclass(frozen=True, kw_only=True)
class Page:
    """One page of the plan."""

    format: int = 1
    page: int
    first_chunk: int
    first_file: int
    files: list[PlannedFile]
    entries: list[list[Range]]
    """For each chunk its ranges."""
    chunk_bytes: int
    """Text that a chunk was to have."""
    tokens_per_byte: float
    """As the sample showed."""
    rows: int | None
    """Rows in all entries, if they were counted."""
    finished: dict[str, str] = field(default_factory=dict)
    """Sources that were read to their end, and their fingerprints ("" for none)."""
    dropped: list[list[int]] = field(default_factory=list)
    """With `deduplicate: exact`, for each chunk the rows of documents that have a place before, in order."""
    max_tokens: int | None = None
    """The tokens that a plan with this page was to have, if that is what ended it."""


class Plan:
    """The pages of a cache's plan, as they are on disk."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.pages: list[Page] = []
        self.files: list[PlannedFile] = []
        """All files, by number."""
        self._first_chunks: list[int] = []
        self.reload()

    def reload(self) -> None:
        """Read the pages that were published since."""
        while (path := self._path(len(self.pages))).exists():
            page = read_page(path)
            if (page.page, page.first_chunk, page.first_file) != (len(self.pages), self.num_chunks, len(self.files)):
                raise CacheCorruptionError(f"{path} does not continue the page before it.")
            self.pages.append(page)
            self.files += page.files
            self._first_chunks.append(page.first_chunk)

    @property
    def num_chunks(self) -> int:
        """Chunks that are planned."""
        return self.pages[-1].first_chunk + len(self.pages[-1].entries) if self.pages else 0

    @property
    def finished(self) -> dict[str, str]:
        """Sources that were read to their end, and their fingerprints."""
        return {key: fingerprint for page in self.pages for key, fingerprint in page.finished.items()}

    def entry(self, chunk: int) -> list[Range]:
        """The ranges that make a chunk."""
        page = self.page(chunk)
        return page.entries[chunk - page.first_chunk]

    def dropped(self, chunk: int) -> list[int]:
        """The rows of a chunk's ranges whose documents have a place before."""
        page = self.page(chunk)
        return page.dropped[chunk - page.first_chunk] if page.dropped else []

    def page(self, chunk: int) -> Page:
        """The page that plans a chunk.

        Raises:
            CacheCorruptionError: none does, as far as the pages are there.
        """
        if not 0 <= chunk < self.num_chunks:
            raise CacheCorruptionError(f"{self.folder / 'plan'} has {self.num_chunks} chunks, and no chunk {chunk}.")
        return self.pages[bisect_right(self._first_chunks, chunk) - 1]

    def publish(self, page: Page) -> Page:
        """Add a page; the one that counts is that of whoever was first."""
        store.make_folder(self.folder / "plan")
        store.publish(self._path(page.page), store.seal(asdict(page)))
        self.reload()
        return self.pages[page.page]

    def divide(self, chunks: list[int]) -> tuple[list[int], list[int]]:
        """Chunks in order -> those that are planned, and those beyond the plan."""
        planned = [chunk for chunk in chunks if chunk < self.num_chunks]
        return planned, chunks[len(planned) :]

    def lost_page(self, chunks_elsewhere: int) -> Path | None:
        """The first page that is gone: later pages exist, or more chunks than are planned."""
        later = [p for p in self._path(0).parent.glob("*.json") if p.stem.isdigit() and int(p.stem) > len(self.pages)]
        return self._path(len(self.pages)) if later or chunks_elsewhere > self.num_chunks else None

    def refuse_gaps(self, chunks_elsewhere: int) -> None:
        """Refuse to go on where pages are gone: what they planned must not be planned again, nor be forgotten.

        Raises:
            CacheCorruptionError: a page is gone.
        """
        self.reload()
        if page := self.lost_page(chunks_elsewhere):
            raise CacheCorruptionError(
                f"{page} is missing: chunks or pages that come after it exist.\n"
                "Bring the file back from a copy, or move the whole cache away and build it anew."
            )

    def _path(self, page: int) -> Path:
        return self.folder / "plan" / f"{page:06d}.json"


def read_page(where: Path) -> Page:
    """A page of a plan.

    Raises:
        FileNotFoundError: there is none.
        CacheCorruptionError: it is damaged, or what it says makes no sense.
    """
    what = "a page of a plan"
    page = make(Page, store.read_sealed(where), where, what)
    refuse_unless(page.format == 1, where, what, f"format {page.format} is not known")
    for file in page.files:
        # Spools are named after these, and removed by that name.
        refuse_unless(bool(_HASH.match(file.probe)), where, what, f"the probe {file.probe!r:.100} is not a SHA-256")
        refuse_unless(file.kind in KINDS, where, what, f"files of kind {file.kind!r:.100} are not known")
        refuse_unless(file.packed in PACKINGS, where, what, f"files packed as {file.packed!r:.100} are not known")
    num_files = page.first_file + len(page.files)
    for entry in page.entries:
        is_sensible = entry and all(number < num_files and start < stop for number, start, stop in entry)
        refuse_unless(bool(is_sensible), where, what, f"the entry {entry!r:.100} makes no sense")
    is_sensible = not page.dropped or len(page.dropped) == len(page.entries)
    refuse_unless(is_sensible, where, what, f"it drops rows of {len(page.dropped)} of {len(page.entries)} chunks")
    return page
