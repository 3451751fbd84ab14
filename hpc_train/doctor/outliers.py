"""Which of many equal measurements stand out."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median

SCORE = 3.5
"""Of the modified z-score, beyond which a value is an outlier (Iglewicz and Hoaglin 1993, section 3.3)."""
LEAST = 0.10
"""Share of the median below which a difference does not matter, however steady the others are."""


def slow(seconds: Sequence[float], least: float = LEAST) -> list[int]:
    """Indices of the times that are longer than the others': 0.6745 (x - median) / MAD > 3.5, and 10 % at least.

    MAD is the median of the absolute deviations. Of fewer than three, nobody can say which is odd: none.
    """
    if len(seconds) < 3:
        return []
    middle = median(seconds)
    spread = median(abs(value - middle) for value in seconds)
    return [
        index
        for index, value in enumerate(seconds)
        if value > middle * (1 + least) and 0.6745 * (value - middle) > SCORE * spread
    ]
