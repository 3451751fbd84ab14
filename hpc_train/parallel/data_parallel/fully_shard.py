"""zero1, zero2, zero3: what a rank keeps of the model between its uses, over dp_shard; copied over dp_replicate (HSDP).

All three are fully_shard (FSDP2) and differ in when it gathers and when it reduces (Rajbhandari et al. 2020,
arXiv:1910.02054); parallel.support.sharding is the rule. Of a model of P bytes, in a step of M micro-batches, each rank
exchanges:

              parameters are gathered       gradients are reduced     volume
    zero1     once a step                   once a step               2 P
    zero2     once a step                   in every micro-batch      (1 + M) P
    zero3     in forward and in backward    in every micro-batch      3 M P, or 2 M P without reshard_after_forward

The same in the stages of a pipeline, but that zero3 without reshard_after_forward gathers once a step, as more than
one micro-batch is in flight: (1 + M) P. torch's pipelines would keep whole gradients for the whole step, which zero1 is
for: who needs the memory pays with M reductions, each beside the backward of the next block.

What is in no block (embedding, head) is at the end of forward and the beginning of backward: zero3 gathers it once.
Over dp_replicate the gradients of a shard are reduced once a step, in the last micro-batch.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor

from hpc_train._torch import concatenate_meshes, flatten_mesh
from hpc_train.config.parallel import ParallelConfig, resolve_degrees
from hpc_train.config.run import RunConfig
from hpc_train.errors import UserError
from hpc_train.interfaces import World
from hpc_train.parallel.memory.parameter_offload import make_offload_policy
from hpc_train.parallel.mesh_axes import SHARD_CP_AXIS, get_axis_degree
from hpc_train.parallel.precision import make_mixed_precision_policy
from hpc_train.parallel.user_model import get_named_blocks
from hpc_train.traffic.sharding import ZERO_STAGE, keeps_gradients, keeps_parameters, uses_fully_shard

_GROUP_MIB = 25.0
"""zero1, zero2: bytes that are gathered and reduced together where bucket_mib does not say; what ddp's buckets have."""


def shard_parameters(part: nn.Module, config: RunConfig, world: World) -> str | None:
    """A pass: shard groups of blocks (zero3: each by itself), then what is left as one group."""
    parallel, degrees = config.parallel, resolve_degrees(config.parallel, world.size)
    if not uses_fully_shard(config, degrees):
        return None
    keeps = _keeps_parameters(parallel, degrees.pp)
    groups = _group_blocks(part, parallel)
    if parallel.prefetch != 1 and not groups:
        what = f"parallel.prefetch={parallel.prefetch}: {type(part).__name__}"
        raise UserError(f"{what} is one group, nothing can be gathered ahead; leave it out")
    reshard = not keeps and parallel.reshard_after_forward
    for modules, again in [*((group, reshard) for group in groups), ([part], not groups and reshard)]:
        # What is left for the last one (embedding, head) is needed again as soon as backward begins.
        fully_shard(
            modules if len(modules) > 1 else modules[0],  # a list of one would be another kind of group
            mesh=make_data_mesh(world),
            mp_policy=make_mixed_precision_policy(config.precision),
            offload_policy=make_offload_policy(config, world.device),
            reshard_after_forward=again,
        )
    # Without targets fully_shard prefetches the previous group in forward order, of whichever micro-batch it was.
    _set_prefetch(part, [group[0] for group in groups], parallel.prefetch, named=degrees.pp > 1 and not keeps)
    where = f"dp_shard={degrees.dp_shard}, dp_replicate={degrees.dp_replicate}"
    where += f", cp={degrees.cp}" if degrees.cp > 1 else ""
    return f"fully_shard: {parallel.strategy}, {where}, groups={len(groups) + 1}"


def make_data_mesh(world: World) -> DeviceMesh:
    """The axes that gradients are reduced over: dp_replicate if there is more than one copy, and dp_shard with cp."""
    replicated = get_axis_degree(world, "dp_replicate") > 1
    if get_axis_degree(world, "cp") == 1:
        return world.mesh["dp_replicate", "dp_shard"] if replicated else world.mesh["dp_shard"]
    shards = flatten_mesh(world.mesh["dp_shard", "cp"], SHARD_CP_AXIS)
    return concatenate_meshes(world.mesh["dp_replicate"], shards) if replicated else shards


def set_gradient_sync(model: nn.Module, config: ParallelConfig, pp: int, last: bool, measured: bool = False) -> None:
    """Before a micro-batch's backward, set what it reduces and whether parameters stay gathered after it.

    last: of the step. measured: its gradient must be reduced whatever the strategy, because it is looked at.
    """
    assert isinstance(model, FSDPModule)
    model.set_requires_gradient_sync(last or measured or not keeps_gradients(ZERO_STAGE[config.strategy]))
    model.set_requires_all_reduce(last or measured)
    model.set_reshard_after_backward(last or not _keeps_parameters(config, pp))


def free_gathered_parameters(model: nn.Module) -> None:
    """Free what a forward without a backward has gathered and would keep: `model` shows its shards again."""
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()


def _keeps_parameters(config: ParallelConfig, pp: int) -> bool:
    return bool(keeps_parameters(ZERO_STAGE[config.strategy], config.reshard_after_forward, pp))


def _group_blocks(part: nn.Module, config: ParallelConfig) -> list[list[nn.Module]]:
    """Blocks that are gathered and reduced together; none where the whole part is one group.

    Where parameters stay gathered, larger groups cost no memory but that of a bucket, and every collective has a price.
    """
    units = group_tied_blocks(part, list(dict.fromkeys(get_named_blocks(part).values())))
    if config.strategy == "zero3":
        return units
    limit = (config.bucket_mib or _GROUP_MIB) * 2**20
    if _count_bytes([part]) <= limit:
        return []
    groups: list[list[nn.Module]] = []
    filled = 0
    for unit in units:
        size = _count_bytes(unit)
        if not groups or filled + size > limit:
            groups.append([])
            filled = 0
        groups[-1] += unit
        filled += size
    return groups


def group_tied_blocks(part: nn.Module, blocks: Sequence[nn.Module]) -> list[list[nn.Module]]:
    """Return the blocks in order, as lists; blocks that share a parameter are in one list.

    fully_shard supports a shared parameter only within a group, and would otherwise make two of it. So a block that
    shares one with a module outside all blocks is left out: it belongs to the last group.
    """
    unit = list(range(len(blocks)))
    first: dict[int, int] = {}
    for index, block in enumerate(blocks):
        for parameter in block.parameters():
            joined = unit[first.setdefault(id(parameter), index)]
            unit = [joined if number == unit[index] else number for number in unit]
    inside = {id(module) for block in blocks for module in block.modules()}
    outside = [module for module in part.modules() if id(module) not in inside]
    rest = {first.get(id(parameter)) for module in outside for parameter in module.parameters(recurse=False)}
    left_out = {unit[index] for index in rest if index is not None}
    members: dict[int, list[nn.Module]] = {}
    for number, block in zip(unit, blocks, strict=True):
        if number not in left_out:
            members.setdefault(number, []).append(block)
    return list(members.values())


def _count_bytes(modules: Sequence[nn.Module]) -> int:
    parameters = {parameter for module in modules for parameter in module.parameters()}
    return sum((p.to_local() if isinstance(p, DTensor) else p).nbytes for p in parameters)


def _set_prefetch(part: nn.Module, groups: Sequence[nn.Module], ahead: int, named: bool) -> None:
    """Prefetch `ahead` groups before the one that computes. fully_shard prefetches 1 by itself.

    named: set these targets explicitly even if `ahead` is 1.
    """
    if ahead == 1 and not named:
        return
    for index, module in enumerate([part, *groups]):
        following = list(groups[index : index + ahead])
        end = index - 1 if index else len(groups)
        before = list(groups[max(0, end - ahead) : end])
        assert isinstance(module, FSDPModule)
        module.set_modules_to_forward_prefetch(following)  # type: ignore[arg-type]
        # Without a target fully_shard takes its own; the module itself is there already, so nothing is gathered.
        module.set_modules_to_backward_prefetch(before[::-1] or [module])  # type: ignore[arg-type]
