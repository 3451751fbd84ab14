"""Assign the GPUs of a node to its local ranks, and choose the processors and the NIC of each rank accordingly."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass

from hpc_train.config.run import RunConfig
from hpc_train.errors import UserError
from hpc_train.placement.node.cpu_binding import RankSeat
from hpc_train.runtime.host_info import ProcessInfo

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class GpuAssignment:
    """Which GPU each local rank takes, the same on all nodes."""

    gpus: tuple[int, ...] = ()
    """gpus[n]: the GPU of local rank n, by the number of the local rank that the launcher would give it; empty: its
    own."""
    reason: str | None = None
    """One line for a person; None if there is nothing to choose."""


def assign_gpus(config: RunConfig, nodes: Sequence[Sequence[ProcessInfo]]) -> GpuAssignment:
    """Assign the GPUs of all nodes, on process 0. nodes: the ProcessInfo of each node's ranks, by local rank.

    Nothing moves if the launcher's order is asked for, if the launcher binds one GPU to each task, or if the nodes do
    not agree on their links. Never raises: the launcher's order always works.
    """
    gpus_per_node = len(nodes[0])
    if (
        config.launch.placement == "launcher"
        or gpus_per_node < 2
        or any(len(members) != gpus_per_node for members in nodes)
    ):
        return GpuAssignment()
    if any(info.gpu is None or info.visible_gpus != gpus_per_node for members in nodes for info in members):
        return GpuAssignment()
    links = [list_rank_links(members) for members in nodes]
    if not links[0]:
        return GpuAssignment()
    if any(other != links[0] for other in links[1:]):
        return GpuAssignment(reason="local rank n takes GPU n: the nodes' GPUs are not joined alike")
    try:
        return _order_gpus(config, links[0], len(nodes), gpus_per_node)
    except UserError as error:
        return GpuAssignment(reason=f"local rank n takes GPU n: {error}")
    except Exception as error:
        log.warning("the order of GPUs could not be chosen", exc_info=error)
        return GpuAssignment(reason="local rank n takes GPU n: the search for a better order failed")


def list_rank_links(members: Sequence[ProcessInfo]) -> dict[tuple[str, str], str]:
    """Map pairs of local ranks, as texts, to the kind of the link between their GPUs; empty if a GPU is unknown."""
    rank_of = {info.gpu: str(info.local) for info in members if info.gpu is not None}
    kinds: dict[tuple[str, str], str] = {}
    for pair, kind in members[0].gpu_links.items():
        a, _, b = pair.partition(" ")
        if a in rank_of and b in rank_of:
            kinds[min(rank_of[a], rank_of[b], key=int), max(rank_of[a], rank_of[b], key=int)] = kind
    return kinds if len(rank_of) == len(members) else {}


def _order_gpus(config: RunConfig, kinds: dict[tuple[str, str], str], nodes: int, gpus_per_node: int) -> GpuAssignment:
    # Most machines have GPUs that are joined alike: those need no traffic and no search.
    from hpc_train.placement.node.gpu_links import build_listed_links

    links = build_listed_links([str(local) for local in range(gpus_per_node)], kinds)
    if links.is_uniform:
        return GpuAssignment()
    from hpc_train.placement.node.gpu_order import order_gpus
    from hpc_train.traffic.flows import compute_flows, list_axis_sizes

    world = nodes * gpus_per_node
    order = order_gpus(links, list_axis_sizes(config, world), compute_flows(config, world))
    if order.is_identity:
        return GpuAssignment()
    return GpuAssignment(order.gpus, order.reason)


def seat_ranks(members: Sequence[ProcessInfo], gpus: Sequence[int]) -> list[RankSeat]:
    """Return the seat of each local rank of a node: the processors it may use, and those next to the GPU it takes."""
    gpu_order = gpus or range(len(members))
    return [RankSeat(info.seat.allowed, members[gpu].seat.near) for info, gpu in zip(members, gpu_order, strict=True)]
