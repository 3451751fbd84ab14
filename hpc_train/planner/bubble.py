"""How long the slowest rank of a pipeline waits in a step, for each schedule.

Closed forms of schedules.simulate, to which a test ties them. With m micro-batches, p ranks, v stages a rank, and T_i
what rank i computes for one micro-batch:

    naive                 m (sum T - max T): one rank works at a time
    GPipe, 1F1B           sum T - max T: the first micro-batch fills all other stages, the last one drains them
    interleaved, looped   the same over v (Narayanan et al. 2021, arXiv:2104.04473, section 2.2)
    ZB-H1, ZB-H2          (p - 1)(F + I - W), (p - 1)(F + I - 2 W) (Qi et al. 2024, arXiv:2401.10241, table 2), over v
    ZB-V                  (p - 1) max(F / 2, I / 2, I - W): what filling and draining takes (its section 6 counts a rank
                          from its own first entry to its last one, and finds none); twice that below 2 p - 1
                          micro-batches
    DualPipeV             (p - 1)(E + max(0, E - W) / 2), E = (F + I) / 2, within 12 %
"""

from __future__ import annotations

import numpy as np

from hpc_train.planner.jobs import SCHEDULES, Column, Jobs

_CODE = {name: code for code, name in enumerate(SCHEDULES)}
_SPLITS = _CODE["interleaved_zero_bubble"]
"""Codes from here on are of schedules that split backward."""


def bubble(jobs: Jobs, others: Column, forward: Column, inputs: Column, weights: Column) -> Column:
    """Seconds that the slowest rank waits; others: seconds of a micro-batch on all other ranks together.

    forward, inputs, weights: seconds of a micro-batch on an average rank, all its stages.
    """
    p, m, v, code = jobs.pp, jobs.micro_batches, jobs.virtual_stages, jobs.schedule
    found = np.where(code == _CODE["naive"], m * others, others / v)
    if np.any(code >= _SPLITS):
        found = np.where(code >= _SPLITS, _split(jobs, forward, inputs, weights), found)
    return np.where(p > 1, found, 0.0)


def _split(jobs: Jobs, forward: Column, inputs: Column, weights: Column) -> Column:
    """Of the schedules that compute gradients of weights apart."""
    after, v, code = jobs.pp - 1, jobs.virtual_stages, jobs.schedule
    there = forward + inputs
    few = np.where(jobs.micro_batches < 2 * jobs.pp - 1, 2.0, 1.0)
    v_shaped = few * np.maximum(np.maximum(forward, inputs) / 2, inputs - weights)
    both = there / 2 + np.maximum(there / 2 - weights, 0) / 2
    found = np.where(code == _CODE["zbv"], v_shaped, np.maximum(there - weights, 0) / v)
    found = np.where(code == _CODE["dualpipev"], both, found)
    return after * np.where(code == _CODE["zb_2p"], np.maximum(there - 2 * weights, 0), found)
