"""Faults on a real Slurm: noticed by the agents and survived in the same allocation, with the numbers of a run without.

Takes minutes: a hang is noticed after ten seconds, and each start of the ranks imports torch.
"""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path

import pytest
from slurm_client import SlurmCluster, slurm_conf
from training_client import (
    assert_same_result,
    find_script,
    hpc_train,
    kinds,
    lines,
    parent_of,
    pid_of_task,
    processes_with,
    steps_done,
    submit,
    tasks_of,
    variables_of,
    wait_until,
)

from hpc_train.resilience.heartbeat import find_folder

FAULTY = Path(__file__).parents[1] / "launch"
STEPS = 60
WATCHERS = ("hpc_train.resilience.agent", "hpc_train.launch.slurm.supervisor.supervise")
"""The agents first: those whose supervisor is killed stay beside the new ones until the ranks have ended."""


@pytest.fixture(scope="module")
def slurm_cluster(second_cluster: Path) -> Iterator[SlurmCluster]:
    """The second cluster, in place of the one that the other tests of Slurm share."""
    conf = slurm_conf(second_cluster)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SLURM_CONF", str(conf))
        yield SlurmCluster(conf, second_cluster)


@pytest.fixture(scope="module")
def settings(store: Path) -> list[str]:
    """A model that does what a test asks for, on two nodes with one rank each."""
    model = ["model=custom", "model.module=faulty_model", "model.name=faulty", "train.sequence_length=16"]
    batch = ["train.global_batch=4", "train.micro_batch=2", f"train.steps={STEPS}", "checkpoint.every=20"]
    rest = ["train.eval_every=0", "train.tensorboard=false", "train.noise_scale.every=0", "cluster.node.ranks=1"]
    return [*model, *batch, *rest, "data=text", f"data.path={store}", "launch.export=[FAULTS,FAULT_FOLDER]"]


def start(run: Path, settings: list[str], *more: str, faults: str = "") -> str:
    """Submit a run with faults; returns the job id."""
    python = os.pathsep.join(filter(None, [str(FAULTY), os.environ.get("PYTHONPATH", "")]))
    run.parent.mkdir(parents=True, exist_ok=True)
    return submit(run, *settings, *more, FAULTS=faults, FAULT_FOLDER=str(run.parent), PYTHONPATH=python)


@pytest.fixture(scope="module")
def undisturbed(slurm_cluster: SlurmCluster, settings: list[str], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The run without faults."""
    run = tmp_path_factory.mktemp("undisturbed") / "run"
    slurm_cluster.wait_for_state(start(run, settings), "COMPLETED", timeout=180)
    return run


@pytest.fixture(autouse=True)
def _no_job_outlives_its_test(slurm_cluster: SlurmCluster, tmp_path: Path) -> Iterator[None]:
    yield
    for job in slurm_cluster.squeue("-o", "%A %Z"):
        slurm_cluster.scancel(job.split()[0])


@pytest.mark.long
def test_a_rank_that_is_stopped_again_and_again_for_a_moment_is_only_slow(
    slurm_cluster: SlurmCluster,
    settings: list[str],
    undisturbed: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As under `cpulimit`, for longer in all than a rank may be stopped."""
    monkeypatch.setenv("STEP_SECONDS", "0.1")
    run = tmp_path / "run"
    job = start(run, settings, "launch.export=[FAULTS,FAULT_FOLDER,STEP_SECONDS]")
    wait_until("steps", lambda: steps_done(run) > 3)
    rank, end = pid_of_task(run, 1), time.monotonic() + 15
    while time.monotonic() < end:
        os.kill(rank, signal.SIGSTOP)
        time.sleep(0.85)
        os.kill(rank, signal.SIGCONT)
        time.sleep(0.15)
    (tmp_path / "fast").touch()
    slurm_cluster.wait_for_state(job, "COMPLETED", timeout=120)
    assert {"hang", "restart", "failure"} & set(kinds(run)) == set()
    assert_same_result(run, undisturbed, STEPS)


def test_a_killed_rank_starts_again_in_the_same_job(
    slurm_cluster: SlurmCluster, settings: list[str], undisturbed: Path, tmp_path: Path
) -> None:
    """The second one after its slurmstepd, so that srun hears of its peer alone."""
    run = tmp_path / "run"
    job = start(run, settings, faults="0:train:15:kill 1:train:33:hold")
    wait_until("the hold", lambda: (tmp_path / "1:train:33:hold").exists())
    hosts, rank = hosts_of(run), pid_of_task(run, 1)
    os.kill(parent_of(rank), signal.SIGKILL)
    os.kill(rank, signal.SIGKILL)
    slurm_cluster.wait_for_state(job, "COMPLETED", timeout=240)
    assert_same_result(run, undisturbed, STEPS)
    restarts = [event for event in lines(run / "events.jsonl") if event["event"] == "restart"]
    assert [(event["cause"], event["host"]) for event in restarts] == [
        ("a rank was killed", hosts[0]),
        ("a rank was killed", hosts[1]),
    ]
    starts = [json.loads((run / "logs" / name / "attempt.json").read_text()) for name in ("0", "1", "2")]
    assert {attempt["job_id"] for attempt in starts} == {job}
    assert "requeue" not in kinds(run)


def test_a_stopped_rank_is_named_with_its_node_and_the_job_goes_on(
    slurm_cluster: SlurmCluster, settings: list[str], undisturbed: Path, tmp_path: Path
) -> None:
    run = tmp_path / "run"
    job = start(run, settings, faults="1:train:33:stop")
    slurm_cluster.wait_for_state(job, "COMPLETED", timeout=240)
    assert_same_result(run, undisturbed, STEPS)
    (hang,) = (event for event in lines(run / "events.jsonl") if event["event"] == "hang")
    hosts = hosts_of(run)
    assert f"task 1 on {hosts[1]} has been in a step" in hang["why"]
    assert "stopped by a signal" in hang["why"]
    report = json.loads((run / "logs" / "0" / hang["folder"] / "report.json").read_text())
    assert report["host"] == hosts[1]
    machines = json.loads((run / "logs" / "0" / hang["folder"] / "machine.json").read_text())
    assert set(machines[hosts[1]]) == {"kernel", "ports"}
    assert [event["cause"] for event in lines(run / "events.jsonl") if event["event"] == "restart"] == ["a hang"]


def test_faults_of_other_kinds_one_after_another(
    slurm_cluster: SlurmCluster, settings: list[str], undisturbed: Path, tmp_path: Path
) -> None:
    """A system call that does not return, a segmentation fault, and an exit without a word once a save is there.

    On two nodes: one that is to blame twice for a rank that was killed, or that hung, would be left out.
    """
    run = tmp_path / "run"
    limit = "resilience.hang.first_step_seconds=12"
    job = start(run, settings, limit, faults="0:train:5:disk 1:train:33:segfault 1:train:34:exit")
    slurm_cluster.wait_for_state(job, "COMPLETED", timeout=240)
    assert_same_result(run, undisturbed, STEPS)
    hosts = hosts_of(run)
    restarts = [event for event in lines(run / "events.jsonl") if event["event"] == "restart"]
    assert [(event["cause"], event["host"]) for event in restarts] == [
        ("a hang", hosts[0]),
        ("a rank was killed", hosts[1]),
        ("an exception", hosts[1]),
    ]
    (hang,) = (event for event in lines(run / "events.jsonl") if event["event"] == "hang")
    assert "task 0" in hang["why"]
    assert "requeue" not in kinds(run)


def watchers(run: Path, process: str) -> list[int]:
    """Return the processes of a run's supervisor or of its agents, without the srun that starts them."""
    return processes_with(process, str(run / "logs"))


def replace_watcher(run: Path, process: str) -> None:
    """Kill a process that watches a run, and wait until others have taken the place of all like it."""
    first = watchers(run, process)
    os.kill(first[0], signal.SIGKILL)
    wait_until(f"another {process}", lambda: len({*watchers(run, process)} - {*first}) >= len(first), timeout=30)


def test_a_watcher_that_dies_ends_nothing_and_is_started_again(
    slurm_cluster: SlurmCluster, settings: list[str], undisturbed: Path, tmp_path: Path
) -> None:
    run = tmp_path / "run"
    job = start(run, settings, faults="0:train:30:hold")
    wait_until("the hold", lambda: (tmp_path / "0:train:30:hold").exists())
    for process in WATCHERS:
        replace_watcher(run, process)
        assert sorted(tasks_of(run)) == [0, 1]
    (tmp_path / "go").touch()
    slurm_cluster.wait_for_state(job, "COMPLETED", timeout=120)
    assert_same_result(run, undisturbed, STEPS)
    assert kinds(run).count("watch") == len(WATCHERS)
    assert "restart" not in kinds(run)
    wait_until("the end of all watchers", lambda: not [one for process in WATCHERS for one in watchers(run, process)])
    for node in hosts_of(run).values():
        assert find_folder(run / "logs/0").name not in slurm_cluster.dev_cluster("exec", node, "ls", "/dev/shm")


def test_a_rank_that_hangs_without_its_slurmstepd_is_ended(
    slurm_cluster: SlurmCluster, settings: list[str], undisturbed: Path, tmp_path: Path
) -> None:
    run = tmp_path / "run"
    job = start(run, settings, "resilience.hang.first_step_seconds=12", faults="1:train:33:hold")
    wait_until("the hold", lambda: (tmp_path / "1:train:33:hold").exists())
    rank = pid_of_task(run, 1)
    os.kill(parent_of(rank), signal.SIGKILL)
    slurm_cluster.wait_for_state(job, "COMPLETED", timeout=120)
    assert not Path(f"/proc/{rank}").exists()
    assert_same_result(run, undisturbed, STEPS)
    assert [event["cause"] for event in lines(run / "events.jsonl") if event["event"] == "restart"] == ["a hang"]


@pytest.mark.long
@pytest.mark.parametrize(("task", "slow"), [(0, False), (1, False), (1, True)])
def test_an_agent_that_is_stopped_is_started_again_and_its_node_is_not_lost(
    slurm_cluster: SlurmCluster, settings: list[str], tmp_path: Path, task: int, slow: bool
) -> None:
    """Task 0 runs on the node of the supervisor. slow: a step takes longer than a node may be silent."""
    run = tmp_path / "run"
    words = ["train.steps=1000000", "resilience.hang.step_seconds=300"]
    job = start(run, settings, *words, faults="0:train:60:hold" if slow else "")
    wait_until("steps", lambda: steps_done(run) > 50)
    host = hosts_of(run)[task]

    def find_agents() -> list[int]:
        agents = processes_with("hpc_train.resilience.agent", str(run / "logs"))
        return [process for process in agents if variables_of(process).get("SLURMD_NODENAME") == host]

    (stopped,) = find_agents()
    os.kill(stopped, signal.SIGSTOP)
    wait_until("another agent", lambda: bool(set(find_agents()) - {stopped}), 60)
    wait_until("the end of the first", lambda: stopped not in find_agents(), 60)
    time.sleep(15)  # longer than a node may be silent
    assert not {"lost_node", "hang", "restart", "failure"} & set(kinds(run))
    assert kinds(run).count("watch") == 1
    slurm_cluster.scancel(job)


@pytest.mark.long
def test_a_job_that_loses_the_slurmstepd_of_its_script_goes_on(
    slurm_cluster: SlurmCluster, settings: list[str], undisturbed: Path, tmp_path: Path
) -> None:
    run = tmp_path / "run"
    job = start(run, settings, faults="1:train:33:hold")
    wait_until("the hold", lambda: (tmp_path / "1:train:33:hold").exists())
    os.kill(parent_of(find_script(job)), signal.SIGKILL)
    (tmp_path / "go").touch()
    slurm_cluster.wait_for_state(job, "COMPLETED", timeout=240)
    assert_same_result(run, undisturbed, STEPS)


def test_a_rank_that_dies_in_the_save_of_a_stop_is_counted_and_the_job_is_requeued(
    slurm_cluster: SlurmCluster, settings: list[str], undisturbed: Path, tmp_path: Path
) -> None:
    run = tmp_path / "run"
    job = start(run, settings, faults="0:train:30:listen 1:save:2:kill")
    wait_until("the hold", lambda: (tmp_path / "0:train:30:listen").exists())
    host = hosts_of(run)[1]
    slurm_cluster.command("scancel", "--signal=USR2", job)
    slurm_cluster.wait_for_state(job, "COMPLETED", timeout=240)
    assert_same_result(run, undisturbed, STEPS)
    assert [kind for kind in kinds(run) if kind in ("signal", "requeue", "restart")] == ["signal", "restart", "requeue"]
    (restart,) = (event for event in lines(run / "events.jsonl") if event["event"] == "restart")
    assert (restart["cause"], restart["host"], restart["action"]) == ("a rank was killed", host, "requeued")
    assert restart["why"].startswith("going on from step 20 as its ranks were to stop, by a requeue (restart 1 of 3")
    assert [(strike["host"], strike["weight"]) for strike in lines(run / "nodes.jsonl")] == [(host, 1)]


@pytest.mark.long
@pytest.mark.parametrize("fault", ["kill", "node", "hang"])
def test_ranks_that_fail_before_they_agree_to_stop_do_not_start_again_in_the_same_job(
    slurm_cluster: SlurmCluster, settings: list[str], undisturbed: Path, tmp_path: Path, fault: str
) -> None:
    """The signal comes while one of them holds; then it is killed, its node loses its power, or it is found to hang."""
    run = tmp_path / "run"
    words = ["launch.spares=1", "resilience.hang.first_step_seconds=12"]
    job = start(run, settings, *words, faults="1:train:33:hold")
    wait_until("the hold", lambda: (tmp_path / "1:train:33:hold").exists())
    host = hosts_of(run)[1]
    slurm_cluster.command("scancel", "--signal=TERM", job)
    if fault == "kill":
        os.kill(pid_of_task(run, 1), signal.SIGKILL)
    with slurm_cluster.powered_off(host) if fault == "node" else nullcontext():
        slurm_cluster.wait_for_state(job, "COMPLETED", timeout=240)
    assert_same_result(run, undisturbed, STEPS)
    (event,) = (event for event in lines(run / "events.jsonl") if event["event"] == "restart")
    assert (event["host"], event["action"]) == (host, "requeued")
    assert "as its ranks were to stop" in event["why"]


@pytest.mark.long
def test_a_signal_that_comes_between_two_attempts_is_not_lost(
    slurm_cluster: SlurmCluster, settings: list[str], undisturbed: Path, tmp_path: Path
) -> None:
    run = tmp_path / "run"
    job = start(run, settings, faults="1:train:33:kill")
    wait_until("the end of the first attempt", (run / "logs/0/result.json").exists, pause=0.002)
    slurm_cluster.command("scancel", "--signal=TERM", job)
    slurm_cluster.wait_for_state(job, "COMPLETED", timeout=240)
    assert_same_result(run, undisturbed, STEPS)
    assert slurm_cluster.job(job)["Restarts"] == "1"


@pytest.mark.long
def test_a_job_that_is_preempted_while_it_loads_is_requeued_within_its_grace_time(
    slurm_cluster: SlurmCluster, settings: list[str], undisturbed: Path, tmp_path: Path
) -> None:
    """Slurm would end it for good."""
    run = tmp_path / "run"
    slurm_cluster.scontrol("update", "partition=batch", "PreemptMode=CANCEL", "GraceTime=15")
    try:
        job = start(run, settings, faults="1:train:33:kill 1:load:1:nap20")
        wait_until("the load", (tmp_path / "1:load:1:nap20").exists)
        nodes = slurm_cluster.job(job)["NodeList"]
        words = ["--partition=urgent", "--nodes=2", f"--nodelist={nodes}", "--exclusive", "--output=/dev/null"]
        slurm_cluster.sbatch(*words, "--wrap", "sleep 1")
        slurm_cluster.wait_for_state(job, "COMPLETED", timeout=240)
    finally:
        slurm_cluster.scontrol("update", "partition=batch", "PreemptMode=REQUEUE", "GraceTime=0")
    assert_same_result(run, undisturbed, STEPS)
    restarts = [
        (event["cause"], event["action"]) for event in lines(run / "events.jsonl") if event["event"] == "restart"
    ]
    assert restarts == [("a rank was killed", "restarted"), ("it was preempted before a save", "requeued")]


def test_a_lost_node_is_left_out_when_the_job_comes_back(
    slurm_cluster: SlurmCluster, settings: list[str], tmp_path: Path
) -> None:
    run = tmp_path / "run"
    job = start(run, settings, "train.steps=1000000")
    wait_until("steps", lambda: steps_done(run) > 50)
    hosts = hosts_of(run)
    pid_of_task(run, 1)
    with slurm_cluster.powered_off(hosts[1]):
        wait_until("the requeue", lambda: "requeue" in kinds(run), timeout=60)
        wait_until("the exclusion", lambda: slurm_cluster.job(job).get("ExcNodeList") == hosts[1], timeout=20)
        slurm_cluster.scancel(job)
    lost = [event["why"] for event in lines(run / "events.jsonl") if event["event"] == "lost_node"]
    assert all(hosts[1] in why for why in lost)
    (again,) = (event for event in lines(run / "events.jsonl") if event["event"] == "restart")
    assert (again["cause"], again["host"], again["action"]) == ("a lost node", hosts[1], "requeued")
    assert [(strike["host"], strike["weight"]) for strike in lines(run / "nodes.jsonl")] == [(hosts[1], 2)]


@pytest.mark.long
def test_the_next_job_of_a_chain_leaves_a_lost_node_out(
    slurm_cluster: SlurmCluster, settings: list[str], undisturbed: Path, tmp_path: Path
) -> None:
    run = tmp_path / "run"
    start(run, settings, "launch.chain=2", faults="0:train:33:hold")
    wait_until("the hold", lambda: (tmp_path / "0:train:33:hold").exists())
    hosts = hosts_of(run)
    with slurm_cluster.powered_off(hosts[1]):
        wait_until("the next job", lambda: kinds(run).count("resume") == 1, timeout=90)
    wait_until("the end", lambda: not slurm_cluster.squeue("-o", "%A"))
    assert_same_result(run, undisturbed, STEPS)
    assert hosts[1] not in hosts_of(run).values()
    (again,) = (event for event in lines(run / "events.jsonl") if event["event"] == "restart")
    assert again["why"].startswith("going on from step 20 on other nodes, in the next job of the chain")


@pytest.mark.long
def test_a_lost_node_is_taken_again_where_slurm_has_no_other(
    slurm_cluster: SlurmCluster, settings: list[str], undisturbed: Path, tmp_path: Path
) -> None:
    run = tmp_path / "run"
    nodes = sorted(set(slurm_cluster.command("sinfo", "-hN", "-o", "%N").split()))
    job = start(run, settings, f"launch.exclude='{','.join(nodes[2:])}'", faults="0:train:33:hold")
    wait_until("the hold", lambda: (tmp_path / "0:train:33:hold").exists())
    hosts = hosts_of(run)
    with slurm_cluster.powered_off(hosts[1]):
        wait_until("the requeue", lambda: "requeue" in kinds(run), timeout=60)
    slurm_cluster.wait_for_state(job, "COMPLETED", timeout=120)
    assert_same_result(run, undisturbed, STEPS)
    assert set(hosts_of(run).values()) == set(nodes[:2])
    output = "".join(path.read_text() for path in (run / "logs").glob("job-*.log"))
    assert f"hpc-train: {hosts[1]} is not left out: Slurm has too few other nodes" in output


def test_a_spare_node_takes_over_in_the_same_job(
    slurm_cluster: SlurmCluster, settings: list[str], undisturbed: Path, tmp_path: Path
) -> None:
    run = tmp_path / "run"
    job = start(run, settings, "launch.spares=1", faults="0:train:33:hold")
    assert slurm_cluster.job(job)["NumNodes"].startswith("3")
    wait_until("the hold", lambda: (tmp_path / "0:train:33:hold").exists())
    before = hosts_of(run)
    with slurm_cluster.powered_off(before[1]):
        wait_until("the lost node", lambda: "restart" in kinds(run), timeout=60)
        slurm_cluster.wait_for_state(job, "COMPLETED", timeout=120)
    assert_same_result(run, undisturbed, STEPS)
    after = hosts_of(run)
    assert after[0] == before[0]
    assert after[1] not in before.values()
    assert "requeue" not in kinds(run)


@pytest.mark.long
@pytest.mark.parametrize("fault", ["hold", "kill"])
def test_a_job_that_loses_the_node_of_its_script_is_requeued_without_it(
    slurm_cluster: SlurmCluster, settings: list[str], undisturbed: Path, tmp_path: Path, fault: str
) -> None:
    """Slurm itself would leave a job with a spare node running, without any process, up to its time limit.

    kill: it is lost between two attempts, when no agent runs.
    """
    run = tmp_path / "run"
    job = start(run, settings, "launch.spares=1", faults=f"1:train:33:{fault}")
    if fault == "hold":
        wait_until("the hold", lambda: (tmp_path / "1:train:33:hold").exists())
    else:
        wait_until("the decision", lambda: "restart" in kinds(run))
    host = slurm_cluster.job(job)["BatchHost"]
    with slurm_cluster.powered_off(host):
        slurm_cluster.wait_for_state(job, "COMPLETED", timeout=240)
    assert_same_result(run, undisturbed, STEPS)
    (requeue,) = (event for event in lines(run / "events.jsonl") if event["event"] == "requeue")
    assert requeue["why"] == f"{host}, the node of the batch script, is lost"
    strikes = [(strike["host"], strike["weight"]) for strike in lines(run / "nodes.jsonl")]
    assert [strike for strike in strikes if strike[1] == 2] == [(host, 2)]
    assert host not in hosts_of(run).values()


@pytest.mark.long
def test_a_node_on_which_ranks_die_twice_is_replaced_by_a_spare(
    slurm_cluster: SlurmCluster, settings: list[str], undisturbed: Path, tmp_path: Path
) -> None:
    run = tmp_path / "run"
    job = start(run, settings, "launch.spares=1", faults="1:train:33:kill 1:train:15:kill")
    slurm_cluster.wait_for_state(job, "COMPLETED", timeout=240)
    assert_same_result(run, undisturbed, STEPS)
    nodes = [json.loads((run / "logs" / name / "attempt.json").read_text())["nodes"] for name in ("0", "1", "2")]
    assert nodes[0] == nodes[1]
    assert nodes[2] != nodes[1]
    assert "requeue" not in kinds(run)


@pytest.mark.long
def test_the_same_fault_again_and_again_ends_the_job_for_good(
    slurm_cluster: SlurmCluster, settings: list[str], tmp_path: Path
) -> None:
    run = tmp_path / "run"
    job = start(run, settings, "launch.max_attempts=1", faults="1:build:1:kill 1:train:3:kill 1:train:4:kill")
    slurm_cluster.wait_for_state(job, "FAILED", timeout=240)
    assert slurm_cluster.job(job)["ExitCode"] == "93:0"
    (last,) = (event for event in lines(run / "events.jsonl") if event["event"] == "gave_up")
    assert last["why"] == f"3 times in a row without a newer checkpoint: a rank was killed on {last['host']}"
    assert last["why"] in json.loads((run / "logs" / "2" / "result.json").read_text())["why"]
    assert last["why"] in hpc_train("status", str(run)).stdout


def hosts_of(run: Path) -> dict[int, str]:
    """Name of the node of each rank."""
    return {rank["rank"]: rank["host"] for rank in json.loads((run / "rankmap.json").read_text())["ranks"]}


@pytest.mark.long
def test_a_job_that_hangs_and_is_cancelled_says_which_rank_held_it_up(
    slurm_cluster: SlurmCluster, settings: list[str], tmp_path: Path
) -> None:
    """Long before the deadline of its first step; Slurm kills the ranks KillWait after scancel."""
    run = tmp_path / "run"
    job = start(run, settings, faults="1:train:2:hold")
    wait_until("the hold", lambda: (tmp_path / "1:train:2:hold").exists())
    slurm_cluster.scancel(job)
    slurm_cluster.wait_for_state(job, "CANCELLED", timeout=90)
    (late,) = (event for event in lines(run / "events.jsonl") if event["event"] == "late_end")
    assert f"rank 1 (task 1 on {hosts_of(run)[1]}) was in act (" in late["why"]
    report = json.loads((run / "logs/0" / late["folder"] / "report.json").read_text())
    assert (report["kind"], report["task"]) == ("late end", 1)


@pytest.mark.long
def test_a_notice_on_one_node_saves_and_requeues(
    slurm_cluster: SlurmCluster, settings: list[str], undisturbed: Path, tmp_path: Path
) -> None:
    run, said = tmp_path / "run", tmp_path / "notice"
    first = '[ "$SLURM_NODEID" = 1 ] && cat ' + str(said)
    command = f"resilience.notice.command=[bash,-c,'{first}']"
    job = start(run, settings, command, "resilience.notice.every_seconds=0.5", faults="0:train:30:listen")
    wait_until("the hold", lambda: (tmp_path / "0:train:30:listen").exists())
    said.write_text("taken away\n")
    wait_until("the notice", lambda: "notice" in kinds(run))
    said.unlink()
    slurm_cluster.wait_for_state(job, "COMPLETED", timeout=240)
    assert_same_result(run, undisturbed, STEPS)
    assert [kind for kind in kinds(run) if kind in ("notice", "requeue", "restart")] == ["notice", "requeue"]
