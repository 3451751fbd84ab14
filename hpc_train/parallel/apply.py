"""build: the techniques in the one order in which they are applied, each named in the log with the mesh it ran on."""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import partial

import torch
from torch import nn

from hpc_train.config.parallel import Degrees, resolve_degrees
from hpc_train.config.run import RunConfig
from hpc_train.errors import UserError
from hpc_train.interfaces import Engine, Model, World
from hpc_train.models.deferred import DeferredValues
from hpc_train.parallel import dropout
from hpc_train.parallel.context import context_parallel
from hpc_train.parallel.data_parallel import batch_norm, ddp, fully_shard
from hpc_train.parallel.engines.plain_engine import PlainEngine
from hpc_train.parallel.engines.server_engine import build_server_engine
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
from hpc_train.parallel.memory import activation_offload, compilation, parameter_offload, recompute
from hpc_train.parallel.memory.parameter_offload import FileMemory
from hpc_train.parallel.optimizer_step import OptimizerUpdates
from hpc_train.parallel.precision import cast_parameters, check_precision_device, make_loss_scale
from hpc_train.parallel.rules.check import check_support
from hpc_train.parallel.tensor import tensor_parallel
from hpc_train.parallel.user_model import (
    check_aliases,
    check_interface,
    explain_first_call,
    get_named_blocks,
    name_model,
)
from hpc_train.traffic.sharding import uses_fully_shard

log = logging.getLogger(__name__)

OptimizerFactory = Callable[[nn.Module], torch.optim.Optimizer]
Report = Callable[[str], None]
Pass = Callable[[nn.Module, RunConfig, World], str | None]
"""Changes a part of the model in place; returns what it did and on which mesh axis, or None where it is off.

Raises UserError where it was asked for and matches nothing.
"""

PASSES: tuple[Pass, ...] = (
    batch_norm.synchronise_batch_norm,
    dropout.place_dropout,
    tensor_parallel.apply_tensor_parallel,
    context_parallel.apply_context_parallel,
    recompute.recompute_activations,
    compilation.compile_blocks,
    activation_offload.offload_activations,
    fully_shard.shard_parameters,
)
"""In this order: what splits parameters and activations, what wraps blocks, and last what shards over data."""


def build(
    model: nn.Module,
    make_optimizer: OptimizerFactory,
    config: RunConfig,
    world: World,
    say: Report = log.info,
    values: DeferredValues | None = None,
) -> Engine:
    """The engine that trains `model` on this world.

    A model on the meta device gets its initial values here, each rank only what it holds; any other keeps its own.
    make_optimizer is called after the model has been split, so that it sees the parameters this rank keeps.
    say: gets a line for each technique that was applied, in order. values: of a model whose parameters are made on
    request.
    Raises UserError for a combination or a model that no backend can do.
    """
    degrees = check_support(config, world.size)
    check_model(model, config, degrees)
    files = parameter_offload.open_offload_files(config)
    make_optimizer = parameter_offload.offload_optimizer(make_optimizer, config, world, files)
    check_precision_device(config.precision, world.device)
    if not is_rehearsal():
        remade = remake_buffers(model, config.train.seed)
        if remade:
            say(f"buffers: {len(remade)} on the meta device written by their modules' resets ({remade[0]} ...)")
        check_aliases(model, splits_parameters(config, degrees), world.device)
    part = cast_parameters(model, config.precision)
    say(f"precision: parameters {next(part.parameters()).dtype}, compute {config.precision.name}")
    if degrees.pp > 1:
        from hpc_train.parallel.pipeline.build import (
            build_pipeline_engine as build_stages,  # its part of torch takes most of a second
        )

        return build_stages(
            part, make_optimizer, partial(prepare_part, files=files, made=values), config, world, degrees, say
        )
    prepare_part(part, model, config, world, say, files, values)
    if config.parallel.server.mode != "none":
        engine, said = build_server_engine(part, make_optimizer, config, world)
        say(said)
        return engine
    if uses_fully_shard(config, degrees):
        return PlainEngine(part, part, _updates(part, make_optimizer, config, world), config, world)
    wrapped, hook = ddp.wrap_ddp(part, config.parallel, world)
    ways = ddp.describe_options(config.parallel)
    where = [f"dp_replicate={degrees.dp_replicate}", *([f"cp={degrees.cp}"] if degrees.cp > 1 else [])]
    say(f"{type(wrapped).__name__}: {', '.join([*where, *ways])}")
    return PlainEngine(part, wrapped, _updates(part, make_optimizer, config, world), config, world, hook)


def _updates(part: nn.Module, make_optimizer: OptimizerFactory, config: RunConfig, world: World) -> OptimizerUpdates:
    return OptimizerUpdates([part], make_optimizer(part), world, scaling=make_loss_scale(config.precision))


def prepare_part(
    part: nn.Module,
    model: nn.Module,
    config: RunConfig,
    world: World,
    say: Report,
    files: FileMemory | None = None,
    made: DeferredValues | None = None,
) -> None:
    """Apply every pass to a part of the model, in place, and put its values on this rank's device or in files.

    Parameters that are split over ranks are split before they are moved, so no device ever holds all of them: a model
    with values gives them up first, and each rank takes the part it holds.
    """
    values: ParameterValues = {}
    if part is not model:
        values = {} if is_rehearsal() else select_stage_values(part, model, made)
        if not is_rehearsal():
            adopt_buffers(part, model)
    elif made is not None:
        values = made.subset(name for name, _ in part.named_parameters())
    elif not is_on_meta(part):
        if splits_parameters(config, resolve_degrees(config.parallel, world.size)):
            values = detach_values(part)
        else:
            part.to(world.device)
    for change in PASSES:
        if (said := change(part, config, world)) is not None:
            say(said)
    materialise_parameters(part, values, config.train.seed, parameter_offload.get_parameter_home(config, world))
    if (said := parameter_offload.settle_parameters(part, config, world, files)) is not None:
        say(said)


def splits_parameters(config: RunConfig, degrees: Degrees) -> bool:
    """Whether ranks hold only parts of parameters."""
    return uses_fully_shard(config, degrees) or degrees.tp > 1 or degrees.pp > 1


def check_model(model: nn.Module, config: RunConfig, degrees: Degrees) -> None:
    """Raise UserError for what the backends would refuse in words that do not help a user."""
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
