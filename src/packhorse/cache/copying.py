"""A cache -> the same cache elsewhere: another folder, or a bucket.

    tokenizer, recipe, plan -> each chunk, and then its record -> suspects -> index -> metadata

So the copy is a cache at any moment, of the chunks that are complete there. What is copied is what was committed when
the copying began, whatever builders do meanwhile; doing it again copies what came since, and what was interrupted.
Every chunk is compared with the SHA-256 in its record while it is read, and again where it was written.
"""

import hashlib
import os
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from packhorse.cache import store
from packhorse.cache.byte_progress import ByteProgress
from packhorse.cache.metadata import metadata_of
from packhorse.cache.plan import Plan
from packhorse.cache.recipe import read_identity, tokenizer_json
from packhorse.cache.record import Record, chunk_path, committed_chunks, read_record, record_path
from packhorse.cache.regular import read_file, read_parts
from packhorse.cache.snapshot import Index
from packhorse.errors import CacheCorruptionError, CacheError, CacheIncompleteError, StorageIOError

MAX_SMALL_BYTES = 2**30
"""All but chunks is small: it is read at once."""


@dataclass(frozen=True, kw_only=True)
class Copied:
    """What a copying did."""

    target: str
    files: int = 0
    """Files that were written."""
    bytes: int = 0
    skipped: int = 0
    """Files that were there."""
    chunks: int = 0
    """Chunks that the copy has now."""


class Place(Protocol):
    """Where a copy goes. Names are relative, with `/`."""

    def sizes(self) -> dict[str, int]:
        """The files that are there, and their bytes."""
        ...

    def read(self, name: str) -> Iterator[bytes]:
        """The content of a file."""
        ...

    def put(self, name: str, path: Path | None, data: bytes) -> None:
        """Write a file: the content of `path`, or else `data`."""
        ...

    def remove(self, name: str) -> None:
        """Remove a file that another has replaced."""
        ...


class Folder:
    """A folder of this machine."""

    def __init__(self, root: Path) -> None:
        self.root = root

    def sizes(self) -> dict[str, int]:
        files = ((Path(where) / name) for where, _, names in os.walk(self.root) for name in names)
        return {path.relative_to(self.root).as_posix(): path.lstat().st_size for path in files}

    def read(self, name: str) -> Iterator[bytes]:
        return read_parts(self.root / name)

    def put(self, name: str, path: Path | None, data: bytes) -> None:
        store.make_folder((self.root / name).parent)
        store.replace(self.root / name, data if path is None else read_parts(path))

    def remove(self, name: str) -> None:
        store.remove(self.root / name)


class Bucket:
    """Anything that fsspec knows, by its URL.

    Raises:
        StorageIOError: there is no such file system, or it is not installed.
    """

    def __init__(self, url: str) -> None:
        import fsspec

        try:
            self._files, self.root = fsspec.url_to_fs(url)
        except (ImportError, ValueError) as error:
            raise StorageIOError(f"{url} cannot be written: {error}") from None
        self.root = self.root.rstrip("/")

    def sizes(self) -> dict[str, int]:
        found = self._files.find(self.root, detail=True) if self._files.exists(self.root) else {}
        return {name.removeprefix(self.root).strip("/"): int(info["size"]) for name, info in found.items()}

    def read(self, name: str) -> Iterator[bytes]:
        with self._files.open(f"{self.root}/{name}", "rb") as file:
            while part := file.read(2**20):
                yield part

    def put(self, name: str, path: Path | None, data: bytes) -> None:
        target = f"{self.root}/{name}"
        try:
            self._files.makedirs(target.rpartition("/")[0], exist_ok=True)
            if path is None:
                self._files.pipe_file(target, data)
            else:
                self._files.put_file(str(path), target)
        except OSError as error:
            raise StorageIOError(
                f"{target} could not be written: {error}.\nThe same command goes on from here."
            ) from None

    def remove(self, name: str) -> None:
        self._files.rm_file(f"{self.root}/{name}")


def copy_cache(folder: Path, target: str, verify: bool = True, quiet: bool = True) -> Copied:
    """Copy a cache, or what the copy does not have yet.

    Args:
        folder: The cache.
        target: The folder of the copy, or a URL (`s3://...`).
        verify: Read what was written again, and compare its SHA-256.
        quiet: Do not show progress.

    Raises:
        CacheCorruptionError: a file of the cache is damaged; what was copied before is complete.
        CacheError: the target holds another cache, or another build of this one.
        StorageFullError, StorageIOError: see there.
    """
    place: Place = Bucket(target) if "://" in target else Folder(Path(target).expanduser())
    if isinstance(place, Folder) and folder.resolve() in (place.root.resolve(), *place.root.resolve().parents):
        raise CacheError(f"{target} is the cache itself, or inside of it. Name another target.")
    return _Copying(folder, place, target, verify).run(quiet)


class _Copying:
    def __init__(self, folder: Path, place: Place, target: str, verify: bool) -> None:
        self.folder, self.place, self.target, self.verify = folder, place, target, verify
        self.there = place.sizes()
        self.files = self.bytes = self.skipped = 0

    def run(self, quiet: bool) -> Copied:
        identity = read_identity(self.folder)
        tokenizer_json(self.folder, identity)
        recipe = read_file(self.folder / "recipe.json", MAX_SMALL_BYTES)
        if "recipe.json" in self.there and b"".join(self.place.read("recipe.json")) != recipe:
            raise CacheError(f"{self.target} holds another cache. Name another target.")
        if self.there and "recipe.json" not in self.there and not all(map(_is_of_a_cache, self.there)):
            raise CacheError(f"{self.target} is not empty, and not a cache. Name another target.")
        self._refuse_another_plan()
        num_chunks, index, records = self._look()
        # Of what is copied: that of a cache that is being built is of another moment.
        metadata = metadata_of(self.folder, identity.recipe, num_chunks) if num_chunks else None
        Plan(self.folder)  # every page is whole
        for name in (*(f"tokenizer/{name}" for name in identity.tokenizer_files), "recipe.json"):
            self._small(name)
        for path in sorted((self.folder / "plan").glob("*.json")):
            self._small(f"plan/{path.name}")
        with ByteProgress("copying", sum(record.file_bytes for record in records), quiet) as progress:
            for record in records:
                self._chunk(record)
                progress.add(record.file_bytes)
        for path in sorted((self.folder / "suspects").glob("*.json")):
            self._small(f"suspects/{path.name}")
        for name, data in index.items():
            self._put(f"index/{name}", data)
        for name in self.there:
            if name.startswith("index/") and name[6:15] in {kept[:9] for kept in index} and name[6:] < max(index):
                if name[6:] not in index:
                    self.place.remove(name)
        if metadata is not None:
            self._put("metadata.json", metadata)
        return Copied(target=self.target, files=self.files, bytes=self.bytes, skipped=self.skipped, chunks=len(records))

    def _refuse_another_plan(self) -> None:
        """Chunks of two plans do not go together: pages of the copy must be pages of the cache."""
        for name in sorted(self.there):
            if not name.startswith("plan/") or store.TEMPORARY in name:
                continue
            ours = self.folder / name
            # One that is cut off was being sent when a copying was stopped: not every place is atomic.
            if not ours.exists() or not read_file(ours, MAX_SMALL_BYTES).startswith(b"".join(self.place.read(name))):
                raise CacheError(
                    f"{self.target} holds another build of this cache: its {name} is not that of {self.folder}.\n"
                    "Name another target, or remove it."
                )

    def _look(self) -> tuple[int, dict[str, bytes], list[Record]]:
        """Chunks without a gap, index and records; again when a builder has replaced or removed one meanwhile."""
        while True:
            with suppress(FileNotFoundError, CacheIncompleteError):
                # The index first: it must not name chunks that are committed after it is read.
                num_chunks, index = self._index()
                return num_chunks, index, [read_record(self.folder, chunk) for chunk in committed_chunks(self.folder)]

    def _index(self) -> tuple[int, dict[str, bytes]]:
        index = Index(self.folder)
        paths = [index.path(page) for page in range(index.num_pages)]
        for page in range(index.num_pages):
            index.rows(page)  # verified
        return index.num_chunks, {path.name: read_file(path, MAX_SMALL_BYTES) for path in paths}

    def _chunk(self, record: Record) -> None:
        """The file of a chunk, and when it is there, the record."""
        path = chunk_path(self.folder, record.chunk, record.file_sha256)
        name = path.relative_to(self.folder).as_posix()
        if self.there.get(name) == record.file_bytes:
            self.skipped += 1
        else:
            if not store.holds(path, record.file_sha256):
                raise CacheCorruptionError(
                    f"{path} is damaged or missing: it was not copied, and nothing after it.\n"
                    "`packhorse cache repair` builds it again; then the same command goes on."
                )
            self.place.put(name, path, b"")
            self._check(name, record.file_sha256)
            self._count(record.file_bytes)
        self._small(record_path(self.folder, record.chunk).relative_to(self.folder).as_posix())

    def _small(self, name: str) -> None:
        self._put(name, read_file(self.folder / name, MAX_SMALL_BYTES))

    def _put(self, name: str, data: bytes) -> None:
        if self.there.get(name) == len(data) and b"".join(self.place.read(name)) == data:
            self.skipped += 1
            return
        self.place.put(name, None, data)
        self._check(name, hashlib.sha256(data).hexdigest())
        self._count(len(data))

    def _check(self, name: str, sha256: str) -> None:
        if not self.verify:
            return
        digest = hashlib.sha256()
        for part in self.place.read(name):
            digest.update(part)
        if digest.hexdigest() != sha256:
            self.place.remove(name)
            raise StorageIOError(f"{self.target}/{name} has another content than was written; it was removed again.")

    def _count(self, num_bytes: int) -> None:
        self.files += 1
        self.bytes += num_bytes


def _is_of_a_cache(name: str) -> bool:
    return name.split("/")[0] in ("tokenizer", "plan") or store.TEMPORARY in name
