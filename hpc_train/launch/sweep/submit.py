"""`hpc-train submit -m`: freeze every point, hand them to Slurm as few arrays, return at once."""

from __future__ import annotations

import json
from collections.abc import Sequence
from contextlib import nullcontext
from datetime import datetime
from pathlib import Path

from hpc_train import __version__
from hpc_train.config.compose_many import Composer
from hpc_train.config.run import RunConfig
from hpc_train.errors import UserError
from hpc_train.launch.clients import answered, ask
from hpc_train.launch.code.snapshot import Snapshot, snapshot
from hpc_train.launch.code.users import tidy
from hpc_train.launch.dependencies import jobs_to_wait_for
from hpc_train.launch.request import nodes_of
from hpc_train.launch.sweep import ledger, sending
from hpc_train.launch.sweep.freezing import Freezer, Frozen, freeze_all, of_point, tell_plans, with_code
from hpc_train.launch.sweep.frozen import FrozenPoint, SweepFolder, write_points
from hpc_train.launch.sweep.grammar import Grid, read_grid
from hpc_train.launch.sweep.shapes import Array, make_arrays
from hpc_train.launch.whole import submission


def submit_sweep(
    overrides: Sequence[str], config_dir: str | None, dry_run: bool, as_json: bool, after: Sequence[str] = ()
) -> int:
    """Submit all points of a sweep or, if anything at all is wrong, none; returns the exit code.

    dry_run: print what would be submitted. after: runs that must have ended well before this sweep starts.
    """
    grid = read_grid(overrides, config_dir)
    composer = Composer(frozenset(grid.keys), config_dir)
    first = first_config(grid, composer)
    _check_launch(first)
    folder = new_sweep(first)
    freezer = Freezer(folder, _ranks_before, lambda config: nodes_of(config) * config.cluster.ranks_per_node)
    freezer.build = not dry_run
    frozen = freeze_all(grid, composer, freezer)
    code = snapshot(first, folder.path, *frozen.configs.values())
    points = with_code(frozen.points, code)
    waits = jobs_to_wait_for(after, ask)
    arrays = [
        array.after(waits) for array in make_arrays(points, folder, code, sending.most_elements(ask), frozen.config_of)
    ]
    tell_plans(freezer, frozen)
    if dry_run:
        return _show(folder, arrays, as_json)
    sending.check(arrays, ask)
    jobs = _send(folder, points, arrays, code, {"overrides": list(overrides), "swept": list(grid.keys)})
    return _tell(folder, frozen, arrays, jobs, as_json)


def first_config(grid: Grid, composer: Composer) -> RunConfig:
    """What all points agree in is read from the first. Raises UserError naming the point."""
    combination = next(iter(grid))
    try:
        return composer.compose(combination.words)
    except UserError as error:
        raise of_point(combination, error) from None


def new_sweep(config: RunConfig) -> SweepFolder:
    """The directory of a new sweep; nothing is made. Raises UserError if there is something in it."""
    now = datetime.now()
    path = Path(config.run_dir or f"runs/{now:%Y-%m-%d}/{now:%H-%M-%S-%f}"[:-3]).expanduser().absolute()
    if not path.exists() or (path.is_dir() and not any(path.iterdir())):
        return SweepFolder(path)
    folder = SweepFolder(path)
    if folder.points.exists():
        raise UserError(
            f"run_dir={path}: holds a sweep; `hpc-train resume {path}` runs what it lacks, or use a new run_dir"
        )
    raise UserError(f"run_dir={path}: is not empty; a sweep needs a new directory")


def make_folder(folder: SweepFolder, points: Sequence[FrozenPoint]) -> None:
    """Write the sweep directory, and of its points only the list; inside of `submission`."""
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


def _ranks_before(config: RunConfig) -> int | None:
    nodes = config.cluster.nodes
    return nodes * config.cluster.ranks_per_node if nodes else None


def _send(
    folder: SweepFolder,
    points: Sequence[FrozenPoint],
    arrays: Sequence[Array],
    code: Snapshot | None,
    told: dict[str, list[str]],
) -> list[str]:
    source = {"snapshot": code.hash, "sources": code.sources} if code else {}
    with answered(), submission(folder.path), code.kept_for(folder.path) if code else nullcontext():
        make_folder(folder, points)
        jobs = sending.send(folder, arrays, ask)
        ledger.append(folder.ledger, "sweep", points=len(points), version=__version__, **told, **source)
        sending.record(folder, arrays, jobs)
    if len(jobs) > 1:
        sending.release(jobs, ask)
    if code:
        tidy(code.path.parent)
    return jobs


def _show(folder: SweepFolder, arrays: Sequence[Array], as_json: bool) -> int:
    if as_json:
        shown = [
            {**row, "sbatch": _options(arrays, it), "script": sending.script(folder, it)}
            for it, row in zip(arrays, _rows(arrays), strict=True)
        ]
        print(json.dumps({"run_dir": str(folder.path), "arrays": shown}))
        return 0
    for index, array in enumerate(arrays):
        print(f"# array {index + 1} of {len(arrays)}: {describe(array)}")
        print(f"# {' '.join(['sbatch', *_options(arrays, array)])}")
        print(sending.script(folder, array))
    return 0


def _options(arrays: Sequence[Array], array: Array) -> list[str]:
    return sending.command_options(arrays, array, [f"<job of array {index + 1}>" for index in range(len(arrays))])


def describe(array: Array) -> str:
    """What it has and asks for, in a few words."""
    per_job = max(map(len, array.elements))
    shared = f" in {len(array.elements)} jobs of {per_job} side by side" if array.packed else ""
    behind = f", when array {array.behind + 1} has ended" if array.behind is not None else ""
    running = array.request.parameters["additional_parameters"]["array"].partition("%")[2]
    limit = f", {running} at a time" if running else ""
    nodes, ranks = array.request.nodes, array.ranks // array.request.nodes
    return f"{len(array.points)} points{shared}, each nodes {nodes} x ranks {ranks}{limit}{behind}"


def _rows(arrays: Sequence[Array]) -> list[dict[str, object]]:
    return [{"nodes": it.request.nodes, "ranks": it.ranks, "points": it.points, "behind": it.behind} for it in arrays]


def _tell(folder: SweepFolder, frozen: Frozen, arrays: Sequence[Array], jobs: Sequence[str], as_json: bool) -> int:
    if as_json:
        rows = [{"job_id": job, **row} for job, row in zip(jobs, _rows(arrays), strict=True)]
        print(json.dumps({"run_dir": str(folder.path), "points": [it.id for it in frozen.points], "jobs": rows}))
        return 0
    for array, job in zip(arrays, jobs, strict=True):
        print(f"job {job}: {describe(array)}")
    if len(jobs) > 1 and frozen.configs and (most := arrays[0].config.launch.parallel_points):
        print(f"launch.parallel_points={most} is shared by the {len(jobs)} arrays, so that no more run at a time")
    print(f"{len(frozen.points)} points, sweep directory {folder.path}")
    return 0
