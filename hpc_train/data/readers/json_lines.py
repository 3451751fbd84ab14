"""JSON Lines: an object per line (jsonlines.org), plain or compressed with gzip or zstd."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO

from hpc_train.data.readers.compressed import is_compressed, open_unpacked, read_unpacked_head
from hpc_train.data.readers.records import (
    MAX_RECORD_BYTES,
    PART_BYTES,
    FileSample,
    Record,
    Span,
    find_field,
    get_field,
    list_fields,
    open_records,
    read_bounded_lines,
    refuse_long_line,
    refuse_missing_column,
    refuse_repeated_column,
    split_column,
)
from hpc_train.errors import UserError
from hpc_train.terminal import one_line

_HEAD_BYTES = 1 << 16
_SUFFIXES = frozenset({".jsonl", ".ndjson"})
_MARK = b"\xef\xbb\xbf"
_SCAN_BYTES = 1 << 20
_SURROGATE = re.compile(rb"\\u[dD][89a-fA-F]")
"""The escape of half of a character, two of which make one."""


def matches_json_lines(sample: FileSample) -> bool:
    """Return whether the first lines are JSON objects; of a file whose name says so, the first line is enough."""
    name, compressed = sample.path.name.lower(), is_compressed(sample.head)
    # explain_unread_json has refused a .json file whose first line is not an object.
    named = not _SUFFIXES.isdisjoint(Path(name).suffixes) or name.endswith((".json", ".json.gz", ".json.zst"))
    head = read_unpacked_head(sample.path, _HEAD_BYTES) if compressed else sample.head
    if head is None:
        return named  # reading it in earnest says what is damaged
    lines = head.removeprefix(_MARK).splitlines()
    if lines and len(head) >= _HEAD_BYTES and not _is_object(lines[-1]):
        if len(lines) == 1 and (named or compressed):
            return lines[0].lstrip().startswith(b"{")  # a first line that is longer than the sample
        lines.pop()
    filled = [line for line in lines if line.strip()]
    if named:
        return bool(filled) and filled[0].lstrip().startswith(b"{")
    return len(filled) >= (1 if compressed else 2) and all(map(_is_object, filled[:3]))


def split_json_lines(path: Path) -> list[Span]:
    """Cut a plain file every PART_BYTES; a span has the lines that begin in it. A compressed file is one span."""
    with open_records(path) as file:
        compressed = is_compressed(file.read(4))
        size = file.seek(0, 2)
    if compressed:
        return [Span(0, size)]
    return [Span(begin, min(begin + PART_BYTES, size)) for begin in range(0, size, PART_BYTES)]


def read_json_lines(path: Path, span: Span, column: str, beside: str | None = None) -> Iterator[Record]:
    """Read one column, and a second one if it is there.

    A record's place is the byte where its line begins, in a compressed file the line's number.
    """
    with open_records(path) as file:
        compressed = is_compressed(file.read(4))
    lines = _read_numbered_lines(path) if compressed else _read_lines_of_span(path, span)
    for place, line in lines:
        if stripped := line.removeprefix(_MARK).strip():
            where = partial(describe_json_line, path, place)
            yield make_record(where, place, stripped, _parse_object(where, stripped, column), column, beside)


def describe_json_line(path: Path, place: int) -> str:
    """Return `FILE:LINE`; a plain file's lines are counted now."""
    with open_records(path) as file:
        if is_compressed(file.read(4)):
            return f"{path}:{place}"
        file.seek(0)
        return f"{path}:{1 + _count_line_ends(file, place)}"


def make_record(
    where: Callable[[], str], place: int, text: bytes, value: dict[str, Any], column: str, beside: str | None
) -> Record:
    """Return the columns of an object that was parsed from `text`. where: says where it is, for a UserError."""
    head, fields = split_column(column, value)
    if text.count(name := json.dumps(head).encode()) > 1:
        _refuse_repeated_key(where, text, name)
    try:
        record = Record(place, get_field(value[head], fields), find_field(value, beside))
    except KeyError:
        raise refuse_missing_column(where(), column, list_fields(value)) from None
    if _SURROGATE.search(text):
        _check_characters(where, record)
    return record


def _parse_object(where: Callable[[], str], line: bytes, column: str) -> dict[str, Any]:
    try:
        record = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise UserError(one_line(f"{where()}: not JSON ({error}); expected one object per line")) from error
    if not isinstance(record, dict):
        raise UserError(f"{where()}: not an object; expected one per line, such as {{{json.dumps(column)}: ...}}")
    return record


def _refuse_repeated_key(where: Callable[[], str], line: bytes, name: bytes) -> None:
    """Raise UserError if an object has a key twice, because JSON readers would silently take the last one."""
    key: str = json.loads(name)
    pairs = json.loads(line, object_pairs_hook=list)
    if sum(pair[0] == key for pair in pairs) > 1:
        raise refuse_repeated_column(where(), key)


def _check_characters(where: Callable[[], str], record: Record) -> None:
    """Raise UserError for half of a character in a record's values: no encoding has it, so it would become another."""
    try:
        json.dumps(record[1:], ensure_ascii=False).encode()
    except UnicodeEncodeError as error:
        raise UserError(
            f"{where()}: has half of a character in it (\\ud800 to \\udfff alone); "
            "write the whole character, or leave it out"
        ) from error


def _read_lines_of_span(path: Path, span: Span) -> Iterator[tuple[int, bytes]]:
    """Yield (offset, line) of the lines that begin in the span."""
    with open_records(path) as file:
        place = span.begin
        if place:  # a line that begins at span.begin follows a line end, which the byte before is
            file.seek(place - 1)
            place += _skip_line(file, span.end - place + 1) - 1
        file.seek(place)
        while place < span.end and (line := file.readline(MAX_RECORD_BYTES + 1)):
            if len(line) > MAX_RECORD_BYTES:
                raise refuse_long_line(describe_json_line(path, place))
            yield place, line
            place += len(line)


def _skip_line(file: BinaryIO, most: int) -> int:
    """Read up to the end of the line, or at least `most` bytes; returns the number of bytes."""
    count = 0
    while count < most and (part := file.readline(_SCAN_BYTES)):
        count += len(part)
        if part.endswith(b"\n"):
            break
    return count


def _read_numbered_lines(path: Path) -> Iterator[tuple[int, bytes]]:
    with open_unpacked(path) as file:
        yield from enumerate(read_bounded_lines(file, path), 1)


def _count_line_ends(file: BinaryIO, end: int) -> int:
    count = 0
    while end > 0 and (part := file.read(min(_SCAN_BYTES, end))):
        count += part.count(b"\n")
        end -= len(part)
    return count


def _is_object(line: bytes) -> bool:
    try:
        return line.lstrip().startswith(b"{") and isinstance(json.loads(line), dict)
    except (ValueError, RecursionError):
        return False
