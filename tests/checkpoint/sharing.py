"""Saves of several ranks that share files between steps, and the files they leave, for the tests of this folder."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import torch
from checkpoint_helpers import State, random_bits, sharded, state

from hpc_train.checkpoint import Saver
from hpc_train.checkpoint.format.manifest import Manifest, read_manifest
from hpc_train.checkpoint.save.local_stage import LocalStage
from hpc_train.checkpoint.save.writer_group import WriterSharing
from hpc_train.interfaces import TensorShard, World
from hpc_train.testing import run_ranks

LARGE = {"large": random_bits((300, 513), torch.float32, 7), **state(3)}
"""Blocks of its own for every rank, rows that end in the middle of one, and tensors that are smaller than a page."""
Pieces = Callable[[World], Sequence[TensorShard]]


def shards(tensors: State) -> Pieces:
    """Return the function that gives each rank its rows of every tensor."""
    return lambda world: sharded(tensors, 0, world.rank, world.size)


def on_nodes(world: World, nodes: int) -> World:
    """Return the same rank of a job that has so many nodes."""
    return replace(world, node=world.rank * nodes // world.size)


def save_steps(
    directory: Path,
    steps: dict[int, Pieces],
    ranks: int,
    sharing: WriterSharing,
    nodes: int = 1,
    disk: LocalStage | None = None,
) -> list[list[str]]:
    """Save steps one after the other; returns for every rank the error of each step."""

    def work(world: World) -> list[str]:
        saver, said = Saver(directory, on_nodes(world, nodes), sharing=sharing, local_stage=disk), []
        for step, pieces in steps.items():
            saver.save(step, pieces(world), {"n": step})
            said += [str(save.error or "") for save in saver.wait()]
        return said

    return run_ranks(work, ranks)


def manifest(directory: Path, step: int = 1) -> Manifest:
    return read_manifest(directory / f"step-{step}", step)


def files(directory: Path, step: int = 1) -> list[str]:
    """Return the names of the files, without folders."""
    return [Path(file.name).name for file in manifest(directory, step).files]
