"""`packhorse cache inspect`."""

from dataclasses import asdict
from pathlib import Path
from typing import Literal

from packhorse.cache.commands.outcome import Outcome
from packhorse.cache.histogram import document_lengths, draw, length_bins, share_bins, utilisations
from packhorse.cache.origin import origins
from packhorse.cache.settings import CacheSettings
from packhorse.cache.update import open_cache
from packhorse.errors import SettingsError


def inspect_(where: CacheSettings | Path, *, sequence: int = 0, split: Literal["train", "eval"] = "train") -> Outcome:
    """Show one sequence as text, with the documents that it came from; and how long documents are, how full sequences.

    Args:
        where: The settings, or the folder of a cache.
        sequence: The number of the sequence.
        split: On which side of the split.
    """
    cache = open_cache(where)
    count = cache.num_sequences(split)
    if not 0 <= sequence < count:
        raise SettingsError(f"sequence is {sequence}; {cache.folder} has {count:,} {split} sequences, counted from 0.")
    sources = where.open_sources() if isinstance(where, CacheSettings) else None
    found = origins(cache, sequence, split, sources)
    used = sum(origin.length for origin in found)
    lengths, shares = length_bins(document_lengths(cache)), share_bins(utilisations(cache))
    lines = [
        f"{cache.folder}",
        f"{split} sequence {sequence} of {count:,}: {used} tokens in {len(found)} pieces, "
        f"{cache.sequence_length - used} of padding",
        *(f"  {origin}" for origin in found),
        *draw("Tokens per document", lengths),
        *draw("Utilisation of sequences", shares),
    ]
    values = {
        "folder": str(cache.folder),
        "split": split,
        "sequence": sequence,
        "tokens": cache.read([sequence], split=split).tokens[0].tolist(),
        "pieces": [asdict(origin) for origin in found],
        "document_lengths": dict(lengths),
        "utilisations": dict(shares),
    }
    return Outcome(lines=lines, values=values)
