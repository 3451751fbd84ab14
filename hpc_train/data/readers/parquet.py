"""Apache Parquet tables, through pyarrow."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from hpc_train.data.readers.records import (
    FileSample,
    Record,
    Span,
    check_table_column,
    check_values,
    first_line,
    has_table_column,
    import_pyarrow,
    list_values,
    split_rows,
)
from hpc_train.errors import UserError
from hpc_train.regular_files import open_to_read

_MAGIC = b"PAR1"
_ROWS = 1024
"""Rows that are read at a time."""
_BUFFER_BYTES = 1 << 20


def matches_parquet(sample: FileSample) -> bool:
    """Return whether the file begins as a Parquet file, and is not text that begins with the same letters."""
    return sample.head.startswith(_MAGIC) and (
        sample.path.suffix.lower() == ".parquet" or any(b"\0" in part for part in (sample.head, *sample.windows))
    )


def split_parquet(path: Path) -> list[Span]:
    """Group the row groups of a file into spans, by their uncompressed sizes."""
    with _open_table(path) as table:
        groups = table.metadata
        return split_rows([groups.row_group(index).total_byte_size for index in range(groups.num_row_groups)])


def read_parquet(path: Path, span: Span, column: str, beside: str | None = None) -> Iterator[Record]:
    """Read one column, or a field of one, of the row groups of a span, and a second one if it is there.

    A record's place is its row, from 0.
    """
    with _open_table(path) as table:
        check_table_column(str(path), column, table.schema_arrow)
        columns = [column, *([beside] if beside and has_table_column(beside, table.schema_arrow) else [])]
        row = sum(table.metadata.row_group(index).num_rows for index in range(span.begin))
        groups = list(range(span.begin, span.end))
        for batch in table.iter_batches(_ROWS, groups, columns, use_threads=False):
            check_values(path, batch, columns)
            for values in zip(*(list_values(batch, name) for name in columns), strict=True):
                yield Record(row, *values)
                row += 1


@contextmanager
def _open_table(path: Path) -> Iterator[Any]:
    pyarrow = import_pyarrow(path)
    from pyarrow import parquet

    try:
        with open_to_read(path) as file:
            yield parquet.ParquetFile(file, buffer_size=_BUFFER_BYTES, pre_buffer=False)
    except (pyarrow.ArrowException, OSError) as error:
        if isinstance(error, OSError) and error.errno:
            raise UserError(f"cannot read {path}: {error.strerror or error}") from error
        raise UserError(f"{path} is a damaged Parquet file, or cut short ({first_line(error)})") from error
