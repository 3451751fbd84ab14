"""Context parallel attention with dropout of weights: gathers the keys and values of all ranks, without a ring.

The ring's kernels take no mask of weights. A rank keeps the keys and values of the whole sequence, and the scores of
one block of its own queries.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from hpc_train.compat import all_gather, reduce_scatter
from hpc_train.models.attention import ScaledDotProduct
from hpc_train.models.dropped_attention import attend_with_dropout
from hpc_train.parallel.context.block_attention import as_autocast
from hpc_train.parallel.context.positions import Share


class _Gather(torch.autograd.Function):
    """Gather x from each rank -> (ranks, ...); backward sums the gradients that all ranks have for this rank's x."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        parts = x.new_empty(group.size(), *x.shape)
        all_gather(parts, x.contiguous(), group)
        return parts

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        parts = gradients[0].contiguous()
        mine = torch.empty_like(parts[0])
        reduce_scatter(mine, parts, ctx.group)
        return mine, None


class GatheredAttention(nn.Module):
    """Attention of a rank's queries to the keys of the whole sequence, with dropout; has no parameters."""

    def __init__(self, core: ScaledDotProduct, group: dist.ProcessGroup, share: Share) -> None:
        super().__init__()
        self.core = core
        self._group, self._share = group, share

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Map q (B, heads, T / cp, head_dim), k and v (B, kv_heads, T / cp, head_dim) to the shape of q."""
        q, k, v = as_autocast(q, k, v)
        both: Tensor = _Gather.apply(torch.stack((k, v)), self._group)  # type: ignore[no-untyped-call]
        k, v = both.permute(1, 2, 3, 0, 4, 5).flatten(3, 4)
        length, ranks = q.shape[2], self._group.size()
        shares = [Share(rank, ranks, self._share.balanced) for rank in range(ranks)]
        places = [one.positions(length * ranks).to(q.device, non_blocking=True) for one in shares]
        site, p = self.core.site, self.core.dropout if self.training else 0.0
        assert site is not None
        return attend_with_dropout(q, k, v, places[self._share.rank], torch.cat(places), self.core.causal, site, p)
