"""Which part of a DTensor a rank holds, and the local tensor of one."""

from __future__ import annotations

from copy import copy
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.distributed.tensor import DTensor, Partial, Placement, Shard
from torch.distributed.tensor._dtensor_spec import DTensorSpec
from torch.distributed.tensor.placement_types import _StridedShard


def shard_offset(tensor: DTensor) -> tuple[int, ...]:
    """Return the offset of this rank's rectangle in a DTensor."""
    coordinate = tensor.device_mesh.get_coordinate()
    assert coordinate is not None, "this rank is not on the tensor's mesh"
    size, offset = shard_rectangle(tensor, tuple(coordinate))
    assert size == tensor.to_local().shape, f"{tensor.placements} of {tuple(tensor.shape)}"
    return offset


def shard_rectangle(tensor: DTensor, coordinate: tuple[int, ...]) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return (shape, offset) of what the rank at this coordinate of its mesh holds of a DTensor.

    torch has no public way to ask a DTensor which part of the whole its local tensor is. Its private one is wrong where
    fully_shard has cut shards of unequal size that lie on another axis already: that is a _StridedShard, private too,
    and means that this axis was cut after those to its right.
    """
    offset, size, mesh = [0] * tensor.ndim, list(tensor.shape), tensor.device_mesh
    cuts = [
        (axis, placement)
        for axis, placement in enumerate(tensor.placements)
        if isinstance(placement, (Shard, _StridedShard))
    ]
    for axis, placement in sorted(cuts, key=lambda cut: isinstance(cut[1], _StridedShard)):
        chunk = -(-size[placement.dim] // mesh.size(axis))
        begin = min(chunk * coordinate[axis], size[placement.dim])
        offset[placement.dim] += begin
        size[placement.dim] = min(chunk, size[placement.dim] - begin)
    return tuple(size), tuple(offset)


def cut_dimension(placement: Placement) -> int | None:
    """Return the dimension of a DTensor that a mesh axis cuts; None if it cuts none.

    Private because a _StridedShard is.
    """
    return placement.dim if isinstance(placement, (Shard, _StridedShard)) else None


def set_local(tensor: DTensor, local: Tensor) -> None:
    """Let a DTensor hold `local`, of the same shape and dtype, in place of what it holds of the whole now.

    Private because DTensor.from_local would copy a tensor in CPU memory to the device of the mesh.
    """
    tensor._local_tensor = local


def read_local(parameter: DTensor, partial: bool) -> Tensor:
    """Return the local tensor of a parameter, differentiably, as DTensor.to_local() does.

    partial: whether the ranks' gradients are parts of a sum, instead of being placed as the parameter is.
    Private because the backward of to_local() works out the layout of every gradient anew, which takes six times as
    long: 135 us for each parameter, of 20 with the layout of the parameter.
    """
    if not torch.is_grad_enabled():
        return parameter._local_tensor
    local: Tensor = _ReadLocal.apply(parameter, partial)  # type: ignore[no-untyped-call]
    return local


class _ReadLocal(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, parameter: DTensor, partial: bool) -> Tensor:
        ctx.spec, ctx.partial = parameter._spec, partial
        ctx.set_materialize_grads(False)
        local = parameter._local_tensor
        ctx.stride = local.stride()
        return local.view_as(local)  # another object: autograd marks it as computed

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor | None) -> tuple[DTensor | None, None]:
        if gradient is None:
            return None, None
        if gradient.stride() != ctx.stride:
            gradient = torch.empty_strided(
                gradient.shape, ctx.stride, dtype=gradient.dtype, device=gradient.device
            ).copy_(gradient)
        if ctx.partial:
            placements = (Partial(),) * ctx.spec.mesh.ndim
            spec = DTensorSpec(ctx.spec.mesh, placements, tensor_meta=ctx.spec.tensor_meta)
        else:
            spec = copy(ctx.spec)  # DTensor's operations may change the one that a tensor has
        return DTensor(gradient, spec, requires_grad=False), None  # type: ignore[no-untyped-call]
