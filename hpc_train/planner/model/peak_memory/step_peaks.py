"""Search the peak memory of hpc_train's own steps over their moments, for the first, a middle and the last stage.

The moments are those at which a rank may hold most: inside a block, at the reduction of gradients, at the end of a
backward and at the loss. step_sizes.py has the sizes that no moment changes. `plan rehearse` counts the same
memory on the real passes, and a test compares the two.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import reduce
from itertools import chain

import numpy as np
from numpy.typing import NDArray

from hpc_train.planner.constants import Constants
from hpc_train.planner.model.inputs import Column
from hpc_train.planner.model.jobs import Jobs, choose
from hpc_train.planner.model.peak_memory.rank_weights import count_new_shards
from hpc_train.planner.model.peak_memory.step_sizes import BlockSizes, StepSizes, size_step
from hpc_train.planner.model.pipeline import PipelineMoment, first_peak_moment, peak_moments
from hpc_train.planner.model.stage_layers import StageLayers, split_stages
from hpc_train.traffic.sharding import keeps_gradients

_NOTHING = np.zeros(())


@dataclass(frozen=True)
class PeakMemory:
    """Bytes on the device at one moment, [3, n]; `waiting`, on the host, is the maximum over all moments."""

    parameters: Column
    gradients: Column
    optimizer: Column
    activations: Column
    logits: Column
    buffers: Column
    total: Column
    """All of the device."""
    waiting: Column = field(default_factory=lambda: _NOTHING)
    """Bytes of activations that wait in host memory; not counted for a single moment."""


Moments = Sequence[tuple[PipelineMoment, PipelineMoment]]
"""(the start of a backward, its end) for each moment at which memory may be at its peak."""


def estimate_peak(jobs: Jobs, constants: Constants) -> PeakMemory:
    """Return the memory of each rank at its peak: the largest total over all moments of a step."""
    moments, stages = list(peak_moments(jobs)), split_stages(jobs)
    sizes = size_step(jobs, constants, stages)
    peak = reduce(_choose_larger, _list_peaks(sizes, moments))
    return replace(peak, waiting=_count_on_host(sizes.block, stages, moments))


def estimate_peak_total(jobs: Jobs, constants: Constants) -> tuple[Column, Column]:
    """Return (the peak's total, [ranks, n]; the most activations that wait in host memory, [3, n]).

    A search asks for no more, and not choosing the parts of the peak takes a third of the time less. ranks: the three,
    without the middle one if it needs no more than the first.
    """
    moments, stages = list(peak_moments(jobs)), split_stages(jobs)
    ranks = slice(None, None, 2) if _is_middle_smaller(jobs, stages, moments) else slice(None)
    sizes = size_step(jobs, constants, stages.take(ranks))
    peaks = _list_peaks(sizes, [(start.take(ranks), end.take(ranks)) for start, end in moments])
    return reduce(np.maximum, (peak.total for peak in peaks)), _count_on_host(sizes.block, stages, moments)


def bound_peak_total(jobs: Jobs, constants: Constants) -> Column:
    """Bound the peak's total from below, [ranks, n]: by that within a block's backward, at the first of the moments.

    The bound is a few percent below the peak where activations take most of the memory. ranks: the first and the last.
    """
    ends = slice(None, None, 2)
    sizes = size_step(jobs, constants, split_stages(jobs).take(ends))
    start = first_peak_moment(jobs).take(ends)
    return next(_list_peaks(sizes, [(start, start)])).total


def _is_middle_smaller(jobs: Jobs, stages: StageLayers, moments: Moments) -> bool:
    """Return whether a middle rank of no job can need more memory than the first one.

    Then the first rank has no less of anything that memory grows with, and as much of all that it falls with. This
    holds for rounded sums, too, since rounding never changes the order of two numbers.
    """
    if not jobs.has_pipeline or jobs.has_experts:  # the first rank may have dense blocks where others have experts
        return False
    growing = [stages.stage, stages.last, stages.layers, stages.tables]
    equal: list[Column] = []
    absent: list[Column] = []
    for moment in chain.from_iterable(moments):
        growing.append(moment.stages)
        equal += [moment.accumulated, moment.reduced]
        absent += [moment.last[1], moment.losses[1], moment.loss[1], moment.input_done, moment.input_done_last]
    return (
        all(np.all(column[0] >= column[1]) for column in growing)
        and all(np.all(column[0] == column[1]) for column in equal)
        and not any(np.any(column) for column in absent)
    )


def _choose_larger(one: PeakMemory, other: PeakMemory) -> PeakMemory:
    """Return, for each rank and job, the one of two moments that needs more."""
    more = other.total > one.total
    if more.shape == one.total.shape and not more.any():
        return one
    pairs = {part.name: (getattr(other, part.name), getattr(one, part.name)) for part in fields(PeakMemory)}
    # Parts that do not change with the moment are the same array in both: no need to choose.
    return PeakMemory(**{name: new if new is old else choose(more, new, old) for name, (new, old) in pairs.items()})


@dataclass(frozen=True)
class _MomentMemory:
    """Bytes that a rank holds at one moment whatever it computes, [3, n]."""

    gradients: Column
    state: Column
    """Parameters, gradients and the optimizer's state together."""
    on_device: Column
    """Activations of layers that wait for their backward, on the device."""
    waiting: Column
    """Bytes of all else that waits for a backward: inputs and outputs of stages, and gradients between I and W."""
    has_inputs: NDArray[np.bool_] | None
    """Whether the rank has input gradients without their weight gradients; None if no job has."""


def _count_moment(sizes: StepSizes, moment: PipelineMoment, like: _MomentMemory | None = None) -> _MomentMemory:
    """Count the memory at one moment. like: that at a moment with the same gradients, if it has been counted."""
    block = sizes.block
    stored = _count_stored(block, sizes.weights.stages, moment)
    between = moment.input_done + moment.input_done_last > 0
    has_inputs = between if np.any(between) else None
    gradients = like.gradients if like else _count_gradients(sizes, moment)
    return _MomentMemory(
        gradients=gradients,
        state=like.state if like else sizes.state.parameters + gradients + sizes.state.optimizer,
        on_device=choose(block.offloaded, 0.0, stored) if block.any_offloaded else stored,
        waiting=_count_waiting(sizes, moment, has_inputs is not None),
        has_inputs=has_inputs,
    )


def _count_gradients(sizes: StepSizes, moment: PipelineMoment) -> Column:
    """Return the bytes of gradients on the device."""
    state = sizes.state
    # Gradients of a stage are allocated by its first backward. ddp's buckets exist from the first step on.
    sharded = moment.accumulated * state.unreduced_gradients + moment.reduced * state.sharded_gradients
    gradients = choose(sizes.jobs.zero >= 1, sharded, state.whole_gradients)
    if state.sends_gradients is None or state.unsent_sums is None:
        return gradients
    return choose(state.sends_gradients, state.unsent_sums, gradients)


def _count_stored(block: BlockSizes, stages: StageLayers, moment: PipelineMoment) -> Column:
    """Return the activations of layers that wait for their backward, on the device or the host."""
    layers, last_layers = moment.stages * stages.stage, moment.last * stages.last
    return layers * block.stored + last_layers * block.stored


def _count_on_host(block: BlockSizes, stages: StageLayers, moments: Moments) -> Column:
    """Return the most activations that wait in host memory at any moment, [3, n]."""
    if not block.any_offloaded:
        return np.zeros(())
    stored = reduce(np.maximum, (_count_stored(block, stages, start) for start, _ in moments))
    return choose(block.offloaded, stored, 0.0)


def _count_waiting(sizes: StepSizes, moment: PipelineMoment, splits: bool) -> Column:
    """Return the bytes that wait for a backward besides the activations of layers.

    splits: whether input gradients wait for their weight gradients.
    """
    jobs, block, stages = sizes.jobs, sizes.block, sizes.weights.stages
    # torch's stages keep their output for every micro-batch in flight (offloading: their input, too), and the gradients
    # that they receive and send for one.
    waiting = (moment.stages + 2) * block.hidden
    if block.any_offloaded:
        waiting = choose(block.offloaded, (2 * moment.stages + 2) * block.hidden, waiting)
    waiting = choose(jobs.pp > 1, waiting, 0.0) + moment.last * block.last_norm
    if block.embedding_mask is not None:
        # Stages of a rank without the pipeline's last one.
        others = np.maximum(jobs.virtual_stages - stages.has_last * (jobs.pp > 1), 1)
        in_flight = choose(jobs.pp > 1, moment.stages / others, moment.last)
        waiting = waiting + stages.has_first * in_flight * block.embedding_mask
    if not splits:
        return waiting
    assert block.pending is not None
    layers = moment.input_done * stages.stage + moment.input_done_last * stages.last
    return waiting + (layers * block.pending + moment.input_done_last * sizes.loss.pending)


def _list_peaks(sizes: StepSizes, moments: Moments) -> Iterator[PeakMemory]:
    """Yield the memory at each moment, at the four places where it may be at its peak."""
    jobs = sizes.jobs
    for start, end in moments:
        memory = _count_moment(sizes, start)
        # During the backward of blocks: logits, what losses store, and the head's gradient, which exists from the start
        # of a backward to its end.
        logits = np.maximum(start.losses - start.loss, 0) * sizes.loss.stored + start.loss * sizes.loss.last_logits
        head = start.loss * sizes.weights.table * sizes.weights.trains_ends * jobs.activation_bytes
        allocated = np.minimum(start.accumulated + start.reduced, 1.0)
        yield _measure_block(sizes, memory, logits, head, allocated)
        if sizes.group.reduces_shards:
            yield _measure_reduction(sizes, memory, logits, head)
        yield _measure_loss(sizes, memory, start)
        # As long as no more gradients are allocated, the rank's state is the same at the end.
        same = np.array_equal(end.reduced, start.reduced)
        yield _measure_end(sizes, _count_moment(sizes, end, memory if same else None), start, allocated)


def _measure_block(
    sizes: StepSizes, memory: _MomentMemory, logits: Column, head: Column, allocated: Column
) -> PeakMemory:
    """Return the peak within the backward of a block, the first or the second one of a stage.

    allocated: share of the rank's stages whose gradients earlier micro-batches have allocated.
    """
    block, gathered, has_inputs = sizes.block, sizes.gathered, memory.has_inputs
    # Gradients of the first block are reduced while the second one is in backward. By then the activations of the
    # first are freed, unless they were offloaded and so were never on the device.
    shards = count_new_shards(sizes.jobs, sizes.weights, sizes.group, 1.0 - allocated)
    reducing = np.maximum(sizes.group.buffer + shards - block.freed, 0) * sizes.group.several
    working = block.working
    if has_inputs is not None:
        # In a W (input gradients exist already) weight gradients take the place of what they are computed from.
        working = choose(has_inputs, 0.0, working)
    if block.attention_working is not None:
        working = np.maximum(working, block.attention_working)
    in_block = gathered.in_block
    if gathered.embedding_again is not None:
        again = gathered.embedding_again if has_inputs is None else gathered.embedding_again * ~has_inputs
        copied = np.maximum(again - working, 0)
        in_block, reducing = in_block + copied, np.maximum(reducing, copied)
    buffers = np.maximum(in_block, gathered.during_reduction + reducing) + head
    return _add_up(sizes, memory, working, logits, buffers)


def _measure_reduction(sizes: StepSizes, memory: _MomentMemory, logits: Column, head: Column) -> PeakMemory:
    """Return the peak when the first group of blocks has all gradients and copies them together to reduce.

    The group's gathered parameters are freed by then.
    """
    reducing = sizes.group.buffer + sizes.group.copied - sizes.block.freed_before
    if memory.has_inputs is not None:
        assert sizes.block.pending is not None
        reducing = reducing - memory.has_inputs * sizes.block.pending  # which no longer waits for W
    working = choose(keeps_gradients(sizes.jobs.zero), 0.0, reducing)
    return _add_up(sizes, memory, working, logits, sizes.gathered.before_reduction + head)


def _measure_loss(sizes: StepSizes, memory: _MomentMemory, moment: PipelineMoment) -> PeakMemory:
    """Return the peak when a loss's backward begins: fp32 gradients of the logits, before and after conversion."""
    stored = moment.losses * sizes.loss.stored + moment.loss * sizes.loss.last_logits
    return _add_up(sizes, memory, None, stored + moment.loss * sizes.loss.working, sizes.gathered.at_loss)


def _measure_end(sizes: StepSizes, memory: _MomentMemory, start: PipelineMoment, allocated: Column) -> PeakMemory:
    """Return the peak at the end of the backward of a stage with the embedding or the head.

    memory: at that end. start: the moment at which the backward began. allocated: as in _measure_block.
    """
    jobs, weights = sizes.jobs, sizes.weights
    # The gradients to reduce and the reduced shards, which exist before they are added to those of earlier
    # micro-batches.
    added = allocated * jobs.gradient_bytes / weights.shards
    reduced = choose(jobs.zero >= 2, jobs.reduce_bytes + added, 0.0)
    reduced = (reduced + jobs.activation_bytes) * weights.trains_ends
    tables = weights.stages.tables
    table = choose(jobs.pp == 1, tables, np.minimum(tables, 1)) * weights.table
    buffers = sizes.gathered.at_end + table * reduced
    losses = np.maximum(start.losses - start.loss, 0)
    return _add_up(sizes, memory, None, losses * sizes.loss.stored, buffers)


def _add_up(
    sizes: StepSizes, memory: _MomentMemory, working: Column | None, logits: Column, buffers: Column
) -> PeakMemory:
    """Add up the memory at a place. working: what the current computation needs besides stored activations."""
    waiting = memory.waiting if working is None else memory.waiting + working
    activations = memory.on_device + waiting
    buffers = buffers + sizes.state.accumulated
    return PeakMemory(
        sizes.state.parameters,
        memory.gradients,
        sizes.state.optimizer,
        activations,
        logits,
        buffers,
        memory.state + activations + logits + buffers,
    )
