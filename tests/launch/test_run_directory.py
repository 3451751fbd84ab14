"""What a run leaves in its directory, who may read it, and how the same command goes on from it."""

from __future__ import annotations

import json
import os
import pty
import shutil
import signal
import stat
import subprocess
import time
from pathlib import Path
from typing import Any

from jobs import (
    COMMAND,
    LONG,
    PYTHON_PATH,
    TINY,
    Workshop,
    assert_same_run,
    numbers,
    processes,
    saved_steps,
    wait_for,
)

from hpc_train.errors import EXIT_USER_ERROR


def events(run_dir: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run_dir / "events.jsonl").read_text().splitlines()]


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


def test_only_the_owner_can_look_into_a_run(uninterrupted: Path) -> None:
    assert mode(uninterrupted) == 0o700
    for name in ("config.yaml", "job.json", "rankmap.json", "events.jsonl", "logs/0/task-0.log", "logs/0/task-1.log"):
        assert mode(uninterrupted / name) == 0o600, name


def test_every_step_is_recorded_once_with_validation_where_it_is_due(uninterrupted: Path) -> None:
    assert [line[0] for line in numbers(uninterrupted)] == list(range(1, 13))
    records = [json.loads(line) for line in (uninterrupted / "metrics.jsonl").read_text().splitlines()]
    assert [record["step"] for record in records if "validation_loss" in record] == [3, 6, 9, 12]
    assert all(record["tokens"] == 4 * 16 for record in records)
    assert all(record["mfu"] is None for record in records)


def test_events_tell_the_attempt_and_the_time(uninterrupted: Path) -> None:
    records = [event for event in events(uninterrupted) if event["event"] != "note"]
    assert [event["event"] for event in records] == ["start", "checkpoint", "checkpoint", "checkpoint", "end"]
    assert [event["step"] for event in records] == [0, 4, 8, 12, 12]
    assert {event["attempt"] for event in records} == {0}
    times = [event["time"] for event in records]
    assert times == sorted(times)
    assert abs(times[-1] - time.time()) < 86400


def test_the_rank_map_says_where_every_rank_was(uninterrupted: Path) -> None:
    rank_map = json.loads((uninterrupted / "rankmap.json").read_text())
    assert rank_map["mesh"] == {"pp": 1, "dp_replicate": 2, "dp_shard": 1, "cp": 1, "tp": 1}
    assert [(entry["rank"], entry["process"], entry["local_rank"]) for entry in rank_map["ranks"]] == [
        (0, 0, 0),
        (1, 1, 1),
    ]


def test_a_job_killed_between_checkpoints_does_the_lost_steps_again(workshop: Workshop, uninterrupted: Path) -> None:
    fault = "1:train:7:hold"
    job = workshop.start("run", *LONG, faults=fault)
    workshop.wait_for_fault(fault, job)
    wait_for((job.run_dir / "checkpoints" / "step-4").exists, job)  # it is written in the background
    for process in processes(job.run_dir):
        process.send(signal.SIGKILL)
    job.ended()
    wait_for(lambda: not processes(job.run_dir))
    assert saved_steps(job.run_dir) == [4]
    assert [line[0] for line in numbers(job.run_dir)] == [1, 2, 3, 4, 5, 6]

    with (job.run_dir / "metrics.jsonl").open("a") as torn:
        torn.write('{"step": 7, "lo')
    again = workshop.train("run", *LONG)
    assert again.code == 0, again
    assert "resumed at step 4 of 12" in again.out
    assert_same_run(job.run_dir, uninterrupted)
    assert sorted(path.name for path in (job.run_dir / "logs").iterdir()) == ["0", "1"]
    assert [
        (event["event"], event["attempt"]) for event in events(job.run_dir) if event["event"] in ("start", "resume")
    ] == [
        ("start", 0),
        ("resume", 1),
    ]
    assert (job.run_dir / "logs/1/task-1.log").exists()


def test_a_finished_run_says_so_and_changes_nothing(workshop: Workshop, uninterrupted: Path) -> None:
    run = Path(shutil.copytree(uninterrupted, workshop.folder / "run"))
    before = {path: path.stat().st_mtime_ns for path in run.rglob("*") if path.name not in ("config.yaml", "job.json")}
    ended = workshop.train("run", *LONG)
    assert (ended.code, ended.err) == (0, "")
    assert ended.out == f"already done: {run} has its 12 steps; more of them with train.steps, or use a new run_dir\n"
    after = {path: path.stat().st_mtime_ns for path in run.rglob("*") if path.name not in ("config.yaml", "job.json")}
    assert {path: time for path, time in after.items() if path != run} == {
        path: time for path, time in before.items() if path != run
    }


def test_a_run_directory_of_another_run_is_refused_in_one_line(workshop: Workshop, uninterrupted: Path) -> None:
    run = Path(shutil.copytree(uninterrupted, workshop.folder / "run"))
    ended = workshop.train("run", *LONG, "optim.lr=0.5")
    assert ended.code == EXIT_USER_ERROR
    assert ended.err.startswith(f"hpc-train: run_dir={run}: holds another run: optim.lr is 0.5 and was ")
    assert len(ended.err.splitlines()) == 1
    assert sorted(path.name for path in (run / "logs").iterdir()) == ["0"]


def test_more_steps_continue_a_finished_run_and_a_terminal_shows_a_bar(workshop: Workshop, uninterrupted: Path) -> None:
    run = shutil.copytree(uninterrupted, workshop.folder / "run")
    screen = on_a_terminal(workshop, f"run_dir={run}", *LONG, "train.steps=14")
    assert "resumed at step 12 of 14" in screen
    assert "━" in screen
    assert "14/14" in screen
    assert "loss" in screen
    assert "tokens/s" in screen
    assert [line[0] for line in numbers(Path(run))] == list(range(1, 15))


def on_a_terminal(workshop: Workshop, *overrides: str) -> str:
    """What a person sees."""
    master, slave = pty.openpty()
    environment = os.environ | {"PYTHONPATH": PYTHON_PATH, "TERM": "xterm", "COLUMNS": "120", "FAULTS": ""}
    words = (*COMMAND, "data=text", f"data.path={workshop.store}", *TINY, *overrides)
    with subprocess.Popen(
        words, env=environment, cwd=workshop.folder, stdin=slave, stdout=slave, stderr=slave
    ) as process:
        os.close(slave)
        seen = b""
        try:
            while part := os.read(master, 65536):
                seen += part
        except OSError:  # how Linux says that the other side of a terminal is closed
            pass
    os.close(master)
    assert process.returncode == 0, seen.decode()
    return seen.decode()
