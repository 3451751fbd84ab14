"""The cost of a placement, message by message in plain Python, with which the vectorised one is compared."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise, product

from hpc_train.config.parallel import AXES
from hpc_train.placement.fabric import Fabric
from hpc_train.traffic.axes import Flow

Message = tuple[int, int, float]
"""From rank, to rank, bytes."""


def plain_cost(
    fabric: Fabric, sizes: Mapping[str, int], flows: Sequence[Flow], nodes: Sequence[int], backend: str
) -> float:
    total = 0.0
    for flow in flows:
        groups = group_ranks(sizes, flow.axes)
        inside = all(group[0] // fabric.ranks_per_node == group[-1] // fabric.ranks_per_node for group in groups)
        for phase in zip(*(list(phases(flow, group, backend, inside)) for group in groups), strict=True):
            total += flow.calls * phase_seconds(fabric, nodes, phase)
    return total


def group_ranks(sizes: Mapping[str, int], axes: Sequence[str]) -> list[list[int]]:
    members = defaultdict(list)
    for rank, at in enumerate(product(*(range(sizes.get(axis, 1)) for axis in AXES))):
        where = dict(zip(AXES, at, strict=True))
        members[tuple(index for axis, index in where.items() if axis not in axes)].append(rank)
    return list(members.values())


def phases(flow: Flow, group: list[int], backend: str, inside: bool) -> Iterator[tuple[int, list[Message]]]:
    """Yield (hops, messages) of each phase of one group: what one call sends."""
    n, size = len(group), flow.bytes
    if n == 1:
        return
    gloo = backend == "gloo"
    around = list(zip(group, group[1:] + group[:1], strict=True))
    along = list(pairwise(group))
    name = flow.collective
    exchanged = name == "reduce_scatter" and gloo and inside
    if name == "all_reduce" or (name == "reduce_scatter" and gloo and not inside):
        yield 2 * (n - 1), [(a, b, 2 * (n - 1) * size / n) for a, b in around]
    elif name == "all_to_all" or exchanged:
        yield n - 1, [(a, b, size / n) for a in group for b in group if a != b]
    elif name in ("all_gather", "reduce_scatter"):
        yield n - 1, [(a, b, (n - 1) * size / n) for a, b in around]
    elif name == "send_recv":
        yield 1, [(a, b, size) for a, b in (around if flow.ring else along)]
    elif name == "broadcast" and gloo:
        have = 1
        while have < n:
            yield 1, [(group[i], group[i + have], size) for i in range(have) if i + have < n]
            have *= 2
    elif name == "reduce" and gloo:
        yield n - 1, [(a, b, (n - 1) * size / n) for a, b in around]
        yield 1, [(a, group[0], size / n) for a in group[1:]]
    else:
        yield n - 1, [(a, b, size) for a, b in along]


def phase_seconds(fabric: Fabric, nodes: Sequence[int], phase: Sequence[tuple[int, list[Message]]]) -> float:
    """Return the seconds of a phase. phase: the messages of every group."""
    hop = 0.0
    moved: dict[object, float] = defaultdict(float)
    for hops, messages in phase:
        latencies = []
        for a, b, size in messages:
            x, y = nodes[a // fabric.ranks_per_node], nodes[b // fabric.ranks_per_node]
            latency = fabric.inside_latency
            if x == y:
                moved["out", "rank", a] += size / fabric.inside_bandwidth
                moved["in", "rank", b] += size / fabric.inside_bandwidth
            for level in fabric.levels:
                leaves, enters = int(level.group[x]), int(level.group[y])
                if leaves != enters and level.name == "domain":
                    latency = level.latency
                    moved["out", "NICs", x] += size / (level.uplink[leaves] / list(level.group).count(leaves))
                    moved["in", "NICs", y] += size / (level.uplink[enters] / list(level.group).count(enters))
                elif leaves != enters:
                    latency = level.latency
                    moved["out", level.name, leaves] += size / level.uplink[leaves]
                    moved["in", level.name, enters] += size / level.uplink[enters]
            latencies.append(latency)
        hop = max(hop, max(latencies) if hops == 1 else math.fsum(latencies) / len(latencies))
    return phase[0][0] * hop + max(moved.values())
