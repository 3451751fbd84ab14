"""Apache Arrow files and streams, and the folders that Hugging Face `datasets` saves them in, through pyarrow."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
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
from hpc_train.regular_files import open_to_read, read_regular
from hpc_train.terminal import one_line

_FILE_MAGIC = b"ARROW1\0\0"
_CONTINUATION = b"\xff\xff\xff\xff"
"""A stream begins with this and the length of its schema."""
_MAX_SCHEMA_BYTES = 64 << 20
_STATE, _SPLITS = "state.json", "dataset_dict.json"
_MAX_JSON_BYTES = 16 << 20


def matches_arrow(sample: FileSample) -> bool:
    """Return whether the file is an Arrow file, or begins as an Arrow stream."""
    if sample.head.startswith(_FILE_MAGIC):
        return True
    length = int.from_bytes(sample.head[4:8], "little")
    return sample.head.startswith(_CONTINUATION) and len(sample.head) > 8 and 0 < length <= _MAX_SCHEMA_BYTES


def split_arrow(path: Path) -> list[Span]:
    """Group the record batches of a file into spans, by their sizes in memory."""
    with _open_batches(path) as batches:
        return split_rows([batch.nbytes for batch in batches])


def read_arrow(path: Path, span: Span, column: str, beside: str | None = None) -> Iterator[Record]:
    """Read one column, or a field of one, of the record batches of a span, and a second one if it is there.

    A record's place is its row, from 0.
    """
    row = 0
    with _open_batches(path) as batches:
        for index, batch in enumerate(batches):
            if index >= span.end:
                return
            check_table_column(str(path), column, batch.schema)
            if index >= span.begin:
                columns = [column, *([beside] if beside and has_table_column(beside, batch.schema) else [])]
                check_values(path, batch, columns)
                yield from _read_batch(batch, columns, row)
            row += batch.num_rows


def is_saved_dataset(folder: Path) -> bool:
    """Return whether `datasets` has saved this folder with save_to_disk."""
    return (folder / _STATE).is_file() or (folder / _SPLITS).is_file()


def list_dataset_files(folder: Path) -> list[Path]:
    """List the Arrow files of a folder made by save_to_disk, in the order of their rows.

    Raises UserError for a folder of several splits, which have to be given one by one, and for a damaged one.
    """
    if not (folder / _STATE).is_file():
        splits = _read_json(folder / _SPLITS).get("splits")
        shown = ", ".join(str(folder / str(name)) for name in splits) if isinstance(splits, list) else "none"
        raise UserError(one_line(f"{folder} has several splits: give one of them, {shown}"))
    state = _read_json(folder / _STATE)
    if state.get("_indices_data_files"):  # old releases of datasets kept the chosen rows and their order apart
        raise UserError(
            f"{folder} keeps the order of its rows apart: save it again with a newer datasets (save_to_disk)"
        )
    files = state.get("_data_files")
    entries = files if isinstance(files, list) else []
    names = [entry.get("filename") if isinstance(entry, dict) else None for entry in entries]
    if not names or not all(isinstance(name, str) and Path(name).name == name for name in names):
        raise UserError(
            f"{folder / _STATE} names no files of this folder: the dataset has no rows, or must be saved again "
            "(save_to_disk)"
        )
    paths = [folder / str(name) for name in names]
    if missing := next((path for path in paths if not path.is_file()), None):
        raise UserError(f"{missing} is missing, which {_STATE} names: copy the whole folder, or save the dataset again")
    return paths


_ROWS_AT_ONCE = 1024
"""Rows that are converted together: as Python objects, a whole batch may be many times its size."""


def _read_batch(batch: Any, columns: Sequence[str], row: int) -> Iterator[Record]:
    for start in range(0, batch.num_rows, _ROWS_AT_ONCE):
        part = batch.slice(start, _ROWS_AT_ONCE)
        for offset, values in enumerate(zip(*(list_values(part, name) for name in columns), strict=True), start):
            yield Record(row + offset, *values)


@contextmanager
def _open_batches(path: Path) -> Iterator[Iterator[Any]]:
    """Map a file and give its record batches; a batch is read only where it is touched."""
    pyarrow = import_pyarrow(path)
    try:
        with open_to_read(path) as file:
            head = file.read(len(_FILE_MAGIC))
        with pyarrow.memory_map(str(path), "r") as source:
            if head == _FILE_MAGIC:
                opened = pyarrow.ipc.open_file(source)
                yield (opened.get_batch(index) for index in range(opened.num_record_batches))
            else:
                yield iter(pyarrow.ipc.open_stream(source))
    except (pyarrow.ArrowException, OSError) as error:
        if isinstance(error, OSError) and error.errno:
            raise UserError(f"cannot read {path}: {error.strerror or error}") from error
        raise UserError(f"{path} is a damaged Arrow file, or cut short ({first_line(error)})") from error


def _read_json(path: Path) -> dict[str, Any]:
    try:
        value = json.loads(read_regular(path, _MAX_JSON_BYTES, follow=True))
    except (OSError, ValueError, RecursionError) as error:
        raise UserError(f"cannot read {path}: {first_line(error)}") from error
    return value if isinstance(value, dict) else {}
