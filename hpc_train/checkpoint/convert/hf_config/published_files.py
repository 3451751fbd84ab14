"""Handle what published files contain besides the weights: scales of 8-bit weights, DeepSeek-V3's extra module.

DeepSeek-V3 (arXiv:2412.19437) is published in float8 with a scale for each block of 128 x 128 weights, and with a
module that predicts the token after the next one, stored as further layers after the last one.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from hpc_train.errors import UserError

State = dict[str, Tensor]
_SCALE = "_scale_inv"
"""Ending of the name of a weight's scales."""
_LAYER = re.compile(r"(?:model\.)?layers\.(\d+)\.")


def expand_block_scales(state: State, body: Mapping[str, Any]) -> State:
    """Multiply 8-bit weights by the scales of their blocks, in float32; other files are returned as they are.

    Raises UserError for other ways of quantization, and for scales that do not fit.
    """
    settings = body.get("quantization_config")
    if not settings:
        return state
    method, sizes = settings.get("quant_method"), settings.get("weight_block_size")
    if method != "fp8" or not isinstance(sizes, list) or len(sizes) != 2 or not all(map(_is_size, sizes)):
        raise UserError(
            f"config.json: quantization_config: {method} weights with weight_block_size={sizes}: only float8 in blocks "
            "is read; dequantize them with transformers and save them again"
        )
    scales = {name.removesuffix(_SCALE): scale for name, scale in state.items() if is_block_scale(name)}
    out = State()
    for name, tensor in state.items():
        if is_block_scale(name):
            if name.removesuffix(_SCALE) not in state:
                raise UserError(f"{name}: there is no weight of these scales")
        elif name in scales:
            out[name] = _expand_blocks(name, tensor, scales[name], sizes)
        elif tensor.dtype.itemsize == 1 and tensor.is_floating_point():
            raise UserError(f"{name}: has 8 bits, and {name}{_SCALE} is not there")
        else:
            out[name] = tensor
    return out


def is_block_scale(name: str) -> bool:
    """Whether a tensor has the scales of a weight's blocks."""
    return name.endswith(_SCALE)


def _is_size(value: Any) -> bool:
    return isinstance(value, int) and value > 0


def _expand_blocks(name: str, weight: Tensor, scales: Tensor, sizes: list[int]) -> Tensor:
    wanted = [-(-length // size) for length, size in zip(weight.shape, sizes, strict=False)]
    if weight.ndim != 2 or list(scales.shape) != wanted:
        raise UserError(f"{name}{_SCALE}: is of shape {tuple(scales.shape)}, and the blocks of the weight are {wanted}")
    expanded = weight.to(torch.float32)
    for dimension, (length, size) in enumerate(zip(weight.shape, sizes, strict=True)):
        scales = scales.repeat_interleave(size, dimension).narrow(dimension, 0, length)
    return expanded.mul_(scales)


def drop_next_token_layers(state: State, body: Mapping[str, Any], layers: int) -> State:
    """Leave out the layers after the last one, which config.json announces as num_nextn_predict_layers."""
    extra = int(body.get("num_nextn_predict_layers") or 0)

    def is_extra(name: str) -> bool:
        match = _LAYER.match(name)
        return match is not None and layers <= int(match[1]) < layers + extra

    return {name: tensor for name, tensor in state.items() if not is_extra(name)} if extra else state
