"""FAULTS.md says which test covers which fault case: it names tests that exist, and all of the fault files."""

from __future__ import annotations

import re
from pathlib import Path

HERE = Path(__file__).parent
CASES = 24
FAULT_FILES = (
    "faults",
    "faults_reading",
    "power_loss",
    "incremental_faults",
    "shared_faults",
    "two_writers",
    "hung_rank",
    "poison",
    "retention_rules",
    "odd_tensors",
)
_NAMED = re.compile(r"((?:\w+/)?\w+)::(test_\w+)")


def rows() -> list[list[str]]:
    lines = (HERE / "FAULTS.md").read_text().splitlines()
    cells = [[cell.strip() for cell in line.split("|")[1:-1]] for line in lines if line.startswith("|")]
    return cells[2:]


def those_in(file: str) -> set[str]:
    folder, _, name = file.rpartition("/")
    path = HERE.parent / (folder or "checkpoint") / f"test_{name}.py"
    return set(re.findall(r"^def (test_\w+)", path.read_text(), re.MULTILINE)) if path.exists() else set()


def test_every_case_has_tests_and_they_exist() -> None:
    assert [int(row[0]) for row in rows() if row[0]] == list(range(1, CASES + 1))
    for number, _, writers, tests in rows():
        named = _NAMED.findall(tests)
        assert len(named) == len(tests.split()) > 0, number
        assert [f"{file}::{test}" for file, test in named if test not in those_in(file)] == [], number
        assert re.fullmatch(r"\d(, \d)*", writers), number


def test_every_test_of_the_fault_files_is_in_the_table() -> None:
    named = {(file, test) for row in rows() for file, test in _NAMED.findall(row[3])}
    there = {(file, test) for file in FAULT_FILES for test in those_in(file)}
    assert len(there) > 60
    assert there - named == set()
