"""What is left of a damaged chunk, and whether what is built again is what it was."""

from dataclasses import dataclass, replace
from pathlib import Path

from packhorse.cache.chunk import LEVELS
from packhorse.cache.record import Record
from packhorse.cache.snapshot import next_digest


@dataclass(frozen=True, kw_only=True)
class Evidence:
    """What is known of one chunk."""

    chunk: int
    record: Record | None
    """Its record, if that is good."""
    file_sha256: str | None
    """Of its file, as the index says, or else its record."""
    index_sha256: str = ""
    file_bytes: int = 0
    digest_before: bytes = b""
    digest: bytes = b""
    """Of the snapshots that end before and with it, if the index knows them."""

    def needs(self, level: str, built: dict[int, tuple[Record, Path]]) -> bool:
        """Whether it must still be built with this level of compression."""
        is_built = self.chunk in built and self.file_sha256 in (None, built[self.chunk][0].file_sha256)
        is_known = self.record is not None and self.record.file_sha256 == self.file_sha256
        return not is_built and (not is_known or level_of(self.record) == level)

    def proof(self, built: Record) -> str | None:
        """How it is proven that this is what was there; None if it is not."""
        if self.record is not None and built.payload_sha256 == self.record.payload_sha256:
            return "its payload hash is the recorded one"
        if self.digest and next_digest(self.digest_before, replace(built, file_sha256=self.file_sha256)) == self.digest:
            return "the digest of the snapshot is what it was"
        if self.record is None and not self.digest:
            return "neither record nor index were left to compare it with"
        return None


def level_of(record: Record) -> str:
    """How hard LZ4 worked: the last word of `lz4 1.9.4 default`."""
    word = record.codec.rpartition(" ")[2]
    return word if word in LEVELS else "default"
