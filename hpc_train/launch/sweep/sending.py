"""Arrays to sbatch: all of them or none, and no element begins before all are accepted."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from hpc_train.errors import UserError
from hpc_train.launch.arrays import largest_array
from hpc_train.launch.clients import Ask
from hpc_train.launch.partitions import check_partition
from hpc_train.launch.slurm import BatchExecutor, demand_sbatch, environment_of
from hpc_train.launch.sweep import ledger
from hpc_train.launch.sweep.frozen import SweepFolder
from hpc_train.launch.sweep.shapes import Array
from hpc_train.training.folder import RunFolder


def most_elements(ask: Ask) -> int:
    """Of one array. Raises UserError where a cluster takes none."""
    most = largest_array(ask)
    if most < 1:
        raise UserError("this cluster takes no job arrays (MaxArraySize=0); submit the points one by one")
    return most


def check(arrays: Sequence[Array], ask: Ask) -> None:
    """Everything that can be checked before sbatch is called. Raises UserError."""
    demand_sbatch()
    for array in arrays:
        environment_of(array.request)
        check_partition(array.config, array.request, ask)


def send(folder: SweepFolder, arrays: Sequence[Array], ask: Ask, hold: bool = False) -> list[str]:
    """Submit; returns a job id an array. Several are held until `release`, and so is one with `hold`.

    Raises UserError with sbatch's own reason if it refuses one; then none is left, and no file of them.
    """
    jobs: list[str] = []
    there = set(folder.scripts.glob("*"))
    try:
        for array in arrays:
            options = command_options(arrays, array, jobs, hold)
            jobs.append(BatchExecutor(_place(folder), array.request).send(*options))
    except BaseException:  # Ctrl-C, too
        if jobs:
            ask(["scancel", *jobs])
        for left in set(folder.scripts.glob("*")) - there:
            left.unlink()
        raise
    return jobs


def command_options(arrays: Sequence[Array], array: Array, jobs: Sequence[str], hold: bool = False) -> list[str]:
    """Options of sbatch beside those in the script, whose place they take. jobs: of the arrays so far."""
    options = ["--hold"] if hold or len(arrays) > 1 else []
    if array.behind is not None:
        waits = [array.request.parameters.get("dependency"), f"afterany:{jobs[array.behind]}"]
        options.append(f"--dependency={','.join(filter(None, waits))}")
    return options


def release(jobs: Sequence[str], ask: Ask) -> None:
    """Let jobs that were held start. Raises UserError if Slurm will not."""
    said = ask(["scontrol", "release", ",".join(jobs)])
    if said.code:
        raise UserError(f"scontrol release {','.join(jobs)}: {said.reason}; the jobs are held: try that again")


def record(folder: SweepFolder, arrays: Sequence[Array], jobs: Sequence[str], **more: Any) -> None:
    """Write down which job runs which points."""
    for array, job in zip(arrays, jobs, strict=True):
        shape = {"nodes": array.request.nodes, "ranks": array.ranks, "packed": array.packed}
        ledger.append(folder.ledger, "submit", job_id=job, **shape, elements=array.elements, **more)


def script(folder: SweepFolder, array: Array) -> str:
    """The batch script, as it is handed to sbatch."""
    return BatchExecutor(_place(folder), array.request).script()


def _place(folder: SweepFolder) -> RunFolder:
    return RunFolder(folder.path, folder.path / "checkpoints")
