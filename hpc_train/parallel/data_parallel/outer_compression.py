"""Compress outer gradients to 8-bit or 4-bit integers, with one scale per block: largest magnitude / number of levels.

Rounding is to the nearest, ties to even, so that it is the same wherever it is done. The rounding error is not added to
a later exchange, as neither of the sources does that (Streaming DiLoCo, arXiv:2501.18512, sends 4 bits; INTELLECT-1,
arXiv:2412.01152, 8). A message consists of bytes: the scales in float32, then the integers.
"""

from __future__ import annotations

import torch
from torch import Tensor

from hpc_train.traffic.outer_exchange import COMPRESSED_BITS, count_message_bytes

_SCALE_BYTES = 4


def compress_vector(values: Tensor, method: str, block: int) -> Tensor:
    """Return the message of a vector, (bytes,) uint8. values: (n,). A value that is not finite makes its block NaN."""
    bits = COMPRESSED_BITS[method]
    levels = (1 << (bits - 1)) - 1
    blocks = _pad_to(values.float(), block).view(-1, block)
    scales = blocks.abs().amax(1) / levels
    finite = scales.isfinite()
    scales = torch.where(finite, scales, torch.nan)
    divisors = torch.where(finite & (scales > 0), scales, torch.ones_like(scales))
    rounded = torch.where(finite.unsqueeze(1), blocks / divisors.unsqueeze(1), 0.0).round_()
    integers = rounded.clamp_(-levels, levels).to(torch.int8).flatten()[: len(values)]
    message = torch.cat([scales.view(torch.uint8), _pack(integers, bits)])
    assert len(message) == count_message_bytes(len(values), method, block)
    return message


def decompress_vector(message: Tensor, count: int, method: str, block: int) -> Tensor:
    """Return the `count` values of a message, (count,) float32."""
    bits, blocks = COMPRESSED_BITS[method], -(-count // block)
    scales = message[: _SCALE_BYTES * blocks].clone().view(torch.float32)  # a copy begins where float32 may
    integers = _unpack(message[_SCALE_BYTES * blocks :], count, bits)
    padded = _pad_to(integers.float(), block).view(-1, block)
    return (padded * scales.unsqueeze(1)).flatten()[:count]


def _pad_to(values: Tensor, multiple: int) -> Tensor:
    return torch.nn.functional.pad(values, (0, -len(values) % multiple))


def _pack(integers: Tensor, bits: int) -> Tensor:
    """Pack int8 values in [-7, 7] two to a byte; 8 bits stay as they are."""
    if bits == 8:
        return integers.view(torch.uint8)
    pairs = (_pad_to(integers, 2) + 8).to(torch.uint8).view(-1, 2)
    return pairs[:, 0] | (pairs[:, 1] << 4)


def _unpack(packed: Tensor, count: int, bits: int) -> Tensor:
    if bits == 8:
        return packed.view(torch.int8)
    pairs = torch.stack((packed & 15, packed >> 4), dim=1).flatten()[:count]
    return pairs.to(torch.int8) - 8
