"""`packhorse cache grow`."""

from pathlib import Path

from packhorse.cache.commands.outcome import Outcome, compression_line, describe, ranges
from packhorse.cache.plan import Page, Plan, Range
from packhorse.cache.selection import Selection
from packhorse.cache.settings import CacheSettings
from packhorse.cache.update import build_selection, folder_of
from packhorse.errors import CacheIncompleteError, SettingsError


def grow(where: CacheSettings | Path) -> Outcome:
    """Extend the plan by what the settings name newly, say what that is, and build it.

    Chunks that are there and their splits stay as they are. `fit` and `build` do the same on their way.

    Args:
        where: The settings.
    """
    if not isinstance(where, CacheSettings):
        raise SettingsError(f"Growing needs sources, not only the folder {where}: give --config.")
    folder = folder_of(where)
    if not (folder / "plan").exists():
        raise CacheIncompleteError(f"There is no cache in {folder} that could grow: build one first.")
    before = len(Plan(folder).pages)
    cache, integrity = build_selection(where, Selection())
    plan = Plan(folder)
    pages = plan.pages[before:]
    chunks = [chunk for page in pages for chunk in range(page.first_chunk, page.first_chunk + len(page.entries))]
    new, longer = _files(pages)
    return Outcome(
        lines=[
            f"{folder}",
            _found(plan, pages, new, longer, chunks) if chunks else _nothing(where),
            *cache.summary.lines(),
            compression_line(cache),
            integrity.line(),
        ],
        values={
            **describe(cache),
            "planned": integrity.states.planned,
            "built": integrity.built,
            "missing": integrity.states.unfinished,
            "new_files": new,
            "longer_files": longer,
            "new_chunks": chunks,
        },
    )


def _files(pages: list[Page]) -> tuple[list[str], list[str]]:
    """The files that are new, and those that were planned before and are longer now."""
    starts: dict[int, int] = {}
    for number, start, _ in _ranges(pages):
        starts[number] = min(start, starts.get(number, start))
    new: list[str] = []
    longer: list[str] = []
    for page in pages:
        for number, file in enumerate(page.files, page.first_file):
            if file.path:  # a part of a stream has none
                # What goes on behind its beginning goes on behind what was planned of it.
                (longer if starts.get(number) else new).append(file.path)
    return new, longer


def _ranges(pages: list[Page]) -> list[Range]:
    return [each for page in pages for entry in page.entries for each in entry]


def _nothing(settings: CacheSettings) -> str:
    names = ("max_documents", "max_chunks", "max_sequences", "max_tokens")
    limits = [f"{name} {getattr(settings, name):,}" for name in names if getattr(settings, name) is not None]
    if limits:
        return f"nothing new within {', '.join(limits)}: raise that for more, if there is more"
    return "nothing new: all that the settings name was planned before"


def _found(plan: Plan, pages: list[Page], new: list[str], longer: list[str], chunks: list[int]) -> str:
    origin = " and ".join(_named(kind, files) for kind, files in (("new", new), ("longer", longer)) if files)
    what = f"{_count(len(chunks), 'chunk')} ({ranges(chunks)}) from {origin or 'more of known sources'}"
    return f"new: {what}, {_size(plan, pages)}"


def _named(kind: str, files: list[str]) -> str:
    names = ", ".join(Path(file).name for file in files[:5]) + (f" and {len(files) - 5} more" if len(files) > 5 else "")
    return f"{_count(len(files), f'{kind} file')} ({names})"


def _size(plan: Plan, pages: list[Page]) -> str:
    """What the pages plan: bytes of text files, rows of tables and streams."""
    sums = {"rows": 0, "bytes": 0}
    for number, start, stop in _ranges(pages):
        sums["rows" if plan.files[number].kind in ("parquet", "arrow") else "bytes"] += stop - start
    size = f"{sums['bytes'] / 1e6:,.1f} MB" if sums["bytes"] >= 1e6 else _count(sums["bytes"], "byte")
    return " and ".join(([size] if sums["bytes"] else []) + ([_count(sums["rows"], "row")] if sums["rows"] else []))


def _count(number: int, what: str) -> str:
    return f"{number:,} {what}{'' if number == 1 else 's'}"
