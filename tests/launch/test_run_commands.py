"""status, logs and cancel on runs of this machine: real ranks, real signals, no Slurm."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest
from jobs import COMMAND, FAULTY, LONG, PATIENCE, Job, Workshop, numbers, processes, saved_steps, wait_for

from hpc_train.cli.main import main
from hpc_train.errors import EXIT_REQUEUE, EXIT_USER_ERROR

ENDLESS = (*FAULTY, "train.steps=100000", "checkpoint.every=50000")


def status(run: Path, capsys: pytest.CaptureFixture[str]) -> dict[str, Any]:
    assert main(["status", "--json", str(run)]) == 0
    row: dict[str, Any]
    (row,) = json.loads(capsys.readouterr().out)
    fields = ["point", "job_id", "attempt", "state", "reason", "nodes", "exit_code", "step", "steps", "loss"]
    assert list(row) == [*fields, "seconds_since_step", "warnings", "faults", "skipped_steps", "passed_over"]
    assert (row["point"], row["job_id"], len(row["nodes"])) == (run.name, None, 1)
    return row


def logs(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    assert main(["logs", *words]) == 0
    return capsys.readouterr().out


def begun(workshop: Workshop, fault: str = "0:train:3:listen") -> Job:
    job = workshop.start("run", *ENDLESS, faults=fault)
    workshop.wait_for_fault(fault, job)
    return job


def test_a_run_that_is_done(uninterrupted: Path, capsys: pytest.CaptureFixture[str]) -> None:
    row = status(uninterrupted, capsys)
    assert (row["state"], row["attempt"], row["exit_code"], row["reason"]) == ("DONE", 0, 0, "")
    last = numbers(uninterrupted)[-1]
    assert (row["step"], row["steps"], row["loss"], row["seconds_since_step"]) == (last[0], 12, last[1], None)
    whole = logs(capsys, str(uninterrupted))
    assert whole == (uninterrupted / "logs/0/task-0.log").read_text()
    assert "done: 12 steps" in whole
    assert logs(capsys, str(uninterrupted), "--tail", "2") == "".join(whole.splitlines(keepends=True)[-2:])
    assert logs(capsys, str(uninterrupted), "--tail", "0") == ""
    assert logs(capsys, str(uninterrupted), "--rank", "1") == (uninterrupted / "logs/0/task-1.log").read_text()
    assert logs(capsys, str(uninterrupted), "-f", "--tail", "1") == whole.splitlines(keepends=True)[-1]
    assert logs(capsys, str(uninterrupted), "--first-error") == f"no rank failed in 1 attempts of {uninterrupted}\n"
    assert main(["cancel", str(uninterrupted)]) == 0
    assert capsys.readouterr().out == "nothing to cancel: run is DONE\n"
    assert main(["status", str(uninterrupted)]) == 0
    table = capsys.readouterr().out
    assert table.split()[:4] == ["point", "job", "attempt", "state"]
    assert table.splitlines()[1].split()[:4] == ["run", "-", "0", "DONE"]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["logs", "RUN", "--rank", "7"], "--rank 7: attempt 0 has ranks 0 to 1"),
        (["logs", "RUN", "--attempt", "3"], "--attempt 3: there is 0"),
        (["logs", "RUN", "--tail", "-3"], "--tail"),
        (["attach", "RUN"], "is DONE; only a running job can be attached to"),
        (["status", "RUN/config.yaml"], "no such run directory"),
        (["status", "nowhere"], "nowhere: no such run directory; give a run directory, a sweep directory, or a job id"),
    ],
)
def test_wrong_words_are_one_line(
    words: list[str], message: str, uninterrupted: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    try:
        code = main([word.replace("RUN", str(uninterrupted)) for word in words])
    except SystemExit as stopped:
        code = int(str(stopped.code))
    error = capsys.readouterr().err
    assert code == EXIT_USER_ERROR
    assert message in error
    assert error.count("\n") == 1


def test_a_run_is_followed_cancelled_and_saves(workshop: Workshop, capsys: pytest.CaptureFixture[str]) -> None:
    job = begun(workshop)
    row = status(job.run_dir, capsys)
    assert (row["state"], row["exit_code"]) == ("RUNNING", None)
    words = [COMMAND[0], "logs", "-f", str(job.run_dir)]
    with subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as follower:
        assert main(["cancel", "--yes", str(job.run_dir)]) == 0
        assert "asked to save and end" in capsys.readouterr().out
        assert job.ended().code == EXIT_REQUEUE
        out, err = follower.communicate(timeout=PATIENCE)
    assert saved_steps(job.run_dir) == [numbers(job.run_dir)[-1][0]]
    row = status(job.run_dir, capsys)
    assert (row["state"], row["exit_code"]) == ("CANCELLED", EXIT_REQUEUE)
    assert (follower.returncode, err) == (0, "")
    assert out == (job.run_dir / "logs/0/task-0.log").read_text()
    assert "stopped at step" in out


def test_a_run_is_cancelled_at_once(workshop: Workshop, capsys: pytest.CaptureFixture[str]) -> None:
    job = begun(workshop, "0:train:3:hold")
    assert main(["cancel", "--now", "--yes", str(job.run_dir)]) == 0
    assert "killed" in capsys.readouterr().out
    job.ended()
    wait_for(lambda: processes(job.run_dir) == [])
    assert saved_steps(job.run_dir) == []
    assert status(job.run_dir, capsys)["state"] == "CANCELLED"


def test_a_run_whose_processes_are_all_killed_is_failed_at_once(
    workshop: Workshop, capsys: pytest.CaptureFixture[str]
) -> None:
    job = begun(workshop, "0:train:3:hold")
    job.popen.kill()  # first, or it would tell
    for process in processes(job.run_dir):
        process.send(9)  # type: ignore[arg-type]
    wait_for(lambda: processes(job.run_dir) == [])
    job.popen.communicate()
    row = status(job.run_dir, capsys)
    assert (row["state"], row["exit_code"]) == ("FAILED", None)
    assert row["reason"] == "the process that held the ranks was killed"


def test_the_first_error_is_found_in_the_attempt_that_has_one_and_no_secret_anywhere(
    workshop: Workshop, capsys: pytest.CaptureFixture[str]
) -> None:
    canary = os.urandom(8).hex()
    secrets = {"SECRET_TOKEN": canary, "MY_PASSWORD": canary}
    overrides = (*LONG, "train.tensorboard=true")
    ended = workshop.train("run", *overrides, faults="1:train:3:raise 0:train:3:hold", **secrets)
    assert ended.code == 1
    run = workshop.folder / "run"
    row = status(run, capsys)
    assert (row["state"], row["exit_code"]) == ("FAILED", 1)
    assert row["reason"].endswith("failed first: RuntimeError: a fault of the user's model")
    shown = logs(capsys, str(run), "--first-error")
    first, *rest = shown.splitlines()
    assert first.startswith("attempt 0, rank 1 (task 1) on ")
    assert first.endswith("logs/0/task-1.log")
    assert rest[-1] == "RuntimeError: a fault of the user's model"
    assert shown.count("Traceback") == 1
    again = workshop.train("run", *overrides, **secrets)
    assert again.code == 0
    assert status(run, capsys)["attempt"] == 1
    assert logs(capsys, str(run), "--first-error") == shown
    assert canary not in ended.out + ended.err + again.out + again.err
    files = [path for path in run.rglob("*") if path.is_file()]
    assert any("tfevents" in path.name for path in files)
    assert [path for path in files if canary.encode() in path.read_bytes()] == []
