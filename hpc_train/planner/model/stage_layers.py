"""Layers of each rank of a pipeline: the first, a middle one and the last."""

from __future__ import annotations

from dataclasses import dataclass, fields
from functools import cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hpc_train.planner.model.distinct import find_distinct
from hpc_train.planner.model.inputs import HPC_TRAIN, Column
from hpc_train.planner.model.jobs import Jobs
from hpc_train.planner.model.pipeline import V_SHAPED


@dataclass(frozen=True)
class LayerSplit:
    """Layers of the first rank of a pipeline, a middle one and the last, counting all virtual stages of the rank."""

    first: Column
    middle: Column
    last: Column


def split_layers(jobs: Jobs) -> LayerSplit:
    """Return how many layers the ranks of the pipeline have.

    Megatron and other published stacks give every stage the same number. If the layers do not divide, embedding and
    head count as one layer each if that makes them divide; otherwise the last stage has fewer. hpc_train balances
    stages by FLOPs (traffic.stages.split_blocks).
    """
    stages, is_ours = jobs.pp * jobs.virtual_stages, jobs.stack == HPC_TRAIN
    middle, last = _balanced(jobs, stages)
    if not np.all(is_ours):
        even_middle, even_last = _even(jobs, stages)
        middle, last = np.where(is_ours, middle, even_middle), np.where(is_ours, last, even_last)
    rank, last_rank = middle * jobs.virtual_stages, middle * (jobs.virtual_stages - 1) + last
    # hpc_train's stages differ by one layer if the layers do not divide, and earlier stages have fewer. With one stage
    # a rank, a middle rank has the most; the first has what the others leave, but no fewer than the smallest stage.
    fewest = np.floor((jobs.layers - last) / np.maximum(stages - 1, 1)) * jobs.virtual_stages
    left = jobs.layers - (jobs.pp - 2) * rank - last_rank
    first = np.clip(np.where(is_ours, np.maximum(left, fewest), left), 0, rank)
    unsplit = jobs.pp == 1
    ranks: tuple[Column, ...] = (first, rank, last_rank)
    # Of several stages of a rank few have one layer more.
    several = is_ours & (jobs.virtual_stages > 1) & ~unsplit & (stages <= jobs.layers)
    if np.any(several):
        exact = rank_layers(jobs, np.isin(jobs.schedule, V_SHAPED))
        ranks = tuple(np.where(several, count, other) for count, other in zip(exact, ranks, strict=False))
    return LayerSplit(*(np.where(unsplit, jobs.layers, count) for count in ranks))


def _even(jobs: Jobs, stages: Column) -> tuple[Column, Column]:
    """Return (layers of a stage, layers of the last stage) in published stacks."""
    with_ends = ((jobs.layers + 2) % stages == 0) & (jobs.layers % stages != 0)
    middle = np.where(with_ends, (jobs.layers + 2) / stages, np.ceil(jobs.layers / stages))
    return middle, np.where(with_ends, middle - 1, np.maximum(jobs.layers - (stages - 1) * middle, 0))


def _balanced(jobs: Jobs, stages: Column) -> tuple[Column, Column]:
    """Return (layers of a stage, layers of the last stage) for which the costliest stage is as cheap as possible."""
    layers, others = jobs.layers, np.maximum(stages - 1, 1)
    # The head costs as much as `head` layers. The optimum is where the last stage and the others cost the same; as
    # layers are whole, it is one of the two whole numbers around that point.
    head = jobs.vocab * jobs.hidden / (jobs.layer_parameters + jobs.heads * jobs.attention_dim * jobs.sequence)
    fewer = np.clip(np.floor((layers - head * others) / stages), 1, np.maximum(layers - others, 1))
    more = np.minimum(fewer + 1, np.maximum(layers - others, 1))
    options = [(np.ceil((layers - last) / others), last) for last in (fewer, more)]
    (middle, last), (other_middle, other_last) = options
    better = np.maximum(other_middle, other_last + head) <= np.maximum(middle, last + head)
    return np.where(better, other_middle, middle), np.where(better, other_last, last)


def rank_layers(jobs: Jobs, v_shaped: NDArray[np.bool_]) -> Column:
    """Return numbers of layers in hpc_train's pipeline: [4, n].

    The rows are: the first rank, the middle rank with the most layers, the last rank, and the last stage.
    v_shaped: jobs in which rank r has the stages r and 2 pp - 1 - r.
    """
    head = jobs.vocab * jobs.hidden / (jobs.layer_parameters + jobs.heads * jobs.attention_dim * jobs.sequence)
    columns = np.broadcast_arrays(jobs.layers, jobs.pp, jobs.virtual_stages, head, v_shaped)
    # Thousands of jobs differ in few of these values: split each distinct combination once.
    keys, index = find_distinct(np.stack([column.ravel() for column in columns]))
    table = np.array([_rank_layers(int(n), int(pp), int(v), h, bool(bent)) for n, pp, v, h, bent in keys.T.tolist()])
    return np.take(table.T, index, axis=1).reshape(4, *columns[0].shape)


@cache
def _rank_layers(layers: int, pp: int, virtual: int, head: float, v_shaped: bool) -> tuple[float, ...]:
    stages = pp * virtual
    layers_of_stage = _stage_layers(layers, stages, head)
    layers_of_rank: list[list[float]] = [[] for _ in range(pp)]
    for stage, count in enumerate(layers_of_stage):
        layers_of_rank[stage % pp if not v_shaped or stage < pp else stages - 1 - stage].append(count)
    sums = list(map(sum, layers_of_rank))
    return sums[0], max(sums[1:-1], default=sums[-1]), sums[-1], layers_of_stage[-1]


def _stage_layers(layers: int, stages: int, head: float) -> tuple[float, ...]:
    """Return the layers of each stage, as traffic.stages.split_blocks splits equal blocks. head: its cost in blocks.

    Searching the size of the last stage alone is enough, because all other stages are alike.
    """
    if stages == 1 or stages > layers:
        return (layers / stages,) * stages

    def rated(last: int) -> tuple[float, float, tuple[int, ...]]:
        fewer, more = divmod(layers - last, stages - 1)
        layers_of_stage = (*(fewer,) * (stages - 1 - more), *(fewer + 1,) * more, last)
        costs = (*layers_of_stage[:-1], last + head)
        return max(costs), sum(cost * cost for cost in costs), layers_of_stage

    # Least maximum first; among these the most even split, by the sum of squares, as split_blocks chooses.
    return min(rated(last) for last in range(1, layers - stages + 2))[2]


@dataclass(frozen=True)
class StageLayers:
    """Layers of the first rank of a pipeline, a middle one and the last: [3, n]; [1, n] if no job has a pipeline."""

    stage: Column
    """Layers in each of the rank's stages other than the pipeline's last; the mean if they differ."""
    last: Column
    """Layers in the pipeline's last stage."""
    has_first: Column
    """1 if the rank has the pipeline's first stage."""
    has_last: Column
    """1 if the rank has the pipeline's last stage."""
    layers: Column
    """Layers in all stages of the rank."""
    tables: Column
    """Number of tables on the rank: embedding and head count 1 each."""

    def take(self, ranks: slice) -> StageLayers:
        """Return some of the three ranks."""
        return StageLayers(*(getattr(self, field.name)[ranks] for field in fields(self)))


def split_stages(jobs: Jobs) -> StageLayers:
    """Split the layers as the trainer does; in V-shaped schedules the first rank has the last stage too."""
    v = jobs.virtual_stages
    bent = (jobs.pp > 1) & np.isin(jobs.schedule, V_SHAPED)
    *ranks, last = rank_layers(jobs, bent)
    layers_of_stage = stack_stages(*ranks)
    has_last = stack_stages(np.where(bent, 1.0, jobs.pp == 1), 0.0, np.where(bent, 0.0, 1.0))
    has_first = stack_stages(1.0, jobs.pp == 1, jobs.pp == 1)
    others = np.maximum(v - has_last, 1)
    tables = np.where(jobs.pp == 1, 2.0 - jobs.tied, has_first + has_last)
    stage = (layers_of_stage - has_last * last) / others * (v > has_last)
    # Without a pipeline the three ranks are the same one.
    ranks_to_keep = 3 if jobs.has_pipeline else 1
    columns = stage, last + 0 * layers_of_stage, has_first, has_last, layers_of_stage, tables
    return StageLayers(*(column[:ranks_to_keep] for column in columns))


def stack_stages(*stages: NDArray[Any] | float) -> Column:
    """Stack the columns of the first, middle and last stage: [3, n], n at least 1, to broadcast against columns."""
    return np.stack(np.broadcast_arrays(*map(np.atleast_1d, stages)))
