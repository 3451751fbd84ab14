"""Which task is named when the kernel ended one for lack of memory: srun reports that for its peers, too."""

from __future__ import annotations

from pathlib import Path

import pytest

from hpc_train.launch.recovery.failures import find_first_error
from hpc_train.training.records.run_records import record_failure

SRUN = "srun: error: node1: task 0: Out Of Memory\nsrun: launch/slurm: _step_signal: Terminating StepId=1.0\n"
PEER = RuntimeError("Connection closed by peer [127.0.0.1]:15596\n\nAt:\n  /somewhere/replicate.py(111): done\n")


@pytest.fixture
def logs(tmp_path: Path) -> Path:
    for task in range(3):
        (tmp_path / f"task-{task}.log").touch()
    (tmp_path / "srun.err").write_text(SRUN)
    return tmp_path


def fail(logs: Path, task: int, error: Exception) -> None:
    try:
        raise error
    except Exception as raised:
        record_failure(logs, task, "node1", raised)


def explain(logs: Path) -> str:
    error = find_first_error(logs)
    assert error is not None
    return error.line


def test_the_task_that_recorded_no_failure_is_named(logs: Path) -> None:
    fail(logs, 0, PEER)
    fail(logs, 2, PEER)
    assert explain(logs) == "task 1 on node1 was ended from outside: Out Of Memory"


def test_only_tasks_of_the_node_that_srun_names_are_blamed(logs: Path) -> None:
    fail(logs, 0, PEER)
    hosts = ("node1.cluster", "node2.cluster", "node1.cluster")
    ranks = ", ".join(f'{{"rank": {2 - task}, "process": {task}, "host": "{host}"}}' for task, host in enumerate(hosts))
    (logs / "rankmap.json").write_text(f'{{"ranks": [{ranks}]}}')
    assert explain(logs) == "task 2 on node1 was ended from outside: Out Of Memory"


def test_a_killed_child_process_is_told_by_its_task_with_the_memory(logs: Path) -> None:
    for task in range(3):
        fail(logs, task, RuntimeError("DataLoader worker (pid 7) is killed by signal: Killed."))
    assert explain(logs) == (
        "task 0 on node1 failed first: RuntimeError: DataLoader worker (pid 7) is killed by signal: Killed. "
        "(Out Of Memory)"
    )


def test_only_the_first_line_of_an_exception_is_shown(logs: Path) -> None:
    (logs / "srun.err").unlink()
    fail(logs, 0, PEER)
    assert explain(logs) == "task 0 on node1 failed first: RuntimeError: Connection closed by peer [127.0.0.1]:15596"
