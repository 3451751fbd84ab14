"""Time of collectives by latency and bandwidth (Hockney), and what the data-parallel axes gather and reduce in a step.

Groups of ranks lie regularly on nodes; links and tapers come from the columns of jobs. Communication that runs beside
computation costs only what is exposed.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from hpc_train.planner.constants import Constants
from hpc_train.planner.model.jobs import SCHEDULES, STACKS, Column, Jobs
from hpc_train.planner.model.pipeline import HPC_TRAIN_STACK, SPLITS_BACKWARD
from hpc_train.traffic.sharding import count_block_gathers, count_end_gathers, count_reductions


@dataclass(frozen=True)
class RankGroup:
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


def make_rank_group(
    jobs: Jobs, constants: Constants, ranks: Column, stride: Column, single: Column | None = None
) -> RankGroup:
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
    return RankGroup(ranks, within, slowest, np.where(crosses, per_hop, constants.link_latency), link, single_nic)


def _oversubscribed(jobs: Jobs, extent: Column) -> Column:
    """Time over that of a non-blocking network, for groups that reach over `extent` ranks."""
    leaf = np.where(extent > jobs.leaf_gpus, jobs.leaf_oversubscription, 1.0)
    return leaf * np.where(extent > jobs.group_gpus, jobs.group_oversubscription, 1.0)


def all_gather_seconds(at: RankGroup, size: Column, calls: Column) -> Column:
    """Seconds of `calls` all-gathers, or reduce-scatters, of `size` bytes in all; 0 for a group of one.

    NCCL has rings only for these, so each call takes as many hops as there are ranks.
    """
    steps = at.ranks - 1
    return steps / at.ranks * size * at.seconds_per_byte + calls * steps * at.latency


def all_to_all_seconds(at: RankGroup, size: Column, calls: Column) -> Column:
    """Seconds of `calls` all-to-alls, to each of which every rank brings 1 / calls of `size` bytes; 0 for one rank.

    NCCL sends a part to every other rank, all at once: those beyond the NVLink domain share the rank's NIC (Thakur,
    Rabenseifner and Gropp 2005, Optimization of Collective Communication Operations in MPICH, section 3.4: n - 1
    pairwise exchanges of size / n).
    """
    part = size / at.ranks
    inside, outside = (at.within - 1) * part * at.link, (at.ranks - at.within) * part * at.nic
    return np.maximum(inside, outside) + calls * (at.ranks - 1) * at.latency


def all_reduce_seconds(at: RankGroup, size: Column) -> Column:
    """Seconds of an all-reduce of `size` bytes."""
    steps = at.ranks - 1
    return 2 * steps / at.ranks * size * at.seconds_per_byte + 2 * _latency(at, steps)


def _latency(at: RankGroup, steps: Column) -> Column:
    """A ring's steps, or a tree's depth there and back."""
    hops: Column = np.minimum(steps, 4 * np.log2(np.maximum(at.ranks, 1)) + 1) * (steps > 0)
    return hops * at.latency


def send_seconds(jobs: Jobs, constants: Constants, size: Column, stride: Column) -> Column:
    """Seconds of a message from each rank to the one `stride` further on, all at once."""
    crosses = stride * 2 > jobs.nvlink_domain
    nic = _oversubscribed(jobs, stride * 2) / (jobs.nic_bandwidth * constants.nic_efficiency)
    link = 1 / (jobs.link_bandwidth * constants.link_efficiency)
    latency = np.where(crosses, constants.nic_latency, constants.link_latency)
    return size * np.where(crosses, nic, link) + latency


def exposed_seconds(communication: Column, window: Column, share: Column, edge: Column) -> Column:
    """Seconds that a rank waits.

    window: seconds of the computation that it runs beside; share: how much of the window hides it, 0 to 1. edge: the
    part that nothing can hide, as the first gather and the last reduction; counted once, within communication.
    """
    return np.maximum(communication - share * window, np.minimum(edge, communication))


_DUALPIPEV = SCHEDULES.index("dualpipev")


@dataclass(frozen=True)
class DataVolume:
    """Bytes of a step that a rank's collectives are about, whole buffers."""

    gathered: Column
    """All-gathers of parameters over dp_shard x cp."""
    scattered: Column
    """Reduce-scatters of gradients over dp_shard x cp."""
    reduced: Column
    """All-reduces of gradients, over the copies."""


@dataclass(frozen=True)
class DataUses:
    """How often a step gathers and reduces parameters: of the layers, and of embedding and head (columns of jobs)."""

    gathers: Column
    end_gathers: Column
    reductions: Column


def count_uses(jobs: Jobs) -> DataUses:
    """Apply traffic.sharding to columns of jobs, for an average stage of the first rank.

    Pipelines of other stacks reduce once a step and, like torch's, free nothing that a backward has gathered before its
    end: of what each forward frees, every one of m forwards is followed by a gather, and one goes before them.
    """
    m, split = jobs.micro_batches, _count_split_backwards(jobs)
    rule = jobs.zero, jobs.reshard, jobs.pp, m, split
    once = (jobs.pp > 1) & (jobs.stack != HPC_TRAIN_STACK)
    again = np.where((jobs.zero == 3) & (jobs.reshard > 0) & (split == 0), m + 1, 1.0)
    return DataUses(
        np.where(once, again, count_block_gathers(*rule)),
        np.where(once, 1.0, count_end_gathers(*rule)),
        np.where(once, 1.0, count_reductions(jobs.zero, m)),
    )


def _count_split_backwards(jobs: Jobs) -> Column:
    """Count micro-batches with a split backward: all but the first stage's; the later half of DualPipeV's last ones."""
    v = jobs.virtual_stages
    split = np.where(np.isin(jobs.schedule, SPLITS_BACKWARD), jobs.micro_batches * (v - 1) / v, 0.0)
    split = np.where(jobs.schedule == _DUALPIPEV, (jobs.pp - 1) / 2, split)
    return np.where(jobs.pp > 1, split, 0.0)


def data_volume(jobs: Jobs, layers: Column, ends: Column) -> DataVolume:
    """layers, ends: parameters of a rank in layers, and in embedding and head."""
    uses = count_uses(jobs)
    sharded = (jobs.zero > 0) & (jobs.dp_shard * jobs.cp > 1)
    gathered = (layers * uses.gathers + ends * uses.end_gathers) * jobs.activation_bytes
    scattered = (layers + ends) * uses.reductions * jobs.reduce_bytes
    copies = np.where(sharded, jobs.dp_shard * jobs.cp, 1.0)
    return DataVolume(
        np.where(sharded, gathered, 0.0),
        np.where(sharded, scattered, 0.0),
        (layers + ends) * jobs.reduce_bytes / copies,
    )


@dataclass(frozen=True)
class OverlapWindows:
    """Seconds of a rank's computation in one micro-batch, or of the host's that launches it."""

    forward: Column
    backward: Column


def data_seconds(jobs: Jobs, constants: Constants, layers: Column, ends: Column, windows: OverlapWindows) -> Column:
    """Exposed seconds of a step. layers, ends: parameters of the rank, before sharding."""
    moved = data_volume(jobs, layers, ends)
    shard, copies = _data_groups(jobs, constants)
    uses = count_uses(jobs)
    calls = _count_calls(jobs)
    gather = all_gather_seconds(shard, moved.gathered, calls * uses.gathers)
    scatter = all_gather_seconds(shard, moved.scattered, calls * uses.reductions)
    scatter = scatter + all_reduce_seconds(copies, moved.reduced)
    share = np.where(jobs.overlap_data > 0, constants.overlap_data, 0.0)
    # Gathers of backward run beside it, as do reductions; those of forward beside forward.
    both = (jobs.zero == 3) & (jobs.reshard > 0)
    first = np.where(both & (uses.gathers > 1), jobs.micro_batches / np.maximum(uses.gathers, 1), 1.0)
    first = np.where(both & (jobs.stack != HPC_TRAIN_STACK), 0.5, first)
    again = gather * (1 - first) * (1 + _gathered_for_recomputation(jobs))
    ahead, behind = gather * first, again + scatter
    count = np.maximum(jobs.layers / jobs.pp, 1)
    forward = exposed_seconds(
        ahead, windows.forward * np.minimum(uses.gathers, jobs.micro_batches), share, ahead / count
    )
    backward = exposed_seconds(behind, windows.backward * uses.reductions, share, behind / count)
    return forward + backward


def _count_calls(jobs: Jobs) -> Column:
    """Collectives in which the parameters of a rank are gathered once: zero 3's are one for each layer, and in
    DeepSpeed, which cuts up every tensor by itself, one for each of a layer's twelve."""
    tensors = np.where(jobs.stack == STACKS.index("deepspeed"), 12.0, 1.0)
    return np.where(jobs.zero == 3, tensors * jobs.layers / jobs.pp + 1, 1.0)


def _gathered_for_recomputation(jobs: Jobs) -> Column:
    """1 where a recomputed layer's parameters are gathered once more: DeepSpeed frees them after the forward that
    recomputation runs, FSDP not before backward has used them."""
    recomputed = np.where(jobs.recompute == 2, jobs.recompute_share, 0.0)
    return np.where(jobs.stack == STACKS.index("deepspeed"), recomputed, 0.0)


def _data_groups(jobs: Jobs, constants: Constants) -> tuple[RankGroup, RankGroup]:
    """Ranks that share parameters, and copies; without sharding, cp's ranks are copies too."""
    sharded = jobs.zero > 0
    shards = jobs.dp_shard * jobs.cp
    shard = make_rank_group(jobs, constants, np.where(sharded, shards, 1.0), jobs.tp)
    copies = np.where(sharded, jobs.dp_replicate, jobs.dp_replicate * shards)
    return shard, make_rank_group(jobs, constants, copies, np.where(sharded, jobs.tp * shards, jobs.tp))
