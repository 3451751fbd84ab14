"""Count the bytes that no moment of a step changes: those of weights, of a block's activations and of the loss."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from hpc_train.planner.constants import Constants
from hpc_train.planner.model.inputs import SCHEDULES, Column
from hpc_train.planner.model.jobs import Jobs, choose
from hpc_train.planner.model.layer.activations import (
    LayerActivations,
    asynchronous_working,
    dropout_attention_working,
    embedding_mask_bytes,
    feed_forward_activations,
    last_norm_bytes,
    layer_activations,
    pending_gradient_bytes,
    stored_scores_working,
)
from hpc_train.planner.model.layer.adapters import expansion_bytes, row_factor_bytes
from hpc_train.planner.model.peak_memory.rank_weights import (
    GatheredParameters,
    RankState,
    RankWeights,
    ReducedGroup,
    count_gathered,
    count_rank_weights,
    count_reduced_group,
    count_state,
)
from hpc_train.planner.model.pipeline import SPLITS_BACKWARD
from hpc_train.planner.model.stage_layers import StageLayers

_SINGLE_STAGE = tuple(SCHEDULES.index(name) for name in ("gpipe", "1f1b"))
"""Codes of the schedules that torch runs as single-stage schedules (parallel.pipeline.schedule)."""


@dataclass(frozen=True)
class BlockSizes:
    """Bytes of the activations of blocks on a rank, and what the backward of a block needs, for one micro-batch."""

    stored: Column
    """Bytes that the forward of a layer stores for its backward."""
    hidden: Column
    """Hidden states between two layers."""
    last_norm: Column
    """Bytes that the norm before the head stores."""
    offloaded: NDArray[np.bool_]
    """Whether stored activations wait in host memory."""
    any_offloaded: bool
    working: Column
    """Bytes that the backward of a block needs besides stored activations, or its whole gradients at the end."""
    attention_working: Column | None
    """Bytes for the backward of attention besides stored activations, 0 where its scores are not in memory; None: in
    no job."""
    freed: Column
    """Activations of a layer that are on the device no more when its gradients are reduced."""
    freed_before: Column
    """Activations that are freed when a layer has all its weight gradients: all but the layer's input."""
    embedding_mask: Column | None
    """The mask of the embedding's dropout; None: no job has dropout."""
    pending: Column | None
    """Bytes that a layer keeps between I and W, the two parts of a split backward; None: no job splits backward."""


def _size_blocks(jobs: Jobs, constants: Constants, weights: RankWeights) -> BlockSizes:
    """Return the bytes of a block's activations and of its backward."""
    tokens = jobs.micro_batch * jobs.sequence / jobs.cp
    layer = layer_activations(jobs, constants, tokens)
    width = choose(jobs.sequence_parallel > 0, jobs.tp, 1.0)
    hidden = tokens * jobs.hidden * jobs.activation_bytes / width
    offloaded = jobs.offload_activations > 0
    freed_before = choose(offloaded, 0.0, np.maximum(layer.stored - hidden, 0))
    # Activations that come back from the host: all of the layer in backward, and those of the one before it.
    fetched = (layer.unrecomputed * (jobs.recompute == 0) + layer.stored) * offloaded
    widest = _size_widest_gradient(jobs, weights)
    computing = layer.working + fetched + widest + asynchronous_working(jobs, tokens)
    if jobs.has_adapters:
        # A forward that is recomputed computes DoRA's lengths again, before there are gradients of its layers.
        computing = np.maximum(computing + expansion_bytes(jobs), layer.recomputed + row_factor_bytes(jobs))
    complete = weights.block * weights.trained_share * jobs.activation_bytes + 2 * hidden - freed_before
    splits = np.any((jobs.pp > 1) & np.isin(jobs.schedule, SPLITS_BACKWARD))
    return BlockSizes(
        stored=layer.stored,
        hidden=hidden,
        last_norm=last_norm_bytes(jobs, tokens),
        offloaded=offloaded,
        any_offloaded=bool(np.any(offloaded)),
        working=np.maximum(computing, complete),
        attention_working=_size_attention_backward(jobs, layer, fetched, widest, tokens),
        freed=choose(offloaded, 0.0, layer.stored),
        freed_before=freed_before,
        embedding_mask=embedding_mask_bytes(jobs, tokens) if np.any(jobs.dropout > 0) else None,
        pending=pending_gradient_bytes(jobs, tokens) if splits else None,
    )


def _size_widest_gradient(jobs: Jobs, weights: RankWeights) -> Column:
    """Return the gradient of a block's widest product; of experts, of one of the three stacks of them, if larger."""
    widest = jobs.hidden * jobs.feed_forward / jobs.tp
    widest = choose(jobs.experts > 0, weights.experts / 3, widest) if jobs.has_experts else widest
    return widest * weights.trained_share * jobs.activation_bytes


def _size_attention_backward(
    jobs: Jobs, layer: LayerActivations, fetched: Column, widest: Column, tokens: Column
) -> Column | None:
    """Return what the backward of attention with scores in memory needs; None if no job has it.

    fetched: activations that come back from the host. widest: the gradient of the widest product. By then backward has
    freed the activations of the feed-forward layer, and has its weight gradients.
    """
    in_memory = (jobs.dropout > 0) | (jobs.stored_scores > 0)
    if not np.any(in_memory):
        return None
    left = layer.recomputed + fetched - feed_forward_activations(jobs, tokens)
    attention = dropout_attention_working(jobs, tokens)
    if jobs.has_scores:
        attention = attention + stored_scores_working(jobs, tokens)
    return choose(in_memory, left + (2 + jobs.gated) * widest + attention, 0.0)


@dataclass(frozen=True)
class LossSizes:
    """Bytes of logits and of the loss on the rank with the head, for one micro-batch, [n]."""

    stored: Column
    """Bytes that a loss stores for its backward: probabilities; in chunks, gradients of hidden states and head."""
    last_logits: Column
    """The latest micro-batch's output: torch's single-stage schedules keep it until the next forward."""
    working: Column
    """The gradients of logits."""
    pending: Column
    """Bytes that the head keeps for its weight gradient, between I and W."""


def _size_loss(jobs: Jobs, table: Column) -> LossSizes:
    """Return the bytes of logits and of the loss. table: trained weights of the head on the rank."""
    tokens = jobs.micro_batch * jobs.sequence / jobs.cp
    item = jobs.activation_bytes
    in_chunks, logits, fp32 = jobs.loss_chunk > 0, tokens * jobs.vocab / jobs.tp, np.maximum(item, 4.0)
    # A soft-cap also stores its tanh, in the format of the logits.
    probabilities = logits * (fp32 + jobs.capped_logits * item)
    stored = choose(in_chunks, (tokens * jobs.hidden + table) * item, probabilities)
    single_stage = (jobs.pp > 1) & np.isin(jobs.schedule, _SINGLE_STAGE)
    # The loss over a split vocabulary is our own and converts its fp32 gradient; torch's keeps a second fp32 one.
    converted = (jobs.tp > 1) * item
    gradients = logits * choose(converted > 0, fp32 + converted, 2 * fp32)
    # One chunk: its logits, twice in fp32, and its hidden states.
    chunk = np.minimum(jobs.loss_chunk, tokens)
    narrow = choose(item < fp32, item, 0.0)
    chunk_logits = chunk * jobs.vocab / jobs.tp * ((2 + jobs.capped_logits) * fp32 + narrow)
    return LossSizes(
        stored=stored,
        last_logits=single_stage * choose(in_chunks, tokens * jobs.hidden, logits) * item,
        working=choose(in_chunks, chunk_logits + chunk * jobs.hidden * item, gradients),
        pending=choose(in_chunks, stored, logits * item),
    )


@dataclass(frozen=True)
class StepSizes:
    """All sizes of jobs that no moment of a step changes."""

    jobs: Jobs
    weights: RankWeights
    state: RankState
    gathered: GatheredParameters
    group: ReducedGroup
    block: BlockSizes
    loss: LossSizes


def size_step(jobs: Jobs, constants: Constants, stages: StageLayers) -> StepSizes:
    """Return all sizes of jobs that no moment of a step changes, on the ranks of `stages`."""
    weights = count_rank_weights(jobs, stages)
    return StepSizes(
        jobs,
        weights,
        count_state(jobs, weights),
        count_gathered(jobs, weights),
        count_reduced_group(jobs, weights),
        _size_blocks(jobs, constants, weights),
        _size_loss(jobs, weights.table * weights.trains_ends),
    )
