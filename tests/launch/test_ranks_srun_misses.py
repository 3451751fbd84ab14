"""Ranks whose end srun does not notice, because a slurmstepd or srun itself was killed or is stopped."""

from __future__ import annotations

from pathlib import Path

import pytest
from test_batch_functions import run_functions

from hpc_train.launch.recovery.failures import SRUN_ERRORS, find_first_error
from hpc_train.launch.recovery.restarting import find_fault
from hpc_train.launch.slurm.supervisor.silent_srun import EndedRanks, StuckStart, write_ended_tasks
from hpc_train.resilience.heartbeat import Phase
from hpc_train.resilience.restart import Cause
from hpc_train.resilience.watch import GONE, RankView
from hpc_train.training.records.run_records import record_failure


def view(task: int, state: str = GONE, phase: Phase = Phase.STEP) -> RankView:
    return RankView(task, phase, 7, 1.0, 10.0, state, f"node{task + 1}")


def test_the_rank_that_srun_says_nothing_of_is_named_and_not_the_one_that_lost_its_peer(tmp_path: Path) -> None:
    record_failure(tmp_path, 0, "node1", RuntimeError("Connection closed by peer [10.0.0.2]:29501"))
    (tmp_path / SRUN_ERRORS).write_text("srun: error: node1: task 0: Exited with exit code 1\n")
    fault = find_fault(tmp_path, 1)
    assert (fault.cause, fault.host) == (Cause.CONNECTION, ""), "nobody knows better"
    write_ended_tasks(tmp_path, [view(0), view(1), view(2, "R"), view(3, phase=Phase.END)])
    fault = find_fault(tmp_path, 1)
    assert (fault.cause, fault.host) == (Cause.KILLED, "node2")
    (tmp_path / SRUN_ERRORS).write_text("srun: error: node2: task 1: Exited with exit code 3\n")
    error = find_first_error(tmp_path)
    assert error is not None
    assert error.text == "task 1 on node2 exited with code 3 without a word", "srun has told of it after all"


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The clock of the watchers."""
    seconds = [100.0]
    monkeypatch.setattr("time.monotonic", lambda: seconds[0])
    return seconds


def test_srun_has_some_time_to_end_after_the_last_rank(clock: list[float]) -> None:
    ended = EndedRanks(2)

    def is_over(seconds: float, *views: RankView) -> bool:
        for _ in range(int(2 * seconds)):
            clock[0] += 0.5
            over = ended.outlive_srun(views)
        return over

    assert not is_over(60, view(0)), "of the other one nothing is known"
    assert not is_over(60, view(0), view(1, "R"))
    assert not is_over(29, view(0), view(1))
    assert not is_over(1, view(0), view(1, "R")), "another process has its number now"
    assert not is_over(29, view(0), view(1))
    clock[0] += 3600
    assert not ended.outlive_srun([view(0), view(1)]), "the watcher itself was stopped"
    assert is_over(2, view(0), view(1))


def test_an_srun_starts_no_rank_until_one_is_seen_or_has_a_log(tmp_path: Path, clock: list[float]) -> None:
    starts = [StuckStart(tmp_path, 20) for _ in range(3)]
    clock[0] += 3600
    assert not any(start.is_overdue([]) for start in starts), "the watcher itself was stopped"
    assert not starts[0].is_overdue([view(0, "R", Phase.START)])
    for _ in range(19):
        clock[0] += 1
        assert not any(start.is_overdue([]) for start in starts)
    (tmp_path / SRUN_ERRORS).write_text("srun: Job 5 step creation temporarily disabled, retrying\n")
    clock[0] += 1
    assert [start.is_overdue([]) for start in starts[:2]] == [False, True]
    assert starts[1].describe() == (
        "srun has started no rank for 21 s (deadline 20 s); its last words: srun: Job 5 step creation temporarily "
        "disabled, retrying"
    )
    (tmp_path / "task-0.log").touch()
    assert not starts[2].is_overdue([]), "it is in a container, and nobody sees it"


@pytest.mark.parametrize(
    ("marker", "said", "code"),
    [
        ("done", "", 0),
        ("done", "srun: error: node2: task 1: Killed\n", 137),
        ("other", "", 137),
    ],
)
def test_an_srun_that_misses_the_end_of_a_run_that_is_done_does_no_harm(
    tmp_path: Path, marker: str, said: str, code: int
) -> None:
    (tmp_path / "logs").mkdir()
    watch = f"touch $1/left-srun $1/{marker}; printf '%s' '{said.strip()}' >$1/{SRUN_ERRORS}"
    settings = f'run={tmp_path} logs={tmp_path} job=1 step=(); hpc_watch=(bash -c "{watch}" _)'.replace("$1", "\\$1")
    assert run_functions(f"{settings}; run_ranks sleep 30; echo $?; kill $(jobs -p)") == str(code)
