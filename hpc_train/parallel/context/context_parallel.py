"""Context parallelism: each rank of the cp axis takes a part of every sequence.

The pass puts a distributed attention in the place of each attention of the model: ring or Ulysses as configured; with
dropout of attention weights, one that gathers the keys and values of all ranks, because the ring's kernels take no mask
of weights. That one keeps the keys and values of the whole sequence, and the scores of one block of its own queries.
"""

from __future__ import annotations

import inspect
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from hpc_train._torch.process_groups import all_gather
from hpc_train.config.run import RunConfig
from hpc_train.errors import UserError
from hpc_train.interfaces import World
from hpc_train.models.attention.plain_attention import attend_plainly
from hpc_train.models.layers import ScaledDotProduct
from hpc_train.parallel.context.block_attention import cast_to_autocast
from hpc_train.parallel.mesh_axes import SequenceShare, get_axis_degree, get_sequence_share, provide_positions
from hpc_train.parallel.reduce_scatter import reduce_parts, reduces_by_all_to_all


def apply_context_parallel(part: nn.Module, config: RunConfig, world: World) -> str:
    """Distribute every attention of `part` over cp, and tell the model which positions it sees.

    A model that computes attention in functions, and not in modules, is asked for modules (`expose_attention`).
    """
    if (expose := getattr(part, "expose_attention", None)) is not None:
        expose()
    cores = [
        (module, name, core)
        for module in part.modules()
        for name, core in module.named_children()
        if isinstance(core, ScaledDotProduct)
    ]
    _check_attentions(part, [core for _, _, core in cores], get_axis_degree(world, "cp"))
    if config.parallel.context.method == "ring" and any(core.rule.window is not None for _, _, core in cores):
        connect_ranks(world.mesh["cp"].get_group(), world.device)
    for module, name, core in cores:
        setattr(module, name, distribute_attention(core, config, world))
    provide_positions(part, config, world)
    drops = any(core.dropout > 0 for _, _, core in cores)
    method, cp = _name_method(config, drops), get_axis_degree(world, "cp")
    return f"context: {method} attention in {len(cores)} modules over cp={cp}"


def connect_ranks(group: dist.ProcessGroup, device: torch.device) -> None:
    """Have all ranks of a group connect now, by a collective that all of them take part in; on CPUs nothing is needed.

    NCCL connects a group in its first call, unless the group was made with its device (from torch 2.13 on), and then
    waits for every rank of it. Under a window the first messages may concern a few ranks only (see the note to
    torch.distributed.batch_isend_irecv).
    """
    if device.type != "cpu":
        dist.all_reduce(torch.zeros(1, device=device), group=group)


def _name_method(config: RunConfig, drops: bool) -> str:
    context = config.parallel.context
    if drops and context.method == "ring":
        return "gathered (dropout: no ring)"
    return "balanced ring" if context.method == "ring" and context.balanced else context.method


def _check_attentions(part: nn.Module, cores: list[ScaledDotProduct], cp: int) -> None:
    name = type(part).__name__
    if not cores:
        raise UserError(
            f"parallel.cp={cp}: {name} has no hpc_train.models.layers.ScaledDotProduct, whose place ring or Ulysses "
            "attention takes; use that module in it, or parallel.cp=1"
        )
    if "positions" not in inspect.signature(part.forward).parameters:
        raise UserError(
            f"parallel.cp={cp}: {name}.forward takes no `positions`, so it cannot know which part of a sequence it "
            "sees; add that argument, or use parallel.cp=1"
        )


def distribute_attention(core: ScaledDotProduct, config: RunConfig, world: World) -> nn.Module:
    """Make the attention that replaces `core` where each rank of cp has its share of the positions."""
    group, context = world.mesh["cp"].get_group(), config.parallel.context
    new: nn.Module
    if context.method == "ulysses":
        from hpc_train.parallel.context.ulysses import UlyssesAttention

        new = UlyssesAttention(core, group)
    elif core.dropout > 0:
        share = get_sequence_share(config, world)
        new = GatheredAttention(core, group, share, by_all_to_all=reduces_by_all_to_all(group, world))
    else:
        from hpc_train.parallel.context.ring_attention import RingAttention  # its operators take 50 ms
        from hpc_train.parallel.context.ring_schedule import KeyValueRing

        new = RingAttention(KeyValueRing(group), core.rule, balanced=context.balanced)
    return new.train(core.training)


class _Gather(torch.autograd.Function):
    """Gather x from each rank -> (ranks, ...); backward sums the gradients that all ranks have for this rank's x."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup, by_all_to_all: bool) -> Tensor:
        ctx.group, ctx.by_all_to_all = group, by_all_to_all
        parts = x.new_empty(group.size(), *x.shape)
        all_gather(parts, x.contiguous(), group)
        return parts

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        parts = gradients[0].contiguous()
        local_gradient = torch.empty_like(parts[0])
        reduce_parts(local_gradient, parts, ctx.group, by_all_to_all=ctx.by_all_to_all)
        return local_gradient, None, None


class GatheredAttention(nn.Module):
    """Attention of a rank's queries to the keys of the whole sequence, with dropout; has no parameters."""

    def __init__(
        self, core: ScaledDotProduct, group: dist.ProcessGroup, share: SequenceShare, *, by_all_to_all: bool
    ) -> None:
        """by_all_to_all: how gradients are summed over ranks, see reduce_parts."""
        super().__init__()
        self.core = core
        self._group, self._share, self._by_all_to_all = group, share, by_all_to_all

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Map q (B, heads, T / cp, head_dim), k and v (B, kv_heads, T / cp, head_dim) to the shape of q."""
        q, k, v = cast_to_autocast(q, k, v)
        gathered: Tensor = _Gather.apply(torch.stack((k, v)), self._group, self._by_all_to_all)  # type: ignore[no-untyped-call]
        # From (ranks, 2, B, kv_heads, T / cp, head_dim): positions come rank by rank, as in `places` below.
        k, v = gathered.permute(1, 2, 3, 0, 4, 5).flatten(3, 4)
        length, ranks = q.shape[2], self._group.size()
        shares = [SequenceShare(rank, ranks, self._share.balanced) for rank in range(ranks)]
        places = [share.positions(length * ranks, q.device) for share in shares]
        site, p = self.core.site, self.core.dropout if self.training else 0.0
        local_positions, all_positions = places[self._share.rank], torch.cat(places)
        return attend_plainly(q, k, v, local_positions, all_positions, self.core.rule, site=site, p=p)
