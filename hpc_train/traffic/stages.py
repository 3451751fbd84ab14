"""Compute what each rank does in a step: its pipeline stages, the blocks of each, and its micro-batches.

Consecutive blocks become stages of about equal cost, by FLOPs or by parallel.pipeline.costs; the schedule says which
rank has which stage. The trainer builds its stages with these functions, and traffic and the planner count with them,
so that all three agree. No torch here.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache
from itertools import accumulate, pairwise
from pathlib import Path

from hpc_train.config.model import ModelConfig, TransformerConfig, VisionTransformerConfig
from hpc_train.config.parallel import Degrees, PipelineConfig
from hpc_train.config.run import RunConfig
from hpc_train.errors import UserError
from hpc_train.models.counts import compute_flops_per_token
from hpc_train.models.shape import count_vit_tokens
from hpc_train.schedules import order
from hpc_train.schedules.generate import REQUIREMENTS
from hpc_train.schedules.order import Order, make_looped_placement, make_v_shaped_placement
from hpc_train.traffic import sharding


def is_schedule_file(pipeline: PipelineConfig) -> bool:
    """Return whether the schedule is read from a file."""
    return pipeline.schedule.endswith(".csv")


def read_schedule_file(pipeline: PipelineConfig) -> Order:
    """Read the schedule of parallel.pipeline.schedule=<file>.csv. Raises UserError if that fails."""
    try:
        return order.read_order(Path(pipeline.schedule).expanduser())
    except UserError as error:
        raise UserError(f"parallel.pipeline.schedule={error}") from error


def place_stages(pipeline: PipelineConfig, pp: int) -> tuple[int, ...]:
    """Return the pp rank of each stage."""
    if is_schedule_file(pipeline):
        return read_schedule_file(pipeline).placement
    needs = REQUIREMENTS[pipeline.schedule]
    return (
        make_v_shaped_placement(pp)
        if needs.v_shaped
        else make_looped_placement(pp, pipeline.virtual_stages or needs.virtual_stages)
    )


def splits_backward(pipeline: PipelineConfig) -> bool:
    """Return whether the schedule computes weight gradients separately from input gradients."""
    return (
        read_schedule_file(pipeline).splits_backward
        if is_schedule_file(pipeline)
        else REQUIREMENTS[pipeline.schedule].splits_backward
    )


def count_stage_split_backwards(pipeline: PipelineConfig, pp: int, micro_batches: int) -> tuple[int, ...]:
    """Return, for each stage, the number of micro-batches whose backward is split; see sharding.py."""
    if is_schedule_file(pipeline):
        return sharding.count_split_in_order(read_schedule_file(pipeline))
    stages = len(place_stages(pipeline, pp))
    return sharding.count_split_backwards(pipeline.schedule, pp, stages // pp, micro_batches)


def count_micro_batches(config: RunConfig, degrees: Degrees) -> int:
    """Return the number of micro-batches in a step; the last one may be short."""
    return -(-config.train.global_batch // degrees.data_parallel // config.train.micro_batch)


@dataclass(frozen=True)
class BlockCosts:
    """Relative time of each part of a model."""

    before: float
    """Cost of the embedding, before the first block."""
    blocks: tuple[float, ...]
    after: float
    """Cost of the head, after the last block."""


def compute_block_costs(model: ModelConfig, sequence_length: int, blocks: int) -> BlockCosts:
    """Return the FLOPs of a model's parts. A custom model, whose FLOPs are unknown, has 1 for each of its `blocks`.

    An embedding lookup costs nothing; the patch projection of a vision transformer does.
    """
    if not isinstance(model, (TransformerConfig, VisionTransformerConfig)):
        return BlockCosts(0.0, (1.0,) * blocks, 0.0)
    # FLOPs are known for whole models only: take differences between models with and without the part.
    ends = _count_flops(replace(model, layers=0), sequence_length)
    counts = range(_count_unlike(model, blocks) + 2)
    totals = [_count_flops(replace(model, layers=count), sequence_length) for count in counts]
    first = [after - before for before, after in pairwise(totals)]  # the unlike ones, and one that stands for the rest
    before = 0.0
    if isinstance(model, VisionTransformerConfig):
        before = _count_flops(replace(model, layers=0, classes=0), sequence_length)
    return BlockCosts(before, (*first[:-1], *first[-1:] * (blocks - len(first) + 1)), ends - before)


def _count_unlike(model: ModelConfig, blocks: int) -> int:
    """Count the blocks at the beginning of `blocks` after which all others are alike."""
    return blocks - 1 if get_window_period(model) else _count_first(model)


def get_window_period(model: ModelConfig) -> int:
    """Return after how many layers windows repeat; 0 where all layers see the same part of a sequence."""
    return model.global_every if isinstance(model, TransformerConfig) else 0


def _count_first(model: ModelConfig) -> int:
    """Count the dense blocks at the beginning of a model of experts."""
    return model.experts.first_dense if isinstance(model, TransformerConfig) and model.experts.count else 0


def _count_flops(model: ModelConfig, sequence_length: int) -> float:
    flops = compute_flops_per_token(model, sequence_length)
    assert flops is not None
    return flops


def read_block_costs(values: Sequence[float]) -> BlockCosts:
    """Read parallel.pipeline.costs as BlockCosts."""
    return BlockCosts(values[0], tuple(values[1:-1]), values[-1])


def split_blocks(costs: BlockCosts, stages: int) -> list[range]:
    """Split the blocks over stages: contiguous, at least one each, the costliest stage as cheap as possible.

    Of several such splits, the one with the smallest sum of squared costs, whose stages are most even, is chosen.
    Takes O(stages blocks^2).
    """
    count = len(costs.blocks)
    assert 1 <= stages <= count
    sums = [0.0, *accumulate(costs.blocks)]

    def cost(first: int, end: int) -> float:
        extra = (costs.before if first == 0 else 0.0) + (costs.after if end == count else 0.0)
        return sums[end] - sums[first] + extra

    # Dynamic programming over stages. best[end]: of all splits of the first `end` blocks over the stages so far, the
    # best one as (cost of its costliest stage, sum of squared costs, first block of each stage).
    best: dict[int, tuple[float, float, tuple[int, ...]]]
    best = {end: (cost(0, end), cost(0, end) ** 2, (0,)) for end in range(1, count + 1)}
    for stage in range(1, stages):
        best = {
            end: min(
                (max(largest, cost(first, end)), squares + cost(first, end) ** 2, (*starts, first))
                for first, (largest, squares, starts) in best.items()
                if first < end
            )
            for end in range(stage + 1, count + 1)
        }
    starts = best[count][2]
    return [range(first, end) for first, end in zip(starts, (*starts[1:], count), strict=True)]


def list_stage_blocks(pipeline: PipelineConfig, costs: BlockCosts, stages: int) -> list[range]:
    """Return the blocks of each stage: as parallel.pipeline.blocks says, else split by `costs`."""
    if pipeline.blocks is None:
        return split_blocks(costs, stages)
    ends = list(accumulate(pipeline.blocks))
    return [range(end - size, end) for end, size in zip(ends, pipeline.blocks, strict=True)]


ELEMENT_BYTES = {"fp64": 8, "fp32": 4, "bf16": 2, "fp16": 2}
"""Bytes of an element, by precision."""


@dataclass(frozen=True)
class StepWork:
    """Sizes of a step that are the same for every rank of a job."""

    micro_batches: int
    sequences: float
    """Sequences in a rank's micro-batch. The mean if the last one is short; a pipeline pads it, so there it is full."""
    positions: float
    """Positions of a sequence on one cp rank."""
    compute: int
    """Bytes of an element of an activation or a gathered parameter."""
    reduce: int
    """Bytes of an element of a gradient that fully_shard reduces."""
    stored: int
    """Bytes of an element of a stored parameter, and of a gradient that DistributedDataParallel reduces."""


@dataclass(frozen=True)
class StagePart:
    """One stage of a pipeline, or the whole model."""

    blocks: int
    first: bool = True
    """Has the embedding."""
    last: bool = True
    """Has the head."""
    split: int = 0
    """Number of micro-batches whose backward is split."""
    dense: int = 0
    """Blocks without experts in a model of experts."""
    begin: int = 0
    """Index of its first block, from the last one at which the pattern of windows began; 0 where all are alike."""

    @property
    def mixed(self) -> int:
        """Blocks that are not dense ones of a model of experts."""
        return self.blocks - self.dense


def compute_step_work(config: RunConfig, degrees: Degrees) -> StepWork:
    """Compute the sizes of a step of this run."""
    train, precision = config.train, config.precision
    rows, count = train.global_batch / degrees.data_parallel, count_micro_batches(config, degrees)
    tokens = (
        count_vit_tokens(config.model) if isinstance(config.model, VisionTransformerConfig) else train.sequence_length
    )
    return StepWork(
        micro_batches=count,
        sequences=min(rows, train.micro_batch) if degrees.pp > 1 else rows / count,
        positions=tokens / degrees.cp,
        compute=ELEMENT_BYTES[precision.name],
        reduce=ELEMENT_BYTES[precision.reduce],
        stored=8 if precision.name == "fp64" else 4,
    )


def list_stage_parts(
    config: RunConfig, pp: int, blocks: int, micro_batches: int = 0
) -> tuple[tuple[StagePart, ...], ...]:
    """Return the stages of each pp rank, before parallel.pipeline.resplit changes them by measured times.

    micro_batches: in a step; needed only to count split backwards.
    """
    first_dense = _count_first(config.model)
    if pp == 1:
        return ((StagePart(blocks, dense=first_dense),),)
    pipeline = config.parallel.pipeline
    placement = place_stages(pipeline, pp)
    costs = (
        read_block_costs(pipeline.costs)
        if pipeline.costs
        else compute_block_costs(config.model, config.train.sequence_length, blocks)
    )
    sizes, last = tuple(pipeline.blocks or _list_stage_sizes(costs, len(placement))), len(placement) - 1
    split = count_stage_split_backwards(pipeline, pp, micro_batches) if micro_batches else (0,) * len(placement)
    # Layers with and without windows alternate with this period, so a stage must know where in it it begins.
    begins, period = [0, *accumulate(sizes)], get_window_period(config.model) or 1
    parts = [
        StagePart(
            count,
            stage == 0,
            stage == last,
            split[stage],
            max(0, min(count, first_dense - begins[stage])),
            begins[stage] % period,
        )
        for stage, count in enumerate(sizes)
    ]
    return tuple(
        tuple(part for part, owner in zip(parts, placement, strict=True) if owner == rank) for rank in range(pp)
    )


@cache
def _list_stage_sizes(costs: BlockCosts, stages: int) -> tuple[int, ...]:
    return tuple(len(blocks) for blocks in split_blocks(costs, stages))
