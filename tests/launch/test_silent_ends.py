"""Why a job's ranks ended: which task is named that left no error of its own, and what a last exit code means."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from hpc_train.checkpoint.errors import CheckpointError
from hpc_train.config.compose import compose
from hpc_train.errors import EXIT_FAILED, EXIT_NO_REQUEUE, EXIT_USER_ERROR, IncompleteRun, MissingRanksError, UserError
from hpc_train.launch.recovery.failures import LOST_NODES, find_first_error, main
from hpc_train.launch.recovery.restarting import Allocation, decide_after_failure, find_fault
from hpc_train.launch.submit import default_to_slurm
from hpc_train.resilience.exclusion import read_strikes
from hpc_train.resilience.restart import Action, Cause, Fault
from hpc_train.training.numerics.number_checks import LostNumbers
from hpc_train.training.records.run_records import append_event, record_failure
from hpc_train.training.run_directory import RunDirectory

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


def test_a_node_that_refuses_the_ranks_is_named_and_not_those_that_srun_has_killed_for_that(tmp_path: Path) -> None:
    """As Slurm 22.05 says it after the restart of a slurmd. The node gets a strike, and the ranks start again."""
    folder = RunDirectory(tmp_path, tmp_path / "checkpoints")
    folder.logs(0).mkdir(parents=True)
    (folder.logs(0) / "srun.err").write_text(
        "srun: error: Task launch for StepId=15.2 failed on node node2: Job credential expired\n"
        "srun: error: Application launch failed: Job credential expired\n"
        "srun: Job step aborted: Waiting up to 32 seconds for job step to finish.\n"
        "srun: error: node1: task 0: Killed\n"
    )
    config = compose(default_to_slurm(["checkpoint.every=10"]))
    decision = decide_after_failure(config, folder, 0, 167, 0, Allocation(("node1", "node2"), (), 2))
    assert decision.action is Action.RESTART
    fault = find_fault(folder.logs(0), 167)
    assert (fault.cause, fault.host) == (Cause.LAUNCH, "node2")
    assert fault.text == "srun could not start the ranks on node2: Job credential expired"
    assert [(strike.host, strike.weight) for strike in read_strikes(tmp_path)] == [("node2", 1)]


def test_an_exit_code_is_named_and_would_come_again(logs: Path) -> None:
    (logs / "srun.err").write_text(ENDED.format("Exited with exit code 3"))
    fail(logs, 0, PEER)
    fail(logs, 1, PEER)
    fault = find_fault(logs, 3)
    assert (fault.cause, fault.host) == (Cause.EXCEPTION, "node2")
    assert fault.text == "task 3 on node2 exited with code 3 without a word"


def test_a_node_that_is_lost_is_named_and_not_the_ranks_that_were_ended_for_it(logs: Path) -> None:
    (logs / "srun.err").write_text("srun: error: node1: task 0: Killed\n")
    (logs / LOST_NODES).write_text("node2\nnode3\n")
    for error in (None, PEER, ValueError("a mistake of its own")):
        if error is not None:
            fail(logs, 0, error)
        first = find_first_error(logs)
        assert first is not None
        if isinstance(error, ValueError):
            assert first.line.endswith("ValueError: a mistake of its own")
        else:
            assert (first.line, first.host) == ("node2, node3: do not answer any more", "node2")


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


def test_a_rank_that_did_not_come_to_the_others_is_named_and_not_the_one_that_waited(logs: Path) -> None:
    fail(logs, 0, MissingRanksError("1 of 2 processes came within 300 s; missing: task 1 on node2", (1,), ("node2",)))
    fault = find_fault(logs, EXIT_USER_ERROR)
    assert (fault.cause, fault.host) == (Cause.HANG, "node2")
    assert "missing: task 1 on node2" in fault.text


@pytest.mark.parametrize(
    ("code", "end", "named"),
    [
        (139, "Segmentation fault", "was ended from outside: Segmentation fault"),
        (75, "Exited with exit code 3", "exited with code 3 without a word"),  # srun returns the highest code
        (75, "Exited with exit code 75", ""),
        (140, "User defined signal 2", ""),
    ],
)
def test_a_rank_that_dies_while_all_stop_on_purpose_is_named(tmp_path: Path, code: int, end: str, named: str) -> None:
    logs = tmp_path / "logs" / "0"
    logs.mkdir(parents=True)
    (logs / "requeue").touch()
    (logs / "srun.err").write_text(f"srun: error: node2: task 1: {end}\n")
    main(str(tmp_path), "0", str(code), "the ranks stopped on purpose")
    (event,) = (json.loads(line) for line in (tmp_path / "events.jsonl").read_text().splitlines())
    died = f"; meanwhile task 1 on node2 {named}" if named else ""
    assert event["why"] == f"the ranks stopped on purpose{died}"


def test_an_srun_that_was_killed_is_nobodys_fault(logs: Path) -> None:
    (logs / "srun.err").touch()
    assert find_fault(logs, 137) == Fault(Cause.KILLED, "", "srun was killed")
    assert find_fault(logs, 1).cause is Cause.UNKNOWN


@pytest.mark.parametrize(
    ("code", "error", "event", "said"),
    [
        (EXIT_USER_ERROR, UserError("optim.lr=-1: must be above 0"), None, "a mistake in the input"),
        (EXIT_FAILED, IncompleteRun("step 4, the last, was not saved"), None, "its result is bad or not saved"),
        (EXIT_FAILED, LostNumbers("gave up at step 7"), None, "its result is bad or not saved"),
        (EXIT_NO_REQUEUE, CheckpointError("step-4: no manifest"), None, "a checkpoint cannot be read or written"),
        (EXIT_NO_REQUEUE, None, "signal", "it stopped without a save"),
        (EXIT_NO_REQUEUE, None, None, "its ranks cannot run here"),
    ],
)
def test_only_a_mistake_in_the_input_is_called_one(
    tmp_path: Path, code: int, error: Exception | None, event: str | None, said: str
) -> None:
    folder = RunDirectory(tmp_path, tmp_path / "checkpoints")
    folder.logs(0).mkdir(parents=True)
    append_event(folder.events, "start", 0, step=0)
    append_event(folder.events, "checkpoint", 0, step=4)
    if event is not None:
        append_event(folder.events, event, 0, step=7)
    if error is not None:
        fail(folder.logs(0), 0, error)
    (folder.checkpoints / "step-4").mkdir(parents=True)
    decision = decide_after_failure(compose(["checkpoint.every=4"]), folder, 0, code)
    assert (decision.action, decision.why) == (Action.END, f"not started again: {said}")
