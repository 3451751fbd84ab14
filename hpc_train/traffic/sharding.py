"""Count how often a step gathers parameters and reduces gradients: one rule for trainer, traffic and planner.

How long fully_shard keeps whole parameters and whole gradients of a block on a rank, within one step:

                                     parameters of a block are whole      gradients are whole
    ddp over fully_shard, zero1      from their first use to their last   from the first backward to the last
    zero2                            from their first use to their last   in a backward
    zero3                            in each forward and each backward    in a backward
    zero3, reshard_after_forward     without a pipeline: from forward to backward; with one: from their first use to
    =false                           their last; gradients as above

A split backward (schedules with I and W) uses the parameters twice, and zero3 gathers them for each use. Parameters
outside blocks (embedding, head) are used at the end of forward and again at the start of backward, so zero3 frees them
only after backward.

The rules are written as arithmetic instead of branches: they take numbers, and also the planner's columns of jobs.
"""

from __future__ import annotations

from functools import cache
from typing import Any

from hpc_train.config.parallel import Degrees
from hpc_train.config.run import RunConfig
from hpc_train.schedules.generate import REQUIREMENTS, generate_order
from hpc_train.schedules.order import Kind, Order

ZERO_STAGE = {"ddp": 1, "zero1": 1, "zero2": 2, "zero3": 3}
"""What fully_shard shards, by strategy: 1 optimizer state, 2 also gradients, 3 also parameters.

ddp counts as stage 1, because with tp or pp > 1 it runs as fully_shard over a dp_shard axis of one rank.
"""


def keeps_parameters(zero: Any, reshard: Any, pp: Any) -> Any:
    """Return whether gathered parameters stay from their first to their last use in a step. zero: as in ZERO_STAGE."""
    return (zero < 3) | ((pp > 1) & (reshard == 0))


def keeps_gradients(zero: Any) -> Any:
    """Return whether each rank accumulates whole gradients and reduces them only in the last micro-batch."""
    return zero < 2


def count_block_gathers(zero: Any, reshard: Any, pp: Any, micro_batches: Any, split: Any) -> Any:
    """Return how often a step gathers a block. split: micro-batches whose backward is split."""
    # Parameters that are freed after forward are gathered for every forward, too.
    freed = (zero == 3) & (reshard != 0)
    return freed * micro_batches + count_end_gathers(zero, reshard, pp, micro_batches, split)


def count_end_gathers(zero: Any, reshard: Any, pp: Any, micro_batches: Any, split: Any) -> Any:
    """Return how often a step gathers the parameters outside blocks: for each backward, unless they stay gathered."""
    keeps = keeps_parameters(zero, reshard, pp) * 1
    return keeps + (1 - keeps) * (micro_batches + split)


def count_reductions(zero: Any, micro_batches: Any) -> Any:
    """Return how often a step reduces a parameter's gradients over dp_shard; over dp_replicate it is once."""
    keeps = keeps_gradients(zero) * 1
    return keeps + (1 - keeps) * micro_batches


@cache
def count_split_backwards(schedule: str, pp: int, virtual_stages: int, micro_batches: int) -> tuple[int, ...]:
    """For each stage of an hpc_train schedule, return the number of micro-batches whose backward is split.

    The first stage needs no input gradients, so its backward is always done at once.
    """
    needs = REQUIREMENTS[schedule]
    if not needs.splits_backward:
        return (0,) * (pp * virtual_stages)
    if schedule == "dualpipev":  # it splits only the last backwards: their number does not depend on micro_batches
        return count_split_in_order(generate_order(schedule, pp, min(micro_batches, needs.micro_batches_per_rank * pp)))
    return (0, *(micro_batches,) * (pp * virtual_stages - 1))


def count_split_in_order(order: Order) -> tuple[int, ...]:
    """Count the split backwards of each stage in any order."""
    counts = [0] * order.stages
    for rank in range(order.ranks):
        for action in order.actions(rank):
            counts[action.stage] += action.kind is Kind.I and action.stage > 0
    return tuple(counts)


def uses_fully_shard(config: RunConfig, degrees: Degrees) -> bool:
    """Whether fully_shard holds the parameters: for the zero strategies, and over DTensors, which DDP cannot hold."""
    return config.parallel.strategy != "ddp" or degrees.tp > 1 or degrees.pp > 1
