"""A clock that is wrong, or is set while a run goes on, changes neither who is named nor what is saved."""

from __future__ import annotations

import time
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import pytest

from hpc_train.config.compose import compose
from hpc_train.resilience.deadlines import HangLimits
from hpc_train.resilience.heartbeat import Heartbeat, Phase, remove_entries
from hpc_train.resilience.watch import NodeWatch, find_hang
from hpc_train.runtime.preemption import Preemption
from hpc_train.training.records.rank_log import RankLog
from hpc_train.training.records.run_records import append_event, read_first_failure, record_failure
from hpc_train.training.saving import explain_missed_grace
from hpc_train.training.training_run import TrainingRun

now = time.time


def set_clock(monkeypatch: pytest.MonkeyPatch, seconds: float) -> None:
    """Set the clock of this process, forward or back."""
    monkeypatch.setattr("time.time", lambda: now() + seconds)


@pytest.mark.parametrize("seconds", [3600, -3600])
def test_the_rank_that_failed_first_is_found_whatever_the_clock_of_its_node_says(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, seconds: float
) -> None:
    """Two ranks, the first of which fails as the second is gone; the clock of one is wrong by an hour."""
    logs = [RankLog(tmp_path / "task-0.jsonl")]
    set_clock(monkeypatch, seconds)
    logs.append(RankLog(tmp_path / "task-1.jsonl"))
    for log in logs:
        log.record_clock(now)
    messages = {1: "a fault of the user's model", 0: "Connection closed by peer [10.0.0.2]:29501"}
    for task, message in messages.items():
        record_failure(tmp_path, task, f"node{task}", RuntimeError(message), logs[task].read_job_clock())
        time.sleep(0.01)
    first = read_first_failure(tmp_path)
    assert first is not None
    assert first.task == 1
    assert abs(first.at - now()) < 10


@pytest.mark.parametrize("seconds", [3600, -3600])
def test_a_save_after_a_notice_is_begun_whatever_the_clocks_say(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, seconds: float
) -> None:
    """The supervisor has written the time of the notice, on another node or before the clock was set."""
    config = compose(["resilience.grace_seconds=60"])
    reporter, directory = SimpleNamespace(attempt=0), SimpleNamespace(events=tmp_path / "events.jsonl")
    saves = SimpleNamespace(seconds=20.0)
    run = SimpleNamespace(config=config, saves=saves, directory=directory, reporter=reporter)
    set_clock(monkeypatch, seconds)
    append_event(directory.events, "notice", 0, why="")
    monkeypatch.undo()
    assert explain_missed_grace(cast(TrainingRun, run), 30.0) == ""
    late = explain_missed_grace(cast(TrainingRun, run), 50.0)
    assert late == ("the last save took 20 s, and 10 s are left of resilience.grace_seconds=60" if seconds < 0 else "")


def test_a_loop_of_ones_own_stops_before_the_limit_whatever_the_clock_says(monkeypatch: pytest.MonkeyPatch) -> None:
    preemption = Preemption(env={"SLURM_JOB_END_TIME": str(int(now()) + 130)})
    set_clock(monkeypatch, 86400)
    assert not preemption.should_stop()
    set_clock(monkeypatch, -86400)
    later = time.monotonic() + 20
    monkeypatch.setattr("time.monotonic", lambda: later)
    assert preemption.should_stop()
    assert preemption.reason == "time limit"


@pytest.mark.parametrize("seconds", [3600, -3600])
def test_ranks_do_not_hang_because_a_clock_is_set(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, seconds: float
) -> None:
    heartbeat = Heartbeat(tmp_path, 0)
    try:
        heartbeat.enter(Phase.STEP, 3)
        watch = NodeWatch(tmp_path, HangLimits(step=1.0, first_step=1.0))
        watch.look()
        set_clock(monkeypatch, seconds)
        (view,) = watch.look()
        assert view.silent < 1
        assert find_hang([view]) is None
    finally:
        remove_entries(tmp_path)
