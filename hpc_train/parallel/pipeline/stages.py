"""Which blocks make a stage of a pipeline. No torch here."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate

from hpc_train.config.model import ModelConfig, TransformerConfig, VisionTransformerConfig
from hpc_train.models.shape import flops_per_token


@dataclass(frozen=True)
class Costs:
    """Relative time of each part of a model."""

    before: float
    """What precedes the first block, the embedding."""
    blocks: tuple[float, ...]
    after: float
    """What follows the last block, the head."""


def costs(model: ModelConfig, sequence_length: int, blocks: int) -> Costs:
    """FLOPs of a model's parts; of a custom model, which only it knows, 1 for each of its `blocks`.

    A lookup in the embedding has none; a vision transformer's patch projection has.
    """
    if not isinstance(model, (TransformerConfig, VisionTransformerConfig)):
        return Costs(0.0, (1.0,) * blocks, 0.0)
    ends = _flops(replace(model, layers=0), sequence_length)
    block = _flops(replace(model, layers=1), sequence_length) - ends
    before = 0.0
    if isinstance(model, VisionTransformerConfig):
        before = _flops(replace(model, layers=0, classes=0), sequence_length)
    return Costs(before, (block,) * blocks, ends - before)


def _flops(model: ModelConfig, sequence_length: int) -> float:
    flops = flops_per_token(model, sequence_length)
    assert flops is not None
    return flops


def given(values: Sequence[float]) -> Costs:
    """parallel.pipeline.costs as Costs."""
    return Costs(values[0], tuple(values[1:-1]), values[-1])


def split(costs: Costs, stages: int) -> list[range]:
    """The blocks of each stage: contiguous, at least one each, and the costliest stage as cheap as it can be.

    Of several such splits one with stages that are close to one another. O(stages blocks^2).
    """
    count = len(costs.blocks)
    assert 1 <= stages <= count
    sums = [0.0, *accumulate(costs.blocks)]

    def cost(first: int, end: int) -> float:
        extra = (costs.before if first == 0 else 0.0) + (costs.after if end == count else 0.0)
        return sums[end] - sums[first] + extra

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
