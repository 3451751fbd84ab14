"""zero3: parameters, gradients and optimizer state sharded over dp_shard (FSDP2), copied over dp_replicate (HSDP)."""

from __future__ import annotations

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, fully_shard

from hpc_train.api import Model, World
from hpc_train.compat import flatten
from hpc_train.config.degrees import resolve
from hpc_train.config.run import RunConfig
from hpc_train.parallel.axes import SHARD_CONTEXT, degree
from hpc_train.parallel.precision import sharded_policy
from hpc_train.parallel.support.data import sharded


def apply(part: nn.Module, config: RunConfig, world: World) -> str | None:
    """A pass: shard each block by itself, then what is left as one group."""
    degrees = resolve(config.parallel, world.size)
    if not sharded(config, degrees):
        return None
    policy, mesh = sharded_policy(config.precision), data_mesh(world)
    reshard = config.parallel.reshard_after_forward
    blocks = list(part.blocks().values()) if isinstance(part, Model) else []
    for block in blocks:
        fully_shard(block, mesh=mesh, mp_policy=policy, reshard_after_forward=reshard)
    # What is left (embedding, head) is needed again as soon as backward begins.
    fully_shard(part, mesh=mesh, mp_policy=policy, reshard_after_forward=not blocks and reshard)
    return f"fully_shard: {config.parallel.strategy}, dp_shard={degrees.dp_shard}, dp_replicate={degrees.dp_replicate}"


def data_mesh(world: World) -> DeviceMesh:
    """The axes that gradients are reduced over: dp_replicate if there is more than one copy, and dp_shard with cp."""
    shards = "dp_shard" if degree(world, "cp") == 1 else SHARD_CONTEXT
    if shards == SHARD_CONTEXT:
        flatten(world.mesh["dp_shard", "cp"], SHARD_CONTEXT)
    return world.mesh[shards] if degree(world, "dp_replicate") == 1 else world.mesh["dp_replicate", shards]


def synchronise(model: nn.Module, now: bool) -> None:
    """Whether the next backward reduces gradients over ranks or keeps adding to this rank's own."""
    assert isinstance(model, FSDPModule)
    model.set_requires_gradient_sync(now)


def release(model: nn.Module) -> None:
    """Free what a forward without a backward has gathered and would keep: `model` shows its shards again."""
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()
