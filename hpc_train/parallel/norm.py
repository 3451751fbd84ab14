"""The norm of the gradient over all axes, and clipping to it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from hpc_train.api import World
from hpc_train.compat import multiply
from hpc_train.parallel.axes import copies, degree, split_axes


def total_norm(parameters: Sequence[nn.Parameter], world: World, borrowed: frozenset[nn.Parameter]) -> Tensor:
    """Norm of the whole model's gradient, a scalar on the device, the same on every rank.

    parameters: those of this rank. borrowed: those among them that another stage counts (tied embeddings). Of several
    copies of a shard only the first counts.
    """
    gradients = [(p, p.grad) for p in parameters if p.grad is not None]
    local = not any(split_axes(p) for p in parameters) and degree(world, "pp") == 1
    counted = [g for p, g in gradients if local or (p not in borrowed and copies(p, world)[0] == 0)]
    norm = nn.utils.get_total_norm([_local(gradient) for gradient in counted]).to(world.device)
    if local or world.size == 1:
        return norm
    square = norm.double().square()
    dist.all_reduce(square)
    return square.sqrt()


def _local(gradient: Tensor) -> Tensor:
    return gradient.to_local() if isinstance(gradient, DTensor) else gradient


def clip(parameters: Iterable[nn.Parameter], max_norm: float, norm: Tensor) -> None:
    """Scale the gradients so that a total norm of `norm` becomes at most max_norm.

    As torch.nn.utils.clip_grads_with_norm_, but by what this rank holds: over DTensors torch plans the product of the
    whole list at the first step, which takes a second for 26 tensors on three axes.
    """
    factor = torch.clamp(max_norm / (norm + 1e-6), max=1.0)
    alike: dict[tuple[torch.device, torch.dtype], list[Tensor]] = {}
    for gradient in (_local(p.grad) for p in parameters if p.grad is not None):
        alike.setdefault((gradient.device, gradient.dtype), []).append(gradient)
    for (device, _), gradients in alike.items():
        multiply(gradients, factor.to(device))


def scale_gradients(parameters: Iterable[nn.Parameter], factor: float) -> None:
    """Multiply every gradient by `factor`, in place."""
    gradients = [_local(p.grad) for p in parameters if p.grad is not None]
    if gradients:
        multiply(gradients, factor)
