"""What a user says about a cache: most of the `data:` group of a YAML, without torch."""

import re
from dataclasses import dataclass
from typing import Literal, get_args, get_origin, get_type_hints

from packhorse.corpus.filters import normal_filters
from packhorse.corpus.hub import Downloads
from packhorse.corpus.sources import Source, open_sources
from packhorse.errors import SettingsError

_UNITS = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12, "ki": 2**10, "mi": 2**20, "gi": 2**30, "ti": 2**40}


@dataclass(frozen=True, kw_only=True)
class CacheSettings:
    """What the cache holds, and where it lies."""

    # Not `Any`: jsonargparse would make an object, or a Namespace, of a mapping with a class_path.
    source: dict | list | str = "sample"
    """Where the text comes from: `sample` (built in), a file, a folder, a glob, a hub data set, a mapping with the
    arguments of `datasets.load_dataset` (path, name, split, revision, streaming), a mapping with class_path and
    init_args of any Python iterable, or a list of these. From Python also an iterable or a function itself. New files
    or sources extend the cache."""
    text_column: str = "text"
    """The column or key that holds the text."""
    filters: tuple[str, ...] = ()
    """Which rows are documents, by their other columns: `["int_score >= 3", "language == 'en' and url != null"]`. All
    must hold; parquet files are read only where they can."""
    deduplicate: Literal["none", "exact"] = "none"
    """`exact` keeps only the first of documents that are the same to the byte, wherever they are. Takes one more pass
    over the text, and 16 bytes of memory for each document (48 for moments)."""
    invalid_rows: Literal["error", "skip"] = "error"
    """A line that is not valid JSON stops the build, or is left out and counted."""
    sample_by: Literal["line", "paragraph", "document"] = "line"
    """What a document of a txt file is, as in `datasets`; `document` takes a whole file as one."""
    streaming: bool = False
    """Read hub data sets as they come instead of downloading them first; `streaming` of a source goes before."""
    download_folder: str | None = None
    """Where hub data sets are kept; by default where `datasets` keeps them."""
    download_retries: int = 5
    """How often a download from the hub is tried again."""
    download_timeout: float = 30.0
    """Seconds without a byte from the hub after which a download is tried again."""
    max_documents: int | None = None
    """Read only so many rows, in the order of the sources: also rows that hold no text, that do not pass `filters` or
    that are duplicates count, so there may be fewer documents. Raising it later extends the cache."""
    max_chunks: int | None = None
    """Plan only so many chunks. Raising it later extends the cache, like the two below."""
    max_sequences: int | None = None
    """Plan only so many sequences. Text is planned before it is tokenized: the number is met within a few percent."""
    max_tokens: int | None = None
    """Plan only so many tokens, within a few percent."""
    tokenizer: str | None = None
    """A hub name (`name@revision` pins it), a folder, or a tokenizer.json; by default that of the model."""
    train_tokenizer: int | None = None
    """If the folder `tokenizer` does not exist: train a byte-level BPE of so many entries on the source, into it."""
    add_bos: bool | None = None
    """Put BOS before every document; by default as the tokenizer's own template does."""
    add_eos: bool = True
    """Put the end-of-text token after every document."""
    split_special_tokens: bool = True
    """Special tokens that are written out in a text are text. `false` lets documents contain control tokens."""
    sequence_length: int = 512
    """Tokens per sequence, at most 131,072."""
    packing: Literal["best_fit", "concat", "pad", "window"] = "best_fit"
    """How documents become sequences: `best_fit` cuts few of them, `concat` wastes no token on padding, `pad` gives
    every document sequences of its own, `window` is `best_fit` with context before the pieces of a long document."""
    overlap: int = 0
    """For `packing: window`: tokens of the piece before with which each further piece of a document begins. They are
    read again but not learned again: they have no labels."""
    long_documents: Literal["split", "truncate"] = "split"
    """For `packing: pad`: `truncate` keeps only the first sequence of each document; what is dropped is counted."""
    eval_share: float = 0.02
    """The share of documents that is kept for evaluation, chosen by their content."""
    cache_dir: str = "runs/cache"
    """The folder of all caches; this one becomes `<cache_dir>/<name>-<recipe id>`. Or the folder of one cache."""
    name: str | None = None
    """What the cache is called; by default as its first source."""
    on_mismatch: Literal["error", "rebuild"] = "error"
    """If `cache_dir` is one cache, of another recipe: stop, or move it to `<cache_dir>.old-*` and build anew."""
    sequences_per_chunk: int = 8_000
    """About so many sequences are built and stored together."""
    compression: Literal["none", "fast", "default", "max"] = "default"
    """How hard LZ4 works: `max` takes five times as long for a sixth less space."""
    engine: Literal["auto", "fastokens", "hf"] = "auto"
    """What tokenizes: `auto` takes fastokens where it proves to give the reference's ids."""
    validation: bool = True
    """Read every chunk back after it is written, and compare its hash before it counts."""
    memory_limit: str | None = None
    """What all builders and this process together may take: `16GB`. Decides how many builders there are and how large
    chunks become; documents that are too long for it are refused."""
    workers: int | Literal["auto"] = "auto"
    """Builders, this process among them; `auto` takes the physical cores that may be used, 0 builds without threads."""

    def __post_init__(self) -> None:
        _check(1 < self.sequence_length <= 131_072, "sequence_length", self.sequence_length, "from 2 to 131,072")
        is_window, most = self.packing == "window", self.sequence_length - 1 if self.packing == "window" else 0
        expected = f"from 1 to {most} with `packing: window`" if is_window else "0 unless `packing` is window"
        _check(is_window <= self.overlap <= most, "overlap", self.overlap, expected)
        if self.long_documents == "truncate" and self.packing != "pad":
            raise SettingsError(f"`long_documents: truncate` needs `packing: pad`, not {self.packing}.")
        if isinstance(self.filters, str):
            raise SettingsError(f"filters must be a list of filters, not one text: [{self.filters!r}].")
        normal_filters(self.filters)
        if self.memory_limit is not None:
            parse_size(self.memory_limit)
        _check(0 <= self.eval_share < 1, "eval_share", self.eval_share, "at least 0 and below 1")
        for name, hint in get_type_hints(CacheSettings).items():
            if get_origin(hint) is Literal:
                _check(
                    getattr(self, name) in get_args(hint),
                    name,
                    getattr(self, name),
                    "one of " + ", ".join(get_args(hint)),
                )
        _check(self.download_retries >= 0, "download_retries", self.download_retries, "0 or more")
        _check(self.download_timeout > 0, "download_timeout", self.download_timeout, "above 0")
        _check(self.sequences_per_chunk > 0, "sequences_per_chunk", self.sequences_per_chunk, "above 0")
        if self.max_sequences is not None and self.packing == "pad":
            raise SettingsError("max_sequences cannot be planned with `packing: pad`; limit max_documents instead.")
        for name in ("max_documents", "max_chunks", "max_sequences", "max_tokens"):
            _check(getattr(self, name) is None or getattr(self, name) > 0, name, getattr(self, name), "above 0")
        _check(self.workers == "auto" or self.workers >= 0, "workers", self.workers, "auto, or 0 and more")
        _check(
            self.train_tokenizer is None or self.train_tokenizer >= 257,
            "train_tokenizer",
            self.train_tokenizer,
            "at least 257: 256 bytes and the end of text",
        )
        if self.train_tokenizer is not None and self.tokenizer is None:
            raise SettingsError("train_tokenizer needs `tokenizer`: the folder for the trained tokenizer.")
        if self.name is not None and (not self.name or "/" in self.name or self.name.startswith(".")):
            raise SettingsError(f"name must be usable as a folder name, not {self.name!r}.")

    def open_sources(self) -> list[Source]:
        """The sources: see `corpus.sources.open_sources`."""
        return open_sources(
            self.source,
            text_column=self.text_column,
            sample_by=self.sample_by,
            filters=tuple(self.filters),
            downloads=Downloads(
                streaming=self.streaming,
                folder=self.download_folder,
                retries=self.download_retries,
                timeout_seconds=self.download_timeout,
            ),
        )

    @property
    def max_tokens_in_all(self) -> int | None:
        """What `max_tokens` and `max_sequences` leave, if anything limits them."""
        of_sequences = None if self.max_sequences is None else self.max_sequences * self.sequence_length
        return min((limit for limit in (self.max_tokens, of_sequences) if limit is not None), default=None)


def parse_size(text: str) -> int:
    """'16GB', '1.5 GiB' or '800000000' -> bytes.

    Raises:
        SettingsError: it is no size.
    """
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([kmgt]?i?)b?\s*", str(text).lower())
    if match is None or match[2] == "i" or not (size := round(float(match[1]) * _UNITS[match[2]])):
        raise SettingsError(f"memory_limit must be a size like 16GB or 900MiB, not {text!r}.")
    return size


def _check(holds: bool, name: str, value: object, expected: str) -> None:
    if not holds:
        raise SettingsError(f"{name} must be {expected}, not {value}.")
