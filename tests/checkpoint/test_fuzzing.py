"""A changed step is refused or gives what was saved, whatever is changed: runs fuzzing.py in a process of its own."""

from __future__ import annotations

import itertools
import json
import multiprocessing
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import fuzzing
import pytest

PROGRAM = Path(__file__).with_name("fuzzing.py")
SHARE = 10_000
"""Cases per process."""


@pytest.fixture
def where() -> Iterator[Path]:
    """A folder in memory, where there is room: every case writes files anew."""
    memory = Path("/dev/shm")
    with tempfile.TemporaryDirectory(dir=memory if memory.is_dir() else None) as directory:
        yield Path(directory)


def run(where: Path, first: int, cases: int) -> None:
    command = [sys.executable, PROGRAM, where, "--first", str(first), "--cases", str(cases)]
    ended = subprocess.run(command, capture_output=True, text=True)
    # after a signal, or a case that did not end, there is no result, and the last lines tell at which case
    assert ended.returncode in (0, 1), ended.stderr[-2000:]
    assert ended.stdout, ended.stderr[-2000:]
    result = json.loads(ended.stdout.splitlines()[-1])
    assert result["failures"] == []
    assert sum(result["counts"].values()) == cases
    assert len([it for it in result["counts"] if it.endswith("refused")]) >= 5, result["counts"]


def test_a_case_that_never_comes_back_from_c_ends_with_a_report(tmp_path: Path) -> None:
    def hang() -> None:
        sys.stderr = (tmp_path / "stderr").open("w")
        fuzzing.limit_case(0.2)
        sum(itertools.repeat(0))

    process = multiprocessing.get_context("fork").Process(target=hang)
    process.start()
    process.join()
    assert process.exitcode == 1
    assert "Timeout" in (tmp_path / "stderr").read_text()


def test_some_hundred_cases(where: Path) -> None:
    run(where, 0, 350)


@pytest.mark.long
def test_a_thousand_cases(where: Path) -> None:
    run(where, 350, 650)


@pytest.mark.long
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("share", range(10))
def test_a_hundred_thousand_cases(where: Path, share: int) -> None:
    run(where, 1_000_000 + share * SHARE, SHARE)
