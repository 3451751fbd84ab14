"""From what a run has left and what Slurm says to one word: every combination that there is."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from hpc_train.errors import UserError
from hpc_train.launch.slurm.slurm_cli import Answer
from hpc_train.launch.state.job_state import decide_state
from hpc_train.launch.state.run_facts import gather_facts, read_events
from hpc_train.launch.state.run_lookup import find_points, require_single
from hpc_train.launch.state.state_names import RunStatus


class Run:
    """A run directory as ranks and batch script leave it."""

    def __init__(self, path: Path) -> None:
        self.path = path
        (path / "logs").mkdir(parents=True)

    def event(self, kind: str, attempt: int, time: float = 100.0, **fields: Any) -> Run:
        with (self.path / "events.jsonl").open("a") as file:
            file.write(json.dumps({"event": kind, "time": time, "attempt": attempt, **fields}) + "\n")
        return self

    def submitted(self, *jobs: str) -> Run:
        chain = {"job_ids": jobs} if len(jobs) > 1 else {}
        return self.event("submit", -1, 10.0, job_id=jobs[0], **chain)

    def attempt(self, number: int, job: str | None, result: dict[str, Any] | None = None, **begun: Any) -> Run:
        logs = self.path / "logs" / str(number)
        logs.mkdir()
        marker = {"job_id": job, "host": "node1", "nodes": "node[1-2]", "time": 20.0 + number, **begun}
        (logs / "attempt.json").write_text(json.dumps(marker))
        if result is not None:
            (logs / "result.json").write_text(json.dumps(result))
        return self


class Slurm:
    """Answers of squeue, line by line; other commands know nothing. None: the controller is down."""

    def __init__(self, *lines: str, up: bool = True) -> None:
        self.lines, self.up, self.asked = lines, up, 0

    def __call__(self, command: Sequence[str]) -> Answer:
        self.asked += 1
        if not self.up:
            return Answer(1, err="slurm_load_jobs error: Unable to contact slurm controller")
        if command[0] == "squeue" and self.lines:
            return Answer(0, "\n".join(self.lines))
        return Answer(1, err="slurm_load_jobs error: Invalid job id specified")


def state(run: Run, *lines: str, up: bool = True) -> RunStatus:
    slurm = Slurm(*lines, up=up)
    return decide_state(gather_facts(find_points(str(run.path), slurm), slurm)[0])


@pytest.fixture
def run(tmp_path: Path) -> Run:
    return Run(tmp_path / "run")


DONE = {"exit_code": 0}
FAILED = {"exit_code": 1, "slurm": "RUNNING None"}
REQUEUE = {"exit_code": 75, "then": "requeue", "why": "the ranks stopped on purpose", "slurm": "RUNNING None"}


def test_a_job_that_waits(run: Run) -> None:
    status = state(run.submitted("12"), "12|12|PENDING||Priority")
    assert status.row() == {
        "point": "run",
        "job_id": "12",
        "attempt": None,
        "state": "PENDING",
        "reason": "Priority",
        "nodes": [],
        "exit_code": None,
        "step": None,
        "steps": None,
        "loss": None,
        "seconds_since_step": None,
        "warnings": [],
        "faults": [],
        "skipped_steps": 0,
        "passed_over": [],
    }


def test_a_job_that_waits_for_its_second_attempt(run: Run) -> None:
    status = state(run.submitted("12").attempt(0, "12", REQUEUE), "12|12|PENDING||BeginTime")
    assert (status.state, status.attempt, status.reason, status.nodes) == ("REQUEUED", 0, "BeginTime", ())


def test_a_job_whose_node_died_before_it_could_say_anything_is_requeued_all_the_same(run: Run) -> None:
    assert state(run.submitted("12").attempt(0, "12"), "12|12|PENDING||BeginTime").state == "REQUEUED"


def test_a_job_that_runs(run: Run) -> None:
    status = state(run.submitted("12").attempt(0, "12"), "12|12|RUNNING|node[1-2]|None")
    assert (status.state, status.attempt, status.nodes, status.exit_code) == ("RUNNING", 0, ("node1", "node2"), None)


def test_a_second_attempt_runs_whatever_the_first_one_said(run: Run) -> None:
    begun = run.submitted("12").attempt(0, "12", REQUEUE)
    assert state(begun, "12|12|RUNNING|node1|None").state == "RUNNING"


def test_one_that_is_done_asks_nobody(run: Run) -> None:
    run.submitted("12").attempt(0, "12", DONE)
    slurm = Slurm(up=False)
    status = decide_state(gather_facts(find_points(str(run.path), slurm), slurm)[0])
    assert (status.state, status.exit_code, status.nodes, slurm.asked) == ("DONE", 0, ("node1", "node2"), 0)


def test_one_that_raised_is_failed_and_says_why(run: Run) -> None:
    run.submitted("12").attempt(0, "12", FAILED).event("failure", 0, why="task 1 failed first: ValueError: x")
    for lines in ([], ["12|12|FAILED|node1|NonZeroExitCode"]):
        status = state(run, *lines)
        assert (status.state, status.exit_code, status.reason) == ("FAILED", 1, "task 1 failed first: ValueError: x")


@pytest.mark.parametrize("word", ["TIMEOUT", "NODE_FAIL", "OUT_OF_MEMORY", "PREEMPTED", "CANCELLED"])
def test_how_slurm_ended_it_is_its_state_with_and_without_a_result(run: Run, word: str) -> None:
    run.submitted("12").attempt(0, "12", {"exit_code": 75, "why": "", "slurm": "COMPLETING None"})
    assert state(run, f"12|12|{word}|node1|None").state == word
    (run.path / "logs/0/result.json").unlink()
    assert state(run, f"12|12|{word}|node1|None").state == word


@pytest.mark.parametrize(
    ("slurm", "word"),
    [
        ("COMPLETING TimeLimit", "TIMEOUT"),
        ("COMPLETING None", "CANCELLED"),
        ("COMPLETING OutOfMemory", "OUT_OF_MEMORY"),
        ("PREEMPTED None", "PREEMPTED"),
        ("RUNNING None", "FAILED"),
        ("", "FAILED"),
    ],
)
def test_what_the_batch_script_saw_outlives_slurms_memory(run: Run, slurm: str, word: str) -> None:
    status = state(run.submitted("12").attempt(0, "12", {"exit_code": 143, "slurm": slurm}))
    assert (status.state, status.exit_code) == (word, 143)


@pytest.mark.parametrize(
    ("slurm", "word"), [("COMPLETING None", "RUNNING"), ("COMPLETING TimeLimit", "TIMEOUT"), ("RUNNING None", "FAILED")]
)
def test_what_slurm_is_ending_may_be_about_to_run_again(run: Run, slurm: str, word: str) -> None:
    """`scontrol requeue` looks like a cancellation until the job waits again: nobody may be told that it has ended."""
    run.submitted("12").attempt(0, "12", {"exit_code": 75, "slurm": slurm})
    assert state(run, "12|12|COMPLETING|node1|None").state == word
    assert state(run, "12|12|PENDING||BeginTime").state == "REQUEUED"


@pytest.mark.parametrize(
    "line", ["12|12|COMPLETING|node1|None", "12|12|TIMEOUT|node1|TimeLimit", "12|12|TIMEOUT|node1|None"]
)
def test_whoever_tells_of_the_time_limit_the_reason_is_the_same(run: Run, line: str) -> None:
    run.submitted("12").attempt(0, "12", {"exit_code": 75, "why": "asked to", "slurm": "COMPLETING TimeLimit"})
    status = state(run, line)
    assert (status.state, status.reason) == ("TIMEOUT", "TimeLimit: asked to")


def test_one_that_was_killed_without_accounting_is_failed_as_soon_as_slurm_forgets_it(run: Run) -> None:
    status = state(run.submitted("12").attempt(0, "12"))
    assert (status.state, status.exit_code) == ("FAILED", None)
    assert status.reason == "Slurm does not know the job any more, and it left no result: it was killed"


def test_a_time_limit_stays_one_where_slurm_has_forgotten_the_job_and_accounting_does_not_answer(run: Run) -> None:
    run.submitted("12").attempt(0, "12")
    line = "slurmstepd-n1: error: *** JOB 12 ON n1 CANCELLED AT 2026-11-22T21:33:41 DUE TO TIME LIMIT ***"
    (run.path / "logs/job-12.log").write_text(line)
    status = state(run)
    assert (status.state, status.reason) == ("TIMEOUT", "TimeLimit")


def test_one_that_never_started(run: Run) -> None:
    status = state(run.submitted("12"))
    assert status.state == "FAILED"
    assert status.reason.endswith("it never started")


def test_one_that_was_to_be_requeued_and_vanished(run: Run) -> None:
    status = state(run.submitted("12").attempt(0, "12", REQUEUE))
    assert (status.state, status.exit_code) == ("FAILED", 75)


def test_nothing_is_said_of_a_slurm_that_does_not_answer(run: Run) -> None:
    status = state(run.submitted("12").attempt(0, "12"), up=False)
    assert status.state == "UNKNOWN"
    assert status.reason == "Slurm does not answer: Unable to contact slurm controller"


def test_a_word_of_a_newer_slurm_is_shown_and_not_guessed(run: Run) -> None:
    status = state(run.submitted("12"), "12|12|QUANTUM|node1|None")
    assert (status.state, status.reason) == ("UNKNOWN", "Slurm calls it QUANTUM")


def test_one_that_hpc_train_cancelled(run: Run) -> None:
    run.submitted("12").event("cancel", 0, job_id="12")
    assert state(run).state == "CANCELLED"
    run.attempt(0, "12", {"exit_code": 75, "then": "cancel", "why": "stopped by hpc-train cancel"})
    assert state(run).state == "CANCELLED"


def test_an_old_submission_does_not_speak_for_a_new_one(run: Run) -> None:
    run.submitted("12").attempt(0, "12", FAILED).event("submit", -1, 30.0, job_id="13")
    status = state(run, "13|13|PENDING||Resources")
    assert (status.job_id, status.state, status.attempt) == ("13", "PENDING", None)


def test_a_clock_that_is_set_back_an_hour_does_not_bring_an_old_submission_back(run: Run) -> None:
    run.event("submit", -1, 4000.0, job_id="12").event("start", 0, 4010.0, step=0, steps=9)
    run.attempt(0, "12", FAILED, time=4005.0).event("submit", -1, 500.0, job_id="13")
    status = state(run, "12|12|FAILED|node1|None", "13|13|PENDING||Resources")
    assert (status.job_id, status.state, status.attempt) == ("13", "PENDING", None)


def test_a_node_whose_clock_is_an_hour_ahead_does_not_hide_a_new_submission(run: Run) -> None:
    run.event("submit", -1, 400.0, job_id="12").event("start", 0, 4010.0, step=0, steps=9)
    run.attempt(0, "12", FAILED, time=4005.0).event("submit", -1, 500.0, job_id="13")
    status = state(run, "12|12|FAILED|node1|None", "13|13|PENDING||Resources")
    assert (status.job_id, status.state, status.attempt) == ("13", "PENDING", None)


@pytest.mark.parametrize(
    ("lines", "job", "word"),
    [
        (["12|12|RUNNING|node1|None", "13|13|PENDING||Dependency"], "12", "RUNNING"),
        (["12|12|FAILED|node1|None", "13|13|PENDING||Dependency"], "13", "REQUEUED"),
        (["12|12|FAILED|node1|None", "13|13|RUNNING|node1|None"], "13", "RUNNING"),
        (["12|12|FAILED|node1|None", "13|13|CANCELLED||None"], "12", "FAILED"),
    ],
)
def test_of_a_chain_the_job_that_matters_counts(run: Run, lines: list[str], job: str, word: str) -> None:
    run.submitted("12", "13").attempt(0, "12", {**REQUEUE, "then": "chain"})
    status = state(run, *lines)
    assert (status.job_id, status.state) == (job, word)


@pytest.mark.parametrize("torn", ["", "{", '{"exit_code": ', "[1]", "null", '"x"'])
def test_a_marker_that_cannot_be_read_is_none(run: Run, torn: str) -> None:
    run.submitted("12").attempt(0, "12")
    (run.path / "logs/0/result.json").write_text(torn)
    (run.path / "logs/0/attempt.json").write_text(torn)
    (run.path / "events.jsonl").open("a").write(torn)
    assert state(run, "12|12|RUNNING|node1|None").state == "RUNNING"


def test_events_of_another_form_are_passed_over(tmp_path: Path) -> None:
    whole = [
        {"event": "start", "time": 1.0, "attempt": 0, "step": 0},
        {"event": "slow_node", "time": 2.0, "attempt": 0, "hosts": ["node1"], "why": "twice as slow"},
        {"event": "restart", "time": 3, "attempt": 0},
        {"event": "disagree", "time": 4, "attempt": 1, "hosts": [], "why": "of two copies nobody knows which is wrong"},
    ]
    odd: list[dict[str, Any]] = [{**whole[0], "step": step} for step in (None, "3", [3], 1e400, True)]
    odd += [{**whole[1], "hosts": hosts} for hosts in (None, "node1")]
    odd += [{**whole[2], "attempt": attempt} for attempt in (None, "0", [0])]
    odd += [{**whole[2], "event": ["restart"]}, {**whole[2], "time": "3"}, {"event": "resume", "time": 1, "attempt": 1}]
    (tmp_path / "events.jsonl").write_text("".join(json.dumps(event) + "\n" for event in [*odd, *whole, *odd]))
    assert read_events(tmp_path) == whole


def test_a_sweep_is_a_list_of_runs_and_one_poll(tmp_path: Path) -> None:
    for index in range(3):
        Run(tmp_path / "points" / f"p{index}").submitted(f"12_{index}")
    slurm = Slurm(*(f"12_{index}|{20 + index}|RUNNING|node1|None" for index in range(3)))
    rows = [decide_state(facts) for facts in gather_facts(find_points(str(tmp_path), slurm), slurm)]
    assert [(row.point, row.job_id, row.state) for row in rows] == [
        ("p0", "12_0", "RUNNING"),
        ("p1", "12_1", "RUNNING"),
        ("p2", "12_2", "RUNNING"),
    ]
    assert slurm.asked == 1


def test_what_is_no_run_is_one_line(tmp_path: Path) -> None:
    for name, words in (
        (str(tmp_path), "neither a run directory"),
        ("12", "Slurm does not know"),
        ("x", "no such run"),
    ):
        with pytest.raises(UserError, match=words):
            find_points(name, Slurm())
    for index in range(2):
        Run(tmp_path / "points" / f"p{index}")
    with pytest.raises(UserError, match=r"is a sweep, not a run; give one of them: .*/points/"):
        require_single(find_points(str(tmp_path), Slurm()), str(tmp_path))
