"""What a chunk holds, compared with what it should: its own laws, and its source.

A chunk whose hashes are right may still have been built wrongly: by a defect of this program, of an engine, or of the
memory of the machine that built it. So all of it is decoded and held against the laws of packing, and some documents
are read from the source and tokenized again by the reference.
"""

import tempfile
from collections.abc import Iterable, Iterator
from pathlib import Path

import numpy as np

from packhorse.cache.build import Job
from packhorse.cache.locations import Locations
from packhorse.cache.plan import Plan
from packhorse.cache.reader import ChunkReader
from packhorse.cache.recipe import Identity, Recipe, tokenizer_json
from packhorse.cache.record import Record, chunk_path
from packhorse.cache.report import Report
from packhorse.cache.restore import restore
from packhorse.corpus.documents import Documents, Skipped, read_ranges, take_documents
from packhorse.corpus.engines import Engine, make_engine
from packhorse.corpus.sources import Source
from packhorse.corpus.tokens import tokenize
from packhorse.errors import PackhorseError

SAMPLE_CHUNKS, SAMPLE_DOCUMENTS = 16, 32
"""So many chunks, spread over the cache, have so many of their documents tokenized again."""


def check_content(reader: ChunkReader, record: Record, recipe: Recipe) -> list[str]:
    """Which laws of packing a chunk breaks, in words. Its hashes must have been verified."""
    header, length = reader.header, recipe.sequence_length
    tokens = reader.all_tokens()
    counts = reader.side("pieces_per_sequence").astype(np.int64)
    lengths = reader.side("piece_lengths").astype(np.int64)
    documents = reader.side("piece_documents")
    sides = reader.side("document_sides")
    if int(counts.sum()) != header.num_pieces:
        return [f"its sequences have {int(counts.sum())} pieces in all, not {header.num_pieces}"]
    if len(documents) and int(documents.max()) >= header.num_documents:
        return [f"a piece is of document {int(documents.max())}, and there are {header.num_documents}"]
    used = np.bincount(np.repeat(np.arange(len(counts)), counts), weights=lengths, minlength=len(counts)).astype(int)
    is_padding = np.arange(length) >= used[:, None]
    is_eval = np.repeat(np.arange(len(counts)) >= header.num_train, counts)
    pieces = np.bincount(documents, minlength=header.num_documents)
    sums = (int(lengths[~is_eval].sum()), int(lengths[is_eval].sum()))
    rows = reader.side("document_rows").astype(np.int64)
    largest, cut, evaluation = int(tokens.max(initial=0)), int((pieces > 1).sum()), int(sides.sum())
    said = (record.train_tokens, record.eval_tokens)
    laws = [
        (largest < recipe.vocab_size, f"an id is {largest}, and the vocabulary has {recipe.vocab_size}"),
        ((used <= length).all(), "a sequence has pieces of more than its length"),
        ((counts > 0).all() and (lengths > 0).all(), "a sequence or a piece is empty"),
        ((tokens[is_padding] == recipe.pad_id).all(), "a sequence is padded with something else than padding"),
        ((pieces > 0).all(), "a document has no piece"),
        ((sides[documents] == is_eval).all(), "a document stands on the wrong side of the split"),
        ((np.diff(rows) > 0).all(), "its documents are not in the order of the source"),
        (sums == said, f"it has {sums} train and eval tokens, its record says {said}"),
        (
            evaluation == record.eval_documents,
            f"{evaluation} documents are for evaluation, not {record.eval_documents}",
        ),
        (cut == record.cut_documents, f"{cut} documents are cut, its record says {record.cut_documents}"),
    ]
    return [problem for holds, problem in laws if not holds]


def check_sample(
    plan: Plan, identity: Identity, records: Iterable[Record], sources: list[Source] | None, report: Report
) -> int:
    """Tokenize some documents again, and compare them with what the chunks hold.

    Args:
        plan: The plan of the cache.
        identity: Its recipe.
        records: What is committed.
        sources: What the settings name; None if nobody says.
        report: Takes what is wrong, and why something could not be looked at.

    Returns:
        How many documents were compared.
    """
    damaged = set(report.damaged_chunks)
    good = [record for record in records if record.chunk not in damaged and record.chunk < plan.num_chunks]
    places = sorted({len(good) * place // SAMPLE_CHUNKS for place in range(SAMPLE_CHUNKS)}) if good else []
    compared = 0
    with tempfile.TemporaryDirectory(prefix="packhorse-") as scratch:
        locations = Locations(plan, sources or [], Path(scratch))
        engine: Engine | None = None
        for record in (good[place] for place in places):
            try:
                if engine is None:
                    text, folder = tokenizer_json(plan.folder, identity), str(plan.folder / "tokenizer")
                    engine, _ = make_engine("hf", text, identity.recipe.split_special_tokens, folder)
                files = {number: locations.locate(number) for number, _, _ in record.ranges}
                job = Job(chunk=record.chunk, ranges=record.ranges, files=files, dropped=plan.dropped(record.chunk))
                compared += _compare(plan.folder, record, job, identity.recipe, engine, report)
            except PackhorseError as error:
                report.notes.append(f"chunk {record.chunk} was not tokenized again: {str(error).splitlines()[0]}")
    return compared


def _compare(folder: Path, record: Record, job: Job, recipe: Recipe, engine: Engine, report: Report) -> int:
    """Tokenize documents of a chunk again; how many."""
    path = chunk_path(folder, record.chunk, record.file_sha256)
    restored = restore(ChunkReader(path, record.chunk, record.recipe, bytes.fromhex(record.index_sha256)), recipe)
    draw = np.random.default_rng(record.chunk)
    count = min(SAMPLE_DOCUMENTS, len(restored.rows))
    numbers = np.sort(draw.choice(len(restored.rows), count, replace=False)) if count else np.empty(0, np.int64)
    found = {row: (ids, is_eval) for row, ids, is_eval in _again(job, recipe, engine, restored.rows[numbers])}
    for number in numbers.tolist():
        row = int(restored.rows[number])
        ids, is_eval = found.get(row, (np.empty(0), False))
        if recipe.long_documents == "truncate":
            ids = ids[: recipe.sequence_length]
        if not np.array_equal(ids, restored.document(number)):
            problem = f"{path} holds other tokens of row {row} of its source than the reference gives."
        elif is_eval != restored.is_eval[number]:
            problem = f"{path} has row {row} of its source on the wrong side of the split."
        else:
            continue
        report.add("chunk", path, problem, record.chunk)
        break
    return count


def _again(job: Job, recipe: Recipe, engine: Engine, rows: np.ndarray) -> Iterator[tuple[int, np.ndarray, bool]]:
    """(row, ids, whether it is for evaluation) of some documents of a source range."""
    for tokens in tokenize(
        _some(job, rows),
        engine,
        Skipped(),
        **recipe.token_policy,
    ):
        starts = np.r_[0, tokens.ends[:-1]]
        for row, start, end, is_eval in zip(tokens.rows, starts, tokens.ends, tokens.is_eval, strict=True):
            yield int(row), tokens.ids[start:end], bool(is_eval)


def _some(job: Job, rows: np.ndarray) -> Iterator[Documents]:
    ranges = ((job.files[number], start, stop) for number, start, stop in job.ranges)
    for batch in read_ranges(ranges, Skipped(), job.dropped):
        keep = np.flatnonzero(np.isin(batch.rows, rows))
        if len(keep):
            yield take_documents(batch, keep)
