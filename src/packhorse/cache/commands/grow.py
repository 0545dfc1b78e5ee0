"""`packhorse cache grow`."""

from pathlib import Path

from packhorse.cache.commands.outcome import Outcome, compression_line, describe, ranges
from packhorse.cache.plan import Page, Plan
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
    pages = Plan(folder).pages[before:]
    chunks = [chunk for page in pages for chunk in range(page.first_chunk, page.first_chunk + len(page.entries))]
    files = [file.path for page in pages for file in page.files if file.path]
    return Outcome(
        lines=[
            f"{folder}",
            _found(pages, files, chunks, where),
            *cache.summary.lines(),
            compression_line(cache),
            integrity.line(),
        ],
        values={
            **describe(cache),
            "planned": integrity.states.planned,
            "built": integrity.built,
            "missing": integrity.states.unfinished,
            "new_files": files,
            "new_chunks": chunks,
        },
    )


def _found(pages: list[Page], files: list[str], chunks: list[int], settings: CacheSettings) -> str:
    if not chunks:
        names = ("max_documents", "max_chunks", "max_sequences", "max_tokens")
        limits = [f"{name} {getattr(settings, name):,}" for name in names if getattr(settings, name) is not None]
        if limits:
            return f"nothing new within {', '.join(limits)}: raise that for more, if there is more"
        return "nothing new: all that the settings name was planned before"
    size = sum(len(page.entries) * page.chunk_bytes for page in pages)
    names = ", ".join(Path(file).name for file in files[:5]) + (f" and {len(files) - 5} more" if len(files) > 5 else "")
    origin = f"{len(files)} new files ({names})" if files else "more of known sources"
    return f"new: {len(chunks)} chunks ({ranges(chunks)}) from {origin}, about {size / 1e6:,.1f} MB"
