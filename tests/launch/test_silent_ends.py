"""Tasks of a Slurm job that ended without an error of their own: which of them is named, by srun's messages."""

from __future__ import annotations

from pathlib import Path

import pytest

from hpc_train.launch.failures import find_first_error
from hpc_train.launch.restarting import find_fault
from hpc_train.resilience.restart import Cause, Fault
from hpc_train.training.records.run_records import record_failure

ENDED = "srun: error: node2: tasks 1,3: {}\nsrun: launch/slurm: _step_signal: Terminating StepId=1.0\n"
PEER = RuntimeError("[1] Connection closed by peer [10.0.0.2]:15596. Check the logs of the remote worker")


@pytest.fixture
def logs(tmp_path: Path) -> Path:
    for task in range(4):
        (tmp_path / f"task-{task}.log").touch()
    return tmp_path


def fail(logs: Path, task: int, error: Exception) -> None:
    try:
        raise error
    except Exception as raised:
        record_failure(logs, task, "node1", raised)


@pytest.mark.parametrize("how", ["Killed", "Segmentation fault", "Aborted (core dumped)", "Floating point exception"])
def test_a_signal_is_named_with_its_node_and_not_the_rank_that_lost_its_peer(logs: Path, how: str) -> None:
    (logs / "srun.err").write_text(ENDED.format(how) + "srun: error: node1: task 0: Exited with exit code 1\n")
    fail(logs, 0, PEER)
    fault = find_fault(logs, 1)
    assert (fault.cause, fault.host) == (Cause.KILLED, "node2")
    assert fault.text == f"task 1,3 on node2 was ended from outside: {how}"


def test_an_exit_code_is_named_and_would_come_again(logs: Path) -> None:
    (logs / "srun.err").write_text(ENDED.format("Exited with exit code 3"))
    fail(logs, 0, PEER)
    fail(logs, 1, PEER)
    fault = find_fault(logs, 3)
    assert (fault.cause, fault.host) == (Cause.EXCEPTION, "node2")
    assert fault.text == "task 3 on node2 exited with code 3 without a word"


@pytest.mark.parametrize("how", ["Exited with exit code 75", "Terminated"])
def test_a_task_that_was_asked_to_stop_is_not_why(logs: Path, how: str) -> None:
    (logs / "srun.err").write_text(ENDED.format(how))
    assert find_first_error(logs) is None


def test_a_watchdog_that_aborts_a_rank_names_the_rank_that_it_waited_for(logs: Path) -> None:
    (logs / "srun.err").write_text(
        "srun: error: node1: task 0: Aborted\nsrun: launch/slurm: _step_signal: Terminating StepId=1.0\n"
        "srun: error: node2: task 1: Killed\n"
    )
    watchdog = "[Rank 0] Watchdog caught collective operation timeout: WorkNCCL(SeqNum=5) ran for 600 milliseconds"
    (logs / "task-0.log").write_text(watchdog + "\nterminate called after throwing an instance of 'c10::Error'\n")
    error = find_first_error(logs)
    assert error is not None
    assert (error.task, error.host) == (1, "node2")
    (logs / "srun.err").write_text("srun: error: node1: task 0: Aborted\n")
    alone = find_first_error(logs)
    assert alone is not None
    assert alone.task == 0


def test_an_srun_that_was_killed_is_nobodys_fault(logs: Path) -> None:
    (logs / "srun.err").touch()
    assert find_fault(logs, 137) == Fault(Cause.KILLED, "", "srun was killed")
    assert find_fault(logs, 1).cause is Cause.UNKNOWN
