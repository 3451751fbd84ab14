"""Time loads into a layout that differs from that of the save, and count the bytes that they read.

Logical tensors are saved by rows, by all ranks or by one, and loaded by rows or columns, by all or by one, from files
that are not in the page cache. The kernel counts the bytes read.
"""

from __future__ import annotations

import random
import shutil
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Shard

from hpc_train.bench.checkpoint.checkpoint import (
    DCP,
    OUR_SIDE,
    RESHARD_COLUMNS,
    RESHARD_TO_FEWER,
    RESHARD_TO_MORE,
    RESHARDINGS,
    CheckpointBenchOptions,
    OperationResult,
    Samples,
    summarise_operations,
)
from hpc_train.bench.checkpoint.sides import (
    OperationCost,
    TensorShapes,
    combine_ranks,
    drop_page_cache,
    tensor_shapes,
    time_operation,
    wait_for_all,
)
from hpc_train.checkpoint import load_step, save_step
from hpc_train.interfaces import TensorShard, World

_STEP = 1


@dataclass(frozen=True)
class ReshardLayout:
    """How logical tensors are cut over ranks."""

    ranks: int
    """Number of ranks: all of the world, or 1: the first rank has everything."""
    dim: int = 0
    """Dimension along which tensors are cut, in chunks as torch makes them; the last one of tensors with fewer."""

    def part(self, rank: int, shape: tuple[int, ...]) -> tuple[int, int, int]:
        """Return (dimension, begin, end) of the part of a rank."""
        dim = min(self.dim, len(shape) - 1)
        chunk = -(-shape[dim] // self.ranks)
        return dim, min(rank * chunk, shape[dim]), min((rank + 1) * chunk, shape[dim])


@dataclass(frozen=True)
class ReshardSide:
    """The save and load of a side; only ranks of the layout call them."""

    save: Callable[[Path, TensorShapes, ReshardLayout, Mapping[str, Tensor]], None]
    load: Callable[[Path, TensorShapes, ReshardLayout, Mapping[str, Tensor]], None]


def make_layouts(operation: str, ranks: int) -> tuple[ReshardLayout, ReshardLayout]:
    """Return the layouts of the save and of the load."""
    return {
        RESHARD_TO_MORE: (ReshardLayout(1), ReshardLayout(ranks)),
        RESHARD_TO_FEWER: (ReshardLayout(ranks), ReshardLayout(1)),
        RESHARD_COLUMNS: (ReshardLayout(ranks), ReshardLayout(ranks, 1)),
    }[operation]


def measure_resharding(world: World, options: CheckpointBenchOptions, directory: Path) -> list[OperationResult]:
    """Run all rounds of all layouts; an empty list for one rank, which has no other layout. A collective."""
    if world.size == 1:
        return []
    mesh = init_device_mesh("cpu", (world.size,))
    ways = {OUR_SIDE: _make_our_side(world), DCP: _make_dcp_side(world, mesh)}
    ways = {side: way for side, way in ways.items() if side in options.sides}
    shapes = tensor_shapes(int(options.gib * 2**30), options.tensors)
    wanted = [operation for operation in RESHARDINGS if operation in options.operations]
    samples = {
        operation: _measure_layout(operation, world, options.rounds, directory, ways, shapes) for operation in wanted
    }
    return summarise_operations(samples, sum(prod(shape) * dtype.itemsize for shape, dtype in shapes.values()) / 2**30)


def _measure_layout(
    operation: str, world: World, rounds: int, directory: Path, ways: Mapping[str, ReshardSide], shapes: TensorShapes
) -> dict[str, Samples]:
    """Save in one layout and time loading in another, with every side in each round, in a random order."""
    saved, loaded = make_layouts(operation, world.size)
    folders = {side: directory / f"{operation}.{side}" for side in ways}
    state = dict(_iterate_tensors(shapes, saved, world.rank))
    for side, way in ways.items() if world.rank < saved.ranks else ():
        way.save(folders[side], shapes, saved, state)
    state.clear()
    targets = {name: torch.zeros_like(tensor) for name, tensor in _iterate_tensors(shapes, loaded, world.rank)}
    costs: dict[str, list[OperationCost]] = {side: [] for side in ways}
    for number in range(rounds + 1):  # the first is not counted
        for side in random.Random(f"{number} {operation}").sample(sorted(ways), len(ways)):
            wait_for_all()
            if world.rank == 0:
                drop_page_cache(folders[side])
            costs[side].append(
                time_operation(_time_load(ways[side], folders[side], shapes, loaded, targets, world.rank))
            )
            if number == 0:
                _check_loaded(side, targets, shapes, loaded, world.rank)
    wait_for_all()
    for folder in folders.values() if world.rank == 0 else ():
        shutil.rmtree(folder)
    return {side: combine_ranks(samples[1:]) for side, samples in costs.items()}


def _time_load(
    way: ReshardSide,
    folder: Path,
    shapes: TensorShapes,
    layout: ReshardLayout,
    targets: Mapping[str, Tensor],
    rank: int,
) -> Callable[[], None]:
    if rank >= layout.ranks:
        return lambda: None
    return lambda: way.load(folder, shapes, layout, targets)


def _iterate_tensors(shapes: TensorShapes, layout: ReshardLayout, rank: int) -> Iterator[tuple[str, Tensor]]:
    """Yield the names and contiguous parts of a rank; the value of an element follows from its index."""
    for name, (shape, dtype) in shapes.items() if rank < layout.ranks else ():
        bits, mask = (torch.int16, 0x3FFF) if dtype is torch.bfloat16 else (torch.int32, 0x3FFFFFFF)
        full = torch.arange(prod(shape), dtype=torch.int32).bitwise_and_(mask).to(bits)
        dim, begin, end = layout.part(rank, shape)
        yield name, full.view(dtype).reshape(shape).narrow(dim, begin, end - begin).contiguous()


def _check_loaded(
    side: str, targets: Mapping[str, Tensor], shapes: TensorShapes, layout: ReshardLayout, rank: int
) -> None:
    for name, tensor in _iterate_tensors(shapes, layout, rank):
        assert torch.equal(targets[name], tensor), (side, name)
        targets[name].zero_()


def _make_our_side(world: World) -> ReshardSide:
    def world_of(layout: ReshardLayout) -> World:
        return (
            world
            if layout.ranks > 1
            else World(rank=0, size=1, local_rank=0, device=world.device, mesh=world.mesh, dp_index=0, dp_size=1)
        )

    def make_shards(
        shapes: TensorShapes, layout: ReshardLayout, tensors: Mapping[str, Tensor]
    ) -> Iterator[TensorShard]:
        for name, (shape, dtype) in shapes.items():
            dim, begin, _ = layout.part(world.rank, shape)
            offset = tuple(begin if d == dim else 0 for d in range(len(shape)))
            yield TensorShard(name, shape, dtype, offset, tensors[name])

    def put(folder: Path, shapes: TensorShapes, layout: ReshardLayout, tensors: Mapping[str, Tensor]) -> None:
        save_step(folder, _STEP, make_shards(shapes, layout, tensors), {}, world_of(layout)).wait()

    def get(folder: Path, shapes: TensorShapes, layout: ReshardLayout, tensors: Mapping[str, Tensor]) -> None:
        load_step(folder, _STEP, make_shards(shapes, layout, tensors), world_of(layout))

    return ReshardSide(put, get)


def _make_dcp_side(world: World, mesh: DeviceMesh) -> ReshardSide:
    """Make the side of DCP as its users call it: with DTensors on several ranks, plain tensors on one."""

    def state(shapes: TensorShapes, layout: ReshardLayout, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        if layout.ranks == 1:
            return dict(tensors)
        return {
            name: DTensor.from_local(
                tensors[name],
                mesh,
                [Shard(layout.part(0, shape)[0])],
                run_check=False,
                shape=torch.Size(shape),
                stride=torch.empty(shape, device="meta").stride(),
            )
            for name, (shape, _) in shapes.items()
        }

    def put(folder: Path, shapes: TensorShapes, layout: ReshardLayout, tensors: Mapping[str, Tensor]) -> None:
        dcp.save(state(shapes, layout, tensors), storage_writer=FileSystemWriter(folder), no_dist=layout.ranks == 1)

    def get(folder: Path, shapes: TensorShapes, layout: ReshardLayout, tensors: Mapping[str, Tensor]) -> None:
        dcp.load(state(shapes, layout, tensors), storage_reader=FileSystemReader(folder), no_dist=layout.ranks == 1)

    return ReshardSide(put, get)
