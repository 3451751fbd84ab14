"""Matrix products: how long one takes, by its shape.

Time is the sum of computing at a share of the peak and of moving operands and result through memory (a roofline whose
two sides add up: tiles are loaded before, and stored after, they are multiplied). The share of the peak falls where the
last wave of tiles leaves multiprocessors idle, and where a dimension is no multiple of 8 elements tensor cores are not
used at all: NVIDIA, Matrix Multiplication Background User's Guide (tile and wave quantisation, 2.1 and 3).
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from hpc_train.planner.constants import Constants
from hpc_train.planner.jobs import Column, Jobs

_TILES = ((256, 128, 1.0), (128, 256, 1.0), (128, 128, 1.06), (128, 64, 1.2))
"""Rows and columns of the result that one multiprocessor computes at a time, and time for an element over that of the
largest, whose operands are used most often: what cuBLAS has to choose from."""
_ALIGNED = 8
"""Elements of a dimension that tensor cores need to be a multiple of, at 16 bits."""
_LINE = 64
"""16-bit elements of a 128-byte line of memory."""
_FOUR_BITS = 2.5
"""Peak of a format over that of attention's 16 bits: 8-bit products have twice it, 4-bit ones four times or more."""


def linear_seconds(jobs: Jobs, constants: Constants, rows: Column, inputs: Column, outputs: Column) -> Column:
    """Seconds of one product [rows, inputs] x [inputs, outputs] of a linear layer.

    Backward is two more of the same size, whose three matrices change places: they take as long.
    """
    flops = 2 * rows * inputs * outputs
    rate = jobs.peak_flops * jobs.gemm_ceiling * constants.gemm_efficiency * _low_precision(jobs, constants)
    rate = rate / np.where(_whole_lines(inputs) & _whole_lines(outputs), 1.0, constants.alignment)
    operands = rows * inputs + inputs * outputs
    moved = (operands + rows * outputs) * jobs.activation_bytes * constants.gemm_traffic
    return flops / rate * waves(jobs, rows, outputs) + moved / jobs.memory_bandwidth


def _whole_lines(width: Column) -> NDArray[np.bool_]:
    """Whether a width is a multiple of a line; rounding is faster than the remainder of a division."""
    lines = width / _LINE
    whole: NDArray[np.bool_] = lines == np.floor(lines)
    return whole


def _low_precision(jobs: Jobs, constants: Constants) -> Column:
    """Share of the peak of 8 and 4 bits that is left when operands have been scaled and cast."""
    over = jobs.peak_flops / jobs.peak_flops_attention
    some = np.where(over > _FOUR_BITS, constants.four_bits, constants.low_precision)
    return np.where(over > 1, some, 1.0)


def waves(jobs: Jobs, rows: Column, outputs: Column) -> Column:
    """Time over that of multiprocessors that are never idle, with the best of the tiles."""
    best = None
    useful = rows * outputs
    for height, width, cost in _TILES:
        tiles = np.ceil(rows / height) * np.ceil(outputs / width)
        units = np.maximum(jobs.multiprocessors, 1)
        full = np.where(jobs.multiprocessors > 0, np.ceil(tiles / units) * units, tiles)
        slow = full * (height * width * cost) / useful
        best = slow if best is None else np.minimum(best, slow)
    assert best is not None
    return best


def misaligned(width: Column, constants: Constants) -> Column:
    """Time over that with tensor cores, for a dimension of `width` elements."""
    return np.where(width % _ALIGNED == 0, 1.0, constants.misaligned)
