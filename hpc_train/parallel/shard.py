"""zero3: parameters, gradients and optimizer state sharded over dp_shard (FSDP2), copied over dp_replicate (HSDP)."""

from __future__ import annotations

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, fully_shard

from hpc_train.api import Model, World
from hpc_train.config.parallel import ParallelConfig
from hpc_train.config.train import PrecisionConfig
from hpc_train.parallel.precision import sharded_policy


def shard(model: nn.Module, config: ParallelConfig, precision: PrecisionConfig, world: World) -> nn.Module:
    """Shard each block of the model by itself, then what is left as one group; in place, returns the model."""
    mesh = _mesh(world)
    policy = sharded_policy(precision)
    blocks = list(model.blocks().values()) if isinstance(model, Model) else []
    for block in blocks:
        fully_shard(block, mesh=mesh, mp_policy=policy, reshard_after_forward=config.reshard_after_forward)
    # What is left (embedding, head) is needed again as soon as backward begins.
    fully_shard(model, mesh=mesh, mp_policy=policy, reshard_after_forward=not blocks and config.reshard_after_forward)
    return model


def _mesh(world: World) -> DeviceMesh:
    if world.mesh["dp_replicate"].size() == 1:
        return world.mesh["dp_shard"]
    return world.mesh["dp_replicate", "dp_shard"]


def synchronise(model: nn.Module, now: bool) -> None:
    """Whether the next backward reduces gradients over ranks or keeps adding to this rank's own."""
    assert isinstance(model, FSDPModule)
    model.set_requires_gradient_sync(now)


def release(model: nn.Module) -> None:
    """Free what a forward without a backward has gathered and would keep: `model` shows its shards again."""
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()
