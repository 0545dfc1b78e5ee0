"""The files of a source -> those of a plan that they are, or that they continue.

A file is known by its content, its kind and its column, wherever it lies. A text file that is longer than one that is
planned, and begins with it, continues it: where it lay, or, when a folder was moved, by its name.
"""

from collections import defaultdict
from functools import cached_property
from pathlib import Path

from packhorse.cache.plan import Plan, PlannedFile
from packhorse.corpus.files import SourceFile, probe_file
from packhorse.corpus.sources import Files, Source
from packhorse.errors import SourceError


class PlannedFiles:
    """Finds the files of a source in a plan.

    Args:
        plan: The plan.
        source: The source.
    """

    def __init__(self, plan: Plan, source: Files) -> None:
        self.plan, self.source = plan, source
        self._same: defaultdict[tuple, list[int]] = defaultdict(list)
        for number, file in enumerate(plan.files):
            self._same[_planned_content(file)].append(number)
        self._there = {_content(file) for file in source.files}

    def take(self, file: SourceFile) -> int | None:
        """The number of a file that is planned as it is; each is given once."""
        same = self._same.get(_content(file))
        return same.pop(0) if same else None

    def before(self, file: SourceFile) -> int | None:
        """The number of a file as it was planned last, when it had other content."""
        how = file.file.kind, file.file.column
        here = self._paths.get((file.file.path, *how))
        if here is not None:
            return here
        names = self._names.get((Path(file.file.path).name, *how), [])
        moved = [number for number in names if self.is_continued(number, file) and not self._is_there(number)]
        return max(moved, key=lambda number: self.plan.files[number].size, default=None)

    def is_continued(self, number: int, file: SourceFile) -> bool:
        """Whether a file is a planned one with something appended."""
        old = self.plan.files[number]
        can_be_continued = not file.packed and not file.file.counts_rows and file.file.kind != "document"
        return can_be_continued and file.size > old.size and probe_file(file.file.path, old.size)[1] == old.probe

    @cached_property
    def complete(self) -> set[int]:
        """Files of the source that were planned to their end; a limit may have cut off those that came later."""
        ends = [page.first_file + len(page.files) for page in self.plan.pages if self.source.key in page.finished]
        files = enumerate(self.plan.files[: max(ends, default=0)])
        return {number for number, file in files if file.source == self.source.key}

    def _is_there(self, number: int) -> bool:
        return _planned_content(self.plan.files[number]) in self._there

    @cached_property
    def _paths(self) -> dict[tuple[str, str, str], int]:
        return {(file.path, file.kind, file.column): number for number, file in enumerate(self.plan.files)}

    @cached_property
    def _names(self) -> dict[tuple[str, str, str], list[int]]:
        names: defaultdict[tuple[str, str, str], list[int]] = defaultdict(list)
        for number, file in enumerate(self.plan.files):
            names[Path(file.path).name, file.kind, file.column].append(number)
        return names


def refuse_other_sources(plan: Plan, sources: list[Source]) -> None:
    """Refuse a plan whose sources have nothing in common with what is asked for: it is somebody else's.

    Raises:
        SourceError: it is.
    """
    if not plan.files:
        return
    keys = {file.source for file in plan.files}
    probes = {file.probe for file in plan.files}
    paths = {file.path for file in plan.files if file.path}
    for source in sources:
        files = source.files if isinstance(source, Files) else []
        if source.key in keys or any(f.probe in probes or f.file.path in paths for f in files):
            return
        planned = PlannedFiles(plan, source) if files else None
        if any(planned.before(file) is not None for file in files):
            return
    raise SourceError(
        f"The cache {plan.folder} was built from {', '.join(sorted(keys))}; "
        f"the settings name only {', '.join(source.key for source in sources)}.\n"
        "Set `name` to give the other text a cache of its own, or list both sources to make one of them."
    )


def _content(file: SourceFile) -> tuple[int, str, str, str]:
    return file.size, file.probe, file.file.kind, file.file.column


def _planned_content(file: PlannedFile) -> tuple[int, str, str, str]:
    return file.size, file.probe, file.kind, file.column
