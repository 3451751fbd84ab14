"""What a supervisor makes of the reports of its agents, with Slurm's commands and the agents played by scripts."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from hpc_train.config.compose import compose
from hpc_train.config.plain_config import config_to_dict
from hpc_train.launch.recovery.failures import LOST_NODES, SRUN_ERRORS, STOP_ASKED
from hpc_train.launch.slurm.supervisor import agent_reports, supervise
from hpc_train.launch.slurm.supervisor.allowed_losses import LEFT_TO_OTHERS, AllowedLosses
from hpc_train.launch.slurm.supervisor.job_steps import LEFT_SRUN
from hpc_train.launch.slurm.supervisor.supervise import Supervisor
from hpc_train.launch.slurm.supervisor.time_limit import OUT_OF_TIME
from hpc_train.launch.submit import default_to_slurm
from hpc_train.launch.watching import read_watch_settings
from hpc_train.resilience.agent import Report, encode_report
from hpc_train.resilience.exclusion import read_doubtful
from hpc_train.resilience.heartbeat import Phase
from hpc_train.resilience.incident import HANG, Incident, mark_hang
from hpc_train.resilience.watch import GONE, RankView
from hpc_train.training.records.run_records import LOSS_ALLOWED

NODES = ("node1", "node2", "node3")
AGENTS = """
cat "$1"
(while :; do sed -n 1p "$1"; sleep 0.2; done) & talks=$!
while read -r order; do
  echo "$order" >>"$2"
  [ "$order" != kill ] || kill $3 2>/dev/null
done
kill $talks
"""
"""Reports each line of a file once, and the first one again and again. What is ordered goes to another file, and `kill`
to a process, too."""


@pytest.fixture(scope="module")
def config() -> dict[str, Any]:
    config = config_to_dict(compose(default_to_slurm(["cluster.node.ranks=1", "launch.spares=2"])))
    config["resilience"]["node_silent_seconds"] = 2.0
    return config


@pytest.fixture
def srun() -> Iterator[subprocess.Popen[bytes]]:
    """What stands for the srun of the ranks, which does not end as a node is lost."""
    with subprocess.Popen(["sleep", "60"]) as process:
        yield process
        process.kill()


Start = Callable[..., Supervisor]


@pytest.fixture
def start(
    tmp_path: Path, config: dict[str, Any], srun: subprocess.Popen[bytes], monkeypatch: pytest.MonkeyPatch
) -> Iterator[Start]:
    """Start a supervisor of these nodes whose agents give these reports, the first of them again and again.

    ends: whether srun ends after the ranks.
    """
    logs = tmp_path / "logs" / "0"
    logs.mkdir(parents=True)
    for name in ("squeue", "scancel", "sinfo"):
        (tmp_path / name).write_text("#!/bin/sh\n")
        (tmp_path / name).chmod(0o700)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    monkeypatch.setenv("SLURM_JOB_NODELIST", "node[1-5]")
    monkeypatch.setattr(agent_reports, "_AGENT_START_SECONDS", 1.0)
    monkeypatch.setattr(agent_reports, "_LATE_SECONDS", 1.0)

    probes: list[subprocess.Popen[bytes]] = []

    def start_probe(host: str, nodes: Sequence[str]) -> subprocess.Popen[bytes]:
        probes.append(subprocess.Popen(["true"] if host == "node5" else ["sleep", "10"]))
        return probes[-1]

    monkeypatch.setattr(supervise, "start_probe", start_probe)

    def start(
        reports: Sequence[Report], nodes: Sequence[str] = NODES, ends: bool = True, record: int | None = None
    ) -> Supervisor:
        monkeypatch.setenv("HPC_TRAIN_NODES", ",".join(nodes))
        (tmp_path / "job.json").write_text(json.dumps({"ranks": len(nodes), "config": config}))
        (tmp_path / "reports").write_text("".join(f"{encode_report(report)}\n" for report in reports))
        words = ["sh", "-c", AGENTS, "sh", str(tmp_path / "reports"), str(tmp_path / "orders")]
        words += [str(srun.pid if ends else subprocess.Popen(["true"]).pid)]

        def start_agents(logs: Path, resilience: Mapping[str, Any], nodes: Sequence[str]) -> subprocess.Popen[bytes]:
            (logs / agent_reports.AGENT_ERRORS).touch()
            return subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, start_new_session=True)

        monkeypatch.setattr(supervise, "start_agents", start_agents)
        settings = read_watch_settings(logs)
        assert settings is not None
        resilience = {**config["resilience"], "compiles": False, "last_try": False}
        return Supervisor(logs, srun.pid, settings, resilience, config["launch"], record)

    yield start
    for probe in probes:  # a supervisor leaves them to themselves
        probe.kill()
        probe.wait()


def events(run: Path) -> list[dict[str, Any]]:
    path = run / "events.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def read_orders(folder: Path) -> list[str]:
    """Return the orders that the agents were sent, without pings, whose number depends on the load of the machine."""
    return [order for order in (folder / "orders").read_text().split() if order != "ping"]


def report(host: str, **fields: Any) -> Report:
    """The report of a node with one rank in a step."""
    view = RankView(int(host[-1]) - 1, Phase.STEP, 50, 0.5, 10.0, "R", host)
    return Report(host, [replace(view, **fields)])


def test_two_nodes_that_are_lost_at_once_are_one_incident(start: Start, tmp_path: Path) -> None:
    """And of the spare nodes, node4 does not answer either."""
    start([report(host) for host in NODES], ends=False).watch([])
    logs = tmp_path / "logs" / "0"
    assert (logs / LOST_NODES).read_text().split() == ["node2", "node3"]
    assert read_doubtful(logs) == ["node4"]
    (event,) = events(tmp_path)
    assert (event["event"], event["hosts"], event["action"]) == ("lost_node", ["node2", "node3"], "ended")
    assert re.fullmatch("nodes node2, node3 have not been heard of for [23] s", event["why"])
    assert [path.name for path in logs.glob("incident-*")] == ["incident-0"]
    assert read_orders(tmp_path) == ["kill", "kill", "end"]
    assert (logs / LEFT_SRUN).exists()


def test_without_acting_a_lost_node_is_only_said(
    start: Start, tmp_path: Path, config: dict[str, Any], srun: subprocess.Popen[bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(config["resilience"], "act", False)
    supervisor = start([report(host) for host in NODES[:2]], NODES[:2])
    with subprocess.Popen(["sh", "-c", f"sleep 4; kill {srun.pid}"]):
        supervisor.watch([])
        assert srun.wait(1) != 0, "it watches as long as there are ranks"
    (event,) = events(tmp_path)
    assert (event["hosts"], event["action"]) == (["node2"], "left alone: resilience.act=false")
    assert not (tmp_path / "logs" / "0" / LOST_NODES).exists()


def test_ranks_that_go_on_without_those_of_a_lost_node_are_left_alone(
    start: Start, tmp_path: Path, config: dict[str, Any], srun: subprocess.Popen[bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A rank was killed on a node that falls silent then; the other one looks as if it hung for a while."""
    monkeypatch.setitem(config["parallel"]["sync"], "lost_after_seconds", 60.0)
    logs = tmp_path / "logs" / "0"
    (logs / LOSS_ALLOWED).touch()
    (logs / SRUN_ERRORS).write_text("srun: error: node2: task 1: Killed\n")
    supervisor = start([report("node1", silent=12.0), report("node2")], NODES[:2])
    with subprocess.Popen(["sh", "-c", f"sleep 5; kill {srun.pid}"]):
        supervisor.watch([])
        assert srun.wait(1) != 0, "it watches as long as there are ranks"
    (event,) = events(tmp_path)
    assert (event["hosts"], event["action"]) == (["node2"], LEFT_TO_OTHERS)
    assert not (logs / LOST_NODES).exists()
    assert not (logs / HANG).exists()
    assert set(supervisor._reports.nodes) == {"node1"}


@pytest.mark.parametrize("gone", [(0, GONE, Phase.STEP), (0, "R", Phase.STEP)])
def test_without_the_first_task_or_before_all_train_no_rank_goes_on(
    tmp_path: Path, gone: tuple[int, str, Phase]
) -> None:
    """The first task is gone, or no rank has said yet that some may be lost."""
    task, state, phase = gone
    losses = AllowedLosses(tmp_path, 60.0, NODES)
    if state == GONE:
        (tmp_path / LOSS_ALLOWED).touch()
        assert losses.cover([RankView(1, phase, 7, 1.0, 10.0, GONE, "node2")], ["node3"])
        assert not losses.cover([], ["node1"]), "its node is lost"
        assert not AllowedLosses(tmp_path, None, NODES).cover([])
    assert not losses.cover([RankView(task, phase, 7, 1.0, 10.0, state, "node1")])


@pytest.mark.parametrize(
    ("seen", "phase", "kind"),
    [(NODES[:2], Phase.STEP, "hang"), (NODES[:1], Phase.STEP, "lost_node"), (NODES[:1], Phase.START, "lost_node")],
)
def test_a_node_that_has_never_reported_is_lost_and_those_that_wait_for_it_do_not_hang(
    start: Start, tmp_path: Path, seen: Sequence[str], phase: Phase, kind: str
) -> None:
    """As where a supervisor begins after a node was lost: the ranks that it sees are all late, or still start."""
    silent = 12.0 if phase is Phase.STEP else 1.0
    start([report(host, silent=silent, phase=phase) for host in seen], NODES[:2]).watch([])
    (event,) = events(tmp_path)
    assert event["event"] == kind
    assert event.get("hosts", ["node2"]) == ["node2"]
    assert (tmp_path / "logs" / "0" / HANG).exists() == (kind == "hang")


def test_a_node_that_has_never_reported_is_lost_where_its_peers_have_failed(start: Start, tmp_path: Path) -> None:
    """Its ranks were lost while there was no supervisor. Others would start there again."""
    logs = tmp_path / "logs" / "0"
    (logs / SRUN_ERRORS).write_text("srun: error: node1: task 0: Exited with exit code 1\n")
    start([report("node1")], NODES[:2], ends=False).watch([])
    assert (logs / LOST_NODES).read_text() == "node2\n"


def test_a_node_without_an_agent_is_left_alone_as_long_as_the_ranks_go_on(
    start: Start, tmp_path: Path, srun: subprocess.Popen[bytes]
) -> None:
    supervisor = start([report("node1")], NODES[:2])
    with subprocess.Popen(["sh", "-c", f"sleep 6; kill {srun.pid}"]):
        supervisor.watch([])
        assert srun.wait(1) != 0
    assert events(tmp_path) == []


def test_a_node_that_cannot_see_notices_is_said_once(
    start: Start, tmp_path: Path, srun: subprocess.Popen[bytes]
) -> None:
    blind = replace(report("node1"), blind="curll: No such file or directory")
    supervisor = start([blind], NODES[:1])
    with subprocess.Popen(["sh", "-c", f"sleep 2; kill {srun.pid}"]):
        supervisor.watch([])
    (event,) = events(tmp_path)
    assert event["event"] == "watch"
    assert "whether node1 is about to be taken away: curll: No such file or directory" in event["why"]


@pytest.mark.parametrize("stop", ["", "SIGTERM"])
def test_a_stop_that_an_agent_has_seen_is_written_down(
    start: Start, tmp_path: Path, srun: subprocess.Popen[bytes], stop: str
) -> None:
    supervisor = start([replace(report("node1"), stop=stop)], NODES[:1])
    with subprocess.Popen(["sh", "-c", f"sleep 0.7; kill {srun.pid}"]):
        supervisor.watch([])
    assert (tmp_path / "logs" / "0" / STOP_ASKED).exists() == bool(stop)
    assert read_orders(tmp_path) == (["stop", "kill", "end"] if stop else ["kill", "end"])


@pytest.mark.parametrize("begun", [False, True])
def test_ranks_are_asked_to_stop_by_a_signal_that_came_before_they_were_there(
    start: Start, tmp_path: Path, srun: subprocess.Popen[bytes], begun: bool
) -> None:
    """Once there is one, even if it waits for the others."""
    record = os.open(tmp_path / "record", os.O_RDWR | os.O_CREAT)
    seen = report("node1", phase=Phase.START) if begun else Report("node1", [])
    supervisor = start([seen], NODES[:1], record=record)
    (tmp_path / "record").write_text("hpc-train-stop\n")
    with subprocess.Popen(["sh", "-c", f"sleep 0.7; kill {srun.pid}"]):
        supervisor.watch([])
    os.close(record)
    assert (tmp_path / "logs" / "0" / STOP_ASKED).exists()
    assert read_orders(tmp_path) == (["stop"] if begun else []) + ["kill", "end"]


@pytest.mark.parametrize("killed", [False, True])
def test_ranks_whose_batch_script_was_killed_are_left_to_save(
    start: Start, tmp_path: Path, srun: subprocess.Popen[bytes], killed: bool
) -> None:
    """Where Slurm tracks processes by cgroups, it kills their srun, too, and only then asks the ranks to stop."""
    with subprocess.Popen(["sleep", "60"]) as script:
        if killed:
            script.kill()
            script.wait()
        supervisor = start([report("node1")], NODES[:1])
        srun.kill()
        srun.wait()
        supervisor.watch([], script.pid)
        script.kill()
    assert read_orders(tmp_path) == (["end"] if killed else ["kill", "end"])


@pytest.mark.parametrize("attempts", [1, 3])
def test_ranks_that_hang_in_their_first_step_are_ended_before_the_limit_if_the_job_may_run_again(
    start: Start,
    tmp_path: Path,
    config: dict[str, Any],
    srun: subprocess.Popen[bytes],
    monkeypatch: pytest.MonkeyPatch,
    attempts: int,
) -> None:
    """Else Slurm ends them at the limit, and says so."""
    monkeypatch.setitem(config["launch"], "max_attempts", attempts)
    (tmp_path / "squeue").write_text("#!/bin/sh\necho 0:05 RUNNING 1:00 0:55 100 160\n")
    supervisor = start([report("node1", phase=Phase.FIRST_STEP)], NODES[:1])
    seconds = 2 if attempts == 1 else 40
    end_srun = f"import os, time; time.sleep({seconds}); os.kill({srun.pid}, 15)"
    with subprocess.Popen([sys.executable, "-c", end_srun]) as late:
        supervisor.watch([])
        late.kill()
    assert (tmp_path / "logs" / "0" / OUT_OF_TIME).exists() == (attempts > 1)


def test_what_a_supervisor_has_decided_is_done_by_the_next_one(start: Start, tmp_path: Path) -> None:
    """It was killed before it had ended the ranks, which train on by now."""
    mark_hang(tmp_path / "logs" / "0", Incident("hang", "task 1 hangs", 1, "node2"))
    start([report(host) for host in NODES]).watch([])
    assert events(tmp_path) == []
    assert read_orders(tmp_path) == ["kill", "kill", "end"]
