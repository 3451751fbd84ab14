"""A client of the dev cluster for the tests, which uses Slurm's own commands."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

DEV_CLUSTER = Path(__file__).resolve().parents[2] / "slurm/dev-cluster"
SHAPE = ("--nodes", "4", "--cpus-per-node", "8", "--switches", "2")
FINAL = {"COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "OUT_OF_MEMORY", "DEADLINE", "BOOT_FAIL"}
PAUSE = 0.25
"""Seconds between two looks at Slurm, each of which is a process and a request to its controller."""
LAST_LINES = 30
"""Lines of a job's output that are shown if it ends as it should not."""


def dev_cluster(*arguments: str, directory: Path | None = None) -> subprocess.CompletedProcess[str]:
    """Run slurm/dev-cluster, on the default directory or another, and return its output."""
    chosen = {"HPC_TRAIN_DEV_CLUSTER": str(directory)} if directory else {}
    return subprocess.run(
        [sys.executable, str(DEV_CLUSTER), *arguments],
        env={**os.environ, **chosen},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        check=False,
    )


def train_to_the_end(cluster: SlurmCluster, run: Path, *overrides: str) -> None:
    """Submit one run and wait until it is done; a failure shows its logs."""
    words = [sys.executable, "-m", "hpc_train", "submit", "--json", f"run_dir={run}", *overrides]
    said = subprocess.run(words, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False)
    assert said.returncode == 0, said.stderr
    job = json.loads(said.stdout)["job_id"]
    state = cluster.wait_for_state(job, {"COMPLETED", "FAILED", "CANCELLED"}, timeout=200)
    assert state == "COMPLETED", "\n".join(log.read_text()[-3000:] for log in sorted((run / "logs/0").glob("*.log")))


def slurm_conf(directory: Path | None = None) -> Path:
    said = dev_cluster("env", directory=directory)
    assert said.returncode == 0, said.stderr
    return Path(said.stdout.strip().removeprefix("export SLURM_CONF="))


@dataclass(frozen=True)
class SlurmCluster:
    """A running dev cluster; job ids are sbatch's, `12` or `12_3` of an array."""

    conf: Path
    directory: Path | None = None

    def command(self, *words: str, check: bool = True) -> str:
        """Run one of Slurm's clients as from a login shell and return its stdout."""
        outside = {name: value for name, value in os.environ.items() if not name.startswith(("SLURM_", "SLURMD_"))}
        done = subprocess.run(
            words,
            env={**outside, "SLURM_CONF": str(self.conf)},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            check=False,
        )
        assert not check or done.returncode == 0, f"{' '.join(words)}: {done.stderr}"
        return done.stdout

    def srun(self, *words: str) -> list[str]:
        """Return the lines printed by the tasks, sorted."""
        return sorted(self.command("srun", *words).splitlines())

    def sbatch(self, *words: str) -> str:
        """Submit and return the job id."""
        return self.command("sbatch", "--parsable", *words).strip()

    def squeue(self, *words: str) -> list[str]:
        return self.command("squeue", "--noheader", *words).splitlines()

    def scancel(self, job_id: str) -> None:
        self.command("scancel", job_id)

    def scontrol(self, *words: str) -> str:
        return self.command("scontrol", *words)

    def sacct(self, job_id: str, *fields: str) -> list[tuple[str, ...]]:
        """Return one tuple of `fields` for each run of each (array) job, without steps but with requeued runs."""
        format = f"--format={','.join(fields)}"
        listed = self.command("sacct", "-X", "-D", "-n", "-P", "-j", job_id, format)
        return [tuple(line.split("|")) for line in listed.splitlines()]

    def wait_for_sacct(
        self, job_id: str, fields: Sequence[str], expected: Sequence[tuple[str, ...]], timeout: float = 30
    ) -> None:
        """Wait until accounting, which lags the end of a job a little, shows just the runs `expected`, in any order."""
        end = time.monotonic() + timeout
        while sorted(rows := self.sacct(job_id, *fields)) != sorted(expected):
            assert time.monotonic() < end, f"sacct shows {rows} of job {job_id} after {timeout:g} s, not {expected}"
            time.sleep(0.2)

    def job(self, job_id: str) -> dict[str, str]:
        """Return the fields of `scontrol show job`."""
        shown = self.scontrol("-o", "show", "job", job_id)
        return dict(word.split("=", 1) for word in shown.split() if "=" in word)

    def job_state(self, job_id: str) -> str:
        return self.job(job_id)["JobState"]

    def wait_for_state(self, job_id: str, states: str | set[str], timeout: float = 30) -> str:
        """Wait until the job is in one of `states`; another final state or `timeout` seconds fail the test."""
        wanted = {states} if isinstance(states, str) else states
        end = time.monotonic() + timeout
        while (state := self.job_state(job_id)) not in wanted:
            assert state not in FINAL, self._describe_end(job_id, f"ended {state}, not {wanted}")
            assert time.monotonic() < end, self._describe_wait(job_id, f"is {state} after {timeout:g} s, not {wanted}")
            time.sleep(PAUSE)
        return state

    def start_requeued_job(self, job_id: str) -> None:
        """Have a requeued job that waits start now, and not only after Slurm's delay (cred_expire).

        slurmd compares times in whole seconds: it refuses a job that comes again in the second in which it was ended
        ("Job credential revoked"), and Slurm then ends the job with exit code 1.
        """
        time.sleep(1.1)
        self.scontrol("update", f"job={job_id}", "starttime=now")

    def _describe_end(self, job_id: str, what: str) -> str:
        """Return how a job ended, with the last lines of its output."""
        job = self.job(job_id)
        try:
            output = "\n".join(Path(job["StdOut"]).read_text(errors="replace").splitlines()[-LAST_LINES:])
        except (OSError, KeyError) as error:
            output = f"no output: {error}"
        return f"job {job_id} {what}: {job}\n{output}"

    def _describe_wait(self, job_id: str, what: str) -> str:
        """Return why a job waits, in one line, and all nodes with the reasons that Slurm has for their states."""
        job = self.job(job_id)
        fields = " ".join(f"{name}={job.get(name)}" for name in ("Reason", "ReqNodeList", "ExcNodeList", "NumNodes"))
        return f"job {job_id} {what}: {fields}\n{self.command('sinfo', '-N', '-o', '%N %T %E')}"

    def wait_until_back(self, name: str, timeout: float = 120) -> None:
        """Wait until a node is there again: idle, or in a job that has not lost it."""
        end = time.monotonic() + timeout
        while (state := self.node_state(name)) not in ("idle", "drained", "allocated", "mixed"):
            assert time.monotonic() < end, f"{name} is {state} after {timeout:g} s"
            time.sleep(0.5)

    def resume_drained_nodes(self) -> dict[str, str]:
        """Give the nodes back that Slurm has drained as it could not end a task there, as an administrator would.

        Returns the nodes, with Slurm's reasons. That happens up to UnkillableStepTimeout after the end of the job, or
        after the node was without a network for so long that its slurmstepd could not say how a rank had ended.
        """
        nodes = (
            line.split(maxsplit=2)
            for line in self.command("sinfo", "-hN", "-p", "batch", "-o", "%N %T %E").splitlines()
        )
        drained = {name: why for name, state, why in nodes if state.startswith("drain") and "Kill task failed" in why}
        for name in drained:
            self.scontrol("update", f"nodename={name}", "state=resume")
        return drained

    def wait_for_node(self, name: str, state: str = "idle", timeout: float = 60) -> None:
        end = time.monotonic() + timeout
        while (now := self.node_state(name)) != state:
            assert time.monotonic() < end, f"{name} is {now} after {timeout:g} s, not {state}"
            time.sleep(PAUSE)

    def wait_for_idle_nodes(self, timeout: float) -> None:
        """Wait until all nodes are idle. Those that Slurm drains meanwhile come back; see resume_drained_nodes."""
        end = time.monotonic() + timeout
        while set(states := self.command("sinfo", "-hN", "-p", "batch", "-o", "%T").split()) != {"idle"}:
            assert time.monotonic() < end, f"nodes are {', '.join(states)} after {timeout:g} s, not idle"
            self.resume_drained_nodes()
            time.sleep(PAUSE)

    def node_state(self, name: str) -> str:
        return self.command("sinfo", "-h", "-N", "-p", "batch", "-n", name, "-o", "%T").strip()

    def kill_node(self, name: str) -> None:
        """Take the power from a node; Slurm notices after about half a minute."""
        self.dev_cluster("node", "kill", name)

    def boot_node(self, name: str) -> None:
        self.dev_cluster("node", "boot", name)

    @contextlib.contextmanager
    def powered_off(self, name: str) -> Iterator[None]:
        """Keep a node switched off in this context; afterwards it is idle again."""
        self.kill_node(name)
        try:
            yield
        finally:
            self.boot_node(name)
            self.wait_until_back(name)

    def dev_cluster(self, *arguments: str) -> str:
        done = dev_cluster(*arguments, directory=self.directory)
        assert done.returncode == 0, done.stderr
        return done.stdout
