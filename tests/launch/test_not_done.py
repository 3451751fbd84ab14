"""A run with a bad or unsaved result is not DONE: it exits with 1, and `status` says why."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
from jobs import COMMAND, FAULTY, Ended, Workshop

from hpc_train.cli.main import main
from hpc_train.errors import EXIT_DONE, EXIT_FAILED
from hpc_train.launch.freeze import describe_finished_run
from hpc_train.launch.job_spec import read_spec

LIMITED = ("bash", "-c", 'ulimit -f 48; exec "$@"', "limited", *COMMAND)
"""Limits files to 48 KiB, like a full disk: the shards of a checkpoint are larger."""
ALONE = (*FAULTY, "launch.ranks=1", "train.micro_batch=4")
NAN = (*ALONE, "optim.lr=1e20", "optim.max_norm=null", "train.steps=6")


def state(run: Path, capsys: pytest.CaptureFixture[str]) -> dict[str, Any]:
    assert main(["status", "--json", str(run)]) == 0
    row: dict[str, Any]
    (row,) = json.loads(capsys.readouterr().out)
    return row


def assert_failed(ended: Ended, run: Path, why: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert ended.code == EXIT_FAILED
    *warnings, line = ended.err.splitlines()
    assert all(text.startswith(("hpc-train: warning: ", "hpc-train: error: ")) for text in warnings)
    assert why in line
    assert "done:" not in ended.out
    assert not (run / "logs/0/done").exists()
    row = state(run, capsys)
    assert (row["state"], row["exit_code"]) == ("FAILED", EXIT_FAILED)
    assert why in row["reason"]


def test_a_last_checkpoint_that_was_not_saved(workshop: Workshop, capsys: pytest.CaptureFixture[str]) -> None:
    saving = (*ALONE, "train.steps=4", "checkpoint.every=2")
    run = workshop.folder / "run"
    assert_failed(workshop.train("run", *saving, command=LIMITED), run, "step 4, the last, was not saved", capsys)
    assert workshop.train("run", *saving).code == EXIT_DONE  # the limit is gone now
    assert state(run, capsys)["state"] == "DONE"


def test_a_run_without_finite_numbers_and_nothing_to_go_back_to(
    workshop: Workshop, capsys: pytest.CaptureFixture[str]
) -> None:
    words = (*ALONE, "train.steps=1000", "checkpoint.every=2", "resilience.numbers.give_up_after=5")
    ended = workshop.train("run", *words, faults="0:train:3:poison")
    why = "gave up at step 7: the loss or the gradient of 5 steps in a row was not finite"
    assert_failed(ended, workshop.folder / "run", why, capsys)


def test_points_of_a_sweep_whose_loss_is_not_finite_in_the_end(
    workshop: Workshop, capsys: pytest.CaptureFixture[str]
) -> None:
    sweep = workshop.folder / "sweep"
    words = (*ALONE, "optim.max_norm=null", "train.steps=6", "checkpoint.every=3", "optim.lr=1e-3,1e20")
    ended = workshop.start("sweep", *words, command=(*COMMAND, "-m")).ended()
    assert ended.code == EXIT_FAILED, ended.err
    assert "1 of 2 points failed" in ended.err
    assert main(["results", "--json", str(sweep)]) == 0
    rows = {row["overrides"]["optim.lr"]: row for row in json.loads(capsys.readouterr().out)}
    assert {rate: row["state"] for rate, row in rows.items()} == {1e-3: "DONE", 1e20: "FAILED"}
    runs = {rate: sweep / "points" / row["point"] for rate, row in rows.items()}
    assert "at the last step (6)" in state(runs[1e20], capsys)["reason"]
    specs = {rate: read_spec(run / "job.json") for rate, run in runs.items()}
    described = {rate: describe_finished_run(spec.run_config(), spec.folder()) for rate, spec in specs.items()}
    assert str(described[1e-3]).startswith("already done")
    assert described[1e20] is None, "a checkpoint with NaN in it is no run that is done"


@pytest.mark.long
def test_by_other_launchers_too(workshop: Workshop) -> None:
    torchrun = str(Path(sys.executable).with_name("torchrun"))
    command = (torchrun, "--nproc-per-node=1", "-m", "hpc_train", "train")
    ended = workshop.train("run", *NAN, "checkpoint.every=0", command=command)
    assert ended.code != 0
    assert ended.err.count("hpc-train: not done: the loss") == 1
    assert json.loads((workshop.folder / "run/logs/0/result.json").read_text())["exit_code"] == EXIT_FAILED
