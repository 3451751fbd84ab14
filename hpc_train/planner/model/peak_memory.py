"""Search the peak memory of hpc_train's own steps over their moments, for the first, a middle and the last stage.

The moments are those at which a rank may hold most: inside a block, at the reduction of gradients, at the end of a
backward and at the loss. What is sharded, gathered and kept at each follows the trainer's own rules (traffic.sharding);
`plan rehearse` counts the same memory on the real passes, and a test compares the two.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from hpc_train.planner.constants import Constants
from hpc_train.planner.model.jobs import SCHEDULES, Column, Jobs, replace_columns
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
    peak_moments,
    rank_layers,
)
from hpc_train.traffic.axes import BUCKET_MIB
from hpc_train.traffic.sharding import keeps_gradients, keeps_parameters
from hpc_train.units import MIB

_SINGLE = tuple(SCHEDULES.index(name) for name in ("gpipe", "1f1b"))
"""Codes of the schedules that torch runs as single-stage schedules (parallel.pipeline.schedule)."""


@dataclass(frozen=True)
class StageLayers:
    """Layers of the first rank of a pipeline, a middle one and the last: [3, n]."""

    stage: Column
    """Layers in each of the rank's stages other than the pipeline's last; the mean if they differ."""
    last: Column
    """Layers in the pipeline's last stage."""
    has_last: Column
    """1 if the rank has the pipeline's last stage."""
    layers: Column
    """Layers in all stages of the rank."""
    tables: Column
    """Number of tables on the rank: embedding and head count 1 each."""


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

    @staticmethod
    def add_up(
        parameters: Column,
        gradients: Column,
        optimizer: Column,
        activations: Column,
        logits: Column,
        buffers: Column,
        waiting: Column,
    ) -> PeakMemory:
        """Return the parts with their total."""
        total = parameters + gradients + optimizer + activations + logits + buffers
        return PeakMemory(parameters, gradients, optimizer, activations, logits, buffers, waiting, total)


def split_stages(jobs: Jobs) -> StageLayers:
    """Split the layers as the trainer does; in V-shaped schedules the first rank has the last stage too."""
    v = jobs.virtual_stages
    bent = (jobs.pp > 1) & np.isin(jobs.schedule, V_SHAPED)
    *ranks, last = rank_layers(jobs, bent)
    layers_of_stage = stack_stages(*ranks)
    has_last = stack_stages(np.where(bent, 1.0, jobs.pp == 1), 0.0, np.where(bent, 0.0, 1.0))
    has_first = stack_stages(1.0, 0.0, jobs.pp == 1)
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
    """Return the memory of each rank at its peak: the largest total over all moments of a step."""
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


class _PeakSearch:
    """Computes the memory at a moment. Sizes that are the same at all moments are computed once."""

    def __init__(self, jobs: Jobs, constants: Constants) -> None:
        self.jobs = jobs
        tokens = jobs.micro_batch * jobs.sequence / jobs.cp
        self.stages = split_stages(jobs)
        self.table = jobs.vocab * jobs.hidden / jobs.tp
        self.ends = self.stages.tables * self.table + self._on_first * jobs.learned_positions * jobs.hidden
        self.experts, self.block = _largest_block(jobs)
        self.blocks = self._sum_blocks()
        self.weights = self.blocks + self.ends
        self.share = jobs.trained_share if jobs.has_adapters else np.ones(())
        self.trains_ends = np.where(jobs.adapter_weights > 0, 0.0, 1.0)
        self.shards = np.where(jobs.zero >= 1, jobs.dp_shard * jobs.cp, 1.0)
        self.keeps_parameters = keeps_parameters(jobs.zero, jobs.reshard, jobs.pp)
        self.keeps_gradients = keeps_gradients(jobs.zero)
        self.moved = jobs.offload_activations > 0
        self.layer, self.working = layer_activations(jobs, constants, tokens)
        # Of the layer in backward all is here, and of the one before it what comes back meanwhile.
        block_activations = full_layer_activations(jobs, constants, tokens) * (jobs.recompute == 0)
        self.unmoved = (block_activations + self.layer) * self.moved
        again = recomputed_activations(jobs, constants, tokens) + self.unmoved
        self.attention = dropout_attention_working(jobs, tokens)
        self.before_attention = again - feed_forward_activations(jobs, tokens)
        self.embedding_mask = embedding_mask_bytes(jobs, tokens)
        self.asynchronous = asynchronous_working(jobs, tokens)
        self.pending = pending_gradient_bytes(jobs, tokens)
        width = np.where(jobs.sequence_parallel > 0, jobs.tp, 1.0)
        self.hidden = tokens * jobs.hidden * jobs.activation_bytes / width
        self.last_norm = last_norm_bytes(jobs, tokens)
        self.tokens = tokens
        self.chunked = jobs.loss_chunk > 0
        self.logits = tokens * jobs.vocab / jobs.tp
        self.wide = np.maximum(jobs.activation_bytes, 4.0)

    def _sum_blocks(self) -> Column:
        """Return the parameters of all blocks of each rank, [3, n]."""
        jobs, layers = self.jobs, self.stages.layers
        if not jobs.has_experts:
            return layers * self.block
        return layers * self.block - self._dense_blocks * (self.block - _dense_block(jobs))

    @cached_property
    def _prefetches(self) -> Column:
        """1 if the whole next block is gathered while one computes; with ep its experts are a group of their own."""
        return np.where(self.jobs.ep > 1, 0.0, 1.0)

    @cached_property
    def _widest(self) -> Column:
        """Number of weights of a block's widest product on a rank: of one of the three stacks of experts, if larger."""
        widest = self.jobs.hidden * self.jobs.feed_forward / self.jobs.tp
        return np.where(self.jobs.experts > 0, self.experts / 3, widest) if self.jobs.has_experts else widest

    @cached_property
    def _dense_blocks(self) -> Column:
        """Blocks without experts of each rank, [3, n]; all are taken to be in the first stage."""
        first = np.where(self.jobs.pp == 1, self.stages.layers, self.stages.stage)
        dense: Column = self._on_first * np.minimum(self.jobs.dense_layers, first)
        return dense

    @cached_property
    def _held(self) -> Column:
        """Parameters of the rank before sharding over dp_shard x cp, [3, n], as if ep did not split any.

        ep splits experts over some of these ranks and fully_shard over the others, so that a rank's shard is the same.
        """
        jobs = self.jobs
        if not jobs.has_experts:
            return self.weights
        return self.weights + (jobs.ep - 1) * self.experts * (self.stages.layers - self._dense_blocks)

    @cached_property
    def _trained(self) -> Column:
        """Parameters of the rank that are trained, [3, n]; those of adapters only, if there are any."""
        return self.blocks * self.share + self.ends * self.trains_ends

    @cached_property
    def _trained_held(self) -> Column:
        """Those of _held that are trained, [3, n]; with gathered experts they are more than _trained."""
        if self._held is self.weights:
            return self._trained
        return (self._held - self.ends) * self.share + self.ends * self.trains_ends

    def in_block(self, moment: PipelineMoment) -> PeakMemory:
        """Return the peak within the backward of a block, the first or the second one of a stage."""
        jobs = self.jobs
        # Gradients of the first block are reduced while the second one is in backward. By then the activations of the
        # first are freed, unless they were offloaded and so were never on the device.
        reduced = self._reduced + self._first_shards(moment)
        behind = np.maximum(reduced - np.where(self.moved, 0.0, self.layer), 0)
        # In a W (input gradients exist already) weight gradients take the place of what they are computed from.
        between = moment.input_done + moment.input_done_last > 0
        working = np.where(between, 0.0, self._block_working)
        if self._drops:
            working = np.where(jobs.dropout > 0, np.maximum(working, self._behind_attention), working)
        copied = np.maximum(self._gathers_again * ~between * self._embedding * jobs.activation_bytes - working, 0)
        return self._peak(moment, working, self._losses(moment), self._buffers(behind, copied) + self._head(moment))

    @cached_property
    def _widest_bytes(self) -> Column:
        """Bytes of the gradient of a block's widest product."""
        widest: Column = self._widest * self.share * self.jobs.activation_bytes
        return widest

    @cached_property
    def _block_working(self) -> Column:
        """Bytes that the backward of a block needs beside stored activations, or its whole gradients at the end."""
        complete = self.block * self.share * self.jobs.activation_bytes + 2 * self.hidden - self._freed
        working: Column = np.maximum(self.working + self.unmoved + self._widest_bytes + self.asynchronous, complete)
        return working

    @cached_property
    def _drops(self) -> bool:
        """Whether any job has dropout."""
        return bool(np.any(self.jobs.dropout > 0))

    @cached_property
    def _behind_attention(self) -> Column:
        """Bytes that the backward of attention with dropout needs beside stored activations."""
        behind: Column = self.before_attention + (2 + self.jobs.gated) * self._widest_bytes + self.attention
        return behind

    @cached_property
    def _gathers_again(self) -> NDArray[np.bool_]:
        """Whether the backward gathers the embedding once more.

        zero3 with a split backward: I has freed the embedding, and W gathers it again. The gathered shards are copied
        into one tensor, so that for a moment both are there.
        """
        jobs = self.jobs
        again: NDArray[np.bool_] = (
            (jobs.zero == 3) & (jobs.reshard > 0) & (jobs.pp > 1) & np.isin(jobs.schedule, SPLITS_BACKWARD)
        )
        return again

    def at_reduction(self, moment: PipelineMoment) -> PeakMemory:
        """Return the peak when the first group of blocks has all gradients and copies them together to reduce."""
        jobs = self.jobs
        group = self._group * self.share
        # 16-bit gradients exist until they are copied into the buffer to reduce; afterwards the reduced shards do. The
        # group's gathered parameters are freed by then.
        beside = np.maximum(group * jobs.activation_bytes, group * jobs.gradient_bytes / self.shards)
        between = moment.input_done + moment.input_done_last > 0
        working = self._reduced + beside - self._freed - between * self.pending
        working = np.where(self.keeps_gradients, 0.0, working)
        return self._peak(moment, working, self._losses(moment), self._gathered_ahead + self._head(moment))

    @cached_property
    def _gathered_ahead(self) -> Column:
        """Bytes of gathered parameters when a group's gradients are reduced."""
        ahead = np.clip(self._stage_layers - 1, 0, 1) * self._prefetches
        return self._gathered_bytes(np.where(self._frees, ahead * self.block, self.blocks))

    @cached_property
    def _reduced(self) -> Column:
        """Bytes of the buffer in which a group's gradients are reduced; zero 1 reduces whole gradients in place."""
        reduced: Column = np.where(self.keeps_gradients, 0.0, self._group * self.share * self.jobs.reduce_bytes)
        return reduced

    def _first_shards(self, moment: PipelineMoment) -> Column:
        """Return the bytes of the first group's reduced shards, unless an earlier micro-batch has allocated them."""
        new = (self.jobs.offload < 2) * (1.0 - np.minimum(moment.accumulated + moment.reduced, 1.0))
        return np.where(
            self.keeps_gradients, 0.0, new * self._group * self.share * self.jobs.gradient_bytes / self.shards
        )

    def _losses(self, moment: PipelineMoment) -> Column:
        """Return the bytes of logits, and of what losses keep for their backward, during the backward of blocks."""
        return np.maximum(moment.losses - moment.loss, 0) * self._loss_kept + moment.loss * self._last_logits

    def _head(self, moment: PipelineMoment) -> Column:
        """Return the bytes of the head's gradient, which exists from the start of a backward to its end."""
        head: Column = moment.loss * self.table * self.trains_ends * self.jobs.activation_bytes
        return head

    @cached_property
    def _freed(self) -> Column:
        """Bytes of activations that are freed when a layer has all its weight gradients: all but the layer's input."""
        return np.where(self.moved, 0.0, np.maximum(self.layer - self.hidden, 0))

    @cached_property
    def _frees(self) -> Column:
        """Whether fully_shard frees a block's parameters after each use."""
        frees: Column = ~self.keeps_parameters & (self.jobs.reshard > 0)
        return frees

    @cached_property
    def _stage_layers(self) -> Column:
        """Layers of the rank's largest stage."""
        return np.maximum(self.stages.stage, self.stages.last * self.stages.has_last)

    def _buffers(self, behind: Column, copied: Column) -> Column:
        """Return the bytes of gathered blocks and of what exists beside them.

        behind: bytes of gradients that are being reduced. copied: bytes of an embedding that is copied together.

        fully_shard gathers the next block while one computes. In a stage of two blocks there is no next one to gather
        when the first one's gradients are reduced.
        """
        most, beside = self._gathered_in_block
        several = self._stage_layers * self.block > self._group * (1 + 1e-9)
        return np.maximum(most + copied, beside + np.maximum(behind * several, copied))

    @cached_property
    def _gathered_in_block(self) -> tuple[Column, Column]:
        """Bytes of gathered parameters: (at most, beside gradients that are being reduced)."""
        layers, freed = self._stage_layers, self._frees
        ahead = 1 + self._prefetches
        most = np.where(freed, np.minimum(layers, ahead) * self.block, self.blocks)
        beside = np.where(freed, np.minimum(np.maximum(layers - 1, 1), ahead) * self.block, self.blocks)
        return self._gathered_bytes(most), self._gathered_bytes(beside)

    def at_end(self, moment: PipelineMoment) -> PeakMemory:
        """Return the peak at the end of the backward of a stage with the embedding or the head."""
        jobs = self.jobs
        tables = np.where(jobs.pp == 1, self.stages.tables, np.minimum(self.stages.tables, 1)) * self.table
        # The gradients to reduce and the reduced shards, which exist before they are added to those of earlier
        # micro-batches.
        added = np.minimum(moment.accumulated + moment.reduced, 1.0) * jobs.gradient_bytes / self.shards
        reduced = np.where(jobs.zero >= 2, jobs.reduce_bytes + added, 0.0)
        reduced = (reduced + jobs.activation_bytes) * self.trains_ends
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
        return self._peak(later, np.zeros(()), losses * self._loss_kept, self._gathered_at_end + tables * reduced)

    @cached_property
    def _gathered_at_end(self) -> Column:
        """Bytes of gathered parameters at the end of a backward."""
        jobs, rest = self.jobs, np.maximum(self.stages.tables - 1, 0)
        gathered = self._gathered_bytes(self.blocks * ((jobs.zero == 3) & (jobs.reshard == 0)))
        freed = (jobs.zero == 3) & (jobs.reshard > 0)
        return np.where(freed, np.where(jobs.pp == 1, 0.0, rest * self.table) * jobs.activation_bytes, gathered)

    def at_loss(self, moment: PipelineMoment) -> PeakMemory:
        """Return the peak when a loss's backward begins: fp32 gradients of the logits, before and after conversion."""
        working = moment.loss * self._loss_working
        stored = moment.losses * self._loss_kept + moment.loss * self._last_logits
        return self._peak(moment, np.zeros(()), stored + working, self._gathered_at_loss)

    @cached_property
    def _gathered_at_loss(self) -> Column:
        """Bytes of gathered parameters when a loss's backward begins."""
        sharded = (self.jobs.zero == 3) & (self.jobs.reshard > 0)
        return self._gathered_bytes(np.where(sharded, 0.0, self.weights - self.ends))

    @cached_property
    def _loss_working(self) -> Column:
        """Bytes of the gradients of logits.

        The loss over a split vocabulary is our own and converts its fp32 gradient; torch's keeps a second fp32 one.
        """
        split = (self.jobs.tp > 1) * self.jobs.activation_bytes
        twice = self.logits * np.where(split > 0, self.wide + split, 2 * self.wide)
        return np.where(self.chunked, self._chunk, twice)

    @cached_property
    def _chunk(self) -> Column:
        """Bytes of one chunk of a loss in chunks: its logits, twice in fp32, and its hidden states."""
        jobs = self.jobs
        tokens = np.minimum(jobs.loss_chunk, self.tokens)
        narrow = np.where(jobs.activation_bytes < self.wide, jobs.activation_bytes, 0.0)
        logits = tokens * jobs.vocab / jobs.tp * (2 * self.wide + narrow)
        chunk: Column = logits + tokens * jobs.hidden * jobs.activation_bytes
        return chunk

    @cached_property
    def _embedding(self) -> Column:
        """Parameters of the embedding, on the first rank: [3, 1...]."""
        embedding: Column = self._on_first * self.table
        return embedding

    @cached_property
    def _on_first(self) -> Column:
        """1 on the first rank of a pipeline, else 0: [3, n]."""
        alone = self.jobs.pp == 1
        return stack_stages(1.0, alone, alone)

    @cached_property
    def _loss_kept(self) -> Column:
        """Bytes that a loss keeps for its backward: probabilities; in chunks, gradients of hidden states and head."""
        jobs = self.jobs
        gradients = (self.tokens * jobs.hidden + self.table) * jobs.activation_bytes
        saved: Column = np.where(self.chunked, gradients, self.logits * self.wide)
        return saved

    @cached_property
    def _last_logits(self) -> Column:
        """Bytes of the latest micro-batch's output: torch's single-stage schedules keep it until the next forward."""
        jobs = self.jobs
        single = (jobs.pp > 1) & np.isin(jobs.schedule, _SINGLE)
        output = np.where(self.chunked, self.tokens * jobs.hidden, self.logits)
        stored: Column = single * output * jobs.activation_bytes
        return stored

    def _peak(self, moment: PipelineMoment, working: Column, logits: Column, buffers: Column) -> PeakMemory:
        """Add up the memory at a moment. working: what the current computation needs besides stored activations."""
        jobs, last = self.jobs, self.stages.last
        stored = moment.stages * self.stages.stage * self.layer + moment.last * last * self.layer
        # torch's stages keep their output for every micro-batch in flight (offloading: their input, too), and the
        # gradients that they receive and send for one.
        ends = np.where(jobs.pp > 1, ((self.moved + 1.0) * moment.stages + 2) * self.hidden, 0.0)
        ends = ends + moment.last * self.last_norm
        in_flight = np.where(jobs.pp > 1, moment.stages / self._stages_of_first, moment.last)
        ends = ends + self._on_first * in_flight * self.embedding_mask
        pending = (moment.input_done * self.stages.stage + moment.input_done_last * last) * self.pending
        pending = pending + moment.input_done_last * self._pending_logits
        rest = ends + pending + working
        gradients = self._gradients(moment)
        if self._sends_gradients is not None:
            gradients = np.where(self._sends_gradients, self._unsent_sums, gradients)
        waiting = np.where(self.moved, stored, 0.0) if self._moves else np.zeros(())
        activations = np.where(self.moved, rest, stored + rest) if self._moves else stored + rest
        return PeakMemory.add_up(
            self._parameters,
            gradients,
            self._optimizer,
            activations,
            logits,
            buffers + self._accumulated,
            waiting,
        )

    @cached_property
    def _stages_of_first(self) -> Column:
        """Virtual stages of a rank without the pipeline's last one, at least 1."""
        stages: Column = np.maximum(self.jobs.virtual_stages - self.stages.has_last * (self.jobs.pp > 1), 1)
        return stages

    @cached_property
    def _pending_logits(self) -> Column:
        """Bytes that the head's weight gradient waits with."""
        return np.where(self.chunked, self._loss_kept, self.logits * self.jobs.activation_bytes)

    @cached_property
    def _parameters(self) -> Column:
        """Bytes of the rank's own parameters on the device."""
        own: Column = self._held * self.jobs.weight_bytes / self.shards * (self.jobs.offload < 2)
        return own

    @cached_property
    def _optimizer(self) -> Column:
        """Bytes of the optimizer's state on the device."""
        own: Column = self._trained_held * self.jobs.optimizer_bytes / self.shards * (self.jobs.offload == 0)
        return own

    @cached_property
    def _sends_gradients(self) -> NDArray[np.bool_] | None:
        """Whether reduced gradients are copied to the host at once; None if no job does this, which saves time."""
        sends: NDArray[np.bool_] = (self.jobs.offload > 1) & (self.jobs.zero >= 2)
        return sends if np.any(sends) else None

    @cached_property
    def _moves(self) -> bool:
        """Whether any job offloads activations."""
        return bool(np.any(self.moved))

    def _gradients(self, moment: PipelineMoment) -> Column:
        """Return the bytes of whole or sharded gradients of the stages that have had a backward.

        Gradients of a stage are allocated by its first backward. ddp's buckets exist from the first step on.
        """
        whole, shards, unreduced = self._gradient_bytes
        found: Column = np.where(self.jobs.zero >= 1, moment.accumulated * unreduced + moment.reduced * shards, whole)
        return found

    @cached_property
    def _gradient_bytes(self) -> tuple[Column, Column, Column]:
        """Bytes of the rank's gradients: (whole, sharded, as they are before the reduction)."""
        whole = self._trained * self.jobs.gradient_bytes
        shards = self._trained_held * self.jobs.gradient_bytes / self.shards
        return whole, shards, np.where(self.keeps_gradients, whole, shards)

    @cached_property
    def _unsent_sums(self) -> Column:
        """Bytes of gradients of offloaded parameters that stay on the device between micro-batches.

        HSDP reduces over dp_shard in every micro-batch and over dp_replicate only in the last; until then FSDP keeps
        the sums on the device.
        """
        jobs = self.jobs
        waits = (jobs.dp_replicate > 1) & (jobs.micro_batches > 1)
        sums: Column = self._trained_held * jobs.reduce_bytes / self.shards * waits
        return sums

    def _gathered_bytes(self, gathered: Column) -> Column:
        """Return the bytes of gathered parameters.

        gathered: elements of blocks; those of the ends are always gathered.
        """
        jobs = self.jobs
        found = np.where(self.keeps_parameters, self.weights, self.ends + gathered) * jobs.activation_bytes
        # ddp gathers nothing, but autocast keeps 16-bit copies of the parameters.
        cast = self.weights * np.where(jobs.weight_bytes > jobs.activation_bytes, jobs.activation_bytes, 0.0)
        return np.where(jobs.zero >= 1, found, cast)

    @cached_property
    def _group(self) -> Column:
        """Number of parameters whose gradients are reduced together: one block with zero 3, else a full bucket."""
        jobs = self.jobs
        limit = BUCKET_MIB * MIB / jobs.weight_bytes
        several = self.block * np.maximum(np.floor(limit / self.block), 1)
        group = np.where(jobs.zero == 3, self.block, np.minimum(several, self.blocks))
        # With ep, a block's experts are a group of their own.
        return np.where(jobs.ep > 1, np.maximum(self.experts, self.block - self.experts), group)

    @cached_property
    def _accumulated(self) -> Column:
        """Bytes of gradients that ddp accumulates outside its buckets.

        The buckets hold a step's gradients from the start; those of all micro-batches but the last are kept beside
        them, until the last backward copies them there (torch, reducer.cpp: mark_variable_ready_dense).
        """
        jobs = self.jobs
        beside = (jobs.zero == 0) & (jobs.world > 1) & (jobs.micro_batches > 1)
        return self._trained * np.where(beside, jobs.gradient_bytes, 0.0)


def _dense_block(jobs: Jobs) -> Column:
    """Return the parameters of a block without experts on a rank of tp."""
    dense = replace_columns(jobs, experts=0.0)
    return dense.rank_layer_parameters


def _largest_block(jobs: Jobs) -> tuple[Column, Column]:
    """Return the parameters of a block on a rank of tp and ep: (of its routed experts, of all of it)."""
    if not jobs.has_experts:
        return np.zeros(()), jobs.rank_layer_parameters
    every = replace_columns(jobs, dense_layers=0.0)
    experts = np.where(jobs.experts > 0, jobs.rank_expert_parameters, 0.0)
    return experts, every.rank_layer_parameters + experts


def stack_stages(*stages: Column | float) -> Column:
    """Stack the columns of the first, middle and last stage: [3, n], n at least 1, to broadcast against columns."""
    return np.stack(np.broadcast_arrays(*map(np.atleast_1d, stages)))
