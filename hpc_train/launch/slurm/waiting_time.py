"""Ask Slurm when it could give a run its missing nodes, and how many nodes a job can ask for and which leave out.

`python -m hpc_train.launch.slurm.waiting_time LOGS [NODES]` writes what a requeue of the job asks for. The batch script
runs it after ranks that stopped on purpose. The supervisor of a job with fewer nodes than its run runs it with these
nodes from time to time; exit code 0 then says that the others are free.
"""

from __future__ import annotations

import re
import sys
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

from hpc_train.config.run import RunConfig
from hpc_train.launch.command_output import Report, print_to_job_log
from hpc_train.launch.job_spec import read_spec
from hpc_train.launch.slurm.request import JobRequest, join_excluded, list_nodes_to_exclude, sbatch_options
from hpc_train.launch.slurm.slurm_cli import Answer, RunClient, run_client
from hpc_train.resilience.exclusion import write_requeue
from hpc_train.training.run_directory import RunDirectory

_START = re.compile(r"to start at (\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d)")
_NOT_ENOUGH = re.compile(r"node configuration is not available|node not available", re.IGNORECASE)
"""Message of sbatch if too few nodes are up and not excluded."""
_CLOCK = re.compile(r"Configuration data as of (\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d)")
_FREE_SECONDS = 5.0
"""Nodes that Slurm expects to give a job within this time are free now."""


def estimate_wait(
    config: RunConfig, folder: RunDirectory, nodes: int, exclude: Iterable[str], ask: RunClient = run_client
) -> float | None:
    """Return the seconds in which Slurm expects to have that many more nodes for this run; None if it cannot say.

    exclude: nodes that do not count, such as those that the run has.
    """
    answer = _test_job(config, folder, nodes, exclude, ask)
    start = _START.search(answer.err + answer.out)
    if answer.code or start is None:
        return None
    return max(0.0, datetime.fromisoformat(start[1]).timestamp() - _read_controller_clock(ask))


def _read_controller_clock(ask: RunClient) -> float:
    """Return the seconds since 1970 by the clock of Slurm's controller; without its answer, by that of this node."""
    clock = _CLOCK.search(ask(["scontrol", "show", "config"]).out)
    return datetime.fromisoformat(clock[1]).timestamp() if clock else time.time()


@dataclass(frozen=True)
class NodeDemand:
    """The nodes that a job asks Slurm for."""

    nodes: int
    """Number of nodes, spares included."""
    exclude: Sequence[str]
    """Nodes that it leaves out, the worst first."""
    concessions: tuple[str, ...] = ()
    """Lines for the log: the spare nodes and exclusions that were given up, as Slurm has too few nodes."""


def fit_demand(
    config: RunConfig, folder: RunDirectory, wanted: int, exclude: Sequence[str], ask: RunClient = run_client
) -> NodeDemand:
    """Return how many nodes a job of this run asks for, and which it leaves out, so that Slurm can ever start it.

    Slurm takes an exclusion after which too few nodes are left, and the job then waits with the reason BadConstraints
    until somebody changes it. So spare nodes are given up first, and exclusions after them. Slurm is not asked
    about a job that leaves out no node. If too few nodes are up even so, the job asks for all of them, and waits.

    wanted: nodes that the ranks need. exclude: nodes to leave out, the worst first.
    """
    full = wanted + config.launch.spares
    if not exclude:
        return NodeDemand(full, ())
    for left in range(len(exclude), -1, -1):
        for nodes in range(full, wanted - 1, -1):
            if not _NOT_ENOUGH.search(_test_job(config, folder, nodes, exclude[:left], ask).err):
                return NodeDemand(nodes, exclude[:left], _describe_concessions(config, wanted, nodes, exclude[left:]))
    return NodeDemand(full, (), _describe_concessions(config, wanted, full, exclude))


def _describe_concessions(config: RunConfig, wanted: int, nodes: int, included: Sequence[str]) -> tuple[str, ...]:
    """Describe what a job does without. wanted: nodes of the ranks. included: nodes that it would rather leave out."""
    spares, configured_spares = nodes - wanted, config.launch.spares
    fewer = (
        [f"asks for {spares} of {configured_spares} spare nodes: Slurm has no others"]
        if spares < configured_spares
        else []
    )
    return (*fewer, *(f"{host} is not left out: Slurm has too few other nodes" for host in included))


def fit_request(
    config: RunConfig, folder: RunDirectory, request: JobRequest, report: Report, ask: RunClient
) -> JobRequest:
    """Return the request of a run that leaves out nodes as one that Slurm can ever start; see fit_demand.

    report: gets a line for each thing that the job does without. Slurm is asked only where the run has strikes against
    nodes.
    """
    excluded = list_nodes_to_exclude(config, folder)
    if not excluded:
        return request
    demand = fit_demand(config, folder, request.nodes, excluded, ask)
    for line in demand.concessions:
        report(line)
    return request.for_nodes(demand.nodes, join_excluded(config, demand.exclude))


def _test_job(config: RunConfig, folder: RunDirectory, nodes: int, exclude: Iterable[str], ask: RunClient) -> Answer:
    """Ask Slurm, by sbatch --test-only, when a job like this run's with that many nodes would start."""
    options = sbatch_options(config, folder, sorted(set(exclude)))
    names = ["partition", "constraint", "account", "qos", "mem", "gres", "gpus_per_node", "ntasks_per_node"]
    names += ["cpus_per_task", "exclude"]
    words = [f"--{name.replace('_', '-')}={options[name]}" for name in names if name in options]
    words += ["--exclusive"] if options.get("exclusive") else []
    words += [f"--reservation={config.launch.reservation}"] if config.launch.reservation else []
    size = [f"--nodes={nodes}", f"--time={config.launch.time_minutes}"]
    return ask(["sbatch", "--test-only", *size, *words, "--wrap=true"])


def main(logs: str, names: str = "") -> int:
    """Write what a requeue of the job asks for to the log directory of its attempt.

    names: the nodes that the run has, if it lacks others. Unless Slurm could start on those at once, nothing is
    written, and 1 is returned.
    """
    spec = read_spec(Path(logs).parents[1] / "job.json")
    config, folder, nodes = spec.run_config(), spec.folder(), [name for name in names.split(",") if name]
    wanted, excluded = spec.ranks // config.cluster.ranks_per_node, list_nodes_to_exclude(config, folder)
    if nodes:
        seconds = estimate_wait(config, folder, wanted - len(nodes), [*nodes, *excluded])
        if seconds is None or seconds > _FREE_SECONDS:
            return 1
    demand = fit_demand(config, folder, wanted, excluded)
    for line in demand.concessions:
        print_to_job_log(f"hpc-train: {line}")
    write_requeue(Path(logs), demand.exclude, demand.nodes if config.launch.spares else 0)
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:3]))
