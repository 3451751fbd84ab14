"""Read tables in text: comma-, tab-, semicolon- and bar-separated columns with a header line (RFC 4180)."""

from __future__ import annotations

import csv
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

from hpc_train.data.readers.records import (
    MAX_RECORD_BYTES,
    FileSample,
    Record,
    Span,
    first_line,
    read_bounded_lines,
    refuse_missing_column,
    refuse_repeated_column,
)
from hpc_train.errors import UserError
from hpc_train.regular_files import open_to_read

_HEAD_BYTES = 1 << 16
_NAMED = (".csv", ".tsv", ".psv")
_MAY_BE_TABLES = frozenset({"", ".txt", ".text", ".dat", ".data", ".tab", ".json", ".log"})
"""File name extensions that may hide tables; source code and markup are left out, since they may look like columns."""
_ROWS, _COLUMNS = 5, 2
"""Minimum lines and columns of text that counts as a table, whatever its name, if all lines have equally many columns.
"""
_DELIMITERS = ",\t;|"


def matches_csv(sample: FileSample) -> bool:
    """Return whether the file is a table: by its name, or by lines that all have the same columns."""
    if b"\0" in sample.head or not sample.head:
        return False
    if sample.path.suffix.lower() in _NAMED:
        return True
    return sample.path.suffix.lower() in _MAY_BE_TABLES and _find_columns(sample.head) is not None


def split_csv(path: Path) -> list[Span]:
    """Return the whole file as one span: a line end within quotes ends no record, so it cannot be cut unread."""
    return [Span(0, path.stat().st_size)]


def read_csv(path: Path, span: Span, column: str, beside: str | None = None) -> Iterator[Record]:
    """Read one column. A record's place is the number of its last line. beside: not read, since cells are text."""
    # The limit of the standard library is one for the process; it is only ever raised, to ours.
    csv.field_size_limit(MAX_RECORD_BYTES)
    try:
        with open_to_read(path) as file:
            delimiter = _find_delimiter(file.read(_HEAD_BYTES), path)
            file.seek(0)
            # strict: a quote that nothing closes would make one cell of the rest of the file.
            rows = csv.reader(_decode_lines(file, path), delimiter=delimiter, strict=True)
            yield from _read_rows(rows, path, column)
    except OSError as error:
        raise UserError(f"cannot read {path}: {error.strerror or error}") from error


def describe_csv_row(path: Path, place: int) -> str:
    """Return `FILE:LINE`."""
    return f"{path}:{place}"


def _decode_lines(file: BinaryIO, path: Path) -> Iterator[str]:
    for number, line in enumerate(read_bounded_lines(file, path), 1):
        try:
            yield line.decode("utf-8-sig" if number == 1 else "utf-8")
        except UnicodeDecodeError as error:
            raise UserError(
                f"{path}:{number}: not in UTF-8 ({error.reason}): convert the file first (iconv -f ENCODING -t UTF-8)"
            ) from error


def _read_rows(rows: csv._reader, path: Path, column: str) -> Iterator[Record]:  # type: ignore[name-defined]
    try:
        header: list[str] = next(rows, [])
        if column not in header:
            raise refuse_missing_column(f"{path} is a table", column, header)
        if header.count(column) > 1:
            raise refuse_repeated_column(str(path), column)
        index = header.index(column)
        for row in rows:
            if not row:
                continue
            if len(row) != len(header):
                raise UserError(
                    f"{path}:{rows.line_num}: {len(row)} columns but the header has {len(header)}; quote fields that "
                    "contain the separator or a line end"
                )
            yield Record(rows.line_num, row[index])
    except csv.Error as error:
        raise UserError(
            f"{path}:{rows.line_num}: {first_line(error)}; close each quote that opens a field, and double those "
            'within one ("a ""b""")'
        ) from error


def _find_delimiter(head: bytes, path: Path) -> str:
    """Return the delimiter of the header line: the one that is in it most often."""
    line = (head.decode("utf-8-sig", "replace").splitlines() or [""])[0]
    if path.suffix.lower() == ".tsv":
        return "\t"
    return max(_DELIMITERS, key=line.count)


def _find_columns(head: bytes) -> int | None:
    """Return the number of columns if all lines of a sample have the same columns; None if it is no table."""
    lines = head.decode("utf-8", errors="replace").splitlines()
    complete = [line for line in (lines if len(head) < _HEAD_BYTES else lines[:-1]) if line.strip()]
    if len(complete) < _ROWS:
        return None
    for delimiter in _DELIMITERS:
        try:
            rows = list(csv.reader(complete[:200], delimiter=delimiter))
        except csv.Error:
            continue
        columns = {len(row) for row in rows}
        if len(columns) != 1 or min(columns) < _COLUMNS:
            continue
        # A line of prose may contain one comma followed by a space.
        if min(columns) > _COLUMNS or not any(cell.startswith(" ") for row in rows for cell in row[1:]):
            return min(columns)
    return None
