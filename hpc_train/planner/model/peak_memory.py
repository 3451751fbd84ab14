"""Search the peak memory of hpc_train's own steps over their moments, for the first, a middle and the last stage.

The moments are those at which a rank may hold most: inside a block, at the reduction of gradients, at the end of a
backward and at the loss. Sizes that no moment changes are in peak_sizes.py. `plan rehearse` counts the same memory on
the real passes, and a test compares the two.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property, reduce

import numpy as np
from numpy.typing import NDArray

from hpc_train.planner.constants import Constants
from hpc_train.planner.model.jobs import Column, Jobs
from hpc_train.planner.model.peak_sizes import PeakSizes
from hpc_train.planner.model.pipeline import PipelineMoment, peak_moments


@dataclass(frozen=True)
class PeakMemory:
    """Bytes on the device at one moment, [3, n]. `waiting`, on the host, is the maximum over all moments."""

    parameters: Column
    gradients: Column
    optimizer: Column
    activations: Column
    logits: Column
    buffers: Column
    waiting: Column
    """Bytes of activations that wait in host memory."""
    total: Column
    """All but `waiting`."""


def estimate_peak(jobs: Jobs, constants: Constants) -> PeakMemory:
    """Return the memory of each rank at its peak: the largest total over all moments of a step."""
    return reduce(_elementwise_worse, _list_peaks(jobs, constants))


def estimate_peak_total(jobs: Jobs, constants: Constants) -> tuple[Column, Column]:
    """Return (the peak's total, the most activations that wait in host memory), [3, n] each.

    A search asks for no more, and not choosing the parts of the peak takes a third of the time less.
    """
    peaks = _list_peaks(jobs, constants)
    first = next(peaks)
    total, waiting, last = first.total, first.waiting, first.waiting
    for peak in peaks:
        total = np.maximum(total, peak.total)
        if peak.waiting is not last:
            waiting, last = np.maximum(waiting, peak.waiting), peak.waiting
    return total, waiting


def _list_peaks(jobs: Jobs, constants: Constants) -> Iterator[PeakMemory]:
    """Yield the memory at each moment, at the four places where it may be at its peak."""
    sizes = PeakSizes(jobs, constants)
    for start, end in peak_moments(jobs):
        memory = _MomentMemory(sizes, start, end)
        yield memory.in_block()
        yield memory.at_reduction()
        yield memory.at_loss()
        yield memory.at_end()


def _elementwise_worse(one: PeakMemory, other: PeakMemory) -> PeakMemory:
    """Return, for each rank and job, the one of two moments that needs more on the device."""
    more = other.total > one.total
    waiting = np.maximum(one.waiting, other.waiting)
    if more.shape == one.total.shape and not more.any():
        return replace(one, waiting=waiting)
    names = ("parameters", "gradients", "optimizer", "activations", "logits", "buffers", "total")
    pairs = {name: (getattr(other, name), getattr(one, name)) for name in names}
    # Parts that do not change with the moment are the same array in both: no need to choose.
    parts = {name: new if new is old else np.where(more, new, old) for name, (new, old) in pairs.items()}
    return PeakMemory(**parts, waiting=waiting)


class _MomentMemory:
    """The memory at one moment. What its places have in common is computed once."""

    def __init__(self, sizes: PeakSizes, moment: PipelineMoment, end: PipelineMoment) -> None:
        """moment: the start of a backward. end: its end."""
        self._sizes, self._moment, self._end = sizes, moment, end

    def in_block(self) -> PeakMemory:
        """Return the peak within the backward of a block, the first or the second one of a stage."""
        sizes = self._sizes
        # Gradients of the first block are reduced while the second one is in backward. By then the activations of the
        # first are freed, unless they were offloaded and so were never on the device. Its reduced shards are new unless
        # an earlier micro-batch has allocated them.
        shards = sizes.first_shards(1.0 - self._allocated_share)
        behind = np.maximum(sizes.reduced + shards - sizes.freed_layer, 0)
        working = sizes.block_working
        if self._between is not None:
            # In a W (input gradients exist already) weight gradients take the place of what they are computed from.
            working = np.where(self._between, 0.0, working)
        if np.any(sizes.writes_scores):
            working = np.where(sizes.writes_scores, np.maximum(working, sizes.behind_attention), working)
        # fully_shard gathers the next block while one computes. In a stage of two blocks there is no next one to gather
        # when the first one's gradients are reduced.
        most, beside = sizes.gathered_in_block
        behind = behind * sizes.several_groups
        if sizes.gathered_again is not None:
            again = sizes.gathered_again if self._between is None else sizes.gathered_again * ~self._between
            copied = np.maximum(again - working, 0)
            most, behind = most + copied, np.maximum(behind, copied)
        return self._peak(working, self._losses, np.maximum(most, beside + behind) + self._head, self._moved)

    def at_reduction(self) -> PeakMemory:
        """Return the peak when the first group of blocks has all gradients and copies them together to reduce."""
        pending = None if self._between is None else self._between * self._sizes.pending
        working, buffers = self._sizes.reduction_working(pending), self._sizes.gathered_ahead + self._head
        return self._peak(working, self._losses, buffers, self._moved)

    def at_loss(self) -> PeakMemory:
        """Return the peak when a loss's backward begins: fp32 gradients of the logits, before and after conversion."""
        sizes, moment = self._sizes, self._moment
        stored = moment.losses * sizes.loss_kept + moment.loss * sizes.last_logits
        return self._peak(None, stored + moment.loss * sizes.loss_working, sizes.gathered_at_loss, self._moved)

    def at_end(self) -> PeakMemory:
        """Return the peak at the end of the backward of a stage with the embedding or the head."""
        sizes, jobs, moment = self._sizes, self._sizes.jobs, self._moment
        # The gradients to reduce and the reduced shards, which exist before they are added to those of earlier
        # micro-batches.
        added = self._allocated_share * jobs.gradient_bytes / sizes.shards
        reduced = np.where(jobs.zero >= 2, jobs.reduce_bytes + added, 0.0)
        reduced = (reduced + jobs.activation_bytes) * sizes.trains_ends
        losses = np.maximum(moment.losses - moment.loss, 0)
        buffers = sizes.gathered_at_end + sizes.end_table * reduced
        end = _MomentMemory(sizes, self._end, self._end)
        return end._peak(None, losses * sizes.loss_kept, buffers, self._moved)  # less waits than at the start

    def _peak(self, working: Column | None, logits: Column, buffers: Column, moved: Column) -> PeakMemory:
        """Add up the memory at a place.

        working: what the current computation needs besides stored activations. moved: what waits in host memory.
        """
        sizes = self._sizes
        rest = self._waiting_for_backward if working is None else self._waiting_for_backward + working
        activations = self._on_device + rest
        buffers = buffers + sizes.accumulated
        return PeakMemory(
            sizes.parameters,
            self._gradients,
            sizes.optimizer,
            activations,
            logits,
            buffers,
            moved,
            self._state + activations + logits + buffers,
        )

    @cached_property
    def _between(self) -> NDArray[np.bool_] | None:
        """Whether the rank has input gradients without their weight gradients; None if no job has at this moment."""
        between: NDArray[np.bool_] = self._moment.input_done + self._moment.input_done_last > 0
        return between if np.any(between) else None

    @cached_property
    def _stored(self) -> Column:
        """Activations of layers that wait for their backward."""
        sizes, moment = self._sizes, self._moment
        stages, last = moment.stages * sizes.stages.stage, moment.last * sizes.stages.last
        stored: Column = stages * sizes.layer + last * sizes.layer
        return stored

    @cached_property
    def _on_device(self) -> Column:
        """Bytes of waiting activations on the device."""
        return np.where(self._sizes.moved, 0.0, self._stored) if self._sizes.moves else self._stored

    @cached_property
    def _moved(self) -> Column:
        """Bytes of waiting activations in host memory."""
        return np.where(self._sizes.moved, self._stored, 0.0) if self._sizes.moves else np.zeros(())

    @cached_property
    def _waiting_for_backward(self) -> Column:
        """What else waits for a backward: inputs and outputs of stages, and gradients between I and W."""
        sizes, jobs, moment = self._sizes, self._sizes.jobs, self._moment
        # torch's stages keep their output for every micro-batch in flight (offloading: their input, too), and the
        # gradients that they receive and send for one.
        ends = (moment.stages + 2) * sizes.hidden
        if sizes.moves:
            ends = np.where(sizes.moved, (2 * moment.stages + 2) * sizes.hidden, ends)
        ends = np.where(jobs.pp > 1, ends, 0.0) + moment.last * sizes.last_norm
        if sizes.drops:
            in_flight = np.where(jobs.pp > 1, moment.stages / sizes.stages_of_first, moment.last)
            ends = ends + sizes.on_first * in_flight * sizes.embedding_mask
        if self._between is None:
            return ends
        done, done_last = moment.input_done * sizes.stages.stage, moment.input_done_last * sizes.stages.last
        return ends + ((done + done_last) * sizes.pending + moment.input_done_last * sizes.pending_logits)

    @cached_property
    def _allocated_share(self) -> Column:
        """Share of the rank's stages whose gradients earlier micro-batches have allocated."""
        return np.minimum(self._moment.accumulated + self._moment.reduced, 1.0)

    @cached_property
    def _losses(self) -> Column:
        """Logits, and what losses keep for their backward, during the backward of blocks."""
        sizes, moment = self._sizes, self._moment
        return np.maximum(moment.losses - moment.loss, 0) * sizes.loss_kept + moment.loss * sizes.last_logits

    @cached_property
    def _head(self) -> Column:
        """The head's gradient, which exists from the start of a backward to its end."""
        sizes = self._sizes
        head: Column = self._moment.loss * sizes.table * sizes.trains_ends * sizes.jobs.activation_bytes
        return head

    @cached_property
    def _gradients(self) -> Column:
        """Whole or sharded gradients of the stages that have had a backward.

        Gradients of a stage are allocated by its first backward. ddp's buckets exist from the first step on.
        """
        sizes, moment = self._sizes, self._moment
        whole, shards, unreduced = sizes.gradients
        found = np.where(sizes.jobs.zero >= 1, moment.accumulated * unreduced + moment.reduced * shards, whole)
        return found if sizes.sends_gradients is None else np.where(sizes.sends_gradients, sizes.unsent_sums, found)

    @cached_property
    def _state(self) -> Column:
        """Parameters, gradients and the optimizer's state together."""
        state: Column = self._sizes.parameters + self._gradients + self._sizes.optimizer
        return state
