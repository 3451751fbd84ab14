"""That every side loads what it saved is asserted by the ranks of the bench itself, before anything is timed."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from rank_processes import assert_they_end

from hpc_train.bench.checkpoint.checkpoint import (
    OPERATIONS,
    RESHARDINGS,
    CheckpointBenchOptions,
    CheckpointBenchResult,
    SettingResult,
    run_checkpoint_command,
    summarise_operations,
)
from hpc_train.bench.checkpoint.checkpoint_output import print_checkpoint_result
from hpc_train.bench.checkpoint.sides import time_operation
from hpc_train.cli.main import main
from hpc_train.errors import EXIT_USER_ERROR, UserError

WORDS = ["bench", "checkpoint"]
COMMAND = [sys.executable, "-m", "hpc_train", *WORDS]
SIDES = {
    "save": {"hpc_train", "raw_direct", "raw_buffered", "torch_save", "safetensors", "dcp"},
    "stall": {"hpc_train", "dcp_async", "dcp_async_cached"},
    "load_cold": {"hpc_train", "raw_direct", "raw_buffered", "torch_save", "safetensors", "dcp"},
    "load_warm": {"hpc_train", "raw_buffered", "torch_save", "safetensors", "dcp"},
    "verify": {"hpc_train"},
    "reshard_1_to_n": {"hpc_train", "dcp"},
    "reshard_n_to_1": {"hpc_train", "dcp"},
    "reshard_columns": {"hpc_train", "dcp"},
}


@pytest.mark.usefixtures("forked_ranks")
def test_json_has_every_operation_of_every_side_and_nothing_is_left(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    small = ["--gib", "0.004", "--rounds", "1", "--ranks", "1", "2", "--directory", str(tmp_path)]
    assert main([*WORDS, *small, "--json"]) == 0
    result = json.loads(capfd.readouterr().out)
    assert [setting["ranks"] for setting in result["settings"]] == [1, 2]
    for setting in result["settings"]:
        assert setting["directory"] == str(tmp_path)
        assert setting["gib"] == pytest.approx(0.004, rel=0.1)
        assert setting["tensors"] == 112 * setting["ranks"]
        measured = {(line["operation"], line["side"]) for line in setting["lines"]}
        able = [operation for operation in SIDES if setting["ranks"] > 1 or operation not in RESHARDINGS]
        expected = {(operation, side) for operation in able for side in SIDES[operation]}
        assert measured == {(operation, side) for operation, side in expected if side not in setting["missing"]}
        for line in setting["lines"]:
            low, high = line["quartiles"]
            assert 0 < low <= line["seconds"] <= high
            assert (line["read"] is None) == (line["operation"] not in RESHARDINGS)
            rel = 1e-6 if line["read"] is None else 0.2  # whose state is another, of about that size
            assert line["gib_per_second"] == pytest.approx(setting["gib"] / line["seconds"], rel=rel)
            assert line["cpu_seconds_per_gib"] > 0
    assert list(tmp_path.iterdir()) == []


@pytest.mark.long
def test_equal_tensors_as_a_table_and_a_plot(tmp_path: Path) -> None:
    where = tmp_path / "disk"
    where.mkdir()
    options = ["--gib", "0.002", "--tensors", "64", "--rounds", "1", "--ranks", "1", "--directory", str(where)]
    plot = tmp_path / "plot.svg"
    done = subprocess.run([*COMMAND, *options, "--plot", str(plot)], capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr
    for words in ("64 tensors", "dcp_async_cached", "load, page cache warm", "hpc_train: save "):
        assert words in done.stdout
    assert "load_cold" in plot.read_text()
    assert list(where.iterdir()) == []


@pytest.mark.usefixtures("forked_ranks")
def test_only_what_is_asked_for(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    few = ["--operations", "stall", "save", "--sides", "raw_direct", "hpc_train", "--gib", "0.002", "--ranks", "1"]
    assert main([*WORDS, *few, "--rounds", "2", "--directory", str(tmp_path), "--json"]) == 0
    (setting,) = json.loads(capfd.readouterr().out)["settings"]
    wanted = {("save", "hpc_train"), ("save", "raw_direct"), ("stall", "hpc_train")}
    measured = {(line["operation"], line["side"]) for line in setting["lines"]}
    assert measured == {(operation, side) for operation, side in wanted if side not in setting["missing"]}
    assert list(tmp_path.iterdir()) == []


@pytest.mark.usefixtures("forked_ranks")
def test_bytes_of_resharding_are_those_that_were_read(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """DCP's ranks read whole what one saved, and a rank that wants columns reads all rows: twice the bytes, for two."""
    few = ["--operations", *RESHARDINGS, "--sides", "hpc_train", "dcp", "--gib", "0.06", "--ranks", "2"]
    assert main([*WORDS, *few, "--rounds", "1", "--directory", str(tmp_path), "--json"]) == 0
    (setting,) = json.loads(capfd.readouterr().out)["settings"]
    read = {(line["operation"], line["side"]): line["read"] for line in setting["lines"]}
    assert len(read) == 2 * len(RESHARDINGS)
    for operation in RESHARDINGS:
        assert 1 <= read[operation, "hpc_train"] <= 1.05
    assert 1 <= read["reshard_n_to_1", "dcp"] < 1.2
    assert 1.95 < read["reshard_1_to_n", "dcp"] < 2.4
    assert 1.95 < read["reshard_columns", "dcp"] < 2.4
    assert list(tmp_path.iterdir()) == []


def test_what_threads_read_is_counted(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(bytes(3 << 20))
    with (tmp_path / "file").open("rb", buffering=0) as file, ThreadPoolExecutor(2) as pool:
        read = time_operation(
            lambda: list(pool.map(lambda k: os.pread(file.fileno(), 1 << 20, k << 20), [0, 1, 2, 2]))
        )[2]
    assert 4 << 20 <= read < (4 << 20) + 4096


def test_a_stopped_bench_leaves_neither_ranks_nor_files(tmp_path: Path) -> None:
    command = [*COMMAND, "--gib", "0.004", "--rounds", "100000", "--ranks", "2", "--directory", str(tmp_path)]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL)
    try:
        children = Path(f"/proc/{process.pid}/task/{process.pid}/children")
        while len(ranks := children.read_text().split()) < 2 or not list(tmp_path.glob("*/dcp/*")):
            assert process.poll() is None
            time.sleep(0.05)
        process.terminate()
        assert process.wait(timeout=60) == 128 + 15
    finally:
        process.kill()
    assert_they_end(ranks, seconds=30)
    assert list(tmp_path.iterdir()) == []


def test_ratios_are_of_the_same_round() -> None:
    ours, direct, dcp = (
        [[wall, 1.0, 3.0 * 2**30] for wall in walls] for walls in ([1.0, 2.0, 4.0], [1.0, 3.0, 2.0], [4.0] * 3)
    )
    sides = {"dcp": np.array(dcp), "hpc_train": np.array(ours), "raw_direct": np.array(direct)}
    rows = {row.side: row for row in summarise_operations({"save": sides}, gib=2.0)}
    assert rows["hpc_train"].seconds == 2.0
    assert rows["hpc_train"].quartiles == (1.5, 3.0)
    assert (rows["hpc_train"].gib_per_second, rows["hpc_train"].cpu_seconds_per_gib) == (1.0, 0.5)
    assert rows["hpc_train"].over["raw_direct"].median == 1.0  # of 1, 1.5 and 0.5
    assert rows["hpc_train"].over["dcp"].median == 2.0  # of 4, 2 and 1
    assert set(rows["dcp"].over) == {"raw_direct"}
    assert rows["dcp"].read is None
    (moved,) = summarise_operations({"reshard_columns": {"dcp": sides["dcp"]}}, gib=2.0)
    assert moved.read == 1.5


def test_what_cannot_be_measured_here_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    samples = {"save": {"hpc_train": np.ones((1, 3))}}
    setting = SettingResult(
        "/d", "tmpfs", 1, 3, 2.0, summarise_operations(samples, 2.0), {"raw_direct": "Invalid argument"}, (0.0, 0.0)
    )
    print_checkpoint_result(CheckpointBenchResult(USUAL, [setting], 2))
    assert "left out: raw_direct: Invalid argument" in capsys.readouterr().out
    assert set(SIDES) == set(OPERATIONS)


USUAL = CheckpointBenchOptions(0.001, (1,), None, (".",), 2)


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({"gib": 0.0}, "--gib 0"),
        ({"gib": float("nan")}, "--gib nan"),
        ({"ranks": (1, 0)}, "--ranks 0"),
        ({"rounds": 0}, "--rounds 0"),
        ({"tensors": 0}, "--tensors 0"),
        ({"operations": ("save", "laod")}, "--operations laod: is none of save, stall,"),
        ({"sides": ("hdf5",)}, "--sides hdf5: is none of hpc_train, raw_direct,"),
        ({"operations": ("reshard_columns",), "ranks": (2, 1)}, "--ranks 1: has no other layout, for reshard_columns"),
        (
            {"operations": ("reshard_columns",), "ranks": (2,), "sides": ("raw_direct",)},
            "--sides: only hpc_train and dcp",
        ),
        ({"directories": ("absent",)}, "--directory absent"),
        ({"gib": 1e9}, "GiB are needed"),
    ],
)
def test_what_cannot_be_is_one_line(changed: dict[str, object], words: str) -> None:
    with pytest.raises(UserError) as error:
        run_checkpoint_command(replace(USUAL, **changed), as_json=False)  # type: ignore[arg-type]
    assert words in str(error.value)
    assert "\n" not in str(error.value)


def test_a_plot_that_cannot_be_is_refused_before_anything_is_measured(tmp_path: Path) -> None:
    command = [*COMMAND, "--directory", str(tmp_path), "--gib", "0.001", "--plot", str(tmp_path / "none" / "plot.png")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == EXIT_USER_ERROR
    assert len(done.stderr.splitlines()) == 1
    assert "--plot" in done.stderr
