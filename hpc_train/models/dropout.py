"""Dropout whose mask depends only on the element's position, so it is the same however a model is split over ranks.

Each mask bit is a hash of (seed, step, sample, layer, position, channel), in the manner of the counter-based
generators of Salmon et al. 2011 (Parallel random numbers: as easy as 1, 2, 3), so the order of draws does not matter.
It uses integer operations only, which give the same bits on a CPU and on a GPU, eager or compiled.

Attention whose weights are dropped is in plain_attention.py, because torch's fused kernels take no such mask.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from hashlib import blake2b

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
        """Start a micro-batch of `count` samples; `first` is the global-batch index of its first sample."""
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
    return hash_text(f"{seed}/{step}")


def make_layer_key(name: str) -> int:
    """Return the key of a layer of a model: 64 bits, signed."""
    return hash_text(name)


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

    rows: from hash_heads. queries, keys: their positions.
    """
    return _compare(
        _take_upper_half(mix_bits(rows.unsqueeze(2) ^ queries)), _take_upper_half(mix_bits(keys ^ _CHANNELS)), p
    )


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
    return _take_upper_half(mix_bits(_hash_samples(site).unsqueeze(1) ^ positions))


def _hash_samples(site: DropoutSite) -> Tensor:
    rows = site.counter.rows
    assert rows is not None, "dropout in training, but it was not set which samples these are"
    return mix_bits(rows ^ site.layer)


def _hash_channels(count: int, device: torch.device) -> Tensor:
    """Hash each channel: (count,), int32."""
    return _take_upper_half(mix_bits(torch.arange(count, device=device) ^ _CHANNELS))


def _take_upper_half(x: Tensor) -> Tensor:
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


def hash_text(text: str) -> int:
    """Return a hash of 64 bits, signed, that is the same in every process."""
    return int.from_bytes(blake2b(text.encode(), digest_size=8).digest(), "little", signed=True)


def _to_signed(value: int, bits: int = 64) -> int:
    return value - (1 << bits) if value >> (bits - 1) else value


_FIRST, _SECOND = _to_signed(0xBF58476D1CE4E5B9), _to_signed(0x94D049BB133111EB)
_NARROW_FIRST, _NARROW_SECOND = 0x7FEB352D, _to_signed(0x846CA68B, 32)
"""Odd multipliers that scramble well: https://github.com/skeeto/hash-prospector (public domain)."""
_CHANNELS = make_layer_key("channels")
