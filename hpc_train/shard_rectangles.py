"""The rectangles of a whole tensor that a rank holds: one of most tensors, several of a fused matrix.

A matrix that makes queries, keys and values at once has three parts one below the other. A rank of a split over heads
has rows of each part, and stores them one below the other. Of the whole matrix that is three rectangles:

    whole     q0 q1 | k0 k1 | v0 v1
    rank 0    q0 k0 v0        rank 1    q1 k1 v1

The DTensor of such a matrix is split plainly in the order in which the ranks store it, `q0 k0 v0 q1 k1 v1`. Elementwise
optimizers, norms and fully_shard need to know no more. Only what names an element of the whole, as a checkpoint does,
asks here.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from hpc_train._torch.dtensor import shard_offset
from hpc_train.errors import UserError


@dataclass(frozen=True)
class FusedParts:
    """How a tensor with several parts along one dimension is split over ranks: each part equally."""

    dim: int
    sizes: tuple[int, ...]
    """Length of each part of the whole; a multiple of `ranks`."""
    ranks: int

    @property
    def total(self) -> int:
        """Length of all parts."""
        return sum(self.sizes)

    def list_runs(self, begin: int, length: int) -> list[tuple[int, int, int]]:
        """Return where a range of the stored order lies in the whole: (first stored, first in the whole, length)."""
        runs = []
        stored = 0
        for rank in range(self.ranks):
            part_begin = 0
            for size in self.sizes:
                share = size // self.ranks
                first, last = max(begin, stored), min(begin + length, stored + share)
                if first < last:
                    runs.append((first, part_begin + rank * share + first - stored, last - first))
                stored, part_begin = stored + share, part_begin + size
        return runs

    def fit(self, shape: tuple[int, ...]) -> FusedParts | None:
        """Return the parts of optimizer state of this shape; None: it has none.

        State has an entry for each number of the parameter, for a block of them, or for all. Raises UserError where a
        block would be in two parts.
        """
        if len(shape) <= self.dim or shape[self.dim] == 1:
            return None
        block = self.total // shape[self.dim]
        if any(size % (block * self.ranks) for size in self.sizes):
            raise UserError(
                f"optim: its state has one entry for {block} numbers, which would be of two parts of a fused matrix "
                f"over parallel.tp={self.ranks}; use another optim.state, or parallel=fsdp"
            )
        return replace(self, sizes=tuple(size // block for size in self.sizes))

    def find_rectangles(
        self, offset: tuple[int, ...], shape: tuple[int, ...]
    ) -> list[tuple[int, tuple[int, ...], tuple[int, ...]]]:
        """Return the rectangles of one that is given in the stored order: (first index in it, offset, shape)."""
        return [
            (
                stored - offset[self.dim],
                (*offset[: self.dim], first, *offset[self.dim + 1 :]),
                (*shape[: self.dim], length, *shape[self.dim + 1 :]),
            )
            for stored, first, length in self.list_runs(offset[self.dim], shape[self.dim])
        ]


def find_fused_parts(module: nn.Module) -> dict[nn.Parameter, FusedParts]:
    """Return the parts of each fused parameter of a module that tensor parallelism has split."""
    return {
        parameter: layout.fused
        for submodule in module.modules()
        for name, layout in getattr(submodule, "_layouts", {}).items()
        if layout.fused is not None and (parameter := submodule._parameters[name]) is not None
    }


def list_rectangles(tensor: Tensor, fused: FusedParts | None = None) -> list[tuple[tuple[int, ...], Tensor]]:
    """Return (offset in the whole, this rank's data) of each rectangle that this rank has; data are views.

    fused: the parts of a fused parameter, or of its optimizer state.
    """
    tensor = tensor.detach()
    if not isinstance(tensor, DTensor):
        return [((0,) * tensor.ndim, tensor)]
    offset, local = shard_offset(tensor), tensor.to_local()
    if fused is None or math.prod(local.shape) == 0:
        return [(offset, local)]
    found = fused.find_rectangles(offset, tuple(local.shape))
    return [(place, local.narrow(fused.dim, first, shape[fused.dim])) for first, place, shape in found]
