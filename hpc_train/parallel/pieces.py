"""What a rank holds of the model and of the optimizer, as rectangles of logical tensors (api.Piece)."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from heapq import heapreplace

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from hpc_train.api import Piece, World
from hpc_train.compat import shard_offset
from hpc_train.parallel.axes import copies


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


def pieces(
    parts: Sequence[nn.Module],
    optimizer: torch.optim.Optimizer,
    world: World,
    borrowed: frozenset[nn.Parameter] = frozenset(),
) -> Iterator[Piece]:
    """Parameters, persistent buffers and optimizer state of this rank's stages.

    In the same order on every call, and on every rank that holds the same stages. What belongs to a `borrowed`
    parameter is loaded here and written by the stage that owns it. What is trained, and its optimizer state, is still:
    a forward may write buffers, and parameters that are not trained.
    """
    writers = _Writers()
    for part in parts:
        for parameter, name, tensor in _entries(part, optimizer):
            still = parameter is not None and parameter.requires_grad
            yield replace(_piece(name, tensor.detach(), writers, world, parameter in borrowed), still=still)


def _entries(part: nn.Module, optimizer: torch.optim.Optimizer) -> list[tuple[nn.Parameter | None, str, Tensor]]:
    named = [(p, name) for name, p in part.named_parameters() if p.requires_grad]
    frozen = [(p, name) for name, p in part.named_parameters() if not p.requires_grad]
    persistent = set(part.state_dict(keep_vars=True))
    entries: list[tuple[nn.Parameter | None, str, Tensor]] = [(p, name, p) for p, name in [*named, *frozen]]
    entries += [(None, name, buffer) for name, buffer in part.named_buffers() if name in persistent]
    for p, name in named:
        entries += [(p, f"optim.{key}.{name}", value) for key, value in optimizer.state[p].items()]
    return entries


class _Writers:
    """Which of several holders of a copy writes it: the one that has least to write so far, the same on every rank."""

    def __init__(self) -> None:
        self._loads: dict[int, list[tuple[int, int]]] = {}

    def next(self, copies: int, elements: int) -> int:
        loads = self._loads.setdefault(copies, [(0, holder) for holder in range(copies)])
        load, holder = loads[0]
        heapreplace(loads, (load + elements, holder))
        return holder


def _piece(name: str, tensor: Tensor, writers: _Writers, world: World, borrowed: bool) -> Piece:
    mine, count = copies(tensor, world)
    replica = (mine - writers.next(count, tensor.numel())) % count + (count if borrowed else 0)
    shape = tuple(tensor.shape)
    if isinstance(tensor, DTensor):
        return Piece(name, shape, tensor.dtype, shard_offset(tensor), tensor.to_local(), replica)
    return Piece(name, shape, tensor.dtype, (0,) * tensor.ndim, tensor, replica)
