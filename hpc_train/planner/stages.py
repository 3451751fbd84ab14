"""How many layers each rank of a pipeline has, and how many of its micro-batches are in flight."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import numpy as np
from numpy.typing import NDArray

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


def rank_layers(jobs: Jobs, v_shaped: NDArray[np.bool_]) -> Column:
    """Return the layers of an hpc_train pipeline's ranks: [4, n].

    They are those of the first rank, of the fullest one in the middle, of the last rank, and of the last stage.
    v_shaped: the jobs in which rank r has the stages r and 2 pp - 1 - r.
    """
    head = jobs.vocab * jobs.hidden / (jobs.layer_parameters + jobs.heads * jobs.head_dim * jobs.sequence)
    columns = np.broadcast_arrays(jobs.layers, jobs.pp, jobs.virtual_stages, head, v_shaped)
    keys, index = np.unique(np.stack([it.ravel() for it in columns]), axis=1, return_inverse=True)
    table = np.array([_rank_layers(int(n), int(pp), int(v), h, bool(bent)) for n, pp, v, h, bent in keys.T.tolist()])
    found: Column = np.moveaxis(table[index.ravel()], -1, 0).reshape(4, *columns[0].shape)
    return found


@cache
def _rank_layers(layers: int, pp: int, virtual: int, head: float, v_shaped: bool) -> tuple[float, ...]:
    stages = pp * virtual
    held = _stage_layers(layers, stages, head)
    ranks = [stage % pp if not v_shaped or stage < pp else stages - 1 - stage for stage in range(stages)]
    sums = [sum(n for n, rank in zip(held, ranks, strict=True) if rank == mine) for mine in range(pp)]
    return sums[0], max(sums[1:-1], default=sums[-1]), sums[-1], held[-1]


def _stage_layers(layers: int, stages: int, head: float) -> tuple[float, ...]:
    """Layers of each stage, as parallel.pipeline.stages splits equal blocks and a head that costs `head` blocks."""
    if stages == 1 or stages > layers:
        return (layers / stages,) * stages

    def rated(last: int) -> tuple[float, float, tuple[int, ...]]:
        fewer, more = divmod(layers - last, stages - 1)
        held = (*(fewer,) * (stages - 1 - more), *(fewer + 1,) * more, last)
        costs = (*held[:-1], last + head)
        return max(costs), sum(it * it for it in costs), held

    return min(rated(last) for last in range(1, layers - stages + 2))[2]


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
