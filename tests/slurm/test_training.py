"""The road on a real Slurm: submit, train on several nodes, stop, requeue, lose a rank, lose a node.

Takes minutes, of waiting: Slurm's shortest time limit is one minute, a lost node is noticed after its timeouts, and
each job imports torch on four ranks.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import h5py
import pytest
from slurm_client import SlurmCluster
from training_client import (
    RANKS,
    TINY,
    assert_same_result,
    hpc_train,
    kinds,
    lines,
    pid_of_task,
    steps_done,
    submit,
    tasks_of,
    wait_until,
)

LATE = "late"
"""Name of the job that lives longer than one test."""
HOLDS = "0:train:2:listen"
FAULTY = Path(__file__).parents[1] / "launch"


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small token store on the file system that all nodes share."""
    path = tmp_path_factory.mktemp("store") / "text.h5"
    built = hpc_train("data", "build", str(path), str(Path(json.__file__).parent), str(Path(h5py.__file__).parent))
    assert built.returncode == 0, built.stderr
    return path


@pytest.fixture(scope="module")
def tiny(store: Path) -> list[str]:
    """A run of steps so short that it is the job around them which is tested."""
    return [*TINY, f"data.path={store}", "train.steps=300", "checkpoint.every=100", "train.eval_every=50"]


@pytest.fixture(scope="module")
def reference(slurm_cluster: SlurmCluster, tiny: list[str], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The run that nobody interrupts."""
    run = tmp_path_factory.mktemp("reference") / "run"
    slurm_cluster.wait_for_state(submit(run, *tiny), "COMPLETED", timeout=180)
    return run


@pytest.fixture(autouse=True)
def _no_job_outlives_its_test(slurm_cluster: SlurmCluster) -> Iterator[None]:
    yield
    for job in slurm_cluster.squeue("-o", "%i %j"):
        if not job.endswith(f" {LATE}"):
            slurm_cluster.scancel(job.split()[0])


@pytest.fixture(autouse=True, scope="module")
def short_of_time(
    slurm_cluster: SlurmCluster, store: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[str, Path]]:
    """A run whose time is up while others are tested: Slurm's shortest limit is a minute.

    The first attempt takes a step and waits to be stopped, the next one takes those that are left, so that it takes no
    time from the others, and but one node.
    """
    folder = tmp_path_factory.mktemp("short_of_time")
    model = ("model=custom", "model.module=faulty_model", "model.name=faulty", "train.sequence_length=16")
    batch = ("train.global_batch=2", "train.micro_batch=1", "train.steps=20", "train.noise_scale.every=0")
    limits = ("launch.time_minutes=1", "launch.signal_seconds=30", f"launch.name={LATE}", "cluster.nodes=1")
    python = os.pathsep.join(filter(None, [str(FAULTY), os.environ.get("PYTHONPATH", "")]))
    env = {"FAULTS": HOLDS, "FAULT_FOLDER": str(folder), "PYTHONPATH": python}
    export = "launch.export=[FAULTS,FAULT_FOLDER]"
    data = ("data=text", f"data.path={store}", "train.eval_every=0", "checkpoint.every=100000", export)
    job = submit(folder / "run", *model, *batch, *limits, *data, **env)
    yield job, folder / "run"
    slurm_cluster.command("scancel", job, check=False)


@pytest.mark.timeout(900)
def test_default_training_runs_to_its_end_on_two_nodes(slurm_cluster: SlurmCluster, tmp_path: Path) -> None:
    run = tmp_path / "run"
    # Half of the default's sequences: on two cores a step of all of them takes more than half a second.
    job = submit(run, "train.steps=100", "train.global_batch=8")
    slurm_cluster.wait_for_state(job, "COMPLETED", timeout=600)
    assert [line["step"] for line in lines(run / "metrics.jsonl")] == list(range(1, 101))
    last = lines(run / "metrics.jsonl")[-1]
    said = next(event["text"] for event in lines(run / "events.jsonl") if "unigram" in event.get("text", ""))
    assert last["validation_loss"] < float(re.findall(r"[0-9.]+", said.partition("unigram")[2])[0]) - 0.75
    ranks = json.loads((run / "rankmap.json").read_text())["ranks"]
    assert [rank["rank"] for rank in ranks] == [0, 1]
    assert len({rank["host"] for rank in ranks}) == 2
    tasks = sorted(path.name for path in (run / "logs/0").glob("task-*.log"))
    assert tasks == [f"task-{task}.log" for task in range(2)]


def test_ranks_started_by_srun_itself_join(
    slurm_cluster: SlurmCluster, tiny: list[str], reference: Path, tmp_path: Path
) -> None:
    run = tmp_path / "run"
    command = [sys.executable, "-m", "hpc_train", "train", *tiny, f"run_dir={run}"]
    slurm_cluster.srun("-N2", "-n2", f"--chdir={tmp_path}", "--export=ALL,OMP_NUM_THREADS=1", *command)
    assert_same_result(run, reference, 300)
    assert [path.name for path in tmp_path.iterdir()] == ["run"]


def test_dry_run_is_the_script_that_is_sent(slurm_cluster: SlurmCluster, tiny: list[str], tmp_path: Path) -> None:
    run = tmp_path / "it's $HOME; a run"
    short = ("cluster.nodes=1", "cluster.node.ranks=1", "train.steps=2", "launch.time_minutes=10")
    wanted = [*tiny, *short, f"run_dir={json.dumps(str(run))}"]
    dry = hpc_train("submit", "--dry-run", *wanted)
    assert dry.returncode == 0, dry.stderr
    assert not run.exists()
    sent = hpc_train("submit", "--json", *wanted)
    assert sent.returncode == 0, sent.stderr
    job = json.loads(sent.stdout)["job_id"]
    slurm_cluster.wait_for_state(job, "COMPLETED", timeout=120)
    assert (run / f".submitit/{job}_submission.sh").read_text().strip() == dry.stdout.strip()
    assert steps_done(run) == 2


def test_what_sbatch_refuses_is_one_line_and_leaves_nothing(slurm_cluster: SlurmCluster, tmp_path: Path) -> None:
    said = hpc_train("submit", *RANKS, f"run_dir={tmp_path}/run", "launch.partition=nowhere")
    assert said.returncode == 2
    assert len(said.stderr.splitlines()) == 1
    assert "invalid partition" in said.stderr.lower()
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("signals", [("USR2",), pytest.param(("USR2", "TERM"), marks=pytest.mark.long)], ids="-".join)
def test_stopped_job_is_requeued_and_ends_as_if_nothing_had_been(
    slurm_cluster: SlurmCluster, tiny: list[str], reference: Path, tmp_path: Path, signals: tuple[str, ...]
) -> None:
    run = tmp_path / "run"
    job = submit(run, *tiny)
    done = 0
    for name in signals:
        wait_until("20 more steps", lambda done=done: steps_done(run) >= done + 20)  # type: ignore[misc]
        slurm_cluster.command("scancel", f"--signal={name}", job)
        slurm_cluster.wait_for_state(job, "PENDING", timeout=60)
        done = steps_done(run)
        assert done < 200
        assert (run / f"checkpoints/step-{done}").is_dir()
    requeue_from_outside(slurm_cluster, job, run, len(signals) + 1)
    slurm_cluster.wait_for_state(job, "COMPLETED", timeout=180)
    assert slurm_cluster.job(job)["Restarts"] == str(len(signals) + 1)
    told = [kind for kind in kinds(run) if kind in ("start", "signal", "requeue", "resume", "end")]
    again = ["signal", "requeue", "resume"]
    assert told[: 1 + 3 * len(signals)] == ["start", *again * len(signals)]
    assert told[-2:] == ["resume", "end"]
    last = [event for event in lines(run / "events.jsonl") if event["event"] == "resume"][-1]
    assert last["step"] >= 200
    assert_same_result(run, reference, 300)


def requeue_from_outside(slurm_cluster: SlurmCluster, job: str, run: Path, attempt: int) -> None:
    """When step 200 is saved; it then goes on from disk."""
    wait_until("a checkpoint", lambda: (run / "checkpoints/step-200").is_dir())
    for pickled in (run / ".submitit").glob("*.pkl"):
        pickled.write_bytes(b"stale")  # what to run, and from where, is on disk in files of ours
    slurm_cluster.scontrol("requeue", job)
    wait_until("the next attempt", (run / f"logs/{attempt}").is_dir)


@pytest.mark.long
def test_signal_to_one_rank_while_torch_is_imported_stops_all(
    slurm_cluster: SlurmCluster, tiny: list[str], reference: Path, tmp_path: Path
) -> None:
    run = tmp_path / "run"
    job = submit(run, *tiny)
    wait_until("the first task", lambda: (run / "logs/0/task-1.log").exists())
    victim = pid_of_task(run, 1)
    os.kill(victim, signal.SIGUSR2)
    assert steps_done(run) == 0
    slurm_cluster.wait_for_state(job, "PENDING", timeout=90)
    assert steps_done(run) >= 1
    slurm_cluster.wait_for_state(job, "COMPLETED", timeout=180)
    assert_same_result(run, reference, 300)


def test_time_limit_is_a_stop_and_a_requeue(slurm_cluster: SlurmCluster, short_of_time: tuple[str, Path]) -> None:
    job, run = short_of_time
    wait_until("the requeue", lambda: "requeue" in kinds(run))
    signalled = next(event for event in lines(run / "events.jsonl") if event["event"] == "signal")
    assert signalled["saved"]
    wait_until("the next attempt", lambda: "resume" in kinds(run))
    resumed = next(event for event in lines(run / "events.jsonl") if event["event"] == "resume")
    assert resumed["step"] == signalled["step"]
    slurm_cluster.command("scancel", job, check=False)  # it may have ended by now


def test_cancelled_job_saves_and_stays_cancelled(slurm_cluster: SlurmCluster, tiny: list[str], tmp_path: Path) -> None:
    run = tmp_path / "run"
    job = submit(run, *tiny, "train.steps=100000", "checkpoint.every=100000")
    wait_until("step 20", lambda: steps_done(run) >= 20)
    slurm_cluster.scancel(job)
    slurm_cluster.wait_for_state(job, "CANCELLED")
    wait_until("the end of the batch script", lambda: tasks_of(run) == {} and not slurm_cluster.squeue("-j", job))
    time.sleep(3)
    assert slurm_cluster.job_state(job) == "CANCELLED"
    assert "requeue" not in kinds(run)


def test_dead_rank_ends_the_job_at_once_and_is_named(
    slurm_cluster: SlurmCluster, tiny: list[str], tmp_path: Path
) -> None:
    run = tmp_path / "run"
    job = submit(run, *tiny, "train.steps=100000", "resilience=off", "cluster.node.ranks=2")
    wait_until("step 20", lambda: steps_done(run) >= 20)
    os.kill(pid_of_task(run, 3), signal.SIGKILL)
    slurm_cluster.wait_for_state(job, "FAILED", timeout=30)
    failure = next(event for event in lines(run / "events.jsonl") if event["event"] == "failure")
    assert "task 3" in failure["why"]
    assert "Killed" in failure["why"]
    assert "requeue" not in kinds(run)
    assert tasks_of(run) == {}


@pytest.mark.long
def test_killed_node_requeues_the_job_elsewhere(
    slurm_cluster: SlurmCluster, tiny: list[str], reference: Path, tmp_path: Path
) -> None:
    run = tmp_path / "run"
    job = submit(run, *tiny, "train.steps=100000", "checkpoint.every=20")
    wait_until("a checkpoint", lambda: (run / "checkpoints").is_dir() and steps_done(run) >= 40)
    hosts = {rank["host"] for rank in json.loads((run / "rankmap.json").read_text())["ranks"]}
    with slurm_cluster.powered_off(sorted(hosts)[-1]):
        wait_until("the second attempt", lambda: "resume" in kinds(run), timeout=180)
        now = {rank["host"] for rank in json.loads((run / "rankmap.json").read_text())["ranks"]}
        assert sorted(hosts)[-1] not in now
        slurm_cluster.scancel(job)


@pytest.mark.long
@pytest.mark.timeout(600)
def test_lost_node_is_noticed_before_slurm_does(slurm_cluster: SlurmCluster, tiny: list[str], tmp_path: Path) -> None:
    run = tmp_path / "run"
    with contextlib.ExitStack() as patience:
        patience.enter_context(patient_controller(slurm_cluster))
        job = submit(run, *tiny, "train.steps=100000", "checkpoint.every=20")
        wait_until("a checkpoint", lambda: (run / "checkpoints").is_dir() and steps_done(run) >= 40)
        hosts = sorted({rank["host"] for rank in json.loads((run / "rankmap.json").read_text())["ranks"]})
        with slurm_cluster.powered_off(hosts[-1]):
            wait_until("the requeue", lambda: "requeue" in kinds(run), timeout=150)
            requeued = next(event for event in lines(run / "events.jsonl") if event["event"] == "requeue")
            assert requeued["why"] == "a node of the job does not answer"
            # Slurm starts a requeued job again when it has given up its old node. Not so that it goes back to it:
            # what ends the first attempt on a node that answers again may reach the second one, of the same job id.
            patience.close()
            wait_until("the second attempt", lambda: "resume" in kinds(run), timeout=240)
            slurm_cluster.scancel(job)


@contextlib.contextmanager
def patient_controller(slurm_cluster: SlurmCluster) -> Iterator[None]:
    """Slurm waits as long for a silent node as it does by default."""
    short = slurm_cluster.conf.read_text()
    try:
        slurm_cluster.conf.write_text(re.sub(r"(?m)^SlurmdTimeout=.*", "SlurmdTimeout=300", short))
        slurm_cluster.scontrol("reconfigure")
        yield
    finally:
        slurm_cluster.conf.write_text(short)
        slurm_cluster.scontrol("reconfigure")
