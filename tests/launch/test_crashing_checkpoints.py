"""A checkpoint whose load ends the ranks is tried twice, then passed over, and never removed."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from jobs import LONG, Workshop, assert_same_run

from hpc_train.checkpoint.storage.step_directory import read_bad_mark
from hpc_train.config.compose import compose
from hpc_train.launch.recovery.failures import SRUN_ERRORS
from hpc_train.launch.recovery.restarting import Allocation, decide_after_failure
from hpc_train.launch.slurm.slurm_cli import Answer
from hpc_train.launch.state.progress import add_progress
from hpc_train.launch.state.run_facts import gather_facts
from hpc_train.launch.state.run_lookup import find_points
from hpc_train.launch.state.state_names import RunStatus, State
from hpc_train.launch.submit import default_to_slurm
from hpc_train.resilience.exclusion import read_strikes
from hpc_train.resilience.load_history import end_load, find_passed_over, note_load
from hpc_train.resilience.restart import Action, Decision
from hpc_train.training.records.run_records import append_event, record_failure
from hpc_train.training.run_directory import RunDirectory

How = Callable[[Path], None]


def crash(logs: Path) -> None:
    (logs / SRUN_ERRORS).write_text("srun: error: node2: task 1: Segmentation fault\n")


def fail(logs: Path) -> None:
    record_failure(logs, 1, "node2", ValueError("an object header of 17 bytes"))


def run_out_of_memory(logs: Path) -> None:
    record_failure(logs, 1, "node2", MemoryError("cannot allocate memory"))


def hang(logs: Path) -> None:
    (logs / "hang.json").write_text(json.dumps({"text": "the ranks hang", "task": 1, "host": "node2"}))


@pytest.fixture
def folder(tmp_path: Path) -> RunDirectory:
    """A run with the checkpoints of steps 4 and 8."""
    for step in (4, 8):
        (tmp_path / f"checkpoints/step-{step}").mkdir(parents=True)
    return RunDirectory(tmp_path, tmp_path / "checkpoints")


def end_start(folder: RunDirectory, attempt: int, step: int, how: How, *overrides: str) -> Decision:
    """Decide after a start that ended while it loaded a step; twice, as if the first decision had been killed."""
    logs = folder.logs(attempt)
    logs.mkdir(parents=True)
    note_load(logs, step)
    how(logs)
    config = compose(default_to_slurm(["checkpoint.every=4", "resilience.restarts=4", *overrides]))
    allocation = Allocation(("node1", "node2", "node3"), (), 2)
    first = decide_after_failure(config, folder, attempt, 1, 0, allocation)
    assert decide_after_failure(config, folder, attempt, 1, 0, allocation) == first
    return first


def list_events(folder: RunDirectory, kind: str) -> list[dict[str, object]]:
    events = map(json.loads, folder.events.read_text().splitlines()) if folder.events.exists() else []
    return [event for event in events if event["event"] == kind]


def is_marked(folder: RunDirectory, step: int) -> bool:
    return (folder.checkpoints / f"step-{step}/bad").exists()


@pytest.mark.parametrize(
    ("how", "died"),
    [(crash, "a rank was killed on node2"), (fail, "an exception: task # on node# failed first: ValueError")],
)
def test_the_second_start_that_ends_in_a_load_passes_over_its_checkpoint(
    folder: RunDirectory, how: How, died: str
) -> None:
    assert end_start(folder, 0, 8, how).why == "starting again from step 8 (restart 1 of 4 without a newer save)"
    assert not is_marked(folder, 8)
    second = end_start(folder, 1, 8, how)
    passed_over = f"checkpoint step 8 is passed over: 2 starts in a row ended while they loaded it, the last by {died}"
    assert second.action is Action.RESTART
    assert second.why.startswith(passed_over)
    assert second.why.endswith("; starting again from step 4 (restart 2 of 4 without a newer save)")
    assert read_bad_mark(folder.checkpoints / "step-8").startswith("2 starts in a row ended while they loaded it")
    (event,) = list_events(folder, "passed_over")
    assert (event["step"], event["attempt"], event["action"]) == (8, 1, "marked bad")
    assert len(read_strikes(folder.path)) == (how is crash), "the second time it is the checkpoint, and not the node"


def read_status(folder: RunDirectory) -> RunStatus:
    points = find_points(str(folder.path), lambda command: Answer(1))
    (facts,) = gather_facts(points, lambda command: Answer(1))
    return add_progress(RunStatus("run", None, 0, State.DONE), facts)


def test_status_names_it_until_the_step_is_saved_again(folder: RunDirectory) -> None:
    for attempt in range(2):
        end_start(folder, attempt, 8, crash)
    assert read_status(folder).passed_over == (8,)
    append_event(folder.events, "checkpoint", 2, step=6)
    assert read_status(folder).passed_over == (8,)
    append_event(folder.events, "checkpoint", 2, step=8)
    assert read_status(folder).passed_over == ()


def test_an_older_checkpoint_that_ends_the_ranks_too_shows_that_none_is_at_fault(folder: RunDirectory) -> None:
    for attempt in range(2):
        end_start(folder, attempt, 8, fail)
    third = end_start(folder, 2, 4, fail)
    assert third.action is Action.GIVE_UP or third.action is Action.END
    assert third.why.startswith("checkpoint step 8 is not passed over any more: the load of step 4 ended the ranks, ")
    assert not is_marked(folder, 8)
    assert find_passed_over(list_events(folder, "passed_over")) == frozenset()


def test_a_load_that_ends_well_begins_anew(folder: RunDirectory) -> None:
    end_start(folder, 0, 8, crash)
    append_event(folder.events, "resume", 1, step=8)
    assert end_start(folder, 2, 8, crash).action is Action.RESTART
    assert not is_marked(folder, 8)


@pytest.mark.parametrize("how", [run_out_of_memory, hang])
def test_other_faults_in_a_load_pass_over_nothing(folder: RunDirectory, how: How) -> None:
    for attempt in range(2):
        end_start(folder, attempt, 8, how)
    assert not is_marked(folder, 8)


def test_ranks_that_die_after_the_load_do_not_blame_the_checkpoint(folder: RunDirectory) -> None:
    def load_and_crash(logs: Path) -> None:
        end_load(logs)
        crash(logs)

    for attempt in range(2):
        end_start(folder, attempt, 8, load_and_crash)
    assert not is_marked(folder, 8)


def test_the_only_checkpoint_is_not_passed_over(folder: RunDirectory) -> None:
    (folder.checkpoints / "step-4").rmdir()
    assert end_start(folder, 0, 8, fail).action is Action.RESTART
    assert end_start(folder, 1, 8, fail).action is Action.END
    assert not is_marked(folder, 8)


def test_without_acting_nothing_is_marked(folder: RunDirectory) -> None:
    for attempt in range(2):
        end_start(folder, attempt, 8, fail, "resilience.act=false")
    assert [event["action"] for event in list_events(folder, "passed_over")] == ["left alone: resilience.act=false"]
    assert not is_marked(folder, 8)
    assert read_status(folder).passed_over == ()


@pytest.mark.long
def test_a_run_goes_on_from_an_older_checkpoint(workshop: Workshop, uninterrupted: Path) -> None:
    """Rank 0 fails after step 8 is saved, and then dies in two loads of it."""
    ended = workshop.train("run", *LONG, faults="0:train:10:raise 0:load:1:kill 0:load:1:segfault")
    assert ended.code == 0, ended
    assert "checkpoint step 8 is passed over" in ended.err
    assert "starting again from step 4" in ended.err
    assert_same_run(workshop.folder / "run", uninterrupted)
