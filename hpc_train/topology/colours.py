"""Colours of groups and of loads."""

from __future__ import annotations

import colorsys

IDLE = "#c9d1d9"
"""A link of which no load is known, or none."""
PLAIN = "#9fb4c7"
"""A GPU that is in no group."""
_FEW = (
    "#4c78a8", "#f58518", "#54a24b", "#e45756", "#72b7b2", "#eeca3b", "#b279a2", "#9d755d",
    "#2f4b7c", "#ff9da6", "#8cd17d", "#79706e",
)  # fmt: skip
_LIGHT, _HEAVY = (254, 217, 118), (177, 0, 38)
_MIDDLE = (252, 78, 42)


def group_colour(number: int, groups: int) -> str:
    """Distinct colours for a few groups; of many, neighbours are alike, so that order looks smooth."""
    if groups <= len(_FEW):
        return _FEW[number % len(_FEW)]
    at = number / groups
    red, green, blue = colorsys.hls_to_rgb(at * 0.92, 0.44 + 0.14 * (number % 2), 0.62)
    return f"#{round(red * 255):02x}{round(green * 255):02x}{round(blue * 255):02x}"


def ink_on(colour: str) -> str:
    """Black or white, whichever is read better on it."""
    red, green, blue = (int(colour[at : at + 2], 16) for at in (1, 3, 5))
    return "#1f2328" if 0.299 * red + 0.587 * green + 0.114 * blue > 150 else "white"


def load_colour(load: float | None, heaviest: float) -> str:
    """Yellow to dark red by the share of the heaviest load."""
    if not load or not heaviest:
        return IDLE
    share = min(load / heaviest, 1.0)
    first, second, at = (_LIGHT, _MIDDLE, share * 2) if share < 0.5 else (_MIDDLE, _HEAVY, share * 2 - 1)
    return "#" + "".join(f"{round(a + (b - a) * at):02x}" for a, b in zip(first, second, strict=True))


def load_width(load: float | None, heaviest: float) -> float:
    """Points."""
    return 1.2 if not load or not heaviest else 1.2 + 5.8 * min(load / heaviest, 1.0)


def seconds(value: float) -> str:
    """As a person says it: 12.3 ms."""
    for unit, size in (("s", 1.0), ("ms", 1e-3), ("µs", 1e-6)):
        if value >= size:
            return f"{value / size:.3g} {unit}"
    return "0" if value == 0 else f"{value * 1e9:.3g} ns"
