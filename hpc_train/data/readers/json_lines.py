"""JSON Lines: an object per line (jsonlines.org), plain or compressed with gzip or zstd."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
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
    named, compressed = not _SUFFIXES.isdisjoint(Path(sample.path.name.lower()).suffixes), is_compressed(sample.head)
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
            record = _parse_record(path, place, stripped, column)
            content = Record(place, _find_value(path, place, record, column), find_field(record, beside))
            if _SURROGATE.search(stripped):
                _check_characters(path, content)
            yield content


def describe_json_line(path: Path, place: int) -> str:
    """Return `FILE:LINE`; a plain file's lines are counted now."""
    with open_records(path) as file:
        if is_compressed(file.read(4)):
            return f"{path}:{place}"
        file.seek(0)
        return f"{path}:{1 + _count_line_ends(file, place)}"


def _parse_record(path: Path, place: int, line: bytes, column: str) -> dict[str, Any]:
    try:
        record = json.loads(line)
    except (ValueError, RecursionError) as error:
        where = describe_json_line(path, place)
        raise UserError(one_line(f"{where}: not JSON ({error}); expected one object per line")) from error
    if not isinstance(record, dict):
        where = describe_json_line(path, place)
        raise UserError(f"{where}: not an object; expected one per line, such as {{{json.dumps(column)}: ...}}")
    if line.count(name := json.dumps(split_column(column, record)[0]).encode()) > 1:
        _refuse_repeated_key(path, place, line, name)
    return record


def _refuse_repeated_key(path: Path, place: int, line: bytes, name: bytes) -> None:
    """Raise UserError if an object has a key twice, because JSON readers would silently take the last one."""
    key: str = json.loads(name)
    pairs = json.loads(line, object_pairs_hook=list)
    if sum(pair[0] == key for pair in pairs) > 1:
        raise refuse_repeated_column(describe_json_line(path, place), key)


def _check_characters(path: Path, record: Record) -> None:
    """Raise UserError for half of a character in a record's values: no encoding has it, so it would become another."""
    try:
        json.dumps(record[1:], ensure_ascii=False).encode()
    except UnicodeEncodeError as error:
        raise UserError(
            f"{describe_json_line(path, record.place)}: has half of a character in it (\\ud800 to \\udfff alone); "
            "write the whole character, or leave it out"
        ) from error


def _find_value(path: Path, place: int, record: dict[str, Any], column: str) -> Any:
    head, fields = split_column(column, record)
    try:
        return get_field(record[head], fields)
    except KeyError:
        raise refuse_missing_column(describe_json_line(path, place), column, list_fields(record)) from None


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
