"""Settings -> what a cache of them will take: tokens, sequences, chunks, bytes and time, each with an interval.

Random places of the sources are read, tokenized, packed and compressed as a build does it. A total is a ratio over the
places, times the size of the sources; its interval comes from drawing the places again and again (bootstrap), and holds
the truth about 95 times in 100. The number of chunks is that of the plan that a build would make. Duplicates are not
looked for. Nothing is written but what packed files are unpacked to, in a temporary folder.
"""

import shutil
import tempfile
import time
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from packhorse.cache.cache import locate_cache
from packhorse.cache.chunk import ChunkContent, compress, encode_chunk, pack_tokens, token_bits
from packhorse.cache.cuts import cut_ranges
from packhorse.cache.memory import plan_memory
from packhorse.cache.places import Place, Places, draw_places
from packhorse.cache.rate import tokens_per_byte
from packhorse.cache.recipe import Recipe, make_recipe
from packhorse.cache.settings import CacheSettings
from packhorse.cache.tokenizers import resolve_tokenizer, train_on
from packhorse.cache.workers import usable_cores
from packhorse.corpus.documents import Documents, Skipped, read_ranges
from packhorse.corpus.engines import Engine, Verified, make_engine
from packhorse.corpus.packing import pack, places_taken
from packhorse.corpus.sources import Deferred, Source, check_sources, no_text
from packhorse.corpus.tokenizer import TokenizerContent, locate_tokenizer, read_tokenizer
from packhorse.corpus.tokens import Tokens, tokenize
from packhorse.errors import SourceError, TokenizerError

RESAMPLES = 1_000
DRAWN_CHUNKS = 8
"""Small chunks end with rows that are more or less full."""
RECORD_BYTES = 1_200
"""What a chunk takes beside its file: its record, its row in the index, its entry in the plan."""
FOLDER_BYTES = 8_192
"""What a cache takes beside its chunks and the copy of the tokenizer."""
START_SECONDS = 1.0
"""Until builders are there and have loaded the tokenizer."""
OTHER_CORES = 0.7
"""What a second core adds: memory and disk are shared."""
SPACE_RANGE = 0.97, 1.03
"""Tokens are compressed with other neighbours than in the sample."""
TIME_RANGE = 0.5, 2.0
"""Short samples run with cold caches, and machines have other work: so much faster or slower a long build may be."""


@dataclass(frozen=True, kw_only=True)
class Figure:
    """An estimate, and the interval in which the truth is about 95 times in 100."""

    estimate: float
    low: float
    high: float


@dataclass(frozen=True, kw_only=True)
class Estimate:
    """What a cache of all sources will take, whatever of it is there already."""

    documents: Figure
    tokens: Figure
    """Without padding; those that `packing: window` repeats count once."""
    sequences: Figure
    chunks: Figure
    disk_bytes: Figure
    seconds: Figure
    """Of this machine, as busy as it is now."""
    places: int
    """That were looked at."""
    free_bytes: int
    """On the disk of the cache."""


def estimate_cache(settings: CacheSettings, *, places: int = 200, seed: int = 0) -> Estimate:
    """What building will take.

    Args:
        settings: What the cache would hold.
        places: How many places of the sources to look at.
        seed: Decides which.

    Raises:
        PackhorseError: whatever would stop a build before its first chunk.
    """
    sources = settings.open_sources()
    check_sources(sources)
    content = _tokenizer(settings, sources)
    recipe = make_recipe(settings, content.facts)
    folder = _folder_above(locate_cache(settings, recipe)[0])
    draw = np.random.default_rng(seed)
    with tempfile.TemporaryDirectory(prefix="packhorse-estimate-") as scratch:
        opened = [source.open() if isinstance(source, Deferred) else source for source in sources]
        found: list[Places] = []
        for source in opened:
            left = settings.max_documents
            left = None if left is None else max(0, left - sum(before.num_rows for before in found))
            found.append(draw_places(source, max(30, places // len(opened)), draw, Path(scratch), left))
        if not any(place.documents for source in found for place in source.places):
            raise _nothing_found(sources, found)
        engine, _ = make_engine(settings.engine, content.json, recipe.split_special_tokens, str(settings.tokenizer))
        engine = engine.bare if isinstance(engine, Verified) else engine
        fixed_bytes = FOLDER_BYTES + sum(map(len, content.files.values()))
        return _estimate(settings, recipe, engine, found, draw, fixed_bytes, shutil.disk_usage(folder).free)


def _estimate(
    settings: CacheSettings,
    recipe: Recipe,
    engine: Engine,
    found: list[Places],
    draw: np.random.Generator,
    fixed_bytes: int,
    free: int,
) -> Estimate:
    engine.encode(["warm up"])
    totals = np.zeros((RESAMPLES + 1, 5))
    sample: list[Tokens] = []
    for source in found:
        measured = [_measure(place, source.is_final, recipe, engine, settings.compression) for place in source.places]
        sample += [tokens for _, tokens in measured]
        if measured:
            totals += _totals(source, np.array([counts for counts, _ in measured]), draw)
    documents, tokens, slots, stored, seconds = totals.T
    if (limit := _most_tokens(settings)) is not None:
        share = np.minimum(1, limit / tokens)
        documents, tokens, slots, stored, seconds = (v * share for v in (documents, tokens, slots, stored, seconds))
    overhead, encode_seconds = _encode(sample, recipe, settings.compression)
    sequences = slots / _utilisation(sample, recipe, settings.sequences_per_chunk, float(tokens[0]), draw)
    chunks = _count_chunks(settings, recipe, engine, found, sequences)
    workers = len(usable_cores()) if settings.workers == "auto" else max(1, settings.workers)
    elapsed = START_SECONDS + (seconds + tokens * encode_seconds) / (1 + OTHER_CORES * (workers - 1))
    disk = stored * overhead + chunks.estimate * RECORD_BYTES + fixed_bytes
    return Estimate(
        documents=_figure(documents),
        tokens=_figure(tokens),
        sequences=_figure(sequences),
        chunks=chunks,
        disk_bytes=_figure(disk, SPACE_RANGE),
        seconds=_figure(elapsed, TIME_RANGE),
        places=len(sample),
        free_bytes=free,
    )


def _measure(
    place: Place, is_final: bool, recipe: Recipe, engine: Engine, compression: str
) -> tuple[list[float], Tokens]:
    """Size, documents; weight, tokens, sequences without padding, stored bytes, seconds."""
    begin = time.perf_counter()
    is_text = bool(place.documents) and isinstance(place.documents[0], str)
    batch = Documents(
        rows=np.arange(len(place.documents)),
        texts=place.documents if is_text else None,
        ids=None if is_text else place.documents,
        is_final=is_final,
    )
    (tokens,) = tokenize([batch], engine, Skipped(), **recipe.token_policy)
    seconds = place.seconds + time.perf_counter() - begin
    lengths = _kept(tokens, recipe)
    stored = len(compress(pack_tokens(tokens.ids, token_bits(recipe.vocab_size)), compression))
    slots = _places(lengths, recipe).sum() / recipe.sequence_length
    counts = [place.factor * float(count) for count in (lengths.sum(), slots, stored, seconds)]
    return [place.size, place.num_documents, place.weight, *counts], tokens


def _kept(tokens: Tokens, recipe: Recipe) -> np.ndarray:
    """Tokens of each document that are kept."""
    lengths = np.diff(tokens.ends, prepend=0)
    return np.minimum(lengths, recipe.sequence_length) if recipe.long_documents == "truncate" else lengths


def _places(lengths: np.ndarray, recipe: Recipe) -> np.ndarray:
    return places_taken(recipe.packing, lengths, recipe.sequence_length, recipe.overlap)


def _totals(source: Places, counts: np.ndarray, draw: np.random.Generator) -> np.ndarray:
    """Sums over the whole source, [1 + RESAMPLES, counts]: of the places, and of places drawn from them."""
    chosen = draw.integers(0, len(counts), (RESAMPLES, len(counts)))
    sums = np.concatenate([counts.sum(axis=0)[None], counts[chosen].sum(axis=1)])
    return source.weight * np.concatenate([sums[:, 1:2] / sums[:, :1], sums[:, 3:] / sums[:, 2:3]], axis=1)


def _encode(sample: list[Tokens], recipe: Recipe, compression: str) -> tuple[float, float]:
    """Bytes of a chunk for each byte that its tokens alone are compressed to, and seconds for each token."""
    alone = sum(len(compress(pack_tokens(t.ids, token_bits(recipe.vocab_size)), compression)) for t in sample)
    lengths = np.concatenate([_kept(tokens, recipe) for tokens in sample])
    ids = np.concatenate([tokens.ids for tokens in sample])
    starts = np.concatenate([[0], np.cumsum([size for t in sample for size in np.diff(t.ends, prepend=0)])])[:-1]
    begin = time.perf_counter()
    packed, empty = (
        pack(
            recipe.packing,
            ids,
            (starts + lengths)[:n],
            recipe.sequence_length,
            recipe.pad_id,
            starts[:n],
            recipe.overlap,
        )
        for n in (len(lengths), 0)
    )
    content = ChunkContent(train=packed, eval=empty, document_rows=starts, document_sides=np.zeros(len(lengths), bool))
    encoded = encode_chunk(content, 0, recipe.digest, recipe.vocab_size, compression)
    return encoded.num_bytes / max(1, alone), (time.perf_counter() - begin) / max(1, len(ids))


def _utilisation(
    sample: list[Tokens], recipe: Recipe, sequences_per_chunk: int, total: float, draw: np.random.Generator
) -> float:
    """Of chunks of documents like those of the sample, without what `pad` and `window` take on purpose."""
    lengths = np.concatenate([_kept(tokens, recipe) for tokens in sample])
    if recipe.packing == "pad" or not len(lengths):
        return 1.0
    wanted = min(sequences_per_chunk * recipe.sequence_length, total)
    taken = sequences = 0
    for _ in range(DRAWN_CHUNKS):
        chosen = lengths[draw.integers(0, len(lengths), round(wanted / lengths.mean()) + 1)]
        taken += _places(chosen, recipe).sum()
        is_eval = draw.random(len(chosen)) < recipe.eval_share
        for side in (chosen[~is_eval], chosen[is_eval]):
            ids = np.zeros(side.sum(), np.uint8)
            sequences += len(
                pack(recipe.packing, ids, np.cumsum(side), recipe.sequence_length, 0, None, recipe.overlap).tokens
            )
    return taken / (sequences * recipe.sequence_length)


def _count_chunks(
    settings: CacheSettings, recipe: Recipe, engine: Engine, found: list[Places], sequences: np.ndarray
) -> Figure:
    """As the planner cuts what can be sought; by sequences what cannot, or is limited."""
    if _most_tokens(settings) is not None or not all(source.ranges for source in found):
        return _figure(np.maximum(1, np.round(sequences / settings.sequences_per_chunk)))
    ranges, files = [], {}
    for source in found:
        ranges += [(number + len(files), start, stop) for number, start, stop in source.ranges]
        files |= {number + len(files): file for number, file in source.files.items()}
    extra = (recipe.bos_id is not None) + (recipe.eos_id is not None)

    def count(texts: list[str]) -> int:
        return int(_places(np.diff(engine.encode(texts)[1], prepend=0) + extra, recipe).sum())

    budget = plan_memory(replace(settings, memory_limit=None), recipe)
    chunk_bytes = max(1, round(budget.chunk_tokens / tokens_per_byte(ranges, files, count)))
    chunks = float(sum(1 for _ in cut_ranges(ranges, files, chunk_bytes)))
    return Figure(estimate=chunks, low=chunks, high=chunks)


def _nothing_found(sources: list[Source], found: list[Places]) -> SourceError:
    """No document begins at any place: is there none at all?"""
    ranges = [(source.files[number], start, stop) for source in found for number, start, stop in source.ranges]
    if next(read_ranges(ranges, Skipped()), None) is None:
        return no_text(sources)
    return SourceError(
        f"None of the documents of {', '.join(source.key for source in sources)} begins at one of the "
        f"{sum(len(source.places) for source in found)} places that were looked at: nothing can be estimated.\n"
        "They are very long, or very few have text that passes the filters. Look at more: --places."
    )


def _most_tokens(settings: CacheSettings) -> int | None:
    """What the limits on chunks, sequences and tokens leave, if there are any."""
    limits = [settings.max_tokens_in_all]
    if settings.max_chunks is not None:
        limits.append(settings.max_chunks * settings.sequences_per_chunk * settings.sequence_length)
    return min((limit for limit in limits if limit is not None), default=None)


def _figure(values: np.ndarray, wider: tuple[float, float] = (1.0, 1.0)) -> Figure:
    low, high = np.quantile(values[1:], [0.025, 0.975]) * wider
    return Figure(estimate=float(values[0]), low=float(low), high=float(high))


def _tokenizer(settings: CacheSettings, sources: list[Source]) -> TokenizerContent:
    """What a build would use; one that it would train is trained, and forgotten."""
    try:
        resolve_tokenizer(settings, train=False)
        return read_tokenizer(locate_tokenizer(str(settings.tokenizer)))
    except TokenizerError:
        if settings.train_tokenizer is None or settings.tokenizer is None:
            raise
    return train_on(sources, settings.train_tokenizer, tell=lambda text: None)


def _folder_above(path: Path) -> Path:
    """The folder itself, or the nearest above that exists."""
    return path if path.exists() else _folder_above(path.absolute().parent)
