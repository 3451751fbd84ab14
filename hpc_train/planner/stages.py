"""How many layers each rank of a pipeline has, and how many of its micro-batches are in flight."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from hpc_train.planner.jobs import SCHEDULES, STACKS, Column, Jobs

_CODE = {name: code for code, name in enumerate(SCHEDULES)}
OURS = STACKS.index("hpc_train")


@dataclass(frozen=True)
class Layers:
    """Of one rank, all its virtual stages together; where there is one rank, all layers."""

    first: Column
    middle: Column
    last: Column


def layers_of(jobs: Jobs) -> Layers:
    """The split.

    Published stacks give each stage as many layers; where these do not divide, embedding and head count as a layer each
    if then they do, and else the last stage gets what is left. hpc_train balances by FLOPs (parallel.pipeline.stages),
    for which two candidates of the last stage are enough; of the others the earlier ones have fewer.
    """
    stages = jobs.pp * jobs.virtual_stages
    even = jobs.layers / stages
    with_ends = ((jobs.layers + 2) % stages == 0) & (jobs.layers % stages != 0)
    middle = np.where(with_ends, (jobs.layers + 2) / stages, np.ceil(even))
    last = np.where(with_ends, middle - 1, np.maximum(jobs.layers - (stages - 1) * middle, 0))
    ours_middle, ours_last = _balanced(jobs, stages)
    ours = jobs.stack == OURS
    middle, last = np.where(ours, ours_middle, middle), np.where(ours, ours_last, last)
    rank, last_rank = middle * jobs.virtual_stages, middle * (jobs.virtual_stages - 1) + last
    fewest = np.floor((jobs.layers - last) / np.maximum(stages - 1, 1)) * jobs.virtual_stages
    left = jobs.layers - (jobs.pp - 2) * rank - last_rank
    first = np.clip(np.where(ours, np.maximum(left, fewest), left), 0, rank)
    whole = jobs.pp == 1
    return Layers(*(np.where(whole, jobs.layers, it) for it in (first, rank, last_rank)))


def _balanced(jobs: Jobs, stages: Column) -> tuple[Column, Column]:
    """(layers of a stage, layers of the last stage) whose costliest stage has fewest FLOPs."""
    layers, others = jobs.layers, np.maximum(stages - 1, 1)
    head = jobs.vocab * jobs.hidden / (jobs.layer_parameters + jobs.heads * jobs.head_dim * jobs.sequence)
    fewer = np.clip(np.floor((layers - head * others) / stages), 1, np.maximum(layers - others, 1))
    more = np.minimum(fewer + 1, np.maximum(layers - others, 1))
    options = [(np.ceil((layers - last) / others), last) for last in (fewer, more)]
    (middle, last), (other_middle, other_last) = options
    better = np.maximum(other_middle, other_last + head) <= np.maximum(middle, last + head)
    return np.where(better, other_middle, middle), np.where(better, other_last, last)


def in_flight(jobs: Jobs) -> tuple[Column, Column, Column]:
    """Micro-batches, in units of all layers of the rank, whose activations the first, the second and the last rank hold
    at most (the second: of those in the middle it holds most). Tied to schedules.simulate's `live` by a test."""
    p, m, v = jobs.pp, jobs.micro_batches, jobs.virtual_stages
    first = np.minimum(_peak(jobs, np.zeros_like(p)) / v, m)
    middle = np.minimum(_peak(jobs, np.minimum(p - 1, 1)) / v, m)
    last = np.minimum(_peak(jobs, p - 1) / v, m)
    return first, middle, last


def _peak(jobs: Jobs, rank: Column) -> Column:
    """Of activations of one stage and one micro-batch."""
    p, m, v, code = jobs.pp, jobs.micro_batches, jobs.virtual_stages, jobs.schedule
    after = p - 1 - rank
    interleaved = (v - 1) * np.minimum(p, m) + 2 * after + 1
    known = {
        "naive": 1 + 0 * m,
        "gpipe": m * v,
        "1f1b": after + 1,
        "interleaved_1f1b": interleaved,
        "looped_bfs": m * v,
        "interleaved_zero_bubble": (v - 1) * np.minimum(p, m) + p,
        "zbv": 2 * p,
        "dualpipev": 2 * p + 1,
        "zb_2p": 2 * p - 1,
    }
    peak = known["1f1b"]
    for name, value in known.items():
        peak = np.where(code == _CODE[name], value, peak)
    return np.where(p == 1, 1.0, peak)
