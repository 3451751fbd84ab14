"""Attention of a block of queries to a block of keys, with the log-sum-exp by which ring attention merges blocks.

Uses torch's fused kernels on the CPU and on CUDA if there is one for the inputs; else plain operations, which store the
scores of one block at a time.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from hpc_train._torch.attention import flash_attention, flash_attention_backward, has_flash_attention
from hpc_train.models.attention import plain_attention
from hpc_train.models.attention.plain_attention import ScoreRule

BlockGradients = tuple[Tensor, Tensor, Tensor]


def get_accumulation_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype of sums over blocks: float64 for float64, else float32."""
    return torch.promote_types(dtype, torch.float32)


def cast_to_autocast(*tensors: Tensor) -> tuple[Tensor, ...]:
    """Cast to autocast's dtype, if autocast is on: it does not apply to custom operators."""
    kind = tensors[0].device.type
    if not torch.is_autocast_enabled(kind):
        return tensors
    return tuple(x.to(torch.get_autocast_dtype(kind)) for x in tensors)


def attend_block(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> tuple[Tensor, Tensor]:
    """Return the attention, shaped as q, and the log-sum-exp (B, heads, T) of the scores in the accumulation dtype.

    q: (B, heads, T, d); k and v: (B, kv_heads, S, d); kv_heads divides heads. causal: query i sees keys 0 ... i; T = S.
    """
    assert not causal or q.shape[2] == k.shape[2]
    if has_flash_attention(q):
        return flash_attention(q, k, v, causal)
    return attend_block_plainly(q, k, v, causal)


def differentiate_block(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, causal: bool
) -> BlockGradients:
    """Return (dq, dk, dv) of one block. out, lse: attention and log-sum-exp over *all* blocks."""
    if has_flash_attention(q):
        return flash_attention_backward(grad, q, k, v, out, lse, causal)
    return differentiate_block_plainly(grad, q, k, v, out, lse, causal)


def _compute_scores(q: Tensor, k: Tensor, causal: bool) -> Tensor:
    """Return the scores (B, kv_heads, group, T, S), masked if causal.

    q: (B, kv_heads, group, T, d), already scaled; k: (B, kv_heads, 1, S, d).
    """
    scores = q @ k.mT
    if causal:
        rows, columns = scores.shape[-2:]
        future = torch.ones(rows, columns, dtype=torch.bool, device=q.device).triu(1)
        scores.masked_fill_(future, -torch.inf)
    return scores


def _group_heads(x: Tensor, kv_heads: int) -> Tensor:
    """Group heads: (B, heads, T, ...) to (B, kv_heads, heads / kv_heads, T, ...) in the accumulation dtype."""
    return x.to(get_accumulation_dtype(x.dtype)).reshape(x.shape[0], kv_heads, -1, *x.shape[2:])


def attend_block_plainly(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> tuple[Tensor, Tensor]:
    """Compute attend_block with plain operations."""
    heads = k.shape[1]
    grouped, keys, values = (_group_heads(x, heads) for x in (q, k, v))
    scores = _compute_scores(grouped * q.shape[-1] ** -0.5, keys, causal)
    lse = scores.logsumexp(-1)
    out = (scores - lse.unsqueeze(-1)).exp_() @ values
    return out.flatten(1, 2).to(q.dtype), lse.flatten(1, 2)


def differentiate_block_plainly(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, causal: bool
) -> BlockGradients:
    """Compute differentiate_block with plain operations: Dao et al. 2022 (arXiv:2205.14135), appendix B.2.

    The gradient of a softmax needs the sum of weights * gradients of the weights over all keys, of other blocks too.
    It equals the sum of grad * out, as `out` is the attention over all blocks.
    """
    heads, scale = k.shape[1], q.shape[-1] ** -0.5
    grad, grouped, keys, values, out, lse = (_group_heads(x, heads) for x in (grad, q, k, v, out, lse))
    weights = (_compute_scores(grouped * scale, keys, causal) - lse.unsqueeze(-1)).exp_()
    dv = (weights.mT @ grad).sum(2)
    score_grads = weights * (grad @ values.mT - (grad * out).sum(-1, keepdim=True)) * scale
    dq = (score_grads @ keys).flatten(1, 2)
    dk = (score_grads.mT @ grouped).sum(2)
    return dq.to(q.dtype), dk.to(k.dtype), dv.to(v.dtype)


@dataclass(frozen=True)
class RuledRows:
    """Some queries of a block and the keys that one of them may see, with the scores under a window and a soft-cap."""

    rows: slice
    columns: slice
    back: int
    """Positions from the first of these keys to the first of these queries."""
    rule: ScoreRule

    def compute_scores(self, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor | None]:
        """Return (scores, -inf where a key is not seen; tanh of the capped scores, None without a soft-cap).

        q: (B, kv_heads, group, rows, d), already scaled; k: (B, kv_heads, 1, columns, d).
        """
        scores, tangent = q @ k.mT, None
        if self.rule.softcap is not None:
            tangent = scores.div_(self.rule.softcap).tanh_()
            scores = tangent * self.rule.softcap
        queries = torch.arange(scores.shape[-2], device=q.device).unsqueeze(-1) + self.back
        keys = torch.arange(scores.shape[-1], device=q.device)
        hidden = keys > queries if self.rule.causal else torch.zeros_like(keys > queries)
        if self.rule.window is not None:
            hidden |= keys <= queries - self.rule.window
        return scores.masked_fill_(hidden, -torch.inf), tangent


def split_rows(q: Tensor, k: Tensor, rule: ScoreRule, back: int) -> Iterator[RuledRows]:
    """Cut a block by its queries, so that their scores take bounded memory; keys that none of them sees are left out.

    q: (B, heads, T, d); k: (B, kv_heads, S, d); back: positions from the first key to the first query.
    """
    size = max(plain_attention.MIN_QUERIES, plain_attention.MAX_SCORES // max(1, q.shape[0] * q.shape[1] * k.shape[2]))
    if rule.window is not None:
        size = min(size, max(plain_attention.MIN_QUERIES, rule.window))
    for first in range(0, q.shape[2], size):
        last = min(first + size, q.shape[2])
        begin = 0 if rule.window is None else max(0, first + back - rule.window + 1)
        end = min(k.shape[2], last + back) if rule.causal else k.shape[2]
        if begin < end:
            yield RuledRows(slice(first, last), slice(begin, end), first + back - begin, rule)


def attend_ruled_block(q: Tensor, k: Tensor, v: Tensor, rule: ScoreRule, back: int) -> tuple[Tensor, Tensor]:
    """Compute attend_block under a rule with a window or a soft-cap; a query that sees no key gets 0 and -inf."""
    heads = k.shape[1]
    grouped, keys, values = (_group_heads(x, heads) for x in (q, k, v))
    grouped = grouped * q.shape[-1] ** -0.5
    out, lse = torch.zeros_like(grouped), grouped.new_full(grouped.shape[:-1], -torch.inf)
    for part in split_rows(q, k, rule, back):
        rows, columns = part.rows, part.columns
        scores, _ = part.compute_scores(grouped[..., rows, :], keys[..., columns, :])
        row_lse = scores.logsumexp(-1)
        shift = row_lse.masked_fill(row_lse == -torch.inf, 0.0)  # else -inf - -inf is NaN
        out[..., rows, :] = (scores - shift.unsqueeze(-1)).exp_() @ values[..., columns, :]
        lse[..., rows] = row_lse
    return out.flatten(1, 2).to(q.dtype), lse.flatten(1, 2)


def differentiate_ruled_block(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, rule: ScoreRule, back: int
) -> BlockGradients:
    """Compute differentiate_block under a rule with a window or a soft-cap, in the accumulation dtype."""
    heads, scale = k.shape[1], q.shape[-1] ** -0.5
    grad, grouped, keys, values, out, lse = (_group_heads(x, heads) for x in (grad, q, k, v, out, lse))
    dq, dk, dv = torch.zeros_like(grouped), torch.zeros_like(keys), torch.zeros_like(values)
    for part in split_rows(q, k, rule, back):
        rows, columns = part.rows, part.columns
        grad_rows, key, value = grad[..., rows, :], keys[..., columns, :], values[..., columns, :]
        scores, tangent = part.compute_scores(grouped[..., rows, :] * scale, key)
        weights = (scores - lse[..., rows].unsqueeze(-1)).exp_()
        dv[..., columns, :] += (weights.mT @ grad_rows).sum(2, keepdim=True)
        grad_dot_out = (grad_rows * out[..., rows, :]).sum(-1, keepdim=True)
        score_grads = weights * (grad_rows @ value.mT - grad_dot_out) * scale
        if tangent is not None:
            score_grads = score_grads * (1 - tangent.square())
        dq[..., rows, :] = score_grads @ key
        dk[..., columns, :] += (score_grads.mT @ grouped[..., rows, :]).sum(2, keepdim=True)
    return dq.flatten(1, 2), dk.squeeze(2), dv.squeeze(2)
