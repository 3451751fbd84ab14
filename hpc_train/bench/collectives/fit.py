"""Latency and bandwidth of a level, from the times of messages of several sizes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from scipy.optimize import nnls


@dataclass(frozen=True)
class Line:
    """t = latency + size / bandwidth."""

    latency: float
    """Seconds."""
    bandwidth: float
    """Bytes/s."""
    error: float
    """The largest relative difference of the line from what was measured."""


def fit_line(sizes: Sequence[int], seconds: Sequence[float]) -> Line | None:
    """Least squares of relative differences, neither constant below 0; None where the times do not tell a bandwidth.

    sizes: bytes; seconds: medians. Source of the model: Hockney, "The communication challenge for MPP", 1994.
    """
    if len(set(sizes)) < 2:
        return None
    n, t = np.array(sizes, dtype=np.float64), np.array(seconds, dtype=np.float64)
    scale = n.max()
    (latency, slope), _ = nnls(np.stack([1 / t, n / scale / t], axis=1), np.ones(len(n)))
    if slope <= 0:
        return None
    error = np.abs((latency + slope * n / scale) / t - 1).max()
    return Line(float(latency), float(scale / slope), float(error))
