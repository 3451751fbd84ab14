"""What ranks of the tp axis exchange: activations (B, T, features), whole on each rank or split over positions."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.distributed.device_mesh import DeviceMesh

from hpc_train.compat import all_gather, reduce_scatter
from hpc_train.errors import UserError

Operation = Callable[[Tensor], Tensor]


@dataclass(frozen=True)
class Axis:
    """The ranks that share the matrices of a layer, and how activations lie on them between the layers."""

    mesh: DeviceMesh
    sequence: bool
    """Between layers each rank has T / size positions (Korthikanti et al. 2022, arXiv:2205.05198), else all T."""

    @property
    def group(self) -> dist.ProcessGroup:
        """Of the tp axis."""
        return self.mesh.get_group()

    @property
    def rank(self) -> int:
        """Of this process on the axis."""
        return self.mesh.get_local_rank()

    @property
    def size(self) -> int:
        """Its degree."""
        return self.mesh.size()

    def enter(self, x: Tensor) -> Tensor:
        """The input of column-parallel layers: what lies between layers -> all positions; backward adds over ranks.

        Megatron's f (Shoeybi et al. 2019, arXiv:1909.08053), or g of the paper above where positions are split.
        """
        return _exchange(x, self.gather, self.scatter) if self.sequence else _exchange(x, _same, self.total)

    def leave(self, x: Tensor) -> Tensor:
        """The output of row-parallel layers, a summand on each rank -> their sum, as it lies between layers."""
        return _exchange(x, self.scatter, self.gather) if self.sequence else _exchange(x, self.total, _same)

    def split(self, x: Tensor) -> Tensor:
        """What is whole and the same on each rank -> as activations lie between layers."""
        return _exchange(x, self.own, self.gather) if self.sequence else x

    def join(self, x: Tensor) -> Tensor:
        """The input of a layer that every rank runs whole: what lies between layers -> all positions."""
        return _exchange(x, self.gather, self.own) if self.sequence else x

    def gather(self, x: Tensor) -> Tensor:
        """(B, T / size, ...) of each rank -> (B, T, ...)."""
        parts = x.new_empty(self.size, *x.shape)
        all_gather(parts, x.contiguous(), self.group)
        return parts.transpose(0, 1).flatten(1, 2)

    def scatter(self, x: Tensor) -> Tensor:
        """(B, T, ...), a summand on each rank -> this rank's positions of the sum, (B, T / size, ...)."""
        parts = self._parts(x).transpose(0, 1).contiguous()
        mine = torch.empty_like(parts[0])
        reduce_scatter(mine, parts, self.group)
        return mine

    def total(self, x: Tensor) -> Tensor:
        """The sum over ranks."""
        out = x.clone(memory_format=torch.contiguous_format)
        dist.all_reduce(out, group=self.group)
        return out

    def own(self, x: Tensor) -> Tensor:
        """(B, T, ...) -> this rank's positions, (B, T / size, ...)."""
        return self._parts(x)[:, self.rank].clone()

    def _parts(self, x: Tensor) -> Tensor:
        """(B, T, ...) -> (B, size, T / size, ...)."""
        if x.shape[1] % self.size:
            raise UserError(
                f"a sequence of {x.shape[1]} positions does not divide over parallel.tp={self.size}; "
                "use another length, or parallel.tensor.sequence=false"
            )
        return x.view(len(x), self.size, -1, *x.shape[2:])


def _same(x: Tensor) -> Tensor:
    return x.view_as(x)


def _exchange(x: Tensor, there: Operation, back: Operation) -> Tensor:
    out: Tensor = _Exchange.apply(x, there, back)  # type: ignore[no-untyped-call]
    return out


class _Exchange(torch.autograd.Function):
    """A linear operation and its transpose."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, there: Operation, back: Operation) -> Tensor:
        ctx.back = back
        return there(x)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        return ctx.back(gradient), None, None
