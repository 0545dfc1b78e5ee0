"""A folder of caches -> what each of them is."""

from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

from packhorse.cache.recipe import read_identity
from packhorse.cache.snapshot import Index
from packhorse.errors import CacheError


@dataclass(frozen=True, kw_only=True)
class Entry:
    """One cache of a root."""

    folder: str
    tokenizer: str = ""
    """As its builder named it."""
    recipe: str = ""
    """Short form of the digest."""
    sequence_length: int = 0
    packing: str = ""
    chunks: int = 0
    train_sequences: int = 0
    eval_sequences: int = 0
    tokens: int = 0
    bytes: int = 0
    """Of all its files."""
    last_use: str = ""
    """When it was built or opened last, as far as the file system notes that: some do so once a day, some never."""
    problem: str = ""
    """Why it cannot be opened."""

    def line(self) -> str:
        """For people."""
        name = Path(self.folder).name
        if self.problem:
            return f"{name}: {self.problem}"
        return (
            f"{name}: {self.tokenizer}, {self.sequence_length} tokens, {self.packing}; {self.chunks:,} chunks, "
            f"{self.train_sequences:,} + {self.eval_sequences:,} sequences, {self.tokens:,} tokens, "
            f"{self.bytes / 1e6:,.1f} MB, last use {self.last_use}"
        )


def list_caches(root: Path) -> list[Entry]:
    """The caches of a folder, by name."""
    return [describe_folder(path.parent) for path in sorted(root.glob("*/recipe.json"))]


def describe_folder(folder: Path) -> Entry:
    """What the cache in a folder is, damaged or not."""
    try:
        identity, index = read_identity(folder), Index(folder)
        totals, recipe = index.totals(index.num_chunks), identity.recipe
        return Entry(
            folder=str(folder),
            tokenizer=identity.tokenizer_name,
            recipe=recipe.id,
            sequence_length=recipe.sequence_length,
            packing=recipe.packing,
            chunks=index.num_chunks,
            train_sequences=totals.train_sequences,
            eval_sequences=totals.eval_sequences,
            tokens=totals.train_tokens + totals.eval_tokens,
            bytes=sum(path.lstat().st_size for path in folder.rglob("*") if not path.is_dir()),
            last_use=_last_use(folder),
        )
    except (CacheError, OSError) as error:
        return Entry(folder=str(folder), problem=str(error).splitlines()[0])


def _last_use(folder: Path) -> str:
    status = [path.stat() for path in (folder / "recipe.json", *(folder / "index").glob("*.idx"))]
    latest = max(max(entry.st_atime, entry.st_mtime) for entry in status)
    return datetime.fromtimestamp(latest).isoformat(sep=" ", timespec="minutes")
