"""The files of a plan -> where they are now, ready to be sought.

A file is found again by its content, wherever it was moved. What cannot be sought is unpacked or spooled again when it
is needed, and refused when it is no longer what was planned.
"""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from packhorse.cache import spool
from packhorse.cache.plan import Plan, PlannedFile
from packhorse.cache.recipe import read_identity
from packhorse.corpus.documents import TextFile
from packhorse.corpus.files import SourceFile, probe_file
from packhorse.corpus.sources import Deferred, Document, Files, Source, Stream
from packhorse.errors import SourceChangedError


class Locations:
    """Finds the files of a plan.

    Args:
        plan: The plan.
        sources: What the settings name now.
        spool: Where to unpack; by default in the cache.
    """

    def __init__(self, plan: Plan, sources: list[Source], spool: Path | None = None) -> None:
        self.plan, self.sources = plan, sources
        self.spool = spool or plan.folder / "spool"
        now = {(f.size, f.probe): f.file.path for s in sources if isinstance(s, Files) for f in s.files}
        known = ((number, (f.size, f.probe)) for number, f in enumerate(plan.files))
        self.places: dict[int, str] = {number: now[content] for number, content in known if content in now}
        """File number -> where it is now."""
        self.filters = read_identity(plan.folder).recipe.filters
        self._opened: dict[str, Files | Stream] = {}
        self._unpacked: set[Path] = set()
        self._streams = {source.key: source for source in sources if isinstance(source, Stream)}

    def locate(self, number: int) -> TextFile:
        """The file of that number, ready to be sought, as the plan recorded it.

        Raises:
            SourceChangedError: it is gone, or has other content.
        """
        planned = self.plan.files[number]
        target = self.spool_path(planned)
        if planned.packed == "stream":
            if not spool.is_whole(target):
                self._spool_again(planned, target)
            return self._file(target, planned)
        if planned.packed and spool.is_whole(target):
            return self._file(target, planned)
        path = self.places.get(number, planned.path)
        _check_unchanged(path, planned)
        if planned.packed:
            spool.unpack(path, planned.packed, planned.kind, target)
            path = str(target)
        return self._file(path, planned)

    def remove_spools(self) -> None:
        """Remove every spool of the plan and of this planner; for when all chunks are committed."""
        names = {self.spool_path(file).name for file in self.plan.files if file.packed}
        names |= {path.name for path in self._unpacked}
        root = self.spool
        for path in root.iterdir() if root.is_dir() else ():
            if path.name in names:
                spool.remove(path)

    def readable(self, file: SourceFile) -> TextFile:
        """A file of a source, unpacked if it must be."""
        if not file.packed:
            return file.file
        target = self.spool / f"{file.probe}.{file.file.kind}"
        spool.unpack(file.file.path, file.packed, file.file.kind, target)
        self._unpacked.add(target)
        return replace(file.file, path=str(target))

    def of_new(self, number: int, new_files: list[PlannedFile]) -> TextFile:
        """As `locate`; numbers beyond the plan are those of files that are about to enter it."""
        known = len(self.plan.files)
        if number < known:
            return self.locate(number)
        file = new_files[number - known]
        path = str(self.spool_path(file)) if file.packed else file.path
        return self._file(path, file)

    def check_part(self, part: PlannedFile, documents: list[Document]) -> None:
        """Refuse a part of a stream that has other documents than when it was planned."""
        if spool.digest_documents(documents) != part.probe:
            raise SourceChangedError(
                f"Documents {part.start:,} to {part.stop:,} of the source {part.source} are not what they were when "
                f"the cache {self.plan.folder} was built.\n"
                "A source may only grow at its end. Set `name` to build another cache of what it is now."
            )

    def open(self, source: Deferred) -> Files | Stream:
        """Open a source that is expensive to open, once."""
        if source.key not in self._opened:
            self._opened[source.key] = source.open()
        return self._opened[source.key]

    def spool_path(self, planned: PlannedFile) -> Path:
        """Where a file is unpacked or spooled."""
        suffix = "parquet" if planned.packed == "stream" else planned.kind
        return self.spool / f"{planned.probe}.{suffix}"

    def _file(self, path: Path | str, planned: PlannedFile) -> TextFile:
        filters = self.filters
        if filters and planned.packed == "stream":
            # It was filtered before it was spooled: the columns that the filters compare are not there.
            filters = spool.FILTERS
        return TextFile(
            path=str(path), kind=planned.kind, column=planned.column, filters=filters, is_final=planned.is_final
        )

    def _spool_again(self, planned: PlannedFile, target: Path) -> None:
        deferred = next((s for s in self.sources if isinstance(s, Deferred) and s.key == planned.source), None)
        source = self.open(deferred) if deferred else self._streams.get(planned.source)
        if not isinstance(source, Stream):
            raise SourceChangedError(
                f"Documents {planned.start:,} to {planned.stop:,} of the source {planned.source} are needed again to "
                f"build a chunk of {self.plan.folder}, but the settings no longer name that source.\nName it again."
            )
        documents = take(source.read(planned.start), planned.stop - planned.start)
        self.check_part(planned, documents)
        spool.write_documents(documents, target)


def take(documents: Iterator[Document], count: int) -> list[Document]:
    """The next documents."""
    # The range comes first: `zip` must not take a document too many.
    return [document for _, document in zip(range(count), documents, strict=False)]


def _check_unchanged(path: str, planned: PlannedFile) -> None:
    try:
        found = probe_file(path, None if planned.kind in ("parquet", "arrow") or planned.packed else planned.size)
        size = Path(path).stat().st_size
    except OSError:
        raise SourceChangedError(
            f"The source file {path} is gone, and the cache still needs it.\nPut it back, or name its new place."
        ) from None
    if found[1] != planned.probe or size < planned.size:
        raise SourceChangedError(
            f"The source file {path} has changed since it was planned ({planned.size:,} bytes then, {size:,} now).\n"
            "Put the old one back, or set `name` to build another cache."
        )
