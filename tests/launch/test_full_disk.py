"""A disk that is full while ranks train does not end the run, and is said; damaged lines do not either."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

import pytest
from jobs import COMMAND, Workshop

from hpc_train.launch.rank_entrypoint import _open_lossy
from hpc_train.training.records.rank_log import RankLog, StreamLines
from hpc_train.training.records.run_records import read_metrics

LIMIT = 16_000
"""Bytes that a file may have. The kernel refuses further ones as those of a full disk; the frozen job is smaller."""


def test_training_goes_on_without_room_for_its_records(workshop: Workshop) -> None:
    done = workshop.train(
        "run",
        "train.steps=80",
        "checkpoint.every=0",
        "launch.ranks=1",
        command=("prlimit", f"--fsize={LIMIT}", *COMMAND),
    )
    assert done.code == 0, done.err
    steps = [record["step"] for record in read_metrics(workshop.folder / "run/metrics.jsonl")]
    lines = 80 - len(steps)
    assert lines > 0
    assert steps == list(range(1, len(steps) + 1))
    assert f"metrics.jsonl: its last {lines} lines could not be written" in done.err


def test_output_that_cannot_be_written_does_not_end_a_rank(tmp_path: Path) -> None:
    """As on a file system that is read-only for a minute, or whose server is gone: a closed terminal gives EIO, too."""
    log = RankLog(tmp_path / "task-0.jsonl")
    terminal, descriptor = os.openpty()
    os.close(terminal)
    try:
        with pytest.raises(OSError, match="Input/output error"):
            os.write(descriptor, b"step 1\n")
        print("step 1", file=_open_lossy(descriptor, StreamLines(log)), flush=True)
    finally:
        os.close(descriptor)


def test_what_cannot_be_begun_is_one_line(workshop: Workshop) -> None:
    done = workshop.train("run", "train.steps=1", command=("prlimit", "--fsize=100", *COMMAND))
    assert done.code == 2
    assert len(done.err.splitlines()) == 1
    assert "File too large" in done.err


def test_a_run_with_damaged_records_goes_on(workshop: Workshop) -> None:
    damage = b"\xff\xfe\n" + b"[" * 100_000 + b'\n{"step": 1'
    run = workshop.folder / "run"
    assert workshop.train("run", "train.steps=1", "launch.ranks=1").code == 0
    for name in ("metrics.jsonl", "events.jsonl", "goodput.jsonl", "deadlines.json"):
        with (run / name).open("ab") as file:
            file.write(damage)
    again = workshop.train("run", "train.steps=2", "launch.ranks=1")
    assert again.code == 0, again.err
    assert [record["step"] for record in read_metrics(run / "metrics.jsonl")] == [1, 2]
    command = [COMMAND[0], "status", str(run), "--json"]
    status = json.loads(subprocess.run(command, capture_output=True, text=True, check=True).stdout)
    assert status[0]["state"] == "DONE"
