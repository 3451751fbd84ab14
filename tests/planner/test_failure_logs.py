"""Histories of failures, as Slurm's accounting and events of our runs tell them."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hpc_train.config.run import PlanConfig
from hpc_train.errors import UserError
from hpc_train.planner.reliability.failure_log import FailureLog, read_events, read_log, read_logs, read_sacct
from hpc_train.planner.reliability.projection import choose_failure_rate
from hpc_train.resilience.ledger import LedgerLine
from hpc_train.training.records.run_records import append_event

SACCT = """\
JobID|State|NNodes|ElapsedRaw
101|COMPLETED|4|86400
101.batch|COMPLETED|1|86400
101.0|COMPLETED|4|86400
102|NODE_FAIL|64|43200
102|COMPLETED|64|86400
103_7|FAILED|2|3600
104|CANCELLED by 1000|8|0
105|PREEMPTED|1|7200
106+0|BOOT_FAIL|16|60
"""


def test_accounting_becomes_failures_and_node_days() -> None:
    log = read_sacct(SACCT, "history.txt")
    days = 4 + 64 * 0.5 + 64 + 2 * 3600 / 86400 + 7200 / 86400 + 16 * 60 / 86400
    assert log.node_days == pytest.approx(days)
    assert (log.by_node, log.unexplained, log.preempted, log.runs) == (2, 1, 1, 7)
    assert log.history.failures == 2
    assert log.most.failures == 3


def test_other_columns_their_order_and_a_bar_at_the_end_do_not_matter() -> None:
    text = "User|Elapsed|AllocNodes|State|\nann|1-12:00:00|10|NODE_FAIL|\nbob|30:00|2|COMPLETED|\n"
    log = read_sacct(text, "x")
    assert log.node_days == pytest.approx(10 * 1.5 + 2 / 48)
    assert (log.by_node, log.runs) == (1, 2)


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        ("", "h.txt: empty; give the output of `sacct"),
        ("JobID|State\n1|FAILED\n", "h.txt:1: no column NNodes, ElapsedRaw; give the output of `sacct"),
        ("1|FAILED|4|60\n", "h.txt:1: no column State, NNodes, ElapsedRaw; give"),
        (SACCT + "107|COMPLETED|4\n", "h.txt:11: 3 columns where the header has 4; is the file cut off?"),
        (SACCT + "107|COMPLETED|four|60\n", "h.txt:11: 'four' nodes; expected a whole number"),
        (SACCT + "107|COMPLETED|4|1:00\n", "h.txt:11: elapsed '1:00'; expected seconds"),
        (SACCT + "107|BROKEN|4|60\n", "h.txt:11: unknown job state 'BROKEN'; expected COMPLETED, NODE_FAIL, ..."),
        ("State|NNodes|Elapsed\nFAILED|1|soon\n", "h.txt:2: elapsed 'soon'; expected [days-]hours:minutes:seconds"),
    ],
)
def test_what_is_no_accounting_is_one_line(text: str, answer: str) -> None:
    with pytest.raises(UserError) as caught:
        read_sacct(text, "h.txt")
    assert str(caught.value).startswith(answer)
    assert "\n" not in str(caught.value)


def answer_of(text: str) -> FailureLog | str:
    try:
        return read_sacct(text, "x")
    except UserError as error:
        return str(error)


@given(st.text(max_size=200), st.integers(0, len(SACCT)))
def test_any_text_and_any_truncation_is_read_or_refused_in_one_line(text: str, cut: int) -> None:
    for given_text in (text, SACCT[:cut] + text):
        answer = answer_of(given_text)
        assert isinstance(answer, FailureLog) or len(answer.splitlines()) == 1


def event(kind: str, time: float, attempt: int, **more: object) -> str:
    return json.dumps({"event": kind, "time": time, "attempt": attempt, **more})


DAY = 86400.0
EVENTS = "\n".join(
    [
        event("submit", -10, -1, nodes=4, ranks=32),
        event("start", 0, 0, world=32),
        event("checkpoint", DAY / 2, 0, step=10),
        event("requeue", DAY, 0, why="a node of the job does not answer"),
        event("resume", DAY + 60, 1, world=32),
        event("note", 2 * DAY + 60, 1),
        event("resume", 3 * DAY, 2, world=16),
        event("failure", 4 * DAY, 2, why="task 3 on n1 failed first:"),
        event("resume", 5 * DAY, 3, world=16),
        event("signal", 5.5 * DAY, 3),
    ]
)


def test_attempts_of_a_run_become_failures_and_node_days() -> None:
    """Lost a node; ended without a word before another attempt; failed by itself; stopped on purpose."""
    log = read_events(EVENTS, "events.jsonl", ranks_per_node=8)
    assert log == FailureLog(node_days=4 + 4 + 2 + 1, by_node=1, unexplained=2, preempted=0, runs=4)


def test_the_last_attempt_is_no_failure_before_it_says_so() -> None:
    running = event("start", 0, 0, world=8) + "\n" + event("checkpoint", DAY, 0) + "\n"
    assert read_events(running, "x", 8) == FailureLog(1.0, 0, 0, 0, 1)


def test_restarts_of_a_run_tell_how_long_one_takes(tmp_path: Path) -> None:
    """Those in the same job: how long a requeue waits is for the queue to say."""
    lines = [
        event("start", 0, 0, world=8),
        event("restart", 100, 0, action="restarted"),
        event("resume", 107, 1, world=8),
        event("restart", 200, 1, action="requeued"),
        event("resume", 900, 2, world=8),
        event("restart", 1000, 2, action="restarted"),
        event("resume", 1009, 3, world=8),
        event("end", 2000, 3),
    ]
    (tmp_path / "events.jsonl").write_text("\n".join(lines) + "\n")
    assert read_log(tmp_path, 8).restarts == (7.0, 9.0)
    rate = choose_failure_rate(PlanConfig(failure_logs=[str(tmp_path), str(tmp_path / "events.jsonl")]), 8)
    assert rate.restart_seconds == 8.0
    assert rate.source.endswith("4 restarts took 8 s (median)")
    assert choose_failure_rate(PlanConfig(), 8).restart_seconds is None


def test_a_run_directory_tells_how_long_faults_were_not_noticed(tmp_path: Path) -> None:
    """From the last line of the ledger to the first event about the fault; one without a ledger tells nothing."""
    lines = [
        event("start", 0, 0, world=8),
        event("hang", 112, 0),
        event("restart", 115, 0, action="restarted"),
        event("resume", 122, 1, world=8),
        event("restart", 202, 1, action="requeued"),
        event("resume", 900, 2, world=8),
        event("failure", 950, 2),
        event("restart", 951, 2, action="left alone: resilience.act=false"),
        event("end", 2000, 2),
    ]
    (tmp_path / "events.jsonl").write_text("\n".join(lines) + "\n")
    assert read_log(tmp_path, 8).detections == ()
    ledger = [LedgerLine(0, 90.0, 7, {}), LedgerLine(0, 100.0, 9, {}), LedgerLine(1, 200.0, 20, {})]
    rows = [json.dumps(asdict(line)) for line in (*ledger, LedgerLine(2, 940.0, 30, {}))]
    (tmp_path / "goodput.jsonl").write_text("\n".join(rows) + '\n{"att')
    assert read_log(tmp_path, 8).detections == (12.0, 2.0)
    rate = choose_failure_rate(PlanConfig(failure_logs=[str(tmp_path)]), 8)
    assert rate.detection_seconds == 7.0
    assert rate.source.endswith("; faults were noticed after 7 s (median)")
    assert read_log(tmp_path / "events.jsonl", 8).detections == ()


def test_a_torn_last_line_is_left_out_and_another_one_is_refused() -> None:
    assert read_events(EVENTS + '\n{"event": "sig', "x", 8) == read_events(EVENTS, "x", 8)
    with pytest.raises(UserError, match=r"x:2: not an event; expected events.jsonl"):
        read_events(event("start", 0, 0, world=8) + "\n[1]\n" + event("end", 5, 0), "x")
    with pytest.raises(UserError, match=r"x:1: start without its world size"):
        read_events(event("start", 0, 0), "x")


def test_events_as_our_runs_write_them_are_read(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    append_event(path, "start", 0, step=0, steps=10, world=4)
    append_event(path, "requeue", 0, exit_code=1, why="a node of the job does not answer")
    log = read_log(path, ranks_per_node=4)
    assert (log.by_node, log.runs) == (1, 1)
    assert 0 <= log.node_days < 1e-3


def test_files_add_up_and_those_that_tell_nothing_are_refused(tmp_path: Path) -> None:
    accounting, events, empty = tmp_path / "a.txt", tmp_path / "e.jsonl", tmp_path / "n.txt"
    accounting.write_text(SACCT)
    events.write_text(EVENTS)
    empty.write_text("JobID|State|NNodes|ElapsedRaw\n")
    both = read_logs([str(accounting), str(events)], ranks_per_node=8)
    assert both == read_log(accounting) + read_log(events, 8)
    with pytest.raises(UserError, match="no job in these logs ran for any time; give a longer history"):
        read_logs([str(empty)])
    with pytest.raises(UserError, match=r"none\.txt: No such file"):
        read_logs([str(tmp_path / "none.txt")])
    (tmp_path / "b.bin").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(UserError, match="not a text file; give the output of"):
        read_log(tmp_path / "b.bin")
