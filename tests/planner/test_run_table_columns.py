"""docs/run_tables.md lists the columns of a table of measured runs, and its example is a valid table."""

from __future__ import annotations

import csv
import re
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest

from hpc_train.cli.main import main
from hpc_train.planner.calibration import run_table
from hpc_train.planner.calibration.run_table import MeasuredRun, parse_run, read_runs
from hpc_train.planner.calibration.software import SOFTWARE

PAGE = (Path(__file__).parents[2] / "docs" / "run_tables.md").read_text()
SAMPLE = Path(__file__).with_name("published_sample.csv")


class Asked(Mapping[str, str | None]):
    """A row that remembers which columns were read."""

    def __init__(self, row: Mapping[str, str | None]) -> None:
        self._row = row
        self.names: set[str] = set()

    def __getitem__(self, name: str) -> str | None:
        self.names.add(name)
        return self._row[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._row)

    def __len__(self) -> int:
        return len(self._row)


def documented() -> dict[str, str]:
    """Map each documented column to what it is needed for."""
    return dict(re.findall(r"^\| `(\w+)` \| ([^|]*?) ?\|", PAGE.partition("\nAn example")[0], re.MULTILINE))


def test_the_page_lists_just_the_columns_that_are_read() -> None:
    with SAMPLE.open(newline="", encoding="utf-8") as file:
        rows = [Asked(row) for row in csv.DictReader(file)]
    assert any(isinstance(parse_run(row), MeasuredRun) for row in rows)
    read = set().union(*(row.names for row in rows))
    assert read == documented().keys()


def test_the_page_says_what_is_needed() -> None:
    needed = documented()
    assert {name for name, what in needed.items() if "table" in what} == set(run_table._REQUIRED)
    assert {name for name, what in needed.items() if "row" in what} == {*run_table._STATED, "gpu_type"}


@pytest.mark.parametrize("name", run_table._REQUIRED)
def test_a_table_without_a_column_points_to_the_page(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with SAMPLE.open(newline="", encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    target = tmp_path / "runs.csv"
    with target.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, [it for it in rows[0] if it != name], extrasaction="ignore")
        writer.writeheader()
        writer.writerows(rows)
    assert main(["plan", "validate", str(target)]) == 2
    error = capsys.readouterr().err
    assert f"no column {name}; docs/run_tables.md" in error
    assert error.count("\n") == 1


def test_the_example_is_read(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    example = re.search(r"```text\n(.*?)```", PAGE, re.DOTALL)
    assert example
    (tmp_path / "runs.csv").write_text(example[1])
    runs = read_runs(tmp_path / "runs.csv")
    assert ([it.id for it in runs.runs], runs.refused) == (["mine-1", "mine-2"], ())
    assert main(["plan", "validate", str(tmp_path / "runs.csv")]) == 0
    assert "Step time" in capsys.readouterr().out


def test_notes_and_sources_are_never_read() -> None:
    with SAMPLE.open(newline="", encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    loud = "torch.compile async-TP triton flash OOM nvidia-smi SHARD_GRAD_OP LAUNCH_BLOCKING schedule=zb-2p fp32 grad"
    for row in rows:
        assert repr(parse_run(row)) == repr(parse_run({**row, "notes": loud, "source": "bigscience megascale: titan"}))


def test_every_software_is_on_the_page() -> None:
    line = next(line for line in PAGE.splitlines() if line.startswith("| `software`"))
    assert set(re.findall(r"`([^`]+)`", line)) == {"software", "megatron-lm", *SOFTWARE}
