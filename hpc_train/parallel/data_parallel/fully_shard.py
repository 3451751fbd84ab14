"""zero1, zero2, zero3: shard the model's state over dp_shard, with copies over dp_replicate (HSDP).

All three are fully_shard (FSDP2). They differ in when parameters are gathered and when gradients are reduced
(Rajbhandari et al. 2020, arXiv:1910.02054); traffic/sharding.py has the rule. For a model of P bytes and a step of M
micro-batches, each rank exchanges:

              parameters are gathered       gradients are reduced     volume
    zero1     once per step                   once per step               2 P
    zero2     once per step                   in every micro-batch      (1 + M) P
    zero3     in forward and in backward    in every micro-batch      3 M P, or 2 M P without reshard_after_forward

Pipeline stages do the same, except that zero3 without reshard_after_forward gathers once per step, because more than
one micro-batch is in flight: (1 + M) P. torch's own pipelines keep whole gradients for the whole step, which is what
zero1 is for; zero2 and zero3 save that memory for M reductions, each overlapped with the backward of the next block.

Modules outside all blocks (embedding, head) are used at the end of forward and at the beginning of backward, so zero3
gathers them once. Over dp_replicate the gradients of a shard are reduced once per step, in the last micro-batch.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, OffloadPolicy, fully_shard
from torch.distributed.tensor import DTensor

from hpc_train._torch.process_groups import concatenate_meshes, flatten_mesh
from hpc_train.config.parallel import ParallelConfig, resolve_degrees
from hpc_train.config.run import RunConfig
from hpc_train.errors import UserError
from hpc_train.interfaces import World
from hpc_train.parallel.mesh_axes import SHARD_CP_AXIS, get_axis_degree
from hpc_train.parallel.precision.number_formats import make_mixed_precision_policy
from hpc_train.parallel.reduce_scatter import choose_reduce_scatter
from hpc_train.parallel.user_model import get_named_blocks
from hpc_train.traffic.sharding import ZERO_STAGE, keeps_gradients, keeps_parameters

_GROUP_MIB = 25.0
"""zero1, zero2: size of a group that is gathered and reduced together, if bucket_mib is unset; as ddp's buckets."""


def shard_parameters(part: nn.Module, config: RunConfig, world: World) -> str:
    """Shard groups of blocks (zero3: each block alone), then everything else as one group."""
    parallel, degrees = config.parallel, resolve_degrees(config.parallel, world.size)
    keeps = _keeps_parameters(parallel, degrees.pp)
    groups = _group_blocks(part, parallel)
    if parallel.prefetch != 1 and not groups:
        option = f"parallel.prefetch={parallel.prefetch}: {type(part).__name__}"
        raise UserError(f"{option} is one group, nothing can be gathered ahead; leave it out")
    reshard = not keeps and parallel.reshard_after_forward
    policy, offload = make_mixed_precision_policy(config.precision), _make_offload_policy(config, world)
    experts: list[FSDPModule] = []
    if parallel.ep > 1:
        from hpc_train.parallel.expert.expert_parallel import shard_experts

        experts = shard_experts(part, world, policy, offload, reshard=reshard)
    # The last group (embedding, head) stays gathered after forward: backward begins with it.
    for modules, reshards in [*((group, reshard) for group in groups), ([part], not groups and reshard)]:
        fully_shard(
            modules if len(modules) > 1 else modules[0],  # torch treats a list of one as another kind of group
            mesh=make_data_mesh(world),
            mp_policy=policy,
            offload_policy=offload,
            reshard_after_forward=reshards,
        )
    choose_reduce_scatter([*(group[0] for group in groups), part], make_data_mesh(world), world)
    # A pipeline names its prefetch targets: by default fully_shard takes the previous group in forward order, which may
    # belong to another micro-batch.
    named = degrees.pp > 1 and not keeps
    _set_prefetch(part, [group[0] for group in groups], parallel.prefetch, named=named)
    for module in experts if named else ():
        module.set_modules_to_backward_prefetch([module])  # none: see _set_prefetch
    degree_list = f"dp_shard={degrees.dp_shard}, dp_replicate={degrees.dp_replicate}"
    degree_list += f", cp={degrees.cp}" if degrees.cp > 1 else ""
    degree_list += f", ep={parallel.ep}" if parallel.ep > 1 else ""
    return f"fully_shard: {parallel.strategy}, {degree_list}, groups={len(groups) + 1}"


def _make_offload_policy(config: RunConfig, world: World) -> OffloadPolicy:
    if config.parallel.offload.parameters == "none":
        return OffloadPolicy()
    from hpc_train.parallel.memory.parameter_offload import make_offload_policy

    return make_offload_policy(config, world.device)


def make_data_mesh(world: World) -> DeviceMesh:
    """Return the mesh that gradients are reduced over: dp_shard (with cp), and dp_replicate if it is over 1."""
    replicated = get_axis_degree(world, "dp_replicate") > 1
    if get_axis_degree(world, "cp") == 1:
        return world.mesh["dp_replicate", "dp_shard"] if replicated else world.mesh["dp_shard"]
    shards = flatten_mesh(world.mesh["dp_shard", "cp"], SHARD_CP_AXIS)
    return concatenate_meshes(world.mesh["dp_replicate"], shards) if replicated else shards


class GradientSync:
    """Sets, before a micro-batch, whether its backward reduces gradients and frees gathered parameters."""

    def __init__(self, model: nn.Module, config: ParallelConfig, pp: int) -> None:
        """model: with all groups that fully_shard makes of it."""
        # fully_shard's setters would walk over all modules before each micro-batch: 2 % of a small model's step.
        self._modules = [module for module in model.modules() if isinstance(module, FSDPModule)]
        self._reduces_each = not keeps_gradients(ZERO_STAGE[config.strategy])
        self._keeps_parameters = _keeps_parameters(config, pp)
        self._current: tuple[bool, bool, bool] | None = None

    def prepare(self, *, last: bool, measured: bool = False) -> None:
        """Set what the next backward does.

        last: it is the last one of the step. measured: reduce whatever the strategy, because the gradient's norm is
        needed.
        """
        all_reduces = last or measured  # over dp_replicate: once a step, of the sum of all micro-batches
        reduces = all_reduces or self._reduces_each
        frees = last or not self._keeps_parameters
        if self._current == (reduces, all_reduces, frees):
            return
        self._current = (reduces, all_reduces, frees)
        for module in self._modules:
            module.set_requires_gradient_sync(reduces, recurse=False)
            module.set_requires_all_reduce(all_reduces, recurse=False)
            module.set_reshard_after_backward(frees, recurse=False)


def free_gathered_parameters(model: nn.Module) -> None:
    """Reshard every group of `model`: a forward without a backward leaves its parameters gathered."""
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()


class ShardedModel:
    """A model held by fully_shard; implements engines.plain_engine.WrappedModel."""

    is_sharded = True
    warmup_backwards = 0

    def __init__(self, module: nn.Module, config: ParallelConfig) -> None:
        self.module = module
        self._sync = GradientSync(module, config, pp=1)

    @contextmanager
    def accumulate(self, *, last: bool, measure: bool) -> Iterator[None]:
        """Run one micro-batch, reducing its gradient if the strategy says so."""
        self._sync.prepare(last=last, measured=measure)
        yield

    @contextmanager
    def warm_up(self) -> Iterator[None]:
        """Never called: fully_shard rounds the same from its first step."""
        yield

    def free_gathered_parameters(self) -> None:
        """Reshard every group."""
        free_gathered_parameters(self.module)

    def take_local_square(self) -> Tensor:
        """Never called: a rank's own gradient is gone when the reduction ends."""
        raise NotImplementedError


def _keeps_parameters(config: ParallelConfig, pp: int) -> bool:
    return bool(keeps_parameters(ZERO_STAGE[config.strategy], config.reshard_after_forward, pp))


def _group_blocks(part: nn.Module, config: ParallelConfig) -> list[list[nn.Module]]:
    """Group the blocks that are gathered and reduced together; an empty list makes the whole part one group.

    zero1 and zero2 keep parameters gathered, so larger groups cost only a bucket's memory and save collectives.
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
    """Group the blocks, in order, so that blocks sharing a parameter are in one list.

    fully_shard supports a shared parameter only within a group; across groups it would split it into two. A block that
    shares one with a module outside all blocks is left out here, so that both end in the last group.
    """
    group_of = list(range(len(blocks)))
    first_user: dict[int, int] = {}
    for index, block in enumerate(blocks):
        for parameter in block.parameters():
            shared = group_of[first_user.setdefault(id(parameter), index)]
            group_of = [shared if number == group_of[index] else number for number in group_of]
    inside = {id(module) for block in blocks for module in block.modules()}
    outside = [module for module in part.modules() if id(module) not in inside]
    users = {first_user.get(id(parameter)) for module in outside for parameter in module.parameters(recurse=False)}
    left_out = {group_of[index] for index in users if index is not None}
    members: dict[int, list[nn.Module]] = {}
    for number, block in zip(group_of, blocks, strict=True):
        if number not in left_out:
            members.setdefault(number, []).append(block)
    return list(members.values())


def _count_bytes(modules: Sequence[nn.Module]) -> int:
    """Count the bytes that a rank has of modules, without experts, which are sharded already as groups of their own."""
    inside = [child for module in modules for child in module.modules() if isinstance(child, FSDPModule)]
    sharded = {parameter for child in inside for parameter in child.parameters()}
    parameters = {parameter for module in modules for parameter in module.parameters()} - sharded
    return sum((p.to_local() if isinstance(p, DTensor) else p).nbytes for p in parameters)


def _set_prefetch(part: nn.Module, groups: Sequence[nn.Module], ahead: int, named: bool) -> None:
    """Gather `ahead` groups before the one that computes; fully_shard gathers 1 by itself.

    named: set the targets even if `ahead` is 1.
    """
    if ahead == 1 and not named:
        return
    for index, module in enumerate([part, *groups]):
        following = list(groups[index : index + ahead])
        end = index - 1 if index else len(groups)
        before = list(groups[max(0, end - ahead) : end])
        assert isinstance(module, FSDPModule)
        module.set_modules_to_forward_prefetch(following)  # type: ignore[arg-type]
        # An empty list would mean torch's default target; the module itself is gathered already, so it costs nothing.
        module.set_modules_to_backward_prefetch(before[::-1] or [module])  # type: ignore[arg-type]
