"""Widen the band of an estimate where a measured run does not state something that the estimate depends on.

Each unstated column has a distribution over its usual values. The run is estimated with each of them, and the spread of
these estimates is added to that of the model.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from hpc_train.planner.calibration.run_table import MeasuredRun, jobs_from_runs
from hpc_train.planner.constants import Constants
from hpc_train.planner.model.inputs import FULL, MEGATRON, RECOMPUTE, SCHEDULES, SELECTIVE
from hpc_train.planner.model.jobs import Jobs, replace_columns
from hpc_train.planner.model.step_time import estimate_step_time

Floats = NDArray[np.float64]
_VOCABULARIES = (50_304.0, 51_200.0, 64_000.0)
"""Vocabularies of GPTs in the fitted runs that state one, without BLOOM's 250,880 for many languages."""
_LLAMA_VOCABULARIES = (32_000.0, 128_256.0, 151_936.0)
"""Vocabularies of models with gated feed-forward layers: Llama 2, Llama 3, Qwen3."""
_VIRTUAL_STAGES = (1.0, 2.0, 4.0)
_BANDWIDTHS = (0.5, 1.0, 2.0)
_WIDTHS = (2.7, 3.5, 4.0)
"""Widths of a feed-forward layer over that of the model."""


def predict_spread(runs: Sequence[MeasuredRun], constants: Constants) -> Floats:
    """Return the standard deviation of log(measured / predicted) of each run, [runs]."""
    jobs = jobs_from_runs(runs)
    spread = np.broadcast_to(estimate_step_time(jobs, constants).spread, len(runs))
    variance = spread**2
    for name in sorted({name for run in runs for name in run.assumed}):
        rows = [row for row, run in enumerate(runs) if name in run.assumed]
        usual = _vary_column(jobs_from_runs([runs[row] for row in rows]), name)
        if usual:
            steps = [np.broadcast_to(estimate_step_time(some, constants).step, len(rows)) for some in usual]
            variance[rows] += np.var(np.log(steps), axis=0)
    deviation: Floats = np.sqrt(variance)
    return deviation


def _vary_column(jobs: Jobs, name: str) -> list[Jobs]:
    """Return the jobs once with each usual value of a column of the table; empty if none changes an estimate."""
    if name == "recompute":
        # Of the fitted runs of Megatron with fused attention that state it, 44 recompute nothing, 8 some and none all.
        most = np.where((jobs.stack == MEGATRON) & (jobs.fused_attention > 0), SELECTIVE, FULL)
        return [replace_columns(jobs, recompute=np.minimum(code, most)) for code in range(len(RECOMPUTE))]
    if name == "vpp":
        return [_set_virtual_stages(jobs, stages) for stages in _VIRTUAL_STAGES]
    if name == "vocab":
        pairs = zip(_VOCABULARIES, _LLAMA_VOCABULARIES, strict=True)
        return [replace_columns(jobs, vocab=np.where(jobs.gated > 0, llama, gpt)) for gpt, llama in pairs]
    if name == "ffn_hidden":
        return [replace_columns(jobs, feed_forward=jobs.hidden * width) for width in _WIDTHS]
    if name == "inter_link_gbps_per_gpu":
        return [replace_columns(jobs, nic_bandwidth=jobs.nic_bandwidth * factor) for factor in _BANDWIDTHS]
    if name == "compile":
        return [replace_columns(jobs, fused_elementwise=flag) for flag in (0, 1)]
    if name == "software":
        return [replace_columns(jobs, fused_attention=flag) for flag in (0, 1)]
    return []


def _set_virtual_stages(jobs: Jobs, stages: float) -> Jobs:
    """Return the jobs with `stages` virtual stages per rank, at most one per layer."""
    few = np.clip(np.floor(jobs.layers / jobs.pp), 1, stages)
    schedule = np.where(few > 1, SCHEDULES.index("interleaved_1f1b"), SCHEDULES.index("1f1b"))
    return replace_columns(jobs, virtual_stages=few, schedule=schedule)
