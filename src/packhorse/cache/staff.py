"""The workers of one run of `update_cache`: there when they are needed, or a little earlier."""

from pathlib import Path

from packhorse.cache.settings import CacheSettings
from packhorse.cache.workers import Workers, usable_cores
from packhorse.corpus.sources import Files, Source, Stream

EARLY_BYTES = 16 * 2**20
"""With more than this to build for sure, workers are started before the plan is made."""


class Staff:
    """The workers of one run of `update_cache`: there when they are needed, or a little earlier."""

    def __init__(self, settings: CacheSettings, sources: list[Source]) -> None:
        self._number, self._split_special_tokens = settings.workers, settings.split_special_tokens
        self.most: int | None = None
        """Builders that the memory limit allows; None for any."""
        self._is_limited = settings.memory_limit is not None
        self._workers: Workers | None = None
        self._text_bytes = 0
        for source in sources:
            if isinstance(source, Files):
                self._text_bytes += sum(file.size for file in source.files)
            elif isinstance(source, Stream):
                self._text_bytes += source.text_bytes or 0

    def __enter__(self) -> "Staff":
        return self

    def __exit__(self, *_) -> None:
        self.dismiss()

    def call_early(self, tokenizer: Path) -> None:
        """Start them before the plan is made, if there is much to build: what they import and load takes a while."""
        if self._text_bytes > EARLY_BYTES and not self._is_limited:
            file = tokenizer if tokenizer.is_file() else tokenizer / "tokenizer.json"
            self.call(many=True).prepare(file, self._split_special_tokens)

    @property
    def expected(self) -> int:
        """Builders that there are for many chunks."""
        wanted = len(usable_cores()) if self._number == "auto" else max(1, self._number)
        return wanted if self.most is None else max(1, min(wanted, self.most))

    def call(self, many: bool) -> Workers:
        """The workers. `auto` takes none for a single chunk: that is built faster here than a process starts."""
        if self._workers is None:
            is_one = self._number == 0 or (self._number == "auto" and not many)
            self._workers = Workers(0 if is_one else self.expected)
        return self._workers

    def dismiss(self) -> None:
        """Stop them."""
        if self._workers is not None:
            self._workers.stop()
            self._workers = None
