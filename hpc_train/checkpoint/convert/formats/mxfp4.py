"""Weights in MXFP4, as gpt-oss is published (OCP Microscaling Formats, version 1.0): expanded when they are read.

32 numbers in a row have a scale, a power of two in 8 bits. Each number is one of 16 in 4 bits, two a byte with the
first in the low half. The files have NAME_blocks, uint8 (experts, outputs, groups, 16), and NAME_scales, uint8
(experts, outputs, groups); the model has NAME, (experts, inputs, outputs).
"""

from __future__ import annotations

import torch
from torch import Tensor

from hpc_train.errors import UserError

BLOCKS, SCALES = "_blocks", "_scales"
"""Endings of the names of the two tensors of a weight."""
_NUMBERS = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
_GROUP = 32
_BIAS = 127
"""The exponent of a scale is its byte minus this."""


def find_expanded_shape(name: str, blocks: tuple[int, ...], scales: tuple[int, ...]) -> tuple[int, ...]:
    """Return the shape of a weight from those of its two tensors. Raises UserError where they do not fit."""
    if len(blocks) != 4 or blocks[3] != _GROUP // 2 or blocks[:3] != scales:
        raise UserError(
            f"{name}{BLOCKS}: is {blocks}, and {name}{SCALES} is {scales}; weights in MXFP4 are (experts, outputs, "
            f"groups, {_GROUP // 2}) with scales (experts, outputs, groups)"
        )
    experts, outputs, groups, _ = blocks
    return experts, groups * _GROUP, outputs


def expand_mxfp4(blocks: Tensor, scales: Tensor) -> Tensor:
    """Return the weight (experts, inputs, outputs) in bfloat16, which has all these numbers exactly."""
    numbers = torch.tensor([*_NUMBERS, *(-number for number in _NUMBERS)])
    experts, outputs, groups, _ = blocks.shape
    expanded = torch.empty(experts, outputs, groups * _GROUP, dtype=torch.bfloat16)
    for index in range(experts):  # one at a time: indices take eight times the memory of the result
        halves = torch.stack([blocks[index] & 0xF, blocks[index] >> 4], dim=-1).flatten(1)
        values = numbers[halves.long()].view(outputs, groups, _GROUP)
        exponents = scales[index].to(torch.int32) - _BIAS
        expanded[index] = torch.ldexp(values, exponents.unsqueeze(-1)).flatten(1)
    return expanded.transpose(1, 2)
