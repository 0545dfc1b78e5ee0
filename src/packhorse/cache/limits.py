"""The limits of the settings -> what they leave to plan.

Each counts the whole plan, so raising one later plans more and leaves what is planned as it is: `max_documents` counts
rows, `max_chunks` chunks, and `max_tokens` tokens, those that are not built yet by the rate of a sample.
"""

from dataclasses import dataclass

from packhorse.cache.locations import Locations
from packhorse.cache.plan import Page, Plan, Range
from packhorse.cache.record import read_record
from packhorse.corpus.documents import TextFile, count_rows, find_row


@dataclass(frozen=True, kw_only=True)
class Limits:
    """How much may be planned in all; None for as much as there is."""

    plan: Plan
    locations: Locations
    max_documents: int | None
    max_chunks: int | None
    max_tokens: int | None

    @property
    def rows_left(self) -> int | None:
        """Rows that may still be planned."""
        return None if self.max_documents is None else self.max_documents - self._planned_rows()

    @property
    def chunks_left(self) -> int | None:
        """Chunks that may still be planned."""
        return None if self.max_chunks is None else max(0, self.max_chunks - self.plan.num_chunks)

    @property
    def tokens_left(self) -> int | None:
        """Tokens that may still be planned."""
        if self.max_tokens is None:
            return None
        planned = 0
        for page in self.plan.pages:
            # By what was planned, not by what came of it, or every run would add a crumb.
            planned = planned + self._tokens_of(page) if page.max_tokens is None else page.max_tokens
        return max(0, self.max_tokens - planned)

    def are_reached(self) -> bool:
        """Whether the limit on chunks or on tokens leaves nothing to plan."""
        return self.chunks_left == 0 or self.tokens_left == 0

    def first_rows(self, ranges: list[Range], files: dict[int, TextFile]) -> tuple[list[Range], int | None, bool]:
        """Cut ranges where `max_documents` rows are reached.

        Returns:
            The ranges, their rows if those had to be counted, and whether they are all of them.
        """
        left = self.rows_left
        if left is None:
            return ranges, None, True
        kept: list[Range] = []
        rows = 0
        for number, start, stop in ranges:
            if left <= 0:
                return kept, rows, False
            cut = find_row(files[number], start, stop, left)
            count = count_rows(files[number], start, cut)
            kept.append((number, start, cut))
            rows, left = rows + count, left - count
            if cut < stop:
                return kept, rows, False
        return kept, rows, True

    def _planned_rows(self) -> int:
        total = 0
        for page in self.plan.pages:
            if page.rows is not None:
                total += page.rows
            else:
                total += sum(count_rows(self.locations.locate(n), a, b) for entry in page.entries for n, a, b in entry)
        return total

    def _tokens_of(self, page: Page) -> int:
        tokens = 0
        for chunk in range(page.first_chunk, page.first_chunk + len(page.entries)):
            try:
                tokens += read_record(self.plan.folder, chunk).tokens
            except FileNotFoundError:
                tokens += round(page.chunk_bytes * page.tokens_per_byte)
        return tokens
