"""Sweeps without a Slurm: frozen on disk, with what was done with them in the ledger."""

from __future__ import annotations

from pathlib import Path

from hpc_train.config.compose_many import Composer
from hpc_train.launch.request import nodes_of
from hpc_train.launch.sweep.freezing import Freezer, Frozen, freeze_all
from hpc_train.launch.sweep.frozen import SweepFolder
from hpc_train.launch.sweep.grammar import read_grid
from hpc_train.launch.sweep.submit import make_folder
from hpc_train.launch.whole import submission

WORDS = (
    "cluster=slurm",
    "launch=slurm",
    "data=digits",
    "model=vit_tiny",
    "cluster.node.ranks=2",
    "cluster.node.cpus=8",
)


def freeze(path: Path, *words: str) -> tuple[SweepFolder, Frozen]:
    """The points of these words, with nothing on the disk yet."""
    folder, grid = SweepFolder(path), read_grid([*WORDS, *words])
    freezer = Freezer(folder, lambda _: None, lambda config: nodes_of(config) * config.cluster.ranks_per_node)
    return folder, freeze_all(grid, Composer(frozenset(grid.keys)), freezer)


def make(path: Path, *words: str) -> tuple[SweepFolder, list[str]]:
    """The same on the disk; the ids of the points."""
    folder, frozen = freeze(path, *words)
    with submission(folder.path):
        make_folder(folder, frozen.points)
    return folder, [point.id for point in frozen.points]
