"""Rotary position embedding (Su et al. 2021, arXiv:2104.09864) and the scalings of it that stretch a context.

linear (Chen et al. 2023, arXiv:2306.15595), that of Llama 3.1, and YaRN (Peng et al. 2023, arXiv:2309.00071) as
DeepSeek-V3 and transformers compute it.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from hpc_train.config.model import RopeConfig, TransformerConfig
from hpc_train.models.shape import has_latent_attention

RotaryTable = tuple[Tensor, Tensor]
"""Cosine and sine of every angle, each (positions, 1, head_dim / 2), or one more of these for each sequence: the 1
stands for the heads."""


def make_rotary_table(
    config: TransformerConfig, head_dim: int, positions: Tensor, dtype: torch.dtype, *, local: bool = False
) -> RotaryTable:
    """Make the table for `positions` (T,) or (B, T), in float64 for a float64 model and in float32 for any other.

    local: that of layers with a window, where model.rope.local_theta gives them a base of their own.
    """
    compute_dtype = torch.promote_types(dtype, torch.float32)
    frequencies = compute_inverse_frequencies(config, head_dim, compute_dtype, positions.device, local=local)
    angles = positions.to(compute_dtype).unsqueeze(-1) * frequencies
    cosine, sine = angles.cos().unsqueeze(-2), angles.sin().unsqueeze(-2)
    factor = 1.0 if _is_unscaled(config, local) else compute_table_factor(config)
    return (cosine, sine) if factor == 1.0 else (cosine * factor, sine * factor)


def compute_inverse_frequencies(
    config: TransformerConfig, head_dim: int, dtype: torch.dtype, device: torch.device, *, local: bool
) -> Tensor:
    """Return the angle a position of each pair of channels, (head_dim / 2,): theta^(-2i / head_dim), or scaled."""
    exponent = torch.arange(0, head_dim, 2, device=device).to(dtype) / head_dim
    if _is_unscaled(config, local):
        return 1.0 / (find_rope_base(config, local=local) ** exponent)
    frequencies = 1.0 / (config.rope_theta**exponent)
    if config.rope_scaling == "linear":
        return frequencies / config.rope_factor
    if config.rope_scaling == "llama3":
        return _scale_llama3(frequencies, config.rope_factor, config.rope)
    if config.rope_scaling == "yarn":
        return _scale_yarn(frequencies, config, head_dim)
    return frequencies


def find_rope_base(config: TransformerConfig, *, local: bool) -> float:
    """Return the base of the frequencies of a layer with a window (local), or without one."""
    return config.rope.local_theta if local and config.rope.local_theta is not None else config.rope_theta


def _is_unscaled(config: TransformerConfig, local: bool) -> bool:
    """Whether the angles are those of no scaling: layers with a base of their own see no more than their window."""
    return config.rope_scaling == "none" or (local and config.rope.local_theta is not None)


def _scale_llama3(frequencies: Tensor, factor: float, rope: RopeConfig) -> Tensor:
    """Divide low frequencies by `factor`, keep high ones, and pass linearly from one to the other between them."""
    rotations = rope.original_positions * frequencies / (2 * math.pi)
    unscaled_share = ((rotations - rope.low) / (rope.high - rope.low)).clamp(0, 1)
    return frequencies * (unscaled_share + (1 - unscaled_share) / factor)


def _scale_yarn(frequencies: Tensor, config: TransformerConfig, head_dim: int) -> Tensor:
    """Divide by the factor what turns less than beta_slow times over the original positions; keep what turns more than
    beta_fast times; between the two pass linearly by the number of the pair of channels."""
    rope = config.rope

    def find_pair(rotations: float) -> float:
        """Return the pair of channels, as a fraction, that turns so often over the original positions."""
        return (
            head_dim * math.log(rope.original_positions / (rotations * 2 * math.pi)) / (2 * math.log(config.rope_theta))
        )

    first, last = find_pair(rope.beta_fast), find_pair(rope.beta_slow)
    if rope.truncate:
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, head_dim - 1)
    width = last - first or 0.001  # as everybody does who computes YaRN
    pairs = torch.arange(len(frequencies), device=frequencies.device).to(frequencies.dtype)
    scaled_share = ((pairs - first) / width).clamp(0, 1)
    return frequencies * (1 - scaled_share) + frequencies / config.rope_factor * scaled_share


def _compute_yarn_temperature(factor: float, weight: float) -> float:
    return 1.0 if factor <= 1 else 0.1 * weight * math.log(factor) + 1.0


def compute_table_factor(config: TransformerConfig) -> float:
    """Return the factor on cosines and sines; other than 1 only in YaRN."""
    rope, factor = config.rope, config.rope_factor
    if config.rope_scaling != "yarn":
        return 1.0
    if rope.table_factor is not None:
        return rope.table_factor
    if rope.mscale and rope.mscale_all_dim:
        return _compute_yarn_temperature(factor, rope.mscale) / _compute_yarn_temperature(factor, rope.mscale_all_dim)
    return _compute_yarn_temperature(factor, 1.0)


def compute_query_factor(config: TransformerConfig, head_dim: int) -> float:
    """Return the factor on queries that makes the usual scores, q k / sqrt(head_dim), those of the model; mostly 1.

    It comes from model.attention_scale, and in latent attention from YaRN's mscale_all_dim (arXiv:2405.04434).
    """
    factor = 1.0 if config.attention_scale is None else config.attention_scale * math.sqrt(head_dim)
    if config.rope_scaling == "yarn" and has_latent_attention(config) and config.rope.mscale_all_dim:
        factor *= _compute_yarn_temperature(config.rope_factor, config.rope.mscale_all_dim) ** 2
    return factor


def apply_rotary(x: Tensor, table: RotaryTable) -> Tensor:
    """Turn each pair of channels (i, i + head_dim / 2) of x (..., T, heads, head_dim) by the angle of its position."""
    cosine, sine = (part.to(x.dtype) for part in table)
    first, second = x.chunk(2, dim=-1)
    return torch.cat((first * cosine - second * sine, second * cosine + first * sine), dim=-1)


def apply_interleaved_rotary(x: Tensor, table: RotaryTable) -> Tensor:
    """Turn each pair of channels (2 i, 2 i + 1) of x (..., T, heads, width).

    The result has the first ones of all pairs before the second ones. Queries and keys come out in the same order,
    which is all that their product needs.
    """
    return apply_rotary(torch.cat((x[..., 0::2], x[..., 1::2]), dim=-1), table)
