"""Context parallelism: each rank of the cp axis takes a part of every sequence."""

from __future__ import annotations

import inspect

from torch import nn

from hpc_train.api import MicroBatch, World
from hpc_train.config.run import RunConfig
from hpc_train.errors import UserError
from hpc_train.models.attention import ScaledDotProduct
from hpc_train.parallel.axes import degree
from hpc_train.parallel.context.gathered import GatheredAttention
from hpc_train.parallel.context.positions import provide, share
from hpc_train.parallel.context.ulysses import UlyssesAttention


def apply(part: nn.Module, config: RunConfig, world: World) -> str | None:
    """A pass: exchange what attention needs over cp, and tell the model which positions it sees."""
    if degree(world, "cp") == 1:
        return None
    found = [
        (owner, name, core)
        for owner in part.modules()
        for name, core in owner.named_children()
        if isinstance(core, ScaledDotProduct)
    ]
    _check(part, [core for _, _, core in found], degree(world, "cp"))
    for owner, name, core in found:
        setattr(owner, name, distributed(core, config, world))
    provide(part, config, world)
    drops = any(core.dropout > 0 for _, _, core in found)
    return f"context: {_method(config, drops)} attention in {len(found)} modules over cp={degree(world, 'cp')}"


def _method(config: RunConfig, drops: bool) -> str:
    context = config.parallel.context
    if drops and context.method == "ring":
        return "gathered (dropout: no ring)"
    return "balanced ring" if context.method == "ring" and context.balanced else context.method


def _check(part: nn.Module, cores: list[ScaledDotProduct], cp: int) -> None:
    name = type(part).__name__
    if not cores:
        raise UserError(
            f"parallel.cp={cp}: {name} has no hpc_train.models.attention.ScaledDotProduct, whose place ring or Ulysses "
            "attention takes; use that module in it, or parallel.cp=1"
        )
    if "positions" not in inspect.signature(part.forward).parameters:
        raise UserError(
            f"parallel.cp={cp}: {name}.forward takes no `positions`, so it cannot know which part of a sequence it "
            "sees; add that argument, or use parallel.cp=1"
        )


def distributed(core: ScaledDotProduct, config: RunConfig, world: World) -> nn.Module:
    """What takes the place of `core` where each rank of cp has its share of the positions."""
    group, context = world.mesh["cp"].get_group(), config.parallel.context
    new: nn.Module
    if context.method == "ulysses":
        new = UlyssesAttention(core, group)
    elif core.dropout > 0:
        new = GatheredAttention(core, group, share(config, world))
    else:
        from hpc_train.parallel.context.ring_attention import Ring, RingAttention  # its operators take 50 ms

        new = RingAttention(Ring(group), causal=core.causal, balanced=context.balanced)
    return new.train(core.training)


def own_tokens(micro: MicroBatch, config: RunConfig, world: World) -> MicroBatch:
    """This rank's positions of a micro-batch (B, T): (B, T / cp) of each."""
    if degree(world, "cp") == 1:
        return micro
    mine = share(config, world).positions(micro.inputs.shape[1])
    return MicroBatch(micro.inputs[:, mine], micro.targets[:, mine])
