"""`hpc-train submit -m`: freeze every point, submit the points as a few job arrays, and return at once.

All arrays are submitted or none, and no element starts before all are accepted: several arrays are held until the
last one is there, and released together.
"""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from datetime import datetime
from pathlib import Path
from typing import Any

from hpc_train import __version__
from hpc_train.config.run import RunConfig
from hpc_train.errors import UserError
from hpc_train.launch.command_output import Report
from hpc_train.launch.slurm.array_size import max_array_size
from hpc_train.launch.slurm.compact_nodes import ask_for_compact_nodes
from hpc_train.launch.slurm.partitions import check_partition
from hpc_train.launch.slurm.request import node_count
from hpc_train.launch.slurm.sbatch import BatchExecutor, require_sbatch, submission_environment
from hpc_train.launch.slurm.slurm_cli import RunClient, delay_signals, run_client
from hpc_train.launch.snapshot.code_snapshot import Snapshot, remove_unused_snapshots, snapshot_code
from hpc_train.launch.submit import list_jobs_to_wait_for, transact_submission
from hpc_train.launch.sweep import sweep_directory
from hpc_train.launch.sweep.arrays import JobArray, make_arrays
from hpc_train.launch.sweep.compose_sweep import Composer
from hpc_train.launch.sweep.points import (
    Grid,
    PointFreezer,
    freeze_points,
    name_point,
    read_grid,
    report_plans,
    set_code,
)
from hpc_train.launch.sweep.sweep_directory import FrozenPoint, SweepDirectory, write_points
from hpc_train.training.run_directory import RunDirectory


@dataclass(frozen=True)
class SweepSubmission:
    """A sweep that Slurm has accepted, or the arrays that it would get."""

    folder: SweepDirectory
    points: tuple[str, ...]
    """Ids, in order."""
    arrays: tuple[JobArray, ...]
    jobs: tuple[str, ...] = ()
    """Job id of each array; empty of a dry run."""


def submit_sweep(
    overrides: Sequence[str],
    config_dir: str | None,
    report: Report,
    *,
    dry_run: bool = False,
    after: Sequence[str] = (),
) -> SweepSubmission:
    """Submit all points of a sweep or, if anything at all is wrong, none.

    report: gets remarks. dry_run: only check. after: runs that must have ended well before this sweep starts. Raises
    UserError.
    """
    grid = read_grid(overrides, config_dir)
    composer = Composer(frozenset(grid.keys), config_dir)
    first = compose_first(grid, composer)
    _check_launch(first)
    folder = choose_sweep_directory(first)
    freezer = PointFreezer(
        folder, _count_known_ranks, lambda config: node_count(config) * config.cluster.ranks_per_node
    )
    freezer.build_stores = not dry_run
    frozen = freeze_points(grid, composer, freezer)
    code = snapshot_code(first, folder.path, report, *frozen.configs.values())
    points = set_code(frozen.points, code)
    waits = list_jobs_to_wait_for(after, run_client)
    arrays = [
        array.after(waits)
        for array in make_arrays(points, folder, code, require_array_size(run_client), frozen.config_of)
    ]
    report_plans(freezer, frozen, report)
    jobs: list[str] = []
    if not dry_run:
        check_arrays(arrays, run_client)
    arrays = [
        replace(array, request=ask_for_compact_nodes(array.config, array.request, report, run_client))
        for array in arrays
    ]
    if not dry_run:
        jobs = _submit_arrays(folder, points, arrays, code, {"overrides": list(overrides), "swept": list(grid.keys)})
    return SweepSubmission(folder, tuple(point.id for point in points), tuple(arrays), tuple(jobs))


def compose_first(grid: Grid, composer: Composer) -> RunConfig:
    """Compose the first point, for the settings that all points share. Raises UserError naming the point."""
    combination = next(iter(grid))
    try:
        return composer.compose(combination.words)
    except UserError as error:
        raise name_point(combination, error) from None


def choose_sweep_directory(config: RunConfig) -> SweepDirectory:
    """Choose the directory of a new sweep, without making it. Raises UserError if there is something in it."""
    now = datetime.now()
    path = Path(config.run_dir or f"runs/{now:%Y-%m-%d}/{now:%H-%M-%S-%f}"[:-3]).expanduser().absolute()
    if not path.exists() or (path.is_dir() and not any(path.iterdir())):
        return SweepDirectory(path)
    folder = SweepDirectory(path)
    if folder.points.exists():
        raise UserError(
            f"run_dir={path}: holds a sweep; `hpc-train resume {shlex.quote(str(path))}` runs what it lacks, or use "
            "a new run_dir"
        )
    raise UserError(f"run_dir={path}: is not empty; a sweep needs a new directory")


def write_sweep_directory(folder: SweepDirectory, points: Sequence[FrozenPoint]) -> None:
    """Write the sweep directory, and of its points only the list; inside of transact_submission."""
    folder.path.chmod(0o700)
    for place in (folder.logs, folder.runs, folder.scripts):
        place.mkdir(mode=0o700)
    write_points(folder.points, points)


def _check_launch(config: RunConfig) -> None:
    if config.launch.kind != "slurm":
        raise UserError(
            f"launch={config.launch.kind}: `hpc-train submit` sends to Slurm; use `hpc-train train -m` to run here"
        )
    if config.launch.chain > 1:
        raise UserError(
            f"launch.chain={config.launch.chain}: a chain is of single runs; leave it out: points that stop at their "
            "time limit are requeued (launch.max_attempts)"
        )


def _count_known_ranks(config: RunConfig) -> int | None:
    nodes = config.cluster.nodes
    return nodes * config.cluster.ranks_per_node if nodes else None


def _submit_arrays(
    folder: SweepDirectory,
    points: Sequence[FrozenPoint],
    arrays: Sequence[JobArray],
    code: Snapshot | None,
    command: dict[str, list[str]],
) -> list[str]:
    source = {"snapshot": code.hash, "sources": code.sources} if code else {}
    with delay_signals(), transact_submission(folder.path), code.stored_for(folder.path) if code else nullcontext():
        write_sweep_directory(folder, points)
        jobs = send_arrays(folder, arrays, run_client)
        sweep_directory.append_ledger_event(
            folder.ledger, "sweep", points=len(points), version=__version__, **command, **source
        )
        record_arrays(folder, arrays, jobs)
    if len(jobs) > 1:
        release_jobs(jobs, run_client)
    if code:
        remove_unused_snapshots(code.path.parent)
    return jobs


def describe_array(array: JobArray) -> str:
    """Describe an array in a few words: its points, and what it asks for."""
    per_job = max(map(len, array.elements))
    shared = f" in {len(array.elements)} jobs of {per_job} side by side" if array.packed else ""
    behind = f", when array {array.behind + 1} has ended" if array.behind is not None else ""
    running = array.request.parameters["additional_parameters"]["array"].partition("%")[2]
    limit = f", {running} at a time" if running else ""
    nodes, ranks = array.request.nodes, array.ranks // array.request.nodes
    return f"{len(array.points)} points{shared}, each nodes {nodes} x ranks {ranks}{limit}{behind}"


def require_array_size(ask: RunClient) -> int:
    """Return the elements that an array may have. Raises UserError where a cluster takes no arrays."""
    size = max_array_size(ask)
    if size < 1:
        raise UserError("this cluster takes no job arrays (MaxArraySize=0); submit the points one by one")
    return size


def check_arrays(arrays: Sequence[JobArray], ask: RunClient) -> None:
    """Check all that can be checked before sbatch is called. Raises UserError."""
    require_sbatch()
    for array in arrays:
        submission_environment(array.request)
        check_partition(array.config, array.request, ask)


def send_arrays(folder: SweepDirectory, arrays: Sequence[JobArray], ask: RunClient, hold: bool = False) -> list[str]:
    """Submit the arrays, and return the job id of each. Several are held until release_jobs, and so is one with `hold`.

    Raises UserError with sbatch's own reason if it refuses one; then none is left, and no file of them.
    """
    jobs: list[str] = []
    earlier = set(folder.scripts.glob("*"))
    try:
        for array in arrays:
            options = make_sbatch_array_options(arrays, array, jobs, hold)
            jobs.append(BatchExecutor(_as_run_folder(folder), array.request).send(*options))
    # Arrays of a sweep are accepted one by one: if one is refused, those before it must not run.
    except BaseException:  # Ctrl-C, too
        if jobs:
            ask(["scancel", *jobs])
        for path in set(folder.scripts.glob("*")) - earlier:
            path.unlink()
        raise
    return jobs


def make_sbatch_array_options(
    arrays: Sequence[JobArray], array: JobArray, jobs: Sequence[str], hold: bool = False
) -> list[str]:
    """Return sbatch's options that override those of the script. jobs: ids of the arrays so far."""
    options = ["--hold"] if hold or len(arrays) > 1 else []
    if array.behind is not None:
        # afterany, not afterok: the array behind only waits for room, whatever became of the one before.
        waits = [array.request.parameters.get("dependency"), f"afterany:{jobs[array.behind]}"]
        options.append(f"--dependency={','.join(filter(None, waits))}")
    return options


def release_jobs(jobs: Sequence[str], ask: RunClient) -> None:
    """Let jobs that were held start. Raises UserError if Slurm will not."""
    answer = ask(["scontrol", "release", ",".join(jobs)])
    if answer.code:
        raise UserError(f"scontrol release {','.join(jobs)}: {answer.reason}; the jobs are held: try that again")


def record_arrays(folder: SweepDirectory, arrays: Sequence[JobArray], jobs: Sequence[str], **more: Any) -> None:
    """Write down which job runs which points."""
    for array, job in zip(arrays, jobs, strict=True):
        shape = {"nodes": array.request.nodes, "ranks": array.ranks, "packed": array.packed}
        sweep_directory.append_ledger_event(
            folder.ledger, "submit", job_id=job, **shape, elements=array.elements, **more
        )


def render_array_script(folder: SweepDirectory, array: JobArray) -> str:
    """Return the batch script, as it is handed to sbatch."""
    return BatchExecutor(_as_run_folder(folder), array.request).script()


def _as_run_folder(folder: SweepDirectory) -> RunDirectory:
    return RunDirectory(folder.path, folder.path / "checkpoints")
