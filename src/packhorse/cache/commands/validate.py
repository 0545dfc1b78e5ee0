"""`packhorse cache validate`."""

from dataclasses import asdict
from pathlib import Path

from packhorse.cache.check import check_cache
from packhorse.cache.commands.outcome import Outcome
from packhorse.cache.report import Depth
from packhorse.cache.settings import CacheSettings
from packhorse.cache.update import folder_of
from packhorse.errors import SettingsError


def validate(where: CacheSettings | Path, *, quick: bool = False, deep: bool = False) -> Outcome:
    """Verify every hash of the cache, and say exactly what is damaged. Changes nothing.

    Exit status 1 when something is damaged; `packhorse cache repair` mends it.

    Args:
        where: The settings, or the folder of a cache.
        quick: Look only at the small files and at the sizes of the large ones.
        deep: Also decode everything, and tokenize some documents again from their source.
    """
    if quick and deep:
        raise SettingsError("Give either --quick or --deep.")
    depth: Depth = "quick" if quick else "deep" if deep else "full"
    folder = folder_of(where)
    sources = where.open_sources() if deep and isinstance(where, CacheSettings) else None
    report = check_cache(folder, depth, sources, quiet=False)
    values = {
        "folder": str(folder),
        "depth": depth,
        "chunks": report.chunks,
        "damaged": {chunk: report.problem_of(chunk) for chunk in report.damaged_chunks},
        "findings": [{**asdict(f), "path": str(f.path), "remedy": f.remedy} for f in report.findings],
        "notes": report.notes,
        "retokenized": report.retokenized,
        "bytes_read": report.bytes_read,
        "seconds": round(report.seconds, 3),
    }
    return Outcome(lines=[f"{folder}", *report.lines()], values=values, status=0 if report.is_good else 1)
