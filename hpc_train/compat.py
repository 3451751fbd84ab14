"""Every private torch API that this project uses, each with its reason. Checked on torch 2.11 to 2.13."""

from __future__ import annotations

from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset


def shard_offset(tensor: DTensor) -> tuple[int, ...]:
    """Where this rank's rectangle of a DTensor begins.

    Private because torch has no public way to ask a DTensor which part of the whole its local tensor is.
    """
    _, offset = compute_local_shape_and_global_offset(tensor.shape, tensor.device_mesh, tensor.placements)
    return tuple(offset)


def flatten(mesh: DeviceMesh, name: str) -> DeviceMesh:
    """Several axes of a mesh as one, which its root mesh then knows by `name` too; every rank of the job calls it.

    Private because torch has no public way to reduce over two axes at once. The same call twice is harmless.
    """
    return mesh._flatten(name)
