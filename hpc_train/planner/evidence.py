"""Count how many measured runs used each technique, and demand a clear gain from techniques that few runs used.

The constants are fitted to measured runs. If fewer than NEEDED_RUNS of these runs used a technique, its estimate is an
unchecked calculation: a candidate with it is preferred only if it is faster by more than the error of estimates (p90
over p50). Runs that calibrated a cluster also count.
"""

from __future__ import annotations

from collections.abc import Mapping
from statistics import NormalDist

import numpy as np
from numpy.typing import NDArray

from hpc_train.planner.model.inputs import OFFLOAD, SCHEDULES, Column

NEEDED_RUNS = 2
"""One alone may have been measured wrongly."""
_P90 = NormalDist().inv_cdf(0.9)
Flags = NDArray[np.bool_]


def find_techniques(columns: Mapping[str, Column]) -> dict[str, Flags]:
    """Return for each technique which jobs use it, [n]. columns: those of Jobs, as far as candidates choose them."""
    pipeline, tensor, context = columns["pp"] > 1, columns["tp"] > 1, columns["cp"] > 1
    sharded = columns["dp_shard"] * columns["cp"] > 1
    techniques = {
        "tp": tensor,
        "tp without split positions": tensor & (columns["sequence_parallel"] == 0),
        "async tp": tensor & (columns["overlap_tensor"] > 0),
        "ring attention": context & (columns["ulysses"] == 0),
        "ulysses": context & (columns["ulysses"] > 0),
        "ep": columns["ep"] > 1,
        "zero1": sharded & (columns["zero"] == 1),
        "zero2": sharded & (columns["zero"] == 2),
        "zero3": sharded & (columns["zero"] == 3),
        "no reshard": sharded & (columns["zero"] == 3) & (columns["reshard"] == 0),
        "offload activations": columns["offload_activations"] > 0,
    }
    techniques |= {f"offload {name}": columns["offload"] == code for code, name in enumerate(OFFLOAD) if code}
    return techniques | {name: pipeline & (columns["schedule"] == code) for code, name in enumerate(SCHEDULES)}


def count_evidence(columns: Mapping[str, Column]) -> dict[str, int]:
    """Count the runs that had each technique. columns: of measured runs, [n]."""
    return {name: int(np.sum(flags)) for name, flags in find_techniques(columns).items()}


def list_unmeasured(evidence: Mapping[str, int]) -> frozenset[str]:
    """List the techniques that too few measured runs had. Without any evidence nothing is known, and none is listed."""
    if not evidence:
        return frozenset()
    return frozenset(name for name, count in evidence.items() if count < NEEDED_RUNS)


def handicap(columns: Mapping[str, Column], unmeasured: frozenset[str], spread: Column) -> Column:
    """Return the factor on a candidate's step time when it is compared with others, [n].

    1, or p90 over p50 of its estimate if it uses an unmeasured technique. spread: of log(time).
    """
    techniques = find_techniques(columns)
    uses: Column = np.zeros(())
    for name in unmeasured & techniques.keys():
        uses = np.maximum(uses, techniques[name])
    return np.where(uses > 0, np.exp(_P90 * spread), 1.0)


def unmeasured_techniques(columns: Mapping[str, Column], unmeasured: frozenset[str]) -> tuple[str, ...]:
    """List the unmeasured techniques that one job uses."""
    return tuple(name for name, flags in find_techniques(columns).items() if name in unmeasured and np.all(flags))
