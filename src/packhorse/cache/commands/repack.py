"""`packhorse cache repack`."""

from pathlib import Path
from typing import Literal

from packhorse.cache.commands.outcome import Outcome, describe
from packhorse.cache.settings import CacheSettings
from packhorse.cache.update import open_cache, update_cache

SOURCE = "packhorse.cache.cached.CachedDocuments"


def repack(
    where: CacheSettings | Path,
    *,
    sequence_length: int | None = None,
    packing: Literal["best_fit", "concat", "pad", "window"] | None = None,
    overlap: int | None = None,
    name: str | None = None,
) -> Outcome:
    """Make a cache of another sequence length or packing from this one, without tokenizing again.

    Its documents, ids and order are the same; the sides of the split are chosen anew, by the ids. Safe to stop: the
    same command goes on. When this cache has grown, the same command extends the other.

    Args:
        where: The settings, or the folder of a cache.
        sequence_length: Tokens per sequence of the new cache; by default as here.
        packing: How its documents become sequences; by default as here.
        overlap: For `window`; by default as here.
        name: What it is called; by default as this one, with `-repacked`.
    """
    cache = open_cache(where)
    recipe, folder = cache.recipe, cache.folder.absolute()
    packing = packing or recipe.packing
    if overlap is None:
        overlap = recipe.overlap if packing == "window" else 0
    source = {"class_path": SOURCE, "init_args": {"folder": str(folder)}}
    made = update_cache(
        CacheSettings(
            source=source,
            tokenizer=str(cache.tokenizer_folder.absolute()),
            add_bos=recipe.bos_id is not None,
            add_eos=recipe.eos_id is not None,
            split_special_tokens=recipe.split_special_tokens,
            sequence_length=sequence_length or recipe.sequence_length,
            packing=packing,
            overlap=overlap,
            eval_share=recipe.eval_share,
            cache_dir=str(folder.parent),
            name=name or f"{folder.name.removesuffix(f'-{recipe.id}')}-repacked",
            workers=where.workers if isinstance(where, CacheSettings) else "auto",
        )
    )
    lines = [f"{made.folder}", *made.summary.lines(), f"To train on it: source: {source}, cache_dir: {made.folder}"]
    return Outcome(lines=lines, values={**describe(made), "source": source})
