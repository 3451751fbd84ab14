"""The data-parallel axes: what is gathered and reduced in a step, how long it takes and how much of it shows.

Bytes and numbers of uses are those of traffic.data (Rajbhandari et al. 2020, arXiv:1910.02054), as columns; the rule is
the same, parallel.support.sharding, and a test ties the two.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from hpc_train.parallel.support.sharding import block_gathers, end_gathers, reductions
from hpc_train.planner.collectives import Group, all_gather, all_reduce, group
from hpc_train.planner.constants import Constants
from hpc_train.planner.jobs import SCHEDULES, STACKS, Column, Jobs
from hpc_train.planner.moments import SPLIT
from hpc_train.planner.overlap import exposed
from hpc_train.planner.stages import OURS

_DUALPIPEV = SCHEDULES.index("dualpipev")


@dataclass(frozen=True)
class Volume:
    """Bytes of a step that a rank's collectives are about, whole buffers."""

    gathered: Column
    """All-gathers of parameters over dp_shard x cp."""
    scattered: Column
    """Reduce-scatters of gradients over dp_shard x cp."""
    reduced: Column
    """All-reduces of gradients, over the copies."""


@dataclass(frozen=True)
class Uses:
    """How often a step gathers and reduces the layers' parameters, and gathers those of embedding and head."""

    gathers: Column
    end_gathers: Column
    reductions: Column


def uses(jobs: Jobs) -> Uses:
    """Apply parallel.support.sharding to columns of jobs, for an average stage of the first rank.

    Pipelines of other stacks reduce once a step and, like torch's, free nothing that a backward has gathered before its
    end: of what each forward frees, every one of m forwards is followed by a gather, and one goes before them.
    """
    m, split = jobs.micro_batches, _split(jobs)
    rule = jobs.zero, jobs.reshard, jobs.pp, m, split
    once = (jobs.pp > 1) & (jobs.stack != OURS)
    again = np.where((jobs.zero == 3) & (jobs.reshard > 0) & (split == 0), m + 1, 1.0)
    return Uses(
        np.where(once, again, block_gathers(*rule)),
        np.where(once, 1.0, end_gathers(*rule)),
        np.where(once, 1.0, reductions(jobs.zero, m)),
    )


def _split(jobs: Jobs) -> Column:
    """Count micro-batches with a split backward: all but the first stage's; the later half of DualPipeV's last ones."""
    v = jobs.virtual_stages
    split = np.where(np.isin(jobs.schedule, SPLIT), jobs.micro_batches * (v - 1) / v, 0.0)
    split = np.where(jobs.schedule == _DUALPIPEV, (jobs.pp - 1) / 2, split)
    return np.where(jobs.pp > 1, split, 0.0)


def volume(jobs: Jobs, layers: Column, ends: Column) -> Volume:
    """layers, ends: parameters of a rank in layers, and in embedding and head."""
    told = uses(jobs)
    sharded = (jobs.zero > 0) & (jobs.dp_shard * jobs.cp > 1)
    gathered = (layers * told.gathers + ends * told.end_gathers) * jobs.activation_bytes
    scattered = (layers + ends) * told.reductions * jobs.reduce_bytes
    copies = np.where(sharded, jobs.dp_shard * jobs.cp, 1.0)
    return Volume(
        np.where(sharded, gathered, 0.0),
        np.where(sharded, scattered, 0.0),
        (layers + ends) * jobs.reduce_bytes / copies,
    )


@dataclass(frozen=True)
class Windows:
    """Seconds of a rank's computation in one micro-batch, or of the host's that launches it."""

    forward: Column
    backward: Column


def seconds(jobs: Jobs, constants: Constants, layers: Column, ends: Column, windows: Windows) -> Column:
    """Exposed seconds of a step. layers, ends: parameters of the rank, before sharding."""
    moved = volume(jobs, layers, ends)
    shard, copies = _groups(jobs, constants)
    told = uses(jobs)
    calls = _calls(jobs)
    gather = all_gather(shard, moved.gathered, calls * told.gathers)
    scatter = all_gather(shard, moved.scattered, calls * told.reductions)
    scatter = scatter + all_reduce(copies, moved.reduced)
    share = np.where(jobs.overlap_data > 0, constants.overlap_data, 0.0)
    # Gathers of backward run beside it, as do reductions; those of forward beside forward.
    both = (jobs.zero == 3) & (jobs.reshard > 0)
    first = np.where(both & (told.gathers > 1), jobs.micro_batches / np.maximum(told.gathers, 1), 1.0)
    first = np.where(both & (jobs.stack != OURS), 0.5, first)
    again = gather * (1 - first) * (1 + _gathered_for_recomputation(jobs))
    ahead, behind = gather * first, again + scatter
    count = np.maximum(jobs.layers / jobs.pp, 1)
    forward = exposed(ahead, windows.forward * np.minimum(told.gathers, jobs.micro_batches), share, ahead / count)
    backward = exposed(behind, windows.backward * told.reductions, share, behind / count)
    return forward + backward


def _calls(jobs: Jobs) -> Column:
    """Collectives in which the parameters of a rank are gathered once: zero 3's are one for each layer, and in
    DeepSpeed, which cuts up every tensor by itself, one for each of a layer's twelve."""
    tensors = np.where(jobs.stack == STACKS.index("deepspeed"), 12.0, 1.0)
    return np.where(jobs.zero == 3, tensors * jobs.layers / jobs.pp + 1, 1.0)


def _gathered_for_recomputation(jobs: Jobs) -> Column:
    """1 where a recomputed layer's parameters are gathered once more: DeepSpeed frees them after the forward that
    recomputation runs, FSDP not before backward has used them."""
    recomputed = np.where(jobs.recompute == 2, jobs.recompute_share, 0.0)
    return np.where(jobs.stack == STACKS.index("deepspeed"), recomputed, 0.0)


def _groups(jobs: Jobs, constants: Constants) -> tuple[Group, Group]:
    """Ranks that share parameters, and copies; without sharding, cp's ranks are copies too."""
    sharded = jobs.zero > 0
    shards = jobs.dp_shard * jobs.cp
    shard = group(jobs, constants, np.where(sharded, shards, 1.0), jobs.tp)
    copies = np.where(sharded, jobs.dp_replicate, jobs.dp_replicate * shards)
    return shard, group(jobs, constants, copies, np.where(sharded, jobs.tp * shards, jobs.tp))
