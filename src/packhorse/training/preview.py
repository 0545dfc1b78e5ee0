"""`packhorse preview`: what would happen, before any work. Writes nothing."""

from pathlib import Path
from typing import Any

import torch
from lightning import Trainer
from transformers import AutoModelForCausalLM

from packhorse.cache import CacheSettings, DataSettings, open_cache
from packhorse.cache.estimate import estimate_cache
from packhorse.cache.plan import Plan
from packhorse.cache.planned import refuse_other_sources
from packhorse.cache.tokenizers import named_tokenizer, sample_texts, train_on
from packhorse.cache.update import folder_of
from packhorse.corpus.engines import Reference
from packhorse.corpus.files import columns_of
from packhorse.corpus.sources import Deferred, Files, Source
from packhorse.corpus.tokenizer import TokenizerContent, locate_tokenizer, read_tokenizer
from packhorse.errors import CacheIncompleteError, SourceError, TokenizerError
from packhorse.training.telling import memory_lines, weight_of
from packhorse.training.trainer_limits import check_limits

DOCUMENTS = 3
PLACES = 60
"""Of the sources, to estimate their size."""


def preview(cli: Any) -> int:
    """Print source, tokenizer, model and the steps to expect.

    Args:
        cli: A parsed command line: its DataModule, module and Trainer were made, but nothing was run.
    """
    settings = cli.datamodule.settings
    check_limits(cli.trainer, settings, cli.model.schedule_settings)
    sources = {name: each.open_sources() for name, each in settings.caches.items()}
    content = _tokenizer(settings.cache, sources[next(iter(sources))])
    engine = Reference(content.json, settings.split_special_tokens) if content.json else None
    for name, each in sources.items():
        texts = [text for _, text in zip(range(DOCUMENTS), sample_texts(each), strict=False)]
        title = f" {name}{weight_of(name, settings)}" if len(sources) > 1 else ""
        print("\n".join([f"Source{title}", *_source_lines(each, texts, engine), ""]))
    facts = content.facts
    made = (
        "" if Path(settings.tokenizer).expanduser().exists() or settings.train_tokenizer is None else " (to be trained)"
    )
    print(
        f"Tokenizer\n  {settings.tokenizer}{made}: {facts.vocab_size:,} entries, "
        f"BOS {facts.bos_id}, EOS {facts.eos_id}, PAD {facts.pad_id}; a document is "
        + " + ".join(
            part
            for part, there in (
                ("BOS", facts.adds_bos if settings.add_bos is None else settings.add_bos),
                ("text", True),
                ("EOS", settings.add_eos),
            )
            if there
        )
    )
    size = cli.model.declared_vocab_size
    if size is not None and size < facts.vocab_size:
        raise TokenizerError(f"The tokenizer has {facts.vocab_size:,} entries, the model's vocabulary {size:,}.")
    print("\n".join(_model_lines(cli, facts.vocab_size)))
    print("\n".join(_run_lines(cli, settings)))
    return 0


def _tokenizer(settings: CacheSettings, sources: list[Source]) -> TokenizerContent:
    name = named_tokenizer(settings)
    try:
        return read_tokenizer(locate_tokenizer(name))
    except TokenizerError:
        if settings.train_tokenizer is None:
            raise
    # `fit` would train it and keep it; here it is trained to look at it, and forgotten.
    return train_on(sources, settings.train_tokenizer)


def _source_lines(sources: list[Source], texts: list[str], engine: Reference | None) -> list[str]:
    lines = []
    for source in sources:
        source = source.open() if isinstance(source, Deferred) else source
        if isinstance(source, Files):
            size = sum(file.size for file in source.files)
            lines.append(f"  {source.key}: {len(source.files):,} files, {size / 1e6:,.1f} MB")
            lines.append(f"  columns of the first: {', '.join(columns_of(source.files[0])) or 'none (plain text)'}")
        else:
            size = "" if source.text_bytes is None else f", {source.text_bytes / 1e6:,.1f} MB"
            lines.append(f"  {source.key}: a stream of documents{size}")
    lines.append(f"\nThe first {DOCUMENTS} documents")
    for text in texts:
        lines.append(f"  {len(text):,} characters: {text[:100]!r}")
        if engine is not None:
            ids, _ = engine.encode([text])
            lines.append(f"  {len(ids):,} tokens: {' '.join(map(str, ids[:16].tolist()))} ...")
    return lines


def _model_lines(cli: Any, vocab_size: int) -> list[str]:
    config = cli.model.make_config(vocab_size)
    with torch.device("meta"):
        parameters = sum(p.numel() for p in AutoModelForCausalLM.from_config(config).parameters())
    attention = config.infini_attention
    return [
        "\nModel",
        f"  {config.num_hidden_layers} layers, hidden size {config.hidden_size}, {config.num_attention_heads} heads "
        f"({config.num_key_value_heads} for keys and values), vocabulary {config.vocab_size:,}",
        f"  segments of {attention.segment_length} tokens, memory {'on' if attention.turn_on_memory else 'off'}",
        *memory_lines(attention, cli.datamodule.settings.sequence_length),
        f"  {parameters:,} parameters, {16 * parameters / 1e6:,.0f} MB with gradients and optimizer",
    ]


def _run_lines(cli: Any, settings: DataSettings) -> list[str]:
    lines, known = ["\nRun"], []
    for name, each in settings.caches.items():
        count, how = _sequences(each)
        told = "the length of a stream is known when it was read"
        if count is not None:
            known.append(count)
            told = f"about {count:,} train sequences of {settings.sequence_length} tokens ({how})"
        lines.append(f"  {name}{weight_of(name, settings)}: {told}" if len(settings.caches) > 1 else f"  {told}")
    return [*lines, *_step_lines(cli.trainer, settings, known)]


def _step_lines(trainer: Trainer, settings: DataSettings, known: list[int]) -> list[str]:
    """Steps of the run; `known` are the train sequences of the caches that are no streams."""
    batch = trainer.world_size * settings.micro_batch_size * trainer.accumulate_grad_batches
    limits = []
    if settings.max_train_tokens is not None:
        limits.append(settings.max_train_tokens // settings.sequence_length // batch)
    if trainer.max_epochs is not None and trainer.max_epochs > 0 and len(settings.caches) == len(known) == 1:
        limits.append(known[0] * trainer.max_epochs // batch)
    if trainer.max_steps > 0:
        limits.append(trainer.max_steps)
    if not limits and len(settings.caches) > 1:
        return ["  a mixture has no length of its own: set `trainer.max_steps` or `data.max_train_tokens`"]
    return [f"  {min(limits):,} steps of {batch} sequences"] if limits else []


def _sequences(settings: CacheSettings) -> tuple[int | None, str]:
    """Train sequences of a cache, and how they are known; None when nobody can know before reading."""
    sources = settings.open_sources()
    try:
        plan = Plan(folder_of(settings))
        refuse_other_sources(plan, sources)
        cache = open_cache(settings)
        there = cache.num_sequences("train")
        if not _will_grow(settings, sources, plan):
            return there, f"the cache {cache.folder} is there"
        how = f"an estimate; the cache {cache.folder} has {there:,} so far and will grow"
    except (CacheIncompleteError, TokenizerError):
        there, how = 0, "an estimate; there is no cache yet"
    try:
        found = estimate_cache(settings, places=PLACES).sequences.estimate
    except SourceError:
        return there or None, "what is there; more will be known when the stream was read" if there else ""
    return max(there, round(found * (1 - settings.eval_share))), how


def _will_grow(settings: CacheSettings, sources: list[Source], plan: Plan) -> bool:
    """Whether the settings ask for more than is planned, as far as that is known without reading."""
    if all(source.key in plan.finished for source in sources):
        return False
    rows = [page.rows for page in plan.pages]
    return settings.max_documents is None or None in rows or sum(rows) < settings.max_documents
