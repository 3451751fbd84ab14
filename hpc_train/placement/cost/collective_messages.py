"""Measure how the messages of an axis load a fabric, under any order of its nodes.

The pattern of an axis is built once (message_patterns.py) and measured for many orders.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from hpc_train.placement.cost.message_patterns import CountedPairs, Floats, Ints, ListedMessages, MessagePattern
from hpc_train.placement.fabric import Fabric, FabricLevel

DOMAIN_LEVEL = "domain"
"""The level of NVLink domains that span nodes."""

_MAX_COMPARED = 32
"""Entries of a row up to which comparing all pairs is faster than sorting."""


@dataclass(frozen=True)
class MeasuredPhase:
    """Load of one phase under several orders of the nodes, per byte on an edge."""

    seconds: Floats
    """[orders]: of one byte on every edge: the busiest uplink of any level, or a rank's own link inside its node."""
    busy_seconds: Floats
    """[orders]: the same next to busy neighbours, who leave this job only its share of the uplinks."""
    latency: Floats
    """[orders]: of one hop in the slowest group."""
    crossings: Floats
    """[orders]: messages times levels above the node that they cross."""


@dataclass(frozen=True)
class LevelLinks:
    """The links by which messages leave the groups of a level: a group's uplink, or each node's share of it."""

    index: Ints
    """[orders, positions]"""
    count: int
    bandwidth: Floats
    """[links], or [orders, links]"""
    share: Floats
    """`bandwidth` left for this job next to busy neighbours."""
    shared: bool
    """Whether a group has one link for all its nodes."""
    rails: int = 1
    """Links that each one of `index` consists of."""

    def split(self, rails: int) -> LevelLinks:
        """Return the links cut into one for each rail, with an equal part of the bandwidth."""
        bandwidth = np.repeat(self.bandwidth / rails, rails, axis=-1)
        share = bandwidth if self.share is self.bandwidth else np.repeat(self.share / rails, rails, axis=-1)
        return LevelLinks(self.index, self.count * rails, bandwidth, share, self.shared, rails)

    @staticmethod
    def build(level: FabricLevel, group: Ints) -> LevelLinks:
        """Build the links of a level.

        group: [orders, positions], the level's group of the node at each position. A switch has one uplink for all its
        nodes. An NVLink domain has none: traffic leaves it by the NICs of the sending node, so each node has an equal
        share and no more.
        """
        if level.name != DOMAIN_LEVEL:
            return LevelLinks(group, len(level.uplink), level.uplink, level.busy_uplink, True)
        each = (level.uplink / np.bincount(level.group))[group]
        # The link of a position is the position itself.
        return LevelLinks(np.broadcast_to(np.arange(group.shape[1]), group.shape), group.shape[1], each, each, False)

    def find_busiest(self, load: Floats) -> tuple[Floats, Floats]:
        """Return [orders] seconds of the busiest link, twice: alone and beside neighbours. load: [orders, links]."""
        alone = (load / self.bandwidth).max(axis=1)
        return alone, alone if self.share is self.bandwidth else (load / self.share).max(axis=1)


def has_uniform_uplinks(level: FabricLevel) -> bool:
    """Whether all groups of the level have the same uplink."""
    return bool((level.uplink == level.uplink[0]).all())


def measure_orders(pattern: MessagePattern, fabric: Fabric, orders: Ints) -> MeasuredPhase:
    """Measure the load of a pattern under each order. orders: [orders, positions], the node at every position."""
    return (
        _measure_messages(pattern, fabric, orders)
        if isinstance(pattern, ListedMessages)
        else _measure_pairs(pattern, fabric, orders)
    )


def count_loads(pattern: MessagePattern, level: FabricLevel, orders: Ints) -> tuple[Floats, Floats]:
    """Count the messages that (leave, enter) every group of a level: two arrays [orders, groups]."""
    if isinstance(pattern, CountedPairs):
        out = _count_pair_loads(pattern, level.group[orders], level.group[orders], len(level.uplink))[0]
        return out, out
    group = level.group[orders]
    source, target = group[:, pattern.source], group[:, pattern.target]
    out, into = (_count_message_loads(pattern, end, source != target, len(level.uplink)) for end in (source, target))
    return out, into


def _measure_messages(messages: ListedMessages, fabric: Fabric, orders: Ints) -> MeasuredPhase:
    """Return what single messages cost under each order: over every level's links, the busiest one decides."""
    seconds = np.full(len(orders), messages.port / fabric.get_inside_bandwidth(messages.peers))
    busy_seconds = seconds
    latency = np.full((len(orders), len(messages.source)), fabric.levels[0].latency)
    crossings = np.zeros(len(orders))
    for number, level in enumerate(fabric.levels):
        # All orders load equal nodes equally, so the level of the nodes is the same for every order: no need to count.
        if not number and has_uniform_uplinks(level):
            seconds = busy_seconds = np.maximum(seconds, messages.count_rail_load(level.rails) / level.uplink[0])
            continue
        group = level.group[orders]
        crossed = group[:, messages.source] != group[:, messages.target]
        links = LevelLinks.build(level, group)
        if messages.rail is not None and level.rails > 1:
            links = links.split(level.rails)
        source, target = (_find_links(links, end, messages.rail) for end in (messages.source, messages.target))
        load = _count_message_loads(messages, source, crossed, links.count)
        # A ring enters every group as often as it leaves it; a node's own share of a link need not balance.
        if not (messages.closed and links.shared):
            load = np.maximum(load, _count_message_loads(messages, target, crossed, links.count))
        alone, shared = links.find_busiest(load)
        seconds, busy_seconds = np.maximum(seconds, alone), np.maximum(busy_seconds, shared)
        if number:
            # Levels come innermost first, so the last write is the highest level that a message crosses.
            latency[crossed] = level.latency
            crossings += crossed @ messages.weight
    return MeasuredPhase(seconds, busy_seconds, _measure_hops(messages, fabric.inside_latency, latency), crossings)


def _find_links(links: LevelLinks, end: Ints, rail: Ints | None) -> Ints:
    """Return [orders, messages]: the link of each message at one end. end: [messages], its position there."""
    index = links.index[:, end]
    return index if links.rails == 1 or rail is None else index * links.rails + rail


def _count_message_loads(messages: ListedMessages, link: Ints, crossed: NDArray[np.bool_], count: int) -> Floats:
    """Count the messages on every link, [orders, links].

    link: [orders, messages], the link of each message; crossed: whether the message leaves its group at all.
    """
    # One bincount for all orders: the links of order i are numbered from i * count on.
    key = np.nonzero(crossed)[0] * count + link[crossed]
    weight = np.broadcast_to(messages.weight, crossed.shape)[crossed]
    return np.asarray(np.bincount(key, weight, len(link) * count).reshape(-1, count), np.float64)


def _measure_hops(messages: ListedMessages, inside_latency: float, latency: Floats) -> Floats:
    """Return [orders]: seconds of one hop in the slowest group. latency: [orders, messages] of those between nodes.

    A ring has no barrier: the data that a rank waits for has passed all edges before it one after the other, so a hop
    takes the mean of the edges' latencies. Where messages do not wait for one another the slowest edge decides.
    """
    if messages.slowest:
        within = inside_latency if messages.inside.any() else 0.0
        return np.asarray(np.maximum(latency.max(axis=1, initial=0.0), within))
    size = len(messages.inside)
    key = messages.row + size * np.arange(len(latency))[:, None]
    total = np.bincount(key.ravel(), latency.ravel(), size * len(latency)).reshape(-1, size)
    return np.asarray((total + messages.inside * inside_latency).max(axis=1) / messages.count)


def _measure_pairs(pairs: CountedPairs, fabric: Fabric, orders: Ints) -> MeasuredPhase:
    """Return the same where each member of a group sends to every other one, counted by nodes and not listed."""
    peers = int(pairs.members.max()) - 1
    seconds = busy_seconds = np.full(len(orders), peers / fabric.get_inside_bandwidth(peers))
    shape = (len(orders), len(pairs.copies))
    near = np.full(shape, pairs.count, np.float64)
    latency = np.zeros(shape)
    crossings = np.zeros(len(orders))
    slower = fabric.inside_latency
    for number, level in enumerate(fabric.levels):
        group = level.group[orders]
        links = LevelLinks.build(level, group)
        load, with_neighbours = _count_pair_loads(pairs, group, links.index, links.count)
        alone, shared = links.find_busiest(load)
        seconds, busy_seconds = np.maximum(seconds, alone), np.maximum(busy_seconds, shared)
        # Pairs that this level holds and the one below did not are separated by that one: they take its latency.
        latency += (with_neighbours - near) * slower
        near, slower = with_neighbours, level.latency
        if number:
            crossings += (pairs.count**2 - with_neighbours) @ pairs.copies
    latency += (pairs.count**2 - near) * slower
    return MeasuredPhase(seconds, busy_seconds, latency.max(axis=1) / (pairs.count * (pairs.count - 1)), crossings)


def _count_pair_loads(pairs: CountedPairs, group: Ints, link: Ints, links: int) -> tuple[Floats, Floats]:
    """Return (messages on every link [orders, links], pairs of a row inside a group [orders, rows]).

    group, link: [orders, positions], the group of each position and the link by which its messages leave. A rank sends
    one message to each rank of its row outside its group; a rank counts as a pair with itself.
    """
    count = len(pairs.copies)
    order = np.arange(len(group))[:, None]
    members = _count_members(pairs, group[:, pairs.position])
    out = pairs.copies[pairs.row] * pairs.members * (pairs.count - members)
    load = np.bincount((order * links + link[:, pairs.position]).ravel(), out.ravel(), len(group) * links)
    pair_loads = np.bincount((order * count + pairs.row).ravel(), (pairs.members * members).ravel(), len(group) * count)
    return np.asarray(load.reshape(-1, links), np.float64), np.asarray(pair_loads.reshape(-1, count), np.float64)


def _count_members(pairs: CountedPairs, group: Ints) -> Ints:
    """Return [orders, entries]: ranks of the entry's row in the same group as the entry. group: [orders, entries]."""
    width = pairs.width
    # Short rows of one length: compare all entries with all, which needs no sorting.
    if width and width <= _MAX_COMPARED:
        table, members = group.reshape(len(group), -1, width), pairs.members.reshape(-1, width)
        same = table[..., :, None] == table[..., None, :]
        return np.asarray(np.einsum("orij,rj->ori", same, members).reshape(group.shape), np.int64)
    row = np.arange(len(group))[:, None] * len(pairs.copies) + pairs.row
    _, inverse = np.unique(row * (group.max() + 1) + group, return_inverse=True)
    counted = np.bincount(inverse.ravel(), np.broadcast_to(pairs.members, row.shape).ravel())
    return np.asarray(counted[inverse.reshape(row.shape)], np.int64)
