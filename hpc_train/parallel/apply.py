"""build: the techniques in the one order in which they are applied, each named in the log with the mesh it ran on."""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import partial

import torch
from torch import nn

from hpc_train.api import Engine, Model, World
from hpc_train.config.degrees import Degrees, resolve
from hpc_train.config.run import RunConfig
from hpc_train.errors import UserError
from hpc_train.models.deferred import DeferredValues
from hpc_train.parallel import batch_norm, dropout
from hpc_train.parallel.aliases import check_aliases
from hpc_train.parallel.context import context_parallel
from hpc_train.parallel.ddp import replicate
from hpc_train.parallel.engines.plain import PlainEngine
from hpc_train.parallel.engines.server import serve
from hpc_train.parallel.materialise import (
    Values,
    adopt_buffers,
    detach_values,
    is_meta,
    is_rehearsal,
    materialise,
    values_of,
)
from hpc_train.parallel.memory import activation_offload, compiled, recompute
from hpc_train.parallel.memory.blocks import named_blocks
from hpc_train.parallel.meta_buffers import remake_buffers
from hpc_train.parallel.precision import check_device, keep_parameters
from hpc_train.parallel.scaling import loss_scale
from hpc_train.parallel.support import check_support
from hpc_train.parallel.support.data import sharded
from hpc_train.parallel.tensor import tensor_parallel
from hpc_train.parallel.updates import Updates
from hpc_train.parallel.user_model import calling, check_interface, name_of
from hpc_train.parallel.zero import offload, shard
from hpc_train.parallel.zero.offload_file import FileMemory

log = logging.getLogger(__name__)

MakeOptimizer = Callable[[nn.Module], torch.optim.Optimizer]
Say = Callable[[str], None]
Pass = Callable[[nn.Module, RunConfig, World], str | None]
"""Changes a part of the model in place; returns what it did and on which mesh axis, or None where it is off.

Raises UserError where it was asked for and matches nothing.
"""

PASSES: tuple[Pass, ...] = (
    batch_norm.apply,
    dropout.apply,
    tensor_parallel.apply,
    context_parallel.apply,
    recompute.apply,
    compiled.apply,
    activation_offload.apply,
    shard.apply,
)
"""In this order: what splits parameters and activations, what wraps blocks, and last what shards over data."""


def build(
    model: nn.Module,
    make_optimizer: MakeOptimizer,
    config: RunConfig,
    world: World,
    say: Say = log.info,
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
    files = offload.open_files(config)
    make_optimizer = offload.placing(make_optimizer, config, world, files)
    check_device(config.precision, world.device)
    if not is_rehearsal():
        remade = remake_buffers(model, config.train.seed)
        if remade:
            say(f"buffers: {len(remade)} on the meta device written by their modules' resets ({remade[0]} ...)")
        check_aliases(model, splits(config, degrees), world.device)
    part = keep_parameters(model, config.precision)
    say(f"precision: parameters {next(part.parameters()).dtype}, compute {config.precision.name}")
    if degrees.pp > 1:
        from hpc_train.parallel.pipeline.build import build as build_stages  # its part of torch takes most of a second

        return build_stages(
            part, make_optimizer, partial(prepare, files=files, made=values), config, world, degrees, say
        )
    prepare(part, model, config, world, say, files, values)
    if config.parallel.server.mode != "none":
        engine, said = serve(part, make_optimizer, config, world)
        say(said)
        return engine
    if sharded(config, degrees):
        return PlainEngine(part, part, _updates(part, make_optimizer, config, world), config, world)
    wrapped, hook = replicate.replicate(part, config.parallel, world)
    ways = replicate.ways(config.parallel)
    where = [f"dp_replicate={degrees.dp_replicate}", *([f"cp={degrees.cp}"] if degrees.cp > 1 else [])]
    say(f"{type(wrapped).__name__}: {', '.join([*where, *ways])}")
    return PlainEngine(part, wrapped, _updates(part, make_optimizer, config, world), config, world, hook)


def _updates(part: nn.Module, make_optimizer: MakeOptimizer, config: RunConfig, world: World) -> Updates:
    return Updates([part], make_optimizer(part), world, scaling=loss_scale(config.precision))


def prepare(
    part: nn.Module,
    model: nn.Module,
    config: RunConfig,
    world: World,
    say: Say,
    files: FileMemory | None = None,
    made: DeferredValues | None = None,
) -> None:
    """Apply every pass to a part of the model, in place, and put its values on this rank's device or in files.

    Parameters that are split over ranks are split before they are moved, so no device ever holds all of them: a model
    with values gives them up first, and each rank takes the part it holds.
    """
    values: Values = {}
    if part is not model:
        values = {} if is_rehearsal() else values_of(part, model, made)
        if not is_rehearsal():
            adopt_buffers(part, model)
    elif made is not None:
        values = made.subset(name for name, _ in part.named_parameters())
    elif not is_meta(part):
        if splits(config, resolve(config.parallel, world.size)):
            values = detach_values(part)
        else:
            part.to(world.device)
    for change in PASSES:
        if (said := change(part, config, world)) is not None:
            say(said)
    materialise(part, values, config.train.seed, offload.home(config, world))
    if (said := offload.settle(part, config, world, files)) is not None:
        say(said)


def splits(config: RunConfig, degrees: Degrees) -> bool:
    """Whether ranks hold only parts of parameters."""
    return sharded(config, degrees) or degrees.tp > 1 or degrees.pp > 1


def check_model(model: nn.Module, config: RunConfig, degrees: Degrees) -> None:
    """Raise UserError for what the backends would refuse in words that do not help a user."""
    check_interface(model)
    if not any(parameter.requires_grad for parameter in model.parameters()):
        raise UserError("model: no parameter requires a gradient; there is nothing to train")
    scalars = [name for name, parameter in model.named_parameters() if parameter.ndim == 0]
    if scalars and sharded(config, degrees):
        raise UserError(f"model: {scalars[0]} is a scalar, which zero3 cannot shard; give it shape (1,) or use ddp")
    with calling(f"in {name_of(model)}.blocks()"):
        named_blocks(model)
    for axis in ("pp", "cp", "tp"):
        if getattr(degrees, axis) > 1 and not isinstance(model, Model):
            raise UserError(
                f"parallel.{axis}={getattr(degrees, axis)}: {type(model).__name__} does not say how it can be split "
                "(plan, blocks, stage, loss_sum); spread over dp_replicate and dp_shard"
            )
