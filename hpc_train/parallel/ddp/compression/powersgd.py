"""powersgd: gradients as products of two thin matrices, found by one step of power iteration that starts where the last
one ended; what the product misses is added to the gradients of the next step.

Vogels, Karimireddy, Jaggi 2019, PowerSGD, arXiv:1905.13727, algorithms 1 and 2. torch's powerSGD_hook has the same
method; with more than one bucket its chained collectives block each other on gloo for ever (2.13).
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor

from hpc_train.parallel.ddp.bucket import Bucket


class PowerSGD:
    """A rank-r approximation of each matrix for which that is less to send; everything else in full."""

    def __init__(self, rank: int, feedback: bool, group: dist.ProcessGroup) -> None:
        self._rank, self._feedback, self._group = rank, feedback, group
        self._bases: dict[int, list[Tensor]] = {}
        self._missed: dict[int, list[Tensor]] = {}

    def reduce(self, bucket: Bucket) -> None:
        """See bucket.Method. Two collectives: (P and what goes in full), (Q)."""
        matrices, rest = self._divide(bucket.gradients)
        bucket.buffer.div_(self._group.size())
        if bucket.index in self._missed:
            for matrix, missed in zip(matrices, self._missed[bucket.index], strict=True):
                matrix += missed
        bases = self._bases.get(bucket.index) or [self._begin(matrix) for matrix in matrices]
        products = [matrix @ basis for matrix, basis in zip(matrices, bases, strict=True)]
        self._add_up([*products, *rest])
        left = [torch.linalg.qr(product).Q for product in products]
        right = [matrix.T @ p for matrix, p in zip(matrices, left, strict=True)]
        unsent = [torch.addmm(m, p, q.T, alpha=-1) for m, p, q in zip(matrices, left, right, strict=True)]
        self._add_up(right)
        for matrix, p, q in zip(matrices, left, right, strict=True):
            torch.mm(p, q.T, out=matrix)
        # A step whose gradient is not finite is not taken; the memory must outlive it.
        if all(bool(q.isfinite().all()) for q in right):
            self._remember(bucket.index, right, unsent)

    def _divide(self, gradients: list[Tensor]) -> tuple[list[Tensor], list[Tensor]]:
        """(the matrices that are approximated, as views (rows, all other dimensions); what goes in full)."""
        matrices = [gradient.view(len(gradient), -1) for gradient in gradients if gradient.ndim > 1]
        rest = [gradient for gradient in gradients if gradient.ndim < 2]
        chosen = [matrix for matrix in matrices if self._pays(*matrix.shape)]
        return chosen, rest + [matrix for matrix in matrices if not self._pays(*matrix.shape)]

    def _pays(self, rows: int, columns: int) -> bool:
        return self._rank * (rows + columns) < rows * columns

    def _begin(self, matrix: Tensor) -> Tensor:
        """Orthonormal columns (columns of the matrix, r), the same on every rank."""
        generator = torch.Generator().manual_seed(matrix.numel())
        drawn = torch.randn(matrix.shape[1], self._rank, generator=generator, dtype=torch.float64)
        basis: Tensor = torch.linalg.qr(drawn).Q.to(matrix)
        return basis

    def _add_up(self, tensors: list[Tensor]) -> None:
        """Add up over all ranks, in place, all in one collective."""
        if not tensors:
            return
        flat = torch.cat([tensor.flatten() for tensor in tensors])
        dist.all_reduce(flat, group=self._group)
        for tensor, added in zip(tensors, torch.split(flat, [t.numel() for t in tensors]), strict=True):
            tensor.copy_(added.view_as(tensor))

    def _remember(self, index: int, right: list[Tensor], missed: list[Tensor]) -> None:
        # Orthonormal again: a gradient of 0 must not end the iteration.
        self._bases[index] = [torch.linalg.qr(q).Q for q in right]
        if self._feedback:
            self._missed[index] = missed
