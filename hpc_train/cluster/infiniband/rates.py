"""InfiniBand's names of line rates."""

from __future__ import annotations

import re

_LANE = {"SDR": 2.5, "DDR": 5, "QDR": 10, "FDR10": 10, "FDR": 14, "EDR": 25, "HDR": 50, "NDR": 100, "XDR": 200}
"""10^9 bit/s a lane, one direction, as the ports themselves report (FDR: 56 for four lanes)."""


def gbit_s(rate: str | None) -> float | None:
    """200 of 4xHDR; None of what has no name here."""
    match = re.fullmatch(r"(\d{1,2})x(\w+)", rate or "")
    lane = _LANE.get(match[2]) if match else None
    return float(int(match[1]) * lane) if match and lane else None
