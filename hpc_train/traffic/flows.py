"""Compute the traffic of a run's mesh axes in one step, from the configuration alone."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, replace

from hpc_train.config.model import ModelConfig, TransformerConfig, VisionTransformerConfig
from hpc_train.config.parallel import AXES, Degrees, resolve_degrees
from hpc_train.config.run import RunConfig, describe_one_copy, is_loose
from hpc_train.errors import UserError
from hpc_train.models.shape import (
    compute_head_dim,
    count_expert_layers,
    count_kv_heads,
    find_window,
    has_latent_attention,
)
from hpc_train.traffic import axes as axis_flows
from hpc_train.traffic import model_axes
from hpc_train.traffic.axes import Flow, count_fsdp_groups, list_ddp_buckets, list_scalar_flows
from hpc_train.traffic.model_axes import assign_kv_heads
from hpc_train.traffic.outer_exchange import list_outer_flows
from hpc_train.traffic.ring_blocks import RingLayout, count_messages
from hpc_train.traffic.sharding import ZERO_STAGE, keeps_gradients
from hpc_train.traffic.sharding import uses_fully_shard as is_sharded
from hpc_train.traffic.stages import StagePart, StepWork, compute_step_work, list_stage_parts, place_stages
from hpc_train.traffic.weights import (
    Splitting,
    Weight,
    Weights,
    count_rank_elements,
    list_partial_gradient_sizes,
    list_weights,
)
from hpc_train.units import MIB

Parts = tuple[StagePart, ...]


def list_axis_sizes(config: RunConfig, world: int) -> dict[str, int]:
    """Return the degree of each mesh axis, and with expert parallelism of ep, which is a part of dp_shard x cp."""
    sizes = asdict(resolve_degrees(config.parallel, world))
    return {**sizes, "ep": config.parallel.ep} if config.parallel.ep > 1 else sizes


def compute_flows(config: RunConfig, world: int, parameters: int | None = None) -> tuple[Flow, ...]:
    """Return the flows of every axis in one training step on `world` ranks; an axis of one rank has none.

    On a pipeline, each technique counts the stage with most traffic. Not counted: evaluations, the gradient noise
    scale, and the warm-up steps of gradient compression.
    parameters: number of parameters of a model=custom, which is counted as a single block.
    Raises UserError for a custom model without that number, or with degrees other than data-parallel ones.
    """
    degrees = resolve_degrees(config.parallel, world)
    if is_loose(config):
        own, alone = describe_one_copy(config, degrees)
        return (*_compute_flows_of_copy(own, alone, parameters), *_list_loose_flows(config, degrees, parameters))
    return _compute_flows_of_copy(config, degrees, parameters)


def _list_loose_flows(config: RunConfig, degrees: Degrees, parameters: int | None) -> list[Flow]:
    """Return what the copies of a loosely synchronised run exchange."""
    weights, copies = list_weights(config.model), _list_axes_in_use(degrees, ("dp_replicate",))
    work = compute_step_work(config, degrees)
    if weights is None:
        assert parameters is not None
        elements = float(parameters)
    else:
        elements = _Job(config, config.model, degrees, work, weights).count_held_elements()
    elements /= degrees.dp_shard * degrees.cp if is_sharded(config, degrees) else 1
    outer = list_outer_flows(config.parallel.sync, elements, work.stored, degrees.dp_replicate)
    return [*outer, *list_scalar_flows(copies, norm=True)]


def _compute_flows_of_copy(config: RunConfig, degrees: Degrees, parameters: int | None) -> tuple[Flow, ...]:
    weights = list_weights(config.model)
    if weights is None:
        return tuple(_list_custom_model_flows(config, degrees, parameters))
    job = _Job(config, config.model, degrees, compute_step_work(config, degrees), weights)
    return (
        *job.list_data_flows(),
        *job.list_tensor_flows(),
        *job.list_context_flows(),
        *job.list_expert_flows(),
        *job.list_pipeline_flows(),
        *_list_scalar_flows(config, degrees),
        *_list_load_flows(config, degrees),
    )


def _list_load_flows(config: RunConfig, degrees: Degrees) -> list[Flow]:
    """Return the sum of the loads of experts: see parallel.expert.balance."""
    model, axes = config.model, _list_axes_in_use(degrees, AXES)
    if not isinstance(model, TransformerConfig) or not model.experts.count or not axes:
        return []
    return [Flow(axes, "all_reduce", 8 * count_expert_layers(model) * (model.experts.count + 2), 1, "loads of experts")]


def _list_scalar_flows(config: RunConfig, degrees: Degrees) -> list[Flow]:
    """Return the small sums of every step; asynchronous workers have none."""
    if config.parallel.server.mode == "asynchronous":
        return []
    return list_scalar_flows(_list_axes_in_use(degrees, AXES), is_sharded(config, degrees))


def _list_axes_in_use(degrees: Degrees, axes: Iterable[str]) -> tuple[str, ...]:
    """Return the axes that have more than one rank."""
    return tuple(axis for axis in axes if getattr(degrees, axis) > 1)


def _choose_largest_flows(stages: Iterable[list[Flow]]) -> list[Flow]:
    """Return the flows of the stage that moves most bytes."""
    return max(stages, key=lambda flows: sum(flow.bytes * flow.calls for flow in flows))


@dataclass(frozen=True)
class _Job:
    """A run whose model has a known shape: a transformer or a vision transformer."""

    config: RunConfig
    model: ModelConfig
    degrees: Degrees
    work: StepWork
    weights: Weights

    @property
    def sequence(self) -> bool:
        """Whether tp splits positions between layers, as sequence parallelism; a vision transformer never does."""
        return self.config.parallel.tensor.sequence and isinstance(self.model, TransformerConfig)

    @property
    def vocabulary(self) -> bool:
        return self.config.parallel.tensor.vocabulary and isinstance(self.model, TransformerConfig)

    @property
    def hidden(self) -> float:
        """Elements of a micro-batch's hidden states on one cp rank, before tp splits positions."""
        assert isinstance(self.model, (TransformerConfig, VisionTransformerConfig))
        return self.work.sequences * self.work.positions * self.model.hidden

    def _choose_largest_stage(self, flows_of: Callable[[Parts], list[Flow]]) -> list[Flow]:
        ranks = list_stage_parts(self.config, self.degrees.pp, self.weights.blocks, self.work.micro_batches)
        return _choose_largest_flows(flows_of(parts) for parts in dict.fromkeys(ranks))

    def _count_recomputed(self, parts: Parts) -> int:
        """Count the blocks of these stages whose forward runs twice."""
        options = self.config.parallel.recompute
        return sum(-(-part.blocks // options.every) for part in parts) if options.mode != "none" else 0

    def _count_rank_elements(self, weights: Iterable[Weight]) -> int:
        shards = self.degrees.dp_shard * self.degrees.cp
        return count_rank_elements(
            weights, Splitting(self.degrees.tp, _count_kv_heads(self.model), self.vocabulary, shards)
        )

    def _list_end_weights(self, part: StagePart) -> list[Weight]:
        """List the weights of a stage outside blocks: embedding, last norm, head."""
        weights = [*(self.weights.before if part.first else ()), *(self.weights.after if part.last else ())]
        return [*weights, self.weights.tied] if self.weights.tied and part.last and not part.first else weights

    def count_held_elements(self) -> int:
        """Count the elements of all parameters on one tp rank, all its shards together."""
        all_blocks = StagePart(self.weights.blocks, dense=self.weights.dense_blocks)
        return self._count_rank_elements([*self._list_block_weights(all_blocks), *self._list_end_weights(all_blocks)])

    def list_data_flows(self) -> list[Flow]:
        """Return the flows of gradients and parameters over dp_replicate, dp_shard and cp."""
        if not is_sharded(self.config, self.degrees):
            return _list_replicated_flows(self.config, self.degrees, self.work, self._list_gradient_shapes())
        flows = self._choose_largest_stage(self._list_sharded_flows)
        return flows + self._choose_largest_stage(self._list_expert_weight_flows) if self.ep > 1 else flows

    def _list_gradient_shapes(self) -> list[tuple[int, ...]]:
        """Return the shapes of all parameters, roughly in the order in which their gradients are ready."""
        # Backward goes through the model from its end, so DDP fills its buckets in reverse order.
        every = [
            *self.weights.before,
            *self._list_block_weights(StagePart(self.weights.blocks, dense=self.weights.dense_blocks)),
            *self.weights.after,
        ]
        return [weight.shape for weight in reversed(every)]

    def _list_sharded_flows(self, parts: Parts) -> list[Flow]:
        groups = [group for part in parts for group in self._list_shard_groups(part)]
        return _list_shard_group_flows(self.config, self.degrees, self.work, groups)

    def _list_expert_weight_flows(self, parts: Parts) -> list[Flow]:
        """Return the flows of experts that ep splits, over the ranks that hold the same ones."""
        experts = [group for part in parts for group in self._list_expert_groups(part)]
        shards, work = self.degrees.dp_shard * self.degrees.cp // self.ep, self.work
        shard: tuple[str, ...] = model_axes.EXPERT_SHARD_AXES if shards > 1 else ()
        replicate = _list_axes_in_use(self.degrees, ("dp_replicate",))
        return axis_flows.list_fsdp_flows(shard, replicate, shards, experts, work.compute, work.reduce)

    @property
    def ep(self) -> int:
        return self.config.parallel.ep

    def _list_block_weights(self, part: StagePart) -> list[Weight]:
        """List the weights of a stage's blocks that fully_shard keeps with the block."""
        experts = self.weights.experts if self.ep == 1 else ()
        return [*self.weights.dense_block * part.dense, *(*self.weights.block, *experts) * part.mixed]

    def _list_expert_groups(self, part: StagePart) -> list[axis_flows.ShardGroup]:
        """Return the groups of experts, one per layer, which ep splits before fully_shard does."""
        parallel, shards = self.config.parallel, self.degrees.dp_shard * self.degrees.cp // self.ep
        rule = parallel.strategy, parallel.reshard_after_forward, self.degrees.pp, self.work.micro_batches, part.split
        experts = [
            replace(weight, shape=(weight.shape[0] // self.ep, *weight.shape[1:])) for weight in self.weights.experts
        ]
        # A stack that does not divide between experts is cut along the hidden dimension, which needs no padding.
        assert isinstance(self.model, TransformerConfig)
        padded = shards if experts and experts[0].shape[0] % shards and self.model.hidden % shards else 1
        numbers = count_rank_elements(
            experts, Splitting(self.degrees.tp, _count_kv_heads(self.model), self.vocabulary, padded)
        )
        return [axis_flows.ShardGroup("experts", numbers, part.mixed, axis_flows.count_block_uses(*rule))]

    def _list_shard_groups(self, part: StagePart) -> list[axis_flows.ShardGroup]:
        parallel, work = self.config.parallel, self.work
        blocks = self._count_rank_elements(self._list_block_weights(part))
        ends = self._count_rank_elements(self._list_end_weights(part))
        rule = parallel.strategy, parallel.reshard_after_forward, self.degrees.pp, work.micro_batches, part.split
        block_uses, end_uses = axis_flows.count_block_uses(*rule), axis_flows.count_end_uses(*rule)
        if parallel.strategy == "zero3":
            count = part.blocks
        else:
            # The blocks of a model with dense layers before those of experts are counted as if they were equal.
            mean = blocks / part.blocks
            count = count_fsdp_groups(mean * work.stored, part.blocks, ends * work.stored, parallel.bucket_mib)
        if count == 0:
            return [axis_flows.ShardGroup("all", blocks + ends, 1, end_uses)]
        mean = blocks / count
        return [
            axis_flows.ShardGroup("blocks", mean, count, block_uses),
            axis_flows.ShardGroup("the ends", ends, 1, end_uses),
        ]

    def list_tensor_flows(self) -> list[Flow]:
        """Return the flows of activations over tp."""
        return self._choose_largest_stage(self._list_tensor_flows_of) if self.degrees.tp > 1 else []

    def _list_tensor_flows_of(self, parts: Parts) -> list[Flow]:
        work, asynchronous = self.work, self.config.parallel.tensor.asynchronous
        mixed = sum(part.mixed for part in parts) if self.weights.experts else 0
        again = sum(self._count_recomputed_mixed(part) for part in parts) if self.weights.experts else 0
        blocks = model_axes.count_block_calls(self.sequence).times(sum(part.blocks for part in parts) - mixed)
        blocks += model_axes.count_recompute_calls(self.sequence, asynchronous).times(
            self._count_recomputed(parts) - again
        )
        # Attention makes half of the calls, the mixture of experts the other half, and those not asynchronously.
        half = model_axes.count_half_block_calls(self.sequence).times(mixed)
        blocks += half + model_axes.count_half_recompute_calls(self.sequence).times(again)
        ends = sum(part.first + part.last for part in parts)
        ends *= isinstance(self.model, TransformerConfig)  # tp does not split those of a vision transformer
        single = model_axes.count_end_calls(self.sequence, self.vocabulary).times(ends) + half
        single += model_axes.count_last_recompute_calls(self.sequence).times(again)
        hidden, flows = self.hidden * work.compute, []
        if entries := self._list_latent_widths():
            entering = model_axes.count_entry_calls(
                self.sequence, sum(part.blocks for part in parts), self._count_recomputed(parts)
            )
            blocks += entering.times(-1)
            flows = self._list_latent_flows(entering, entries)
        if asynchronous:
            flows += model_axes.list_ring_tensor_flows(blocks, hidden, work.micro_batches, self.degrees.tp)
        else:
            single += blocks
        flows += model_axes.list_tensor_flows(single, hidden, work.micro_batches)
        if self.vocabulary and any(part.last for part in parts):
            tokens = work.sequences * work.positions
            flows += model_axes.list_loss_flows(tokens, max(4, work.compute), work.micro_batches)
        return flows + self._list_whole_gradient_flows(parts)

    def _list_latent_widths(self) -> tuple[int, ...]:
        """Return the widths of what enters the heads of latent attention: queries, keys and values, shared key."""
        if not isinstance(self.model, TransformerConfig) or not has_latent_attention(self.model):
            return ()
        latent = self.model.latent
        return latent.q_rank or self.model.hidden, latent.kv_rank, latent.rope_head_dim

    def _list_latent_flows(self, entering: model_axes.TensorCalls, widths: tuple[int, ...]) -> list[Flow]:
        """Return the flows of what enters the heads; no product follows the shared key, so it goes in one piece."""
        work, asynchronous = self.work, self.config.parallel.tensor.asynchronous
        tokens = work.sequences * work.positions * work.compute
        *expanded, shared = (tokens * width for width in widths)
        flows = model_axes.list_tensor_flows(entering, shared, work.micro_batches)
        for size in expanded:
            if asynchronous:
                flows += model_axes.list_ring_tensor_flows(entering, size, work.micro_batches, self.degrees.tp)
            else:
                flows += model_axes.list_tensor_flows(entering, size, work.micro_batches)
        return flows

    def _list_whole_gradient_flows(self, parts: Parts) -> list[Flow]:
        """Return the sums over tp of gradients of parameters that tp does not split."""
        weights = [weight for part in parts for weight in self._list_end_weights(part)]
        weights += [weight for part in parts for weight in self._list_block_weights(part)]
        sizes = list_partial_gradient_sizes(weights, self.degrees.tp, _count_kv_heads(self.model), self.sequence)
        work, strategy = self.work, self.config.parallel.strategy
        every_micro_batch = not keeps_gradients(ZERO_STAGE[strategy])
        # fully_shard converts gradients to the format of the reduction when it accumulates them over micro-batches.
        accumulated = not every_micro_batch and work.micro_batches > 1
        return model_axes.list_gradient_flows(
            sizes, work.reduce if accumulated else work.compute, work.micro_batches if every_micro_batch else 1
        )

    def list_context_flows(self) -> list[Flow]:
        """Return the flows of keys and values, or of heads, over cp."""
        return self._choose_largest_stage(self._list_attention_flows) if self.degrees.cp > 1 else []

    def _list_attention_flows(self, parts: Parts) -> list[Flow]:
        assert isinstance(self.model, TransformerConfig)
        work, cp = self.work, self.degrees.cp
        backwards = sum(part.blocks for part in parts) * work.micro_batches
        forwards = backwards + self._count_recomputed(parts) * work.micro_batches
        head = work.sequences * work.positions * compute_head_dim(self.model)
        keys = _count_kv_heads_of_rank(self.model.heads, count_kv_heads(self.model), self.degrees.tp)
        if self.config.parallel.context.method == "ring":
            return self._list_ring_flows(parts, head * keys)
        # Fewer heads than cp ranks: each head is repeated until the number of heads divides by cp.
        sent = keys * (cp // math.gcd(keys, cp))
        queries = head * self.model.heads / self.degrees.tp
        return model_axes.list_ulysses_flows(queries, head * sent, work.compute, forwards + backwards)

    def _list_ring_flows(self, parts: Parts, keys: float) -> list[Flow]:
        """Return the flows of ring attention, of layers with a window and of those without one."""
        model, work = self.model, self.work
        assert isinstance(model, TransformerConfig)
        balanced = self.config.parallel.context.balanced
        layout = RingLayout(self.degrees.cp, int(work.positions), balanced)
        flows: list[Flow] = []
        for window in dict.fromkeys((None, model.sliding_window)):
            # With dropout all keys are gathered, which as many bytes of messages stand for.
            messages = count_messages(layout, None if model.dropout else window)
            backwards, again = self._count_layers(parts, window)
            runs = backwards * work.micro_batches, again * work.micro_batches
            if backwards:
                flows += model_axes.list_ring_attention_flows(messages, keys, work.compute, sum(runs), runs[0])
        return flows

    def _count_layers(self, parts: Parts, window: int | None) -> tuple[int, int]:
        """Count the layers of these stages that have this window, and those of them whose forward runs twice."""
        model, options = self.model, self.config.parallel.recompute
        assert isinstance(model, TransformerConfig)
        found = [
            (part, index)
            for part in parts
            for index in range(part.blocks)
            if find_window(model, part.begin + index) == window
        ]
        again = sum(index % options.every == 0 for _, index in found) if options.mode != "none" else 0
        return len(found), again

    def list_expert_flows(self) -> list[Flow]:
        """Return the flows of tokens over ep."""
        return self._choose_largest_stage(self._list_token_flows) if self.ep > 1 else []

    def _list_token_flows(self, parts: Parts) -> list[Flow]:
        assert isinstance(self.model, TransformerConfig)
        work, experts = self.work, self.model.experts
        backwards = sum(part.mixed for part in parts) * work.micro_batches
        forwards = backwards + sum(self._count_recomputed_mixed(part) for part in parts) * work.micro_batches
        rows = work.sequences * work.positions * experts.top_k
        return model_axes.list_expert_flows(rows, self.model.hidden, work.compute, experts.count, forwards, backwards)

    def _count_recomputed_mixed(self, part: StagePart) -> int:
        """Count the blocks of experts of a stage whose forward runs twice: every k-th of its blocks, from the first."""
        options = self.config.parallel.recompute
        return len(range(-(-part.dense // options.every) * options.every, part.blocks, options.every)) * (
            options.mode != "none"
        )

    def list_pipeline_flows(self) -> list[Flow]:
        """Return the flows of activations over pp."""
        if self.degrees.pp == 1:
            return []
        # With split positions each tp rank sends only its own part to the same tp rank of the next stage.
        pieces = self.degrees.tp if self.sequence else 1
        placement = place_stages(self.config.parallel.pipeline, self.degrees.pp)
        hidden = self.hidden * self.work.compute / pieces
        flows = model_axes.list_stage_flows(placement, hidden, self.work.micro_batches)
        if self.weights.tied and placement[0] != placement[-1]:
            shards = self.degrees.dp_shard * self.degrees.cp
            flows += model_axes.list_tied_embedding_flows(
                self._count_rank_elements([self.weights.tied]) * self.work.stored / shards
            )
        return flows


def _count_kv_heads(model: ModelConfig) -> int:
    """Return the number of key and value heads."""
    assert isinstance(model, (TransformerConfig, VisionTransformerConfig))
    return count_kv_heads(model) if isinstance(model, TransformerConfig) else model.heads


def _count_kv_heads_of_rank(heads: int, keys: int, tp: int) -> int:
    """Return how many key and value heads a tp rank computes; the most of any rank."""
    return keys // tp if keys % tp == 0 else max(len(assign_kv_heads(heads, keys, rank, tp)) for rank in range(tp))


def _list_replicated_flows(
    config: RunConfig, degrees: Degrees, work: StepWork, ready: Sequence[tuple[int, ...]]
) -> list[Flow]:
    """Return ddp's flows: all-reduces of buckets, compressed ones, or those of parameter servers.

    ready: shapes of the parameters in the order in which their gradients are ready.
    """
    parallel, sizes = config.parallel, [math.prod(shape) for shape in ready]
    axes = _list_axes_in_use(degrees, ("dp_replicate", "cp"))
    if parallel.server.mode != "none":
        return axis_flows.list_server_flows(
            axes, parallel.server.mode, sum(sizes) * work.stored, parallel.server.servers, degrees.world
        )
    buckets = list_ddp_buckets([size * work.stored for size in sizes], parallel.bucket_mib)
    method, calls = parallel.compression, len(buckets)
    if not axes or method.method == "none":
        return axis_flows.list_ddp_flows(axes, buckets)
    if method.method == "powersgd":
        return axis_flows.list_powersgd_flows(axes, ready, method.rank, calls, work.stored)
    if method.method == "topk":
        return axis_flows.list_topk_flows(axes, sum(sizes), method.ratio, degrees.world, calls, work.stored)
    return axis_flows.list_cast_flows(axes, sum(sizes), calls, method.method == "fp16")


def _list_shard_group_flows(
    config: RunConfig, degrees: Degrees, work: StepWork, groups: Sequence[axis_flows.ShardGroup]
) -> list[Flow]:
    shard, replicate = _list_axes_in_use(degrees, ("dp_shard", "cp")), _list_axes_in_use(degrees, ("dp_replicate",))
    return axis_flows.list_fsdp_flows(
        shard, replicate, degrees.dp_shard * degrees.cp, groups, work.compute, work.reduce
    )


def _list_custom_model_flows(config: RunConfig, degrees: Degrees, parameters: int | None) -> list[Flow]:
    for axis in ("pp", "cp", "tp"):
        if getattr(degrees, axis) > 1:
            raise UserError(
                f"parallel.{axis}={getattr(degrees, axis)}: the traffic of model={config.model.name} over {axis} is "
                "unknown, because its shape is; use dp_replicate and dp_shard, or launch.placement=launcher"
            )
    if parameters is None:
        raise UserError(
            f"model.name={config.model.name}: the traffic of a custom model's gradients is unknown, because its number "
            "of parameters is; a run counts them itself"
        )
    work, parallel = compute_step_work(config, degrees), config.parallel
    if not is_sharded(config, degrees):
        # The shapes are unknown: assume tensors of 1 MiB, small enough to fill buckets evenly.
        each = MIB // work.stored
        ready = [(each,)] * (parameters // each) + [(parameters % each,)]
        return [*_list_replicated_flows(config, degrees, work, ready), *_list_scalar_flows(config, degrees)]
    uses = axis_flows.count_block_uses(parallel.strategy, parallel.reshard_after_forward, 1, work.micro_batches)
    groups = [axis_flows.ShardGroup("all", parameters, 1, uses)]
    return [*_list_shard_group_flows(config, degrees, work, groups), *_list_scalar_flows(config, degrees)]
