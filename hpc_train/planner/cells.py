"""Cells: one line of a table of measured runs by column, and what of it cannot be."""

from __future__ import annotations

import math
from collections.abc import Mapping

_COUNTS = (
    *("layers", "hidden", "ffn_hidden", "heads", "kv_heads", "head_dim", "seq", "vocab", "gpus", "gpus_per_node"),
    *("dp", "tp", "pp", "cp", "ep", "vpp", "micro_batch", "global_batch"),
)
"""Whole numbers, at least 1."""
_POSITIVE = ("iter_time_s", "mem_gib")
_RATES = ("intra_link_gbs", "inter_link_gbps_per_gpu", "experts")
"""0 says that there is none."""
_FLAGS = ("gated_mlp", "sp")
_MOST = 1e12
"""No number of a training run is larger."""


class Cells:
    """Cells by name; a number is NaN where its cell is empty or holds none."""

    def __init__(self, cells: Mapping[str, str | None]) -> None:
        self._cells = cells

    def text(self, name: str) -> str:
        return (self._cells.get(name) or "").strip()

    def number(self, name: str, usual: float = math.nan) -> float:
        """usual: where the cell is empty."""
        text = self.text(name)
        try:
            return float(text) if text else usual
        except ValueError:
            return math.nan

    def stated(self, name: str) -> bool:
        return bool(self.text(name))

    @property
    def year(self) -> int:
        """The latest where none is stated."""
        year = self.number("year")
        return int(year) if math.isfinite(year) else 9999


def impossible(row: Cells) -> str | None:
    """Why the numbers of a row cannot be those of a run; None: they can. Empty cells are possible."""
    for names, fault in ((_COUNTS, _no_count), (_POSITIVE, _no_amount), (_RATES, _no_rate), (_FLAGS, _no_flag)):
        for name in names:
            if row.stated(name) and (why := fault(row.number(name))):
                return f"{name} is {row.text(name)!r}, {why}"
    return _contradiction(row)


def _no_count(value: float) -> str | None:
    return None if 1 <= value <= _MOST and value == int(value) else "which is no count"


def _no_amount(value: float) -> str | None:
    return None if 0 < value <= _MOST else "which is no amount"


def _no_rate(value: float) -> str | None:
    return None if 0 <= value <= _MOST else "which is no amount"


def _no_flag(value: float) -> str | None:
    return None if value in (0, 1) else "which is neither 0 nor 1"


def _contradiction(row: Cells) -> str | None:
    """Numbers that are possible each by itself, and not together. NaN compares as false: what is not stated is not
    compared."""
    heads, stages = row.number("heads"), row.number("pp") * row.number("vpp", 1)
    at_once = row.number("dp") * row.number("micro_batch")
    pairs = (
        (row.number("kv_heads"), heads, "kv_heads", "heads"),
        (row.number("tp"), heads, "tp", "heads"),
        (row.number("cp"), row.number("seq"), "cp", "seq"),
        # Some stacks count the embedding and the head as a layer each.
        (stages, row.number("layers") + 2, "pp x vpp", "layers + 2"),
        (at_once, row.number("global_batch"), "dp x micro_batch", "global_batch"),
    )
    over = next(((a, b, one, other) for a, b, one, other in pairs if a > b), None)
    return over and f"{over[2]} = {over[0]:g} is more than {over[3]} = {over[1]:g}"
