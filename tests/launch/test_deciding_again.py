"""A process that decides after a fault may be killed at any moment: the next one decides the same, and counts once."""

from __future__ import annotations

import io
import json
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from hpc_train.config.compose import compose
from hpc_train.errors import IncompleteRun, MissingRanksError
from hpc_train.launch import rank_entrypoint
from hpc_train.launch.job_spec import make_spec
from hpc_train.launch.recovery import restarting
from hpc_train.launch.recovery.failures import SRUN_ERRORS, STOP_ASKED
from hpc_train.launch.recovery.restarting import Allocation, decide_after_failure
from hpc_train.launch.slurm.request import make_request
from hpc_train.launch.submit import default_to_slurm
from hpc_train.resilience.exclusion import NODES, Strike, append_strike, read_doubtful, write_doubtful
from hpc_train.resilience.restart import Action
from hpc_train.runtime.stop_request import StopRequest
from hpc_train.training.records.run_records import REQUEUE_MARKER, append_event, record_failure
from hpc_train.training.run_directory import RunDirectory, locate_run_directory

KILLED = "srun: error: node2: task 1: Killed\n"
NODES_OF_THE_JOB = ("node1", "node2", "node3")


def fail(folder: RunDirectory, attempt: int) -> None:
    folder.logs(attempt).mkdir(parents=True)
    (folder.logs(attempt) / SRUN_ERRORS).write_text(KILLED)
    append_event(folder.events, "start" if attempt == 0 else "resume", attempt, step=0)


def lines(path: Path) -> list[dict[str, object]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


@pytest.mark.parametrize("lost", [(), ("node2",)])
def test_a_decision_that_is_made_twice_counts_once(tmp_path: Path, lost: tuple[str, ...]) -> None:
    folder = RunDirectory(tmp_path, tmp_path / "checkpoints")
    config = compose(default_to_slurm(["checkpoint.every=10", "resilience.restarts=2"]))
    allocation = Allocation(NODES_OF_THE_JOB, lost, 2)
    for attempt in range(2):
        fail(folder, attempt)
        decisions = [decide_after_failure(config, folder, attempt, 137, 0, allocation) for _ in range(3)]
        assert decisions == decisions[:1] * 3
        assert f"(restart {attempt + 1} of 2 without a newer save)" in decisions[0].why
        restarts = [event for event in lines(folder.events) if event["event"] == "restart"]
        assert [event["attempt"] for event in restarts] == list(range(attempt + 1))
        assert [strike["attempt"] for strike in lines(tmp_path / NODES)] == list(range(attempt + 1))


@pytest.mark.parametrize("hosts", [[], ["node2"], ["node1", "node2"]])
def test_copies_that_differ_send_a_run_back_whether_or_not_it_is_known_which_is_wrong(
    tmp_path: Path, hosts: list[str]
) -> None:
    folder = RunDirectory(tmp_path, tmp_path / "checkpoints")
    config = compose(default_to_slurm(["checkpoint.every=10"]))
    folder.logs(0).mkdir(parents=True)
    append_event(folder.events, "start", 0, step=0)
    append_event(folder.events, "checkpoint", 0, step=10)
    append_event(folder.events, "disagree", 0, step=12, why="copies are no longer equal", marked=[], hosts=hosts)
    record_failure(folder.logs(0), 0, "node1", IncompleteRun("copies are no longer equal"), 1.0)
    decision = decide_after_failure(config, folder, 0, 1, 0, Allocation(NODES_OF_THE_JOB, (), 2))
    assert decision.action is Action.RESTART, decision.why
    struck = lines(tmp_path / NODES) if (tmp_path / NODES).exists() else []
    assert [line.get("host") for line in struck] == (hosts if len(hosts) == 1 else [])


def test_a_node_that_is_lost_gets_one_strike_until_ranks_have_started_there_again(tmp_path: Path) -> None:
    """node2 is lost in the first attempt; the next ones, on others, fail as ranks die. In the last it was back."""
    folder = RunDirectory(tmp_path, tmp_path / "checkpoints")
    config = compose(default_to_slurm(["checkpoint.every=10"]))
    allocation = Allocation((*NODES_OF_THE_JOB, "node4"), ("node2", "node4"), 2)
    for attempt, nodes in enumerate(("node1,node2", "node1,node3", "node[1,3]", "node1,node2")):
        fail(folder, attempt)
        (folder.logs(attempt) / "attempt.json").write_text(json.dumps({"host": "node1", "time": 0.0, "nodes": nodes}))
        for _ in range(2):
            decide_after_failure(config, folder, attempt, 137, 0, allocation)
    strikes = [(strike["host"], strike["attempt"]) for strike in lines(tmp_path / NODES)]
    assert strikes == [("node2", 0), ("node4", 0), ("node2", 3)]


def test_two_names_of_a_lost_node_are_one_loss(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(restarting, "read_time_left", lambda job: None)
    env = {"SLURM_JOB_NODELIST": "node[1-3]", "SLURM_JOB_ID": "7"}
    allocation = restarting.read_allocation(compose(default_to_slurm([])), env, "node2 node2.cluster node9", 2)
    assert allocation.lost == ("node2",)


def test_nodes_that_are_lost_together_are_one_fault(tmp_path: Path) -> None:
    folder = RunDirectory(tmp_path, tmp_path / "checkpoints")
    config = compose(default_to_slurm(["checkpoint.every=10", "launch.spares=2"]))
    fail(folder, 0)
    decide_after_failure(config, folder, 0, 137, 0, Allocation((*NODES_OF_THE_JOB, "node4"), ("node2", "node3"), 2))
    (event,) = (event for event in lines(folder.events) if event["event"] == "restart")
    assert (event["cause"], event["host"]) == ("a lost node", "node2,node3")
    assert [(strike["host"], strike["weight"]) for strike in lines(tmp_path / NODES)] == [("node2", 2), ("node3", 2)]
    assert (folder.logs(0) / "next-nodes").read_text() == "node1,node4\n"


def test_a_requeue_leaves_out_all_nodes_that_are_lost(tmp_path: Path) -> None:
    """Slurm may not have noticed yet, and the limit to one node in twenty is for nodes that are merely suspected."""
    folder = RunDirectory(tmp_path, tmp_path / "checkpoints")
    config = compose(default_to_slurm(["checkpoint.every=10"]))
    fail(folder, 0)
    append_strike(tmp_path, Strike("node9", 4, "worse, but not lost", 0))
    lost = ("node2", "node3")
    decision = decide_after_failure(config, folder, 0, 137, 0, Allocation(NODES_OF_THE_JOB, lost, 3, can_requeue=True))
    assert decision.action.value == "requeued"
    assert (folder.logs(0) / "exclude").read_text() == "node2,node3,node9\n"


def test_without_acting_a_decision_is_recorded_and_changes_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    config = compose(default_to_slurm([f"run_dir={tmp_path}", "cluster.nodes=2", "resilience.act=false"]))
    folder = locate_run_directory(config)
    fail(folder, 0)
    make_spec(config, folder, 2 * config.cluster.ranks_per_node, {}).write(folder.job)
    monkeypatch.setattr(restarting, "read_time_left", lambda job: None)
    monkeypatch.setenv("SLURM_JOB_NODELIST", "node[1-3]")
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    assert restarting.main(str(tmp_path), "0", "137", "node2") == 1
    assert capsys.readouterr().out.startswith("hpc-train: left alone (resilience.act=false): starting again from")
    (event,) = (event for event in lines(folder.events) if event["event"] == "restart")
    assert (event["cause"], event["action"]) == ("a lost node", "left alone: resilience.act=false")
    assert sorted(path.name for path in folder.logs(0).iterdir()) == ["decision", SRUN_ERRORS]
    options = make_request(config, folder).parameters
    assert options.get("exclude") is None
    strikes = [(strike["host"], strike["weight"]) for strike in lines(tmp_path / NODES)]
    assert strikes == [("node2", 2)], "evidence is kept for those who act"
    acting = make_request(compose(default_to_slurm([f"run_dir={tmp_path}", "cluster.nodes=2"])), folder).parameters
    assert acting["exclude"] == "node2"


def test_a_decision_is_made_where_the_log_of_the_job_is_full(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = compose(default_to_slurm([f"run_dir={tmp_path}", "cluster.nodes=2"]))
    folder = locate_run_directory(config)
    fail(folder, 0)
    make_spec(config, folder, 2 * config.cluster.ranks_per_node, {}).write(folder.job)
    monkeypatch.setattr(restarting, "read_time_left", lambda job: None)
    monkeypatch.setenv("SLURM_JOB_NODELIST", "node[1-3]")
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    with Path("/dev/full").open("wb", buffering=0) as full:
        monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(full, write_through=True))
        with pytest.raises(OSError, match="No space left"):
            print("any line", flush=True)
        assert restarting.main(str(tmp_path), "0", "137", "node2") == 0
        sys.stdout.close()


def test_a_spare_node_that_did_not_answer_is_taken_last(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(restarting, "read_time_left", lambda job: None)
    env = {"SLURM_JOB_NODELIST": "node[1-4]", "SLURM_JOB_ID": "7"}
    folder, config = RunDirectory(tmp_path, tmp_path / "checkpoints"), compose(default_to_slurm([]))
    write_doubtful(tmp_path, ["node3"])
    for lost, chosen in (("node2", "node1,node4"), ("node2 node4", "node1,node3")):
        allocation = restarting.read_allocation(config, env, lost, 2, read_doubtful(tmp_path))
        assert ",".join(restarting.choose_nodes(config, folder, allocation).start) == chosen
    assert read_doubtful(tmp_path / "nothing") == []


def test_ranks_that_die_while_all_stop_count_as_any_others(tmp_path: Path) -> None:
    """Three stops in a row in which a rank dies on the same node end the run; until then the job is requeued."""
    folder = RunDirectory(tmp_path, tmp_path / "checkpoints")
    config = compose(default_to_slurm(["checkpoint.every=10"]))
    allocation = Allocation(NODES_OF_THE_JOB[:2], (), 2, can_requeue=True)
    actions = []
    for attempt in range(3):
        fail(folder, attempt)
        (folder.logs(attempt) / "requeue").touch()
        actions.append(decide_after_failure(config, folder, attempt, 137, 0, allocation).action.value)
    assert actions == ["requeued", "requeued", "given up"]
    assert [(strike["host"], strike["weight"]) for strike in lines(tmp_path / NODES)] == [("node2", 1)] * 3
    assert (folder.logs(1) / "exclude").read_text() == "node2\n"


@pytest.mark.parametrize(
    ("nodes", "cause", "host"),
    [
        ("node1,node3", "a rank was killed", "node2"),
        ("node1,node2", "a lost node", "node2"),
        ("", "a lost node", "node3"),
    ],
)
def test_a_node_that_was_lost_before_an_attempt_is_not_why_it_failed(
    tmp_path: Path, nodes: str, cause: str, host: str
) -> None:
    folder = RunDirectory(tmp_path, tmp_path / "checkpoints")
    fail(folder, 0)
    (folder.logs(0) / "attempt.json").write_text(json.dumps({"host": "node1", "time": 0.0, "nodes": nodes}))
    lost = ("node2",) if nodes == "node1,node2" else ("node3",)
    lost = ("node4",) if nodes == "node1,node3" else lost
    config = compose(default_to_slurm(["checkpoint.every=10"]))
    decide_after_failure(config, folder, 0, 137, 0, Allocation((*NODES_OF_THE_JOB, "node4"), lost, 2))
    (event,) = (event for event in lines(folder.events) if event["event"] == "restart")
    assert (event["cause"], event["host"]) == (cause, host)


ASKED = Allocation((*NODES_OF_THE_JOB, "node4"), (), 2, can_requeue=True)


@pytest.mark.parametrize(
    ("by", "allocation", "action"),
    [
        ("", ASKED, "restarted"),
        ("signal", ASKED, "requeued"),
        ("signal", replace(ASKED, lost=("node2",)), "requeued"),
        ("signal", replace(ASKED, can_requeue=False), "ended"),
        ("signal", replace(ASKED, can_requeue=False, enough_time=False), "restarted"),
        ("notice", ASKED, "requeued"),
        ("notice", replace(ASKED, lost=("node2",)), "restarted"),
        ("notice", Allocation(), "restarted"),
    ],
)
def test_ranks_that_fail_after_they_were_asked_to_stop_do_not_start_again_in_this_job(
    tmp_path: Path, by: str, allocation: Allocation, action: str
) -> None:
    """Also where they had not yet agreed on their last step.

    Unless the node that was to be taken away is gone and a spare is there, or the job can save only here.
    """
    folder = RunDirectory(tmp_path, tmp_path / "checkpoints")
    fail(folder, 0)
    if by == "signal":
        (folder.logs(0) / STOP_ASKED).touch()
    elif by == "notice":
        append_event(folder.events, "notice", 0, why="node2 is about to be taken away")
    config = compose(default_to_slurm(["checkpoint.every=10"]))
    assert decide_after_failure(config, folder, 0, 137, 0, allocation).action.value == action


@pytest.mark.parametrize(("asked", "action"), [("", "restarted"), ("SIGUSR2", "requeued")])
def test_a_stop_that_comes_before_all_ranks_are_there_is_not_forgotten(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, asked: str, action: str
) -> None:
    """Ranks that start again would not get the signal, and a job that was to end would train on."""
    folder = RunDirectory(tmp_path, tmp_path / "checkpoints")
    folder.logs(0).mkdir(parents=True)
    stop = StopRequest()
    if asked:
        stop.ask(asked)
    monkeypatch.setattr(rank_entrypoint, "_stop_request", stop)
    error = MissingRanksError("1 of 2 processes came within 25 s; missing: task 1 on node2", [1], ["node2"])
    code = rank_entrypoint._report_failure(error, folder.logs(0), 0, "node1", 0.0)
    config = compose(default_to_slurm(["checkpoint.every=10"]))
    allocation = Allocation(NODES_OF_THE_JOB, (), 2, can_requeue=True)
    assert decide_after_failure(config, folder, 0, code, 0, allocation).action.value == action


def test_a_signal_after_another_rank_has_failed_asks_for_no_stop(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A launcher ends the ranks that are left by the same signal."""
    stop = StopRequest()
    stop.ask("SIGTERM")
    monkeypatch.setattr(rank_entrypoint, "_stop_request", stop)
    record_failure(tmp_path, 1, "node2", ImportError("no module"))
    rank_entrypoint._report_failure(MissingRanksError("1 of 2 came", [1], ["node2"]), tmp_path, 0, "node1", 0.0)
    assert not (tmp_path / REQUEUE_MARKER).exists()
