"""complexity: choose the simplest of several equally quick candidates.

The simplest has the fewest axes beside data parallelism, then the fewest techniques. Points: 2 for each of pp, cp and
tp; 2 for offload of optimizer or parameters, which needs the host, and for a schedule that splits backward; 1 for
recomputation, for recomputing only every k-th block, for offload of activations, for every other schedule than 1f1b,
for asynchronous tp, for tp without sequence parallelism, for Ulysses and for parameters that stay gathered. Ties go to
the lower ZeRO stage, then one level of sharding (HSDP has two), then the smaller degrees.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from hpc_train.planner.jobs import SCHEDULES, Column

_AXES = ("pp", "cp", "tp")
_SCHEDULE = {"1f1b": 0, "gpipe": 1, "interleaved_1f1b": 1, "looped_bfs": 1, "naive": 1}
"""Points by schedule; the others, which split backward, have 2."""
_STAGE, _LEVEL, _DEGREE = 0.1, 0.05, 0.0005
"""Fractions of a point: for a ZeRO stage, a second level of sharding, a doubling of a degree; below 1 in total."""


def complexity(columns: Mapping[str, Column]) -> Column:
    """Map [n] columns of kept.NAMES to points; fewer is simpler."""
    order = np.array([_SCHEDULE.get(name, 2) for name in SCHEDULES], np.float64)
    axes = sum(2.0 * (columns[name] > 1) for name in _AXES)
    offload = 2.0 * (columns["offload"] > 0) + columns["offload_activations"]
    recompute = (columns["recompute"] > 0) + 1.0 * (columns["recompute_every"] > 1)
    tensor = columns["overlap_tensor"] + (columns["sequence_parallel"] == 0)
    others = order[columns["schedule"].astype(np.int64)] + columns["ulysses"] + (columns["reshard"] == 0)
    hybrid = (columns["dp_shard"] > 1) & (columns["dp_replicate"] > 1)
    degrees = sum(np.log2(columns[name]) for name in (*_AXES, "dp_shard", "virtual_stages"))
    points: Column = axes + offload + recompute + tensor + others
    return points + _STAGE * columns["zero"] + _LEVEL * hybrid + _DEGREE * degrees
