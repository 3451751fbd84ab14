"""`bench collectives` as a user starts it: alone, under torchrun's variables and under mpirun."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from hpc_train.bench.collectives.collectives import run_collectives_command
from hpc_train.bench.collectives.definitions import OPERATIONS, find_operation
from hpc_train.bench.collectives.options import CollectivesOptions
from hpc_train.cli.main import main
from hpc_train.cluster.calibration import read_calibration
from hpc_train.errors import EXIT_USER_ERROR, UserError
from hpc_train.traffic.rank_groups import compute_bus_factor

PROGRAM = [sys.executable, "-m", "hpc_train", "bench", "collectives"]
SMALL = ["--min", "1K", "--max", "64K", "--factor", "8", "--rounds", "2", "--iterations", "2"]
MPIRUN = ["mpirun", "--allow-run-as-root", "--oversubscribe", "--mca", "mpi_yield_when_idle", "1", "-n"]


def run(*command: str, cwd: Path | None = None, **environment: str) -> subprocess.CompletedProcess[str]:
    variables = {**os.environ, **environment}
    return subprocess.run(command, capture_output=True, text=True, timeout=240, env=variables, cwd=cwd, check=False)


@pytest.mark.usefixtures("forked_ranks")
def test_json_of_two_ranks_has_every_operation_algorithm_and_size(capfd: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "collectives", *SMALL, "--json"]) == 0
    result = json.loads(capfd.readouterr().out)
    assert (result["version"], result["ranks"], result["nodes"], result["device"]) == (1, 2, 1, "cpu")
    assert (result["rounds"], result["wrong"], result["degrees"]["dp_replicate"]) == (2, 0, 2)
    rows = result["measurements"]
    names = {(row["operation"], row["algorithm"]) for row in rows}
    assert names == {(it.name, "library") for it in OPERATIONS} | {("all_reduce", "ring"), ("all_reduce", "tree")}
    assert len(rows) == 3 * len(names)
    for row in rows:
        assert (row["axis"], row["groups"], row["ranks"], row["backend"]) == ("dp_replicate", 1, 2, "gloo")
        assert row["algbw"] == pytest.approx(row["size"] / row["seconds"] / 1e9)
        assert row["busbw"] == pytest.approx(
            row["algbw"] * compute_bus_factor(find_operation(row["operation"]).name, 2)
        )
        assert row["quartiles"][0] <= row["seconds"] <= row["quartiles"][1]
        assert row["wrong"] == 0
    assert {row["size"] for row in rows} == {1024, 8192, 65536}
    assert [(fit["level"], fit["backend"], fit["pairs"]) for fit in result["fits"]] == [("inside", "gloo", 1)]
    assert result["fits"][0]["sizes"] == [1024, 8192, 65536]


@pytest.mark.long
def test_four_ranks_measure_every_axis_and_write_a_calibration_and_a_plot(tmp_path: Path) -> None:
    files = ["--out", "calibration.json", "--plot", "bus.svg"]
    only = ["--operation", "all_reduce", "--operation", "reduce_scatter", "--algorithm", "library"]
    overrides = ["launch.ranks=4", "parallel.tp=2"]
    done = run(*PROGRAM, *overrides, *SMALL, *files, *only, "--max", "1M", "--factor", "32", "--plain", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    titles = [line for line in done.stdout.splitlines() if " groups of " in line or " group of " in line]
    assert titles == [
        f"# {name} library gloo, {axis}, {how}"
        for axis in ("dp_replicate: 2 groups of 2 ranks", "tp: 2 groups of 2 ranks", "world: 1 group of 4 ranks")
        for name, how in (("all_reduce", "in place"), ("reduce_scatter", "out of place"))
    ]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["bus.svg", "calibration.json"]
    found = read_calibration(tmp_path / "calibration.json")
    assert (found.cluster, found.backend) == ("local", "gloo")
    assert "<svg" in (tmp_path / "bus.svg").read_text()


def test_under_mpirun_mpi_is_measured_beside_gloo() -> None:
    done = run(*MPIRUN, "2", *PROGRAM, *SMALL, "--json")
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout)
    sides = {
        backend: {
            (row["operation"], row["algorithm"], row["size"])
            for row in result["measurements"]
            if row["backend"] == backend
        }
        for backend in ("gloo", "mpi")
    }
    assert sides["gloo"] == sides["mpi"]
    assert len(sides["mpi"]) == 3 * (len(OPERATIONS) + 2)
    assert result["wrong"] == 0
    assert [fit["backend"] for fit in result["fits"]] == ["gloo", "mpi"]


def test_one_rank_of_a_launcher_is_told_that_it_is_alone(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name, value in {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0"}.items():
        monkeypatch.setenv(name, value)
    assert main(["bench", "collectives", *SMALL]) == EXIT_USER_ERROR
    assert capsys.readouterr().err.splitlines() == [
        "hpc-train: bench collectives: one rank cannot communicate; start more (launch.ranks=2, srun -n 2)"
    ]


@pytest.mark.long
def test_mpi_without_an_mpi_launcher_is_one_line() -> None:
    done = run(*PROGRAM, *SMALL, "--backend", "mpi")
    assert done.returncode == EXIT_USER_ERROR
    assert done.stdout == ""
    lines = done.stderr.splitlines()
    assert lines == [
        "hpc-train: --backend mpi: MPI knows of 1 processes, the job has 2 ranks; start the ranks with mpirun, or "
        "srun --mpi=pmix"
    ]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--operation", "all_reduces"], "invalid choice: 'all_reduces'"),
        (["--json", "--plain"], "not allowed with argument"),
        (["--rounds", "two"], "invalid int value: 'two'"),
    ],
)
def test_a_wrong_option_is_one_line(arguments: list[str], words: str) -> None:
    done = run(*PROGRAM, *arguments)
    assert done.returncode == EXIT_USER_ERROR
    assert len(done.stderr.splitlines()) == 1
    assert words in done.stderr


@pytest.mark.parametrize(
    ("overrides", "options", "words"),
    [
        ([], CollectivesOptions(factor=1), "--factor 1: must be at least 2"),
        ([], CollectivesOptions(rounds=1), "--rounds 1: must be at least 2"),
        ([], CollectivesOptions(iterations=0), "--iterations 0: must be at least 1"),
        ([], CollectivesOptions(smallest="2M", largest="1M"), "--min 2M is above --max 1M"),
        (
            [],
            CollectivesOptions(smallest="two"),
            "--min two: must be a size of at least 4 bytes, such as 4K, 64M or 1G",
        ),
        (
            [],
            CollectivesOptions(smallest="1K", largest="2K", out="c.json"),
            "--out: latency and bandwidth need two sizes",
        ),
        ([], CollectivesOptions(plot="bus.pdf"), "--plot bus.pdf: must end in .png or .svg"),
        ([], CollectivesOptions(plot="/nowhere/bus.png"), "--plot /nowhere/bus.png: there is no folder /nowhere"),
        ([], CollectivesOptions(out="/tmp"), "--out /tmp: is a folder"),
        (["launch=slurm"], CollectivesOptions(), "use srun hpc-train bench collectives"),
        (["launch.ranks=1"], CollectivesOptions(), "launch.ranks=1: one rank cannot communicate; set 2 or more"),
        (["parallel.tp=3"], CollectivesOptions(), "2 ranks do not divide by 3"),
        (["parallel.tpp=3"], CollectivesOptions(), "parallel.tpp"),
    ],
)
def test_wrong_input_is_refused_before_any_rank_starts(
    overrides: list[str], options: CollectivesOptions, words: str
) -> None:
    with pytest.raises(UserError) as refusal:
        run_collectives_command(overrides, options)
    assert words in str(refusal.value)
    assert "\n" not in str(refusal.value)
