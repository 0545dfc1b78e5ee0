"""A cache -> a DatasetDict of `datasets` on disk, as trainers of transformers take it; and back.

    FOLDER/train, FOLDER/eval    input_ids, attention_mask, labels: one row a sequence, padded
    FOLDER/metadata.json         a copy of the cache's
    FOLDER/tokenizer/            a copy of the tokenizer

Labels stand at the place of their token, as transformers wants them (it shifts them itself). -100, no loss, is at
padding, at the first token of every piece (what comes before it is of another document), and at tokens that
`packing: window` has repeated.
"""

import json
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from packhorse.cache import store
from packhorse.cache.cache import Cache
from packhorse.cache.reader import ChunkReader, Split
from packhorse.cache.recipe import Recipe
from packhorse.cache.regular import read_file, read_parts
from packhorse.cache.restore import arrange
from packhorse.errors import CacheError, SettingsError, SourceError

IGNORE_INDEX = -100
SHARD_BYTES = 500_000_000


def rows_of(reader: ChunkReader, recipe: Recipe) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """input_ids int32, attention_mask int8 and labels int32 of a chunk's sequences, each [n, sequence_length]."""
    ids, pieces = reader.all_tokens().astype(np.int32), arrange(reader, recipe)
    used = np.bincount(pieces.sequences, weights=pieces.lengths, minlength=len(ids)).astype(np.int64)
    mask = np.arange(recipe.sequence_length) < used[:, None]
    labels = np.where(mask, ids, np.int32(IGNORE_INDEX))
    ignored = np.maximum(pieces.repeated, 1)
    first = pieces.sequences * recipe.sequence_length + pieces.starts
    places = np.repeat(first - (np.cumsum(ignored) - ignored), ignored) + np.arange(int(ignored.sum()))
    labels.reshape(-1)[places] = IGNORE_INDEX
    return ids, mask.astype(np.int8), labels


def export_rows(cache: Cache, target: Path) -> dict[str, int]:
    """Write a cache as a data set of `datasets`, a chunk at a time; the folder appears when it is complete.

    Returns:
        Rows of each side.

    Raises:
        SettingsError: the folder exists.
    """
    if target.exists():
        raise SettingsError(f"{target} exists. Name another folder, or remove it.")
    from datasets import Dataset, DatasetDict, Features, List, Value

    store.make_folder(target.parent)
    kinds = {"input_ids": "int32", "attention_mask": "int8", "labels": "int32"}
    features = Features({name: List(Value(kind), length=cache.sequence_length) for name, kind in kinds.items()})
    with (
        store.disk_errors(target),
        tempfile.TemporaryDirectory(prefix=store.TEMPORARY, dir=target.parent) as scratch,
    ):
        sides = {}
        for split in ("train", "eval"):
            arrow = Path(scratch) / f"{split}.arrow"
            _write_arrow(cache, split, arrow, features.arrow_schema)
            sides[split] = Dataset.from_file(str(arrow))
        done = Path(scratch) / "done"
        # `datasets` cannot load what it saved in no shard.
        shards = {split: 1 + side.data.nbytes // SHARD_BYTES for split, side in sides.items()}
        DatasetDict(sides).save_to_disk(done, num_shards=shards)
        for path in (cache.folder / "metadata.json", *sorted(cache.tokenizer_folder.rglob("*"))):
            if path.is_file():
                copy = done / path.relative_to(cache.folder)
                store.make_folder(copy.parent)
                store.replace(copy, read_parts(path))
        shutil.move(done, target)
    return {split: len(side) for split, side in sides.items()}


class RowDocuments:
    """Iterates over the pieces in the rows of a data set as `export_rows` writes it, as ids: a source.

    Padding is left out (`attention_mask`, if there is one), and a row is cut where its labels say that a piece begins;
    without labels a row is one document.

    Args:
        path: The folder of the data set: one split, as `datasets` saved it.

    Raises:
        SourceError: it cannot be read, or has no column `input_ids`.
    """

    is_final = True
    """A piece need not be a whole document."""

    def __init__(self, path: str | Path) -> None:
        from datasets import Dataset, load_from_disk

        self.path = Path(path).expanduser()
        try:
            self.rows = load_from_disk(str(self.path))
        except (OSError, ValueError, KeyError) as error:
            raise SourceError(f"{self.path} is not a data set that `datasets` saved: {error}") from None
        if not isinstance(self.rows, Dataset):
            raise SourceError(f"{self.path} holds several splits: name one, like {self.path}/train.")
        if "input_ids" not in self.rows.column_names:
            raise SourceError(f"{self.path} has no column input_ids. It has: {', '.join(self.rows.column_names)}.")
        if _overlap(self.path.parent / "metadata.json"):
            raise SourceError(f"The rows of {self.path} repeat tokens (`packing: window`): repack the cache instead.")

    @property
    def fingerprint(self) -> str:
        """As `datasets` knows it."""
        return str(self.rows._fingerprint)

    def __iter__(self) -> Iterator[np.ndarray]:
        for row in self.rows.with_format("numpy"):
            ids = np.asarray(row["input_ids"])
            mask = np.asarray(row.get("attention_mask", np.ones_like(ids))).astype(bool)
            labels = row.get("labels")
            starts = (
                np.flatnonzero(np.asarray(labels)[mask] == IGNORE_INDEX) if labels is not None else np.empty(0, int)
            )
            yield from (piece for piece in np.split(ids[mask], starts[starts > 0]) if len(piece))


def _overlap(metadata: Path) -> int:
    """What the metadata of an export say; 0 if there are none."""
    try:
        return int(json.loads(read_file(metadata, 2**24))["packing"]["overlap"])
    except (OSError, ValueError, KeyError, TypeError, CacheError):
        return 0


def _write_arrow(cache: Cache, split: Split, path: Path, schema) -> None:
    """Write the rows of a side as one arrow file, a chunk at a time."""
    import pyarrow as pa

    with pa.OSFile(str(path), "wb") as file, pa.ipc.new_stream(file, schema) as stream:
        for number in range(cache.snapshot.num_chunks):
            reader = cache.chunk(number)
            train = reader.header.num_train
            rows = slice(0, train) if split == "train" else slice(train, None)
            flat = (pa.array(column[rows].reshape(-1)) for column in rows_of(reader, cache.recipe))
            columns = [pa.FixedSizeListArray.from_arrays(values, cache.sequence_length) for values in flat]
            stream.write_table(pa.Table.from_arrays([pa.chunked_array([c]) for c in columns], schema=schema))
