"""Ask Slurm when it could give a run its missing nodes, and which nodes a requeued job can leave out.

The supervisor of a job with fewer nodes than its run runs this module from time to time
(`python -m hpc_train.launch.slurm.waiting_time RUN NODES`); exit code 0 says that they are free.
"""

from __future__ import annotations

import re
import sys
import time
from collections.abc import Iterable, Sequence
from datetime import datetime
from pathlib import Path

from hpc_train.config.run import RunConfig
from hpc_train.launch.job_spec import read_spec
from hpc_train.launch.slurm.request import sbatch_options
from hpc_train.launch.slurm.slurm_cli import Answer, RunClient, run_client
from hpc_train.resilience.exclusion import choose_excluded, read_strikes
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


def fit_requeue(
    config: RunConfig, folder: RunDirectory, wanted: int, exclude: Sequence[str], ask: RunClient = run_client
) -> tuple[int, Sequence[str]]:
    """Return how many nodes a job that goes back to the queue asks for, and which nodes it leaves out.

    Slurm takes an exclusion after which too few nodes are left, and the job then waits with the reason BadConstraints
    until somebody changes it. So spare nodes are given up first, and exclusions after them.

    wanted: nodes that the ranks need. exclude: nodes to leave out, the worst first.
    """
    full = wanted + config.launch.spares
    for left in range(len(exclude), 0, -1):
        for nodes in range(full, wanted - 1, -1):
            if not _NOT_ENOUGH.search(_test_job(config, folder, nodes, exclude[:left], ask).err):
                return nodes, exclude[:left]
    return full, ()


def _test_job(config: RunConfig, folder: RunDirectory, nodes: int, exclude: Iterable[str], ask: RunClient) -> Answer:
    """Ask Slurm, by sbatch --test-only, when a job like this run's with that many nodes would start."""
    options = sbatch_options(config, folder)
    names = ("partition", "constraint", "account", "qos", "mem", "gres", "gpus_per_node", "ntasks_per_node")
    words = [f"--{name.replace('_', '-')}={options[name]}" for name in (*names, "cpus_per_task") if name in options]
    words += ["--exclusive"] if options.get("exclusive") else []
    words += [f"--reservation={config.launch.reservation}"] if config.launch.reservation else []
    out = ",".join(sorted({*exclude, *filter(None, [options.get("exclude")])}))
    where = [f"--nodes={nodes}", f"--time={config.launch.time_minutes}", *([f"--exclude={out}"] if out else [])]
    return ask(["sbatch", "--test-only", *where, *words, "--wrap=true"])


def main(run: str, names: str) -> int:
    """Return 0 if Slurm could start on the nodes that this run lacks at once, else 1. names: the nodes that it has."""
    spec = read_spec(Path(run) / "job.json")
    config, nodes = spec.run_config(), names.split(",")
    wanted = spec.ranks // config.cluster.ranks_per_node
    exclude = [*nodes, *choose_excluded(read_strikes(Path(run)), wanted)]
    seconds = estimate_wait(config, spec.folder(), wanted - len(nodes), exclude)
    return 0 if seconds is not None and seconds <= _FREE_SECONDS else 1


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:3]))
