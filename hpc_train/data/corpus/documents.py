"""Cut a corpus into parts that can be tokenized independently, and read each part in pieces of bounded size.

The parts depend on the files alone, so that a build gives the same bytes with any number of workers.
"""

from __future__ import annotations

import codecs
import io
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

from hpc_train.data.corpus.sources import is_of_stdlib
from hpc_train.data.corpus.text_files import UTF8_CONTINUATION, KnownFile
from hpc_train.data.readers.formats import find_format
from hpc_train.data.readers.records import PART_BYTES, Record, Span, drop_nulls
from hpc_train.errors import UserError
from hpc_train.regular_files import open_to_read

PIECE_BYTES = 1 << 20
"""A document is tokenized in pieces of at most this size; nearly every document is one piece."""
BATCH_BYTES = 1 << 22
"""Text in memory at a time, and given to the tokenizer in one call so that it can use several cores."""


@dataclass(frozen=True)
class FilePart:
    """A span of a file, in the unit of its format (bytes for text)."""

    path: Path
    format: str | None
    """Name of the format of records; None for text."""
    span: Span
    size: int
    """Bytes of the file that the span stands for."""
    stamp: tuple[int, int]
    """Size and modification time of the file."""


Part = tuple[FilePart, ...]
"""Consecutive spans of a corpus, about PART_BYTES together."""


class TextPiece(NamedTuple):
    """Consecutive bytes of a document, cut between characters."""

    text: bytes
    first: bool
    last: bool

    @property
    def empty(self) -> bool:
        """Whether this is a document without text, which is counted but not stored."""
        return self.first and self.last and not self.text


def plan_parts(files: Sequence[KnownFile]) -> list[Part]:
    """Cut a corpus into parts. Raises UserError if a file of records is damaged."""
    parts: list[Part] = []
    current: list[FilePart] = []
    size = 0
    for file in files:
        for piece in _split_file(file):
            current.append(piece)
            size += piece.size
            if size >= PART_BYTES // 2:
                parts.append(tuple(current))
                current, size = [], 0
    return [*parts, tuple(current)] if current else parts


def read_pieces(part: Part, column: str) -> Iterator[TextPiece]:
    """Read the documents of a part: the text of a text file, or a column of each record. Raises UserError."""
    for piece in part:
        if piece.format is None:
            yield from _read_text_span(piece.path, piece.span)
        else:
            for where, record in read_records(piece, column):
                yield from cut_text(_check_text(where, column, record.value))


def read_records(piece: FilePart, column: str, beside: str | None = None) -> Iterator[tuple[Callable[[], str], Record]]:
    """Read a column of a span of records, and a second column if there is one. Raises UserError.

    Yields (function that says where the record is, record).
    """
    assert piece.format is not None
    format = find_format(piece.format)
    for record in format.read(piece.path, piece.span, column, beside):
        if format.fills:
            record = Record(record.place, drop_nulls(record.value), drop_nulls(record.beside))
        yield partial(format.describe, piece.path, record.place), record


def iterate_batches(pieces: Iterable[TextPiece]) -> Iterator[list[TextPiece]]:
    """Group pieces in order into batches of at least BATCH_BYTES, except for the last one."""
    batch: list[TextPiece] = []
    size = 0
    for piece in pieces:
        batch.append(piece)
        size += len(piece.text) + 1  # so that empty documents without end do not gather
        if size >= BATCH_BYTES:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch


def cut_text(text: bytes) -> Iterator[TextPiece]:
    """Cut a document that is in memory into the same pieces as a text file with this content."""
    return _cut_stream(io.BytesIO(text), len(text), True, True)


def _split_file(recognised: KnownFile) -> list[FilePart]:
    file = recognised.file
    if recognised.format is None:
        cuts = range(0, max(file.size, 1), PART_BYTES)
        spans = [Span(begin, min(begin + PART_BYTES, file.size)) for begin in cuts]
    else:
        spans = find_format(recognised.format).split(file.path)
    sizes = [file.size * (index + 1) // len(spans) - file.size * index // len(spans) for index in range(len(spans))]
    stamp = (file.size, file.mtime_ns)
    return [FilePart(file.path, recognised.format, span, size, stamp) for span, size in zip(spans, sizes, strict=True)]


def _check_text(where: Callable[[], str], column: str, value: Any) -> bytes:
    if value is None:
        return b""
    if isinstance(value, bytes):  # tables of programs that mark no column as text
        return _check_bytes(where, column, value)
    if not isinstance(value, str):
        kinds = {bool: "a truth value", int: "a number", float: "a number", list: "a list", dict: "an object"}
        hint = "; a list of messages is a chat: --chat" if isinstance(value, list) else ""
        kind = kinds.get(type(value), type(value).__name__)
        raise UserError(f"{where()}: column {column!r} is {kind}, expected text{hint}")
    return value.encode()


def _check_bytes(where: Callable[[], str], column: str, value: bytes) -> bytes:
    try:
        value.decode()
    except UnicodeDecodeError:
        raise UserError(f"{where()}: column {column!r} is bytes that are not UTF-8, expected text") from None
    return value


def _read_text_span(path: Path, span: Span) -> Iterator[TextPiece]:
    """Read the characters of a text file that begin in a span."""
    try:
        with open_to_read(path) as file:
            size = file.seek(0, io.SEEK_END)
            begin, end = _find_next_character(file, span.begin), _find_next_character(file, min(span.end, size))
            file.seek(begin)
            if begin == 0 and not is_of_stdlib(path) and file.read(3) == codecs.BOM_UTF8:
                begin = 3  # a byte order mark is not text
            file.seek(begin)
            yield from _cut_stream(file, end - begin, span.begin == 0, span.end >= size)
    except OSError as error:
        raise UserError(f"cannot read {path}: {error.strerror or error}") from error


def _find_next_character(file: BinaryIO, place: int) -> int:
    """Return where the first UTF-8 character at or after `place` begins; at most three bytes further."""
    if place == 0:
        return 0
    file.seek(place)
    following = file.read(3)
    return place + len(following) - len(following.lstrip(UTF8_CONTINUATION))


def _cut_stream(file: BinaryIO, length: int, first: bool, last: bool) -> Iterator[TextPiece]:
    """Cut the next `length` bytes of a file into pieces. first, last: whether the document begins and ends there."""
    text = file.read(min(PIECE_BYTES, length))
    left = length - len(text)
    while left > 0 and (following := file.read(min(PIECE_BYTES - 4, left))):
        left -= len(following)
        cut = _find_character_boundary(text)
        yield TextPiece(text[:cut], first, False)
        text, first = text[cut:] + following, False
    yield TextPiece(text, first, last)


def _find_character_boundary(text: bytes) -> int:
    """Return where the last UTF-8 character begins; the length if none of the last four bytes begins one."""
    for back in range(1, min(4, len(text)) + 1):
        if text[-back] & 0xC0 != 0x80:
            return len(text) - back
    return len(text)
