"""Dropout whose mask is a function of what is dropped, so that it is the same however a model is split over ranks.

Each mask bit is a hash of (seed, step, sample, layer, position, channel), in the manner of the counter-based generators
of Salmon et al. 2011 (Parallel random numbers: as easy as 1, 2, 3), so nothing is drawn in an order. It takes integer
operations alone, which give the same bits on a CPU and on a GPU, whole or compiled.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from hashlib import blake2b

import torch
import torch.nn.functional as F
from torch import Tensor, nn

Positions = Callable[[int, torch.device], Tensor]
"""From the number of positions that a tensor has to where each of them stands in its sequence, int64."""


@dataclass
class Counter:
    """Which samples the micro-batch under way consists of. One for all layers; whoever trains keeps it up to date."""

    rows: Tensor | None = None
    """(B,), int64: of each sample a hash of the seed, the step and its index in the global batch."""

    def begin(self, key: int, first: int, count: int, device: torch.device) -> None:
        """A micro-batch of so many samples, of which `first` is the index of the first in the global batch."""
        self.rows = mix(torch.arange(first, first + count, device=device) ^ key)


@dataclass
class Site:
    """Where in a model and on which ranks a layer drops something."""

    counter: Counter
    layer: Tensor
    """A scalar, int64: a hash of the layer's name in the whole model."""
    positions: Positions
    head_part: int = 0
    """Which of the equal parts of the heads this rank computes."""


def step_key(seed: int, step: int) -> int:
    """What a step's random numbers begin with: 64 bits, signed."""
    return _hash(f"{seed}/{step}")


def layer_key(name: str) -> int:
    """The same for a layer of a model."""
    return _hash(name)


def every_position(length: int, device: torch.device) -> Tensor:
    """Positions of sequences that are whole here."""
    return torch.arange(length, device=device)


class Dropout(nn.Module):
    """Zero a share `p` of what lies between layers, x (B, T, ...), in training, and scale the rest by 1 / (1 - p).

    Under hpc_train's engines, which set `site`, sample, position and channel decide what is zeroed, and a rank that
    holds other positions than another one zeroes other numbers. Elsewhere this is torch's dropout.
    """

    site: Site | None = None

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
        dropped = _compare(_token_hash(self.site, x.shape[1], x.device), _channel_hash(channels, x.device), self.p)
        return x.masked_fill(dropped.view(x.shape), 0.0) * (1 / (1 - self.p))

    def extra_repr(self) -> str:
        """For print."""
        return f"p={self.p}"


def head_rows(site: Site, heads: int) -> Tensor:
    """(B, heads), int64: what masks of attention weights begin with; the heads of this rank are contiguous."""
    head = torch.arange(heads, device=site.layer.device) + site.head_part * heads
    return mix(_rows(site).unsqueeze(1) ^ head)


def dropped_weights(rows: Tensor, queries: Tensor, keys: Tensor, p: float) -> Tensor:
    """Which attention weights are zeroed: (B, heads, number of queries, number of keys), bool.

    rows: of head_rows. queries, keys: their positions.
    """
    return _compare(_narrow(mix(rows.unsqueeze(2) ^ queries)), _narrow(mix(keys ^ _CHANNELS)), p)


def mix(x: Tensor) -> Tensor:
    """Scatter int64 numbers: the finalizer of SplitMix64 (Steele, Lea, Flood 2014), a bijection.

    Numbers are joined by exclusive or: a product of indices, torch.compile may reckon in 32 bits.
    """
    x = (x ^ _shift(x, 30)) * _FIRST
    x = (x ^ _shift(x, 27)) * _SECOND
    return x ^ _shift(x, 31)


def _shift(x: Tensor, bits: int) -> Tensor:
    return (x >> bits) & ((1 << (64 - bits)) - 1)  # without the mask the sign would come in from the left


def _token_hash(site: Site, length: int, device: torch.device) -> Tensor:
    """(B, T), int32."""
    positions = site.positions(length, device)
    return _narrow(mix(_rows(site).unsqueeze(1) ^ positions))


def _rows(site: Site) -> Tensor:
    rows = site.counter.rows
    assert rows is not None, "dropout in training, and nobody has said which samples these are"
    return mix(rows ^ site.layer)


def _channel_hash(count: int, device: torch.device) -> Tensor:
    """(count,), int32."""
    return _narrow(mix(torch.arange(count, device=device) ^ _CHANNELS))


def _narrow(x: Tensor) -> Tensor:
    """The upper half of int64 numbers, as int32."""
    return (x >> 32).to(torch.int32)


@torch.no_grad()
def _compare(rows: Tensor, columns: Tensor, p: float) -> Tensor:
    """Where the hash of a row (...,) and of a column (n,) together is below `p`: (..., n), bool.

    Both are scattered already, so that two multiplications in 32 bits are enough; in memory that is reused.
    """
    bits = rows.unsqueeze(-1) ^ columns
    bits *= _NARROW_FIRST
    bits ^= bits >> 15
    bits *= _NARROW_SECOND
    bits &= 0x7FFFFFFF
    return bits < min(round(p * 2**31), 2**31 - 1)


def _hash(text: str) -> int:
    return int.from_bytes(blake2b(text.encode(), digest_size=8).digest(), "little", signed=True)


def _signed(value: int, bits: int = 64) -> int:
    return value - (1 << bits) if value >> (bits - 1) else value


_FIRST, _SECOND = _signed(0xBF58476D1CE4E5B9), _signed(0x94D049BB133111EB)
_NARROW_FIRST, _NARROW_SECOND = 0x7FEB352D, _signed(0x846CA68B, 32)
"""Odd numbers that scatter well: https://github.com/skeeto/hash-prospector (public domain)."""
_CHANNELS = layer_key("channels")
