"""A journal of which a crash has left half a line, at any byte, loses that line and nothing after it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from hpc_train.config.compose import compose
from hpc_train.launch.recovery.failures import SRUN_ERRORS
from hpc_train.launch.recovery.restarting import Allocation, decide_after_failure
from hpc_train.launch.state.run_facts import read_events
from hpc_train.launch.submit import default_to_slurm
from hpc_train.regular_files import append_line
from hpc_train.resilience.exclusion import NODES, SOFTWARE, Strike, append_strike, read_strikes
from hpc_train.resilience.heartbeat import Heartbeat
from hpc_train.resilience.incident import HANG, Incident, mark_hang, read_hang
from hpc_train.resilience.ledger import GOODPUT, LedgerFile, parse_ledger
from hpc_train.training.records.run_records import LineFile, append_event, format_event
from hpc_train.training.run_directory import RunDirectory


def test_an_event_after_a_torn_one_is_read(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    append_event(path, "start", 0, step=0)
    whole, torn = path.read_bytes(), format_event("checkpoint", 0, step=5).encode()
    for length in range(len(torn) + 1):
        path.write_bytes(whole + torn[:length])
        append_event(path, "restart", 0)
        events = [event["event"] for event in read_events(tmp_path)]
        # A line that lacks only its line feed is whole.
        assert events == (["start", "restart"] if length < len(torn) - 1 else ["start", "checkpoint", "restart"])
        assert b"\n\n" not in path.read_bytes()


def test_a_rank_writes_its_first_event_on_a_line_of_its_own(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    path.write_text('{"event": "restart", "ti')
    file = LineFile(path)
    file.append(format_event("resume", 1, step=5))
    file.append(format_event("checkpoint", 1, step=10))
    file.close()
    assert [event["event"] for event in read_events(tmp_path)] == ["resume", "checkpoint"]


def test_a_line_that_another_process_is_just_writing_is_not_torn(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "events.jsonl"
    path.write_text('{"a": ')
    monkeypatch.setattr("time.sleep", lambda seconds: path.write_text('{"a": 1}\n'))
    append_line(path, '{"b": 2}')
    assert path.read_text() == '{"a": 1}\n{"b": 2}\n'


def test_strikes_and_the_ledger_go_on_after_a_torn_line(tmp_path: Path) -> None:
    strike = Strike("n1", SOFTWARE, "a hang", 1, 2.5)
    for length in range(1, 40, 13):
        (tmp_path / NODES).write_text('{"host": "n9", "weight": 2, "evidence": "", "attempt": 0'[:length])
        append_strike(tmp_path, strike)
        assert read_strikes(tmp_path) == [strike]
        (tmp_path / GOODPUT).write_text('{"attempt": 0, "time": 1.0, "step": 3, "seconds": {}}'[:length])
        LedgerFile(tmp_path / GOODPUT, 7, 1).write(Heartbeat(), 5)
        assert [line.attempt for line in parse_ledger((tmp_path / GOODPUT).read_text())] == [7]


def test_a_budget_is_kept_and_a_decision_made_wherever_the_journals_are_torn(tmp_path: Path) -> None:
    """The third attempt fails. What is left of the journals is cut at every ninth byte from the end of the first."""
    config = compose(default_to_slurm(["checkpoint.every=10", "resilience.restarts=2"]))
    folder = RunDirectory(tmp_path, tmp_path / "checkpoints")
    allocation = Allocation(("node1", "node2", "node3"), (), 2)
    for attempt in range(3):
        folder.logs(attempt).mkdir(parents=True)
        (folder.logs(attempt) / SRUN_ERRORS).write_text(f"srun: error: node{attempt + 1}: task 1: Killed\n")
        append_event(folder.events, "resume", attempt, step=0)
        if attempt < 2:
            decide_after_failure(config, folder, attempt, 137, 0, allocation)
    events = folder.events.read_bytes()
    begin = events.index(b"\n", events.index(b'"restart"'))
    for length in range(begin, len(events), 9):
        folder.events.write_bytes(events[:length])
        restarts = sum(event["event"] == "restart" for event in read_events(tmp_path))
        decision = decide_after_failure(config, folder, 2, 137, 0, allocation)
        assert decision.goes_on == (restarts < 2)
        last = json.loads(folder.events.read_text().splitlines()[-1])
        assert (last["event"], last["attempt"]) == ("restart" if decision.goes_on else "gave_up", 2)


def test_a_hang_of_which_half_was_written_is_written_again_and_the_first_one_counts(tmp_path: Path) -> None:
    first, second = Incident("hang", "task 1 hangs", 1, "node2"), Incident("hang", "task 0 hangs", 0, "node1")
    (tmp_path / HANG).write_text('{"text": "ta')
    mark_hang(tmp_path, first)
    mark_hang(tmp_path, second)
    found = read_hang(tmp_path)
    assert found is not None
    assert (found.task, found.host) == (1, "node2")
