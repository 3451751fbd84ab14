"""Estimate the memory of a rank, part by part, for the first, a middle and the last stage of the pipeline.

For published stacks (Megatron, DeepSpeed, FSDP) the parts are added up by what their papers and documentation say; for
hpc_train peak_memory/ searches the moments of a step.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from functools import cached_property

import numpy as np

from hpc_train.planner.constants import Constants
from hpc_train.planner.model.inputs import DEEPSPEED, FLOAT8_RECIPES, FSDP, HPC_TRAIN, Column
from hpc_train.planner.model.jobs import Jobs, job_columns
from hpc_train.planner.model.layer.activations import layer_activations
from hpc_train.planner.model.peak_memory.step_peaks import (
    PeakMemory,
    bound_peak_total,
    estimate_peak,
    estimate_peak_total,
)
from hpc_train.planner.model.pipeline import micro_batches_in_flight
from hpc_train.planner.model.stage_layers import split_layers, stack_stages

NO, MAYBE, YES = 0, 1, 2
"""Values of Memory.fits: whether a job fits in memory."""
FITS = ("no", "maybe", "yes")
_DEEPSPEED_BUFFERS = 3 * 5e8 * 2.0
"""Bytes of DeepSpeed's buckets by default: two to reduce and one to gather, of 5e8 16-bit elements each."""
_DEEPSPEED_LIVE = 2e9 * 2.0
"""Most bytes that DeepSpeed's zero 3 gathers by default: 1e9 16-bit parameters in use and as many prefetched."""


@dataclass(frozen=True)
class Memory:
    """Bytes on one rank.

    Parts are [3, n]: first rank of the pipeline, a middle one, the last; equal without pipeline.
    """

    parameters: Column
    gradients: Column
    optimizer: Column
    activations: Column
    """What forward keeps for backward, for all micro-batches in flight, and what one layer needs while it computes."""
    logits: Column
    buffers: Column
    """Gathered parameters and communication buckets."""
    fragmentation: Column
    """Memory that the allocator holds without using it."""
    context: Column
    """Memory of driver, libraries and communicators, which nvidia-smi shows and torch does not."""
    capacity: Column
    """[n]: bytes of the device."""
    host: Column
    """[n]: bytes that one rank keeps in host memory."""
    margin: Column
    """[n]: the real need may be less than predicted by this fraction."""
    headroom: Column
    """[n]: the real need may exceed the prediction by this fraction."""

    @cached_property
    def allocated(self) -> Column:
        """[3, n]: total as torch.cuda.max_memory_allocated counts it: without fragmentation and context."""
        return self.parameters + self.gradients + self.optimizer + self.activations + self.logits + self.buffers

    @cached_property
    def reserved(self) -> Column:
        """[3, n]: total as torch.cuda.max_memory_reserved counts it: without context."""
        return self.allocated + self.fragmentation

    @cached_property
    def stages(self) -> Column:
        """[3, n]: total of each stage."""
        return self.reserved + self.context

    @cached_property
    def total(self) -> Column:
        """[n]: total of the stage that needs most."""
        highest: Column = self.stages.max(axis=0)
        return highest

    @cached_property
    def fits(self) -> Column:
        """[n]: NO, MAYBE or YES."""
        return _judge(self.total, self.capacity, self.headroom, self.margin)


def _judge(total: Column, capacity: Column, headroom: Column, margin: Column | float) -> Column:
    """Return NO, MAYBE or YES for each job."""
    sure, out = total * (1 + headroom) <= capacity, total * (1 - margin) > capacity
    return np.where(sure, float(YES), np.where(out, float(NO), float(MAYBE)))


@dataclass(frozen=True)
class MemoryTotals:
    """The figures of the memory of jobs that a search needs, [n]."""

    total: Column
    """Bytes of the rank that needs most, as Memory.total."""
    fits: Column
    """NO, MAYBE or YES, as Memory.fits."""
    waiting: Column
    """[3, n]: bytes of activations that wait in host memory."""


def estimate_memory_totals(jobs: Jobs, constants: Constants) -> MemoryTotals:
    """Estimate the totals only: the same numbers as estimate_memory, in half of the time."""
    assert np.all(jobs.stack == HPC_TRAIN)
    return _total_up(jobs, constants, *estimate_peak_total(jobs.condensed, constants))


def bound_memory_totals(jobs: Jobs, constants: Constants) -> MemoryTotals:
    """Bound the totals from below, in half the time of estimating them: a search estimates the rest only."""
    assert np.all(jobs.stack == HPC_TRAIN)
    return _total_up(jobs, constants, bound_peak_total(jobs.condensed, constants), np.zeros(()))


def _total_up(jobs: Jobs, constants: Constants, allocated: Column, waiting: Column) -> MemoryTotals:
    """Return the totals of the rank that needs most. allocated: bytes by rank, [ranks, n]."""
    highest = allocated.max(axis=0)
    total = highest + constants.fragmentation * highest + constants.context
    fits = _judge(total, jobs.memory_bytes, _choose_headroom(jobs, constants), constants.memory_margin)
    shape = jobs.shape or (1,)
    return MemoryTotals(np.broadcast_to(total, shape), np.broadcast_to(fits, shape), waiting)


def estimate_host_memory(jobs: Jobs, waiting: Column) -> Column:
    """Return the bytes that one rank keeps in host memory, [n]. waiting: activations, [3, n]."""
    if not np.any(jobs.offload) and not np.any(jobs.offload_activations):
        return np.zeros(())
    weights, optimizer_weights = _count_weights(jobs)
    host: Column = (_host_bytes(jobs, weights, optimizer_weights) + waiting).max(axis=0)
    return host


def estimate_memory(jobs: Jobs, constants: Constants) -> Memory:
    """Estimate the bytes of each part on each stage."""
    weights, optimizer_weights = _count_weights(jobs)
    peak = _estimate_parts(jobs, constants, weights, optimizer_weights)
    host = _host_bytes(jobs, weights, optimizer_weights) + peak.waiting
    rows = np.broadcast_shapes(peak.total.shape[1:], jobs.memory_bytes.shape)
    if not any(column.ndim for column in job_columns(jobs).values()):
        rows = ()

    def shaped(part: Column) -> Column:
        """Bring a part to [3, n], or to [3] if all columns are scalars."""
        spread = np.broadcast_to(part, (3, *peak.total.shape[1:]))
        return np.broadcast_to(spread if rows else spread[:, 0], (3, *rows))

    return Memory(
        parameters=shaped(peak.parameters),
        gradients=shaped(peak.gradients),
        optimizer=shaped(peak.optimizer),
        activations=shaped(peak.activations),
        logits=shaped(peak.logits),
        buffers=shaped(peak.buffers),
        fragmentation=shaped(constants.fragmentation * peak.total),
        context=np.broadcast_to(np.float64(constants.context), (3, *rows)),
        capacity=np.broadcast_to(jobs.memory_bytes, rows),
        host=shaped(host).max(axis=0),
        margin=np.broadcast_to(np.float64(constants.memory_margin), rows),
        headroom=np.broadcast_to(_choose_headroom(jobs, constants), rows),
    )


def _estimate_parts(jobs: Jobs, constants: Constants, weights: Column, optimizer_weights: Column) -> PeakMemory:
    """Estimate the parts of allocated memory. weights: as _weights returns them."""
    is_ours = jobs.stack == HPC_TRAIN
    if not np.any(is_ours):
        return _estimate_published_parts(jobs, constants, weights, optimizer_weights)
    ours = estimate_peak(jobs, constants)
    if np.all(is_ours):
        return ours
    theirs = _estimate_published_parts(jobs, constants, weights, optimizer_weights)
    names = [field.name for field in fields(PeakMemory)]
    return PeakMemory(**{name: np.where(is_ours, getattr(ours, name), getattr(theirs, name)) for name in names})


def _estimate_published_parts(
    jobs: Jobs, constants: Constants, weights: Column, optimizer_weights: Column
) -> PeakMemory:
    """Add up the parts of published stacks."""
    tokens = jobs.micro_batch * jobs.sequence / jobs.cp
    shard = jobs.dp_shard * jobs.cp
    parameters, buffers = _parameter_bytes(jobs, weights, shard)
    trained = _select_trained(jobs, weights)
    gradients = trained * jobs.gradient_bytes / np.where(jobs.zero >= 2, shard, 1.0)
    deepspeed = jobs.stack == DEEPSPEED
    # DeepSpeed needs fp32 gradients of its shard for the update, and 16-bit ones beside those it accumulates in fp32.
    shares = np.where(jobs.zero >= 1, shard, 1.0)
    gradients = gradients + trained * np.where(
        deepspeed, _duplicate_gradient_bytes(jobs) + 4 / shares * (jobs.zero >= 1), 0.0
    )
    buffers = buffers + np.where(deepspeed & (jobs.zero >= 1), _DEEPSPEED_BUFFERS, 0.0)
    activations, waiting = _activation_bytes(jobs, constants, tokens)
    last = np.array([0.0, 0.0, 1.0]).reshape(3, *[1] * (weights.ndim - 1))
    logits = np.where(jobs.pp > 1, last, 1.0) * (tokens * jobs.vocab / jobs.tp * jobs.logit_bytes)
    # Offloaded parameters take their gradients to the host as soon as they are reduced; zero1 accumulates whole
    # gradients on the device first.
    gradients = gradients * np.where((jobs.offload > 1) & (jobs.zero >= 2), 0.0, 1.0)
    optimizer = _optimizer_bytes(jobs, optimizer_weights) * (jobs.offload == 0)
    total = parameters + gradients + optimizer + activations + logits + buffers
    return PeakMemory(parameters, gradients, optimizer, activations, logits, buffers, total, waiting)


def _optimizer_bytes(jobs: Jobs, weights: Column) -> Column:
    """Return the bytes of the optimizer's state of a rank, [3, n], wherever they are."""
    shares = np.where(jobs.zero >= 1, jobs.dp_shard * jobs.cp, 1.0)
    return _select_trained(jobs, weights) * jobs.optimizer_bytes / shares


def _choose_headroom(jobs: Jobs, constants: Constants) -> Column:
    """Return by which fraction the real need may exceed the prediction, by stack."""
    ours = np.where(jobs.stack == HPC_TRAIN, constants.headroom_unmeasured, constants.headroom)
    if np.any(jobs.float8):
        ours = np.where(jobs.float8 >= FLOAT8_RECIPES.index("rowwise"), constants.headroom_float8, ours)
    return np.where(jobs.stack == DEEPSPEED, constants.headroom_deepspeed, ours)


def _duplicate_gradient_bytes(jobs: Jobs) -> Column:
    """Return the bytes per element of the 16-bit gradients that DeepSpeed keeps beside those accumulated in fp32."""
    return np.where(jobs.gradient_bytes > jobs.activation_bytes, jobs.activation_bytes, 0.0)


def _count_weights(jobs: Jobs) -> tuple[Column, Column]:
    """Return the parameters of a rank before sharding over data-parallel axes, [3, n]: (with ep, as if without)."""
    layer = jobs.rank_layer_parameters
    if not jobs.has_experts:
        weights = _sum_weights(jobs, layer)
        return weights, weights
    experts = np.where(jobs.experts > 0, jobs.sparse_share * jobs.rank_expert_parameters, 0.0)
    return _sum_weights(jobs, layer + experts), _sum_weights(jobs, layer + experts * jobs.ep)


def _select_trained(jobs: Jobs, weights: Column) -> Column:
    """Return those of a rank's weights that are trained, [3, n]: all, or those of adapters, which `weights` is without.

    Adapters are not combined with ep.
    """
    if not jobs.has_adapters:
        return weights
    layers, adapters = split_layers(jobs), jobs.rank_adapter_weights
    stages = (layers.first, layers.middle, layers.last)
    trained = stack_stages(*(np.where(jobs.pp == 1, layers.first, stage) * adapters for stage in stages))
    return np.where(jobs.adapter_weights > 0, trained, weights)


def _sum_weights(jobs: Jobs, layer: Column) -> Column:
    """Return the parameters of a rank's layers and tables, [3, n]. layer: parameters of one layer on the rank."""
    layers = split_layers(jobs)
    table = jobs.vocab * jobs.hidden / jobs.tp
    all_layers = layers.first * layer + (2 - jobs.tied) * table
    stages = (layers.first * layer + table, layers.middle * layer, layers.last * layer + table)
    return stack_stages(*(np.where(jobs.pp == 1, all_layers, stage) for stage in stages))


def _parameter_bytes(jobs: Jobs, weights: Column, shard: Column) -> tuple[Column, Column]:
    """Return the bytes of parameters: (kept between steps, gathered or cast while they are used)."""
    kept_whole = np.where(jobs.stack >= FSDP, jobs.zero < 1, jobs.zero < 3)
    stored = weights * jobs.weight_bytes
    if jobs.has_adapters:
        stored = _count_frozen_bytes(jobs, weights) + _select_trained(jobs, weights) * jobs.weight_bytes
    stored = stored / np.where(kept_whole, 1.0, shard)
    # With zero 3, two layers are gathered at a time (the next one is prefetched), and one more layer's gradients are
    # whole. With FSDP2 and zero 1 or 2, all parameters stay gathered in 16 bits for the whole step.
    table = jobs.vocab * jobs.hidden / jobs.tp
    some = (3 * jobs.layer_parameters / jobs.tp + table) * jobs.activation_bytes
    some = np.where(jobs.stack == DEEPSPEED, np.minimum(some, _DEEPSPEED_LIVE), some)
    some = np.minimum(some, weights * jobs.activation_bytes)
    cast = weights * np.where(jobs.weight_bytes > jobs.activation_bytes, jobs.activation_bytes, 0.0)
    gathered = np.where(jobs.zero >= 3, np.where(jobs.reshard > 0, some, cast), cast)
    return stored * (jobs.offload < 2), np.where(jobs.stack >= FSDP, gathered, np.where(jobs.zero >= 3, some, 0.0))


def _count_frozen_bytes(jobs: Jobs, weights: Column) -> Column:
    """Return the bytes of a rank's frozen weights, [3, n], of jobs with adapters; 0 of others."""
    wide = jobs.vocab * jobs.hidden / jobs.tp * np.where(jobs.pp == 1, 2.0 - jobs.tied, 1.0)  # embedding and head
    wide = np.where(jobs.frozen_bytes > 0, np.minimum(wide, weights), weights)
    frozen = wide * jobs.weight_bytes + (weights - wide) * jobs.frozen_bytes
    return np.where(jobs.adapter_weights > 0, frozen, 0.0)


def _host_bytes(jobs: Jobs, weights: Column, optimizer_weights: Column) -> Column:
    """Return the bytes of state that a rank keeps in host memory, [3, n].

    offload=optimizer: the optimizer's state and the copy of the parameters that it updates. offload=parameters: also
    the parameters themselves and their gradients (parallel.memory.parameter_offload).
    """
    shares = np.where(jobs.zero >= 1, jobs.dp_shard * jobs.cp, 1.0)
    trained = _select_trained(jobs, weights)
    held = trained * np.where(jobs.offload > 1, jobs.weight_bytes + jobs.gradient_bytes, jobs.weight_bytes)
    if jobs.has_adapters:
        held = held + np.where(jobs.offload > 1, _count_frozen_bytes(jobs, weights), 0.0)
    return (_optimizer_bytes(jobs, optimizer_weights) + held / shares) * (jobs.offload > 0)


def _activation_bytes(jobs: Jobs, constants: Constants, tokens: Column) -> tuple[Column, Column]:
    """Return the bytes of activations: ([3, n] on the device, [3, n] on the host if they are offloaded).

    They are those of all layers of a rank for all micro-batches in flight, and the needs of the layer that computes.
    With offload, the device has the activations of one layer at a time (Rhu et al. 2016, arXiv:1602.08124, section
    3.1), besides the inputs and outputs of its stages, which the pipeline keeps for every micro-batch in flight.
    """
    layer, layers = layer_activations(jobs, constants, tokens), split_layers(jobs)
    stored, alive = layer.stored, layer.working
    counts = micro_batches_in_flight(jobs)
    # DeepSpeed's pipeline keeps each stage's outputs, and room for their gradients, for every micro-batch in flight.
    moved, piped = jobs.offload_activations > 0, jobs.pp > 1
    ends = tokens * jobs.hidden * jobs.activation_bytes * np.where(piped & (moved | (jobs.stack == DEEPSPEED)), 2.0, 0)
    block_activations = layer.unrecomputed * (jobs.recompute == 0)
    alive = alive + np.where(moved, block_activations + stored, 0.0)  # stored: what comes back for the layer before
    split = list(zip((layers.first, layers.middle, layers.last), counts, strict=True))
    total = stack_stages(*(stored * each * count for each, count in split))
    rest = stack_stages(*(ends * count + alive for _, count in split))
    return np.where(moved, rest, total + rest), np.where(moved, total, 0.0)
