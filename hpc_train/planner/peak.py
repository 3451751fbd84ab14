"""Memory of an hpc_train rank at the peak of a step, from the rule that its trainer shards by.

Between uses, parameters and gradients are whole or sharded as parallel.support.sharding says. Three kinds of moments
can be the peak: the backward of a loss begins, with several copies of the logits; the backward of a block, when
fully_shard has gathered it and the block before it, while the gradients of the block after it are reduced; and the end
of a stage's backward, when the gradients of embedding or head exist. A test compares the sums with what a rehearsal
counts in the real passes.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from hpc_train.parallel.support.sharding import keeps_gradients, keeps_parameters
from hpc_train.planner.activations import last_norm, layer_activations, pending_gradients, whole_layer
from hpc_train.planner.constants import Constants
from hpc_train.planner.jobs import SCHEDULES, Column, Jobs
from hpc_train.planner.moments import SPLIT, V_SHAPED, Moment, moments
from hpc_train.planner.stages import rank_layers
from hpc_train.traffic.buckets import BUCKET, MIB

_SINGLE = tuple(SCHEDULES.index(name) for name in ("gpipe", "1f1b"))
"""Codes of the schedules that torch runs with one stage a rank (parallel.pipeline.schedule)."""


@dataclass(frozen=True)
class Stages:
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
class Peak:
    """Bytes on the device, [3, n], all at the same moment."""

    parameters: Column
    gradients: Column
    optimizer: Column
    activations: Column
    logits: Column
    buffers: Column
    waiting: Column
    """Bytes of activations on the host."""

    @property
    def total(self) -> Column:
        held = self.parameters + self.gradients + self.optimizer
        return held + self.activations + self.logits + self.buffers


def stages_of(jobs: Jobs) -> Stages:
    """Split the layers as the trainer does; in V-shaped schedules the first rank has the last stage too."""
    v = jobs.virtual_stages
    bent = (jobs.pp > 1) & np.isin(jobs.schedule, V_SHAPED)
    *ranks, last = rank_layers(jobs, bent)
    held = _stacked(*ranks)
    has_last = _stacked(np.where(bent, 1.0, jobs.pp == 1), 0.0, np.where(bent, 0.0, 1.0))
    has_first = _stacked(1.0, 0.0, jobs.pp == 1)
    others = np.maximum(v - has_last, 1)
    tables = np.where(jobs.pp == 1, 2.0 - jobs.tied, has_first + has_last)
    return Stages((held - has_last * last) / others * (v > has_last), last + 0 * held, has_last, held, tables)


def peak(jobs: Jobs, constants: Constants) -> Peak:
    """Return the largest peak over all moments."""
    held = _Held(jobs, constants)
    worst: Peak | None = None
    for moment in moments(jobs):
        for found in (held.in_block(moment), held.at_loss(moment), held.at_end(moment)):
            worst = found if worst is None else _worse(worst, found)
    assert worst is not None
    return worst


def _worse(one: Peak, other: Peak) -> Peak:
    more = other.total > one.total
    names = ("parameters", "gradients", "optimizer", "activations", "logits", "buffers", "waiting")
    return Peak(*(np.where(more, getattr(other, it), getattr(one, it)) for it in names))


class _Held:
    """Bytes of each kind of tensor, computed once for all moments."""

    def __init__(self, jobs: Jobs, constants: Constants) -> None:
        self.jobs = jobs
        tokens = jobs.micro_batch * jobs.sequence / jobs.cp
        self.stages = stages_of(jobs)
        self.table = jobs.vocab * jobs.hidden / jobs.tp
        self.block = jobs.layer_parameters / jobs.tp
        self.weights = self.stages.layers * self.block + self.stages.tables * self.table
        self.shards = np.where(jobs.zero >= 1, jobs.dp_shard * jobs.cp, 1.0)
        self.keeps_parameters = keeps_parameters(jobs.zero, jobs.reshard, jobs.pp)
        self.keeps_gradients = keeps_gradients(jobs.zero)
        self.moved = jobs.offload_activations > 0
        self.layer, self.working = layer_activations(jobs, constants, tokens)
        self.unmoved = whole_layer(jobs, constants, tokens) * (jobs.recompute == 0) * self.moved
        self.pending = pending_gradients(jobs, tokens)
        width = np.where(jobs.sequence_parallel > 0, jobs.tp, 1.0)
        self.hidden = tokens * jobs.hidden * jobs.activation_bytes / width
        self.last_norm = last_norm(jobs, tokens)
        self.logits = tokens * jobs.vocab / jobs.tp
        self.wide = np.maximum(jobs.activation_bytes, 4.0)

    def in_block(self, moment: Moment) -> Peak:
        """Peak in the backward of a block, the first or the second one of a stage."""
        jobs = self.jobs
        # zero 1 reduces in place of the whole gradients it has accumulated.
        reduced = np.where(self.keeps_gradients, 0.0, self._group() * jobs.reduce_bytes)
        # The second block is already freed when the gradients of the first are reduced.
        behind = np.maximum(reduced - np.where(self.moved, 0.0, self.layer), 0)
        # If input gradients exist already, weight gradients replace what they are computed from.
        widest = jobs.hidden * jobs.feed_forward / jobs.tp * jobs.activation_bytes
        between = moment.kept + moment.kept_last > 0
        working = np.where(between, 0.0, self.working + self.unmoved + widest)
        # If a backward is split, its first part has freed an embedding that the second needs; it is copied together.
        again = (jobs.zero == 3) & (jobs.reshard > 0) & (jobs.pp > 1) & np.isin(jobs.schedule, SPLIT)
        copied = np.maximum(again * ~between * self._embedding * jobs.activation_bytes - working, 0)
        # The gradient of the head lives from the beginning of the backward to its end.
        head = moment.loss * self.table * jobs.activation_bytes
        losses = np.maximum(moment.losses - moment.loss, 0) * self._loss_kept + moment.loss * self._last_logits
        buffers = self._largest_buffers(behind, copied) + head
        return self._peak(moment, working, losses, buffers)

    def _largest_buffers(self, behind: Column, copied: Column) -> Column:
        """Gathered blocks, and beside them either gradients being reduced (behind) or a copied embedding (copied).

        With two blocks in a stage, none is left to gather when the gradients of the second are reduced.
        """
        jobs = self.jobs
        layers = np.maximum(self.stages.stage, self.stages.last * self.stages.has_last)
        freed = ~self.keeps_parameters & (jobs.reshard > 0)
        most = np.where(freed, np.minimum(layers, 2), self.stages.layers) * self.block
        beside = np.where(freed, np.minimum(np.maximum(layers - 1, 1), 2), self.stages.layers) * self.block
        several = layers * self.block > self._group() * (1 + 1e-9)
        return np.maximum(self._whole(most) + copied, self._whole(beside) + np.maximum(behind * several, copied))

    def at_end(self, moment: Moment) -> Peak:
        """Peak at the end of the backward of a stage with the embedding or the head."""
        jobs, rest = self.jobs, np.maximum(self.stages.tables - 1, 0)
        tables = np.where(jobs.pp == 1, self.stages.tables, np.minimum(self.stages.tables, 1)) * self.table
        reduced = np.where(jobs.zero >= 2, jobs.reduce_bytes, 0.0) + jobs.activation_bytes
        whole = self._whole(self.stages.layers * self.block * ((jobs.zero == 3) & (jobs.reshard == 0)))
        freed = (jobs.zero == 3) & (jobs.reshard > 0)
        whole = np.where(freed, np.where(jobs.pp == 1, 0.0, rest * self.table) * jobs.activation_bytes, whole)
        losses = np.maximum(moment.losses - moment.loss, 0)
        has_last = np.minimum(moment.last, moment.loss)
        later = replace(
            moment,
            stages=np.maximum(moment.stages - (1 - has_last), 0),
            last=moment.last - has_last,
            kept=np.maximum(moment.kept - 1, 0),
            kept_last=np.maximum(moment.kept_last - has_last, 0),
        )
        return self._peak(later, np.zeros(()), losses * self._loss_kept, whole + tables * reduced)

    def at_loss(self, moment: Moment) -> Peak:
        """Peak when the backward of a loss begins: gradients of the logits twice, before conversion to their dtype."""
        jobs = self.jobs
        sharded = (jobs.zero == 3) & (jobs.reshard > 0)
        whole = self._whole(np.where(sharded, 0.0, self.weights - self.stages.tables * self.table))
        split = (jobs.tp > 1) * jobs.activation_bytes
        twice = moment.loss * self.logits * np.where(split > 0, self.wide + split, 2 * self.wide)
        kept = moment.losses * self._loss_kept + moment.loss * self._last_logits
        return self._peak(moment, np.zeros(()), kept + twice, whole)

    @property
    def _embedding(self) -> Column:
        """Return [3, 1...]: parameters of the embedding, on the first rank."""
        first: Column = np.array([1.0, 0.0, 0.0]).reshape(3, *[1] * (self.weights.ndim - 1))
        embedding: Column = first * self.table
        return embedding

    @property
    def _loss_kept(self) -> Column:
        """Bytes of probabilities, kept between a micro-batch's loss and its backward."""
        return self.logits * self.wide

    @property
    def _last_logits(self) -> Column:
        """Bytes of the logits of the micro-batch that was last forward: torch's schedules of one stage keep them."""
        jobs = self.jobs
        single = (jobs.pp > 1) & np.isin(jobs.schedule, _SINGLE)
        kept: Column = single * self.logits * jobs.activation_bytes
        return kept

    def _peak(self, moment: Moment, working: Column, logits: Column, buffers: Column) -> Peak:
        jobs, last = self.jobs, self.stages.last
        kept = moment.stages * self.stages.stage * self.layer + moment.last * last * self.layer
        # A stage keeps its output for every micro-batch, and the gradients it receives and sends for one.
        ends = np.where(jobs.pp > 1, ((self.moved + 1.0) * moment.stages + 2) * self.hidden, 0.0)
        ends = ends + moment.last * self.last_norm
        pending = (moment.kept * self.stages.stage + moment.kept_last * last) * self.pending
        pending = pending + moment.kept_last * self.logits * jobs.activation_bytes
        rest = ends + pending + working
        return Peak(
            self.weights * jobs.weight_bytes / self.shards * (jobs.offload < 2),
            self._gradients(moment) * np.where((jobs.offload > 1) & (jobs.zero >= 2), 0.0, 1.0),
            self.weights * jobs.optimizer_bytes / self.shards * (jobs.offload == 0),
            np.where(self.moved, rest, kept + rest),
            logits + 0 * rest,
            buffers + self._accumulated(),
            np.where(self.moved, kept, 0.0),
        )

    def _gradients(self, moment: Moment) -> Column:
        """Whole or sharded gradients of the stages that have had a backward, plus those of the current block."""
        jobs = self.jobs
        whole = self.weights * jobs.gradient_bytes * np.where(jobs.zero >= 1, moment.accumulated, 1.0)
        shards = self.weights * jobs.gradient_bytes / self.shards
        return np.where(self.keeps_gradients, np.maximum(whole, shards), shards)

    def _whole(self, gathered: Column) -> Column:
        """Gathered parameters: always those of the ends, and of blocks as given."""
        jobs = self.jobs
        ends = self.stages.tables * self.table
        found = np.where(self.keeps_parameters, self.weights, ends + gathered) * jobs.activation_bytes
        cast = self.weights * np.where(jobs.weight_bytes > jobs.activation_bytes, jobs.activation_bytes, 0.0)
        return np.where(jobs.zero >= 1, found, cast)

    def _group(self) -> Column:
        """Parameters that are reduced together."""
        jobs = self.jobs
        limit = BUCKET * MIB / jobs.weight_bytes
        several = self.block * np.maximum(np.floor(limit / self.block), 1)
        blocks = self.stages.layers * self.block
        return np.where(jobs.zero == 3, self.block, np.minimum(several, blocks))

    def _accumulated(self) -> Column:
        """Bytes of gradients that ddp accumulates outside its buckets.

        The buckets hold a step's gradients from the start; those of all micro-batches but the last are kept beside
        them, until the last backward copies them there (torch, reducer.cpp: mark_variable_ready_dense).
        """
        jobs = self.jobs
        beside = (jobs.zero == 0) & (jobs.world > 1) & (jobs.micro_batches > 1)
        return self.weights * np.where(beside, jobs.gradient_bytes, 0.0)


def _stacked(*ranks: Column | float) -> Column:
    """Return [3, n], n at least 1, so that it broadcasts against columns."""
    return np.stack(np.broadcast_arrays(*map(np.atleast_1d, ranks)))
