"""Sweeps without Slurm: frozen on disk, with their jobs recorded in the ledger."""

from __future__ import annotations

from pathlib import Path

from hpc_train.launch.slurm.request import node_count
from hpc_train.launch.submit import transact_submission
from hpc_train.launch.sweep.compose_sweep import Composer
from hpc_train.launch.sweep.points import FrozenSweep, PointFreezer, freeze_points, read_grid
from hpc_train.launch.sweep.submit_sweep import write_sweep_directory
from hpc_train.launch.sweep.sweep_directory import SweepDirectory

WORDS = (
    "cluster=slurm",
    "launch=slurm",
    "data=digits",
    "model=vit_tiny",
    "cluster.node.ranks=2",
    "cluster.node.cpus=8",
)


def freeze(path: Path, *words: str) -> tuple[SweepDirectory, FrozenSweep]:
    """Return the points of these words, with nothing on the disk yet."""
    folder, grid = SweepDirectory(path), read_grid([*WORDS, *words])
    freezer = PointFreezer(folder, lambda _: None, lambda config: node_count(config) * config.cluster.ranks_per_node)
    return folder, freeze_points(grid, Composer(frozenset(grid.keys)), freezer)


def make(path: Path, *words: str) -> tuple[SweepDirectory, list[str]]:
    """Write the same sweep to the disk and return the ids of its points."""
    folder, frozen = freeze(path, *words)
    with transact_submission(folder.path):
        write_sweep_directory(folder, frozen.points)
    return folder, [point.id for point in frozen.points]
