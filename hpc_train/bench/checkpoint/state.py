"""The tensors that are saved."""

from __future__ import annotations

from math import isqrt

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

State = dict[str, Tensor]
Shapes = dict[str, tuple[tuple[int, ...], torch.dtype]]
"""Of tensors, and their types, by name."""
_LAYERS = 3
_PARAMETERS = 36.25
"""Of the transformer below, in units of its hidden size squared."""
_BYTES = 14
"""A parameter: bfloat16, and a master copy and two moments in float32."""


def make_state(size: int, tensors: int | None, rank: int) -> State:
    """About `size` bytes of random finite values, named after the rank. tensors: so many equal ones of float32."""
    generator = torch.Generator().manual_seed(rank)
    shapes = shapes_of(size, tensors)
    return {f"rank{rank}.{name}": _random(shape, dtype, generator) for name, (shape, dtype) in shapes.items()}


def shapes_of(size: int, tensors: int | None) -> Shapes:
    """Of about `size` bytes. tensors: so many equal ones of float32; None: a transformer's with its AdamW state."""
    return _equal(size, tensors) if tensors else _transformer(size)


def _equal(size: int, tensors: int) -> Shapes:
    elements = max(1, size // tensors // 4)
    return {f"tensor.{index}": ((elements,), torch.float32) for index in range(tensors)}


def _transformer(size: int) -> Shapes:
    """A Llama of three layers, grouped-query attention and a vocabulary of four times the hidden size."""
    hidden = max(4, isqrt(int(size / _BYTES / _PARAMETERS)) // 4 * 4)
    key, wide = hidden // 4, hidden * 11 // 4
    block = {
        "attention.query": (hidden, hidden),
        "attention.key": (key, hidden),
        "attention.value": (key, hidden),
        "attention.output": (hidden, hidden),
        "feed_forward.gate": (wide, hidden),
        "feed_forward.down": (hidden, wide),
        "feed_forward.up": (wide, hidden),
        "attention_norm": (hidden,),
        "feed_forward_norm": (hidden,),
    }
    shapes: dict[str, tuple[int, ...]] = {"embedding.weight": (4 * hidden, hidden)}
    for layer in range(_LAYERS):
        shapes |= {f"layers.{layer}.{name}.weight": shape for name, shape in block.items()}
    found: Shapes = {}
    for name, shape in shapes.items():
        found[name] = shape, torch.bfloat16
        found |= {f"optim.{kind}.{name}": (shape, torch.float32) for kind in ("master", "exp_avg", "exp_avg_sq")}
    return found


def _random(shape: tuple[int, ...], dtype: torch.dtype, generator: torch.Generator) -> Tensor:
    """Random bits but for the largest exponents, so that all sides see ordinary numbers."""
    bits, mask = (torch.int16, 0x3FFF) if dtype is torch.bfloat16 else (torch.int32, 0x3FFFFFFF)
    return torch.empty(shape, dtype=bits).random_(generator=generator).bitwise_and_(mask).view(dtype)


def bytes_of(state: State) -> int:
    """Of all tensors."""
    return sum(tensor.nbytes for tensor in state.values())


def flat(tensor: Tensor) -> memoryview:
    """The memory of a tensor."""
    memory: NDArray[np.uint8] = tensor.reshape(-1).view(torch.uint8).numpy()
    return memory.data
