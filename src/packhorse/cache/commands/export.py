"""`packhorse cache export`."""

from pathlib import Path
from typing import Literal

from packhorse.cache.cached import CachedDocuments
from packhorse.cache.commands.outcome import Outcome
from packhorse.cache.datatrove import write_datatrove
from packhorse.cache.megatron import write_megatron
from packhorse.cache.rows import export_rows
from packhorse.cache.settings import CacheSettings
from packhorse.cache.update import open_cache
from packhorse.errors import SettingsError


def export(
    where: CacheSettings | Path,
    *,
    to: str | None = None,
    format: Literal["datasets", "megatron", "datatrove"] = "datasets",
) -> Outcome:
    """Write the cache in the form of another project; every checksum is verified on the way.

    Args:
        where: The settings, or the folder of a cache.
        to: The folder to write; of a mixture each cache gets a folder in it, by its name.
        format: `datasets`: padded rows, as a DatasetDict with train and eval. `megatron`: documents, as .bin and .idx.
            `datatrove`: documents, as .ds.
    """
    if to is None:
        raise SettingsError("Say where to: --to FOLDER.")
    cache, target = open_cache(where), Path(to).expanduser()
    counts: dict[str, dict[str, int]] = {}
    if format == "datasets":
        counts = {split: {"rows": rows} for split, rows in export_rows(cache, target).items()}
    for split in ("train", "eval") if format != "datasets" else ():
        documents = CachedDocuments(cache.folder, split)
        if format == "megatron":
            written = write_megatron(documents, target / f"{split}_text_document", cache.vocab_size)
        else:
            name = cache.identity.tokenizer_name
            written = write_datatrove(documents, target / f"{split}.ds", cache.vocab_size, name)
        counts[split] = {"documents": written[0], "tokens": written[1]}
    said = (f"  {split}: " + ", ".join(f"{n:,} {what}" for what, n in own.items()) for split, own in counts.items())
    values = {"folder": str(cache.folder), "to": str(target), "format": format, **counts}
    return Outcome(lines=[f"{cache.folder} -> {target} ({format})", *said], values=values)
