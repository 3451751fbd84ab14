"""Answer where this rank is on the mesh, and which part of a tensor and of a sequence it has.

First the axes: the size of an axis, this rank's index on it, over which axes a tensor is split, and which copy of a
shard is this rank's. Then the positions of a sequence: with context parallelism each rank of cp holds some of them, and
a forward hook tells the model which. Every technique may use this; nothing here changes a parameter.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate

from hpc_train.config.parallel import AXES
from hpc_train.config.run import RunConfig
from hpc_train.errors import UserError
from hpc_train.interfaces import DOCUMENT_STARTS, MicroBatch, World
from hpc_train.parallel.user_model import require_one_input

SHARD_CP_AXIS = "dp_shard_cp"
"""dp_shard and cp as one axis: ranks of one sequence hold gradients of different tokens, so they reduce together."""
EXPERT_SHARD_AXIS = "expert_shard"
"""The ranks of dp_shard x cp that hold the same experts: with ep they are that axis."""


def get_axis_degree(world: World, axis: str) -> int:
    """Return the degree of a mesh axis."""
    return world.mesh.size(AXES.index(axis))  # slicing the mesh takes half a millisecond, and this is asked often


def get_axis_index(world: World, axis: str) -> int:
    """Return this rank's index on a mesh axis."""
    return world.mesh.get_local_rank(axis)


def find_split_axes(tensor: Tensor) -> set[str]:
    """Find the mesh axes over which a tensor is split."""
    if not isinstance(tensor, DTensor):
        return set()
    names = tensor.device_mesh.mesh_dim_names or ()
    split = {
        name for name, placement in zip(names, tensor.placements, strict=True) if not isinstance(placement, Replicate)
    }
    joint = {SHARD_CP_AXIS, EXPERT_SHARD_AXIS, "ep"}  # experts are split over both of the last two
    return (split - joint) | ({"dp_shard", "cp"} if split & joint else set())


def find_replica(tensor: Tensor, world: World) -> tuple[int, int]:
    """Return (index of this rank's copy of its shard, number of copies); pipeline stages are never copies."""
    split, index, count = find_split_axes(tensor), 0, 1
    for axis in ("dp_replicate", "dp_shard", "cp", "tp"):
        if axis not in split:
            index = index * get_axis_degree(world, axis) + get_axis_index(world, axis)
            count *= get_axis_degree(world, axis)
    return index, count


def count_averaged_ranks(world: World) -> int:
    """Count the ranks over which collectives average gradients, where the step needs their sum."""
    return world.dp_size * get_axis_degree(world, "cp")


@dataclass(frozen=True)
class SequenceShare:
    """The part of every sequence that a rank of the cp axis has."""

    rank: int
    ranks: int
    balanced: bool
    """Cut into 2 x ranks chunks, of which rank r takes chunks r and 2 x ranks - 1 - r; else a chunk per rank."""

    def positions(self, length: int, device: torch.device | None = None) -> Tensor:
        """Return this rank's positions, (length / ranks,), int64, ascending; see chunks.

        device: to make them on; a GPU makes them itself, so that nothing has to come from the host.
        """
        return torch.cat([torch.arange(begin, end, device=device) for begin, end in self.chunks(length)])

    def select(self, tensor: Tensor) -> Tensor:
        """Select this rank's positions of (B, T, ...): slices, of which the host needs no index on the device."""
        return torch.cat([tensor[:, begin:end] for begin, end in self.chunks(tensor.shape[1])], 1)

    def chunks(self, length: int) -> list[tuple[int, int]]:
        """Return begin and end of each chunk of a sequence that this rank has.

        Raises UserError if `length` does not divide.
        """
        chunks = self.ranks * (2 if self.balanced else 1)
        if length % chunks:
            raise UserError(
                f"a sequence of {length} positions does not divide into the {chunks} equal parts that parallel.cp="
                f"{self.ranks} takes; use sequences of a multiple of {chunks}"
            )
        size = length // chunks
        chunks_of_rank = (self.rank, chunks - 1 - self.rank) if self.balanced else (self.rank,)
        return [(chunk * size, (chunk + 1) * size) for chunk in chunks_of_rank]


def get_sequence_share(config: RunConfig, world: World) -> SequenceShare:
    """Return this rank's share of every sequence."""
    context, ranks = config.parallel.context, get_axis_degree(world, "cp")
    return SequenceShare(
        get_axis_index(world, "cp"), ranks, context.method == "ring" and context.balanced and ranks > 1
    )


def move_batch(micro: MicroBatch, device: torch.device, model: nn.Module) -> MicroBatch:
    """Return a micro-batch on `device`, floating-point values in the type of the model's: NumPy's are float64.

    The host does not wait for copies from pinned memory to a GPU.
    """
    dtypes = (parameter.dtype for parameter in model.parameters() if parameter.is_floating_point())
    dtype = next(dtypes, torch.get_default_dtype())

    def move(tensor: Tensor) -> Tensor:
        moved = tensor.to(device, non_blocking=True)
        return moved.to(dtype) if moved.is_floating_point() else moved

    return micro.map(move)


def select_local_tokens(micro: MicroBatch, config: RunConfig, world: World) -> MicroBatch:
    """Select this rank's positions of a micro-batch: inputs and targets (B, T) -> (B, T / cp)."""
    cp = get_axis_degree(world, "cp")
    if cp == 1:
        return micro
    inputs = require_one_input(micro.inputs, f"parallel.cp={cp}", "only one tensor of positions is split over ranks")
    share = get_sequence_share(config, world)
    return MicroBatch(share.select(inputs), share.select(micro.targets))


def provide_positions(part: nn.Module, config: RunConfig, world: World) -> None:
    """Give every forward of `part` the argument `positions` (T,), T being the length before tp splits positions.

    A caller's own `positions` go first, so that two techniques may both ask for this.
    """
    share, tp = get_sequence_share(config, world), get_axis_degree(world, "tp")
    splits = config.parallel.tensor.sequence and "seq" in getattr(part, "plan", {}).values()

    def fill(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]] | None:
        if len(args) > 1 or kwargs.get("positions") is not None:
            return None
        if DOCUMENT_STARTS in kwargs:  # packed documents, of which every rank has whole sequences (see rules of cp)
            return None
        x = require_one_input(args[0] if args else kwargs, f"parallel.tp={tp}", "the plan splits positions of one")
        is_full = getattr(part, "is_first", not x.is_floating_point())  # tp splits hidden states, and no tokens
        length = x.shape[1] * (tp if splits and not is_full else 1)
        positions = share.positions(length * share.ranks, x.device)
        return args, {**kwargs, "positions": positions}

    part.register_forward_pre_hook(fill, with_kwargs=True)
