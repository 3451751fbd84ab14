"""Fabrics, meshes and flows for tests of placement: made from counts, taken from the study, or drawn by hypothesis."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence

import numpy as np
from hypothesis import strategies as st
from numpy.typing import NDArray

from hpc_train.config.parallel import AXES
from hpc_train.placement.fabric import Fabric, FabricLevel
from hpc_train.traffic.axes import Flow

GB = 1e9
COLLECTIVES = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "broadcast", "reduce", "send_recv")


def dense(keys: Sequence[object]) -> NDArray[np.int64]:
    """Return the index of every key, in the order of first appearance."""
    index: dict[object, int] = {}
    return np.array([index.setdefault(key, len(index)) for key in keys], np.int64)


def tree_fabric(
    places: Sequence[tuple[object, ...]],
    ranks_per_node: int = 1,
    nic: float = GB,
    tapers: Sequence[float] = (1.0, 1.0),
    inside: float = math.inf,
    latencies: Sequence[float] = (0.0, 0.0, 0.0),
    inside_latency: float = 0.0,
    names: Sequence[str] = ("leaf", "group"),
) -> Fabric:
    """Return a fabric of two levels. places: (leaf, group) of every node, the leaf within the group; tapers: of a leaf
    and, on top of it, of a group.

    The uplinks of a group are those of all its nodes together, divided by the product of tapers up to it.
    """
    count = len(places)
    levels = [FabricLevel("node", np.arange(count), np.full(count, nic), latencies[0])]
    taper = 1.0
    for number, name in enumerate(names[: len(places[0])]):
        taper *= tapers[number]
        group = dense([place[number:] for place in places])
        levels.append(FabricLevel(name, group, np.bincount(group) * nic / taper, latencies[number + 1]))
    return Fabric(tuple(f"n{i}" for i in range(count)), ranks_per_node, inside, inside_latency, tuple(levels))


def next_to_others(fabric: Fabric, others: Sequence[int]) -> Fabric:
    """Return the same job on switches with this many more nodes of other jobs, which share the uplinks."""
    node, *above = fabric.levels
    levels = [node]
    for level in above:
        own = np.bincount(level.group)
        below = own + np.array([others[group % len(others)] for group in range(len(own))])
        uplink = level.uplink * below / own
        levels.append(FabricLevel(level.name, level.group, uplink, level.latency, uplink * own / below))
    return Fabric(fabric.nodes, fabric.ranks_per_node, fabric.inside_bandwidth, fabric.inside_latency, tuple(levels))


def reordered(fabric: Fabric, order: Sequence[int]) -> Fabric:
    """Return the same nodes in another order, in which a launcher might list them."""
    levels = []
    for level in fabric.levels:
        old = level.group[list(order)]
        group = dense(old.tolist())
        uplink = np.empty(len(level.uplink))
        uplink[group] = level.uplink[old]
        share = None
        if level.share is not None:
            share = np.empty(len(level.share))
            share[group] = level.share[old]
        levels.append(FabricLevel(level.name, group, uplink, level.latency, share))
    names = tuple(fabric.nodes[node] for node in order)
    return Fabric(names, fabric.ranks_per_node, fabric.inside_bandwidth, fabric.inside_latency, tuple(levels))


def factorisations(world: int) -> list[dict[str, int]]:
    """Return all meshes of a world."""
    divisors = [d for d in range(1, world + 1) if world % d == 0]
    sizes = itertools.product(divisors, repeat=len(AXES))
    return [dict(zip(AXES, mesh, strict=True)) for mesh in sizes if math.prod(mesh) == world]


@st.composite
def fabrics(draw: st.DrawFn, least: int = 1, most: int = 8) -> Fabric:
    """Draw up to `most` nodes on uneven leaves in uneven groups, in any order, tapered or not, some nodes slower."""
    count = draw(st.integers(least, most))
    leaf = st.integers(0, 3)
    leaves = draw(st.lists(leaf, min_size=count, max_size=count))
    group_of = draw(st.lists(st.integers(0, 2), min_size=4, max_size=4))
    fabric = tree_fabric(
        [(leaf, group_of[leaf]) for leaf in leaves],
        ranks_per_node=draw(st.sampled_from([1, 2, 3, 4])),
        tapers=(draw(st.sampled_from([1.0, 2.0, 7.0])), draw(st.sampled_from([1.0, 1.5, 4.0]))),
        inside=draw(st.sampled_from([math.inf, 10 * GB, 0.5 * GB])),
        latencies=draw(st.sampled_from([(0.0, 0.0, 0.0), (1e-5, 2e-5, 4e-5), (1e-3, 5e-2, 7e-2)])),
        inside_latency=draw(st.sampled_from([0.0, 1e-6])),
        names=draw(st.sampled_from([("leaf", "group"), ("domain", "leaf")])),
    )
    if draw(st.booleans()):
        fabric = next_to_others(fabric, [draw(st.integers(0, 6)) for _ in range(4)])
    if draw(st.booleans()):
        slow = draw(st.lists(st.sampled_from([1.0, 0.5]), min_size=count, max_size=count))
        node = fabric.levels[0]
        uneven = FabricLevel(node.name, node.group, node.uplink * np.array(slow), node.latency)
        fabric = Fabric(
            fabric.nodes,
            fabric.ranks_per_node,
            fabric.inside_bandwidth,
            fabric.inside_latency,
            (uneven, *fabric.levels[1:]),
        )
    return fabric


@st.composite
def meshes(draw: st.DrawFn, world: int) -> dict[str, int]:
    return draw(st.sampled_from(factorisations(world)))


@st.composite
def flow_lists(draw: st.DrawFn) -> list[Flow]:
    """Draw one to four flows on one or two axes."""
    pairs = st.sampled_from([(axis,) for axis in AXES] + [("dp_replicate", "dp_shard"), ("dp_shard", "cp")])
    flow = st.builds(
        Flow,
        axes=pairs,
        collective=st.sampled_from(COLLECTIVES),
        bytes=st.sampled_from([1e3, 1e8, 3e9]),
        calls=st.sampled_from([1.0, 3.0]),
        what=st.just("data"),
        ring=st.booleans(),
    )
    return draw(st.lists(flow, min_size=1, max_size=4))


@st.composite
def problems(draw: st.DrawFn, least: int = 1, most: int = 8) -> tuple[Fabric, dict[str, int], list[Flow]]:
    fabric = draw(fabrics(least, most))
    sizes = draw(meshes(len(fabric.nodes) * fabric.ranks_per_node))
    return fabric, sizes, draw(flow_lists())
