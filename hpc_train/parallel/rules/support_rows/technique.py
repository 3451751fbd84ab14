"""The row of one technique in the table of parallelism, and how close its numbers are to those of one device."""

from __future__ import annotations

from dataclasses import dataclass

EXACT = "equal to one device"
"""1e-10 of the norm in float64, for loss, gradients, clipped norm, parameters and optimizer state."""
INEXACT = "not equal: "
"""Prefix of `numbers` for every other technique; the reason follows."""


@dataclass(frozen=True, kw_only=True)
class Technique:
    """One row; no cell is longer than 80 characters, or has a |."""

    name: str
    option: str
    """Overrides that turn it on, as on a command line."""
    done_by: str
    numbers: str = EXACT
    """EXACT, or INEXACT and why."""
    needs: str = ""
    """Empty: none."""
    proof: str
    """Test file, from the root of the repository."""
