"""Give a job back to the queue whose batch script is gone with its node.

A job that outlives its nodes (sbatch --no-kill) also outlives the node of its batch script: Slurm takes that node from
the job, ends the steps that ran on it, and leaves the job running, without any process, up to its time limit. Agents
that hear nothing of the supervisor, and guards that hear nothing of the batch script (guard.sh), run this module:
`python -m hpc_train.launch.slurm.supervisor.lost_script LOGS`.
"""

from __future__ import annotations

import fcntl
import os
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

from hpc_train.cluster.hostlist import expand_hostlist
from hpc_train.errors import EXIT_REQUEUE
from hpc_train.launch.slurm.slurm_cli import current_job_id, run_client
from hpc_train.launch.state.attempts import RESULT_MARKER
from hpc_train.regular_files import read_json, read_text
from hpc_train.resilience.agent import name_this_node
from hpc_train.resilience.exclusion import EXCLUDE, HARDWARE, Strike, append_strike
from hpc_train.training.records.run_records import append_event

_CLAIM, _DONE = "lost-script.lock", "lost-script.done"
"""Files in an attempt's log directory: whose lock the node has that requeues the job, and that it has done so."""
_ASKING_NODES = 3
"""How many nodes ask Slurm: in a large job all of them would be too many at once."""
_ENDED_ON_PURPOSE = ("CANCELLED", "TIMEOUT", "COMPLETED", "PENDING")
_FIT_SECONDS = 8.0
"""How long it may take to ask Slurm for other nodes: this process may be ended KillWait after the batch script."""
_TRIES = 50
"""How often Slurm is asked to leave the lost node out, ten times a second."""


def make_lost_script_command(logs: str) -> list[str]:
    """Return the command that runs this module, for the agents."""
    return [sys.executable, "-P", "-m", "hpc_train.launch.slurm.supervisor.lost_script", logs]


def find_lost_host(text: str) -> str | None:
    """Return the node of the batch script if Slurm has taken it from the job; None if the job still has it, or ended.

    text: as squeue prints it with the format "%T|%B|%N": state, node of the batch script, nodes of the job.
    """
    state, script, nodes = _split_answer(text)
    if not script or not nodes or state in _ENDED_ON_PURPOSE:
        return None
    return None if script in expand_hostlist(nodes) else script


def is_out_of_job(text: str, node: str) -> bool:
    """Return whether this node runs nothing for the job any more, which was requeued or has lost the node."""
    state, _, nodes = _split_answer(text)
    return state == "PENDING" or (bool(nodes) and node not in expand_hostlist(nodes))


def _split_answer(text: str) -> tuple[str, str, str]:
    state, _, hosts = text.strip().partition("|")
    script, _, nodes = hosts.partition("|")
    return state, script, nodes


def requeue_without(logs: Path, job: str, host: str) -> bool:
    """Requeue the job, without the node of its batch script if Slurm has enough others; return whether it did.

    A job that may not run again is cancelled. Does nothing while another node does the same, or has done it.
    """
    if not _claim(logs) or (logs / _DONE).exists() or find_lost_host(_ask(job)) is None or _has_ended(logs.parent):
        return False
    if not _may_run_again(logs):
        return _cancel(logs, job, host)
    append_strike(logs.parents[1], Strike(host, HARDWARE, "does not answer", int(logs.name)))
    fit = [sys.executable, "-P", "-m", "hpc_train.launch.slurm.waiting_time", str(logs)]
    with suppress(OSError, subprocess.TimeoutExpired):
        subprocess.run(fit, stdin=subprocess.DEVNULL, capture_output=True, timeout=_FIT_SECONDS, check=False)
    if run_client(["scontrol", "requeue", job]).code:
        return False
    with suppress(OSError):  # Slurm's answers are those of before until the job has left its nodes
        (logs / _DONE).touch(0o600)
    why = f"{host}, the node of the batch script, is lost"
    append_event(logs.parents[1] / "events.jsonl", "requeue", int(logs.name), why=why)
    excluded = _read_exclusion(logs)
    for _ in range(_TRIES if excluded else 0):  # Slurm takes it as soon as the job no longer runs
        if run_client(["scontrol", "update", f"jobid={job}", f"ExcNodeList={excluded}"]).code == 0:
            break
        time.sleep(0.1)
    return True


def _claim(logs: Path) -> bool:
    """Return whether no other process of the job is about to requeue it; also where the file system has no locks.

    The lock is held until this process ends.
    """
    with suppress(OSError):
        descriptor = os.open(logs / _CLAIM, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o600)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(descriptor)
            return False
    return True


def _has_ended(all_logs: Path) -> bool:
    """Return whether the batch script came to its end: Slurm takes its node from a job that ends, too.

    A node without a network for a while may have missed that, and any number of attempts.
    """
    newest = max((int(folder.name) for folder in all_logs.iterdir() if folder.name.isdigit()), default=0)
    try:
        return bool(read_json(all_logs / str(newest) / RESULT_MARKER)["then"] != "restart")
    except (OSError, ValueError, KeyError, TypeError):
        return False


def _may_run_again(logs: Path) -> bool:
    runs = int(os.environ.get("SLURM_RESTART_COUNT", "0")) + 1
    try:
        return bool(runs < read_json(logs.parents[1] / "job.json")["config"]["launch"]["max_attempts"])
    except (OSError, ValueError, KeyError, TypeError):
        return True


def _cancel(logs: Path, job: str, host: str) -> bool:
    """Cancel a job that would be left without any process up to its time limit; return whether Slurm did."""
    if run_client(["scancel", job]).code:
        return False
    why = f"{host}, the node of the batch script, is lost, and launch.max_attempts allows no other attempt"
    append_event(logs.parents[1] / "events.jsonl", "gave_up", int(logs.name), why=why)
    return True


def _read_exclusion(logs: Path) -> str:
    """Return the nodes that the job is to leave out, those of launch.exclude too; "" for no change."""
    try:
        nodes = read_text(logs / EXCLUDE).strip()
        config = read_json(logs.parents[1] / "job.json")["config"]
    except (OSError, ValueError, KeyError):
        return ""
    return ",".join(filter(None, [config["launch"]["exclude"], nodes])) if nodes else ""


def _ask(job: str) -> str:
    return run_client(["squeue", "--noheader", "--states=all", f"--jobs={job}", "--format=%T|%B|%N"]).out


def main(logs: str) -> int:
    """Ask Slurm; return EXIT_REQUEUE if the job was requeued, or this node is no longer in it, and 0 otherwise."""
    job = current_job_id(os.environ)
    if job is None or int(os.environ.get("SLURM_NODEID", "0")) >= _ASKING_NODES:
        return 0
    answer = _ask(job)
    host = find_lost_host(answer)
    if host is not None and requeue_without(Path(logs), job, host):
        return EXIT_REQUEUE
    return EXIT_REQUEUE if is_out_of_job(answer, name_this_node()) else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
