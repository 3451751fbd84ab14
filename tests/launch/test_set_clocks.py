"""A clock that is wrong, or is set while a run goes on, changes neither who is named nor what is saved."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import pytest

from hpc_train.config.compose import compose
from hpc_train.launch.state.attempts import ATTEMPT_MARKER
from hpc_train.launch.state.job_state import decide_state
from hpc_train.launch.state.progress import add_progress
from hpc_train.launch.state.run_facts import read_files
from hpc_train.launch.state.run_lookup import RunPoint
from hpc_train.launch.state.state_names import RunStatus, State
from hpc_train.processes import read_process_age
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


def make_run(run: Path, seconds_since_step: float) -> Path:
    """Write what a run on another machine leaves whose last step was made so long ago; returns its log directory."""
    logs = run / "logs/0"
    logs.mkdir(parents=True)
    begun = {"host": "elsewhere", "time": now() - 600, "launcher": "local", "process": 7}
    (logs / ATTEMPT_MARKER).write_text(json.dumps(begun))
    metrics = run / "metrics.jsonl"
    metrics.write_text(json.dumps({"step": 3, "loss": 1.5, "step_seconds": 1.0}) + "\n")
    os.utime(metrics, (now() - seconds_since_step,) * 2)
    return logs


def read_running(run: Path) -> RunStatus:
    """Return the status of a run of which Slurm says that it runs."""
    return add_progress(RunStatus("run", "7", 0, State.RUNNING), read_files(RunPoint("run", run)))


@pytest.mark.parametrize("seconds", [86400, -86400])
def test_status_knows_the_age_of_a_step_by_the_heartbeats_of_its_machine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, seconds: float
) -> None:
    logs = make_run(tmp_path, 5)
    heartbeat, longest = Heartbeat(logs, 0), read_process_age(os.getpid())
    assert longest is not None
    try:
        set_clock(monkeypatch, seconds)
        for phase in (Phase.STEP, Phase.EVALUATE):
            heartbeat.enter(phase, 3)
            status = read_running(tmp_path)
            assert status.reason == "" or phase is Phase.EVALUATE
            assert status.seconds_since_step is not None
            # How long an evaluation lasts is not in a heartbeat, but no longer than the process has been there.
            assert status.seconds_since_step < (5 if phase is Phase.STEP else longest + 5)
        heartbeat.enter(Phase.STEP, 4)
        later = time.monotonic() + 300
        monkeypatch.setattr("time.monotonic", lambda: later)
        assert read_running(tmp_path).reason == "no step for 5 min"
    finally:
        remove_entries(logs)


def test_status_says_where_the_age_of_a_step_is_not_known(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make_run(tmp_path, 5)
    set_clock(monkeypatch, -86400)
    status = read_running(tmp_path)
    assert status.seconds_since_step is None
    assert status.reason == "the age of its last step is not known: the clock here is 24.0 h behind that of its files"
    set_clock(monkeypatch, -30)
    assert read_running(tmp_path).seconds_since_step == 0


def test_a_file_of_tomorrow_is_no_sign_of_life(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A file shows whether a run that another machine has started is alive."""
    make_run(tmp_path, 5)
    facts = read_files(RunPoint("run", tmp_path))
    assert decide_state(facts).state is State.RUNNING
    set_clock(monkeypatch, -86400)
    late = decide_state(read_files(RunPoint("run", tmp_path)))
    assert (late.state, late.reason) == (State.UNKNOWN, "runs or ran on elsewhere; ask there")
