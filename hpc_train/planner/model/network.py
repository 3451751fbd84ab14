"""Time of collectives by latency and bandwidth (Hockney's model), and the traffic of the data-parallel axes.

Ranks are assumed to fill nodes in order, so that all groups of an axis look alike. Bandwidths and oversubscription come
from the columns of the jobs. Communication that overlaps computation costs only its exposed part.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from hpc_train.planner.constants import Constants
from hpc_train.planner.model.inputs import DEEPSPEED, FULL, HPC_TRAIN, MEGATRON, SCHEDULES, Column
from hpc_train.planner.model.jobs import Jobs, choose, replace_columns
from hpc_train.planner.model.pipeline import SPLITS_BACKWARD
from hpc_train.traffic.sharding import count_block_gathers, count_end_gathers, count_reductions


@dataclass(frozen=True)
class RankGroup:
    """The groups of ranks along one axis, or along several neighbouring axes taken as one."""

    ranks: Column
    within: Column
    """Ranks of a group that share an NVLink domain."""
    seconds_per_byte: Column
    """Time of a ring per byte that every rank passes on; the slowest link decides."""
    latency: Column
    """Seconds of one hop, averaged over the ring."""
    link: Column
    """Seconds per byte from a rank to others in its NVLink domain."""
    nic: Column
    """Seconds per byte from a rank to ranks outside its domain, over the rank's own NIC."""


def make_rank_group(
    jobs: Jobs, constants: Constants, ranks: Column, stride: Column, single: Column | None = None
) -> RankGroup:
    """Describe groups of `ranks` ranks whose members are `stride` apart.

    single: 1 where a collective is one ring of messages (asynchronous tp). NCCL uses several rings, one per NIC; a
    single ring leaves each node by the NIC of one rank only.
    """
    within = np.clip(jobs.nvlink_domain / stride, 1.0, ranks)
    nodes = ranks / within
    crosses = ranks * stride > jobs.nvlink_domain
    # Without a switch a rank has a link of its own to each peer: rings over all of them use all, a single ring one.
    links = within - 1 if single is None else choose(single > 0, 1.0, within - 1)
    link = 1 / (_get_link_bandwidth(jobs, links) * constants.link_efficiency)
    # Groups in the same node share its NICs: each group has those of its own members.
    rails = within if single is None else choose(single > 0, 1.0, within)
    single_nic = _compute_oversubscription(jobs, ranks * stride) / (jobs.nic_bandwidth * constants.nic_efficiency)
    nic = single_nic / rails
    slowest = choose(crosses, np.maximum(nic, link), link)
    per_hop = choose(crosses, (nodes * constants.nic_latency + (ranks - nodes) * constants.link_latency) / ranks, 0)
    return RankGroup(ranks, within, slowest, choose(crosses, per_hop, constants.link_latency), link, single_nic)


def _get_link_bandwidth(jobs: Jobs, peers: Column) -> Column:
    """Return bytes/s of a rank to `peers` others of its node together."""
    if np.all(np.isinf(jobs.pair_bandwidth)):
        return jobs.link_bandwidth
    return np.minimum(jobs.link_bandwidth, np.maximum(peers, 1.0) * jobs.pair_bandwidth)


def _compute_oversubscription(jobs: Jobs, extent: Column) -> Column:
    """Return by how much oversubscribed switches slow down groups that span `extent` ranks."""
    if np.all(jobs.leaf_oversubscription == 1) and np.all(jobs.group_oversubscription == 1):
        return np.ones(())
    leaf = choose(extent > jobs.leaf_gpus, jobs.leaf_oversubscription, 1.0)
    return leaf * choose(extent > jobs.group_gpus, jobs.group_oversubscription, 1.0)


def all_gather_seconds(at: RankGroup, size: Column, calls: Column) -> Column:
    """Return the seconds of `calls` all-gathers or reduce-scatters, `size` bytes in total; 0 for a group of one rank.

    NCCL runs both as rings, so each call takes one hop less than there are ranks.
    """
    steps = at.ranks - 1
    return steps / at.ranks * size * at.seconds_per_byte + calls * steps * at.latency


def all_to_all_seconds(at: RankGroup, size: Column, calls: Column) -> Column:
    """Return the seconds of `calls` all-to-alls with `size` bytes per rank in total; 0 for a group of one rank.

    Every rank sends size / n bytes to each of the n - 1 others (Thakur, Rabenseifner and Gropp 2005, Optimization of
    Collective Communication Operations in MPICH, section 3.4). NCCL sends to all at once, so messages inside the NVLink
    domain run beside those that share the rank's NIC.
    """
    part = size / at.ranks
    inside, outside = (at.within - 1) * part * at.link, (at.ranks - at.within) * part * at.nic
    return np.maximum(inside, outside) + calls * (at.ranks - 1) * at.latency


def all_reduce_seconds(at: RankGroup, size: Column) -> Column:
    """Return the seconds of an all-reduce of `size` bytes: a reduce-scatter and an all-gather."""
    steps = at.ranks - 1
    return 2 * steps / at.ranks * size * at.seconds_per_byte + 2 * _all_reduce_latency(at, steps)


_TREE_HOPS_PER_LEVEL, _TREE_HOPS_OF_ROOT = 4.0, 1.0
"""Hops of a ring that one way of an all-reduce through a tree takes: so many for each level, and one for the root.

An assumption, not fitted: NCCL's own tuning (src/graph/tuning.cc) has one hop for each level and way. Four make trees
win from 19 ranks on. With half a hop or eight in their place, no time of 614 published runs changes by more than 3 %,
and their mean error by 0.02 %.
"""


def _all_reduce_latency(at: RankGroup, steps: Column) -> Column:
    """Return the latency of one way of an all-reduce: NCCL uses a ring, or a tree if that has fewer hops.

    steps: hops of the ring.
    """
    levels = np.log2(np.maximum(at.ranks, 1))
    hops: Column = np.minimum(steps, _TREE_HOPS_PER_LEVEL * levels + _TREE_HOPS_OF_ROOT) * (steps > 0)
    return hops * at.latency


def send_seconds(jobs: Jobs, constants: Constants, size: Column, stride: Column) -> Column:
    """Return the seconds of a message from every rank to the one `stride` ranks later, all at the same time."""
    crosses = stride * 2 > jobs.nvlink_domain
    nic = _compute_oversubscription(jobs, stride * 2) / (jobs.nic_bandwidth * constants.nic_efficiency)
    link = 1 / (_get_link_bandwidth(jobs, np.ones(())) * constants.link_efficiency)
    latency = choose(crosses, constants.nic_latency, constants.link_latency)
    return size * choose(crosses, nic, link) + latency


def exposed_seconds(communication: Column, window: Column, share: Column, edge: Column) -> Column:
    """Return the seconds that a rank waits for communication that overlaps computation.

    window: seconds of that computation. share: how much of it can hide communication, 0 to 1. edge: the part of the
    communication that nothing can hide, such as the first gather or the last reduction.
    """
    return np.maximum(communication - share * window, np.minimum(edge, communication))


_DUALPIPEV = SCHEDULES.index("dualpipev")


@dataclass(frozen=True)
class DataVolume:
    """Bytes of the buffers of a rank's data-parallel collectives in one step."""

    gathered: Column
    """All-gathers of parameters over dp_shard x cp."""
    scattered: Column
    """Reduce-scatters of gradients over dp_shard x cp."""
    reduced: Column
    """All-reduces of gradients over the copies of each shard."""


@dataclass(frozen=True)
class DataUses:
    """How often a step gathers layers, gathers embedding and head (the ends), and reduces gradients, [n] each."""

    gathers: Column
    end_gathers: Column
    reductions: Column


def count_uses(jobs: Jobs) -> DataUses:
    """Count the uses by the rules of traffic.sharding, for an average stage of the first rank.

    Pipelines of other stacks reduce gradients once per step. With zero 3 they gather for each of the m forwards and
    once for backward, because what a backward has gathered stays until the step ends.
    """
    m, split = jobs.micro_batches, _count_split_backwards(jobs)
    rule = jobs.zero, jobs.reshard, jobs.pp, m, split
    uses = DataUses(count_block_gathers(*rule), count_end_gathers(*rule), count_reductions(jobs.zero, m))
    if np.all(jobs.stack == HPC_TRAIN) and not np.any(jobs.reduce_once):
        return uses
    once = (jobs.pp > 1) & (jobs.stack != HPC_TRAIN)
    again = choose((jobs.zero == 3) & (jobs.reshard > 0) & (split == 0), m + 1, 1.0)
    return DataUses(
        choose(once, again, uses.gathers),
        choose(once, 1.0, uses.end_gathers),
        choose(once | (jobs.reduce_once > 0), 1.0, uses.reductions),
    )


def _count_split_backwards(jobs: Jobs) -> Column:
    """Return the mean number of micro-batches per stage whose backward is split.

    All of them, except on the pipeline's first stage, which needs no input gradients. DualPipeV splits only some of the
    last ones, to fill the end of the step.
    """
    v = jobs.virtual_stages
    split = choose(np.isin(jobs.schedule, SPLITS_BACKWARD), jobs.micro_batches * (v - 1) / v, 0.0)
    split = choose(jobs.schedule == _DUALPIPEV, (jobs.pp - 1) / 2, split)
    return choose(jobs.pp > 1, split, 0.0)


def data_volume(jobs: Jobs, layers: Column, ends: Column, uses: DataUses | None = None) -> DataVolume:
    """Return the bytes of a step. layers, ends: parameters of a rank in layers, and in embedding and head."""
    uses = uses or count_uses(jobs)
    sharded = (jobs.zero > 0) & (jobs.dp_shard * jobs.cp > 1)
    gathered = layers * uses.gathers * jobs.gathered_bytes + ends * uses.end_gathers * jobs.activation_bytes
    trained = layers + ends
    if jobs.has_adapters:  # frozen weights are gathered and have no gradients
        adapters = layers * jobs.adapters_per_weight
        gathered = gathered + adapters * uses.gathers * jobs.activation_bytes
        trained = choose(jobs.adapter_weights > 0, adapters, trained)
    scattered = trained * uses.reductions * jobs.reduce_bytes
    copies = choose(sharded, jobs.dp_shard * jobs.cp, 1.0)
    return DataVolume(
        choose(sharded, gathered, 0.0),
        choose(sharded, scattered, 0.0),
        trained * jobs.reduce_bytes / copies,
    )


@dataclass(frozen=True)
class OverlapWindows:
    """Seconds of computation in one micro-batch that communication can hide behind; waiting for the host counts."""

    forward: Column
    backward: Column


def data_seconds(
    jobs: Jobs,
    constants: Constants,
    layers: Column,
    ends: Column,
    windows: OverlapWindows,
    experts: Column | None,
) -> Column:
    """Return the exposed seconds of the data-parallel axes.

    layers, ends: parameters of the rank, before sharding. experts: those of `layers` that ep splits first; None: none.
    """
    uses = count_uses(jobs)
    gather, scatter = _time_data_collectives(
        jobs, constants, uses, layers if experts is None else layers - experts, ends
    )
    if experts is not None:
        # The ranks of an ep group hold different experts: what remains of dp_shard x cp shards each.
        expert_jobs = _replace_expert_shards(jobs)
        more = _time_data_collectives(expert_jobs, constants, uses, experts / jobs.ep, np.zeros(()), jobs.tp * jobs.ep)
        gather, scatter = gather + more[0], scatter + more[1]
    share = choose((jobs.overlap_data > 0) & (jobs.host_computes == 0), constants.overlap_data, 0.0)
    # Gathers for forward overlap forward; gathers for backward and reductions overlap backward. first: share of the
    # gathers that are for forward.
    both = (jobs.zero == 3) & (jobs.reshard > 0)
    first = choose(both & (uses.gathers > 1), jobs.micro_batches / np.maximum(uses.gathers, 1), 1.0)
    first = choose(both & (jobs.stack != HPC_TRAIN), 0.5, first)
    again = gather * (1 - first) * (1 + _compute_regathered_share(jobs))
    ahead, behind = gather * first, again + scatter
    # Nothing hides the first gather and the last reduction: one layer of `count`.
    count = np.maximum(jobs.layers / jobs.pp, 1)
    chunks = _count_chunk_passes(jobs)
    ahead_window = windows.forward * np.maximum(np.minimum(uses.gathers, jobs.micro_batches), chunks)
    forward = exposed_seconds(ahead, ahead_window, share, ahead / count)
    backward = exposed_seconds(behind, windows.backward * np.maximum(uses.reductions, chunks), share, behind / count)
    if np.any(jobs.reduce_once):
        once = _expose_single_reduction(jobs, again, scatter, windows.backward, share)
        backward = choose((jobs.reduce_once > 0) & (jobs.pp == 1), once, backward)
    exposed = forward + backward
    return exposed + constants.contention * (ahead + behind - exposed)


def _expose_single_reduction(jobs: Jobs, gather: Column, scatter: Column, window: Column, share: Column) -> Column:
    """Return the exposed seconds of backward where only the last micro-batch reduces gradients; all of them gather.

    window: seconds of one backward.
    """
    m, layers = jobs.micro_batches, np.maximum(jobs.layers, 1)
    last, others = gather / m + scatter, gather * (1 - 1 / m)
    seconds = exposed_seconds(others, window * (m - 1), share, others / layers)
    return seconds + exposed_seconds(last, window, share, last / layers)


def _count_chunk_passes(jobs: Jobs) -> Column:
    """Return the micro-batches beside which an interleaved pipeline of Megatron gathers and reduces; 1 for others.

    A rank's virtual stages compute pp micro-batches each, one stage after another. Meanwhile, in the last round of
    backward, the gradients of the stage before are reduced, and in the first round of forward the parameters of the
    next stage are gathered (Megatron-Core, pipeline_parallel/schedules.py: grad_sync_func, param_sync_func).
    """
    v = jobs.virtual_stages
    passes = np.minimum(jobs.pp, jobs.micro_batches) * (v - 1) / v
    return choose((jobs.stack == MEGATRON) & (jobs.pp > 1) & (v > 1), np.maximum(passes, 1.0), 1.0)


def _time_data_collectives(
    jobs: Jobs, constants: Constants, uses: DataUses, layers: Column, ends: Column, stride: Column | None = None
) -> tuple[Column, Column]:
    """Return the seconds of a step's (gathers, reductions), not counting that they overlap anything."""
    moved = data_volume(jobs, layers, ends, uses)
    shard, copies = _make_data_groups(jobs, constants, jobs.tp if stride is None else stride)
    calls = _count_calls(jobs)
    gather = all_gather_seconds(shard, moved.gathered, calls * uses.gathers)
    scatter = all_gather_seconds(shard, moved.scattered, calls * uses.reductions)
    return gather, scatter + all_reduce_seconds(copies, moved.reduced)


def _replace_expert_shards(jobs: Jobs) -> Jobs:
    """Return the jobs as the collectives of experts see them: fewer ranks to shard over, and weights in full."""
    return replace_columns(jobs, dp_shard=jobs.dp_shard / jobs.ep, float8_gather=0.0, four_bit_weights=0.0)


def _count_calls(jobs: Jobs) -> Column:
    """Return the number of collectives that gather all parameters of a rank once.

    zero 3 has one for each layer and one for the ends; DeepSpeed shards each of a layer's twelve tensors by itself.
    Otherwise all parameters are one buffer.
    """
    tensors = choose(jobs.stack == DEEPSPEED, 12.0, 1.0)
    return choose(jobs.zero == 3, tensors * jobs.layers / jobs.pp + 1, 1.0)


def _compute_regathered_share(jobs: Jobs) -> Column:
    """Return the share of layers whose parameters are gathered once more because they are recomputed.

    DeepSpeed frees parameters after the recomputed forward; FSDP keeps them until backward has used them.
    """
    recomputed = choose(jobs.recompute == FULL, jobs.recompute_share, 0.0)
    return choose(jobs.stack == DEEPSPEED, recomputed, 0.0)


def _make_data_groups(jobs: Jobs, constants: Constants, stride: Column) -> tuple[RankGroup, RankGroup]:
    """Return the groups that parameters are sharded over, whose members are `stride` apart, and the groups of copies.

    cp ranks share the shards of parameters; without sharding they are copies, like dp_replicate ranks.
    """
    sharded = jobs.zero > 0
    shards = jobs.dp_shard * jobs.cp
    shard = make_rank_group(jobs, constants, choose(sharded, shards, 1.0), stride)
    copies = choose(sharded, jobs.dp_replicate, jobs.dp_replicate * shards)
    return shard, make_rank_group(jobs, constants, copies, choose(sharded, stride * shards, stride))
