"""The messages of one phase of a collective, for all groups of an axis, between positions of nodes.

A pattern is built once and measured under many orders of the nodes (collective_messages.py). Only whole nodes move, so
what matters is which positions a message joins, and equal messages are stored once with a weight.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from hpc_train.placement.cost.collective_phases import CollectivePhase, list_edges
from hpc_train.placement.mesh_groups import GroupRows

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]


@dataclass(frozen=True)
class ListedMessages:
    """Messages that are few enough to list, between positions of nodes; those inside a node are only counted."""

    source: Ints
    """[messages]: position."""
    target: Ints
    row: Ints
    """[messages]: row of the groups that the message is of."""
    weight: Floats
    """[messages]: equal messages that it stands for."""
    inside: Ints
    """[rows]: messages inside a node."""
    count: int
    """Messages of one group, inside and between nodes."""
    port: float
    """Maximum number of messages that one rank sends, or receives, inside its node."""
    peers: int
    """Ranks of its group in its node over whose links a rank can spread its messages, where these are fewest."""
    slowest: bool
    """Whether the slowest message is the latency, or the mean of them all."""

    closed: bool
    """Whether they form rings: as many enter a part of the fabric as leave it."""
    rail: Ints | None = None
    """[messages]: rail of each, if a message takes one NIC only; None: NCCL spreads them over all NICs of the node."""

    @cached_property
    def node_load(self) -> float:
        """Maximum number of messages that leave, or enter, one node; the same in any order."""
        return float(max(np.bincount(end, self.weight).max(initial=0.0) for end in (self.source, self.target)))

    def count_rail_load(self, rails: int) -> float:
        """Return node_load as if all rails were as busy as the busiest: what the node would send over all its NICs."""
        if self.rail is None or rails == 1:
            return self.node_load
        ends = (self.source, self.target)
        return rails * float(max(np.bincount(end * rails + self.rail, self.weight).max(initial=0.0) for end in ends))


@dataclass(frozen=True)
class CountedPairs:
    """Messages between all pairs of a group: too many to list, so the group's members in each subtree are counted."""

    position: Ints
    """[entries]"""
    row: Ints
    """[entries]"""
    members: Ints
    """[entries]: ranks of the row's group at the position."""
    copies: Floats
    """[rows]"""
    count: int
    """Ranks of a group."""

    @cached_property
    def width(self) -> int:
        """Entries of each row; 0 if rows differ."""
        entries = np.bincount(self.row)
        return int(entries[0]) if (entries == entries[0]).all() else 0


MessagePattern = ListedMessages | CountedPairs


def build_pattern(rows: GroupRows, phase: CollectivePhase) -> MessagePattern:
    """Build the messages of one phase of a collective, for all groups of an axis."""
    return _count_pairs(rows) if phase.edges == "pairs" else _list_messages(rows, phase)


def split_by_rail(
    messages: ListedMessages, phase: CollectivePhase, ranks: Ints, ranks_per_node: int, rails: int
) -> ListedMessages:
    """Give each message of a phase that nothing follows (send_recv) the rail whose NIC it takes.

    NCCL cuts a ring's buffer into channels over all NICs, but sends a message to another rank over one: that next to
    the receiver, which the sender reaches over NVLink. ranks: [groups, ranks of a group].
    """
    source, target = (ranks[:, end] for end in list_edges(phase.edges, ranks.shape[1], phase.round))
    between = source // ranks_per_node != target // ranks_per_node
    source, target = source[between], target[between]
    rail = target % ranks_per_node * rails // ranks_per_node
    ends, weight = np.unique(
        np.stack([source // ranks_per_node, target // ranks_per_node, rail]), axis=1, return_counts=True
    )
    return replace(
        messages,
        source=ends[0],
        target=ends[1],
        row=np.zeros(len(weight), np.int64),
        weight=weight.astype(np.float64),
        rail=ends[2],
    )


def _list_messages(rows: GroupRows, phase: CollectivePhase) -> ListedMessages:
    source, target = list_edges(phase.edges, rows.position.shape[1], phase.round)
    sources, targets = rows.position[:, source], rows.position[:, target]
    between = sources != targets
    # Which messages stay inside a node does not depend on the order, as only whole nodes move.
    inside = np.count_nonzero(~between, axis=1)
    row = np.nonzero(between)[0]
    return ListedMessages(
        source=sources[between],
        target=targets[between],
        row=row,
        weight=rows.copies[row].astype(np.float64),
        inside=inside,
        count=len(source),
        port=float(inside.max() if phase.edges == "star" else inside.any()),
        peers=_count_peers(rows, phase),
        slowest=phase.hops == 1,
        closed=phase.edges == "ring",
    )


def _count_peers(rows: GroupRows, phase: CollectivePhase) -> int:
    """Count the ranks over whose links a rank of the smallest group in a node can spread its messages.

    NCCL cuts a buffer into several rings, each over other links. A message that nothing follows goes to one rank.
    """
    members = _count_pairs(rows).members
    return 1 if phase.hops == 1 else int(members[members > 1].min(initial=rows.position.shape[1])) - 1


def _count_pairs(rows: GroupRows) -> CountedPairs:
    starts = np.ones(rows.position.shape, bool)
    starts[:, 1:] = rows.position[:, 1:] != rows.position[:, :-1]
    at = np.flatnonzero(starts)
    return CountedPairs(
        position=rows.position.ravel()[at],
        row=at // rows.position.shape[1],
        members=np.diff(at, append=rows.position.size),
        copies=rows.copies.astype(np.float64),
        count=rows.position.shape[1],
    )
