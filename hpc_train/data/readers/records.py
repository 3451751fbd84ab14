"""Shared parts of the readers of records: their interface, the size limit of a record, messages of bad columns."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

from hpc_train.errors import UserError
from hpc_train.near_names import TYPO, did_you_mean, find_near_names
from hpc_train.regular_files import open_to_read
from hpc_train.terminal import one_line

MAX_RECORD_BYTES = 64 << 20
"""Maximum size of a line or a field: a longer one is a file that is not what it seems, and is not read."""
PART_BYTES = 32 << 20
"""Source that is tokenized as one part: what is lost when a build is killed, and what one worker takes at a time."""
_SHOWN_COLUMNS = 12


class Span(NamedTuple):
    """A part of a file, in the unit of its format: bytes, row groups or record batches."""

    begin: int
    end: int


class Record(NamedTuple):
    """The value of one column in one record."""

    place: int
    """Where the record is, in the unit of its format; RecordFormat.describe makes text of it."""
    value: Any
    beside: Any = None
    """The value of the second column that was asked for; None where the record has no such column."""


@dataclass(frozen=True)
class FileSample:
    """The beginning of a file and samples at even distances after it."""

    path: Path
    head: bytes
    windows: tuple[bytes, ...] = ()


@dataclass(frozen=True)
class RecordFormat:
    """One format of files that hold records with named columns."""

    name: str
    matches: Callable[[FileSample], bool]
    """Returns whether a file looks like this format; no two formats claim the same file."""
    split: Callable[[Path], list[Span]]
    """Cuts a file into spans of about PART_BYTES that can be read independently of each other."""
    read: Callable[[Path, Span, str, str | None], Iterator[Record]]
    """Reads the column of all records of a span, and a second one where there is such a column, in bounded memory.

    Raises UserError of one line."""
    describe: Callable[[Path, int], str]
    """Returns a record's place for a message, such as `FILE:12`."""
    fills: bool = False
    """Whether objects get each key that another record's object has, with a null."""


def open_records(path: Path) -> BinaryIO:
    """Open a file of records or tokens. Raises UserError if it cannot be read."""
    try:
        return open_to_read(path)
    except OSError as error:
        raise UserError(f"cannot read {path}: {error.strerror or error}") from error


def describe_row(path: Path, place: int) -> str:
    """Return the file and the row of a table, counted from 1."""
    return f"{path} row {place + 1:,}"


def split_column(column: str, names: Iterable[str]) -> tuple[str, tuple[str, ...]]:
    """Return the column that is meant and the fields in it: ("doc", ("text",)) for doc.text, if no name has the dot."""
    if column in names:
        return column, ()
    head, *fields = column.split(".")
    return head, tuple(fields)


def get_field(value: Any, fields: Iterable[str]) -> Any:
    """Return a field of nested objects; None where one of them is null. Raises KeyError if there is no such field."""
    for field in fields:
        if value is None:
            return None
        if not isinstance(value, dict):
            raise KeyError(field)
        value = value[field]
    return value


def find_field(record: Mapping[str, Any], column: str | None) -> Any:
    """Return a column of a record, or a field of one; None if there is no such column."""
    if column is None:
        return None
    head, fields = split_column(column, record)
    try:
        return get_field(record[head], fields)
    except KeyError:
        return None


def list_fields(record: Mapping[str, Any]) -> list[str]:
    """List the columns of a record, those of nested objects with dots."""
    names: list[str] = []
    for name, value in record.items():
        names += [f"{name}.{inner}" for inner in list_fields(value)] if isinstance(value, dict) and value else [name]
    return names


def check_table_column(where: str, column: str, schema: Any) -> None:
    """Raise UserError if a schema of pyarrow has no such column, or several of this name."""
    names = list(schema.names)
    head, fields = split_column(column, names)
    if names.count(head) > 1:
        raise refuse_repeated_column(where, head)
    table = {field.name: _describe_type(field.type) for field in schema}
    try:
        get_field(table[head], fields)
    except KeyError:
        raise refuse_missing_column(where, column, list_fields(table)) from None


def has_table_column(column: str, schema: Any) -> bool:
    """Return whether a schema of pyarrow has this column once."""
    try:
        check_table_column("", column, schema)
    except UserError:
        return False
    return True


def check_values(path: Path, batch: Any, columns: Iterable[str]) -> None:
    """Check the values of some columns of a record batch before they are read.

    pyarrow trusts a file: text may not be UTF-8, and places that lie outside of a buffer would end this process. Raises
    UserError for such text, and pyarrow.ArrowInvalid for other damage.
    """
    import pyarrow

    for column in columns:
        head, _ = split_column(column, batch.schema.names)
        try:
            batch.column(head).validate(full=True)
        except pyarrow.ArrowInvalid as error:
            if "UTF8" not in str(error):
                raise
            raise UserError(
                one_line(f"{path}: column {column!r} has text that is not UTF-8: convert it first, or write it anew")
            ) from error


def list_values(batch: Any, column: str) -> list[Any]:
    """List a column, or a field of one, of a record batch of pyarrow as Python objects. The batch must be checked."""
    head, fields = split_column(column, batch.schema.names)
    return [get_field(value, fields) for value in batch.column(head).to_pylist()]


def _describe_type(kind: Any) -> Any:
    """Return the fields of a struct of pyarrow by name; of any other type, an empty object."""
    if not str(kind).startswith("struct<"):
        return {}
    return {kind.field(index).name: _describe_type(kind.field(index).type) for index in range(kind.num_fields)}


def refuse_missing_column(where: str, column: str, columns: Iterable[object]) -> UserError:
    """Make the error for a column that is not there; it names the nearest one."""
    names = [str(name) for name in columns]
    near = find_near_names(column, names, TYPO)
    shown = ", ".join(names[:_SHOWN_COLUMNS]) + (", ..." if len(names) > _SHOWN_COLUMNS else "")
    hint = f"{did_you_mean(near)} " if near else ""
    available = f"its columns are {shown}" if names else "it has no columns"
    return UserError(
        one_line(f"{where}: no column {column!r}; {hint}{available} (choose with --column or data.column)")
    )


def refuse_repeated_column(where: str, column: str) -> UserError:
    """Make the error for several columns of the same name, of which one would silently be taken."""
    return UserError(one_line(f"{where}: has several columns {column!r}; rename the one that is meant"))


def read_bounded_lines(file: BinaryIO, path: Path) -> Iterator[bytes]:
    """Yield the lines of a file with their ends. Raises UserError for one of more than MAX_RECORD_BYTES."""
    number = 0
    while line := file.readline(MAX_RECORD_BYTES + 1):
        number += 1
        if len(line) > MAX_RECORD_BYTES:
            raise refuse_long_line(f"{path}:{number}")
        yield line


def refuse_long_line(where: str) -> UserError:
    """Make the error for a line that is too long to be a record."""
    return UserError(f"{where}: a line of more than {MAX_RECORD_BYTES >> 20} MiB; give one record per line")


def split_rows(sizes: Sequence[int]) -> list[Span]:
    """Group consecutive blocks (row groups, record batches) of these sizes in bytes into spans of about PART_BYTES."""
    spans: list[Span] = []
    begin = size = 0
    for index, block in enumerate(sizes):
        size += block
        if size >= PART_BYTES:
            spans.append(Span(begin, index + 1))
            begin, size = index + 1, 0
    if begin < len(sizes):
        spans.append(Span(begin, len(sizes)))
    return spans


def import_pyarrow(path: Path) -> Any:
    """Import pyarrow. Raises UserError, naming the file that needs it, if it is not installed."""
    try:
        import pyarrow
    except ImportError as error:
        raise UserError(f"{path} needs the package pyarrow: pip install 'hpc_train[data]'") from error
    return pyarrow


def drop_nulls(value: Any) -> Any:
    """Return a value without the nulls of its objects, which tables put where another record has a key."""
    if isinstance(value, list):
        return [drop_nulls(element) for element in value]
    if isinstance(value, dict):
        return {key: drop_nulls(item) for key, item in value.items() if item is not None}
    return value


def first_line(error: BaseException) -> str:
    """Return the first line of a library's message."""
    return one_line((str(error).splitlines() or [type(error).__name__])[0])
