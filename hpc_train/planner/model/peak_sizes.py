"""Sizes that decide the memory of hpc_train's own steps and that no moment of a step changes.

What is sharded, gathered and kept follows the trainer's own rules (traffic.sharding). peak_memory.py adds the sizes up
at the moments of a step.
"""

from __future__ import annotations

from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from hpc_train.planner.constants import Constants
from hpc_train.planner.model.activations import (
    asynchronous_working,
    dropout_attention_working,
    embedding_mask_bytes,
    feed_forward_activations,
    last_norm_bytes,
    layer_activations,
    pending_gradient_bytes,
)
from hpc_train.planner.model.jobs import SCHEDULES, Column, Jobs, replace_columns
from hpc_train.planner.model.pipeline import SPLITS_BACKWARD
from hpc_train.planner.model.scores import stored_scores_working
from hpc_train.planner.model.stage_layers import split_stages, stack_stages
from hpc_train.traffic.axes import BUCKET_MIB
from hpc_train.traffic.sharding import keeps_gradients, keeps_parameters
from hpc_train.units import MIB

_SINGLE = tuple(SCHEDULES.index(name) for name in ("gpipe", "1f1b"))
"""Codes of the schedules that torch runs as single-stage schedules (parallel.pipeline.schedule)."""


class PeakSizes:
    """Sizes of jobs that run hpc_train, in bytes if nothing else is said. Each is computed when it is first used."""

    def __init__(self, jobs: Jobs, constants: Constants) -> None:
        self.jobs = jobs
        tokens = jobs.micro_batch * jobs.sequence / jobs.cp
        self.stages = split_stages(jobs)
        self.table = jobs.vocab * jobs.hidden / jobs.tp
        self._ends = self.stages.tables * self.table + self.on_first * jobs.learned_positions * jobs.hidden
        self._experts, self._block = _largest_block(jobs)
        self._blocks = self._sum_blocks()
        self._weights = self._blocks + self._ends
        self._share = jobs.trained_share if jobs.has_adapters else np.ones(())
        self.trains_ends = np.where(jobs.adapter_weights > 0, 0.0, 1.0)
        self.shards = np.where(jobs.zero >= 1, jobs.dp_shard * jobs.cp, 1.0)
        self._keeps_parameters = keeps_parameters(jobs.zero, jobs.reshard, jobs.pp)
        self._keeps_gradients = keeps_gradients(jobs.zero)
        self.moved = jobs.offload_activations > 0
        self.moves = bool(np.any(self.moved))
        """Whether any job offloads activations."""
        self.drops = bool(np.any(jobs.dropout > 0))
        self.writes_scores = (jobs.dropout > 0) | (jobs.stored_scores > 0)
        """Whether any job has dropout."""
        self._activations = layer_activations(jobs, constants, tokens)
        self.layer = self._activations.stored
        width = np.where(jobs.sequence_parallel > 0, jobs.tp, 1.0)
        self.hidden = tokens * jobs.hidden * jobs.activation_bytes / width
        self.last_norm = last_norm_bytes(jobs, tokens)
        self._tokens = tokens
        self._chunked = jobs.loss_chunk > 0
        self._logits = tokens * jobs.vocab / jobs.tp
        self._wide = np.maximum(jobs.activation_bytes, 4.0)

    # Parameters of a rank, in elements.

    def _sum_blocks(self) -> Column:
        """Return the parameters of all blocks of each rank, [3, n]."""
        jobs, layers = self.jobs, self.stages.layers
        if not jobs.has_experts:
            return layers * self._block
        return layers * self._block - self._dense_blocks * (self._block - _dense_block(jobs))

    @cached_property
    def on_first(self) -> Column:
        """1 on the first rank of a pipeline, else 0: [3, n]."""
        alone = self.jobs.pp == 1
        return stack_stages(1.0, alone, alone)[: 3 if self.jobs.has_pipeline else 1]

    @cached_property
    def _embedding(self) -> Column:
        """Parameters of the embedding, on the first rank: [3, 1...]."""
        embedding: Column = self.on_first * self.table
        return embedding

    @cached_property
    def _dense_blocks(self) -> Column:
        """Blocks without experts of each rank, [3, n]; all are taken to be in the first stage."""
        first = np.where(self.jobs.pp == 1, self.stages.layers, self.stages.stage)
        dense: Column = self.on_first * np.minimum(self.jobs.dense_layers, first)
        return dense

    @cached_property
    def _held(self) -> Column:
        """Parameters of the rank before sharding over dp_shard x cp, [3, n], as if ep did not split any.

        ep splits experts over some of these ranks and fully_shard over the others, so that a rank's shard is the same.
        """
        jobs = self.jobs
        if not jobs.has_experts:
            return self._weights
        return self._weights + (jobs.ep - 1) * self._experts * (self.stages.layers - self._dense_blocks)

    @cached_property
    def _trained(self) -> Column:
        """Parameters of the rank that are trained, [3, n]; those of adapters only, if there are any."""
        return self._blocks * self._share + self._ends * self.trains_ends

    @cached_property
    def _trained_held(self) -> Column:
        """Those of _held that are trained, [3, n]; with gathered experts they are more than _trained."""
        if self._held is self._weights:
            return self._trained
        return (self._held - self._ends) * self._share + self._ends * self.trains_ends

    @cached_property
    def _group(self) -> Column:
        """Number of parameters whose gradients are reduced together: one block with zero 3, else a full bucket."""
        jobs = self.jobs
        limit = BUCKET_MIB * MIB / jobs.weight_bytes
        several = self._block * np.maximum(np.floor(limit / self._block), 1)
        group = np.where(jobs.zero == 3, self._block, np.minimum(several, self._blocks))
        # With ep, a block's experts are a group of their own.
        return np.where(jobs.ep > 1, np.maximum(self._experts, self._block - self._experts), group)

    @cached_property
    def _stage_layers(self) -> Column:
        """Layers of the rank's largest stage."""
        return np.maximum(self.stages.stage, self.stages.last * self.stages.has_last)

    @cached_property
    def stages_of_first(self) -> Column:
        """Virtual stages of a rank without the pipeline's last one, at least 1."""
        stages: Column = np.maximum(self.jobs.virtual_stages - self.stages.has_last * (self.jobs.pp > 1), 1)
        return stages

    # State of a rank.

    @cached_property
    def parameters(self) -> Column:
        """The rank's own parameters on the device."""
        own: Column = self._held * self.jobs.weight_bytes / self.shards * (self.jobs.offload < 2)
        return own

    @cached_property
    def optimizer(self) -> Column:
        """The optimizer's state on the device."""
        own: Column = self._trained_held * self.jobs.optimizer_bytes / self.shards * (self.jobs.offload == 0)
        return own

    @cached_property
    def gradients(self) -> tuple[Column, Column, Column]:
        """The rank's gradients: (whole, sharded, as they are before the reduction)."""
        whole = self._trained * self.jobs.gradient_bytes
        shards = self._trained_held * self.jobs.gradient_bytes / self.shards
        return whole, shards, np.where(self._keeps_gradients, whole, shards)

    @cached_property
    def sends_gradients(self) -> NDArray[np.bool_] | None:
        """Whether reduced gradients are copied to the host at once; None if no job does this, which saves time."""
        sends: NDArray[np.bool_] = (self.jobs.offload > 1) & (self.jobs.zero >= 2)
        return sends if np.any(sends) else None

    @cached_property
    def unsent_sums(self) -> Column:
        """Gradients of offloaded parameters that stay on the device between micro-batches.

        HSDP reduces over dp_shard in every micro-batch and over dp_replicate only in the last; until then FSDP keeps
        the sums on the device.
        """
        jobs = self.jobs
        waits = (jobs.dp_replicate > 1) & (jobs.micro_batches > 1)
        sums: Column = self._trained_held * jobs.reduce_bytes / self.shards * waits
        return sums

    @cached_property
    def accumulated(self) -> Column:
        """Gradients that ddp accumulates outside its buckets.

        The buckets hold a step's gradients from the start; those of all micro-batches but the last are kept beside
        them, until the last backward copies them there (torch, reducer.cpp: mark_variable_ready_dense).
        """
        jobs = self.jobs
        beside = (jobs.zero == 0) & (jobs.world > 1) & (jobs.micro_batches > 1)
        return self._trained * np.where(beside, jobs.gradient_bytes, 0.0)

    # Gathered parameters.

    @cached_property
    def _cast(self) -> Column:
        """16-bit copies of the parameters: ddp gathers nothing, but autocast keeps them."""
        jobs = self.jobs
        return self._weights * np.where(jobs.weight_bytes > jobs.activation_bytes, jobs.activation_bytes, 0.0)

    def _gathered_bytes(self, gathered: Column) -> Column:
        """Return the bytes of gathered parameters.

        gathered: elements of blocks; those of the ends are always gathered.
        """
        found = np.where(self._keeps_parameters, self._weights, self._ends + gathered) * self.jobs.activation_bytes
        return np.where(self.jobs.zero >= 1, found, self._cast)

    @cached_property
    def _prefetches(self) -> Column:
        """1 if the whole next block is gathered while one computes; with ep its experts are a group of their own."""
        return np.where(self.jobs.ep > 1, 0.0, 1.0)

    @cached_property
    def _frees(self) -> Column:
        """Whether fully_shard frees a block's parameters after each use."""
        frees: Column = ~self._keeps_parameters & (self.jobs.reshard > 0)
        return frees

    @cached_property
    def gathered_in_block(self) -> tuple[Column, Column]:
        """Gathered parameters in the backward of a block: (at most, beside gradients that are being reduced)."""
        layers, freed = self._stage_layers, self._frees
        ahead = 1 + self._prefetches
        most = np.where(freed, np.minimum(layers, ahead) * self._block, self._blocks)
        beside = np.where(freed, np.minimum(np.maximum(layers - 1, 1), ahead) * self._block, self._blocks)
        return self._gathered_bytes(most), self._gathered_bytes(beside)

    @cached_property
    def gathered_ahead(self) -> Column:
        """Gathered parameters when a group's gradients are reduced."""
        ahead = np.clip(self._stage_layers - 1, 0, 1) * self._prefetches
        return self._gathered_bytes(np.where(self._frees, ahead * self._block, self._blocks))

    @cached_property
    def gathered_at_loss(self) -> Column:
        """Gathered parameters when a loss's backward begins."""
        sharded = (self.jobs.zero == 3) & (self.jobs.reshard > 0)
        return self._gathered_bytes(np.where(sharded, 0.0, self._weights - self._ends))

    @cached_property
    def gathered_at_end(self) -> Column:
        """Gathered parameters at the end of a backward."""
        jobs, rest = self.jobs, np.maximum(self.stages.tables - 1, 0)
        gathered = self._gathered_bytes(self._blocks * ((jobs.zero == 3) & (jobs.reshard == 0)))
        freed = (jobs.zero == 3) & (jobs.reshard > 0)
        return np.where(freed, np.where(jobs.pp == 1, 0.0, rest * self.table) * jobs.activation_bytes, gathered)

    @cached_property
    def end_table(self) -> Column:
        """Elements of the tables whose gradients are reduced at the end of a backward."""
        tables = self.stages.tables
        table: Column = np.where(self.jobs.pp == 1, tables, np.minimum(tables, 1)) * self.table
        return table

    @cached_property
    def gathered_again(self) -> Column | None:
        """The embedding, if a backward gathers it once more; None if no job does this.

        zero3 with a split backward: I has freed the embedding, and W gathers it again. The gathered shards are copied
        into one tensor, so that for a moment both are there.
        """
        jobs = self.jobs
        again = (jobs.zero == 3) & (jobs.reshard > 0) & (jobs.pp > 1) & np.isin(jobs.schedule, SPLITS_BACKWARD)
        return again * self._embedding * jobs.activation_bytes if np.any(again) else None

    # Work within the backward of a block.

    @cached_property
    def _unmoved(self) -> Column:
        """Activations that come back from the host: all of the layer in backward, and those of the one before it."""
        block = self._activations.whole * (self.jobs.recompute == 0)
        unmoved: Column = (block + self.layer) * self.moved
        return unmoved

    @cached_property
    def freed_layer(self) -> Column:
        """Activations of a layer that are freed by the time its gradients are reduced."""
        return np.where(self.moved, 0.0, self.layer)

    @cached_property
    def _freed(self) -> Column:
        """Activations that are freed when a layer has all its weight gradients: all but the layer's input."""
        return np.where(self.moved, 0.0, np.maximum(self.layer - self.hidden, 0))

    @cached_property
    def _widest_bytes(self) -> Column:
        """The gradient of a block's widest product; of experts, of one of the three stacks of them, if larger."""
        jobs = self.jobs
        widest = jobs.hidden * jobs.feed_forward / jobs.tp
        widest = np.where(jobs.experts > 0, self._experts / 3, widest) if jobs.has_experts else widest
        widest_bytes: Column = widest * self._share * jobs.activation_bytes
        return widest_bytes

    @cached_property
    def block_working(self) -> Column:
        """What the backward of a block needs beside stored activations, or its whole gradients at the end."""
        complete = self._block * self._share * self.jobs.activation_bytes + 2 * self.hidden - self._freed
        asynchronous = asynchronous_working(self.jobs, self._tokens)
        working: Column = np.maximum(
            self._activations.working + self._unmoved + self._widest_bytes + asynchronous, complete
        )
        return working

    @cached_property
    def behind_attention(self) -> Column:
        """What the backward of attention with scores in memory needs beside stored activations."""
        again = self._activations.recomputed + self._unmoved
        before = again - feed_forward_activations(self.jobs, self._tokens)
        attention = dropout_attention_working(self.jobs, self._tokens)
        if self.jobs.has_scores:
            attention = attention + stored_scores_working(self.jobs, self._tokens)
        behind: Column = before + (2 + self.jobs.gated) * self._widest_bytes + attention
        return behind

    @cached_property
    def embedding_mask(self) -> Column:
        """The mask of the embedding's dropout."""
        return embedding_mask_bytes(self.jobs, self._tokens)

    @cached_property
    def pending(self) -> Column:
        """What a layer keeps of a micro-batch between I and W, the two parts of a split backward."""
        return pending_gradient_bytes(self.jobs, self._tokens)

    # Reduction of gradients.

    @cached_property
    def several_groups(self) -> NDArray[np.bool_]:
        """Whether a stage has more blocks than one group, so that another is gathered when the first one is reduced."""
        several: NDArray[np.bool_] = self._stage_layers * self._block > self._group * (1 + 1e-9)
        return several

    @cached_property
    def reduced(self) -> Column:
        """The buffer in which a group's gradients are reduced; zero 1 reduces whole gradients in place."""
        reduced: Column = np.where(self._keeps_gradients, 0.0, self._group * self._share * self.jobs.reduce_bytes)
        return reduced

    def first_shards(self, new: Column) -> Column:
        """Return the bytes of the first group's reduced shards. new: share that no micro-batch has allocated before."""
        jobs = self.jobs
        shards = new * self._group * self._share * jobs.gradient_bytes / self.shards
        return np.where(self._keeps_gradients, 0.0, shards) * (jobs.offload < 2)

    def reduction_working(self, pending: Column | None) -> Column:
        """Return what a reduction needs beside stored activations. pending: what no longer waits for W; None: nothing.

        16-bit gradients exist until they are copied into the buffer to reduce; afterwards the reduced shards do. The
        group's gathered parameters are freed by then.
        """
        if pending is None:
            return self._reduction_working
        return np.where(self._keeps_gradients, 0.0, self._reducing - pending)

    @cached_property
    def _reduction_working(self) -> Column:
        return np.where(self._keeps_gradients, 0.0, self._reducing)

    @cached_property
    def _reducing(self) -> Column:
        group = self._group * self._share
        beside = np.maximum(group * self.jobs.activation_bytes, group * self.jobs.gradient_bytes / self.shards)
        reducing: Column = self.reduced + beside - self._freed
        return reducing

    # Loss.

    @cached_property
    def loss_kept(self) -> Column:
        """What a loss keeps for its backward: probabilities; in chunks, gradients of hidden states and head."""
        jobs = self.jobs
        gradients = (self._tokens * jobs.hidden + self.table) * jobs.activation_bytes
        # A soft-cap also keeps its tanh, in the format of the logits.
        stored = self._logits * (self._wide + jobs.capped_logits * jobs.activation_bytes)
        saved: Column = np.where(self._chunked, gradients, stored)
        return saved

    @cached_property
    def last_logits(self) -> Column:
        """The latest micro-batch's output: torch's single-stage schedules keep it until the next forward."""
        jobs = self.jobs
        single = (jobs.pp > 1) & np.isin(jobs.schedule, _SINGLE)
        output = np.where(self._chunked, self._tokens * jobs.hidden, self._logits)
        stored: Column = single * output * jobs.activation_bytes
        return stored

    @cached_property
    def loss_working(self) -> Column:
        """The gradients of logits.

        The loss over a split vocabulary is our own and converts its fp32 gradient; torch's keeps a second fp32 one.
        """
        split = (self.jobs.tp > 1) * self.jobs.activation_bytes
        twice = self._logits * np.where(split > 0, self._wide + split, 2 * self._wide)
        return np.where(self._chunked, self._chunk, twice)

    @cached_property
    def _chunk(self) -> Column:
        """One chunk of a loss in chunks: its logits, twice in fp32, and its hidden states."""
        jobs = self.jobs
        tokens = np.minimum(jobs.loss_chunk, self._tokens)
        narrow = np.where(jobs.activation_bytes < self._wide, jobs.activation_bytes, 0.0)
        logits = tokens * jobs.vocab / jobs.tp * ((2 + jobs.capped_logits) * self._wide + narrow)
        chunk: Column = logits + tokens * jobs.hidden * jobs.activation_bytes
        return chunk

    @cached_property
    def pending_logits(self) -> Column:
        """What the head's weight gradient waits with."""
        return np.where(self._chunked, self.loss_kept, self._logits * self.jobs.activation_bytes)


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
