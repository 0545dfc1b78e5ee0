"""Settings -> a cache that is up to date.

`update_cache` finds what is missing between the plan and the records, and builds it. Doing that again when nothing is
missing takes milliseconds, so building, going on after a kill, and growing are all the same call.
"""

import itertools
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

from packhorse.cache import store
from packhorse.cache.building import Building
from packhorse.cache.cache import Cache, cache_path, locate_cache
from packhorse.cache.claims import Claims
from packhorse.cache.integrity import Integrity
from packhorse.cache.metadata import write_metadata
from packhorse.cache.progress import say
from packhorse.cache.recipe import create, make_recipe, read_identity
from packhorse.cache.selection import Selection
from packhorse.cache.settings import CacheSettings
from packhorse.cache.staff import Staff
from packhorse.cache.tokenizers import resolve_tokenizer
from packhorse.corpus.sources import check_sources
from packhorse.corpus.tokenizer import locate_tokenizer, read_tokenizer
from packhorse.errors import CacheCorruptionError, CacheError, CacheIncompleteError, SourceError


def build_cache(source: Any, *, tokenizer: str | None = None, **settings: Any) -> Cache:
    """Build a cache, or bring it up to date, and open it.

    Args:
        source: Files, a data set, or any iterable of texts: see `corpus.sources.open_sources`.
        tokenizer: A hub name, a folder, or a tokenizer.json.
        **settings: The other fields of `CacheSettings`: `sequence_length`, `cache_dir`, ...
    """
    return update_cache(CacheSettings(source=source, tokenizer=tokenizer, **settings))


def open_cache(settings: CacheSettings | Path | str) -> Cache:
    """Open the cache that the settings describe (or the one in a folder), without building anything.

    Raises:
        CacheIncompleteError: it does not exist yet.
        RecipeMismatch: the folder holds a cache of another recipe.
    """
    return Cache(folder_of(settings))


def folder_of(where: CacheSettings | Path | str) -> Path:
    """The folder of the cache that the settings describe, even if it is damaged.

    Raises:
        RecipeMismatch: the folder holds a cache of another recipe.
    """
    if not isinstance(where, CacheSettings):
        return Path(where).expanduser()
    facts, _ = resolve_tokenizer(where, train=False)
    recipe = make_recipe(where, facts)
    with suppress(CacheCorruptionError):
        folder, mismatch = locate_cache(where, recipe)
        if mismatch is not None:
            raise mismatch
        return folder
    return cache_path(where, recipe)


def update_cache(settings: CacheSettings, quiet: bool = False) -> Cache:
    """Bring the cache up to date with its sources, and open it. Safe to kill, to repeat, and to run beside others.

    Args:
        settings: What the cache holds, and where it lies.
        quiet: Say nothing.

    Raises:
        PackhorseError: see `errors.py`; what was committed before stays.
    """
    return build_selection(settings, Selection(), quiet=quiet)[0]


def build_selection(
    settings: CacheSettings, selection: Selection, *, start_over: bool = False, quiet: bool = False
) -> tuple[Cache, Integrity]:
    """As `update_cache`, for one of several builders.

    Args:
        settings: What the cache holds, and where it lies.
        selection: The chunks to ask for; what it leaves is for others.
        start_over: Build everything anew. What was there is moved to the cache's quarantine.
        quiet: Say nothing.

    Raises:
        PackhorseError: see `errors.py`; what was committed before stays.
    """
    tell = (lambda text: None) if quiet else say
    sources = settings.open_sources()
    with Staff(settings, sources) as staff:
        facts, content = resolve_tokenizer(settings, sources=sources, tell=tell, on_new=staff.call_early)
        recipe = make_recipe(settings, facts)
        folder, mismatch = locate_cache(settings, recipe)
        if mismatch is not None:
            if settings.on_mismatch == "error":
                raise mismatch
            folder = store.renameable(folder)
            old = _free_name(folder)
            folder.rename(old)
            tell(f"The cache in {folder} was of another recipe; it is now {old}.")
        if not (folder / "recipe.json").exists():
            if selection.mode == "inverse":
                raise CacheIncompleteError(f"There is no cache in {folder} yet, so there are no gaps to fill.")
            check_sources(sources, is_strict=settings.invalid_rows == "error")
            content = content or read_tokenizer(locate_tokenizer(str(settings.tokenizer)))
            create(folder, recipe, content, str(settings.tokenizer))
        elif start_over:
            set_aside(folder, tell)
        if (name := read_identity(folder).tokenizer_name) != str(settings.tokenizer):
            tell(f"The tokenizer {settings.tokenizer} has the content of {name}, with which {folder} was built.")
        integrity = Building(settings, recipe, folder, sources, selection, staff, tell).run()
    cache = Cache(folder)
    if integrity.built or not (folder / "metadata.json").exists():
        write_metadata(folder, recipe, cache.snapshot.num_chunks)
    # Pages are planned as they are asked for: what comes after those that were may have text.
    planned = integrity.states.planned
    may_have_more = selection.end_chunk is not None and selection.end_chunk < planned
    if not may_have_more and not integrity.states.unfinished and not cache.num_sequences("train"):
        raise SourceError(
            f"The sources have no text for training: {cache.summary.documents:,} documents, "
            f"{cache.summary.rows_null + cache.summary.rows_empty + cache.summary.rows_invalid:,} rows left out, "
            f"{cache.summary.rows_filtered:,} by the filters.\n"
            "Check `source`, `text_column` and `filters`, and that `eval_share` leaves something."
        )
    return cache, integrity


def set_aside(folder: Path, tell: Callable[[str], None]) -> None:
    """Move what was built into the cache's quarantine; recipe, tokenizer and what is known of engines stay.

    The plan goes after the records: chunks that no plan knows would be refused.

    Raises:
        CacheError: somebody is building.
    """
    if builders := Claims(folder).builders():
        raise CacheError(
            f"{folder} is being built by {', '.join(builder.name for builder in builders)}.\n"
            "It cannot be started over now: stop that, or wait until `packhorse cache status` shows no builder."
        )
    for name in ("index", "records", "plan", "chunks", "spool", "metadata.json"):
        if (folder / name).exists():
            store.quarantine(folder / name, folder)
    tell(f"Everything in {folder} is built anew; what was there is in {folder / 'quarantine'}.")


def _free_name(folder: Path) -> Path:
    return next(
        path for number in itertools.count(1) if not (path := folder.with_name(f"{folder.name}.old-{number}")).exists()
    )
