"""Compute the flows of gradients and parameters of a run over dp_replicate, dp_shard and cp: DDP's and fully_shard's.

axes.py has the formulas, which take sizes and counts only; here these come from a run.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

from hpc_train.config.model import TransformerConfig
from hpc_train.config.parallel import Degrees
from hpc_train.config.run import RunConfig
from hpc_train.traffic import axes
from hpc_train.traffic.axes import Flow, ShardGroup, count_fsdp_groups, list_ddp_buckets
from hpc_train.traffic.model_axes import EXPERT_SHARD_AXES
from hpc_train.traffic.shaped_run import RankStages, ShapedRun, list_axes_in_use
from hpc_train.traffic.sharding import uses_fully_shard
from hpc_train.traffic.stages import StagePart, StepWork, compute_step_work
from hpc_train.traffic.weights import Weight, has_float8_products
from hpc_train.units import MIB


def list_data_flows(run: ShapedRun) -> list[Flow]:
    """Return the flows of gradients and parameters; with a pipeline, those of the busiest rank."""
    if not uses_fully_shard(run.config, run.degrees):
        return _list_replicated_flows(run.config, run.degrees, run.work, _list_gradient_shapes(run))
    flows = run.choose_busiest_rank(lambda stages: _list_sharded_flows(run, stages))
    if run.ep > 1:
        flows = flows + run.choose_busiest_rank(lambda stages: _list_expert_weight_flows(run, stages))
    return flows


def list_custom_data_flows(config: RunConfig, degrees: Degrees, parameters: int) -> list[Flow]:
    """Return the flows of a custom model, of which only the number of parameters is known: it is one block."""
    work, parallel = compute_step_work(config, degrees), config.parallel
    if not uses_fully_shard(config, degrees):
        # The shapes are unknown: assume tensors of 1 MiB, small enough to fill buckets evenly.
        each = MIB // work.stored
        shapes = [(each,)] * (parameters // each) + [(parameters % each,)]
        return _list_replicated_flows(config, degrees, work, shapes)
    uses = axes.count_block_uses(parallel.strategy, parallel.reshard_after_forward, 1, work.micro_batches)
    return _list_group_flows(degrees, work, [ShardGroup("all", parameters, 1, uses)])


# DistributedDataParallel, compression and parameter servers.


def _list_gradient_shapes(run: ShapedRun) -> list[tuple[int, ...]]:
    """Return the shapes of all parameters, roughly in the order in which their gradients are ready."""
    # Backward goes through the model from its end, so DDP fills its buckets in reverse order.
    weights = [*run.weights.before, *run.list_all_block_weights(), *run.weights.after]
    return [weight.shape for weight in reversed(weights)]


def _list_replicated_flows(
    config: RunConfig, degrees: Degrees, work: StepWork, ready: Sequence[tuple[int, ...]]
) -> list[Flow]:
    """Return ddp's flows: all-reduces of buckets, compressed ones, or those of parameter servers.

    ready: shapes of the parameters in the order in which their gradients are ready.
    """
    parallel, sizes = config.parallel, [math.prod(shape) for shape in ready]
    copies = list_axes_in_use(degrees, ("dp_replicate", "cp"))
    if parallel.server.mode != "none":
        return axes.list_server_flows(
            copies, parallel.server.mode, sum(sizes) * work.stored, parallel.server.servers, degrees.world
        )
    buckets = list_ddp_buckets([size * work.stored for size in sizes], parallel.bucket_mib)
    compression, calls = parallel.compression, len(buckets)
    if not copies or compression.method == "none":
        return axes.list_ddp_flows(copies, buckets)
    if compression.method == "powersgd":
        return axes.list_powersgd_flows(copies, ready, compression.rank, calls, work.stored)
    if compression.method == "topk":
        return axes.list_topk_flows(copies, sum(sizes), compression.ratio, degrees.world, calls, work.stored)
    return axes.list_cast_flows(copies, sum(sizes), calls, compression.method == "fp16")


# fully_shard.


def _list_group_flows(degrees: Degrees, work: StepWork, groups: Sequence[ShardGroup]) -> list[Flow]:
    """Return the flows of groups of parameters that fully_shard shards over dp_shard x cp."""
    shard, replicate = list_axes_in_use(degrees, ("dp_shard", "cp")), list_axes_in_use(degrees, ("dp_replicate",))
    return axes.list_fsdp_flows(shard, replicate, degrees.dp_shard * degrees.cp, groups, work.compute, work.reduce)


def _list_sharded_flows(run: ShapedRun, stages: RankStages) -> list[Flow]:
    groups = [group for part in stages for group in _list_shard_groups(run, part)]
    return _list_group_flows(run.degrees, run.work, groups) + _list_scale_flows(run, stages)


def _list_scale_flows(run: ShapedRun, stages: RankStages) -> list[Flow]:
    """Return the agreement on the largest magnitudes of the weights that are gathered in 8 bits, once a step."""
    count = sum(len(_list_float8_weights(run, part)) for part in stages)
    axes_in_use = list_axes_in_use(run.degrees, ("dp_shard", "cp"))
    return [Flow(axes_in_use, "all_reduce", count * run.work.stored, 1, "scales of weights")] if count else []


def _list_float8_weights(run: ShapedRun, part: StagePart) -> list[Weight]:
    """List the weights of a stage that are gathered in 8 bits."""
    if not run.config.precision.float8_gather:
        return []
    return [weight for weight in run.list_block_weights(part) if has_float8_products(weight)]


def _list_shard_groups(run: ShapedRun, part: StagePart) -> list[ShardGroup]:
    """Return the groups of one stage: its blocks, one by one or several together, and embedding and head (the ends)."""
    parallel, work = run.config.parallel, run.work
    blocks = run.count_elements(run.list_block_weights(part))
    ends = run.count_elements(run.list_end_weights(part))
    rule = parallel.strategy, parallel.reshard_after_forward, run.degrees.pp, work.micro_batches, part.split
    block_uses, end_uses = axes.count_block_uses(*rule), axes.count_end_uses(*rule)
    if parallel.strategy == "zero3":
        count = part.blocks
    else:
        # The blocks of a model with dense layers before those of experts are counted as if they were equal.
        mean = blocks / part.blocks
        count = count_fsdp_groups(mean * work.stored, part.blocks, ends * work.stored, parallel.bucket_mib)
    narrow = run.count_elements(_list_float8_weights(run, part))
    if count == 0:
        return [ShardGroup("all", blocks + ends, 1, end_uses, narrow)]
    return [
        ShardGroup("blocks", blocks / count, count, block_uses, narrow / count),
        ShardGroup("the ends", ends, 1, end_uses),
    ]


def _list_expert_weight_flows(run: ShapedRun, stages: RankStages) -> list[Flow]:
    """Return the flows of experts that ep splits, over the ranks that hold the same ones."""
    groups = [_make_expert_group(run, part) for part in stages]
    shards = run.shards // run.ep
    shard: tuple[str, ...] = EXPERT_SHARD_AXES if shards > 1 else ()
    replicate = list_axes_in_use(run.degrees, ("dp_replicate",))
    return axes.list_fsdp_flows(shard, replicate, shards, groups, run.work.compute, run.work.reduce)


def _make_expert_group(run: ShapedRun, part: StagePart) -> ShardGroup:
    """Return the experts of a stage, one group per layer, which ep splits before fully_shard does."""
    parallel, shards = run.config.parallel, run.shards // run.ep
    experts = [replace(weight, shape=(weight.shape[0] // run.ep, *weight.shape[1:])) for weight in run.weights.experts]
    assert isinstance(run.model, TransformerConfig)
    # A stack that does not divide between experts is cut along the hidden dimension, which needs no padding.
    padded = shards if experts and experts[0].shape[0] % shards and run.model.hidden % shards else 1
    uses = axes.count_block_uses(
        parallel.strategy, parallel.reshard_after_forward, run.degrees.pp, run.work.micro_batches, part.split
    )
    return ShardGroup("experts", run.count_elements(experts, padded), part.mixed, uses)
