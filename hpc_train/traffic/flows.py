"""Compute what a run's mesh axes move in one step, from shapes, degrees, strategy and formats of its configuration."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from hpc_train.config.model import ModelConfig, TransformerConfig, VisionTransformerConfig
from hpc_train.config.parallel import AXES, Degrees, resolve_degrees
from hpc_train.config.run import RunConfig
from hpc_train.errors import UserError
from hpc_train.models.shape import compute_head_dim, count_kv_heads
from hpc_train.traffic import axes as compression
from hpc_train.traffic.axes import Flow, assign_kv_heads, ddp_buckets, fsdp_groups, scalar_flows
from hpc_train.traffic.sharding import ZERO_STAGE, keeps_gradients
from hpc_train.traffic.sharding import uses_fully_shard as is_sharded
from hpc_train.traffic.stages import StagePart, StepWork, stage_parts, stage_placement, step_work
from hpc_train.traffic.weights import Splitting, Weight, Weights, held_elements, list_weights, partial_gradient_sizes
from hpc_train.units import MIB

Parts = tuple[StagePart, ...]


def compute_flows(config: RunConfig, world: int, parameters: int | None = None) -> tuple[Flow, ...]:
    """Return what every axis moves in a step of training on `world` ranks; an axis of one rank moves nothing.

    On a pipeline: what the stage moves that moves most, for each technique by itself. Not counted: evaluations, the
    gradient noise scale, and warm-up steps of compression.
    parameters: of a model=custom, whose shape only it knows; its blocks are taken to be one.
    Raises UserError for a custom model without that number, or spread over more than the data-parallel axes.
    """
    degrees = resolve_degrees(config.parallel, world)
    weights = list_weights(config.model)
    if weights is None:
        return tuple(_custom(config, degrees, parameters))
    job = _Job(config, config.model, degrees, step_work(config, degrees), weights)
    return (*job.over_data(), *job.over_tensor(), *job.over_context(), *job.over_pipeline(), *_sums(config, degrees))


def _sums(config: RunConfig, degrees: Degrees) -> list[Flow]:
    """Of a few bytes; an asynchronous worker waits for nobody, and servers take the norm themselves."""
    if config.parallel.server.mode == "asynchronous":
        return []
    return scalar_flows(_present(degrees, AXES), is_sharded(config, degrees))


def _present(degrees: Degrees, axes: Iterable[str]) -> tuple[str, ...]:
    """Return the axes that have more than one rank."""
    return tuple(axis for axis in axes if getattr(degrees, axis) > 1)


def _most(candidates: Iterable[list[Flow]]) -> list[Flow]:
    """Return the flows of the stage that moves most."""
    return max(candidates, key=lambda found: sum(flow.bytes * flow.calls for flow in found))


@dataclass(frozen=True)
class _Job:
    """A run of a model whose shape is known."""

    config: RunConfig
    model: ModelConfig
    degrees: Degrees
    work: StepWork
    weights: Weights

    @property
    def sequence(self) -> bool:
        """Whether tp splits positions; a vision transformer's it does not."""
        return self.config.parallel.tensor.sequence and isinstance(self.model, TransformerConfig)

    @property
    def vocabulary(self) -> bool:
        return self.config.parallel.tensor.vocabulary and isinstance(self.model, TransformerConfig)

    @property
    def hidden(self) -> float:
        """Numbers in the hidden states of a micro-batch on a rank, all of its positions."""
        assert isinstance(self.model, (TransformerConfig, VisionTransformerConfig))
        return self.work.sequences * self.work.positions * self.model.hidden

    def _over_stages(self, moved: Callable[[Parts], list[Flow]]) -> list[Flow]:
        ranks = stage_parts(self.config, self.degrees.pp, self.weights.blocks, self.work.micro_batches)
        return _most(moved(parts) for parts in dict.fromkeys(ranks))

    def _recomputed(self, parts: Parts) -> int:
        """Blocks of these stages whose forward runs twice."""
        options = self.config.parallel.recompute
        return sum(-(-part.blocks // options.every) for part in parts) if options.mode != "none" else 0

    def _held(self, weights: Iterable[Weight]) -> int:
        shards = self.degrees.dp_shard * self.degrees.cp
        return held_elements(weights, Splitting(self.degrees.tp, _heads(self.model), self.vocabulary, shards))

    def _ends(self, part: StagePart) -> list[Weight]:
        """Return the weights that a stage has beside its blocks."""
        found = [*(self.weights.before if part.first else ()), *(self.weights.after if part.last else ())]
        return [*found, self.weights.tied] if self.weights.tied and part.last and not part.first else found

    def over_data(self) -> list[Flow]:
        """Gradients and parameters over dp_replicate, dp_shard and cp."""
        if not is_sharded(self.config, self.degrees):
            return _replicated(self.config, self.degrees, self.work, self._ready())
        return self._over_stages(self._sharded)

    def _ready(self) -> list[tuple[int, ...]]:
        """Shapes of all parameters, about in the order in which their gradients are ready."""
        every = [*self.weights.before, *self.weights.block * self.weights.blocks, *self.weights.after]
        return [weight.shape for weight in reversed(every)]

    def _sharded(self, parts: Parts) -> list[Flow]:
        groups = [group for part in parts for group in self._groups(part)]
        return _over_shards(self.config, self.degrees, self.work, groups)

    def _groups(self, part: StagePart) -> list[compression.ShardGroup]:
        parallel, work = self.config.parallel, self.work
        block, ends = self._held(self.weights.block), self._held(self._ends(part))
        how = parallel.strategy, parallel.reshard_after_forward, self.degrees.pp, work.micro_batches, part.split
        uses, rest = compression.count_block_uses(*how), compression.count_end_uses(*how)
        if parallel.strategy == "zero3":
            count = part.blocks
        else:
            count = fsdp_groups(block * work.stored, part.blocks, ends * work.stored, parallel.bucket_mib)
        if count == 0:
            return [compression.ShardGroup("all", block * part.blocks + ends, 1, rest)]
        mean = block * part.blocks / count
        return [compression.ShardGroup("blocks", mean, count, uses), compression.ShardGroup("the ends", ends, 1, rest)]

    def over_tensor(self) -> list[Flow]:
        """Activations over tp."""
        return self._over_stages(self._split) if self.degrees.tp > 1 else []

    def _split(self, parts: Parts) -> list[Flow]:
        work, asynchronous = self.work, self.config.parallel.tensor.asynchronous
        blocks = compression.count_block_calls(self.sequence).times(sum(part.blocks for part in parts))
        blocks += compression.count_recompute_calls(self.sequence, asynchronous).times(self._recomputed(parts))
        ends = sum(part.first + part.last for part in parts)
        ends *= isinstance(self.model, TransformerConfig)  # a vision transformer's are whole
        single = compression.count_end_calls(self.sequence, self.vocabulary).times(ends)
        hidden, found = self.hidden * work.compute, []
        if asynchronous:
            found = compression.ring_tensor_flows(blocks, hidden, work.micro_batches, self.degrees.tp)
        else:
            single += blocks
        found += compression.tensor_flows(single, hidden, work.micro_batches)
        if self.vocabulary and any(part.last for part in parts):
            tokens = work.sequences * work.positions
            found += compression.loss_flows(tokens, max(4, work.compute), work.micro_batches)
        return found + self._gradient_sums(parts)

    def _gradient_sums(self, parts: Parts) -> list[Flow]:
        weights = [weight for part in parts for weight in self._ends(part)]
        weights += self.weights.block * sum(part.blocks for part in parts)
        sizes = partial_gradient_sizes(weights, self.degrees.tp, _heads(self.model), self.sequence)
        work, strategy = self.work, self.config.parallel.strategy
        every = not keeps_gradients(ZERO_STAGE[strategy])
        # What is added up over micro-batches is kept in the format of the reduction.
        kept = not every and work.micro_batches > 1
        return compression.gradient_flows(
            sizes, work.reduce if kept else work.compute, work.micro_batches if every else 1
        )

    def over_context(self) -> list[Flow]:
        """Keys and values, or heads, over cp."""
        return self._over_stages(self._attentions) if self.degrees.cp > 1 else []

    def _attentions(self, parts: Parts) -> list[Flow]:
        assert isinstance(self.model, TransformerConfig)
        work, cp = self.work, self.degrees.cp
        backwards = sum(part.blocks for part in parts) * work.micro_batches
        forwards = backwards + self._recomputed(parts) * work.micro_batches
        head = work.sequences * work.positions * compute_head_dim(self.model)
        keys = _keys_held(self.model.heads, count_kv_heads(self.model), self.degrees.tp)
        if self.config.parallel.context.method == "ring":
            return compression.ring_attention_flows(cp, head * keys, work.compute, forwards, backwards)
        sent = keys * (cp // math.gcd(keys, cp))
        queries = head * self.model.heads / self.degrees.tp
        return compression.ulysses_flows(queries, head * sent, work.compute, forwards + backwards)

    def over_pipeline(self) -> list[Flow]:
        """Activations over pp."""
        if self.degrees.pp == 1:
            return []
        pieces = self.degrees.tp if self.sequence else 1
        where = stage_placement(self.config.parallel.pipeline, self.degrees.pp)
        hidden = self.hidden * self.work.compute / pieces
        found = compression.stage_flows(where, hidden, self.work.micro_batches)
        if self.weights.tied and where[0] != where[-1]:
            shards = self.degrees.dp_shard * self.degrees.cp
            found += compression.tied_embedding_flows(self._held([self.weights.tied]) * self.work.stored / shards)
        return found


def _heads(model: ModelConfig) -> int:
    """Key and value heads."""
    assert isinstance(model, (TransformerConfig, VisionTransformerConfig))
    return count_kv_heads(model) if isinstance(model, TransformerConfig) else model.heads


def _keys_held(heads: int, keys: int, tp: int) -> int:
    """Key and value heads that a rank of tp computes; the most that any does."""
    return keys // tp if keys % tp == 0 else max(len(assign_kv_heads(heads, keys, rank, tp)) for rank in range(tp))


def _replicated(config: RunConfig, degrees: Degrees, work: StepWork, ready: Sequence[tuple[int, ...]]) -> list[Flow]:
    """ddp: all-reduce of buckets, what compression makes of them, or parameter servers.

    ready: shapes of the parameters in the order of their gradients.
    """
    parallel, sizes = config.parallel, [math.prod(shape) for shape in ready]
    axes = _present(degrees, ("dp_replicate", "cp"))
    if parallel.server.mode != "none":
        return compression.server_flows(
            axes, parallel.server.mode, sum(sizes) * work.stored, parallel.server.servers, degrees.world
        )
    found = ddp_buckets([size * work.stored for size in sizes], parallel.bucket_mib)
    how, calls = parallel.compression, len(found)
    if not axes or how.method == "none":
        return compression.ddp_flows(axes, found)
    if how.method == "powersgd":
        return compression.powersgd_flows(axes, ready, how.rank, calls, work.stored)
    if how.method == "topk":
        return compression.topk_flows(axes, sum(sizes), how.ratio, degrees.world, calls, work.stored)
    return compression.cast_flows(axes, sum(sizes), calls, how.method == "fp16")


def _over_shards(
    config: RunConfig, degrees: Degrees, work: StepWork, groups: Sequence[compression.ShardGroup]
) -> list[Flow]:
    shard, replicate = _present(degrees, ("dp_shard", "cp")), _present(degrees, ("dp_replicate",))
    return compression.fsdp_flows(shard, replicate, degrees.dp_shard * degrees.cp, groups, work.compute, work.reduce)


def _custom(config: RunConfig, degrees: Degrees, parameters: int | None) -> list[Flow]:
    for axis in ("pp", "cp", "tp"):
        if getattr(degrees, axis) > 1:
            raise UserError(
                f"parallel.{axis}={getattr(degrees, axis)}: what a model=custom moves over {axis} is not known without "
                "its shape; spread over dp_replicate and dp_shard, or use launch.placement=launcher"
            )
    if parameters is None:
        raise UserError(
            f"model.name={config.model.name}: how many parameters a custom model has, and so what its gradients move, "
            "only it knows; a run counts them itself"
        )
    work, parallel = step_work(config, degrees), config.parallel
    if not is_sharded(config, degrees):
        each = MIB // work.stored  # of tensors that are small beside a bucket
        ready = [(each,)] * (parameters // each) + [(parameters % each,)]
        return [*_replicated(config, degrees, work, ready), *_sums(config, degrees)]
    uses = compression.count_block_uses(parallel.strategy, parallel.reshard_after_forward, 1, work.micro_batches)
    whole = [compression.ShardGroup("all", parameters, 1, uses)]
    return [*_over_shards(config, degrees, work, whole), *_sums(config, degrees)]
