"""What a rank computes in one step, in plain numbers: micro-batches, positions, bytes an element, and its stages."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

from hpc_train.config.degrees import Degrees
from hpc_train.config.model import VisionTransformerConfig
from hpc_train.config.run import RunConfig
from hpc_train.models.shape import vit_tokens
from hpc_train.parallel.pipeline.stages import Costs, costs, given, split
from hpc_train.parallel.support.pipeline import micro_batches, placement, split_backwards

BYTES = {"fp64": 8, "fp32": 4, "bf16": 2, "fp16": 2}
"""Of an element, by precision."""


@dataclass(frozen=True)
class Work:
    """The same for every rank of a job."""

    micro_batches: int
    sequences: float
    """Of one micro-batch of a rank; the mean where the last one is short, and the most on a pipeline, which fills up.
    """
    positions: float
    """Of a sequence on one rank of cp."""
    compute: int
    """Bytes of an activation, and of a gathered parameter."""
    reduce: int
    """Bytes of a gradient that fully_shard reduces."""
    kept: int
    """Bytes of a parameter at rest, and of a gradient that DistributedDataParallel reduces."""


@dataclass(frozen=True)
class Part:
    """One stage of a pipeline, or the whole model."""

    blocks: int
    first: bool = True
    """It has the embedding."""
    last: bool = True
    """It has the head."""
    split: int = 0
    """Number of micro-batches whose backward is split."""


def work_of(config: RunConfig, degrees: Degrees) -> Work:
    """What a step of this run is made of."""
    train, precision = config.train, config.precision
    rows, count = train.global_batch / degrees.data_parallel, micro_batches(config, degrees)
    tokens = vit_tokens(config.model) if isinstance(config.model, VisionTransformerConfig) else train.sequence_length
    return Work(
        micro_batches=count,
        sequences=min(rows, train.micro_batch) if degrees.pp > 1 else rows / count,
        positions=tokens / degrees.cp,
        compute=BYTES[precision.name],
        reduce=BYTES[precision.reduce],
        kept=8 if precision.name == "fp64" else 4,
    )


def parts_of(config: RunConfig, pp: int, blocks: int, micro_batches: int = 0) -> tuple[tuple[Part, ...], ...]:
    """Return the stages of each rank of pp, split as they are before any measurement (pipeline.resplit).

    micro_batches: number in a step, if it matters which of them have a split backward.
    """
    if pp == 1:
        return ((Part(blocks),),)
    pipeline = config.parallel.pipeline
    where = placement(pipeline, pp)
    told = given(pipeline.costs) if pipeline.costs else costs(config.model, config.train.sequence_length, blocks)
    sizes, last = _sizes(told, len(where)), len(where) - 1
    split = split_backwards(pipeline, pp, micro_batches) if micro_batches else (0,) * len(where)
    parts = [Part(count, at == 0, at == last, split[at]) for at, count in enumerate(sizes)]
    return tuple(tuple(part for part, at in zip(parts, where, strict=True) if at == rank) for rank in range(pp))


@cache
def _sizes(told: Costs, stages: int) -> tuple[int, ...]:
    return tuple(len(held) for held in split(told, stages))
