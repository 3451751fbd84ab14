"""Memory of a rank, part by part, for the first, a middle and the last stage of the pipeline.

Published stacks (Megatron, DeepSpeed, FSDP) are summed up as they document themselves. For runs of hpc_train the peak
is searched over the moments of a step, by the rule that the trainer shards by (traffic.sharding); `plan rehearse`
counts the same on the real passes, and a test compares both.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from hpc_train.planner.constants import Constants
from hpc_train.planner.model.jobs import SCHEDULES, STACKS, Column, Jobs, job_columns
from hpc_train.planner.model.layer import (
    asynchronous_working,
    dropout_attention_working,
    embedding_mask_bytes,
    feed_forward_activations,
    full_layer_activations,
    last_norm_bytes,
    layer_activations,
    pending_gradient_bytes,
    recomputed_activations,
)
from hpc_train.planner.model.pipeline import (
    SPLITS_BACKWARD,
    V_SHAPED,
    PipelineMoment,
    micro_batches_in_flight,
    peak_moments,
    rank_layers,
    split_layers,
)
from hpc_train.traffic.axes import BUCKET_MIB
from hpc_train.traffic.sharding import keeps_gradients, keeps_parameters
from hpc_train.units import MIB

_SINGLE = tuple(SCHEDULES.index(name) for name in ("gpipe", "1f1b"))
"""Codes of the schedules that torch runs with one stage a rank (parallel.pipeline.schedule)."""


@dataclass(frozen=True)
class StageLayers:
    """Stages of the first rank of a pipeline, one in the middle and the last one: [3, n]."""

    stage: Column
    """Layers of each of the rank's stages except the last stage of the pipeline; the mean if they differ."""
    last: Column
    """Layers of the last stage of the pipeline."""
    has_last: Column
    """1 if the rank has the last stage of the pipeline."""
    layers: Column
    """Layers of all the rank's stages."""
    tables: Column
    """Number of tables: embedding and head count 1 each."""


@dataclass(frozen=True)
class PeakMemory:
    """Bytes on the device, [3, n], all at the same moment; those on the host are the most of any moment."""

    parameters: Column
    gradients: Column
    optimizer: Column
    activations: Column
    logits: Column
    buffers: Column
    waiting: Column
    """Bytes of activations on the host."""

    @cached_property
    def total(self) -> Column:
        state = self.parameters + self.gradients + self.optimizer
        return state + self.activations + self.logits + self.buffers


def split_stages(jobs: Jobs) -> StageLayers:
    """Split the layers as the trainer does; in V-shaped schedules the first rank has the last stage too."""
    v = jobs.virtual_stages
    bent = (jobs.pp > 1) & np.isin(jobs.schedule, V_SHAPED)
    *ranks, last = rank_layers(jobs, bent)
    layers_of_stage = _stack_stages(*ranks)
    has_last = _stack_stages(np.where(bent, 1.0, jobs.pp == 1), 0.0, np.where(bent, 0.0, 1.0))
    has_first = _stack_stages(1.0, 0.0, jobs.pp == 1)
    others = np.maximum(v - has_last, 1)
    tables = np.where(jobs.pp == 1, 2.0 - jobs.tied, has_first + has_last)
    return StageLayers(
        (layers_of_stage - has_last * last) / others * (v > has_last),
        last + 0 * layers_of_stage,
        has_last,
        layers_of_stage,
        tables,
    )


def estimate_peak(jobs: Jobs, constants: Constants) -> PeakMemory:
    """Return the largest peak over all moments."""
    search = _PeakSearch(jobs, constants)
    worst: PeakMemory | None = None
    for moment in peak_moments(jobs):
        for found in (
            search.in_block(moment),
            search.at_reduction(moment),
            search.at_loss(moment),
            search.at_end(moment),
        ):
            worst = found if worst is None else _elementwise_worse(worst, found)
    assert worst is not None
    return worst


def _elementwise_worse(one: PeakMemory, other: PeakMemory) -> PeakMemory:
    more = other.total > one.total
    names = ("parameters", "gradients", "optimizer", "activations", "logits", "buffers")
    pairs = {name: (getattr(other, name), getattr(one, name)) for name in names}
    parts = {name: new if new is old else np.where(more, new, old) for name, (new, old) in pairs.items()}
    return PeakMemory(**parts, waiting=np.maximum(one.waiting, other.waiting))


class _PeakSearch:
    """Bytes of each kind of tensor, computed once for all moments."""

    def __init__(self, jobs: Jobs, constants: Constants) -> None:
        self.jobs = jobs
        tokens = jobs.micro_batch * jobs.sequence / jobs.cp
        self.stages = split_stages(jobs)
        self.table = jobs.vocab * jobs.hidden / jobs.tp
        self.block = jobs.rank_layer_parameters
        self.ends = self.stages.tables * self.table + self._on_first * jobs.learned_positions * jobs.hidden
        self.weights = self.stages.layers * self.block + self.ends
        self.shards = np.where(jobs.zero >= 1, jobs.dp_shard * jobs.cp, 1.0)
        self.keeps_parameters = keeps_parameters(jobs.zero, jobs.reshard, jobs.pp)
        self.keeps_gradients = keeps_gradients(jobs.zero)
        self.moved = jobs.offload_activations > 0
        self.layer, self.working = layer_activations(jobs, constants, tokens)
        self.unmoved = full_layer_activations(jobs, constants, tokens) * (jobs.recompute == 0) * self.moved
        again = recomputed_activations(jobs, constants, tokens) + self.unmoved
        self.attention = dropout_attention_working(jobs, tokens)
        self.before_attention = again - feed_forward_activations(jobs, tokens)
        self.embedding_mask = embedding_mask_bytes(jobs, tokens)
        self.asynchronous = asynchronous_working(jobs, tokens)
        self.pending = pending_gradient_bytes(jobs, tokens)
        width = np.where(jobs.sequence_parallel > 0, jobs.tp, 1.0)
        self.hidden = tokens * jobs.hidden * jobs.activation_bytes / width
        self.last_norm = last_norm_bytes(jobs, tokens)
        self.logits = tokens * jobs.vocab / jobs.tp
        self.wide = np.maximum(jobs.activation_bytes, 4.0)

    def in_block(self, moment: PipelineMoment) -> PeakMemory:
        """Peak in the backward of a block, the first or the second one of a stage."""
        jobs = self.jobs
        # When the gradients of the first block are reduced, its activations are freed.
        reduced = self._reduced + self._first_shards(moment)
        behind = np.maximum(reduced - np.where(self.moved, 0.0, self.layer), 0)
        # If input gradients exist already, weight gradients replace what they are computed from.
        widest = jobs.hidden * jobs.feed_forward / jobs.tp * jobs.activation_bytes
        behind_attention = self.before_attention + (2 + jobs.gated) * widest + self.attention
        between = moment.input_done + moment.input_done_last > 0
        complete = self.block * jobs.activation_bytes + 2 * self.hidden - self._freed
        working = np.maximum(self.working + self.unmoved + widest + self.asynchronous, complete)
        working = np.where(between, 0.0, working)
        working = np.where(jobs.dropout > 0, np.maximum(working, behind_attention), working)
        # If a backward is split, its first part has freed an embedding that the second needs; it is copied together.
        again = (jobs.zero == 3) & (jobs.reshard > 0) & (jobs.pp > 1) & np.isin(jobs.schedule, SPLITS_BACKWARD)
        copied = np.maximum(again * ~between * self._embedding * jobs.activation_bytes - working, 0)
        return self._peak(moment, working, self._losses(moment), self._buffers(behind, copied) + self._head(moment))

    def at_reduction(self, moment: PipelineMoment) -> PeakMemory:
        """Peak when the backward of the first group of blocks of a stage ends: its gradients are put together."""
        jobs = self.jobs
        group = self._group
        # Gradients in 16 bits until they are copied, then the shards that come out. The group's parameters are freed.
        beside = np.maximum(group * jobs.activation_bytes, group * jobs.gradient_bytes / self.shards)
        between = moment.input_done + moment.input_done_last > 0
        working = self._reduced + beside - self._freed - between * self.pending
        working = np.where(self.keeps_gradients, 0.0, working)
        ahead = np.clip(self._stage_layers - 1, 0, 1)
        gathered = self._gathered_bytes(np.where(self._frees, ahead, self.stages.layers) * self.block)
        return self._peak(moment, working, self._losses(moment), gathered + self._head(moment))

    @cached_property
    def _reduced(self) -> Column:
        """Bytes of gradients while they are reduced. zero 1 does so in place of the whole ones it has accumulated."""
        reduced: Column = np.where(self.keeps_gradients, 0.0, self._group * self.jobs.reduce_bytes)
        return reduced

    def _first_shards(self, moment: PipelineMoment) -> Column:
        """Return the bytes of the shards of the first group's gradients, if no micro-batch before has made them."""
        new = (self.jobs.offload < 2) * (1.0 - np.minimum(moment.accumulated + moment.reduced, 1.0))
        return np.where(self.keeps_gradients, 0.0, new * self._group * self.jobs.gradient_bytes / self.shards)

    def _losses(self, moment: PipelineMoment) -> Column:
        """Return the bytes of logits and of what losses keep, in the backward of blocks."""
        return np.maximum(moment.losses - moment.loss, 0) * self._loss_kept + moment.loss * self._last_logits

    def _head(self, moment: PipelineMoment) -> Column:
        """Return the bytes of the gradient of the head, which lives from the beginning of the backward to its end."""
        head: Column = moment.loss * self.table * self.jobs.activation_bytes
        return head

    @cached_property
    def _freed(self) -> Column:
        """Bytes of a layer's activations that are freed when all its weight gradients are there: all but its input."""
        return np.where(self.moved, 0.0, np.maximum(self.layer - self.hidden, 0))

    @cached_property
    def _frees(self) -> Column:
        """Whether a block's parameters are freed after each use."""
        frees: Column = ~self.keeps_parameters & (self.jobs.reshard > 0)
        return frees

    @cached_property
    def _stage_layers(self) -> Column:
        """Layers of the rank's largest stage."""
        return np.maximum(self.stages.stage, self.stages.last * self.stages.has_last)

    def _buffers(self, behind: Column, copied: Column) -> Column:
        """Gathered blocks, and beside them either gradients being reduced (behind) or a copied embedding (copied).

        With two blocks in a stage, none is left to gather when the gradients of the second are reduced.
        """
        layers, freed = self._stage_layers, self._frees
        most = np.where(freed, np.minimum(layers, 2), self.stages.layers) * self.block
        beside = np.where(freed, np.minimum(np.maximum(layers - 1, 1), 2), self.stages.layers) * self.block
        several = layers * self.block > self._group * (1 + 1e-9)
        return np.maximum(
            self._gathered_bytes(most) + copied, self._gathered_bytes(beside) + np.maximum(behind * several, copied)
        )

    def at_end(self, moment: PipelineMoment) -> PeakMemory:
        """Peak at the end of the backward of a stage with the embedding or the head."""
        jobs, rest = self.jobs, np.maximum(self.stages.tables - 1, 0)
        tables = np.where(jobs.pp == 1, self.stages.tables, np.minimum(self.stages.tables, 1)) * self.table
        # Gradients that are reduced, and the shards that come out, before they are added to those that are there.
        added = np.minimum(moment.accumulated + moment.reduced, 1.0) * jobs.gradient_bytes / self.shards
        reduced = np.where(jobs.zero >= 2, jobs.reduce_bytes + added, 0.0)
        reduced = reduced + jobs.activation_bytes
        gathered = self._gathered_bytes(self.stages.layers * self.block * ((jobs.zero == 3) & (jobs.reshard == 0)))
        freed = (jobs.zero == 3) & (jobs.reshard > 0)
        gathered = np.where(freed, np.where(jobs.pp == 1, 0.0, rest * self.table) * jobs.activation_bytes, gathered)
        losses = np.maximum(moment.losses - moment.loss, 0)
        has_last = np.minimum(moment.last, moment.loss)
        later = replace(
            moment,
            stages=np.maximum(moment.stages - (1 - has_last), 0),
            last=moment.last - has_last,
            input_done=np.maximum(moment.input_done - 1, 0),
            input_done_last=np.maximum(moment.input_done_last - has_last, 0),
            reduced=np.minimum(moment.reduced + 1 / jobs.virtual_stages, 1 - moment.accumulated),
        )
        return self._peak(later, np.zeros(()), losses * self._loss_kept, gathered + tables * reduced)

    def at_loss(self, moment: PipelineMoment) -> PeakMemory:
        """Peak when the backward of a loss begins: gradients of the logits twice, before conversion to their dtype."""
        jobs = self.jobs
        sharded = (jobs.zero == 3) & (jobs.reshard > 0)
        gathered = self._gathered_bytes(np.where(sharded, 0.0, self.weights - self.ends))
        split = (jobs.tp > 1) * jobs.activation_bytes
        twice = moment.loss * self.logits * np.where(split > 0, self.wide + split, 2 * self.wide)
        stored = moment.losses * self._loss_kept + moment.loss * self._last_logits
        return self._peak(moment, np.zeros(()), stored + twice, gathered)

    @cached_property
    def _embedding(self) -> Column:
        """Return [3, 1...]: parameters of the embedding, on the first rank."""
        embedding: Column = self._on_first * self.table
        return embedding

    @cached_property
    def _on_first(self) -> Column:
        """Return [3, n]: 1 on the first rank of a pipeline, else 0."""
        alone = self.jobs.pp == 1
        return _stack_stages(1.0, alone, alone)

    @cached_property
    def _loss_kept(self) -> Column:
        """Bytes of probabilities, kept between a micro-batch's loss and its backward."""
        return self.logits * self.wide

    @cached_property
    def _last_logits(self) -> Column:
        """Bytes of the logits of the micro-batch that was last forward: torch's schedules of one stage keep them."""
        jobs = self.jobs
        single = (jobs.pp > 1) & np.isin(jobs.schedule, _SINGLE)
        stored: Column = single * self.logits * jobs.activation_bytes
        return stored

    def _peak(self, moment: PipelineMoment, working: Column, logits: Column, buffers: Column) -> PeakMemory:
        jobs, last = self.jobs, self.stages.last
        stored = moment.stages * self.stages.stage * self.layer + moment.last * last * self.layer
        # A stage keeps its output for every micro-batch, and the gradients it receives and sends for one.
        ends = np.where(jobs.pp > 1, ((self.moved + 1.0) * moment.stages + 2) * self.hidden, 0.0)
        ends = ends + moment.last * self.last_norm
        stages_of_first = np.maximum(jobs.virtual_stages - self.stages.has_last * (jobs.pp > 1), 1)
        in_flight = np.where(jobs.pp > 1, moment.stages / stages_of_first, moment.last)
        ends = ends + self._on_first * in_flight * self.embedding_mask
        pending = (moment.input_done * self.stages.stage + moment.input_done_last * last) * self.pending
        pending = pending + moment.input_done_last * self.logits * jobs.activation_bytes
        rest = ends + pending + working
        gradients = self._gradients(moment)
        if self._sends_gradients is not None:
            gradients = np.where(self._sends_gradients, self._unsent_sums, gradients)
        waiting = np.where(self.moved, stored, 0.0) if self._moves else np.zeros(())
        activations = np.where(self.moved, rest, stored + rest) if self._moves else stored + rest
        return PeakMemory(
            self._parameters,
            gradients,
            self._optimizer,
            activations,
            logits,
            buffers + self._accumulated,
            waiting,
        )

    @cached_property
    def _parameters(self) -> Column:
        """Bytes of the rank's own parameters on the device."""
        own: Column = self.weights * self.jobs.weight_bytes / self.shards * (self.jobs.offload < 2)
        return own

    @cached_property
    def _optimizer(self) -> Column:
        """Bytes of the optimizer's state on the device."""
        own: Column = self.weights * self.jobs.optimizer_bytes / self.shards * (self.jobs.offload == 0)
        return own

    @cached_property
    def _sends_gradients(self) -> NDArray[np.bool_] | None:
        """Whether reduced gradients go to the host at once; None if they do in no job."""
        sends: NDArray[np.bool_] = (self.jobs.offload > 1) & (self.jobs.zero >= 2)
        return sends if np.any(sends) else None

    @cached_property
    def _moves(self) -> bool:
        """Whether activations go to the host in any job."""
        return bool(np.any(self.moved))

    def _gradients(self, moment: PipelineMoment) -> Column:
        """Whole or sharded gradients of the stages that have had a backward.

        ddp's buckets are there from the first step on. Sharded gradients of a stage come with its first backward.
        """
        gradients = self.weights * self.jobs.gradient_bytes
        shards = gradients / self.shards
        unreduced = np.where(self.keeps_gradients, gradients, shards)
        found: Column = np.where(
            self.jobs.zero >= 1, moment.accumulated * unreduced + moment.reduced * shards, gradients
        )
        return found

    @cached_property
    def _unsent_sums(self) -> Column:
        """Gradients of offloaded parameters that stay on the device between micro-batches.

        HSDP reduces over dp_shard in every micro-batch and over dp_replicate only in the last; until then FSDP keeps
        the sums on the device.
        """
        jobs = self.jobs
        waits = (jobs.dp_replicate > 1) & (jobs.micro_batches > 1)
        sums: Column = self.weights * jobs.reduce_bytes / self.shards * waits
        return sums

    def _gathered_bytes(self, gathered: Column) -> Column:
        """Gathered parameters: always those of the ends, and of blocks as given."""
        jobs = self.jobs
        found = np.where(self.keeps_parameters, self.weights, self.ends + gathered) * jobs.activation_bytes
        cast = self.weights * np.where(jobs.weight_bytes > jobs.activation_bytes, jobs.activation_bytes, 0.0)
        return np.where(jobs.zero >= 1, found, cast)

    @cached_property
    def _group(self) -> Column:
        """Parameters that are reduced together."""
        jobs = self.jobs
        limit = BUCKET_MIB * MIB / jobs.weight_bytes
        several = self.block * np.maximum(np.floor(limit / self.block), 1)
        blocks = self.stages.layers * self.block
        return np.where(jobs.zero == 3, self.block, np.minimum(several, blocks))

    @cached_property
    def _accumulated(self) -> Column:
        """Bytes of gradients that ddp accumulates outside its buckets.

        The buckets hold a step's gradients from the start; those of all micro-batches but the last are kept beside
        them, until the last backward copies them there (torch, reducer.cpp: mark_variable_ready_dense).
        """
        jobs = self.jobs
        beside = (jobs.zero == 0) & (jobs.world > 1) & (jobs.micro_batches > 1)
        return self.weights * np.where(beside, jobs.gradient_bytes, 0.0)


def _stack_stages(*stages: Column | float) -> Column:
    """Stack the columns of the first, middle and last stage: [3, n], n at least 1, to broadcast against columns."""
    return np.stack(np.broadcast_arrays(*map(np.atleast_1d, stages)))


NO, MAYBE, YES = 0, 1, 2
"""Whether a job fits in memory: Memory.fits."""
FITS = ("no", "maybe", "yes")
_MEGATRON, _DEEPSPEED, _FSDP, _OURS = (STACKS.index(name) for name in ("megatron", "deepspeed", "fsdp", "hpc_train"))
_DEEPSPEED_BUFFERS = 3 * 5e8 * 2.0
"""Bytes of DeepSpeed's buckets as it comes: two to reduce and one to gather, of 5e8 16-bit elements."""
_DEEPSPEED_LIVE = 2e9 * 2.0
"""Bytes of what its zero 3 gathers at most as it comes: 1e9 16-bit parameters in use and as many ahead."""


@dataclass(frozen=True)
class Memory:
    """Bytes on one rank. Parts are [3, n]: of the first stage of the pipeline, a middle one, and the last; where a job
    has one stage the three are the same."""

    parameters: Column
    gradients: Column
    optimizer: Column
    activations: Column
    """What forward keeps for backward, of all micro-batches in flight, and what one layer needs while it computes."""
    logits: Column
    buffers: Column
    """Communication: gathered parameters, buckets."""
    fragmentation: Column
    """What the allocator holds beyond that."""
    context: Column
    """Of the driver, libraries and communicators: nvidia-smi shows it, torch does not."""
    capacity: Column
    """[n] bytes of the device."""
    host: Column
    """[n] bytes in host memory, by one rank."""
    margin: Column
    """[n]: by how much less than predicted it may be, a fraction."""
    headroom: Column
    """[n]: by how much more."""

    @property
    def stages(self) -> Column:
        """[3, n]: total of each stage."""
        parts = (self.parameters, self.gradients, self.optimizer, self.activations, self.logits, self.buffers)
        return sum(parts, self.fragmentation + self.context)

    @property
    def total(self) -> Column:
        """[n]: of the stage that needs most."""
        highest: Column = self.stages.max(axis=0)
        return highest

    @property
    def allocated(self) -> Column:
        """[3, n]: total of each stage without what only the allocator and the driver know of."""
        return self.stages - self.fragmentation - self.context

    @property
    def reserved(self) -> Column:
        """[3, n]: what the allocator has of each stage, as torch.cuda.max_memory_reserved says."""
        return self.stages - self.context

    @property
    def fits(self) -> Column:
        """[n]: NO, MAYBE or YES."""
        total = self.total
        sure, out = total * (1 + self.headroom) <= self.capacity, total * (1 - self.margin) > self.capacity
        return np.where(sure, float(YES), np.where(out, float(NO), float(MAYBE)))


def estimate_memory(jobs: Jobs, constants: Constants) -> Memory:
    """Bytes of each part on each kind of stage."""
    tokens = jobs.micro_batch * jobs.sequence / jobs.cp
    weights = _weights(jobs)
    shard = jobs.dp_shard * jobs.cp
    parameters, buffers = _parameters(jobs, weights, shard)
    gradients = weights * jobs.gradient_bytes / np.where(jobs.zero >= 2, shard, 1.0)
    deepspeed = jobs.stack == _DEEPSPEED
    # DeepSpeed has fp32 gradients of its share at the update, and beside fp32 ones that it adds up, 16-bit ones.
    shares = np.where(jobs.zero >= 1, shard, 1.0)
    gradients = gradients + weights * np.where(
        deepspeed, _duplicate_gradients(jobs) + 4 / shares * (jobs.zero >= 1), 0.0
    )
    buffers = buffers + np.where(deepspeed & (jobs.zero >= 1), _DEEPSPEED_BUFFERS, 0.0) + _accumulated(jobs, weights)
    optimizer = weights * jobs.optimizer_bytes / shares
    activations, waiting = _activations(jobs, constants, tokens)
    last = np.array([0.0, 0.0, 1.0]).reshape(3, *[1] * (weights.ndim - 1))
    logits = np.where(jobs.pp > 1, last, 1.0) * (tokens * jobs.vocab / jobs.tp * jobs.logit_bytes)
    host = _host(jobs, weights, optimizer, shard) + waiting
    optimizer = optimizer * (jobs.offload == 0)
    # Offloaded parameters take their reduced gradients to the host; zero1 accumulates whole ones on the device first.
    gradients = gradients * np.where((jobs.offload > 1) & (jobs.zero >= 2), 0.0, 1.0)
    if np.any(jobs.stack == _OURS):
        ours = estimate_peak(jobs, constants)
        own = (ours.parameters, ours.gradients, ours.optimizer, ours.activations, ours.logits, ours.buffers)
        theirs = (parameters, gradients, optimizer, activations, logits, buffers)
        chosen = (np.where(jobs.stack == _OURS, mine, other) for mine, other in zip(own, theirs, strict=True))
        parameters, gradients, optimizer, activations, logits, buffers = chosen
        host = np.where(jobs.stack == _OURS, host - waiting + ours.waiting, host)
    total = parameters + gradients + optimizer + activations + logits + buffers
    rows = np.broadcast_shapes(total.shape[1:], jobs.memory_bytes.shape)
    if not any(column.ndim for column in job_columns(jobs).values()):
        rows = ()

    def shaped(part: Column) -> Column:
        spread = np.broadcast_to(part, total.shape)
        return np.broadcast_to(spread if rows else spread[:, 0], (3, *rows))

    return Memory(
        parameters=shaped(parameters),
        gradients=shaped(gradients),
        optimizer=shaped(optimizer),
        activations=shaped(activations),
        logits=shaped(logits),
        buffers=shaped(buffers),
        fragmentation=shaped(constants.fragmentation * total),
        context=np.broadcast_to(np.float64(constants.context), (3, *rows)),
        capacity=np.broadcast_to(jobs.memory_bytes, rows),
        host=shaped(host).max(axis=0),
        margin=np.broadcast_to(np.float64(constants.memory_margin), rows),
        headroom=np.broadcast_to(_headroom(jobs, constants), rows),
    )


def _headroom(jobs: Jobs, constants: Constants) -> Column:
    ours = np.where(jobs.stack == _OURS, constants.headroom_unmeasured, constants.headroom)
    return np.where(jobs.stack == _DEEPSPEED, constants.headroom_deepspeed, ours)


def _duplicate_gradients(jobs: Jobs) -> Column:
    """DeepSpeed's bf16 optimizer keeps 16-bit gradients beside those it adds up in fp32."""
    return np.where(jobs.gradient_bytes > jobs.activation_bytes, jobs.activation_bytes, 0.0)


def _accumulated(jobs: Jobs, weights: Column) -> Column:
    """[3, n]: ddp's buckets hold a step's gradients from the start; those of all micro-batches but the last lie beside
    them, until the last backward copies them there (torch, reducer.cpp: mark_variable_ready_dense)."""
    ddp = (jobs.stack == _OURS) & (jobs.zero == 0) & (jobs.tp == 1) & (jobs.pp == 1) & (jobs.world > 1)
    return weights * np.where(ddp & (jobs.micro_batches > 1), jobs.gradient_bytes, 0.0)


def _weights(jobs: Jobs) -> Column:
    """[3, n]: parameters of a rank before any sharding over data-parallel axes."""
    layers = split_layers(jobs)
    table, layer = jobs.vocab * jobs.hidden / jobs.tp, jobs.rank_layer_parameters
    all_layers = layers.first * layer + (2 - jobs.tied) * table
    stages = (layers.first * layer + table, layers.middle * layer, layers.last * layer + table)
    return _stack_stages(*(np.where(jobs.pp == 1, all_layers, stage) for stage in stages))


def _parameters(jobs: Jobs, weights: Column, shard: Column) -> tuple[Column, Column]:
    """Kept between steps, and gathered or cast while they are used."""
    kept_whole = np.where(jobs.stack >= _FSDP, jobs.zero < 1, jobs.zero < 3)
    stored = weights * jobs.weight_bytes / np.where(kept_whole, 1.0, shard)
    # Two layers of zero 3 are there at once, the next one being gathered, and one is in gradients; others of FSDP2
    # stay gathered in 16 bits for the whole step.
    table = jobs.vocab * jobs.hidden / jobs.tp
    some = (3 * jobs.layer_parameters / jobs.tp + table) * jobs.activation_bytes
    some = np.where(jobs.stack == _DEEPSPEED, np.minimum(some, _DEEPSPEED_LIVE), some)
    some = np.minimum(some, weights * jobs.activation_bytes)
    cast = weights * np.where(jobs.weight_bytes > jobs.activation_bytes, jobs.activation_bytes, 0.0)
    gathered = np.where(jobs.zero >= 3, np.where(jobs.reshard > 0, some, cast), cast)
    return stored * (jobs.offload < 2), np.where(jobs.stack >= _FSDP, gathered, np.where(jobs.zero >= 3, some, 0.0))


def _host(jobs: Jobs, weights: Column, optimizer: Column, shard: Column) -> Column:
    """Return [3, n]: a rank's share of the offloaded state.

    That is the optimizer's, with the copy of the parameters that it updates there (parallel.zero.offload_optimizer), or
    with the parameters themselves and their gradients.
    """
    shares = np.where(jobs.zero >= 1, shard, 1.0)
    beside = np.where(jobs.offload > 1, jobs.weight_bytes + jobs.gradient_bytes, jobs.weight_bytes)
    return (optimizer + weights * beside / shares) * (jobs.offload > 0)


def _activations(jobs: Jobs, constants: Constants, tokens: Column) -> tuple[Column, Column]:
    """[3, n] on the device: of all layers of a rank and all micro-batches in flight, and of one layer that is being
    computed; [3, n] on the host, where they are offloaded.

    Then the device has one layer's at a time (Rhu et al. 2016, arXiv:1602.08124, section 3.1), and of every micro-batch
    in flight what a stage was given and what it gave on, which the pipeline itself keeps.
    """
    stored, alive = layer_activations(jobs, constants, tokens)
    layers = split_layers(jobs)
    counts = micro_batches_in_flight(jobs)
    # DeepSpeed's pipeline keeps each stage's outputs, and room for their gradients, for every micro-batch in flight.
    moved, piped = jobs.offload_activations > 0, jobs.pp > 1
    ends = tokens * jobs.hidden * jobs.activation_bytes * np.where(piped & (moved | (jobs.stack == _DEEPSPEED)), 2.0, 0)
    alive = alive + np.where(moved, full_layer_activations(jobs, constants, tokens) * (jobs.recompute == 0), 0.0)
    split = list(zip((layers.first, layers.middle, layers.last), counts, strict=True))
    total = _stack_stages(*(stored * each * count for each, count in split))
    rest = _stack_stages(*(ends * count + alive for _, count in split))
    return np.where(moved, rest, total + rest), np.where(moved, total, 0.0)
