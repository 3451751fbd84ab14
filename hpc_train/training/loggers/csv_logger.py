"""Write the metrics as metrics.csv, for spreadsheets and pandas.read_csv: a row per step, each step once."""

from __future__ import annotations

import csv
import io
import logging
import math
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from hpc_train.errors import UserError
from hpc_train.regular_files import read_text, write_private_file
from hpc_train.training.records.run_records import LineFile

_log = logging.getLogger(__name__)
COLUMNS = (
    "step",
    "loss",
    "grad_norm",
    "lr",
    "tokens",
    "tokens_per_second",
    "step_seconds",
    "data_seconds",
    "mfu",
    "noise_scale",
    "skipped",
    "validation_loss",
)
"""The columns are the same in every run. A number that is not known, or not finite, is an empty cell."""


class CsvLogger:
    """Appends a row for each step to a file. A full disk does not end the run: rows wait until there is room."""

    def __init__(self, path: Path, resumed_at: int) -> None:
        """Drop the rows of steps after `resumed_at`, which are about to be done again.

        Raises UserError if the file cannot be read or written.
        """
        self._path = path
        try:
            rows = [row for row in _read_rows(path) if int(row[0]) <= resumed_at]
            self._last = rows[-1] if rows else None
            write_private_file(path, _format_rows([list(COLUMNS), *rows]))
            self._file = LineFile(path)
        except OSError as error:
            raise UserError(f"{path}: {error.strerror}; move it away, or leave csv out of loggers.use") from error

    def add(self, record: Mapping[str, Any]) -> None:
        """Append a row, or fill in the cells of the last one if it is of the same step."""
        row = [_format_cell(record.get(name)) for name in COLUMNS]
        if self._last is not None and self._last[0] == row[0]:
            self._amend([new or old for new, old in zip(row, self._last, strict=True)])
        else:
            self._file.append(_format_rows([row]))
            self._last = row

    def close(self, failed: bool = False) -> None:
        self._file.close()

    def _amend(self, row: list[str]) -> None:
        try:
            rows = _read_rows(self._path)
            write_private_file(self._path, _format_rows([list(COLUMNS), *rows[:-1], row]))
        except OSError as error:
            _log.warning("%s: %s; it lacks the validation loss of step %s", self._path, error.strerror, row[0])
            return
        self._last = row
        self._file.close()
        self._file = LineFile(self._path)


def _read_rows(path: Path) -> list[list[str]]:
    """Return the whole rows of a file of ours; none of a file with other columns, or of none."""
    if not path.exists():
        return []
    text = read_text(path, errors="replace")
    # A row that was cut short has no line feed.
    rows_text = text[: text.rfind("\n") + 1]
    header, *rows = list(csv.reader(io.StringIO(rows_text.replace("\0", "")))) or [[]]
    if header != list(COLUMNS):
        return []
    return [row for row in rows if len(row) == len(COLUMNS) and row[0].isdecimal()]


def _format_rows(rows: Iterable[list[str]]) -> str:
    text = io.StringIO()
    csv.writer(text, lineterminator="\n").writerows(rows)
    return text.getvalue()


def _format_cell(value: Any) -> str:
    if value is None or (isinstance(value, float) and not math.isfinite(value)):
        return ""
    return str(int(value)) if isinstance(value, bool) else str(value)
