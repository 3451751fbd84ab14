"""Ulysses: exchange positions for heads around attention (Jacobs et al. 2023, arXiv:2309.14509).

    q, k, v     (B, heads, T / cp, d)   three all-to-alls   (B, heads / cp, T, d)
    attention   of some heads over the whole sequence, by any kernel of one device
    its result  (B, heads / cp, T, d)   one all-to-all      (B, heads, T / cp, d)

Backward is the same four exchanges in reverse. In each, a rank sends (cp - 1) / cp of a tensor, so that the volume does
not grow with cp, but nothing is computed meanwhile: the ring overlaps, and needs no number of heads that divides.
"""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from hpc_train.errors import UserError
from hpc_train.parallel.context.block_attention import cast_to_autocast


class _AllToAll(torch.autograd.Function):
    """All-to-all of x (ranks, ...): sends part i to rank i and receives part i from it. It is its own adjoint."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        return _exchange(x, group)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        return _exchange(gradients[0], ctx.group), None


def _exchange(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    x = x.contiguous()
    out = torch.empty_like(x)
    dist.all_to_all_single(out, x, group=group)
    return out


def exchange_for_heads(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Exchange all heads of some positions (B, heads, T / cp, d) for some heads of all positions (B, heads / cp, T, d).

    Rank r gets the r-th of cp parts of the heads.
    """
    batch, heads, length, width = x.shape
    parts = x.reshape(batch, group.size(), heads // group.size(), length, width).movedim(1, 0)
    gathered: Tensor = _AllToAll.apply(parts, group)  # type: ignore[no-untyped-call]
    return gathered.movedim(0, 2).flatten(2, 3)


def exchange_for_positions(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Exchange back: (B, heads / cp, T, head_dim) to (B, heads, T / cp, head_dim)."""
    batch, heads, length, width = x.shape
    parts = x.reshape(batch, heads, group.size(), length // group.size(), width).movedim(2, 0)
    gathered: Tensor = _AllToAll.apply(parts, group)  # type: ignore[no-untyped-call]
    return gathered.movedim(0, 1).flatten(1, 2)


class UlyssesAttention(nn.Module):
    """Attention over a sequence whose positions are split over the ranks of `group`, in order; no parameters.

    Each rank runs `core` with a part of the heads over all positions. If there are fewer key and value heads than
    ranks, they are copied to several ranks, and their gradients are summed. Four exchanges forward, four backward.
    """

    def __init__(self, core: nn.Module, group: dist.ProcessGroup) -> None:
        super().__init__()
        self.core = core
        self._group = group

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Attend: q (B, heads, T / cp, head_dim), k and v (B, kv_heads, T / cp, head_dim); returns a tensor like q.

        Raises UserError if the heads do not divide by the size of the group.
        """
        ranks = self._group.size()
        if q.shape[1] % ranks:
            raise UserError(
                f"parallel.context.method=ulysses: {q.shape[1]} heads do not divide over parallel.cp={ranks} ranks; "
                "use parallel.context.method=ring"
            )
        q, k, v = cast_to_autocast(q, k, v)
        times = ranks // math.gcd(k.shape[1], ranks)
        k, v = (x.repeat_interleave(times, dim=1) if times > 1 else x for x in (k, v))
        mixed: Tensor = self.core(*(exchange_for_heads(x, self._group) for x in (q, k, v)))
        return exchange_for_positions(mixed, self._group)
