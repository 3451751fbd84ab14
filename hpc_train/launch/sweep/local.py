"""`hpc-train train -m`: the points of a sweep on this machine, as many beside one another as it has room for."""

from __future__ import annotations

import os
from collections.abc import Sequence

from hpc_train import __version__
from hpc_train.config.compose_many import Composer
from hpc_train.config.run import RunConfig
from hpc_train.errors import UserError
from hpc_train.launch.local import local_ranks
from hpc_train.launch.sweep import ledger
from hpc_train.launch.sweep.freezing import Freezer, freeze_all, tell_plans
from hpc_train.launch.sweep.grammar import read_grid
from hpc_train.launch.sweep.pool import run_points
from hpc_train.launch.sweep.submit import first_config, make_folder, new_sweep
from hpc_train.launch.whole import submission
from hpc_train.parallel.support.server import needs_mpi
from hpc_train.runtime.identity import identify
from hpc_train.runtime.stop import StopRequest


def train_sweep(overrides: Sequence[str], config_dir: str | None, stop: StopRequest) -> int:
    """Run all points of a sweep here; returns the exit code, 0 only if all are done."""
    if identify(os.environ) is not None:
        raise UserError("train -m: starts ranks of its own; call it without srun, torchrun or mpirun around it")
    grid = read_grid(overrides, config_dir)
    composer = Composer(frozenset(grid.keys), config_dir)
    first = first_config(grid, composer)
    if first.launch.kind != "local":
        raise UserError(f"launch={first.launch.kind}: `hpc-train train` runs here; use `hpc-train submit -m` for Slurm")
    if first.launch.points_per_job > 1:
        raise UserError("launch.points_per_job: is for jobs of Slurm; here it is launch.parallel_points")
    folder = new_sweep(first)
    freezer = Freezer(folder, local_ranks, _ranks)
    frozen = freeze_all(grid, composer, freezer)
    tell_plans(freezer, frozen)
    told = {"overrides": list(overrides), "swept": list(grid.keys)}
    with submission(folder.path):
        make_folder(folder, frozen.points)
        ledger.append(folder.ledger, "sweep", points=len(frozen.points), version=__version__, **told)
    print(f"{len(frozen.points)} points, sweep directory {folder.path}", flush=True)
    return run_points(folder, frozen.points, stop)


def _ranks(config: RunConfig) -> int:
    if mpi := needs_mpi(config):
        raise UserError(f"{mpi}: MPI must start the ranks; run such points one by one with mpirun")
    return local_ranks(config)
