"""`packhorse cache import`."""

from dataclasses import replace
from pathlib import Path
from typing import Literal

from packhorse.cache.commands.outcome import Outcome, describe
from packhorse.cache.settings import CacheSettings
from packhorse.cache.update import update_cache
from packhorse.errors import SettingsError

SOURCES = {
    "datasets": "packhorse.cache.rows.RowDocuments",
    "megatron": "packhorse.cache.megatron.MegatronDocuments",
    "datatrove": "packhorse.cache.datatrove.DatatroveDocuments",
}


def import_(
    where: CacheSettings | Path,
    *,
    files: str | None = None,
    format: Literal["datasets", "megatron", "datatrove"] = "megatron",
) -> Outcome:
    """Build a cache from ids of another project: with the settings' tokenizer, and `--files` instead of their source.

    Args:
        where: The settings.
        files: What to read: a .bin or .idx file, a .ds file, or the folder of one split of a data set.
        format: What it is. Rows of `datasets` know no documents: each piece becomes one, without another EOS. The
            others do not tell which documents were truncated: each gets an EOS.
    """
    if not isinstance(where, CacheSettings) or files is None:
        raise SettingsError(
            "Importing needs the settings of the new cache and what to read: --config X.yaml --files F."
        )
    path = Path(files).expanduser().absolute()
    source = {"class_path": SOURCES[format], "init_args": {"path": str(path)}}
    settings = replace(where, source=source, train_tokenizer=None, name=where.name or path.name.split(".")[0])
    cache = update_cache(settings)
    lines = [f"{cache.folder}", *cache.summary.lines(), f"To train on it: source: {source}, name: {settings.name}"]
    return Outcome(lines=lines, values={**describe(cache), "source": source, "name": settings.name})
