"""Band: a number that is not known exactly, as its 10th, 50th and 90th percentile."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True)
class Band:
    """p10 <= p50 <= p90."""

    p10: float
    p50: float
    p90: float

    @staticmethod
    def exactly(value: float) -> Band:
        """Of a number that is known."""
        return Band(value, value, value)

    def through(self, function: Callable[[float], float]) -> Band:
        """Of a monotone function of the number, rising or falling."""
        low, middle, high = function(self.p10), function(self.p50), function(self.p90)
        return Band(min(low, high), middle, max(low, high))

    def times(self, other: Band) -> Band:
        """Of the product with an independent number; both are taken as log-normal on each side of the middle.

        All six percentiles must be positive.
        """
        down = math.hypot(math.log(self.p50 / self.p10), math.log(other.p50 / other.p10))
        up = math.hypot(math.log(self.p90 / self.p50), math.log(other.p90 / other.p50))
        middle = self.p50 * other.p50
        return Band(middle * math.exp(-down), middle, middle * math.exp(up))
