"""Seconds of matrix products, by their shape: tiles, waves of multiprocessors, alignment, and traffic to memory."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from hpc_train.planner.constants import Constants
from hpc_train.planner.model.inputs import FLOAT8_RECIPES, FSDP, HPC_TRAIN, MEGATRON, Column
from hpc_train.planner.model.jobs import Jobs, choose, replace_columns

_TILES = ((256, 128, 1.0), (128, 256, 1.0), (128, 128, 1.06), (128, 64, 1.2))
"""Tile sizes that cuBLAS chooses from: rows and columns of the result that one multiprocessor computes at a time, and
the time per element relative to the largest tiles. Small tiles are slower because they reuse their operands less."""
_GROUP_TILE = 128
"""Rows of a tile of a grouped product."""
_ROWWISE = FLOAT8_RECIPES.index("rowwise")
_WIDE_WEIGHT_GRADIENTS = [index for index, name in enumerate(FLOAT8_RECIPES) if name.endswith("_with_gw_hp")]
_ALIGNED = 8
"""Dimensions must be a multiple of this for tensor cores at 16 bits."""
_LINE = 64
"""16-bit elements in a 128-byte cache line."""
_CAST_INPUTS = 0.5
"""Share of the inputs of linear layers that are cast by themselves; norms write the others in 8 bits."""
_HOPPER, _BLACKWELL = 500e12, 2000e12
"""Peaks in 16 bits that only GPUs of these generations and later ones exceed, FLOP/s."""
_FOUR_BITS = 2.5
"""Ratio of peaks that tells 4-bit from 8-bit products, which have at least four times and twice the peak of 16 bits."""


def linear_seconds(jobs: Jobs, constants: Constants, rows: Column, inputs: Column, outputs: Column) -> Column:
    """Return the seconds of one product [rows, inputs] x [inputs, outputs] of a linear layer.

    Backward has two products of the same size with the matrices in other roles, which take as long each.
    """
    flops = 2 * rows * inputs * outputs
    rate = jobs.peak_flops * jobs.gemm_ceiling * constants.gemm_efficiency * _low_precision_share(jobs, constants)
    rate = rate * _pytorch_share(jobs, constants)
    rate = rate / choose(_whole_lines(inputs) & _whole_lines(outputs), 1.0, constants.alignment)
    # Part of the memory traffic is not hidden behind arithmetic (constants.gemm_traffic); it matters for thin matrices.
    operands = rows * inputs + inputs * outputs
    moved = (operands + rows * outputs) * jobs.activation_bytes * constants.gemm_traffic
    seconds = flops / rate * wave_quantization(jobs, rows, outputs) + moved / jobs.memory_bandwidth
    return seconds + _cast_seconds(jobs, constants, rows * (_CAST_INPUTS * inputs + outputs))


def is_blackwell(peak: Column) -> NDArray[np.bool_]:
    """Return whether GPUs are of this generation or later, by their peak in 16 bits, FLOP/s."""
    later: NDArray[np.bool_] = peak > _BLACKWELL
    return later


def _pytorch_share(jobs: Jobs, constants: Constants) -> Column:
    """Return the speed of PyTorch's matrix products over that of Megatron's: the same on Ampere and before."""
    if not np.any(jobs.stack == FSDP):
        return np.ones(())
    peak = jobs.peak_flops_attention
    share = choose(is_blackwell(peak), constants.products_blackwell, constants.products_pytorch)
    return choose((jobs.stack == FSDP) & (peak > _HOPPER), share, 1.0)


def _cast_seconds(jobs: Jobs, constants: Constants, elements: Column) -> Column:
    """Return the seconds in which Megatron's Transformer Engine casts the operands of one product to 8 bits.

    elements: of the input and of the output's gradient that it casts. It reads each in 16 bits and writes it twice in
    8, for two of the three products of a layer. Parameters stay in 8 bits.
    """
    narrow = (jobs.stack == MEGATRON) & (jobs.peak_flops > jobs.peak_flops_attention)
    if not np.any(narrow):
        return np.zeros(())
    moved = 2 * jobs.activation_bytes * elements / 3
    return choose(narrow, moved / (jobs.memory_bandwidth * constants.memory_efficiency), 0.0)


def _whole_lines(width: Column) -> NDArray[np.bool_]:
    """Return whether a width is a multiple of a cache line."""
    lines = width / _LINE  # comparing with floor() is faster than %, and this runs for every candidate
    is_whole: NDArray[np.bool_] = lines == np.floor(lines)
    return is_whole


def _low_precision_share(jobs: Jobs, constants: Constants) -> Column:
    """Return the share of the 8-bit or 4-bit peak that is left after scaling and casting operands."""
    over = jobs.peak_flops / jobs.peak_flops_attention
    some = choose(over > _FOUR_BITS, constants.four_bits, constants.low_precision)
    if np.any(jobs.float8):
        some = some * _recipe_share(jobs, constants, over * some)
    return choose(over > 1, some, 1.0)


def _recipe_share(jobs: Jobs, constants: Constants, gain: Column) -> Column:
    """Return the speed of products in 8 bits over that with one scale a tensor. gain: of 8 bits over 16.

    A scale for each row costs more in the product and in finding it; a scale for each block of a row is taken to cost
    as much, since no run with one is published for torchao's products. With wide weight gradients one of the three
    products of a layer stays in 16 bits.
    """
    rows = choose(jobs.float8 >= _ROWWISE, constants.rowwise, 1.0)
    mixed = 3 / (2 / rows + gain)
    return choose(np.isin(jobs.float8, _WIDE_WEIGHT_GRADIENTS), mixed, rows)


def wide_products(jobs: Jobs) -> Jobs:
    """Return the jobs with all products in 16 bits: the head, the router and our experts count so."""
    stays_wide = (jobs.stack == HPC_TRAIN) | (jobs.float8 > 0)
    return replace_columns(jobs, peak_flops=choose(stays_wide, jobs.peak_flops_attention, jobs.peak_flops))


def wave_quantization(jobs: Jobs, rows: Column, outputs: Column) -> Column:
    """Return the slowdown of a product because its tiles do not fill the last wave of multiprocessors.

    Each multiprocessor computes one tile at a time, so the number of tiles is rounded up to whole waves. The best tile
    size is taken (NVIDIA, Matrix Multiplication Background User's Guide, "Wave Quantization").
    """
    best = None
    useful = rows * outputs
    for height, width, cost in _TILES:
        tiles = np.ceil(rows / height) * np.ceil(outputs / width)
        units = np.maximum(jobs.multiprocessors, 1)
        full = choose(jobs.multiprocessors > 0, np.ceil(tiles / units) * units, tiles)
        slow = full * (height * width * cost) / useful
        best = slow if best is None else np.minimum(best, slow)
    assert best is not None
    return best


def misalignment_factor(width: Column, constants: Constants) -> Column:
    """Return the slowdown of a product whose dimension of `width` elements keeps it off tensor cores."""
    return choose(width % _ALIGNED == 0, 1.0, constants.misaligned)


def grouped_seconds(
    jobs: Jobs, constants: Constants, rows: Column, groups: Column, inputs: Column, outputs: Column
) -> Column:
    """Return the seconds of one grouped product: `groups` matrices [inputs, outputs], each with rows / groups rows.

    One kernel computes all groups, so that their tiles fill waves together, but no tile has rows of two groups.
    """
    each = rows / np.maximum(groups, 1)
    # A group's rows are rounded up to whole tiles; those of the last one are half full on average.
    padded = groups * (each + _GROUP_TILE / 2)
    flops = 2 * padded * inputs * outputs
    peak = choose(jobs.stack == HPC_TRAIN, jobs.peak_flops_attention, jobs.peak_flops)
    rate = peak * jobs.gemm_ceiling * constants.gemm_efficiency * constants.grouped_efficiency
    rate = rate * choose(peak > jobs.peak_flops_attention, _low_precision_share(jobs, constants), 1.0)
    moved = (rows * (inputs + outputs) + groups * inputs * outputs) * jobs.activation_bytes
    # Few rows per group: the weights are read from memory whatever the arithmetic.
    arithmetic = flops / rate * wave_quantization(jobs, padded, outputs)
    seconds: Column = np.maximum(
        arithmetic + moved * constants.gemm_traffic / jobs.memory_bandwidth, moved / jobs.memory_bandwidth
    )
    return seconds + _cast_seconds(jobs, constants, rows * (inputs + outputs))
