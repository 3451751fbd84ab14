"""build: the techniques in the one order in which they are applied, each named in the log with the mesh it ran on."""

from __future__ import annotations

import logging
from collections.abc import Callable

import torch
from torch import nn

from hpc_train.api import Engine, Model, World
from hpc_train.config.degrees import Degrees
from hpc_train.config.run import RunConfig
from hpc_train.errors import UserError
from hpc_train.parallel import context, replicate, shard, tensor
from hpc_train.parallel.engines.plain import PlainEngine
from hpc_train.parallel.materialise import is_meta, materialise
from hpc_train.parallel.precision import keep_parameters
from hpc_train.parallel.support import check_support
from hpc_train.parallel.support.data import sharded

log = logging.getLogger(__name__)

MakeOptimizer = Callable[[nn.Module], torch.optim.Optimizer]
Pass = Callable[[nn.Module, RunConfig, World], str | None]
"""Changes a part of the model in place; returns what it did and on which mesh axis, or None where it is off.

Raises UserError where it was asked for and matches nothing.
"""

PASSES: tuple[Pass, ...] = (
    tensor.apply,
    context.apply,
    shard.apply,
)
"""In this order: what splits parameters and activations, what wraps blocks, and last what shards over data."""


def build(model: nn.Module, make_optimizer: MakeOptimizer, config: RunConfig, world: World) -> Engine:
    """The engine that trains `model` on this world.

    A model on the meta device gets its initial values here, each rank only what it holds; any other keeps its own.
    make_optimizer is called after the model has been split, so that it sees the parameters this rank keeps.
    Raises UserError for a combination or a model that no backend can do.
    """
    degrees = check_support(config, world.size)
    check_model(model, config, degrees)
    part = keep_parameters(model, config.precision)
    prepare(part, model, config, world)
    log.info("precision: parameters %s, compute %s", next(part.parameters()).dtype, config.precision.name)
    if sharded(config, degrees):
        return PlainEngine(part, part, make_optimizer(part), config, world)
    wrapped, tap = replicate.replicate(part, config.parallel, world)
    log.info("%s: dp_replicate=%d", type(wrapped).__name__, degrees.dp_replicate)
    return PlainEngine(part, wrapped, make_optimizer(part), config, world, tap)


def prepare(part: nn.Module, model: nn.Module, config: RunConfig, world: World) -> None:
    """Apply every pass to a part of the model, in place, and give it its values on this rank's device."""
    if not is_meta(part):
        part.to(world.device)
    for change in PASSES:
        said = change(part, config, world)
        if said is not None:
            log.info("%s", said)
    materialise(part, model, config.train.seed, world.device)


def check_model(model: nn.Module, config: RunConfig, degrees: Degrees) -> None:
    """Raise UserError for what the backends would refuse in words that do not help a user."""
    if not any(parameter.requires_grad for parameter in model.parameters()):
        raise UserError("model: no parameter requires a gradient; there is nothing to train")
    scalars = [name for name, parameter in model.named_parameters() if parameter.ndim == 0]
    if scalars and sharded(config, degrees):
        raise UserError(f"model: {scalars[0]} is a scalar, which zero3 cannot shard; give it shape (1,) or use ddp")
    for axis in ("pp", "cp", "tp"):
        if getattr(degrees, axis) > 1 and not isinstance(model, Model):
            raise UserError(
                f"parallel.{axis}={getattr(degrees, axis)}: {type(model).__name__} does not say how it can be split "
                "(plan, blocks, stage, loss_sum); spread over dp_replicate and dp_shard"
            )
