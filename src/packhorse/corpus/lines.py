r"""Text files -> pieces of bytes, each a document -> cells.

Bytes are cut at b"\n" only (paragraphs at two in a row, also b"\r\n\r\n"): `str.splitlines` would also cut at U+2028
inside a JSON string.

    b'{"text": "a"}\n{"text": "b"}\n'  ->  b'{"text": "a"}\n', b'{"text": "b"}\n'  ->  "a", "b"
"""

import codecs
import gzip
import io
import json
import re
import shlex
import zlib
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING

from packhorse.corpus.filters import LEFT_OUT, parse_filters, passes
from packhorse.corpus.tables import to_ids
from packhorse.errors import DocumentTooLongError, SourceError

if TYPE_CHECKING:
    from packhorse.corpus.documents import TextFile

COMPRESSIONS = (".gz", ".zst", ".bz2", ".xz")
BLOCK_BYTES = 2**20
"""Bytes that are read at a time."""

_LINE_END = re.compile(rb"\n")
_PARAGRAPH_END = re.compile(rb"\n\r?\n")
_FIRST_PARAGRAPH_END = re.compile(rb"\n(?:(?<=[^\r\n]\n)|(?<=[^\r\n]\r\n))\r?\n")
"""The first of those between two texts: where the others lie depends on where one begins to count."""
_LONGEST = 5
"""Bytes of such an end, with those before it that are looked at."""


def line_cells(file: "TextFile", start: int, stop: int, batch_bytes: int, max_bytes: int | None) -> Iterator[list]:
    """The cells of a range, about `batch_bytes` at a time: texts, lists of ids, `LEFT_OUT`, or what is no text.

    Raises:
        DocumentTooLongError: a document is longer than `max_bytes`.
        SourceError: the file cannot be read, or a line is not valid JSON.
    """
    parse = _parse_json if file.kind == "jsonl" else _parse_text
    cells: list = []
    size = 0
    place = start
    for piece in pieces(file, start, stop, max_bytes):
        cells.append(parse(piece, file, place))
        place += len(piece)
        size += len(piece)
        if size >= batch_bytes:
            yield cells
            cells, size = [], 0
    if cells:
        yield cells


def find_cut(file: "TextFile", place: int, stop: int) -> int:
    """A border between documents at or after byte `place`, the first but for those among blank lines.

    Who reads the file from its beginning, or from any border, finds one there too.
    """
    if file.kind == "document":
        return stop
    end = _FIRST_PARAGRAPH_END if file.kind == "paragraph" else _LINE_END
    first = max(place - _LONGEST, 0)
    data = b""
    with open(file.path, "rb") as stream:
        stream.seek(first)
        while first + len(data) < stop:
            block = stream.read(min(BLOCK_BYTES, stop - first - len(data)))
            if not block:
                break
            data += block
            for match in end.finditer(data):
                if first + match.end() >= place:
                    return first + match.end()
            first += max(len(data) - _LONGEST, 0)
            data = data[-_LONGEST:]
    return stop


def pieces(file: "TextFile", start: int, stop: int, max_bytes: int | None = None) -> Iterator[bytes]:
    """The raw bytes of each document, borders included: together they are the whole range."""
    end = _PARAGRAPH_END if file.kind == "paragraph" else _LINE_END
    with _open(file.path) as stream:
        if file.kind == "document":
            refuse_longer(stop - start, max_bytes, file)
            stream.seek(start)
            data = stream.read(stop - start)
            if data:
                yield data
            return
        # Joined only where a document ends: a long one is not copied again for every block of it.
        waiting: list[bytes] = []
        edge = b""
        for block in _blocks(stream, start, stop):
            waiting.append(block)
            seen = edge + block
            if not end.search(seen):
                edge = seen[-2:]  # the end of a paragraph may lie in three blocks
                refuse_longer(sum(map(len, waiting)), max_bytes, file)
                continue
            *whole, tail = _cut(b"".join(waiting), file.kind)
            for piece in whole:
                refuse_longer(len(piece), max_bytes, file)
                yield piece
            waiting, edge = [tail] if tail else [], tail[-2:]
        if waiting:
            yield b"".join(waiting)


def parse_row(line: bytes, file: "TextFile", place: int) -> dict | None:
    """The object in the JSON line at byte `place`, or None for one that is left out and counted.

    Raises:
        SourceError: it is not valid JSON, and the file is read strictly.
    """
    try:
        row = json.loads(line)
        if not isinstance(row, dict):
            raise ValueError(f"an object with the key {file.column!r} is expected, not {type(row).__name__}")
        return row
    except UnicodeDecodeError:
        return None
    except (ValueError, RecursionError) as error:
        if not file.is_strict:
            return None
        raise SourceError(
            f"{file.path}, line {_line_number(file, place)} is not valid JSON: {error}.\n"
            "Set `invalid_rows: skip` to leave such lines out and count them: what was built stays, and the same "
            "command goes on. A mended file is another file: to build from one, set `name`, for another cache."
        ) from None


def whole_lines(file: "TextFile", start: int, stop: int) -> int:
    """Where the last whole line of a range of JSON lines ends: the one behind it may still be in the writing.

    A range that ended inside of a line could never be continued.

    Raises:
        SourceError: what stands behind it is not valid JSON, and the file is read strictly.
    """
    blocks: list[bytes] = []
    end = stop
    with open(file.path, "rb") as stream:
        while end > start and not (blocks and b"\n" in blocks[-1]):
            stream.seek(begin := max(start, end - BLOCK_BYTES))
            blocks.append(stream.read(end - begin))
            end = begin
    line = b"".join(reversed(blocks))
    line = line[line.rfind(b"\n") + 1 :]
    if not line.strip():
        return stop
    try:
        if isinstance(json.loads(line), dict):
            return stop
    except (ValueError, RecursionError):
        pass
    if file.is_strict:
        raise SourceError(
            f"{file.path} ends in the middle of a line ({line[:40].decode(errors='replace')!r} ...): it is cut off, or "
            "still being written.\nRun the same command again when it is whole. With `invalid_rows: skip` the lines "
            "before it are taken at once, and the rest when it is there."
        )
    return stop - len(line)


def refuse_longer(size: int, max_bytes: int | None, file: "TextFile") -> None:
    """Refuse a document that a memory limit leaves no room for."""
    if max_bytes is not None and size > max_bytes:
        raise DocumentTooLongError(
            f"{file.path} has a document of {size / 1e6:,.1f} MB or more; `memory_limit` leaves room for "
            f"{max_bytes / 1e6:,.1f} MB.\nRaise the limit, set fewer `workers`, or leave the document out."
        )


def decompress(path: str) -> Iterator[bytes]:
    """The content of a compressed file (gz, zst, bz2, xz), a block at a time.

    Raises:
        SourceError: it is damaged, or is no UTF-8.
    """
    import bz2
    import lzma

    openers = {".gz": gzip.open, ".bz2": bz2.open, ".xz": lzma.open, ".zst": _open_zstd}
    try:
        with openers[Path(path).suffix](path, "rb") as stream:
            block = stream.read(BLOCK_BYTES)
            refuse_utf16(block, Path(path))
            yield block
            while block := stream.read(BLOCK_BYTES):
                yield block
    except (OSError, EOFError, lzma.LZMAError, zlib.error) as error:
        raise SourceError(f"The compressed file {path} cannot be read: it is damaged or cut off ({error}).") from None


def refuse_utf16(head: bytes, path: Path) -> None:
    """Refuse text that begins as UTF-16 does: as UTF-8 it would be rows that are not valid, or garbage."""
    if head.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)):
        plain = Path(path.stem) if path.suffix in COMPRESSIONS else path
        raise SourceError(
            f"The file {path} is UTF-16, and text must be UTF-8.\nConvert it: iconv -f UTF-16 -t UTF-8 "
            f"{shlex.quote(plain.name)} > {shlex.quote(f'{plain.stem}.utf8{plain.suffix}')}"
        )


def starts_with_bracket(data: bytes) -> bool:
    """Whether JSON that begins so is one array, not a row a line."""
    return data.lstrip(b"\xef\xbb\xbf \t\r\n")[:1] == b"["


def _cut(data: bytes, kind: str) -> list[bytes]:
    """Documents with the borders behind them; the last has none, and may be empty."""
    if kind == "paragraph":
        ends = (match.end() for match in _PARAGRAPH_END.finditer(data))
        return [data[start:stop] for start, stop in pairwise([0, *ends, len(data)])]
    lines = io.BytesIO(data).readlines()
    return lines if not data.endswith(b"\n") else [*lines, b""]


def _parse_text(piece: bytes, file: "TextFile", place: int) -> str:
    if place == 0:
        piece = piece.removeprefix(codecs.BOM_UTF8)
    if file.kind != "document":
        piece = piece.rstrip(b"\r\n")
    return piece.replace(b"\r\n", b"\n").decode("utf-8", "surrogateescape")


def _parse_json(piece: bytes, file: "TextFile", place: int) -> object:
    if not piece.strip():
        return ""
    row = parse_row(piece, file, place)
    if row is None:
        return piece  # counted as invalid
    try:
        if not passes(row, parse_filters(file.filters)):
            return LEFT_OUT
    except ValueError as error:
        raise SourceError(f"{file.path}, line {_line_number(file, place)}: {error}.") from None
    value = row.get(file.column)
    return to_ids(value) if isinstance(value, list) else value


def _line_number(file: "TextFile", place: int) -> int:
    with open(file.path, "rb") as stream:
        return 1 + sum(block.count(b"\n") for block in _blocks(stream, 0, place))


def _open(path: str):
    try:
        return open(path, "rb")
    except OSError as error:
        raise SourceError(f"The source file {path} cannot be read: {error.strerror}.") from None


def _blocks(stream, start: int, stop: int) -> Iterator[bytes]:
    stream.seek(start)
    while start < stop:
        block = stream.read(min(BLOCK_BYTES, stop - start))
        if not block:
            raise SourceError(f"{stream.name} is shorter than it was when the plan was made.")
        start += len(block)
        yield block


def _open_zstd(path: str, mode: str):
    import pyarrow as pa

    return pa.CompressedInputStream(pa.OSFile(path, mode), "zstd")
