"""The truth about runs on a real Slurm: they end in every way there is, and `status` is right about each.

Takes over a minute, of waiting: Slurm's shortest time limit is one minute, and most ways to end are had beside it.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from slurm_client import SlurmCluster, dev_cluster, slurm_conf
from sweep_client import look_at
from token_stores import build_store

from hpc_train.launch.state.attempts import read_attempts

FAULTY = Path(__file__).parents[1] / "launch"
ONE = ("cluster.nodes=1", "cluster.node.ranks=1", "cluster.slurm.exclusive=false", "launch.threads=1")
TINY = (
    *("model=custom", "model.module=faulty_model", "model.name=faulty", "train.sequence_length=16"),
    *("train.global_batch=2", "train.micro_batch=2", "train.eval_every=0", "train.noise_scale.every=0"),
    *("train.tensorboard=false", "train.steps=3", "checkpoint.every=100", "launch.time_minutes=5"),
)

HANGS, HOLDS, LISTENS = "0:train:2:hold", "0:train:1:hold", "0:train:2:listen"


@dataclass(frozen=True)
class Sweep:
    """Runs beside one another, as a sweep lays them out."""

    path: Path
    store: Path

    def run_dir(self, name: str) -> Path:
        return self.path / "points" / name

    def submit(self, name: str, *overrides: str, faults: str = "", options: tuple[str, ...] = ()) -> str:
        """The job id."""
        folder = self.path / "faults" / name
        folder.mkdir(parents=True, exist_ok=True)
        data = ("data=text", f"data.path={self.store}", f"run_dir={self.run_dir(name)}")
        export = "launch.export=[FAULTS,FAULT_FOLDER]"
        words = ("submit", "--json", *options, *ONE, *TINY, *data, export, *overrides)
        said = hpc_train(*words, FAULTS=faults, FAULT_FOLDER=str(folder), PYTHONPATH=python_path())
        assert said.returncode == 0, said.stderr
        return str(json.loads(said.stdout)["job_id"])

    def wait_for_fault(self, name: str, fault: str) -> None:
        wait_until(f"{fault} of {name}", (self.path / "faults" / name / fault).exists)

    def states(self) -> dict[str, str]:
        return {name: row["state"] for name, row in look_at(self.path).items()}

    def rows(self) -> dict[str, dict[str, Any]]:
        return {row["point"]: row for row in status(self.path)}


def python_path() -> str:
    return os.pathsep.join(filter(None, [str(FAULTY), os.environ.get("PYTHONPATH", "")]))


def hpc_train(*words: str, **env: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "hpc_train", *words],
        env={**os.environ, **env},
        capture_output=True,
        text=True,
        stdin=subprocess.DEVNULL,
        check=False,
    )


def follow(run: Path, to: Path) -> subprocess.Popen[bytes]:
    with to.open("w") as file:
        words = [sys.executable, "-m", "hpc_train", "logs", "-f", str(run)]
        return subprocess.Popen(words, stdout=file, stdin=subprocess.DEVNULL)


def status(run: Path | str) -> list[dict[str, Any]]:
    said = hpc_train("status", "--json", str(run))
    assert said.returncode == 0, said.stderr
    rows: list[dict[str, Any]] = json.loads(said.stdout)
    keys = ["point", "job_id", "attempt", "state", "reason", "nodes", "exit_code", "step", "steps", "loss"]
    keys += ["seconds_since_step", "warnings", "faults", "skipped_steps", "passed_over"]
    assert all(list(row) == keys for row in rows)
    return rows


def wait_until(what: str, true: Callable[[], Any], timeout: float = 150) -> None:
    end = time.monotonic() + timeout
    while not true():
        assert time.monotonic() < end, f"not within {timeout:g} s: {what}"
        time.sleep(0.2)


def kill_everything(job_id: str, conf: Path) -> None:
    """SIGKILL to the batch script of a job, then to its ranks: nobody is left to tell."""
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        try:
            command, environ = (process / "cmdline").read_bytes(), (process / "environ").read_bytes().split(b"\0")
        except OSError:
            continue
        if {f"SLURM_JOB_ID={job_id}".encode(), f"SLURM_CONF={conf}".encode()} <= set(environ):
            found.append((b"slurm_script" not in command, b"slurmstepd" in command, int(process.name)))
    for _, of_slurm, process_id in sorted(found):
        if not of_slurm:
            with contextlib.suppress(ProcessLookupError):
                os.kill(process_id, signal.SIGKILL)


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small token store on the file system that all nodes share."""
    path = tmp_path_factory.mktemp("store") / "text.h5"
    build_store([str(Path(json.__file__).parent)], [".py"], "byte", 256, path)
    return path


@pytest.fixture
def sweep(store: Path, tmp_path: Path) -> Sweep:
    (tmp_path / "points").mkdir()
    return Sweep(tmp_path, store)


@pytest.fixture(autouse=True, scope="module")
def _no_job_outlives_its_tests(slurm_cluster: SlurmCluster) -> Iterator[None]:
    yield
    for job in slurm_cluster.squeue("-o", "%i"):
        slurm_cluster.scancel(job)


@pytest.fixture(autouse=True, scope="module")
def times_out(slurm_cluster: SlurmCluster, store: Path, tmp_path_factory: pytest.TempPathFactory) -> Sweep:
    """The job of the last test that times out: Slurm's shortest limit is a minute, in which the others run."""
    sweep = Sweep(tmp_path_factory.mktemp("late"), store)
    # Its only attempt: otherwise it would be requeued before the limit.
    late = sweep.submit("times_out", "launch.signal_seconds=10", "launch.max_attempts=1", faults=HANGS)
    sweep.wait_for_fault("times_out", HANGS)
    slurm_cluster.scontrol("update", f"JobId={late}", "TimeLimit=1")
    return sweep


def test_a_chain_goes_on_where_its_first_job_stopped_and_nothing_leaks_into_it(
    slurm_cluster: SlurmCluster, sweep: Sweep, monkeypatch: pytest.MonkeyPatch
) -> None:
    canary = os.urandom(8).hex()
    inherited = {"SLURM_CPU_BIND": "mask_cpu:0x1", "SLURM_NTASKS": "7", "SBATCH_ACCOUNT": "nobody", "PMI_RANK": "3"}
    for name, value in {**inherited, "MY_TOKEN": canary}.items():
        monkeypatch.setenv(name, value)
    run = sweep.run_dir("chain")
    job = sweep.submit(
        "chain", "launch.chain=3", "train.steps=50", "launch.setup=['env -0 >\"$logs/env\"']", faults=LISTENS
    )
    for name in inherited:
        monkeypatch.delenv(name)
    sweep.wait_for_fault("chain", LISTENS)
    row = sweep.rows()["chain"]
    assert (row["job_id"], row["state"], row["nodes"]) == (job, "RUNNING", ["node1"])
    attach = hpc_train("attach", str(run), "--rank", "0", "--", "printenv", "SLURMD_NODENAME", "SLURM_JOB_ID")
    assert attach.stdout.split() == ["node1", job], attach.stderr
    assert "--overlap" in hpc_train("attach", job, "--dry-run").stdout
    assert "has node1" in hpc_train("attach", str(run), "--node", "node9").stderr
    waits = hpc_train("submit", "--after", str(run), *ONE, *TINY)
    assert "a chain of jobs" in waits.stderr

    slurm_cluster.command("scancel", "--signal=USR2", job)
    wait_until("the end", lambda: sweep.states()["chain"] in ("DONE", "FAILED"))
    row = sweep.rows()["chain"]
    assert (row["state"], row["attempt"], row["exit_code"]) == ("DONE", 1, 0), row
    assert row["job_id"] != job
    name = slurm_cluster.job(job)["JobName"]
    wait_until("the cancelling of the last job", lambda: not slurm_cluster.squeue(f"--name={name}"))
    assert [it.result.then for it in read_attempts(run) if it.result] == ["chain", ""]
    seen = dict(item.split("=", 1) for item in (run / "logs/0/env").read_text().split("\0") if "=" in item)
    assert seen["SLURM_CONF"] == str(slurm_cluster.conf)
    assert seen["SLURM_NTASKS"] == "1"
    assert not {"SLURM_CPU_BIND", "SBATCH_ACCOUNT", "PMI_RANK", "MY_TOKEN"} & seen.keys()
    files = [path for path in run.rglob("*") if path.is_file()]
    assert [path for path in files if canary.encode() in path.read_bytes()] == []


def test_a_job_that_is_killed_is_failed_without_accounting_too(
    slurm_cluster: SlurmCluster, one_more_cluster: Path, sweep: Sweep, monkeypatch: pytest.MonkeyPatch
) -> None:
    up = dev_cluster("up", "--nodes", "1", "--cpus-per-node", "4", "--no-accounting", directory=one_more_cluster)
    assert up.returncode == 0, up.stderr
    beside = SlurmCluster(slurm_conf(one_more_cluster), one_more_cluster)
    monkeypatch.setenv("SLURM_CONF", str(beside.conf))
    job = sweep.submit("no_accounting", faults=HOLDS)
    sweep.wait_for_fault("no_accounting", HOLDS)
    kill_everything(job, beside.conf)
    run = sweep.run_dir("no_accounting")
    wait_until("the end", lambda: "RUNNING" not in {row["state"] for row in look_at(run).values()}, timeout=30)
    (row,) = status(run)
    assert (row["state"], row["exit_code"]) == ("FAILED", 128 + signal.SIGKILL)
    monkeypatch.setenv("SLURM_CONF", str(slurm_cluster.conf))
    for told in (run / "events.jsonl", run / "logs/0/attempt.json"):
        told.write_text(told.read_text().replace(f'"job_id": "{job}"', '"job_id": "999999"'))
    (row,) = status(run)
    assert (row["state"], row["reason"].split(",")[0]) == ("FAILED", "Slurm does not know the job any more")


@pytest.mark.timeout(400)
def test_every_way_to_end_has_its_word(slurm_cluster: SlurmCluster, sweep: Sweep, times_out: Sweep) -> None:
    sweep.submit("loses_its_node", "launch.max_attempts=1", "+launch.extra.nodelist=node4", faults=HOLDS)
    requeued = sweep.submit("is_requeued", "train.steps=200", faults=LISTENS)
    killed = sweep.submit("is_killed", faults=HOLDS)
    sweep.submit("ends")
    sweep.submit("raises", faults="0:train:2:raise")
    sweep.submit("sets_up_badly", "launch.setup=['module load nothing_of_the_kind']")
    cancelled = sweep.submit("is_cancelled", "train.steps=100000", faults=LISTENS)
    follower = follow(sweep.run_dir("is_requeued"), sweep.path / "followed")
    waits = sweep.submit("waits", options=("--after", str(sweep.run_dir("is_killed"))))
    lost = sweep.submit("is_lost", "optim.lr=1e20", "optim.max_norm=null", "train.steps=6", "+launch.extra.hold=")
    sweep.submit("waits_too", options=("--after", str(sweep.run_dir("is_lost"))))
    slurm_cluster.scontrol("release", lost)
    hangs = sweep.submit("hangs", "launch.cancel_seconds=2", "train.steps=100000", faults=HANGS)
    nowhere = sweep.submit("is_not_there", "+launch.extra.hold=")
    away = sweep.run_dir("is_not_there").rename(sweep.path / "away")
    slurm_cluster.scontrol("release", nowhere)
    wait_until("Slurm's reason", lambda: look_at(sweep.path)["waits"]["reason"] == "Dependency")

    sweep.wait_for_fault("is_killed", HOLDS)
    assert sweep.states()["is_killed"] == "RUNNING"
    kill_everything(killed, slurm_cluster.conf)
    sweep.wait_for_fault("loses_its_node", HOLDS)
    with slurm_cluster.powered_off("node4"):
        sweep.wait_for_fault("is_cancelled", LISTENS)
        asked = hpc_train("cancel", str(sweep.run_dir("is_cancelled")))
        assert (asked.returncode, asked.stdout) == (0, f"job {cancelled}: asked to save and end\n"), asked.stderr
        sweep.wait_for_fault("hangs", HANGS)
        words = [sys.executable, "-m", "hpc_train", "cancel", str(sweep.run_dir("hangs"))]
        cancel = subprocess.Popen(words, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, text=True)
        sweep.wait_for_fault("is_requeued", LISTENS)
        slurm_cluster.scontrol("requeue", requeued)
        wait_until("the requeue", lambda: sweep.states()["is_requeued"] == "REQUEUED")
        unfinished = {"RUNNING", "PENDING", "REQUEUED"}
        wait_until("the end of one without a directory", lambda: slurm_cluster.job_state(nowhere) == "FAILED")
        away.rename(sweep.run_dir("is_not_there"))
        wait_until("the end of all", lambda: not unfinished & set(sweep.states().values()))
        wait_until("the end of the late one", lambda: not unfinished & set(times_out.states().values()))
    expected = {
        "ends": "DONE",
        "raises": "FAILED",
        "sets_up_badly": "FAILED",
        "is_killed": "FAILED",
        "is_lost": "FAILED",
        "waits_too": "CANCELLED",
        "hangs": "CANCELLED",
        "is_not_there": "FAILED",
        "waits": "CANCELLED",
        "is_cancelled": "CANCELLED",
        "is_requeued": "DONE",
        "loses_its_node": "NODE_FAIL",
    }
    said, _ = cancel.communicate(timeout=100)
    assert said.splitlines()[0] == f"job {hangs}: asked to save and end"
    assert "did not end within 2 s and was ended: rank 0 (task 0 on node" in said
    assert follower.wait(60) == 0
    parts = [sweep.run_dir("is_requeued") / f"logs/{attempt}/task-0.log" for attempt in (0, 1)]
    said = (sweep.path / "followed").read_text()
    assert said == f"==> attempt 1: {parts[1]} <==\n".join(part.read_text() for part in parts)
    rows = sweep.rows()
    assert {name: rows[name]["state"] for name in expected} == expected, rows
    assert rows["ends"] == {**rows["ends"], "attempt": 0, "reason": "", "exit_code": 0}
    assert rows["is_requeued"]["attempt"] == 1
    assert rows["raises"]["exit_code"] == 1
    assert rows["raises"]["reason"].endswith("RuntimeError: a fault of the user's model")
    assert rows["sets_up_badly"]["reason"] == "launch.setup failed"
    assert rows["sets_up_badly"]["exit_code"] not in (0, None)
    assert rows["is_killed"]["exit_code"] == 128 + signal.SIGKILL
    assert rows["is_killed"]["reason"].startswith("killed by signal 9 (SIGKILL")
    assert rows["is_killed"]["reason"].endswith("; it left no result")
    assert rows["waits"]["reason"] == rows["waits_too"]["reason"] == "DependencyNeverSatisfied"
    assert rows["is_lost"]["reason"].startswith("not done: the loss")
    assert (rows["is_lost"]["exit_code"], rows["is_lost"]["step"], rows["is_lost"]["steps"]) == (1, 6, 6)
    assert "in act (" in rows["hangs"]["reason"], "the function that the rank was in"
    assert rows["is_not_there"]["reason"].startswith("Slurm could not start it on node node")
    assert rows["loses_its_node"]["reason"] == "NodeDown"
    assert rows["is_killed"]["job_id"] == killed
    assert rows["waits"]["job_id"] == waits
    assert list((sweep.run_dir("is_cancelled") / "checkpoints").glob("step-*")), "it has saved"
    assert [it.result.then for it in read_attempts(sweep.run_dir("is_cancelled")) if it.result] == ["cancel"]
    assert slurm_cluster.job_state(cancelled) == "CANCELLED"
    (late,) = times_out.rows().values()
    assert (late["state"], late["reason"].split(":")[0]) == ("TIMEOUT", "TimeLimit"), late
    assert_time_limit_is_known_without_accounting(times_out)


def assert_time_limit_is_known_without_accounting(times_out: Sweep) -> None:
    """Slurm and its accounting have forgotten the job; only slurmstepd's log lines are left."""
    run = times_out.run_dir("times_out")
    job = times_out.rows()[run.name]["job_id"]
    for told in (run / "events.jsonl", run / "logs/0/attempt.json"):
        told.write_text(told.read_text().replace(f'"job_id": "{job}"', '"job_id": "999999"'))
    (run / f"logs/job-{job}.log").rename(run / "logs/job-999999.log")
    (row,) = status(run)
    assert (row["state"], row["reason"].split(":")[0]) == ("TIMEOUT", "TimeLimit"), row
