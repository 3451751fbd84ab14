"""Where a rank stands on the mesh, and which axes a tensor is split over."""

from __future__ import annotations

from torch import Tensor
from torch.distributed.tensor import DTensor, Replicate

from hpc_train.api import World
from hpc_train.config.degrees import AXES

SHARD_CONTEXT = "dp_shard_cp"
"""dp_shard and cp as one axis: ranks of one sequence hold gradients of different tokens, so they reduce together."""


def degree(world: World, axis: str) -> int:
    """Size of a mesh axis."""
    return world.mesh.size(AXES.index(axis))  # slicing the mesh takes half a millisecond, and this is asked often


def index(world: World, axis: str) -> int:
    """Where this rank is on a mesh axis."""
    return world.mesh.get_local_rank(axis)


def split_axes(tensor: Tensor) -> set[str]:
    """The mesh axes over which ranks hold different parts of a tensor."""
    if not isinstance(tensor, DTensor):
        return set()
    names = tensor.device_mesh.mesh_dim_names or ()
    split = {name for name, how in zip(names, tensor.placements, strict=True) if not isinstance(how, Replicate)}
    return (split - {SHARD_CONTEXT}) | ({"dp_shard", "cp"} if SHARD_CONTEXT in split else set())


def copies(tensor: Tensor, world: World) -> tuple[int, int]:
    """(which copy of what this rank holds of a parameter it is, of how many); stages are not copies of one another."""
    split, mine, count = split_axes(tensor), 0, 1
    for axis in ("dp_replicate", "dp_shard", "cp", "tp"):
        if axis not in split:
            mine = mine * degree(world, axis) + index(world, axis)
            count *= degree(world, axis)
    return mine, count
