"""Whether MPI and Slurm see the job as we do: a launch that joins none of them is silent, and every rank alone."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from hpc_train.api import Task
from hpc_train.runtime.facts import Facts
from hpc_train.runtime.mpi import load_mpi


def mpi_view() -> tuple[int, int] | None:
    """(rank, size) as the MPI library says; None without mpi4py. The first call initialises MPI."""
    try:
        MPI = load_mpi()
    except ImportError:
        return None
    return MPI.COMM_WORLD.rank, MPI.COMM_WORLD.size


def mpi_missing(launcher: str, env: Mapping[str, str]) -> str | None:
    """One line if srun started this process without MPI; to be asked before `mpi_view`.

    Open MPI ends such a process where it initialises, others say that each is 0 of 1.
    """
    if launcher != "slurm" or any(name.startswith(("PMIX_", "PMI_", "PMI2_", "PALS_")) for name in env):
        return None
    return "srun gave these processes no MPI; use srun --mpi=pmix"


def slurm_view(env: Mapping[str, str]) -> tuple[int, int] | None:
    """(rank, size) of this process as its Slurm step says; None outside a step, and where the numbers are none."""
    texts = env.get("SLURM_PROCID", ""), env.get("SLURM_STEP_NUM_TASKS", env.get("SLURM_NTASKS", ""))
    if "SLURM_STEP_ID" not in env or not all(text.isdecimal() for text in texts):
        return None
    return int(texts[0]), int(texts[1])


def mpi_differs(task: Task, view: tuple[int, int] | None) -> str | None:
    """One line if MPI does not see this process as the launcher does; view: what `mpi_view` says."""
    if view is None:
        return "mpi4py is not installed (pip install 'hpc_train[mpi]')"
    if view == (task.process, task.processes):
        return None
    return (
        f"MPI sees process {view[0]} of {view[1]} where {task.launcher} started {task.process} of {task.processes}; "
        f"start the ranks with {'srun --mpi=pmix' if task.launcher == 'slurm' else 'mpirun, or srun --mpi=pmix'}"
    )


def mpi_problem(task: Task, env: Mapping[str, str]) -> str | None:
    """One line if this process could not use MPI as its launcher counts it, for `doctor`. Initialises MPI."""
    return mpi_missing(task.launcher, env) or mpi_differs(task, mpi_view())


def slurm_differs(task: Task, env: Mapping[str, str]) -> str | None:
    """One line if the Slurm step that this process is in counts other ranks than its innermost launcher does.

    As it should be for one task a node under torchrun, and a mistake for one torchrun, or mpirun, a task of many.
    """
    view = slurm_view(env)
    if view is None or task.launcher == "slurm" or view[1] in (1, task.nodes) or view[1] == task.processes:
        return None
    return (
        f"the Slurm step has {view[1]} tasks on {task.nodes} nodes where {task.launcher} counts {task.processes} "
        f"processes: start {task.launcher} once a node, or the ranks by srun itself"
    )


def mpi_disagreement(facts: Sequence[Facts], launcher: str, setting: str) -> str | None:
    """One line for all: the first process that MPI sees elsewhere. setting: what needs MPI."""
    size = len(facts)
    for fact in facts:
        if fact.mpi is not None and fact.mpi != [fact.process, size]:
            rank, seen = fact.mpi
            return (
                f"{setting}: MPI sees process {rank} of {seen} where {launcher} started {fact.process} of {size}; "
                "start the ranks with mpirun, or srun --mpi=pmix"
            )
    return None
