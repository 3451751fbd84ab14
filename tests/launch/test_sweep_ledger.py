"""The ledger outlives crashes, and with the run directories it tells where every point of a sweep is at."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from sweeps import make

from hpc_train.errors import UserError
from hpc_train.launch.resume import CACHED, FORCE, READ_ONLY, RETRY, find_candidates
from hpc_train.launch.slurm.slurm_cli import Answer
from hpc_train.launch.state.job_state import decide_state
from hpc_train.launch.state.run_facts import gather_facts
from hpc_train.launch.state.run_lookup import find_points
from hpc_train.launch.submit import list_jobs_to_wait_for
from hpc_train.launch.sweep import sweep_directory
from hpc_train.launch.sweep.sweep_directory import SweepDirectory


def test_a_torn_line_is_no_event_and_the_next_one_stays_whole(tmp_path: Path) -> None:
    path = tmp_path / "ledger.jsonl"
    sweep_directory.append_ledger_event(path, "sweep", points=1)
    assert path.stat().st_mode & 0o777 == 0o600
    with path.open("a") as file:
        file.write('{"event": "submit", "time": 1, "job_id": "7", "elem')
    assert [event["event"] for event in sweep_directory.read_ledger(path)] == ["sweep"]
    sweep_directory.append_ledger_event(path, "resume", mode="retry")
    assert [event["event"] for event in sweep_directory.read_ledger(path)] == ["sweep", "resume"]
    path.write_bytes(path.read_bytes() + b"\xff\xfe[1]\nnull\n")
    assert [event["event"] for event in sweep_directory.read_ledger(path)] == ["sweep", "resume"]
    assert sweep_directory.read_ledger(tmp_path / "nothing") == []


class Slurm:
    """squeue's lines; other commands know nothing."""

    def __init__(self, *lines: str) -> None:
        self.lines, self.asked = lines, 0

    def __call__(self, command: Sequence[str]) -> Answer:
        self.asked += command[0] == "squeue"
        if command[0] == "squeue" and self.lines:
            return Answer(0, "\n".join(self.lines))
        return Answer(1, err="slurm_load_jobs error: Invalid job id specified")


def states(folder: SweepDirectory, *lines: str) -> dict[str, str]:
    slurm = Slurm(*lines)
    found = {
        status.point: str(status.state)
        for status in map(decide_state, gather_facts(find_points(str(folder.path), slurm), slurm))
    }
    assert slurm.asked <= 1, "one poll for all"
    return found


def submitted(folder: SweepDirectory, job: str, *elements: Sequence[str], **more: Any) -> None:
    sweep_directory.append_ledger_event(
        folder.ledger, "submit", job_id=job, nodes=1, ranks=2, elements=elements, **more
    )


def attempt(folder: SweepDirectory, point: str, number: int, job: str, **result: Any) -> None:
    logs = folder.run(point) / "logs" / str(number)
    logs.mkdir(parents=True)
    (logs / "attempt.json").write_text(json.dumps({"job_id": job, "host": "n", "nodes": "n1", "time": 1}))
    if result:
        (logs / "result.json").write_text(json.dumps(result))


def chosen(folder: SweepDirectory, mode: str, *lines: str) -> list[str]:
    slurm = Slurm(*lines)
    monkey = pytest.MonkeyPatch()
    with monkey.context() as patch:
        patch.setattr("hpc_train.launch.resume.run_client", slurm)
        return [
            candidate.status.point
            for candidate in find_candidates(find_points(str(folder.path), slurm), mode)
            if candidate.again
        ]


def test_every_point_is_listed_and_has_its_own_state(tmp_path: Path) -> None:
    folder, ids = make(tmp_path / "s", "train.seed=range(6)")
    submitted(folder, "12", *([name] for name in ids))
    attempt(folder, ids[0], 0, "12_0", exit_code=0)
    attempt(folder, ids[1], 0, "12_1", exit_code=1, why="launch.setup failed")
    attempt(folder, ids[2], 0, "12_2")
    attempt(folder, ids[3], 0, "12_3", exit_code=75, then="requeue")
    sweep_directory.append_ledger_event(folder.ledger, "cancel", points={ids[5]: "12_5"})
    lines = (
        *("12_1|21|FAILED|n1|NonZeroExitCode", "12_2|22|RUNNING|n1|None", "12_3|23|PENDING||BeginTime"),
        "12_4|12|PENDING||JobArrayTaskLimit",
    )
    expected = ["DONE", "FAILED", "RUNNING", "REQUEUED", "PENDING", "CANCELLED"]
    assert list(states(folder, *lines).values()) == expected
    assert list(states(folder, *lines)) == ids
    again = {mode: chosen(folder, mode, *lines) for mode in (RETRY, CACHED, FORCE, READ_ONLY)}
    assert again == {
        "retry": [ids[1], ids[5]],
        "read-only": [ids[1], ids[5]],
        "cached": [ids[5]],
        "force": [ids[0], ids[1], ids[5]],
    }
    submitted(folder, "13", [ids[1]], [ids[5]])
    lines = (*lines, "13_0|31|PENDING||Priority", "13_1|32|RUNNING|n1|None")
    assert list(states(folder, *lines).values()) == ["DONE", "PENDING", "RUNNING", "REQUEUED", "PENDING", "RUNNING"]
    assert chosen(folder, "retry", *lines) == []


def test_what_comes_after_a_sweep_waits_for_arrays_and_where_one_of_them_failed_for_elements(tmp_path: Path) -> None:
    folder, ids = make(tmp_path / "s", "train.seed=range(3)")
    submitted(folder, "12", *([name] for name in ids))
    lines = [f"12_{index}|2{index}|RUNNING|n1|None" for index in range(3)]
    assert list_jobs_to_wait_for([str(folder.path)], Slurm(*lines)) == ["12"]
    attempt(folder, ids[0], 0, "12_0", exit_code=0)
    attempt(folder, ids[1], 0, "12_1", exit_code=1)
    lines[1] = "12_1|21|FAILED|n1|NonZeroExitCode"
    with pytest.raises(UserError, match=f"{ids[1]} is FAILED .*; submit it again first"):
        list_jobs_to_wait_for([str(folder.path)], Slurm(*lines))
    submitted(folder, "13", [ids[1]])
    found = list_jobs_to_wait_for([str(folder.path)], Slurm(*lines, "13_0|31|PENDING||Priority"))
    assert found == ["13", "12_2"]


def test_points_of_one_job_end_before_it_does(tmp_path: Path) -> None:
    folder, ids = make(tmp_path / "s", "train.seed=range(4)")
    submitted(folder, "12", ids, packed=True)
    attempt(folder, ids[0], 0, "12_0", exit_code=0)
    attempt(folder, ids[1], 0, "12_0", exit_code=1, why="it raised", slurm="RUNNING None")
    attempt(folder, ids[2], 0, "12_0", exit_code=75, then="requeue", why="stopped")
    attempt(folder, ids[3], 0, "12_0")
    for line, last in (
        ("12_0|21|RUNNING|n1|None", ["REQUEUED", "RUNNING"]),
        ("12_0|21|PENDING||BeginTime", ["REQUEUED", "REQUEUED"]),
        ("12_0|21|FAILED|n1|NonZeroExitCode", ["FAILED", "FAILED"]),
        ("12_0|21|NODE_FAIL|n1|None", ["NODE_FAIL", "NODE_FAIL"]),
    ):
        assert list(states(folder, line).values()) == ["DONE", "FAILED", *last], line


def test_a_point_is_found_by_its_path_before_it_begins_and_a_job_by_its_points(tmp_path: Path) -> None:
    folder, ids = make(tmp_path / "s", "train.seed=range(3)")
    submitted(folder, "12", ids[:2], ids[2:], packed=True)
    (folder.scripts / "12_submission.sh").touch()

    def asked(command: Sequence[str]) -> Answer:
        return Answer(0, f"JobId=12 JobState=PENDING Command={folder.scripts}/12_submission.sh StdOut=/x/y WorkDir=/")

    (point,) = find_points(str(folder.run(ids[1])), asked)
    assert (point.name, point.placed and point.placed.job, point.run.exists()) == (ids[1], "12_0", False)
    assert [point.name for point in find_points("12", asked)] == ids
    assert [point.name for point in find_points("12_0", asked)] == ids[:2]
    assert [point.name for point in find_points("12_1", asked)] == ids[2:]
    with pytest.raises(UserError, match="the sweep has no such point"):
        find_points(str(folder.run("x")), asked)
    folder.points.write_text("{")
    with pytest.raises(UserError, match=r"points.jsonl: is damaged"):
        find_points(str(folder.path), asked)
