"""Choose which local rank takes which GPU of its node, for nodes whose GPUs are not all linked alike.

The cost is that of the placement of nodes (cost/): seconds = calls x bytes of a phase / bandwidth of the busiest
link, for every flow, one after the other, all groups of an axis at once. In a node the links are those between pairs:

- A ring collective goes over all links between its group's GPUs, since NCCL cuts it into rings and trees over them. The
  narrowest cut bounds it: of the buffer, the share of the GPUs outside a set has to enter the set.
- Single messages go over the link of the two GPUs at their ends.

All nodes get the same order, so that a rail still joins the same local rank of all nodes. Latency is the same for every
order. Up to 8 GPUs every order is tried.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from hpc_train.placement.cost.collective_phases import Backend, CollectivePhase, EdgeKind, list_edges, list_phases
from hpc_train.placement.mesh_groups import list_groups
from hpc_train.placement.node.gpu_links import GpuLinks
from hpc_train.traffic.axes import Flow

MAX_GPUS = 8
"""Maximum number of GPUs for which every order is tried: 40,320 of them."""
MIN_GAIN = 0.01
"""Minimum gain; below it local rank n keeps GPU n."""
_TOLERANCE = 1e-9
"""Relative difference that counts as equal."""

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]


@dataclass(frozen=True)
class GpuOrder:
    """Which GPU each local rank takes, and what it gains."""

    gpus: tuple[int, ...]
    """gpus[n]: number of the GPU of local rank n."""
    identity: float
    """Seconds a step of communication inside a node where local rank n has GPU n."""
    placed: float
    reason: str

    @property
    def is_identity(self) -> bool:
        """Whether local rank n has GPU n."""
        return self.gpus == tuple(range(len(self.gpus)))


@dataclass(frozen=True)
class LocalPhase:
    """One phase of a flow, as the local ranks of a node see it."""

    groups: tuple[tuple[int, ...], ...]
    """Local ranks of each group that are in one node, two or more; groups alike in several nodes once."""
    edges: Literal["ring", "pairs", "closed", "open", "star"]
    """ring: all links of the group share it; closed and open: single messages to the next rank."""
    moved: float
    """Bytes a step on each edge."""
    ranks: int
    """Ranks of a whole group, in this node and others."""


def order_gpus(links: GpuLinks, sizes: Mapping[str, int], flows: Sequence[Flow], backend: Backend = "nccl") -> GpuOrder:
    """Choose the GPU of each local rank. sizes: mesh axis -> degree; ranks are row-major, and nodes consecutive."""
    count = links.count
    identity = tuple(range(count))
    if count < 2 or links.is_uniform:
        return GpuOrder(identity, 0.0, 0.0, "all GPUs of a node are joined alike")
    if count > MAX_GPUS:
        return GpuOrder(identity, 0.0, 0.0, f"more than {MAX_GPUS} GPUs per node: their order stays")
    phases = list_local_phases(sizes, flows, count, backend)
    orders = np.array(list(itertools.permutations(range(count))), np.int64)
    seconds = compute_order_seconds(links, phases, orders)
    before, best = float(seconds[0]), float(seconds.min())
    if best >= before * (1 - MIN_GAIN):
        return GpuOrder(identity, before, before, "no order of a node's GPUs is faster than theirs by 1 %")
    fastest = orders[seconds <= best * (1 + _TOLERANCE)]
    moved = np.count_nonzero(fastest != np.arange(count), axis=1)
    chosen = tuple(fastest[int(moved.argmin())].tolist())
    gain = f"{before / best:.2f}x faster" if best > 0 else "faster"
    return GpuOrder(chosen, before, best, f"groups take the wider links of a node: communication inside it is {gain}")


def list_local_phases(
    sizes: Mapping[str, int], flows: Sequence[Flow], per_node: int, backend: Backend
) -> list[LocalPhase]:
    """List the phases of all flows with messages inside a node."""
    phases = []
    for flow in flows:
        groups = list_groups(sizes, flow.axes)
        local = sorted(
            {
                tuple(int(rank) % per_node for rank in members)
                for group in groups
                for _, part in itertools.groupby(group.tolist(), key=lambda rank: rank // per_node)
                if len(members := list(part)) > 1
            }
        )
        for phase in list_phases(flow, groups.shape[1], backend) if local else ():
            moved = flow.calls * phase.fraction * flow.bytes
            phases.append(LocalPhase(tuple(local), _classify_edges(phase), moved, groups.shape[1]))
    return phases


def _classify_edges(phase: CollectivePhase) -> Literal["ring", "pairs", "closed", "open", "star"]:
    if phase.edges in ("pairs", "star"):
        return phase.edges
    if phase.hops > 1:
        return "ring"
    return "closed" if phase.edges == "ring" else "open"


def compute_order_seconds(links: GpuLinks, phases: Sequence[LocalPhase], orders: Ints) -> Floats:
    """Return [orders]: seconds per step of communication inside a node. orders: [orders, local ranks], their GPUs."""
    tables = _RateTables(links)
    seconds = np.zeros(len(orders))
    for phase in phases:
        slowest = np.zeros(len(orders))
        for group in phase.groups:
            gpus = orders[:, group]
            slowest = np.maximum(slowest, _compute_group_seconds(tables, phase, gpus))
        seconds += phase.moved * slowest
    return seconds


def _compute_group_seconds(tables: _RateTables, phase: LocalPhase, gpus: Ints) -> Floats:
    """Return [orders]: seconds of one byte on every edge of a phase. gpus: [orders, members]."""
    members = gpus.shape[1]
    if phase.edges == "ring":
        return tables.get_ring_seconds(gpus)
    if phase.edges == "pairs":
        return tables.get_exchange_seconds(gpus)
    # The part of a larger group that is in this node is an open chain: its ends continue in other nodes.
    closed = phase.edges == "closed" and members == phase.ranks
    kind: EdgeKind = "star" if phase.edges == "star" else "ring" if closed else "chain"
    source, target = list_edges(kind, members, 0)
    seconds: Floats = (1 / tables.pair[gpus[:, source], gpus[:, target]]).max(axis=1, initial=0.0)
    return seconds


class _RateTables:
    """Seconds per byte of groups of GPUs, computed once for each set of GPUs."""

    def __init__(self, links: GpuLinks) -> None:
        self.links = links
        port = links.port * links.share
        self.pair: Floats = np.where(links.direct > 0, links.direct, port)
        """[gpus, gpus]: bytes/s between two GPUs without other traffic."""
        self.pair[self.pair == 0] = np.inf
        self._ring: dict[int, float] = {}
        self._exchange: dict[int, float] = {}

    def get_ring_seconds(self, gpus: Ints) -> Floats:
        """Return [orders]: seconds of a ring collective with one byte on each edge."""
        return self._look_up(gpus, self._ring, self._compute_ring)

    def get_exchange_seconds(self, gpus: Ints) -> Floats:
        """Return [orders]: seconds in which every GPU sends one byte to each other of its group."""
        return self._look_up(gpus, self._exchange, self._compute_exchange)

    def _look_up(self, gpus: Ints, table: dict[int, float], compute: Callable[[list[int]], float]) -> Floats:
        masks, inverse = np.unique((1 << gpus).sum(axis=1), return_inverse=True)
        for mask in masks.tolist():
            if mask not in table:
                table[mask] = compute([gpu for gpu in range(self.links.count) if mask >> gpu & 1])
        return np.array([table[mask] for mask in masks.tolist()])[inverse.ravel()]

    def _compute_ring(self, members: list[int]) -> float:
        """Return the seconds of the narrowest cut of a group.

        One byte on each edge of a ring of n is a buffer of n / (n - 1) bytes, an n-th of it on each GPU.
        """
        count, slowest = len(members), 0.0
        for size in range(1, count):
            for inside in itertools.combinations(members, size):
                outside = [gpu for gpu in members if gpu not in inside]
                enters = (count - size) / (count - 1)
                slowest = max(slowest, enters / self._compute_cut(list(inside), outside))
        return slowest

    def _compute_cut(self, inside: list[int], outside: list[int]) -> float:
        """Return bytes/s from the GPUs outside a set into it."""
        between = np.ix_(inside, outside)
        direct = self.links.direct[between]
        # Two GPUs with a link of their own leave their ports alone. The ports of all others carry as much as their
        # best way across allows, and the side with fewer ports bounds the sum.
        share = np.where(direct > 0, 0.0, self.links.share[between])
        ports = self.links.port * min(float(share.max(axis=1).sum()), float(share.max(axis=0).sum()))
        return float(direct.sum()) + ports

    def _compute_exchange(self, members: list[int]) -> float:
        slowest = 0.0
        for gpu in members:
            others = [other for other in members if other != gpu]
            direct = [self.links.direct[gpu, other] for other in others]
            slowest = max([slowest, *(1 / bandwidth for bandwidth in direct if bandwidth)])
            over_port = [self.links.share[gpu, other] for other, link in zip(others, direct, strict=True) if not link]
            if over_port and self.links.port:
                slowest = max(slowest, sum(1 / share for share in over_port) / self.links.port)
        return slowest
