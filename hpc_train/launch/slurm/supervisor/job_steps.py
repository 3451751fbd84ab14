"""Signal and end the job steps of a Slurm job: the ranks, and the agents beside them."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from contextlib import suppress
from pathlib import Path

from hpc_train.launch.slurm.slurm_cli import run_client
from hpc_train.launch.slurm.supervisor.agent_reports import RANKS, AgentReports
from hpc_train.resilience.agent import KILL
from hpc_train.resilience.watch import GONE, read_process_state

LEFT_SRUN = "left-srun"
"""File in an attempt's log directory: the process id of an srun that has not ended after its ranks. The batch script
continues without it."""
SRUN_SECONDS = 6.0
"""How long srun has to end after its ranks were killed."""
SRUN_SECONDS_WITHOUT_A_NODE = 0.5
"""How long srun has to end if a node is lost: it would wait for that node as long as Slurm does."""


def signal_ranks(job: str, number: signal.Signals) -> None:
    """Signal the ranks of a job."""
    signal_step(job, RANKS, number)


def signal_step(job: str, name: str, number: signal.Signals) -> subprocess.Popen[bytes] | None:
    """Signal the newest step of this name. SIGKILL to the job as a whole would cancel it.

    An older step is one of an earlier attempt, which Slurm has not given up yet because a node of it was lost. Returns
    the scancel that does this, None without such a step. It acts at once, but then waits for all nodes of the job, also
    for lost ones, so that a caller in a hurry must not wait for it.
    """
    steps = [step for step, step_name in list_steps(job) if step_name == name]
    if not steps:
        return None
    newest = max(steps, key=lambda step: int(step.rpartition(".")[2]))
    return subprocess.Popen(["scancel", f"--signal={number.name.removeprefix('SIG')}", newest], start_new_session=True)


def end_ranks(logs: Path, job: str, srun: int, reports: AgentReports, seconds: float = SRUN_SECONDS) -> None:
    """Kill the ranks of a job, and leave their srun (a process id) if it has not ended `seconds` later."""
    kill_ranks(job, reports)
    wait_for_srun(srun, seconds)
    leave_srun(logs, srun)


def kill_ranks(job: str, reports: AgentReports) -> None:
    """Kill the ranks of a job, by its agents and by Slurm.

    By the agents, as a node whose slurmstepd was killed does not get Slurm's signal, and srun then waits for that node.
    """
    reports.send(KILL)
    signal_ranks(job, signal.SIGKILL)


def leave_srun(logs: Path, srun: int) -> None:
    """Have the batch script go on without an srun that has not ended after its ranks.

    It is not killed: the slurmstepd of a rank that has not yet told it how the rank ended would go on trying for more
    than a minute, for which Slurm takes a node out of service ("Kill task failed").
    """
    if not is_running(srun):
        return
    try:
        (logs / LEFT_SRUN).write_text(f"{srun}\n")
    except OSError:  # a full disk: rather a node that may be drained than a job that waits for ever
        with suppress(ProcessLookupError):
            os.kill(srun, signal.SIGKILL)


def end_stuck_srun(logs: Path, job: str, srun: int, reports: AgentReports) -> None:
    """End an srun (a process id) that has started no rank.

    Unlike an srun whose ranks have run it is killed, because it might still start them during the next attempt.
    """
    # First the ranks, in case srun has started some of them meanwhile.
    kill_ranks(job, reports)
    with suppress(ProcessLookupError):
        os.kill(srun, signal.SIGKILL)
    wait_for_srun(srun, SRUN_SECONDS)
    leave_srun(logs, srun)


def wait_for_srun(srun: int, seconds: float) -> None:
    """Wait until an srun (a process id) has ended, at most `seconds`."""
    end = time.monotonic() + seconds
    while is_running(srun) and time.monotonic() < end:
        time.sleep(0.1)


def list_steps(job: str) -> list[tuple[str, str]]:
    """Return id and name of each running step of a job."""
    answer = run_client(["squeue", "--steps", "--noheader", f"--jobs={job}", "--format=%i|%j"])
    pairs = (line.strip().partition("|") for line in answer.out.splitlines())
    return [(step, name) for step, _, name in pairs if step]


def is_running(process: int) -> bool:
    """Return whether a process exists and is not a zombie, for which its parent still has to wait."""
    return read_process_state(process) != GONE


def open_process(process: int) -> int | None:
    """Return a descriptor that is readable once a process has ended; None before Linux 5.3, and if there is none."""
    try:
        return os.pidfd_open(process)
    except OSError:
        return None
