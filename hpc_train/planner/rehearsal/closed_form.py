"""Bytes of a rank's parameters, gradients and optimizer state from the model's shape and the degrees alone."""

from __future__ import annotations

from collections.abc import Iterable

from hpc_train.config.degrees import Degrees
from hpc_train.config.model import TransformerConfig, VisionTransformerConfig
from hpc_train.config.run import RunConfig
from hpc_train.models.shape import kv_heads
from hpc_train.parallel.support.data import sharded
from hpc_train.traffic.weights import Splitting, Weight, Weights, part, weights_of
from hpc_train.traffic.work import Part, parts_of, work_of

_STEP_BYTES = 4
"""AdamW counts the updates of every parameter in a float32 of its own."""
_MOMENTS = 2


def closed_form(config: RunConfig, degrees: Degrees, pp_rank: int) -> dict[str, int]:
    """Of the first rank over the other axes of a pipeline rank, which has the most of what does not divide.

    A rank of tp and of the shard axes (dp_shard x cp) keeps ceil(rows / shards) rows of its part of every parameter,
    in fp32 (fp64) as do its gradient and both moments of AdamW. Empty for a custom model, whose shape only it knows.
    """
    weights = weights_of(config.model)
    if weights is None:
        return {}
    assert isinstance(config.model, (TransformerConfig, VisionTransformerConfig))
    heads = kv_heads(config.model) if isinstance(config.model, TransformerConfig) else config.model.heads
    shards = degrees.dp_shard * degrees.cp if sharded(config, degrees) else 1
    vocabulary = config.parallel.tensor.vocabulary and isinstance(config.model, TransformerConfig)
    how = Splitting(degrees.tp, heads, vocabulary, shards)
    kept = work_of(config, degrees).kept
    stages = [list(_weights(weights, stage)) for stage in parts_of(config, degrees.pp, weights.blocks)[pp_rank]]
    numbers = sum(part(weight, how) // shards for stage in stages for weight in stage)
    tensors = sum(len(stage) for stage in stages)
    return {
        "parameters": numbers * kept,
        "gradients": numbers * kept,
        "optimizer": state_bytes(numbers, tensors, kept),
    }


def state_bytes(numbers: int, tensors: int, kept: int) -> int:
    """Of AdamW over so many numbers in so many parameters, of `kept` bytes each."""
    return _MOMENTS * numbers * kept + _STEP_BYTES * tensors


def _weights(weights: Weights, stage: Part) -> Iterable[Weight]:
    if stage.first:
        yield from weights.before
    yield from weights.block * stage.blocks
    if stage.last:
        yield from weights.after
    if weights.tied and stage.last and not stage.first:
        yield weights.tied
