"""complexity: which of candidates that are as quick a person would rather run."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from hpc_train.planner.jobs import SCHEDULES, Column

_SCHEDULE = {"1f1b": 0, "gpipe": 1, "interleaved_1f1b": 1, "looped_bfs": 2, "naive": 2}
"""Others, which split backward: 3."""


def complexity(columns: Mapping[str, Column]) -> Column:
    """[n] columns of search.NAMES -> the less the simpler.

    Each axis that splits a layer or the order of work counts more than sharding, that more than recomputation; offload
    needs the host too. Beyond that, the smaller degrees.
    """
    order = np.array([_SCHEDULE.get(name, 3) for name in SCHEDULES], np.float64)
    split = [4.0 * (columns[name] > 1) for name in ("pp", "cp", "tp")]
    degrees = sum(np.log2(columns[name]) for name in ("pp", "cp", "tp", "dp_shard", "virtual_stages"))
    zero = columns["zero"] + 1.0 * ((columns["dp_shard"] > 1) & (columns["dp_replicate"] > 1))
    offload, recompute = 5.0 * columns["offload"] + 3.0 * columns["offload_activations"], 1.0 * columns["recompute"]
    rare = (columns["recompute_every"] > 1) + (columns["reshard"] == 0) + 2.0 * columns["overlap_tensor"]
    plain = order[columns["schedule"].astype(np.int64)] + (columns["sequence_parallel"] == 0) + 0.5 * columns["ulysses"]
    whole: Column = sum(split) + zero + offload + recompute + rare + plain + 0.01 * degrees
    return whole
