"""What a rank holds of the model and of the optimizer, as rectangles of logical tensors (api.Piece)."""

from __future__ import annotations

from collections.abc import Iterator
from heapq import heapreplace

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate

from hpc_train.api import Piece, World
from hpc_train.compat import shard_offset


def prime(optimizer: torch.optim.Optimizer) -> None:
    """Create the optimizer's state, which torch makes at the first step only, so that it can be saved and loaded.

    A step with a learning rate and a gradient of 0 leaves every parameter as it is.
    """
    rates = [group["lr"] for group in optimizer.param_groups]
    for group in optimizer.param_groups:
        group["lr"] = 0.0
        for parameter in group["params"]:
            parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    for group, rate in zip(optimizer.param_groups, rates, strict=True):
        group["lr"] = rate
        for parameter in group["params"]:
            optimizer.state[parameter]["step"].zero_()


def pieces(model: nn.Module, optimizer: torch.optim.Optimizer, world: World) -> Iterator[Piece]:
    """Parameters, persistent buffers and optimizer state of this rank, in the same order on every call and rank."""
    named = [(name, parameter) for name, parameter in model.named_parameters() if parameter.requires_grad]
    frozen = [(name, parameter) for name, parameter in model.named_parameters() if not parameter.requires_grad]
    persistent = set(model.state_dict(keep_vars=True))
    buffers = [(name, buffer) for name, buffer in model.named_buffers() if name in persistent]
    entries: list[tuple[str, Tensor]] = [*named, *frozen, *buffers]
    for name, parameter in named:
        entries += [(f"optim.{key}.{name}", value) for key, value in optimizer.state[parameter].items()]
    writers = _Writers()
    for name, tensor in entries:
        yield _piece(name, tensor.detach(), writers, world)


class _Writers:
    """Which of several holders of a copy writes it: the one that has least to write so far, the same on every rank."""

    def __init__(self) -> None:
        self._loads: dict[int, list[tuple[int, int]]] = {}

    def next(self, copies: int, elements: int) -> int:
        loads = self._loads.setdefault(copies, [(0, holder) for holder in range(copies)])
        load, holder = loads[0]
        heapreplace(loads, (load + elements, holder))
        return holder


def _piece(name: str, tensor: Tensor, writers: _Writers, world: World) -> Piece:
    shape, count = tuple(tensor.shape), tensor.numel()
    if not isinstance(tensor, DTensor):
        replica = (world.rank - writers.next(world.size, count)) % world.size
        return Piece(name, shape, tensor.dtype, (0,) * tensor.ndim, tensor, replica)
    mesh, holder, copies = tensor.device_mesh, 0, 1
    for axis, placement in enumerate(tensor.placements):
        if isinstance(placement, Replicate):
            holder = holder * mesh.size(axis) + mesh.get_local_rank(axis)
            copies *= mesh.size(axis)
    replica = (holder - writers.next(copies, count)) % copies
    return Piece(name, shape, tensor.dtype, shard_offset(tensor), tensor.to_local(), replica)
