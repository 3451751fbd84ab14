"""Attention with dropout of its weights by models.dropout, computed in blocks of queries.

torch's fused kernels take no mask of weights. So scores are computed in blocks and again in backward (Dao et al. 2022,
arXiv:2205.14135, algorithms 2 and 4): what is kept is O(T), and peak memory is bounded.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from hpc_train.models.dropout import Site, dropped_weights, head_rows

SCORES = 1 << 24
"""Approximate number of scores in one block: 64 MiB in float32."""


@dataclass(frozen=True)
class _Options:
    causal: bool
    p: float


def attend_with_dropout(
    q: Tensor, k: Tensor, v: Tensor, queries: Tensor, keys: Tensor, causal: bool, site: Site, p: float
) -> Tensor:
    """Return softmax(q k^T / sqrt(head_dim)) with a share `p` of its weights zeroed, times v; same shape as q.

    q (B, heads, T, head_dim), k and v (B, kv_heads, S, head_dim), queries (T,) and keys (S,) their positions. causal: a
    query sees only keys at its own or earlier positions.
    """
    if q.shape[1] != k.shape[1]:
        k, v = (x.repeat_interleave(q.shape[1] // k.shape[1], dim=1) for x in (k, v))
    keys = keys.clone() if keys is queries else keys  # torch.compile does not accept the same tensor twice
    rows = head_rows(site, q.shape[1]) if p > 0 else queries.new_empty(0)
    out: Tensor = _Attention.apply(q, k, v, queries, keys, rows, _Options(causal, p))  # type: ignore[no-untyped-call]
    return out


class _Attention(torch.autograd.Function):
    """q, k, v (B, heads, T or S, head_dim), queries (T,), keys (S,), rows (B, heads) as in dropped_weights."""

    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, queries: Tensor, keys: Tensor, rows: Tensor, options: _Options
    ) -> Tensor:
        out = torch.empty_like(q)
        for block in _blocks(q, k):
            weights, kept = _weights(q[:, :, block], k, queries[block], keys, rows, options)
            out[:, :, block] = _dropped(weights, kept, options.p).to(v.dtype) @ v
        ctx.save_for_backward(q, k, v, out, queries, keys, rows)
        ctx.options = options
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, out, queries, keys, rows = ctx.saved_tensors
        options, scale, grad = ctx.options, q.shape[-1] ** -0.5, gradients[0]
        wide = torch.promote_types(q.dtype, torch.float32)
        dq, dk, dv = torch.empty_like(q), torch.zeros_like(k, dtype=wide), torch.zeros_like(v, dtype=wide)
        for block in _blocks(q, k):
            weights, kept = _weights(q[:, :, block], k, queries[block], keys, rows, options)
            above = grad[:, :, block]
            dv += _dropped(weights, kept, options.p).to(v.dtype).mT @ above
            into_weights = _dropped((above @ v.mT).to(wide), kept, options.p)
            along = (above.to(wide) * out[:, :, block].to(wide)).sum(-1, keepdim=True)
            into_scores = (weights * (into_weights - along)).to(q.dtype)
            dq[:, :, block] = into_scores @ k * scale
            dk += into_scores.mT @ q[:, :, block] * scale
        return dq, dk.to(k.dtype), dv.to(v.dtype), None, None, None, None


def _blocks(q: Tensor, k: Tensor) -> Iterator[slice]:
    size = max(16, SCORES // max(1, q.shape[0] * q.shape[1] * k.shape[2]))
    return (slice(first, min(first + size, q.shape[2])) for first in range(0, q.shape[2], size))


def _weights(
    q: Tensor, k: Tensor, queries: Tensor, keys: Tensor, rows: Tensor, options: _Options
) -> tuple[Tensor, Tensor | None]:
    """Return (weights of a block before dropout, in at least float32; mask of the dropped ones, or None)."""
    scores = (q * q.shape[-1] ** -0.5) @ k.mT
    scores = scores.to(torch.promote_types(scores.dtype, torch.float32))
    if options.causal:
        scores = scores.masked_fill(keys > queries.unsqueeze(1), -torch.inf)
    dropped = dropped_weights(rows, queries, keys, options.p) if options.p > 0 else None
    return scores.softmax(-1), dropped


def _dropped(x: Tensor, dropped: Tensor | None, p: float) -> Tensor:
    return x if dropped is None else x.masked_fill(dropped, 0.0) * (1 / (1 - p))
