"""`hpc-train attach RUN`: open a shell or run a command on a node of a running job."""

from __future__ import annotations

import os
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

from hpc_train.errors import UserError
from hpc_train.launch.slurm.job_records import JobRecord
from hpc_train.launch.slurm.slurm_cli import client_environment, run_client
from hpc_train.launch.state.attempts import read_rank_entries
from hpc_train.launch.state.job_state import decide_state
from hpc_train.launch.state.run_facts import RunFacts, gather_facts
from hpc_train.launch.state.run_lookup import find_points, require_single
from hpc_train.launch.state.state_names import State, from_slurm_state


def attach_command(run: str, words: Sequence[str], rank: int | None, node: str | None, dry_run: bool) -> int:
    """Replace this process by srun inside the job; dry_run: print its command line and return 0.

    Raises UserError if the run is not running, or has no such rank or node.
    """
    point = require_single(find_points(run, run_client), run)
    facts = gather_facts([point], run_client)[0]
    record = _find_running_job(facts, run)
    location = (
        _check_node(node, record)
        if node
        else find_node_of_rank(point.run / "logs" / str(_find_newest_attempt(facts)), rank, record)
    )
    shell = [os.environ.get("SHELL") or "/bin/bash", "-l"]
    command = make_srun_command(record, location, list(words) or shell, sys.stdin.isatty() or dry_run)
    if dry_run:
        print(shlex.join(command))
        return 0
    _make_exec_command(command)


def make_srun_command(record: JobRecord, node: str, words: Sequence[str], terminal: bool) -> list[str]:
    """Build the srun command. terminal: give it a pseudo-terminal, as a shell needs."""
    # --overlap: the step of the ranks holds all CPUs and GPUs of the job, and another one would wait for its end.
    options = [f"--jobid={record.raw_id}", "--overlap", "--nodes=1", "--ntasks=1", f"--nodelist={node}"]
    return ["srun", *options, *(["--pty"] if terminal else []), *words]


def _make_exec_command(command: Sequence[str]) -> NoReturn:
    try:
        os.execvpe(command[0], list(command), client_environment())
    except FileNotFoundError:
        raise UserError("srun is not on the PATH: attach from a node of the cluster") from None


def _find_running_job(facts: RunFacts, run: str) -> JobRecord:
    status = decide_state(facts)
    if status.state is not State.RUNNING:
        reason = f" ({status.reason})" if status.reason else ""
        raise UserError(f"{run}: is {status.state}{reason}; only a running job can be attached to")
    record = next((record for record in facts.records if from_slurm_state(record.state) is State.RUNNING), None)
    if record is None:
        begun = facts.newest.begun if facts.newest else None
        where = f" as process {begun.process} of {begun.host}" if begun else ""
        raise UserError(f"{run}: runs without Slurm{where}; there is no job to attach to")
    return record


def _find_newest_attempt(facts: RunFacts) -> int:
    return facts.newest.number if facts.newest else 0


def _check_node(name: str, record: JobRecord) -> str:
    if name in record.nodes:
        return name
    raise UserError(f"--node {name}: job {record.job_id} has {', '.join(record.nodes)}")


def find_node_of_rank(folder: Path, rank: int | None, record: JobRecord) -> str:
    """Return the node of a rank; None: of rank 0, or the first node of the job before ranks have joined."""
    entries_by_rank = {entry["rank"]: entry for entry in read_rank_entries(folder)}
    if rank is not None and rank not in entries_by_rank:
        existing = (
            f"there are ranks 0 to {max(entries_by_rank)}" if entries_by_rank else "its ranks have not joined yet"
        )
        raise UserError(f"--rank {rank}: {existing}; --node takes one of {', '.join(record.nodes)}")
    entry = entries_by_rank.get(rank or 0)
    if entry is None:
        return record.nodes[0]
    host = str(entry.get("host", ""))
    for name in (host, host.partition(".")[0]):
        if name in record.nodes:
            return name
    return record.nodes[int(entry["node"])]  # a host that calls itself otherwise than Slurm does
