"""Attention by plain operations, for what torch's fused kernels cannot do: soft-caps, and dropout with our own masks.

Scores are computed in blocks of queries and recomputed in backward (Dao et al. 2022, arXiv:2205.14135, algorithms 2 and
4), so that saved memory is O(T) and peak memory is bounded. Keys that no query of a block sees are left out.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from hpc_train.models.dropout import DropoutSite, find_dropped_weights, hash_heads

MAX_SCORES = 1 << 24
"""Approximate number of scores in one block: 64 MiB in float32."""
MIN_QUERIES = 16
"""Queries in a block, at least."""


@dataclass(frozen=True)
class ScoreRule:
    """Which keys a query sees, and what becomes of its scores before the softmax."""

    causal: bool = True
    """A query sees keys at its own and earlier positions only."""
    window: int | None = None
    """Number of these keys that a query sees, counted from its own position backwards; None: all."""
    softcap: float | None = None
    """Scores become softcap tanh(score / softcap), which stays below softcap; None: they stay as they are."""

    def __post_init__(self) -> None:
        assert self.causal or self.window is None, "a window is one of earlier positions"

    def cuts(self, length: int) -> bool:
        """Whether the window hides anything in a sequence of this length."""
        return self.window is not None and self.window < length


def attend_plainly(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    queries: Tensor,
    keys: Tensor | None,
    rule: ScoreRule,
    starts: Tensor | None = None,
    site: DropoutSite | None = None,
    p: float = 0.0,
) -> Tensor:
    """Return softmax(q k^T / sqrt(head_dim)) v under `rule`, with a share `p` of the weights zeroed; shaped as q.

    q (B, heads, T, head_dim), k and v (B, kv_heads, S, head_dim). queries (T,) and keys (S,): their positions; keys
    None: S = T, and the positions of both are 0 ... T - 1. starts: (B, T), the first key that a query may see.
    """
    if q.shape[1] != k.shape[1]:
        k, v = (x.repeat_interleave(q.shape[1] // k.shape[1], dim=1) for x in (k, v))
    in_order = keys is None
    keys = queries.clone() if keys is None else keys  # torch.compile does not accept the same tensor twice
    rows = queries.new_empty(0) if site is None or p == 0 else hash_heads(site, q.shape[1])
    starts = queries.new_empty(0) if starts is None else starts
    numbers = in_order, rule.causal, rule.window or 0, rule.softcap or 0.0, p
    out: Tensor = _attend(q, k, v, queries, keys, starts, rows, *numbers)
    return out


@dataclass(frozen=True)
class _Block:
    """A block of queries with the keys that it may see, and how its weights come about."""

    q: Tensor
    k: Tensor
    v: Tensor
    queries: Tensor
    keys: Tensor
    starts: Tensor
    """First key that each query may see, (B, queries); empty without packed documents."""
    rows: Tensor
    """Hashes of hash_heads, from which dropout takes its masks; empty without dropout."""
    causal: bool
    window: int
    softcap: float
    p: float

    def compute_weights(self) -> tuple[Tensor, Tensor | None, Tensor | None]:
        """Return (weights before dropout, in at least float32; mask of the dropped ones; tanh of the capped scores).

        The last two are None without dropout, and without a soft-cap.
        """
        scores = (self.q * self.q.shape[-1] ** -0.5) @ self.k.mT
        scores = scores.to(torch.promote_types(scores.dtype, torch.float32))
        tangent = None
        if self.softcap:
            tangent = scores.div_(self.softcap).tanh_()
            scores = tangent * self.softcap
        hidden = self._find_hidden()
        if hidden is not None:
            scores = scores.masked_fill(hidden, -torch.inf)
        dropped = find_dropped_weights(self.rows, self.queries, self.keys, self.p) if self.p > 0 else None
        return scores.softmax(-1), dropped, tangent

    def _find_hidden(self) -> Tensor | None:
        """Return which keys are not seen, (queries, keys) or with documents (B, 1, queries, keys); None: none."""
        hidden, query_positions = None, self.queries.unsqueeze(1)
        if self.causal:
            hidden = self.keys > query_positions
            if self.window:
                hidden |= self.keys <= query_positions - self.window
        if self.starts.numel():
            before = (self.keys < self.starts.unsqueeze(-1)).unsqueeze(1)
            hidden = before if hidden is None else before | hidden
        return hidden

    def attend(self) -> Tensor:
        """Return the attention of the block; a function, so that a block's scores are freed before the next block."""
        weights, dropped, _ = self.compute_weights()
        return _apply_mask(weights, dropped, self.p).to(self.v.dtype) @ self.v

    def differentiate(self, grad: Tensor, out: Tensor, dk: Tensor, dv: Tensor) -> Tensor:
        """Return the gradient of the queries, and add to those of the keys and values, dk and dv.

        grad, out: the gradient of the block's attention, and the attention itself.
        """
        dtype, scale = dk.dtype, self.q.shape[-1] ** -0.5
        weights, dropped, tangent = self.compute_weights()
        dv += _apply_mask(weights, dropped, self.p).to(self.v.dtype).mT @ grad
        weight_grads = _apply_mask((grad @ self.v.mT).to(dtype), dropped, self.p)
        grad_dot_out = (grad.to(dtype) * out.to(dtype)).sum(-1, keepdim=True)
        score_grads = weight_grads.sub_(grad_dot_out).mul_(weights)
        if tangent is not None:
            score_grads.mul_(1 - tangent.square())
        rounded = score_grads.to(self.q.dtype)
        dk += rounded.mT @ self.q * scale
        query_grads: Tensor = rounded @ self.k * scale
        return query_grads


def _split(
    q: Tensor, k: Tensor, v: Tensor, queries: Tensor, keys: Tensor, starts: Tensor, rows: Tensor,
    in_order: bool, causal: bool, window: int, softcap: float, p: float,
) -> Iterator[tuple[slice, slice, _Block]]:  # fmt: skip
    """Yield (queries, keys, block) for each block of queries; the keys are all that one of its queries may see."""
    length = q.shape[2]
    size = max(MIN_QUERIES, MAX_SCORES // max(1, q.shape[0] * q.shape[1] * k.shape[2]))
    if window and in_order:  # so few queries that most of their keys are in the window of each
        size = max(MIN_QUERIES, min(window, MAX_SCORES // max(1, q.shape[0] * q.shape[1] * 2 * window)))
    for first in range(0, length, size):
        last = min(first + size, length)
        query_range, key_range = slice(first, last), slice(0, k.shape[2])
        if causal and in_order:
            key_range = slice(max(0, first - window + 1) if window else 0, last)
        block_starts = starts[:, query_range] if starts.numel() else starts
        block_inputs = (
            q[:, :, query_range],
            k[:, :, key_range],
            v[:, :, key_range],
            queries[query_range],
            keys[key_range],
            block_starts,
            rows,
        )
        yield query_range, key_range, _Block(*block_inputs, causal, window, softcap, p)


@torch.library.custom_op("hpc_train::plain_attention", mutates_args=())
def _attend(
    q: Tensor, k: Tensor, v: Tensor, queries: Tensor, keys: Tensor, starts: Tensor, rows: Tensor,
    in_order: bool, causal: bool, window: int, softcap: float, p: float,
) -> Tensor:  # fmt: skip
    """Compute attend_plainly; 0 for no window and no soft-cap, empty tensors for no documents and no dropout.

    One operator, so that selective recomputation can keep its result, and keeps no scores as results of products.
    """
    out = torch.empty_like(q)
    for query_range, _, block in _split(q, k, v, queries, keys, starts, rows, in_order, causal, window, softcap, p):
        out[:, :, query_range] = block.attend()
    return out


@_attend.register_fake
def _(
    q: Tensor, k: Tensor, v: Tensor, queries: Tensor, keys: Tensor, starts: Tensor, rows: Tensor,
    in_order: bool, causal: bool, window: int, softcap: float, p: float,
) -> Tensor:  # fmt: skip
    return torch.empty_like(q)


def _save_for_backward(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    tensors, ctx.numbers = inputs[:7], inputs[7:]
    ctx.save_for_backward(*tensors, output)


def _differentiate(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    *inputs, out = ctx.saved_tensors
    q, k, v, *_ = inputs
    dtype = torch.promote_types(q.dtype, torch.float32)
    dq, dk, dv = torch.empty_like(q), torch.zeros_like(k, dtype=dtype), torch.zeros_like(v, dtype=dtype)
    for query_range, key_range, block in _split(*inputs, *ctx.numbers):
        dq[:, :, query_range] = block.differentiate(
            grad[:, :, query_range], out[:, :, query_range], dk[:, :, key_range], dv[:, :, key_range]
        )
    return dq, dk.to(k.dtype), dv.to(v.dtype), *(None,) * 9


_attend.register_autograd(_differentiate, setup_context=_save_for_backward)


def _apply_mask(x: Tensor, dropped: Tensor | None, p: float) -> Tensor:
    return x if dropped is None else x.masked_fill(dropped, 0.0) * (1 / (1 - p))
