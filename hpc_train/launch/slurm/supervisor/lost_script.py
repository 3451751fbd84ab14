"""Give a job back to the queue whose batch script is gone with its node.

A job that outlives its nodes (sbatch --no-kill) also outlives the node of its batch script: Slurm takes that node from
the job, ends the steps that ran on it, and leaves the job running, without any process, up to its time limit. Agents
that hear nothing of the supervisor run this module: `python -m hpc_train.launch.slurm.supervisor.lost_script LOGS`.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

from hpc_train.cluster.hostlist import expand_hostlist
from hpc_train.errors import EXIT_REQUEUE
from hpc_train.launch.slurm.slurm_cli import current_job_id, run_client
from hpc_train.training.records.run_records import append_event

_ASKING_NODES = 3
"""How many nodes ask Slurm: in a large job all of them would be too many at once."""
_ENDED_ON_PURPOSE = ("CANCELLED", "TIMEOUT", "COMPLETED", "PENDING")


def find_lost_host(text: str) -> str | None:
    """Return the node of the batch script if Slurm has taken it from the job; None if the job still has it, or ended.

    text: as squeue prints it with the format "%T|%B|%N": state, node of the batch script, nodes of the job.
    """
    state, _, hosts = text.strip().partition("|")
    script, _, nodes = hosts.partition("|")
    if not script or not nodes or state in _ENDED_ON_PURPOSE:
        return None
    return None if script in expand_hostlist(nodes) else script


def main(logs: str) -> int:
    """Ask Slurm; return EXIT_REQUEUE if the job had lost the node of its batch script, and was requeued."""
    job = current_job_id(os.environ)
    if job is None or int(os.environ.get("SLURM_NODEID", "0")) >= _ASKING_NODES:
        return 0
    states = ["squeue", "--noheader", "--states=all", f"--jobs={job}", "--format=%T|%B|%N"]
    host = find_lost_host(run_client(states).out)
    if host is None or run_client(["scontrol", "requeue", job]).code:
        return 0
    why = f"{host}, the node of the batch script, is lost"
    append_event(Path(logs).parents[1] / "events.jsonl", "requeue", int(Path(logs).name), why=why)
    return EXIT_REQUEUE


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
