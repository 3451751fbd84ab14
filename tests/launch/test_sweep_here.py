"""Sweeps on this machine, with real ranks: side by side, with a point that raises, stopped, resumed; and results."""

from __future__ import annotations

import csv
import io
import json
import os
import signal
import subprocess
from pathlib import Path
from typing import Any

import pytest
from jobs import COMMAND, FAULTY, PYTHON_PATH, Workshop, numbers, saved_steps, wait_for

from hpc_train.cli.main import main
from hpc_train.errors import EXIT_REQUEUE, EXIT_USER_ERROR
from hpc_train.launch.state.attempts import read_attempts
from hpc_train.placement.node.cpu_binding import parse_cpus

ONE = (*FAULTY, "launch.ranks=1", "checkpoint.every=50000")


def run_and_read(capsys: pytest.CaptureFixture[str], *words: str, code: int = 0) -> str:
    assert main(list(words)) == code, capsys.readouterr().err
    return capsys.readouterr().out


def rows(capsys: pytest.CaptureFixture[str], sweep: Path) -> dict[str, dict[str, Any]]:
    return {row["point"]: row for row in json.loads(run_and_read(capsys, "status", "--json", str(sweep)))}


def command(workshop: Workshop, *words: str) -> subprocess.CompletedProcess[str]:
    """One of our commands as a user gives it, with the model where they have it."""
    env = {**os.environ, "PYTHONPATH": PYTHON_PATH, "OMP_NUM_THREADS": "1"}
    return subprocess.run(
        [COMMAND[0], *words], env=env, cwd=workshop.folder, capture_output=True, text=True, check=False, timeout=100
    )


def test_a_point_that_raises_is_told_and_runs_again(workshop: Workshop, capsys: pytest.CaptureFixture[str]) -> None:
    words = (*ONE, "train.steps=3", "train.seed=0,1", "optim.lr=1e-3", "launch.parallel_points=1")
    ended = workshop.train("sweep", "-m", *words, faults="0:train:2:raise")
    sweep = workshop.folder / "sweep"
    assert ended.code == 1
    failed, other = rows(capsys, sweep)
    assert ended.out.splitlines() == [f"2 points, sweep directory {sweep}", f"{other}: done (1)"]
    assert ended.err.splitlines() == [
        f"hpc-train: {failed}: task 0 on {os.uname().nodename} failed first: RuntimeError: a fault of the user's model",
        f"hpc-train: 1 of 2 points failed; `hpc-train resume {sweep}` runs them again",
    ]
    assert [row["state"] for row in rows(capsys, sweep).values()] == ["FAILED", "DONE"]
    errors = run_and_read(capsys, "logs", "--first-error", str(sweep))
    assert errors.startswith(f"{failed}: FAILED: task 0 on ")
    assert errors.count("\n") == 1
    assert run_and_read(capsys, "resume", "--mode", "cached", str(sweep)) == "nothing to resume: 1 FAILED, 1 DONE\n"

    again = command(workshop, "resume", str(sweep))
    assert (again.returncode, again.stdout) == (0, f"{failed}: done (1)\n"), again.stderr
    assert {name: row["attempt"] for name, row in rows(capsys, sweep).items()} == {failed: 1, other: 0}
    assert run_and_read(capsys, "resume", str(sweep)) == "nothing to resume: 2 DONE\n"
    _check_results(sweep, [failed, other], capsys)

    point = sweep / "points" / other
    before = numbers(point)
    forced = command(workshop, "resume", "--mode", "force", str(point))
    assert forced.returncode == 0, forced.stderr
    assert numbers(point) == before == numbers(point / "before/0")
    assert len(read_attempts(point)) == 1
    assert rows(capsys, sweep)[other]["state"] == "DONE"


def _check_results(sweep: Path, names: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    found = json.loads(run_and_read(capsys, "results", "--json", "--best", str(sweep)))
    assert [row["point"] for row in found] == names
    assert [row["overrides"] for row in found] == [{"train.seed": seed} for seed in (0, 1)]
    for row in found:
        losses = [line[1] for line in numbers(sweep / "points" / row["point"])]
        assert (row["metric"], row["value"], row["best"], row["final"]["step"]) == ("loss", losses[-1], min(losses), 3)
    table = list(csv.DictReader(io.StringIO(run_and_read(capsys, "results", "--csv", "-", str(sweep)))))
    assert [(row["point"], row["train.seed"], float(row["loss"])) for row in table] == [
        (row["point"], str(row["overrides"]["train.seed"]), row["value"]) for row in found
    ]
    shown = run_and_read(capsys, "results", str(sweep)).splitlines()
    assert shown[0].split() == ["point", "state", "train.seed", "step", "loss", "tokens_per_second"]
    assert len(shown) == 3
    for name in ("plot.png", "plot.svg"):
        assert run_and_read(capsys, "results", "--plot", str(sweep / name), str(sweep)) == ""
    assert (sweep / "plot.png").read_bytes().startswith(b"\x89PNG")
    assert "train.seed" in (sweep / "plot.svg").read_text()
    assert main(["results", "--metric", "beauty", str(sweep)]) == EXIT_USER_ERROR
    assert "--metric beauty: no point has it; there are data_seconds" in capsys.readouterr().err
    (single,) = json.loads(run_and_read(capsys, "results", "--json", str(sweep / "points" / names[1])))
    assert single["value"] == found[1]["value"]


@pytest.mark.long
def test_a_point_whose_rank_is_killed_goes_on(workshop: Workshop, capsys: pytest.CaptureFixture[str]) -> None:
    words = (*ONE, "train.steps=6", "checkpoint.every=2", "train.seed=0,1", "launch.parallel_points=1")
    ended = workshop.train("sweep", "-m", *words, faults="0:train:10:kill")
    assert ended.code == 0, ended.err
    first, second = rows(capsys, workshop.folder / "sweep").values()
    assert [first["state"], second["state"]] == ["DONE", "DONE"]
    assert (first["attempt"], second["attempt"]) == (1, 0)
    why, decision = (line for line in ended.err.splitlines() if "warning" not in line)
    assert "was killed by SIGKILL" in why
    assert f"{first['point']}: starting again from step " in decision


def test_ctrl_c_saves_all_that_run_and_begins_nothing_more(
    workshop: Workshop, capsys: pytest.CaptureFixture[str]
) -> None:
    words = (*ONE, "train.steps=100000", "train.seed=0,1,2", "launch.parallel_points=2")
    job = workshop.start("sweep", "-m", *words)
    sweep = workshop.folder / "sweep"
    wait_for(lambda: len(list(sweep.glob("points/*/metrics.jsonl"))) == 2, job)
    one, other, last = rows(capsys, sweep)
    assert [row["state"] for row in rows(capsys, sweep).values()] == ["RUNNING", "RUNNING", "PENDING"]
    assert rows(capsys, sweep)[last]["reason"] == "waits for its turn"
    cpus = [
        parse_cpus(json.loads((sweep / "points" / name / "rankmap.json").read_text())["ranks"][0]["cpus"])
        for name in (one, other)
    ]
    assert cpus[0]
    assert not cpus[0] & cpus[1], "each has its own processors"
    assert main(["resume", str(sweep)]) == 0
    assert capsys.readouterr().out == "nothing to resume: 2 RUNNING, 1 PENDING\n"
    job.popen.send_signal(signal.SIGINT)
    ended = job.ended()
    assert ended.code == EXIT_REQUEUE
    assert ended.err.splitlines() == [
        "hpc-train: SIGINT: asking 2 points to save and stop",
        f"hpc-train: stopped: 0 of 3 points are done; `hpc-train resume {sweep}` goes on",
    ]
    assert [len(saved_steps(sweep / "points" / name)) for name in (one, other)] == [1, 1]
    assert not (sweep / "points" / last).exists()
    assert {row["state"] for row in rows(capsys, sweep).values()} == {"CANCELLED"}
    again = json.loads(run_and_read(capsys, "resume", "--json", "--mode", "read-only", str(sweep)))
    assert [row["again"] for row in again] == [True] * 3


def test_a_sweep_here_is_cancelled_from_elsewhere(workshop: Workshop, capsys: pytest.CaptureFixture[str]) -> None:
    words = (*ONE, "train.steps=100000", "train.seed=0,1", "launch.parallel_points=1")
    job = workshop.start("sweep", "-m", *words)
    sweep = workshop.folder / "sweep"
    wait_for(lambda: list(sweep.glob("points/*/metrics.jsonl")), job)
    one, other = rows(capsys, sweep)
    assert main(["cancel", "--yes", str(sweep / "points" / other)]) == EXIT_USER_ERROR
    assert "waits for its turn in a sweep on this machine; cancel the sweep" in capsys.readouterr().err
    assert "begin nothing more" in run_and_read(capsys, "cancel", "--yes", str(sweep))
    assert job.ended().code == EXIT_REQUEUE
    assert len(saved_steps(sweep / "points" / one)) == 1
    assert {row["state"] for row in rows(capsys, sweep).values()} == {"CANCELLED"}


def test_a_run_that_lacks_steps_goes_on_as_it_was_frozen(
    workshop: Workshop, capsys: pytest.CaptureFixture[str]
) -> None:
    job = workshop.start("run", *ONE, "train.steps=4", faults="0:train:2:listen")
    workshop.wait_for_fault("0:train:2:listen", job)
    job.popen.send_signal(signal.SIGTERM)
    assert job.ended().code == EXIT_REQUEUE
    run = job.run_dir
    (run / "config.yaml").write_text("train: {steps: 99}\n")  # what runs is job.json
    again = command(workshop, "resume", str(run))
    assert (again.returncode, again.stderr) == (0, f"hpc-train: {run} goes on here\n")
    assert [line[0] for line in numbers(run)] == [1, 2, 3, 4]
    assert "resumed at step" in again.stdout
    assert run_and_read(capsys, "resume", str(run)) == "nothing to resume: 1 DONE\n"
