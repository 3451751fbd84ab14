"""Parameters that two stages of a pipeline own under one name: a tied embedding, and the head that uses it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from hpc_train.api import World
from hpc_train.parallel.axes import index


@dataclass(frozen=True)
class Tie:
    """One such parameter, as a rank that holds at least one copy of it sees it."""

    stages: tuple[int, ...]
    """All stages with a copy; the first owns it."""
    ranks: tuple[int, ...]
    """The pp rank of each of them."""
    mine: Mapping[int, nn.Parameter]
    """This rank's copies by stage."""


def ties(names: Sequence[set[str]], ranks: Sequence[int], parts: Mapping[int, nn.Module]) -> list[Tie]:
    """What this rank shares. names: the trained parameters of each stage; ranks: of each stage; parts: this rank's."""
    found = []
    for name in sorted({name for stage in names for name in stage}):
        stages = tuple(stage for stage, held in enumerate(names) if name in held)
        mine = {stage: parts[stage].get_parameter(name) for stage in stages if stage in parts}
        if len(stages) > 1 and mine:
            found.append(Tie(stages, tuple(ranks[stage] for stage in stages), mine))
    return found


def borrowed(ties: Sequence[Tie]) -> frozenset[nn.Parameter]:
    """This rank's copies that another stage owns."""
    return frozenset(p for tie in ties for stage, p in tie.mine.items() if stage != tie.stages[0])


@torch.no_grad()
def add_up(ties: Sequence[Tie], world: World) -> None:
    """Give every copy the sum of the gradients of all copies, bit by bit the same on every rank.

    Copies are sharded alike over the other axes, so each rank talks to its peers in its own pipeline.
    """
    for tie in ties:
        gradients = _exchanged(tie, world)
        total = torch.stack([gradients[stage] for stage in tie.stages]).sum(0)
        for parameter in tie.mine.values():
            _local(parameter).copy_(total)


def _exchanged(tie: Tie, world: World) -> dict[int, Tensor]:
    """The gradient of each copy, by stage."""
    group, rank = world.mesh["pp"].get_group(), index(world, "pp")
    have = {stage: _local(parameter) for stage, parameter in tie.mine.items()}
    operations = []
    for stage, peer in zip(tie.stages, tie.ranks, strict=True):
        if stage in tie.mine:
            sent = have[stage].contiguous()
            others = sorted(set(tie.ranks) - {rank})
            operations += [dist.P2POp(dist.isend, sent, group=group, group_peer=other) for other in others]
        else:
            have[stage] = torch.empty_like(next(iter(have.values())), memory_format=torch.contiguous_format)
            operations.append(dist.P2POp(dist.irecv, have[stage], group=group, group_peer=peer))
    for work in dist.batch_isend_irecv(operations) if operations else []:
        work.wait()
    return have


def _local(parameter: nn.Parameter) -> Tensor:
    assert parameter.grad is not None
    return parameter.grad.to_local() if isinstance(parameter.grad, DTensor) else parameter.grad
