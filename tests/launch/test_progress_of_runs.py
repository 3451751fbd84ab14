"""`status` shows a run's progress and its age, whatever metrics.jsonl looks like."""

from __future__ import annotations

import io
import json
import os
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from rich.console import Console

from hpc_train.cli.run.status import make_status_table
from hpc_train.launch.state.attempts import Attempt, AttemptStart
from hpc_train.launch.state.progress import add_progress
from hpc_train.launch.state.run_facts import RunFacts, read_files
from hpc_train.launch.state.run_lookup import RunPoint
from hpc_train.launch.state.state_names import RunStatus, State, describe_exit, parse_ending
from hpc_train.launch.sweep.sweep_directory import PointPlacement

RUNNING = RunStatus("run", "7", 0, State.RUNNING)


def line(step: int, loss: float | None = 1.5, seconds: float = 1.0) -> str:
    return json.dumps({"step": step, "loss": loss, "step_seconds": seconds}) + "\n"


def facts_of(run: Path, began: float = 0.0) -> RunFacts:
    (run / "logs/0").mkdir(parents=True, exist_ok=True)
    start = {"event": "start", "time": 1, "attempt": 0, "step": 0, "steps": 300}
    (run / "events.jsonl").write_text(json.dumps(start) + "\n")
    return replace(read_files(RunPoint("run", run)), attempts=(Attempt(0, AttemptStart("here", began)),))


def aged(path: Path, seconds: float) -> None:
    then = time.time() - seconds
    os.utime(path, (then, then))


def test_step_loss_and_the_age_of_the_last_step(tmp_path: Path) -> None:
    facts = facts_of(tmp_path)
    metrics = tmp_path / "metrics.jsonl"
    metrics.write_text("".join(line(step) for step in range(1, 127)) + line(127, 2.5))
    aged(metrics, 30)
    status = add_progress(RUNNING, facts)
    assert (status.step, status.steps, status.loss, status.reason) == (127, 300, 2.5, "")
    assert status.seconds_since_step == pytest.approx(30, abs=10)
    out = io.StringIO()
    Console(file=out, width=200).print(make_status_table([status]))
    assert "127/300" in out.getvalue()
    assert "2.5000" in out.getvalue()
    assert add_progress(replace(RUNNING, state=State.DONE), facts).seconds_since_step is None


def test_a_hang_does_not_look_healthy(tmp_path: Path) -> None:
    facts = facts_of(tmp_path)
    metrics = tmp_path / "metrics.jsonl"
    metrics.write_text(line(3))
    aged(metrics, 600)
    assert add_progress(RUNNING, facts).reason == "no step for 10 min"
    assert add_progress(replace(RUNNING, reason="asked"), facts).reason == "asked: no step for 10 min"
    metrics.write_text(line(3, seconds=100.0))
    aged(metrics, 600)
    assert add_progress(RUNNING, facts).reason == "", "its steps take that long"
    metrics.unlink()
    begun = facts_of(tmp_path, time.time() - 7200)
    assert add_progress(RUNNING, begun).reason == "no step for 2.0 h"
    requeued = facts_of(tmp_path, time.time() - 5)
    metrics.write_text(line(3))
    aged(metrics, 7200)
    assert add_progress(RUNNING, requeued).reason == "", "the attempt began a moment ago"


@pytest.mark.parametrize(
    ("begun", "resilience", "why"),
    [
        (AttemptStart("here", 0, launcher="local", process=7), {"watch": True}, ""),
        (AttemptStart("here", 0, job_id="12"), {"watch": True}, ""),
        (AttemptStart("here", 0, job_id="12"), {"watch": False}, "not watched: resilience.watch=false"),
        (AttemptStart("here", 0, job_id="12"), None, ""),
        (
            AttemptStart("here", 0, job_id="12", process=7),
            {"watch": True},
            "not watched: the ranks were started by srun",
        ),
        (AttemptStart("here", 0, launcher="torchrun", process=7), {"watch": True}, "not watched: the ranks were"),
    ],
)
def test_a_run_that_nobody_watches_says_so(tmp_path: Path, begun: AttemptStart, resilience: object, why: str) -> None:
    facts = replace(facts_of(tmp_path), attempts=(Attempt(0, begun),))
    (tmp_path / "metrics.jsonl").write_text(line(3))
    config = {} if resilience is None else {"resilience": resilience}
    (tmp_path / "job.json").write_text(json.dumps({"config": config}))
    reason = add_progress(RUNNING, facts).reason
    assert reason.startswith(why)
    assert bool(reason) == bool(why)


def test_a_point_that_shares_its_job_says_that_nobody_watches_it(tmp_path: Path) -> None:
    facts = replace(facts_of(tmp_path), attempts=(Attempt(0, AttemptStart("here", 0, job_id="12_3")),))
    (tmp_path / "metrics.jsonl").write_text(line(3))
    (tmp_path / "job.json").write_text(json.dumps({"config": {"resilience": {"watch": True}}}))
    for packed, reason in (
        (True, "not watched: it shares its job with other points (launch.points_per_job)"),
        (False, ""),
    ):
        point = replace(facts.point, placed=PointPlacement(0.0, "12_3", packed))
        assert add_progress(RUNNING, replace(facts, point=point)).reason == reason


def huge(path: Path) -> None:
    with path.open("wb") as file:
        file.truncate(1 << 40)  # a terabyte without a line end
        file.seek(0, 2)
        file.write(b"\n" + line(9).encode())


@pytest.mark.parametrize(
    ("damage", "step"),
    [
        (os.mkfifo, None),
        (Path.mkdir, None),
        (lambda path: path.symlink_to("/dev/zero"), None),
        (lambda path: path.symlink_to(path), None),
        (huge, 9),
        (lambda path: path.write_bytes(line(4).encode() + b'{"step": 5, "lo'), 4),
        (lambda path: path.write_bytes(line(4).encode() + b"[" * 200_000 + b"\n"), 4),
        (lambda path: path.write_bytes(os.urandom(10_000)), None),
        (lambda path: path.write_text('{"step": "many", "loss": [1]}\n'), None),
        (lambda path: path.write_text('{"step": 8, "loss": NaN, "step_seconds": Infinity}\n'), 8),
        (lambda path: path.write_text(""), None),
    ],
)
def test_damaged_metrics(tmp_path: Path, damage: Callable[[Path], object], step: int | None) -> None:
    facts = facts_of(tmp_path)
    damage(tmp_path / "metrics.jsonl")
    status = add_progress(RUNNING, facts)
    assert (status.step, status.loss) == (step, 1.5 if step in (4, 9) else None)
    json.dumps(status.row(), allow_nan=False)
    Console(file=io.StringIO()).print(make_status_table([status]))


def test_events_and_markers_that_are_no_files_are_none(tmp_path: Path) -> None:
    (tmp_path / "logs/0").mkdir(parents=True)
    for name in ("events.jsonl", "logs/0/attempt.json", "logs/0/result.json", "logs/0/rankmap.json"):
        os.mkfifo(tmp_path / name)
    assert read_files(RunPoint("run", tmp_path)).attempts == (Attempt(0),)


@pytest.mark.parametrize(
    ("code", "words"),
    [
        (128 + 53, "could not start it on node n1"),
        (128 + 125, "out of memory"),
        (137, "SIGKILL"),
        (139, "segmentation fault"),
        (135, "/dev/shm"),
        (143, "SIGTERM"),
        (256 + 15, "SIGTERM"),
        (271, "SIGTERM"),
        (127, "not found"),
        (126, "could not be executed"),
        (1, "exit code 1"),
        (128 + 64, "killed by signal 64"),
        (128 + 99, "which this system does not have"),
    ],
)
def test_codes_in_plain_words(code: int, words: str) -> None:
    assert words in describe_exit(code, ["n1", "n2"])


@pytest.mark.parametrize(
    ("text", "state"),
    [
        (
            "slurmstepd-n1: error: *** JOB 12 ON n1 CANCELLED AT 2026-11-22T1:2:3 DUE TO TIME LIMIT ***",
            State.TIMEOUT,
        ),
        (
            "x\nslurmstepd: error: *** STEP 9.0 ON n1 CANCELLED AT 2026-01-01T0:0:0 DUE TO TIME LIMIT ***",
            State.TIMEOUT,
        ),
        ("slurmstepd: error: *** JOB 1 ON n CANCELLED AT 2026-01-01T0:0:0 DUE TO PREEMPTION ***", State.PREEMPTED),
        (
            "slurmstepd: error: *** JOB 1 ON n CANCELLED AT 1 DUE TO NODE FAILURE, SEE SLURMCTLD LOG FOR DETAILS ***",
            State.NODE_FAIL,
        ),
        ("slurmstepd: error: Detected 1 oom_kill event in StepId=1.0. Some of the step tasks", State.OUT_OF_MEMORY),
        ("slurmstepd-n1: error: *** JOB 2 ON n1 CANCELLED AT 2026-11-22T21:33:41 ***", None),
        ("a user prints DUE TO TIME LIMIT", None),
        ("", None),
    ],
)
def test_what_slurm_wrote_into_the_log_of_a_job(text: str, state: State | None) -> None:
    assert parse_ending(text) == state
