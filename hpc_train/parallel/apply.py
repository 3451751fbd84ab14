"""build: the techniques in the one order in which they are applied, each named in the log with the mesh it ran on."""

from __future__ import annotations

import logging
from collections.abc import Callable

import torch
from torch import nn

from hpc_train.api import Engine, World
from hpc_train.config.run import RunConfig
from hpc_train.errors import UserError
from hpc_train.parallel.engines.plain import PlainEngine
from hpc_train.parallel.precision import keep_parameters
from hpc_train.parallel.replicate import replicate
from hpc_train.parallel.shard import shard
from hpc_train.parallel.support import check_support

log = logging.getLogger(__name__)

MakeOptimizer = Callable[[nn.Module], torch.optim.Optimizer]


def build(model: nn.Module, make_optimizer: MakeOptimizer, config: RunConfig, world: World) -> Engine:
    """The engine that trains `model`, already initialised, on this world.

    make_optimizer is called after the model has been split, so that it sees the parameters this rank keeps.
    Raises UserError for a combination or a model that no backend can do.
    """
    degrees = check_support(config, world.size)
    _check_model(model, config)
    model = keep_parameters(model, config.precision).to(world.device)
    log.info("precision: parameters %s, compute %s", next(model.parameters()).dtype, config.precision.name)
    if config.parallel.strategy == "zero3":
        model = shard(model, config.parallel, config.precision, world)
        log.info("fully_shard: dp_shard=%d, dp_replicate=%d", degrees.dp_shard, degrees.dp_replicate)
        return PlainEngine(model, model, make_optimizer(model), config, world)
    wrapped, tap = replicate(model, config.parallel, world)
    log.info("%s: dp_replicate=%d", type(wrapped).__name__, degrees.dp_replicate)
    return PlainEngine(model, wrapped, make_optimizer(model), config, world, tap)


def _check_model(model: nn.Module, config: RunConfig) -> None:
    """What the backends would refuse in words that do not help a user."""
    if not any(parameter.requires_grad for parameter in model.parameters()):
        raise UserError("model: no parameter requires a gradient; there is nothing to train")
    scalars = [name for name, parameter in model.named_parameters() if parameter.ndim == 0]
    if scalars and config.parallel.strategy == "zero3":
        raise UserError(f"model: {scalars[0]} is a scalar, which zero3 cannot shard; give it shape (1,) or use ddp")
