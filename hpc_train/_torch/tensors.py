"""Operations on many tensors in one kernel, and facts about a tensor's memory."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.distributed.tensor import DTensor
from torch.utils._pytree import tree_leaves as tree_leaves  # what DDP and fully_shard see of a model's output
from torch.utils._pytree import tree_map_only as tree_map_only  # no public way to map over their arguments


def multiply_tensors(tensors: list[Tensor], factor: float | Tensor) -> None:
    """Multiply every tensor by `factor`, a number or a tensor of one, in place.

    Private because torch has no public way to do it to many tensors with one kernel.
    """
    torch._foreach_mul_(tensors, factor)


def interpolate_tensors(targets: list[Tensor], ends: list[Tensor], weight: float) -> None:
    """Move every target, in place, towards its end by a share `weight` of the way.

    Private because torch has no public way to do it to many tensors with one kernel.
    """
    torch._foreach_lerp_(targets, ends, weight)


def find_largest_magnitudes(tensors: list[Tensor]) -> list[Tensor]:
    """Return the largest magnitude in every tensor, as scalars.

    Private because torch has no public way to do it to many tensors with one kernel.
    """
    return list(torch._foreach_norm(tensors, math.inf))


def copy_tensor_lists(targets: list[Tensor], sources: list[Tensor]) -> None:
    """Copy every source into its target, of the same shape. Lets other threads run meanwhile.

    Private because torch has no public way to copy many tensors by one call.
    """
    with torch.no_grad():
        torch._foreach_copy_(targets, sources)


def orthogonalise(matrix: Tensor, steps: int) -> Tensor:
    """Return the matrix with singular values near 1, in bfloat16, by Newton-Schulz iterations; may change the matrix.

    Private because torch offers it only inside torch.optim.Muon, which needs the whole matrix on each rank.
    """
    from torch.optim import _muon  # few runs need it

    coefficients = (_muon.DEFAULT_A, _muon.DEFAULT_B, _muon.DEFAULT_C)
    return _muon._zeropower_via_newtonschulz(matrix, coefficients, steps, _muon.EPS)


def compile_for_each_shape(function: Callable[..., None]) -> Callable[..., None]:
    """Compile a function separately for each shape of its arguments, however many shapes there are.

    Private because torch otherwise gives up after eight, and has no public way to say so for one function.
    """
    from torch._dynamo.utils import disable_cache_limit

    compiled = torch.compile(function, fullgraph=True, dynamic=False)

    def call(*arguments: Any) -> None:
        with disable_cache_limit():
            compiled(*arguments)

    return call


def check_on_device(condition: Tensor, message: str) -> None:
    """Fail with RuntimeError where `condition`, a scalar, is false, without waiting for the device to know.

    Private because the public assert waits.
    """
    torch._assert_async(condition, message)


def tensor_version(tensor: Tensor) -> int:
    """Return how many times a tensor was changed in place.

    Private because torch has no public way to tell whether it still holds the values it held when it was seen before.
    """
    return tensor._version


def memory_number(tensor: Tensor) -> int:
    """Return a number that identifies a tensor's memory as long as it exists; works on the meta device too.

    Private because the public pointer is 0 if there is no memory.
    """
    return int(tensor.untyped_storage()._cdata)


def is_memoryless(tensor: Tensor) -> bool:
    """Whether a tensor, or what a DTensor holds here, has no memory as in a rehearsal (rehearsal.py)."""
    return isinstance(tensor._local_tensor if isinstance(tensor, DTensor) else tensor, FakeTensor)
