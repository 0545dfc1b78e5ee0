"""Settings -> the tokenizer they mean: found, downloaded, or trained on the source."""

import json
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, replace
from importlib.metadata import version
from pathlib import Path

from packhorse.cache import store
from packhorse.cache.cache import cache_root
from packhorse.cache.progress import say
from packhorse.cache.settings import CacheSettings
from packhorse.cache.spool import unpack
from packhorse.cache.typed import make, refuse_unless
from packhorse.corpus.documents import Skipped, file_length, read_documents
from packhorse.corpus.sources import Deferred, Files, Source, check_sources
from packhorse.corpus.tokenizer import (
    TokenizerContent,
    TokenizerFacts,
    locate_tokenizer,
    raw_digest,
    read_tokenizer,
    train_tokenizer,
)
from packhorse.errors import CacheCorruptionError, SourceError, TokenizerError

TRAINING_BYTES = 8_000_000
"""Text that a tokenizer is trained on."""


def resolve_tokenizer(
    settings: CacheSettings,
    *,
    sources: list[Source] | None = None,
    train: bool = True,
    tell: Callable[[str], None] = say,
    on_new: Callable[[Path], None] = lambda path: None,
) -> tuple[TokenizerFacts, TokenizerContent | None]:
    """What the tokenizer of the settings is. Its content is read only when it was never seen before.

    Args:
        settings: The settings.
        sources: What a tokenizer is trained on, if it must be.
        train: Train it if it does not exist and the settings say so.
        tell: Takes messages.
        on_new: Called with the place of a tokenizer that was never seen, before it is read: there can be no cache
            for it yet.

    Raises:
        TokenizerError: there is none, or it cannot be used.
    """
    name = named_tokenizer(settings)
    if settings.train_tokenizer is not None:
        _train(settings, sources, tell) if train else None
    path = locate_tokenizer(name)
    # What was read once is remembered by the hash of the files, so that a start does not parse megabytes of JSON.
    # The ids of the probe set are the reference's: another version of it is asked again.
    key = f"{raw_digest(path)}-{version('tokenizers')}"
    memo = cache_root(settings) / "tokenizers" / f"{key}.json"
    try:
        value = store.read_sealed(memo)
        refuse_unless(value.get("of") == key, memo, "what its name says", "it is of another tokenizer")
        return make(TokenizerFacts, value.get("facts"), memo, "the description of a tokenizer"), None
    except (FileNotFoundError, CacheCorruptionError):
        on_new(path)
        content = read_tokenizer(path)
        if train:
            store.make_folder(memo.parent)
            store.replace(memo, store.seal({"of": key, "facts": asdict(content.facts)}))
        return content.facts, content


def named_tokenizer(settings: CacheSettings) -> str:
    """What the settings say of the tokenizer.

    Raises:
        TokenizerError: they say nothing of it.
    """
    if settings.tokenizer is None:
        raise TokenizerError(
            "No tokenizer is named. Set `tokenizer`: a hub name, a folder, or a tokenizer.json.\n"
            "A whole configuration is given by --config, like that of configs/quickstart.yaml."
        )
    return settings.tokenizer


def _train(settings: CacheSettings, sources: list[Source] | None, tell) -> None:
    """Train the tokenizer of the settings, unless it exists."""
    assert settings.tokenizer is not None
    assert settings.train_tokenizer is not None
    folder = Path(settings.tokenizer).expanduser()
    if (folder / "tokenizer.json").exists():
        try:
            config = json.loads((folder / "tokenizer_config.json").read_bytes())
        except (FileNotFoundError, ValueError):
            config = {}
        wanted = config.get("packhorse_train_tokenizer", settings.train_tokenizer)
        if wanted != settings.train_tokenizer:
            raise TokenizerError(
                f"The tokenizer in {folder} was trained for {wanted} entries; train_tokenizer asks for "
                f"{settings.train_tokenizer}.\nSet `tokenizer` to another folder, or remove this one."
            )
        return
    if sources is None:
        sources = settings.open_sources()
    content = train_on(sources, settings.train_tokenizer, tell)
    config = json.loads(content.files["tokenizer_config.json"])
    config["packhorse_train_tokenizer"] = settings.train_tokenizer
    store.make_folder(folder)
    store.publish(folder / "tokenizer_config.json", json.dumps(config).encode())
    store.publish(folder / "tokenizer.json", content.files["tokenizer.json"])


def train_on(sources: list[Source], vocab_size: int, tell=say) -> TokenizerContent:
    """Train a tokenizer on the beginning of the sources."""
    texts: list[str] = []
    size = 0
    for text in sample_texts(sources):
        texts.append(text)
        size += len(text)
        if size >= TRAINING_BYTES:
            break
    if not texts:
        raise SourceError("The sources have no text to train a tokenizer on.")
    start = time.monotonic()
    content = train_tokenizer(texts, vocab_size)
    tell(
        f"Trained a tokenizer of {content.facts.vocab_size:,} entries on {size / 1e6:.1f} MB of text "
        f"in {time.monotonic() - start:.1f} s."
    )
    return content


def sample_texts(sources: list[Source]) -> Iterator[str]:
    """The texts of the sources, from the beginning.

    Raises:
        SourceError: a source cannot be read, or has no such column.
    """
    check_sources(sources)
    for source in sources:
        source = source.open() if isinstance(source, Deferred) else source
        if isinstance(source, Files):
            for file in source.files:
                if file.packed:
                    yield from _packed_texts(file)
                    continue
                for batch in read_documents(file.file, 0, file_length(file.file), Skipped(), 2**18):
                    yield from batch.texts or []
        else:
            yield from (document for document in source.read(0) if isinstance(document, str) and document)


def _packed_texts(file) -> Iterator[str]:
    with tempfile.TemporaryDirectory() as folder:
        target = Path(folder) / "unpacked"
        unpack(file.file.path, file.packed, file.file.kind, target)
        unpacked = replace(file.file, path=str(target))
        for batch in read_documents(unpacked, 0, file_length(unpacked), Skipped(), 2**18):
            yield from batch.texts or []
