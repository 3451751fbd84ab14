"""Predicted memory as published runs state it: of which rank, and counted where."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from hpc_train.planner.from_runs import Run
from hpc_train.planner.memory import Memory


def memory_of(runs: Sequence[Run], memory: Memory) -> NDArray[np.float64]:
    """[runs] bytes; memory: of the runs' jobs, a row each."""
    stages = {"device": memory.stages, "reserved": memory.reserved, "allocated": memory.allocated}
    found = np.zeros(len(runs))
    for place, run in enumerate(runs):
        column = stages[run.memory_of][:, place]
        found[place] = column[0] if run.first_stage else column.max()
    return found
