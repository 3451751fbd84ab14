"""Bytes that a rank of hpc_train has of a model's weights: parameters, gradients and optimizer state, whole or sharded.

For the first rank of a pipeline, a middle one and the last. What is sharded, gathered and how long follows the
trainer's own rules (traffic.sharding). Nothing here changes within a step; peak_memory.py adds the sizes up at the
moments of a step.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from hpc_train.planner.model.inputs import Column
from hpc_train.planner.model.jobs import Jobs, choose, replace_columns
from hpc_train.planner.model.pipeline import SPLITS_BACKWARD
from hpc_train.planner.model.stage_layers import StageLayers
from hpc_train.traffic.axes import BUCKET_MIB
from hpc_train.traffic.sharding import keeps_gradients, keeps_parameters
from hpc_train.units import MIB


@dataclass(frozen=True)
class RankWeights:
    """Numbers of weights on a rank of tp, pp and ep, before sharding over dp_shard x cp.

    Those of a whole rank are [3, n]: the first rank of a pipeline, a middle one, the last; [1, n] without a pipeline.
    """

    stages: StageLayers
    block: Column
    """[n]: one block with its experts and adapters."""
    experts: Column
    """[n]: the routed experts of one block."""
    adapters: Column
    """[n]: the adapters of one block."""
    table: Column
    """[n]: one embedding table."""
    blocks: Column
    """All blocks of the rank."""
    ends: Column
    """Embedding and head."""
    total: Column
    """Blocks and ends."""
    without_ep: Column
    """Blocks and ends as if ep did not split any: ep splits experts over some of the ranks of dp_shard x cp and
    fully_shard over the others, so that a rank's shard is the same."""
    trained: Column
    """Those of `total` that are trained: all, or those of adapters."""
    trained_without_ep: Column
    trained_share: Column
    """[n]: share of a block's weights that are trained: all, or those of adapters."""
    trains_ends: Column
    """[n]: 1 if embedding and head are trained."""
    shards: Column
    """[n]: ranks that share what is sharded."""


def count_rank_weights(jobs: Jobs, stages: StageLayers) -> RankWeights:
    """Count the weights of the ranks that have these stages."""
    table = jobs.vocab * jobs.hidden / jobs.tp
    ends = stages.tables * table + stages.has_first * jobs.learned_positions * jobs.hidden
    experts, block = _count_largest_block(jobs)
    adapters = jobs.rank_adapter_weights if jobs.has_adapters else np.zeros(())
    block = block + adapters
    blocks = stages.layers * block
    total = without_ep = blocks + ends
    if jobs.has_experts:
        # All dense blocks are taken to be in the first stage.
        first = choose(jobs.pp == 1, stages.layers, stages.stage)
        dense_blocks = stages.has_first * np.minimum(jobs.dense_layers, first)
        blocks = blocks - dense_blocks * (block - adapters - _count_dense_block(jobs))
        total = blocks + ends
        without_ep = total + (jobs.ep - 1) * experts * (stages.layers - dense_blocks)
    share, trains_ends = np.ones(()), np.ones(())
    trained, trained_without_ep = total, without_ep
    if jobs.has_adapters:
        frozen = jobs.adapter_weights > 0
        share, trains_ends = choose(frozen, adapters / block, 1.0), choose(frozen, 0.0, 1.0)
        # Adapters are not combined with ep.
        trained = choose(frozen, stages.layers * adapters, total)
        trained_without_ep = choose(frozen, trained, without_ep)
    return RankWeights(
        stages=stages,
        block=block,
        experts=experts,
        adapters=adapters,
        table=table,
        blocks=blocks,
        ends=ends,
        total=total,
        without_ep=without_ep,
        trained=trained,
        trained_without_ep=trained_without_ep,
        trained_share=share,
        trains_ends=trains_ends,
        shards=choose(jobs.zero >= 1, jobs.dp_shard * jobs.cp, 1.0),
    )


def _count_dense_block(jobs: Jobs) -> Column:
    """Return the weights of a block without experts on a rank of tp."""
    return replace_columns(jobs, experts=0.0).rank_layer_parameters


def _count_largest_block(jobs: Jobs) -> tuple[Column, Column]:
    """Return the weights of a block on a rank of tp and ep: (of its routed experts, of all of it)."""
    if not jobs.has_experts:
        return np.zeros(()), jobs.rank_layer_parameters
    mixture = replace_columns(jobs, dense_layers=0.0)
    experts = choose(jobs.experts > 0, jobs.rank_expert_parameters, 0.0)
    return experts, mixture.rank_layer_parameters + experts


@dataclass(frozen=True)
class RankState:
    """Bytes on the device that a rank keeps from one step to the next, and of its gradients, [3, n]."""

    parameters: Column
    optimizer: Column
    whole_gradients: Column
    sharded_gradients: Column
    unreduced_gradients: Column
    """Gradients of a stage between micro-batches, before the last of them reduces."""
    accumulated: Column
    """Gradients that ddp accumulates outside its buckets."""
    sends_gradients: NDArray[np.bool_] | None
    """[n]: whether reduced gradients are copied to the host at once; None if no job does this."""
    unsent_sums: Column | None
    """Gradients of offloaded parameters that stay on the device between micro-batches; None if sends_gradients is."""


def count_state(jobs: Jobs, weights: RankWeights) -> RankState:
    """Count the bytes of parameters, gradients and optimizer state."""
    whole_gradients = weights.trained * jobs.gradient_bytes
    sharded = weights.trained_without_ep * jobs.gradient_bytes / weights.shards
    # ddp's buckets hold a step's gradients from the start. Those of all micro-batches but the last are kept besides,
    # until the last backward copies them there (torch, reducer.cpp: mark_variable_ready_dense).
    outside = (jobs.zero == 0) & (jobs.world > 1) & (jobs.micro_batches > 1)
    sends = (jobs.offload > 1) & (jobs.zero >= 2)
    unsent_sums = None
    if np.any(sends):
        # HSDP reduces over dp_shard in every micro-batch and over dp_replicate only in the last; until then FSDP keeps
        # the sums on the device.
        waits = (jobs.dp_replicate > 1) & (jobs.micro_batches > 1)
        unsent_sums = weights.trained_without_ep * jobs.reduce_bytes / weights.shards * waits
    return RankState(
        parameters=_count_parameter_bytes(jobs, weights) / weights.shards * (jobs.offload < 2),
        optimizer=weights.trained_without_ep * jobs.optimizer_bytes / weights.shards * (jobs.offload == 0),
        whole_gradients=whole_gradients,
        sharded_gradients=sharded,
        unreduced_gradients=choose(keeps_gradients(jobs.zero), whole_gradients, sharded),
        accumulated=weights.trained * choose(outside, jobs.gradient_bytes, 0.0),
        sends_gradients=sends if np.any(sends) else None,
        unsent_sums=unsent_sums,
    )


def _count_parameter_bytes(jobs: Jobs, weights: RankWeights) -> Column:
    every = weights.without_ep * jobs.weight_bytes
    if not np.any(jobs.frozen_bytes):
        return every
    saved = choose(jobs.frozen_bytes > 0, jobs.weight_bytes - jobs.frozen_bytes, 0.0)
    return every - (weights.without_ep - weights.ends - weights.trained) * saved


@dataclass(frozen=True)
class GatheredParameters:
    """Bytes of gathered parameters at the places where memory may be at its peak, [3, n]."""

    in_block: Column
    """While a block computes."""
    during_reduction: Column
    """While a block computes and the gradients of the one before it are reduced."""
    before_reduction: Column
    """When a group's gradients are complete."""
    at_loss: Column
    """When a loss's backward begins."""
    at_end: Column
    """At the end of a backward."""
    embedding_again: Column | None
    """The embedding, if a backward gathers it once more; None if no job does this."""


def count_gathered(jobs: Jobs, weights: RankWeights) -> GatheredParameters:
    """Count the parameters that fully_shard has gathered, which follows traffic.sharding."""
    keeps = keeps_parameters(jobs.zero, jobs.reshard, jobs.pp)
    frees = ~keeps & (jobs.reshard > 0)  # a block's parameters after each use
    # ddp gathers nothing, but autocast keeps 16-bit copies of the parameters that are wider.
    cast = _count_wide(jobs, weights) * choose(jobs.weight_bytes > jobs.activation_bytes, jobs.activation_bytes, 0.0)
    # All weights of a block but those of routed experts and adapters may be gathered in 8 or 4 bits.
    narrower = jobs.activation_bytes - jobs.gathered_bytes
    block_bytes = jobs.activation_bytes - narrower * (1 - (weights.experts + weights.adapters) / weights.block)

    def convert(elements: Column) -> Column:
        """Return the bytes if `elements` of blocks are gathered; those of the ends always are."""
        gathered = weights.ends * jobs.activation_bytes + choose(keeps, weights.blocks, elements) * block_bytes
        return choose(jobs.zero >= 1, gathered, cast)

    layers = count_largest_stage(weights.stages)
    # fully_shard gathers the next block while one computes; with ep its experts are a group of their own.
    prefetched = choose(jobs.ep > 1, 0.0, 1.0)
    most = choose(frees, np.minimum(layers, 1 + prefetched) * weights.block, weights.blocks)
    # In a stage of two blocks there is no next one to gather when the first one's gradients are reduced.
    others = choose(frees, np.minimum(np.maximum(layers - 1, 1), 1 + prefetched) * weights.block, weights.blocks)
    ahead = choose(frees, np.clip(layers - 1, 0, 1) * prefetched * weights.block, weights.blocks)
    sharded = (jobs.zero == 3) & (jobs.reshard > 0)
    rest = np.maximum(weights.stages.tables - 1, 0)
    at_end = convert(weights.blocks * ((jobs.zero == 3) & (jobs.reshard == 0)))
    ends_left = choose(jobs.pp == 1, 0.0, rest * weights.table) * jobs.activation_bytes
    # zero3 with a split backward: I has freed the embedding, and W gathers it again. The gathered shards are copied
    # into one tensor, so that for a moment both are there.
    again = sharded & (jobs.pp > 1) & np.isin(jobs.schedule, SPLITS_BACKWARD)
    return GatheredParameters(
        in_block=convert(most),
        during_reduction=convert(others),
        before_reduction=convert(ahead),
        at_loss=convert(choose(sharded, 0.0, weights.total - weights.ends)),
        at_end=choose(sharded, ends_left, at_end),
        embedding_again=again * (weights.stages.has_first * weights.table) * jobs.activation_bytes
        if np.any(again)
        else None,
    )


def _count_wide(jobs: Jobs, weights: RankWeights) -> Column:
    """Return the weights that are stored as the precision stores them, not in 16 or 4 bits, [3, n]."""
    if not np.any(jobs.frozen_bytes):
        return weights.total
    four_bits = weights.stages.layers * jobs.four_bit_weights / jobs.tp
    narrow = choose(jobs.four_bit_weights > 0, four_bits, weights.total - weights.ends - weights.trained)
    return weights.total - choose(jobs.frozen_bytes > 0, narrow, 0.0)


def count_largest_stage(stages: StageLayers) -> Column:
    """Return the layers of the rank's largest stage, [3, n]."""
    return np.maximum(stages.stage, stages.last * stages.has_last)


@dataclass(frozen=True)
class ReducedGroup:
    """The parameters whose gradients are reduced together: one block with zero 3, else a full bucket. Bytes, [3, n]."""

    buffer: Column
    """The buffer in which the group's gradients are reduced; zero 1 reduces whole gradients in place."""
    elements: Column
    """Weights of the group, a number."""
    copied: Column
    """The group's gradients while they are copied into the buffer, or the reduced shards afterwards."""
    reduces_shards: bool
    """Whether any job reduces gradients before the last micro-batch, into a buffer. Otherwise a reduction needs no more
    than the backward of a block."""
    several: NDArray[np.bool_]
    """Whether a stage has more blocks than one group, so that another is gathered when the first one is reduced."""


def count_reduced_group(jobs: Jobs, weights: RankWeights) -> ReducedGroup:
    """Count the gradients of one reduction."""
    limit = BUCKET_MIB * MIB / jobs.weight_bytes
    bucket = weights.block * np.maximum(np.floor(limit / weights.block), 1)
    elements = choose(jobs.zero == 3, weights.block, np.minimum(bucket, weights.blocks))
    # With ep, a block's experts are a group of their own.
    elements = choose(jobs.ep > 1, np.maximum(weights.experts, weights.block - weights.experts), elements)
    trained = elements * weights.trained_share
    # 16-bit gradients exist until they are copied into the buffer; afterwards the reduced shards do.
    copied = np.maximum(trained * jobs.activation_bytes, trained * jobs.gradient_bytes / weights.shards)
    return ReducedGroup(
        buffer=choose(keeps_gradients(jobs.zero), 0.0, trained * jobs.reduce_bytes),
        elements=elements,
        copied=copied,
        reduces_shards=not np.all(keeps_gradients(jobs.zero)),
        several=count_largest_stage(weights.stages) * weights.block > elements * (1 + 1e-9),
    )


def count_new_shards(jobs: Jobs, weights: RankWeights, group: ReducedGroup, new: Column) -> Column:
    """Return the bytes of a group's reduced shards. new: share that no earlier micro-batch has allocated."""
    shards = new * group.elements * weights.trained_share * jobs.gradient_bytes / weights.shards
    return choose(keeps_gradients(jobs.zero), 0.0, shards) * (jobs.offload < 2)
