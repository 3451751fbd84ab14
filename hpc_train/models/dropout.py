"""Dropout whose mask depends only on what is dropped, so it is the same however a model is split over ranks.

Each mask bit is a hash of (seed, step, sample, layer, position, channel), in the manner of the counter-based
generators of Salmon et al. 2011 (Parallel random numbers: as easy as 1, 2, 3), so the order of draws does not matter.
It uses integer operations only, which give the same bits on a CPU and on a GPU, eager or compiled.

torch's fused attention takes no mask of weights. So attention with dropout computes scores in blocks of queries, and
again in backward (Dao et al. 2022, arXiv:2205.14135, algorithms 2 and 4): what is kept is O(T), and peak memory is
bounded.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from hashlib import blake2b
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

Positions = Callable[[int, torch.device], Tensor]
"""Maps the number of positions in a tensor to their places in the sequence, int64."""


@dataclass
class SampleCounter:
    """Samples in the current micro-batch. All layers share one; the training loop keeps it up to date."""

    rows: Tensor | None = None
    """(B,), int64: for each sample a hash of the seed, the step and its index in the global batch."""

    def begin(self, key: int, first: int, count: int, device: torch.device) -> None:
        """Start a micro-batch of so many samples; `first` is the global-batch index of its first sample."""
        self.rows = mix_bits(torch.arange(first, first + count, device=device) ^ key)


@dataclass
class DropoutSite:
    """The place of a dropout layer in the model, and the part of its input that this rank has."""

    counter: SampleCounter
    layer: Tensor
    """A scalar, int64: a hash of the layer's name in the whole model."""
    positions: Positions
    head_part: int = 0
    """Index of this rank's part, if the heads are split into equal parts."""


def make_step_key(seed: int, step: int) -> int:
    """Return the key of a step's random numbers: 64 bits, signed."""
    return _hash_text(f"{seed}/{step}")


def make_layer_key(name: str) -> int:
    """Return the key of a layer of a model: 64 bits, signed."""
    return _hash_text(name)


def list_positions(length: int, device: torch.device) -> Tensor:
    """Return the positions of sequences that are whole on this rank."""
    return torch.arange(length, device=device)


class Dropout(nn.Module):
    """In training, zero a share `p` of activations x (B, T, ...) between layers and scale the rest by 1 / (1 - p).

    Under hpc_train's engines, which set `site`, the mask depends on sample, position and channel, so ranks that hold
    different positions zero different values. Elsewhere this is torch's dropout.
    """

    site: DropoutSite | None = None

    def __init__(self, p: float) -> None:
        super().__init__()
        self.p = p

    def forward(self, x: Tensor) -> Tensor:
        """x (B, T, ...) -> the same shape."""
        if not self.training or self.p == 0:
            return x
        if self.site is None:
            return F.dropout(x, self.p)
        channels = x[0, 0].numel()
        dropped = _compare(_hash_tokens(self.site, x.shape[1], x.device), _hash_channels(channels, x.device), self.p)
        return x.masked_fill(dropped.view(x.shape), 0.0) * (1 / (1 - self.p))

    def extra_repr(self) -> str:
        """Describe the layer for print."""
        return f"p={self.p}"


def hash_heads(site: DropoutSite, heads: int) -> Tensor:
    """Return (B, heads), int64: base hashes of the attention-weight masks; this rank's heads are contiguous."""
    head = torch.arange(heads, device=site.layer.device) + site.head_part * heads
    return mix_bits(_hash_samples(site).unsqueeze(1) ^ head)


def find_dropped_weights(rows: Tensor, queries: Tensor, keys: Tensor, p: float) -> Tensor:
    """Return which attention weights are zeroed: (B, heads, number of queries, number of keys), bool.

    rows: from head_rows. queries, keys: their positions.
    """
    return _compare(_upper_half(mix_bits(rows.unsqueeze(2) ^ queries)), _upper_half(mix_bits(keys ^ _CHANNELS)), p)


def mix_bits(x: Tensor) -> Tensor:
    """Scramble int64 numbers with the finalizer of SplitMix64 (Steele, Lea, Flood 2014), a bijection.

    Numbers are combined by exclusive or: torch.compile may compute a product of indices in 32 bits.
    """
    x = (x ^ _shift(x, 30)) * _FIRST
    x = (x ^ _shift(x, 27)) * _SECOND
    return x ^ _shift(x, 31)


def _shift(x: Tensor, bits: int) -> Tensor:
    return (x >> bits) & ((1 << (64 - bits)) - 1)  # without the mask the sign bit would be shifted in from the left


def _hash_tokens(site: DropoutSite, length: int, device: torch.device) -> Tensor:
    """Hash each token: (B, T), int32."""
    positions = site.positions(length, device)
    return _upper_half(mix_bits(_hash_samples(site).unsqueeze(1) ^ positions))


def _hash_samples(site: DropoutSite) -> Tensor:
    rows = site.counter.rows
    assert rows is not None, "dropout in training, but it was not set which samples these are"
    return mix_bits(rows ^ site.layer)


def _hash_channels(count: int, device: torch.device) -> Tensor:
    """Hash each channel: (count,), int32."""
    return _upper_half(mix_bits(torch.arange(count, device=device) ^ _CHANNELS))


def _upper_half(x: Tensor) -> Tensor:
    """Return the upper half of int64 numbers, as int32."""
    return (x >> 32).to(torch.int32)


@torch.no_grad()
def _compare(rows: Tensor, columns: Tensor, p: float) -> Tensor:
    """Return where the combined hash of a row (...,) and a column (n,) is below `p`: (..., n), bool.

    Both are scrambled already, so two 32-bit multiplications are enough, in memory that is reused.
    """
    bits = rows.unsqueeze(-1) ^ columns
    bits *= _NARROW_FIRST
    bits ^= bits >> 15
    bits *= _NARROW_SECOND
    bits &= 0x7FFFFFFF
    return bits < min(round(p * 2**31), 2**31 - 1)


def _hash_text(text: str) -> int:
    return int.from_bytes(blake2b(text.encode(), digest_size=8).digest(), "little", signed=True)


def _signed(value: int, bits: int = 64) -> int:
    return value - (1 << bits) if value >> (bits - 1) else value


_FIRST, _SECOND = _signed(0xBF58476D1CE4E5B9), _signed(0x94D049BB133111EB)
_NARROW_FIRST, _NARROW_SECOND = 0x7FEB352D, _signed(0x846CA68B, 32)
"""Odd multipliers that scramble well: https://github.com/skeeto/hash-prospector (public domain)."""
_CHANNELS = make_layer_key("channels")


MAX_SCORES = 1 << 24
"""Approximate number of scores in one block: 64 MiB in float32."""
MIN_QUERIES = 16
"""Queries in a block, at least."""


def attend_with_dropout(
    q: Tensor, k: Tensor, v: Tensor, queries: Tensor, keys: Tensor, causal: bool, site: DropoutSite, p: float
) -> Tensor:
    """Return softmax(q k^T / sqrt(head_dim)) with a share `p` of its weights zeroed, times v; same shape as q.

    q (B, heads, T, head_dim), k and v (B, kv_heads, S, head_dim), queries (T,) and keys (S,) their positions. causal: a
    query sees only keys at its own or earlier positions.
    """
    if q.shape[1] != k.shape[1]:
        k, v = (x.repeat_interleave(q.shape[1] // k.shape[1], dim=1) for x in (k, v))
    keys = keys.clone() if keys is queries else keys  # torch.compile does not accept the same tensor twice
    rows = hash_heads(site, q.shape[1]) if p > 0 else queries.new_empty(0)
    out: Tensor = _attend(q, k, v, queries, keys, rows, causal, p)
    return out


@torch.library.custom_op("hpc_train::dropout_attention", mutates_args=())
def _attend(
    q: Tensor, k: Tensor, v: Tensor, queries: Tensor, keys: Tensor, rows: Tensor, causal: bool, p: float
) -> Tensor:
    """q, k, v (B, heads, T or S, head_dim), queries (T,), keys (S,), rows (B, heads) as in find_dropped_weights.

    One operator, so that selective recomputation can keep its result, and keeps no scores as results of products.
    """
    out = torch.empty_like(q)
    for block in _split_queries(q, k):
        out[:, :, block] = _attend_block(q[:, :, block], k, v, queries[block], keys, rows, causal, p)
    return out


def _attend_block(
    q: Tensor, k: Tensor, v: Tensor, queries: Tensor, keys: Tensor, rows: Tensor, causal: bool, p: float
) -> Tensor:
    """Attend with a block of queries. A function, so that no scores of one block wait beside those of the next."""
    weights, dropped = _block_weights(q, k, queries, keys, rows, causal, p)
    return _apply_mask(weights, dropped, p).to(v.dtype) @ v


@_attend.register_fake
def _(q: Tensor, k: Tensor, v: Tensor, queries: Tensor, keys: Tensor, rows: Tensor, causal: bool, p: float) -> Tensor:
    return torch.empty_like(q)


def _save_for_backward(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    *tensors, ctx.causal, ctx.p = inputs
    ctx.save_for_backward(*tensors, output)


def _differentiate(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    q, k, v, queries, keys, rows, out = ctx.saved_tensors
    wide = torch.promote_types(q.dtype, torch.float32)
    dq, dk, dv = torch.empty_like(q), torch.zeros_like(k, dtype=wide), torch.zeros_like(v, dtype=wide)
    for block in _split_queries(q, k):
        given = q[:, :, block], k, v, queries[block], keys, rows
        dq[:, :, block] = _differentiate_block(grad[:, :, block], out[:, :, block], given, ctx.causal, ctx.p, dk, dv)
    return dq, dk.to(k.dtype), dv.to(v.dtype), None, None, None, None, None


def _differentiate_block(
    above: Tensor, out: Tensor, given: tuple[Tensor, ...], causal: bool, p: float, dk: Tensor, dv: Tensor
) -> Tensor:
    """Return the gradient of a block of queries, and add to those of keys and values; see _attend_block."""
    q, k, v, queries, keys, rows = given
    scale, wide = q.shape[-1] ** -0.5, dk.dtype
    weights, dropped = _block_weights(q, k, queries, keys, rows, causal, p)
    dv += _apply_mask(weights, dropped, p).to(v.dtype).mT @ above
    into_weights = _apply_mask((above @ v.mT).to(wide), dropped, p)
    along = (above.to(wide) * out.to(wide)).sum(-1, keepdim=True)
    into_scores = into_weights.sub_(along).mul_(weights).to(q.dtype)
    dk += into_scores.mT @ q * scale
    into_queries: Tensor = into_scores @ k * scale
    return into_queries


_attend.register_autograd(_differentiate, setup_context=_save_for_backward)


def _split_queries(q: Tensor, k: Tensor) -> Iterator[slice]:
    size = max(MIN_QUERIES, MAX_SCORES // max(1, q.shape[0] * q.shape[1] * k.shape[2]))
    return (slice(first, min(first + size, q.shape[2])) for first in range(0, q.shape[2], size))


def _block_weights(
    q: Tensor, k: Tensor, queries: Tensor, keys: Tensor, rows: Tensor, causal: bool, p: float
) -> tuple[Tensor, Tensor | None]:
    """Return (weights of a block before dropout, in at least float32; mask of the dropped ones, or None)."""
    scores = (q * q.shape[-1] ** -0.5) @ k.mT
    scores = scores.to(torch.promote_types(scores.dtype, torch.float32))
    if causal:
        scores = scores.masked_fill(keys > queries.unsqueeze(1), -torch.inf)
    dropped = find_dropped_weights(rows, queries, keys, p) if p > 0 else None
    return scores.softmax(-1), dropped


def _apply_mask(x: Tensor, dropped: Tensor | None, p: float) -> Tensor:
    return x if dropped is None else x.masked_fill(dropped, 0.0) * (1 / (1 - p))
