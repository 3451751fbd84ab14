"""metrics.csv has each step once, whatever ended the run before."""

from __future__ import annotations

import csv
from pathlib import Path

import pytest

from hpc_train.errors import UserError
from hpc_train.training.loggers.csv_logger import COLUMNS, CsvLogger


def write(path: Path, steps: range, resumed_at: int = 0) -> None:
    logger = CsvLogger(path, resumed_at)
    for step in steps:
        logger.add({"step": step, "loss": step / 2, "mfu": None, "grad_norm": float("nan"), "skipped": True})
    logger.close()


def read(path: Path) -> list[dict[str, str]]:
    with path.open() as file:
        return list(csv.DictReader(file))


def test_a_number_that_is_not_known_or_not_finite_is_an_empty_cell(tmp_path: Path) -> None:
    path = tmp_path / "metrics.csv"
    write(path, range(1, 2))
    empty = dict.fromkeys(COLUMNS, "")
    assert read(path) == [empty | {"step": "1", "loss": "0.5", "skipped": "1"}]
    assert path.stat().st_mode & 0o777 == 0o600


def test_a_resume_drops_the_rows_that_are_done_again(tmp_path: Path) -> None:
    path = tmp_path / "metrics.csv"
    write(path, range(1, 8))
    write(path, range(5, 10), resumed_at=4)
    assert [int(row["step"]) for row in read(path)] == list(range(1, 10))


@pytest.mark.parametrize("torn", ["4,1.", "4", "\0\0\0", '"4', "4,1.5\n", "four" + 11 * "," + "\n"])
def test_a_torn_last_row_is_dropped(tmp_path: Path, torn: str) -> None:
    path = tmp_path / "metrics.csv"
    write(path, range(1, 4))
    with path.open("a") as file:
        file.write(torn)
    write(path, range(4, 6), resumed_at=4)
    assert [row["step"] for row in read(path)] == ["1", "2", "3", "4", "5"]


def test_a_validation_loss_that_comes_later_is_put_into_its_row(tmp_path: Path) -> None:
    path = tmp_path / "metrics.csv"
    write(path, range(1, 3))
    logger = CsvLogger(path, 2)
    logger.add({"step": 2, "validation_loss": 0.25})
    logger.add({"step": 3, "loss": 1.5})
    logger.close()
    assert [(row["step"], row["loss"], row["validation_loss"]) for row in read(path)] == [
        ("1", "0.5", ""),
        ("2", "1.0", "0.25"),
        ("3", "1.5", ""),
    ]


def test_a_file_that_cannot_be_written_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "metrics.csv").mkdir()
    with pytest.raises(UserError, match=r"metrics\.csv: .*; move it away, or leave csv out of loggers\.use"):
        CsvLogger(tmp_path / "metrics.csv", 0)
