"""Expert parallelism: each rank of the ep axis holds an equal part of the experts of every layer.

ep is a view of dp_shard x cp (GShard, Lepikhin et al. 2020, arXiv:2006.16668): its ranks have different tokens, and
send each token to the ranks of its experts. An expert's gradient is then complete on the ranks of one ep group, so
fully_shard reduces it over the other data-parallel ranks only. tp splits the width of every expert.
"""

from __future__ import annotations

import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, OffloadPolicy, fully_shard
from torch.distributed.tensor import DTensor, Shard

from hpc_train._torch.process_groups import all_gather, concatenate_meshes, flatten_mesh, split_mesh
from hpc_train.config.run import RunConfig
from hpc_train.errors import UserError
from hpc_train.interfaces import World
from hpc_train.models.experts import HIDDEN_DIMENSIONS, WIDTH_DIMENSIONS, Experts, WholeSequences, list_mixtures
from hpc_train.parallel.expert.exchange import ExchangedDispatch
from hpc_train.parallel.mesh_axes import (
    EXPERT_SHARD_AXIS,
    SHARD_CP_AXIS,
    SequenceShare,
    get_axis_degree,
    get_sequence_share,
)
from hpc_train.parallel.reduce_scatter import choose_reduce_scatter
from hpc_train.parallel.tensor.local_parameters import ParameterLayout, distribute_named_parameters


def make_expert_mesh(world: World, ep: int) -> DeviceMesh:
    """Make the mesh (expert_shard, ep) of this rank: neighbours of dp_shard x cp share an ep group.

    Every rank of the job calls it.
    """
    shards = flatten_mesh(world.mesh["dp_shard", "cp"], SHARD_CP_AXIS)
    return split_mesh(shards, (shards.size() // ep, ep), (EXPERT_SHARD_AXIS, "ep"))


def apply_expert_parallel(part: nn.Module, config: RunConfig, world: World) -> str | None:
    """Split the experts of `part` over ep, and send tokens to them. None for a stage without experts.

    Raises UserError for a model without a mixture of experts.
    """
    ep, tp = config.parallel.ep, get_axis_degree(world, "tp")
    mixtures = list_mixtures(part)
    if not mixtures and get_axis_degree(world, "pp") > 1:
        return None
    if not mixtures:
        raise UserError(
            f"parallel.ep={ep}: {type(part).__name__} has no hpc_train.models.experts.MixtureOfExperts, whose experts "
            "could be split; use that module in it, or parallel.ep=1"
        )
    assert world.expert_mesh is not None
    axis = world.expert_mesh["ep"]
    mesh = axis if tp == 1 else concatenate_meshes(axis, world.mesh["tp"])
    for name, mixture in mixtures.items():
        if mixture.config.count % ep:
            raise UserError(f"parallel.ep={ep}: {name} has {mixture.config.count} experts, which do not divide")
        layouts = {key: _make_layout(width, ep, tp) for key, width in WIDTH_DIMENSIONS.items()}
        distribute_named_parameters(mixture.experts, mesh, layouts)
        mixture.dispatch = ExchangedDispatch(axis.get_group())
    return f"experts: {len(mixtures)} layers over ep={ep}, {mixture.config.count // ep} experts per rank"


def _make_layout(width: int, ep: int, tp: int) -> ParameterLayout:
    # Gradients of an ep group have been added up, where fully_shard expects each rank's own to take the mean of; its
    # set_gradient_divide_factor divides twice on a mesh of one rank (torch 2.13).
    return ParameterLayout(Shard(0), other_placements=(Shard(width),) if tp > 1 else (), gradient_scale=1.0 / ep)


def shard_experts(
    part: nn.Module, world: World, policy: MixedPrecisionPolicy, offload: OffloadPolicy, *, reshard: bool
) -> list[FSDPModule]:
    """Shard the experts that a rank holds over the data-parallel ranks outside its ep group, and return them."""
    assert world.expert_mesh is not None
    mesh = world.expert_mesh[EXPERT_SHARD_AXIS]
    ranks = mesh.size()
    if get_axis_degree(world, "dp_replicate") > 1:
        mesh = concatenate_meshes(world.mesh["dp_replicate"], mesh)

    sharded: list[FSDPModule] = []
    for mixture in list_mixtures(part).values():
        experts = mixture.experts
        placements = _place_shards(experts, ranks)
        fully_shard(
            experts,
            mesh=mesh,
            mp_policy=policy,
            offload_policy=offload,
            reshard_after_forward=reshard,
            shard_placement_fn=placements.__getitem__,
        )
        assert isinstance(experts, FSDPModule)
        sharded.append(experts)
    choose_reduce_scatter(sharded, mesh, world)
    return sharded


def _place_shards(experts: Experts, ranks: int) -> dict[nn.Parameter, Shard]:
    """Cut between experts where that divides, else the hidden dimension, which tp never cuts."""
    placements: dict[nn.Parameter, Shard] = {}
    for name, parameter in experts.named_parameters():
        assert isinstance(parameter, DTensor)
        shape, hidden = parameter.to_local().shape, HIDDEN_DIMENSIONS[name]
        placements[parameter] = Shard(0 if shape[0] % ranks == 0 or shape[hidden] % ranks else hidden)
    return placements


class SplitSequences(WholeSequences):
    """Takes the place of models.experts.WholeSequences where the ranks of cp share each sequence."""

    def __init__(self, share: SequenceShare, group: dist.ProcessGroup) -> None:
        super().__init__()
        self._share, self._group = share, group

    def gather(self, expert_indices: Tensor) -> Tensor:
        """Gather the choices (B, t, K) of all ranks by position: (B, T, K)."""
        parts = expert_indices.new_empty(self._share.ranks, *expert_indices.shape)
        all_gather(parts, expert_indices.contiguous(), self._group)
        all_indices = expert_indices.new_empty(
            len(expert_indices), expert_indices.shape[1] * self._share.ranks, expert_indices.shape[2]
        )
        for rank, part in enumerate(parts):
            share = SequenceShare(rank, self._share.ranks, self._share.balanced)
            all_indices[:, share.positions(all_indices.shape[1], all_indices.device)] = part
        return all_indices

    def select(self, tensor: Tensor) -> Tensor:
        """Select this rank's positions of (B, T, ...)."""
        return self._share.select(tensor)


def share_sequences(part: nn.Module, config: RunConfig, world: World) -> str | None:
    """Let the routers of `part` see the choices of all tokens of a sequence, which ranks of cp share."""
    mixtures = list_mixtures(part)
    for mixture in mixtures.values():
        mixture.router.sequences = SplitSequences(get_sequence_share(config, world), world.mesh["cp"].get_group())
    return f"experts: {len(mixtures)} routers see whole sequences over cp" if mixtures else None
