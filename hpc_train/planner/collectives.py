"""Collectives by latency and bandwidth (Hockney), over groups of ranks that lie regularly on nodes.

Ranks are row-major over the mesh axes, tp innermost, so a group is n ranks, `stride` apart. NCCL's rings go through a
node's GPUs before they leave it, on as many rails as the group has GPUs there: of the group's data, all that leaves a
node shares the NICs of these GPUs, and no more (NCCL, src/graph; nccl-tests, doc/PERFORMANCE.md for the ring's factor
(n - 1) / n). Latency is a ring's, or a tree's where that is less (small messages).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from hpc_train.planner.constants import Constants
from hpc_train.planner.jobs import Column, Jobs


@dataclass(frozen=True)
class Group:
    """The groups of one axis, or of several neighbouring ones together."""

    ranks: Column
    within: Column
    """Ranks of a group that share an NVLink domain."""
    seconds_per_byte: Column
    """Of what every rank passes on in a ring."""
    latency: Column
    """Seconds of a hop, mean over the ring."""
    link: Column
    """Seconds per byte from one rank to others of its NVLink domain."""
    nic: Column
    """The same to others beyond it, by the rank's own NIC."""


def group(jobs: Jobs, constants: Constants, ranks: Column, stride: Column, single: Column | None = None) -> Group:
    """Groups of `ranks` ranks, `stride` apart. single: 1 where one ring of messages does the work of NCCL's several, so
    that all that leaves a node leaves it by the NIC of one rank."""
    within = np.clip(jobs.nvlink_domain / stride, 1.0, ranks)
    nodes = ranks / within
    crosses = ranks * stride > jobs.nvlink_domain
    link = 1 / (jobs.link_bandwidth * constants.link_efficiency)
    # Groups that lie beside one another share the node's NICs: each has those of its own GPUs.
    rails = within if single is None else np.where(single > 0, 1.0, within)
    single_nic = _oversubscribed(jobs, ranks * stride) / (jobs.nic_bandwidth * constants.nic_efficiency)
    nic = single_nic / rails
    slowest = np.where(crosses, np.maximum(nic, link), link)
    per_hop = np.where(crosses, (nodes * constants.nic_latency + (ranks - nodes) * constants.link_latency) / ranks, 0)
    return Group(ranks, within, slowest, np.where(crosses, per_hop, constants.link_latency), link, single_nic)


def _oversubscribed(jobs: Jobs, extent: Column) -> Column:
    """Time over that of a non-blocking network, for groups that reach over `extent` ranks."""
    leaf = np.where(extent > jobs.leaf_gpus, jobs.leaf_oversubscription, 1.0)
    return leaf * np.where(extent > jobs.group_gpus, jobs.group_oversubscription, 1.0)


def all_gather(at: Group, size: Column, calls: Column) -> Column:
    """Seconds of `calls` all-gathers, or reduce-scatters, of `size` bytes in all; 0 for a group of one.

    NCCL has rings only for these, so each call takes as many hops as there are ranks.
    """
    steps = at.ranks - 1
    return steps / at.ranks * size * at.seconds_per_byte + calls * steps * at.latency


def all_to_all(at: Group, size: Column, calls: Column) -> Column:
    """Seconds of `calls` all-to-alls, to each of which every rank brings 1 / calls of `size` bytes; 0 for one rank.

    NCCL sends a part to every other rank, all at once: those beyond the NVLink domain share the rank's NIC (Thakur,
    Rabenseifner and Gropp 2005, Optimization of Collective Communication Operations in MPICH, section 3.4: n - 1
    pairwise exchanges of size / n).
    """
    part = size / at.ranks
    inside, outside = (at.within - 1) * part * at.link, (at.ranks - at.within) * part * at.nic
    return np.maximum(inside, outside) + calls * (at.ranks - 1) * at.latency


def all_reduce(at: Group, size: Column) -> Column:
    """Seconds of an all-reduce of `size` bytes."""
    steps = at.ranks - 1
    return 2 * steps / at.ranks * size * at.seconds_per_byte + 2 * _latency(at, steps)


def _latency(at: Group, steps: Column) -> Column:
    """A ring's steps, or a tree's depth there and back."""
    hops: Column = np.minimum(steps, 4 * np.log2(np.maximum(at.ranks, 1)) + 1) * (steps > 0)
    return hops * at.latency


def send(jobs: Jobs, constants: Constants, size: Column, stride: Column) -> Column:
    """Seconds of a message from each rank to the one `stride` further on, all at once."""
    crosses = stride * 2 > jobs.nvlink_domain
    nic = _oversubscribed(jobs, stride * 2) / (jobs.nic_bandwidth * constants.nic_efficiency)
    link = 1 / (jobs.link_bandwidth * constants.link_efficiency)
    latency = np.where(crosses, constants.nic_latency, constants.link_latency)
    return size * np.where(crosses, nic, link) + latency
