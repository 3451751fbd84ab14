"""Agents that were killed are started again, a node on which none can start is lost, and a second supervisor leaves."""

from __future__ import annotations

import json
import os
import shlex
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest

from hpc_train.errors import EXIT_REQUEUE
from hpc_train.launch.slurm.supervisor import agent_reports, srun_errors
from hpc_train.launch.slurm.supervisor.agent_reports import AGENTS, RANKS, AgentReports, NodeProbe
from hpc_train.launch.slurm.supervisor.job_steps import open_process, signal_step
from hpc_train.launch.slurm.supervisor.lost_script import find_lost_host, is_out_of_job
from hpc_train.launch.slurm.supervisor.srun_errors import PeerFailures, SrunErrors
from hpc_train.resilience.agent import END, PING, Report, SupervisorWatch, encode_report
from hpc_train.resilience.heartbeat import Heartbeat, Phase, find_folder
from hpc_train.resilience.watch import GONE, RankView

LIMIT = 0.5
"""Seconds after which a node is lost."""


@pytest.fixture
def started() -> list[Mapping[Phase, float]]:
    """What each start of the agents was told of deadlines."""
    return []


@pytest.fixture
def reports(
    tmp_path: Path, started: list[Mapping[Phase, float]], monkeypatch: pytest.MonkeyPatch
) -> Iterator[AgentReports]:
    """Agents of two nodes that report once and end; those of node2 report only the first time."""
    monkeypatch.setattr(agent_reports, "_AGENTS_AGAIN_SECONDS", 0.0)
    monkeypatch.setattr(agent_reports, "_AGENT_START_SECONDS", 0.2)
    lines = [encode_report(Report(host, [], learned={Phase.STEP: 1.5})) for host in ("node1", "node2")]

    def start(learned: Mapping[Phase, float]) -> subprocess.Popen[bytes]:
        file = tmp_path / str(len(started))
        file.write_text("".join(f"{line}\n" for line in (lines[:1] if started else lines)))
        started.append(learned)
        return subprocess.Popen(["cat", str(file)], stdin=subprocess.PIPE, stdout=subprocess.PIPE)

    made = AgentReports(start, SrunErrors(tmp_path / "agents.err"))
    yield made
    made.close()


def test_a_node_without_an_agent_is_lost_though_the_others_start_again(
    reports: AgentReports, started: list[Mapping[Phase, float]]
) -> None:
    reports.read(0.2)
    assert set(reports.nodes) == {"node1", "node2"}
    assert reports.ended
    lost = []
    for _ in range(10):
        assert reports.start_again()
        reports.read(0.2)
        lost.append(reports.find_silent(LIMIT))
    assert lost[0] == [], "it gets time for its start"
    assert lost[-1] == ["node2"]
    assert all(hosts in ([], ["node2"]) for hosts in lost)
    assert started[0] == {}
    assert started[1:] == [{Phase.STEP: 1.5}] * 10


def test_nodes_that_fall_silent_together_are_lost_together(reports: AgentReports) -> None:
    reports.read(0.2)
    for host in ("node3", "node4"):
        reports._parse_reports(encode_report(Report(host, [])).encode() + b"\n")
    for second, third, lost in (
        (10.2, 8.5, []),
        (10.7, 9.9, []),
        (12.2, 10.5, ["node2", "node3"]),
        (10.2, 6.0, ["node2"]),
        (10.2, -0.5, ["node2"]),
        (9.9, 3.0, []),
    ):
        reports.nodes["node2"].silent, reports.nodes["node3"].silent = second, third
        assert reports.find_silent(10.0) == lost
    reports.nodes["node2"].silent, reports.nodes["node3"].silent = 2.2, 0.7
    assert reports.find_silent(2.0) == ["node2"], "reports come each second: one that is due is no second loss"


def test_a_node_that_has_never_reported_is_looked_for_and_lost_or_left_alone(tmp_path: Path) -> None:
    """A supervisor that begins after a node was lost has never heard of it."""

    def report(host: str) -> None:
        made._parse_reports(encode_report(Report(host, [])).encode() + b"\n")

    start, names = (
        (lambda _: subprocess.Popen(["cat"], stdin=subprocess.PIPE, stdout=subprocess.PIPE)),
        [f"node{number}" for number in range(1, 5)],
    )
    made = AgentReports(start, SrunErrors(tmp_path / "agents.err"), names)
    assert made.list_absent() == [], "none has begun"
    report("node1.cluster")
    report("node2")
    assert made.list_absent() == ["node3", "node4"]
    assert set(made.nodes) == set(names), "a node has one name, whatever it calls itself"
    assert made.list_late() == made.find_silent(10.0) == []
    for host in ("node3", "node4"):
        made.expect_new_agent(host)
        made.nodes[host].silent += 0.6 * agent_reports._AGENT_START_SECONDS
    assert made.list_late() == ["node3", "node4"]
    report("node4")
    made.nodes["node3"].silent = 10.5
    assert made.list_absent() == made.find_silent(10.0) == ["node3"]
    made.leave_unwatched("node3")
    report("node1.cluster")
    assert made.list_absent() == []
    made.close()


def test_a_node_that_is_late_may_be_lost_until_that_is_sure(reports: AgentReports) -> None:
    reports.read(0.2)
    node = reports.nodes["node2"]
    for seconds, late in ((1.0, False), (4.0, True), (10.5, True), (12.0, False)):
        node.silent = seconds
        assert reports.may_miss_a_node(10.0) is late


def test_a_silent_node_whose_ranks_go_on_has_a_stuck_agent_once(reports: AgentReports) -> None:
    def report(host: str, step: int) -> None:
        beat = RankView(int(host[-1]), Phase.STEP, step, 0.0, 10.0, "R", host)
        reports._parse_reports(encode_report(Report(host, [beat])).encode() + b"\n")

    def stay_silent(seconds: float) -> None:
        reports.nodes["node2"].silent = seconds
        reports.find_silent(10.0)

    report("node2", 10)
    report("node1", 40)
    assert not reports.has_a_stuck_agent("node2"), "it may have died after these steps, and just after its report"
    stay_silent(4.0)
    report("node1", 50)
    stay_silent(6.0)
    assert not reports.has_a_stuck_agent("node2")
    report("node1", 54)
    stay_silent(11.0)
    assert not reports.has_a_stuck_agent("node2"), "the other ranks have not gone on for long enough"
    report("node1", 55)
    assert not reports.has_a_stuck_agent("node2", needed=False), (
        "ranks that go on without those of lost nodes tell nothing"
    )
    assert reports.has_a_stuck_agent("node2")
    reports.expect_new_agent("node2")
    assert reports.nodes["node2"].silent == -agent_reports._AGENT_START_SECONDS
    report("node1", 80)
    assert not reports.has_a_stuck_agent("node2"), "once"


def test_a_silent_node_that_runs_a_step_has_a_stuck_agent_however_slow_the_ranks_are() -> None:
    asked = []

    def start(host: str) -> subprocess.Popen[bytes]:
        asked.append(host)
        return subprocess.Popen(["true"] if host == "node2" else ["sleep", "60"])

    probe = NodeProbe(start)
    for _ in range(100):
        probe.ask(["node2", "node3"])
        if probe.has_answered("node2"):
            break
        time.sleep(0.1)
    assert asked == ["node2", "node3"]
    assert [probe.has_answered(host) for host in ("node1", "node2", "node3")] == [False, True, False]
    dead = probe._steps["node3"]
    probe.ask([])
    assert not probe.has_answered("node2"), "that was before it said something again"
    assert dead.poll() is None, "nobody has killed it"
    dead.kill()
    dead.wait()


def test_the_node_of_the_supervisor_is_never_lost(reports: AgentReports) -> None:
    reports._parse_reports(encode_report(Report(socket.gethostname(), [])).encode() + b"\n")
    assert reports.has_a_stuck_agent(socket.gethostname())


def test_reading_ends_with_the_first_report_of_a_rank_that_is_late(reports: AgentReports) -> None:
    late = RankView(1, Phase.STEP, 5, 10.02, 10.0, "R", "node2")
    assert reports._parse_reports(encode_report(Report("node2", [late])).encode() + b"\n")
    assert not reports._parse_reports(encode_report(Report("node1", [])).encode() + b"\n")


def test_reading_ends_with_the_process_whose_ranks_are_watched(tmp_path: Path) -> None:
    with subprocess.Popen(["sleep", "0.3"]) as srun:
        end = open_process(srun.pid)
        assert end is not None
        made = AgentReports(
            lambda _: subprocess.Popen(["cat"], stdin=subprocess.PIPE, stdout=subprocess.PIPE),
            SrunErrors(tmp_path / "agents.err"),
            wake=end,
        )
        began = time.monotonic()
        made.read(20)
        assert 0.2 < time.monotonic() - began < 10
        made.close()
        os.close(end)
    assert open_process(srun.pid) is None


def test_agents_that_all_say_nothing_are_replaced_and_leave_the_ranks_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Their srun has read no order by then: it is stopped, too."""
    monkeypatch.setattr(agent_reports, "_AGENTS_AGAIN_SECONDS", 0.0)
    monkeypatch.setattr(agent_reports, "END_SECONDS", 0.1)
    orders, lines = tmp_path / "orders", [encode_report(Report(host, [])) for host in ("node1", "node2")]
    words = ["sh", "-c", f"printf '%s\\n' '{lines[0]}' '{lines[1]}'; read x; echo $x >>{orders}; exec sleep 60"]
    made = AgentReports(
        lambda _: subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE), SrunErrors(tmp_path / "err")
    )
    assert not made.are_all_silent(10.0), "none has begun"
    made.read(0.3)
    made.nodes["node1"].silent = 10.5
    assert not made.are_all_silent(10.0)
    assert made.find_silent(10.0) == ["node1"]
    made.nodes["node2"].silent = 10.5
    assert made.find_silent(10.0) == [], "nobody is there to say that a node is lost"
    assert made.are_all_silent(10.0)
    made.give_up()
    made.read(0.1)
    assert made.start_again()
    assert not made.are_all_silent(10.0)
    assert {node.silent for node in made.nodes.values()} == {-agent_reports._AGENT_START_SECONDS}
    made.close(0.1)
    assert orders.read_text() == "leave\nend\n"


AGENT = """
import json, sys
from hpc_train.config.plain_config import config_to_dict
from hpc_train.config.resilience import ResilienceConfig
from hpc_train.resilience import agent
agent._ALONE_SECONDS = 0.0
settings = {**config_to_dict(ResilienceConfig()), "compiles": False, "last_try": False, "learned": {}}
agent.main(sys.argv[1], json.dumps(settings))
"""


@pytest.mark.parametrize("with_a_rank", [False, True])
def test_an_agent_that_nobody_ends_leaves_after_its_ranks(tmp_path: Path, with_a_rank: bool) -> None:
    """Its standard input stays open, as where Slurm has forgotten its job step."""
    beat = Heartbeat(tmp_path, 0) if with_a_rank else None
    with subprocess.Popen([sys.executable, "-c", AGENT, str(tmp_path)], stdin=-1, stdout=-1) as agent:
        assert agent.stdin is not None
        assert agent.stdout is not None
        if beat is not None:
            assert agent.stdout.readline()
            assert agent.stdout.readline(), "a second later, it goes on"
            agent.stdin.write(END)
            agent.stdin.flush()
        assert agent.wait(60) == 0
    assert not find_folder(tmp_path).exists()


@pytest.mark.parametrize("ends", [False, True])
def test_an_agent_reports_a_stop_signal_also_as_it_ends(tmp_path: Path, ends: bool) -> None:
    """Ranks that fail before they have agreed on their last step cannot say that they were asked to stop."""
    beat = Heartbeat(tmp_path, 0)
    with subprocess.Popen([sys.executable, "-c", AGENT, str(tmp_path)], stdin=-1, stdout=-1) as agent:
        assert agent.stdin is not None
        assert agent.stdout is not None
        assert json.loads(agent.stdout.readline())["stop"] == ""
        agent.send_signal(signal.SIGTERM)
        while not ends and json.loads(agent.stdout.readline())["stop"] != "SIGTERM":
            pass
        agent.stdin.write(END)
        agent.stdin.flush()
        rest = [json.loads(line)["stop"] for line in agent.stdout]
        assert not ends or rest[-1] == "SIGTERM"
        assert agent.wait(60) == 0
    del beat


def test_what_agents_report_as_they_end_is_read(tmp_path: Path) -> None:
    last = encode_report(Report("node1", [], stop="SIGUSR2"))
    words = ["sh", "-c", f"echo '{encode_report(Report('node1', []))}'; read order; echo '{last}'"]
    made = AgentReports(
        lambda _: subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE), SrunErrors(tmp_path / "err")
    )
    made.read(0.2)
    assert made.nodes
    assert made.stop_signal == ""
    made.close()
    assert made.stop_signal == "SIGUSR2"


def test_an_agent_that_hears_nothing_finds_out_whether_the_job_has_lost_its_supervisor(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    seconds, started = [100.0], []

    class Command:
        def __init__(self, words: list[str], **options: object) -> None:
            started.append((round(seconds[0]), words))

        def poll(self) -> int:
            return codes[-1]

    codes = [0]
    monkeypatch.setattr("time.monotonic", lambda: seconds[0])
    monkeypatch.setattr("subprocess.Popen", Command)
    watch = SupervisorWatch(["look"])
    gone = [RankView(0, Phase.STEP, 1, 0.0, 10.0, GONE)]

    def stay_silent(wait: float, views: list[RankView] = gone, stops: bool = False) -> bool:
        for _ in range(int(2 * wait)):
            seconds[0] += 0.5
            left = watch.has_left(views, stops)
        return left

    for _ in range(20):
        assert not stay_silent(9)
        watch.hear()
    assert not stay_silent(6.5, gone, stops=True), "two signs of life may come late"
    assert stay_silent(1, gone, stops=True), "Slurm waits for it with the end of the job"
    assert not stay_silent(1, [RankView(0, Phase.STEP, 1, 0.0, 10.0, "R")], stops=True), "its rank is there"
    watch.hear()
    assert started == []
    assert not stay_silent(22)
    assert [words for _, words in started] == [["look"]] * 3, "every five seconds from the tenth on"
    alive = [RankView(0, Phase.STEP, 1, 0.0, 10.0, "R")]
    assert not stay_silent(60, alive), "its rank is there"
    assert stay_silent(1)
    codes.append(EXIT_REQUEUE)
    assert stay_silent(1, alive), "Slurm waits for it with the requeue"


@pytest.mark.parametrize(
    ("text", "host"),
    [
        ("RUNNING|node3|node[4-5]\n", "node3"),
        ("COMPLETING|node3|node[4-5]\n", "node3"),
        ("FAILED|node3|node[4-5]\n", "node3"),
        ("RUNNING|node3|node[3-5]\n", None),
        ("CANCELLED|node3|node[4-5]\n", None),
        ("PENDING||\n", None),
        ("", None),
    ],
)
def test_a_job_has_lost_its_script_if_slurm_has_taken_the_node_from_it(text: str, host: str | None) -> None:
    """As squeue of Slurm 22.05 prints it after `scontrol update nodename=node3 state=down`."""
    assert find_lost_host(text) == host


@pytest.mark.parametrize(
    ("text", "left"),
    [("RUNNING|node3|node[4-5]", False), ("FAILED|node4|node[3,5]", True), ("PENDING||", True), ("", False)],
)
def test_an_agent_leaves_whose_node_is_no_longer_in_the_job(text: str, left: bool) -> None:
    """Where it stayed, Slurm could not start the job there again (duplicate job id), and would drain the node."""
    assert is_out_of_job(text, "node4") == left


def test_the_supervisor_says_that_it_is_there(
    reports: AgentReports, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sent: list[bytes] = []
    monkeypatch.setattr(reports, "send", sent.append)
    reports.read(0.1)
    assert sent == []
    reports._ping_due = 0.0
    reports.read(0.1)
    reports.read(0.1)
    assert sent == [PING]


def test_agents_that_report_are_left_alone(reports: AgentReports) -> None:
    assert not reports.start_again()


def test_when_an_agent_was_killed_the_others_leave_and_all_start_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(agent_reports, "_AGENTS_AGAIN_SECONDS", 0.0)
    orders, errors = tmp_path / "orders", tmp_path / "agents.err"
    errors.write_text("srun: error: node1: task 0: Killed\n")  # of agents of an earlier supervisor
    words = ["sh", "-c", f"head -n 1 >> {orders}"]
    made = AgentReports(
        lambda _: subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE), SrunErrors(errors)
    )
    made.read(0.1)
    assert not made.start_again()
    with errors.open("a") as file:
        file.write("srun: error: node2: task 1: Killed\n")
    assert not made.start_again(), "the others have to end first"
    made.read(0.5)
    assert made.ended
    assert made.start_again()
    made.read(0.1)
    assert not made.start_again()
    made.close()
    assert orders.read_text() == "leave\nend\n"


def test_agents_of_which_none_begins_are_started_again_more_and_more_patiently(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(agent_reports, "_AGENTS_AGAIN_SECONDS", 0.0)
    monkeypatch.setattr(agent_reports, "END_SECONDS", 0.1)
    report, starts = encode_report(Report("node1", [])), []

    def start(_: Mapping[Phase, float]) -> subprocess.Popen[bytes]:
        starts.append(time.monotonic())
        words = ["sleep", "60"] if len(starts) < 3 else ["sh", "-c", f"echo '{report}'; exec sleep 60"]
        return subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE)

    made = AgentReports(start, SrunErrors(tmp_path / "agents.err"), _patience=0.3)
    for _ in range(30):
        made.start_again()
        made.read(0.1)
    made.close(0.1)
    assert len(starts) == 3
    assert 0.3 <= starts[1] - starts[0] < starts[2] - starts[1]
    assert starts[2] - starts[1] >= 0.6


def test_signals_go_to_the_ranks_whatever_else_runs_in_their_job(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As a shell of `hpc-train attach`, which is the newest step. The older step of ranks has lost a node."""
    steps = ("7.batch|batch", "7.0|ranks", "7.1|agents", "7.9|ranks", "7.10|agents", "7.11|bash", "7.12|probe")
    for name, script in (("squeue", f"printf '%s\\n' {shlex.join(steps)}"), ("scancel", "")):
        (tmp_path / name).write_text(f"#!/bin/sh\necho {name} $* >>{tmp_path}/calls\n{script}\n")
        (tmp_path / name).chmod(0o700)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    for scancel in (signal_step("7", RANKS, signal.SIGUSR1), signal_step("7", AGENTS, signal.SIGKILL)):
        assert scancel is not None
        scancel.wait()
    assert signal_step("7", "bench", signal.SIGKILL) is None
    calls = [line for line in (tmp_path / "calls").read_text().splitlines() if line.startswith("scancel")]
    assert sorted(calls, reverse=True) == ["scancel --signal=USR1 7.9", "scancel --signal=KILL 7.10"]


def test_ranks_are_ended_some_time_after_a_peer_has_failed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = [100.0]
    monkeypatch.setattr(srun_errors.time, "monotonic", lambda: clock[0])
    errors = tmp_path / "srun.err"
    failures = PeerFailures(SrunErrors(errors))
    assert not failures.are_due(), "srun has said nothing yet"
    errors.write_text("srun: error: node1: task 0: Exited with exit code 75\nsrun: error: node2: task 1: Kil")
    assert not failures.are_due()
    clock[0] += srun_errors._PEER_SECONDS + 1
    assert not failures.are_due(), "all ranks stop on purpose, and may save"
    with errors.open("a") as file:
        file.write("led\n")
    assert not failures.are_due()
    clock[0] += srun_errors._PEER_SECONDS - 0.5
    assert not failures.are_due()
    clock[0] += 1
    assert failures.are_due()


def test_a_second_supervisor_leaves_and_one_that_was_killed_can_be_replaced(tmp_path: Path) -> None:
    logs = tmp_path / "logs" / "0"
    logs.mkdir(parents=True)
    hang = {f"{name}_seconds": 60 for name in ("step", "first_step", "start", "load", "save")}
    resilience = {"watch": True, "act": True, "notice": {}, "hang": {**hang, "factor": 5}}
    config = {"resilience": resilience, "parallel": {"compile": False}}
    (tmp_path / "job.json").write_text(json.dumps({"config": config}))
    claim = "import sys; from pathlib import Path; from hpc_train.launch.slurm.supervisor.supervise import claim_ranks"
    hold = f"{claim}; print(claim_ranks(Path(sys.argv[1])), flush=True); sys.stdin.read()"
    first = subprocess.Popen([sys.executable, "-c", hold, logs], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    with first:
        assert first.stdout is not None
        assert first.stdout.readline() == b"True\n"
        second = subprocess.run(
            [sys.executable, "-P", "-m", "hpc_train.launch.slurm.supervisor.supervise", logs, *[str(os.getpid())] * 2],
            capture_output=True,
            text=True,
            check=True,
        )
        assert second.stdout == "hpc-train: another supervisor watches these ranks; this one leaves\n"
        assert not (tmp_path / "events.jsonl").exists()
        first.kill()
    again = [sys.executable, "-c", f"{claim}; sys.exit(not claim_ranks(Path(sys.argv[1])))", logs]
    assert subprocess.run(again, check=False).returncode == 0
