"""Rotary position embedding (Su et al. 2021, arXiv:2104.09864), in the half-split form of the Llama checkpoints."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from hpc_train.config.model import TransformerConfig

LLAMA3_LOW, LLAMA3_HIGH, LLAMA3_LENGTH = 1.0, 4.0, 8192
"""Wavelengths over LENGTH / LOW positions are stretched, those under LENGTH / HIGH are kept (Llama 3.1)."""

Table = tuple[Tensor, Tensor]
"""Cosine and sine of every angle, each (positions, 1, head_dim / 2): the 1 stands for the heads."""


def inverse_frequencies(config: TransformerConfig, head_dim: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Angle per position of each pair of channels, (head_dim / 2,): theta^(-2i / head_dim), scaled if so configured."""
    exponent = torch.arange(0, head_dim, 2, device=device).to(dtype) / head_dim
    frequencies = 1.0 / (config.rope_theta**exponent)
    return _llama3(frequencies, config.rope_factor) if config.rope_scaling == "llama3" else frequencies


def _llama3(frequencies: Tensor, factor: float) -> Tensor:
    """Divide low frequencies by `factor`, keep high ones, and pass linearly from one to the other between them."""
    turns = LLAMA3_LENGTH * frequencies / (2 * math.pi)
    kept = ((turns - LLAMA3_LOW) / (LLAMA3_HIGH - LLAMA3_LOW)).clamp(0, 1)
    return frequencies * (kept + (1 - kept) / factor)


def rotary_table(config: TransformerConfig, head_dim: int, positions: Tensor, dtype: torch.dtype) -> Table:
    """The table for `positions` (T,), in float64 for a float64 model and in float32 for any other."""
    wide = torch.promote_types(dtype, torch.float32)
    angles = torch.outer(positions.to(wide), inverse_frequencies(config, head_dim, wide, positions.device))
    return angles.cos().unsqueeze(1), angles.sin().unsqueeze(1)


def rotate(x: Tensor, table: Table) -> Tensor:
    """Turn each pair of channels (i, i + head_dim / 2) of x (..., T, heads, head_dim) by the angle of its position."""
    cosine, sine = (part.to(x.dtype) for part in table)
    first, second = x.chunk(2, dim=-1)
    return torch.cat((first * cosine - second * sine, second * cosine + first * sine), dim=-1)
