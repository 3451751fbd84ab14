"""Build an engine: apply the techniques that the config turns on, in their one order, and log each with its mesh axes.

This file shows the order. A technique is imported where it is applied, so one that is off costs nothing.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

from torch import nn

from hpc_train.config.parallel import Degrees, resolve_degrees
from hpc_train.config.run import RunConfig, is_loose
from hpc_train.errors import UserError
from hpc_train.interfaces import Engine, Model, Report, World
from hpc_train.models.adapters.names import is_adapter_parameter
from hpc_train.models.deferred import DeferredValues
from hpc_train.parallel.attention_backend import report_attention
from hpc_train.parallel.dropout import place_dropout
from hpc_train.parallel.engines.plain_engine import PlainEngine, UnwrappedModel, WrappedModel
from hpc_train.parallel.engines.updating_engine import has_routers
from hpc_train.parallel.loss import use_registered_loss
from hpc_train.parallel.materialise import (
    ParameterValues,
    adopt_buffers,
    detach_values,
    is_on_meta,
    is_rehearsal,
    materialise_parameters,
    remake_buffers,
    select_stage_values,
)
from hpc_train.parallel.optimizer_step import OptimizerFactory, OptimizerUpdates
from hpc_train.parallel.precision.number_formats import cast_parameters, check_precision_device, make_loss_scale
from hpc_train.parallel.rules.check import check_support
from hpc_train.parallel.user_model import (
    check_aliases,
    check_interface,
    explain_first_call,
    get_named_blocks,
    name_model,
)
from hpc_train.traffic.sharding import uses_fully_shard

if TYPE_CHECKING:
    from hpc_train.parallel.memory.parameter_offload import FileMemory

log = logging.getLogger(__name__)


def build(
    model: nn.Module,
    make_optimizer: OptimizerFactory,
    config: RunConfig,
    world: World,
    say: Report = log.info,
    values: DeferredValues | None = None,
) -> Engine:
    """Build the engine that trains `model` on this world.

    A model on the meta device gets its initial values here, each rank only those it keeps; any other keeps its own.
    make_optimizer is called after the model has been split, so that it sees the parameters this rank keeps.
    say: gets a line for each technique that was applied, in order. values: of a model whose parameters are made on
    request.
    Raises UserError for a combination of techniques, or a model, that cannot be trained.
    """
    degrees = check_support(config, world.size)
    check_model(model, config, degrees)
    if is_loose(config):
        from hpc_train.parallel.engines.loose_engine import build_loose_engine

        return build_loose_engine(build, model, make_optimizer, config, world, degrees, say, values)
    world = _add_expert_mesh(world, config.parallel.ep)
    make_optimizer, files = _open_offload(make_optimizer, config, world)
    check_precision_device(config.precision, world.device)
    if not is_rehearsal():  # a rehearsal has shapes only, and no memory that buffers or aliases could be in
        remade = remake_buffers(model, config.train.seed)
        if remade:
            say(f"buffers: {len(remade)} on the meta device written by their modules' resets ({remade[0]} ...)")
        check_aliases(model, splits_parameters(config, degrees), world.device)
    part = cast_parameters(model, config.precision)
    say(f"precision: parameters {next(part.parameters()).dtype}, compute {config.precision.name}")
    if config.adapter.kind != "none":  # before stages are cut and anything is split, which then treat it as the model's
        from hpc_train.parallel.adapters import attach_adapters

        say(attach_adapters(part, config.adapter))
    if degrees.pp > 1:
        from hpc_train.parallel.pipeline.build import build_pipeline_engine

        prepare = partial(prepare_part, files=files, deferred=values)
        return build_pipeline_engine(part, make_optimizer, prepare, config, world, degrees, say)
    prepare_part(part, model, config, world, say, files, values)
    if config.parallel.server.mode != "none":
        from hpc_train.parallel.engines.server_engine import build_server_engine

        engine, line = build_server_engine(part, make_optimizer, config, world)
        say(line)
        return engine
    return _build_plain_engine(part, make_optimizer, config, world, degrees, say)


def _add_expert_mesh(world: World, ep: int) -> World:
    """Give the world the mesh of expert parallelism, a second view of the ranks of dp_shard x cp."""
    if ep == 1 or world.expert_mesh is not None:
        return world
    from hpc_train.parallel.expert.expert_parallel import make_expert_mesh

    return replace(world, expert_mesh=make_expert_mesh(world, ep))


def _open_offload(
    make_optimizer: OptimizerFactory, config: RunConfig, world: World
) -> tuple[OptimizerFactory, FileMemory | None]:
    """Return a factory that makes the optimizer with its state offloaded, and the files that offloaded memory is in."""
    if config.parallel.offload.parameters == config.parallel.offload.optimizer == "none":
        return make_optimizer, None
    from hpc_train.parallel.memory.parameter_offload import offload_optimizer, open_offload_files

    files = open_offload_files(config)
    return offload_optimizer(make_optimizer, config, world, files), files


def prepare_part(
    part: nn.Module,
    model: nn.Module,
    config: RunConfig,
    world: World,
    say: Report,
    files: FileMemory | None = None,
    deferred: DeferredValues | None = None,
) -> None:
    """Apply the techniques to a part of the model, in place, and put its values on this rank's device or in files.

    part: the model itself, or one stage of it. Parameters are split over ranks before they are moved, so no device ever
    holds all of them: a model with values gives them up first, and each rank takes its own part back.
    """
    values = _take_values(part, model, config, world, deferred)
    for line in apply_techniques(part, config, world):
        if line is not None:
            say(line)
    if not _offloads_parameters(config):
        materialise_parameters(part, values, config.train.seed, world.device)
        if config.precision.float8_gather:
            from hpc_train.parallel.data_parallel.float8_gather import gather_in_8_bits

            say(gather_in_8_bits(part))
        return
    from hpc_train.parallel.memory.parameter_offload import get_parameter_device, place_offloaded_parameters

    materialise_parameters(part, values, config.train.seed, get_parameter_device(config, world.device))
    say(place_offloaded_parameters(part, config, world, files))


def apply_techniques(part: nn.Module, config: RunConfig, world: World) -> Iterator[str | None]:
    """Apply each technique that is on to `part`, in place; yield what it did and over which mesh axes.

    A technique raises UserError where the model has nothing for it to act on. The order matters: what changes layers
    comes before what splits them over ranks, that before what wraps whole blocks, and sharding over data last, because
    fully_shard must find the final parameters and its hooks must run outside every wrapper.
    """
    parallel, degrees = config.parallel, resolve_degrees(config.parallel, world.size)
    # What changes layers, while they still have the names and the classes that the model gave them.
    if parallel.sync_batchnorm or world.dp_size > 1:  # without sync_batchnorm it warns of layers that would need it
        from hpc_train.parallel.data_parallel.batch_norm import synchronise_batch_norm

        yield synchronise_batch_norm(part, config, world)
    yield place_dropout(part, config, world)
    yield report_attention(part, config, world)
    yield use_registered_loss(part, config.train)
    if config.adapter.base == "nf4":
        from hpc_train.parallel.adapters import quantize_base

        yield quantize_base(part)
    if config.adapter.base == "bf16":
        from hpc_train.parallel.adapters import store_base_in_bf16

        yield store_base_in_bf16(part)
    if config.precision.float8 != "none":
        from hpc_train.parallel.precision.float8 import convert_linear_layers

        yield convert_linear_layers(part, config.precision, world.device, degrees.tp)

    # What splits layers over ranks. Experts come first: tp leaves alone what is distributed already. The loss in chunks
    # comes after tp, because it takes the place of the output layer that tp has split.
    if parallel.ep > 1:
        from hpc_train.parallel.expert.expert_parallel import apply_expert_parallel

        yield apply_expert_parallel(part, config, world)
    if degrees.tp > 1:
        from hpc_train.parallel.tensor.tensor_parallel import apply_tensor_parallel

        yield apply_tensor_parallel(part, config, world)
    if config.train.loss_chunk:
        from hpc_train.parallel.chunked_loss import compute_loss_in_chunks

        yield compute_loss_in_chunks(part, config, world)
    if degrees.cp > 1:
        from hpc_train.parallel.context.context_parallel import apply_context_parallel

        yield apply_context_parallel(part, config, world)
        if has_routers([part]):
            from hpc_train.parallel.expert.expert_parallel import share_sequences

            yield share_sequences(part, config, world)

    # What wraps the forward of whole blocks, each outside of the one before: the graph contains the recomputation, and
    # activations are moved outside of the graph.
    if parallel.recompute.mode != "none":
        from hpc_train.parallel.memory.recompute import recompute_activations

        yield recompute_activations(part, config)
    if parallel.compile:
        from hpc_train.parallel.memory.compilation import compile_blocks

        yield compile_blocks(part, config, world)
    if parallel.recompute.offload:
        from hpc_train.parallel.memory.activation_offload import offload_activations

        yield offload_activations(part, world)

    if uses_fully_shard(config, degrees):
        from hpc_train.parallel.data_parallel.fully_shard import shard_parameters

        yield shard_parameters(part, config, world)


def _take_values(
    part: nn.Module, model: nn.Module, config: RunConfig, world: World, deferred: DeferredValues | None
) -> ParameterValues:
    """Take the values that `part` is to have out of the model; empty where they are to be drawn, or stay in place."""
    if part is not model:
        if is_rehearsal():
            return {}
        values = select_stage_values(part, model, deferred)
        adopt_buffers(part, model)
        return values
    if deferred is not None:
        return deferred.subset(name for name, _ in part.named_parameters() if not is_adapter_parameter(name))
    if is_on_meta(part):
        return {}
    if splits_parameters(config, resolve_degrees(config.parallel, world.size)):
        return detach_values(part)
    part.to(world.device)
    return {}


def _build_plain_engine(
    part: nn.Module, make_optimizer: OptimizerFactory, config: RunConfig, world: World, degrees: Degrees, say: Report
) -> PlainEngine:
    wrapped = _wrap_model(part, config, world, degrees, say)
    scaling = make_loss_scale(config.precision)
    updates = OptimizerUpdates([part], make_optimizer(part), world, scaling=scaling, ema=config.optim.ema)
    return PlainEngine(part, wrapped, updates, config, world)


def _wrap_model(part: nn.Module, config: RunConfig, world: World, degrees: Degrees, say: Report) -> WrappedModel:
    if uses_fully_shard(config, degrees):
        from hpc_train.parallel.data_parallel.fully_shard import ShardedModel

        return ShardedModel(part, config.parallel)
    if world.size == 1:
        say(f"{type(part).__name__}: dp_replicate=1")
        return UnwrappedModel(part)
    from hpc_train.parallel.data_parallel.ddp import ReplicatedModel, describe_options

    replicated = ReplicatedModel(part, config.parallel, world)
    axes = [f"dp_replicate={degrees.dp_replicate}", *([f"cp={degrees.cp}"] if degrees.cp > 1 else [])]
    say(f"DistributedDataParallel: {', '.join([*axes, *describe_options(config.parallel)])}")
    return replicated


def _offloads_parameters(config: RunConfig) -> bool:
    return config.parallel.offload.parameters != "none"


def splits_parameters(config: RunConfig, degrees: Degrees) -> bool:
    """Whether each rank keeps only a part of the parameters."""
    return uses_fully_shard(config, degrees) or degrees.tp > 1 or degrees.pp > 1


def check_model(model: nn.Module, config: RunConfig, degrees: Degrees) -> None:
    """Raise UserError, with helpful advice, for a model that the backends would refuse later."""
    check_interface(model)
    if not any(parameter.requires_grad for parameter in model.parameters()):
        raise UserError("model: no parameter requires a gradient; there is nothing to train")
    scalars = [name for name, parameter in model.named_parameters() if parameter.ndim == 0]
    if scalars and uses_fully_shard(config, degrees):
        raise UserError(f"model: {scalars[0]} is a scalar, which zero3 cannot shard; give it shape (1,) or use ddp")
    with explain_first_call(f"in {name_model(model)}.blocks()"):
        get_named_blocks(model)
    for axis in ("pp", "cp", "tp"):
        if getattr(degrees, axis) > 1 and not isinstance(model, Model):
            raise UserError(
                f"parallel.{axis}={getattr(degrees, axis)}: {type(model).__name__} does not say how it can be split "
                "(plan, blocks, stage, loss_sum); spread over dp_replicate and dp_shard"
            )
