"""List the formats of records, and recognise a file's by its content."""

from __future__ import annotations

from hpc_train.data.readers.arrow import matches_arrow, read_arrow, split_arrow
from hpc_train.data.readers.csv_table import describe_csv_row, matches_csv, read_csv, split_csv
from hpc_train.data.readers.json_array import (
    describe_element,
    matches_json_array,
    read_json_array,
    split_json_array,
)
from hpc_train.data.readers.json_lines import (
    describe_json_line,
    matches_json_lines,
    read_json_lines,
    split_json_lines,
)
from hpc_train.data.readers.parquet import matches_parquet, read_parquet, split_parquet
from hpc_train.data.readers.records import FileSample, RecordFormat, describe_row

RECORD_SUFFIXES = (".jsonl", ".jsonl.gz", ".jsonl.zst", ".ndjson", ".csv", ".tsv", ".parquet", ".arrow")
"""Files taken from a folder that has none with the suffixes of text."""


def list_formats() -> tuple[RecordFormat, ...]:
    """List every format of records, in the order in which they are tried."""
    return (
        RecordFormat("parquet", matches_parquet, split_parquet, read_parquet, describe_row, fills=True),
        RecordFormat("arrow", matches_arrow, split_arrow, read_arrow, describe_row, fills=True),
        RecordFormat("json_lines", matches_json_lines, split_json_lines, read_json_lines, describe_json_line),
        RecordFormat("json_array", matches_json_array, split_json_array, read_json_array, describe_element),
        RecordFormat("csv", matches_csv, split_csv, read_csv, describe_csv_row),
    )


def recognise_format(sample: FileSample) -> RecordFormat | None:
    """Return the format of a file of records; None for anything else, plain text among it."""
    return next((candidate for candidate in list_formats() if candidate.matches(sample)), None)


def find_format(name: str) -> RecordFormat:
    """Return the format of this name."""
    return next(candidate for candidate in list_formats() if candidate.name == name)
