"""Read one line of a table of measured runs: its cells by column, and a check for impossible numbers."""

from __future__ import annotations

import math
from collections.abc import Mapping

_COUNTS = (
    *("layers", "hidden", "ffn_hidden", "heads", "kv_heads", "head_dim", "seq", "vocab", "gpus", "gpus_per_node"),
    *("dp", "dp_replicate", "tp", "pp", "cp", "ep", "vpp", "micro_batch", "global_batch"),
    *("top_k", "expert_hidden", "key_rank", "rotary_width", "value_dim", "gradient_bytes", "reduce_bytes"),
    *("expert_groups", "group_top_k", "dispatch_bytes", "window", "adapter_rank"),
)
"""Columns with whole numbers of at least 1."""
_POSITIVE = ("iter_time_s", "mem_gib")
_RATES = (
    *("intra_link_gbs", "inter_link_gbps_per_gpu", "experts"),
    *("shared_hidden", "dense_layers", "query_rank", "expert_imbalance", "window_layers"),
)
"""Columns with amounts that may be 0, which means none."""
_FLAGS = (
    *("gated_mlp", "sp", "compile", "async_tp", "reshard", "reduce_once", "launch_blocking"),
    *("overlap_experts", "fp8_gather", "head_norms", "composite_norms", "separate_gathers"),
    *("out_of_memory", "held_out"),
)
_MAX_VALUE = 1e12
"""Larger numbers are refused."""


class CsvRow:
    """One line of the table: cells by column name. A number is NaN if its cell is empty or not a number."""

    def __init__(self, cells: Mapping[str, str | None]) -> None:
        self._cells = cells

    def get_text(self, name: str) -> str:
        """Return a cell without spaces around it; empty if there is none."""
        return (self._cells.get(name) or "").strip()

    def get_word(self, name: str) -> str:
        """Return a cell that holds a name, in lower case."""
        return self.get_text(name).lower()

    def get_number(self, name: str, default: float = math.nan) -> float:
        """Return a cell as a number. default: value of an empty cell."""
        text = self.get_text(name)
        try:
            return float(text) if text else default
        except ValueError:
            return math.nan

    def is_stated(self, name: str) -> bool:
        """Return whether a cell has a value."""
        return bool(self.get_text(name))

    def get_flag(self, name: str, otherwise: bool = False) -> bool:
        """Return a flag. otherwise: value of an empty cell."""
        return self.get_number(name) == 1 if self.is_stated(name) else otherwise

    @property
    def year(self) -> int:
        """Return the year of the run; 9999 if none is stated."""
        year = self.get_number("year")
        return int(year) if math.isfinite(year) else 9999


def explain_impossible(row: CsvRow) -> str | None:
    """Return why the numbers of a row are impossible; None if they are possible. Empty cells are allowed."""
    for names, fault in (
        (_COUNTS, _explain_bad_count),
        (_POSITIVE, _explain_bad_amount),
        (_RATES, _explain_bad_bandwidth),
        (_FLAGS, _explain_bad_flag),
    ):
        for name in names:
            if row.is_stated(name) and (why := fault(row.get_number(name))):
                return f"{name} is {row.get_text(name)!r}, {why}"
    return _find_contradiction(row)


def _explain_bad_count(value: float) -> str | None:
    return None if 1 <= value <= _MAX_VALUE and value == int(value) else "which is not a whole number from 1"


def _explain_bad_amount(value: float) -> str | None:
    return None if 0 < value <= _MAX_VALUE else "which is not a number above 0"


def _explain_bad_bandwidth(value: float) -> str | None:
    return None if 0 <= value <= _MAX_VALUE else "which is not a number from 0"


def _explain_bad_flag(value: float) -> str | None:
    return None if value in (0, 1) else "which is neither 0 nor 1"


def _find_contradiction(row: CsvRow) -> str | None:
    """Find two numbers that contradict each other. Empty cells are NaN, which compares as false."""
    heads, stages = row.get_number("heads"), row.get_number("pp") * row.get_number("vpp", 1)
    sequences_at_once = row.get_number("dp") * row.get_number("micro_batch")
    pairs = (
        (row.get_number("kv_heads"), heads, "kv_heads", "heads"),
        (row.get_number("tp"), heads, "tp", "heads"),
        (row.get_number("cp"), row.get_number("seq"), "cp", "seq"),
        # Some stacks count the embedding and the head as a layer each.
        (stages, row.get_number("layers") + 2, "pp x vpp", "layers + 2"),
        (row.get_number("window_layers"), row.get_number("layers"), "window_layers", "layers"),
        (row.get_number("dp_replicate"), row.get_number("dp"), "dp_replicate", "dp"),
        (row.get_number("top_k"), row.get_number("experts"), "top_k", "experts"),
        (row.get_number("group_top_k"), row.get_number("expert_groups", 1), "group_top_k", "expert_groups"),
        (row.get_number("expert_groups"), row.get_number("experts"), "expert_groups", "experts"),
        (
            row.get_number("ep"),
            row.get_number("dp") * row.get_number("tp") * row.get_number("cp", 1),
            "ep",
            "dp x cp x tp",
        ),
        (sequences_at_once, row.get_number("global_batch"), "dp x micro_batch", "global_batch"),
    )
    over = next(((a, b, one, other) for a, b, one, other in pairs if a > b), None)
    return over and f"{over[2]} = {over[0]:g} is more than {over[3]} = {over[1]:g}"
