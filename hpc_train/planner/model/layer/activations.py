"""Bytes of activations of one layer on one rank for one micro-batch.

They are what forward keeps for backward, and what backward and recomputation need for a moment. Published stacks follow
Korthikanti et al. 2022, arXiv:2205.05198, table 2, tensor by tensor; hpc_train's own models are counted as they are.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from hpc_train.planner.constants import Constants
from hpc_train.planner.model.inputs import FSDP, FULL, HPC_TRAIN, MEGATRON, SELECTIVE, Column
from hpc_train.planner.model.jobs import Jobs, choose
from hpc_train.planner.model.layer.adapters import adapter_activations
from hpc_train.planner.model.layer.experts import expert_activations, expert_gradients, mix_layers
from hpc_train.planner.model.layer.layer_work import recompute_shares

_WIDE = 4.0
"""Bytes of an fp32 element."""
_MASK = 1.0
"""Bytes of an element of a dropout mask."""
MAX_SCORES, MIN_QUERIES = 2.0**24, 16.0
"""Attention with dropout is computed in blocks of queries: at most so many scores, at least so many queries each.

The values are those of models.attention.plain_attention.
"""


@dataclass(frozen=True)
class LayerActivations:
    """Bytes of one layer and one micro-batch."""

    stored: Column
    """Bytes that forward stores for backward."""
    working: Column
    """Further bytes that the backward of one layer needs: gradients, and activations that are recomputed."""
    recomputed: Column
    """Bytes of activations that backward recomputes; 0 without recomputation."""
    unrecomputed: Column
    """Bytes that forward would store without recomputation."""


def layer_activations(jobs: Jobs, constants: Constants, tokens: Column) -> LayerActivations:
    """Return the bytes of activations of a layer.

    Published stacks follow Korthikanti et al. 2022, arXiv:2205.05198, table 2, tensor by tensor: inputs of norms and
    linear layers, what attention and the activation function keep, and dropout masks for GPTs.
    """
    everything, some, full = _token_activations(jobs)
    stored = choose(jobs.recompute == FULL, full, choose(jobs.recompute == SELECTIVE, some, everything))
    share = choose(jobs.recompute > 0, jobs.recompute_share, 0.0)
    stored = share * stored + (1 - share) * everything
    # Backward needs the gradients of the layer's widest tensors, and the positions that tp gathers.
    item = jobs.activation_bytes
    wide_gradient = item * (jobs.feed_forward * (1 + jobs.gated) / jobs.tp + 2 * jobs.hidden)
    if jobs.has_experts:
        wide_gradient = choose(jobs.experts > 0, expert_gradients(jobs), wide_gradient)
    gathered = 2 * item * jobs.hidden * (jobs.sequence_parallel > 0) * (jobs.tp > 1)
    again = choose((jobs.stack == HPC_TRAIN) & (jobs.recompute == SELECTIVE), everything - some, everything)
    recomputed = tokens * again * (jobs.recompute > 0) * constants.activations
    return LayerActivations(
        stored=tokens * stored * constants.activations,
        working=tokens * (wide_gradient + gathered) * constants.activations + recomputed,
        recomputed=recomputed,
        unrecomputed=tokens * everything * constants.activations,
    )


def _token_activations(jobs: Jobs) -> tuple[Column, Column, Column]:
    """Return a layer's activation bytes per token with recompute none, selective and full."""
    is_ours = jobs.stack == HPC_TRAIN
    if np.all(is_ours):
        return _our_token_activations(jobs)
    published = _published_token_activations(jobs)
    if not np.any(is_ours):
        return published
    everything, some, full = (
        choose(is_ours, *pair) for pair in zip(_our_token_activations(jobs), published, strict=True)
    )
    return everything, some, full


def last_norm_bytes(jobs: Jobs, tokens: Column) -> Column:
    """Return the bytes that the norm before the head of hpc_train's own models keeps per micro-batch."""
    between, norms = _norm_bytes(jobs)
    head = choose(jobs.adapter_weights > 0, 0.0, jobs.activation_bytes * jobs.hidden)  # a frozen head keeps no input
    return tokens * (between + norms / 2 + head)


def pending_gradient_bytes(jobs: Jobs, tokens: Column) -> Column:
    """Return the bytes that a layer keeps of a micro-batch between I and W, the two parts of a split backward.

    These are the gradients of the outputs of products and norms, from which W computes weight gradients; those of
    row-parallel layers are gathered over tp. For hpc_train's own models.
    """
    item, hidden = jobs.activation_bytes, jobs.hidden
    width = choose(jobs.sequence_parallel > 0, jobs.tp, 1.0)
    eager = (jobs.gated > 0) & (jobs.fused_elementwise == 0) & (item < _WIDE)
    norms = 2 * choose(eager, _WIDE, item) * hidden / width * (1 + jobs.output_norms)
    heads = (jobs.heads / jobs.tp + 2 * jobs.rank_key_heads) * jobs.head_dim
    return tokens * (norms + item * (heads + 2 * hidden + (1 + jobs.gated) * jobs.feed_forward / jobs.tp))


def _norm_bytes(jobs: Jobs) -> tuple[Column, Column]:
    """Return bytes per token of hpc_train's models: (input of one norm, what a layer's two norms keep besides)."""
    item, hidden = jobs.activation_bytes, jobs.hidden
    width = choose(jobs.sequence_parallel > 0, jobs.tp, 1.0)
    # Without fully_shard, precision is autocast's: the residual stream stays in fp32.
    autocast = (jobs.zero == 0) & (jobs.tp == 1) & (jobs.pp == 1) & (item < _WIDE)
    eager = jobs.fused_elementwise == 0
    # An RMSNorm that is not fused keeps its normalised input, in fp32 and rounded to 16 bits.
    norms = 2 * _norm_result_bytes(jobs) * hidden / width * (jobs.gated * eager)
    norms = norms + choose(autocast, 2 * item * hidden, 0.0)
    return choose(autocast, _WIDE, item) * hidden / width, norms


def _norm_result_bytes(jobs: Jobs) -> Column:
    """Return the bytes per element that an RMSNorm that is not fused keeps besides its input.

    The input in fp32, if that is wider, counts here with the bytes that it has more.
    """
    item = jobs.activation_bytes
    trained = choose(item < _WIDE, _WIDE + item, item)
    if not jobs.has_adapters:
        return trained
    # A frozen weight needs no normalised input.
    return choose(jobs.adapter_weights > 0, choose(item < _WIDE, _WIDE - item, 0.0), trained)


def _dropout_bytes(jobs: Jobs) -> Column:
    """Return the bytes per token that dropout adds to a layer: two masks, and keys and values for every head.

    Over cp, attention with dropout gathers the keys and values of the whole sequence (parallel.context).
    """
    width = choose(jobs.sequence_parallel > 0, jobs.tp, 1.0)
    more_heads = jobs.heads / jobs.tp * _key_share(jobs) - jobs.rank_key_heads
    more_keys = 2 * more_heads * jobs.head_dim * jobs.activation_bytes
    return jobs.dropout * (2 * _MASK * jobs.hidden / width + more_keys)


def _key_share(jobs: Jobs) -> Column:
    """Return the ratio of the keys that a rank's attention sees to the positions that it has."""
    return choose(jobs.ulysses > 0, 1.0, jobs.cp)


def embedding_mask_bytes(jobs: Jobs, tokens: Column) -> Column:
    """Return the bytes of the mask of the embedding's dropout, kept for every micro-batch in flight."""
    return jobs.dropout * tokens * _MASK * jobs.hidden / choose(jobs.sequence_parallel > 0, jobs.tp, 1.0)


def dropout_attention_working(jobs: Jobs, tokens: Column) -> Column:
    """Return the bytes that the backward of attention with dropout needs at its peak; 0 without dropout.

    For hpc_train's models (plain_attention). For one block of queries: four fp32 tensors of the size of its
    scores (weights, their gradients before and after the mask, one temporary) and the mask. For all queries: gradients
    of queries and of the result, and of keys and values in fp32.
    """
    fp32 = np.maximum(jobs.activation_bytes, _WIDE)
    heads = jobs.heads / jobs.tp / choose(jobs.ulysses > 0, jobs.cp, 1.0)
    queries = jobs.sequence / choose(jobs.ulysses > 0, 1.0, jobs.cp)
    rows = jobs.micro_batch * heads * jobs.sequence
    scores = rows * np.minimum(queries, np.maximum(MIN_QUERIES, np.floor(MAX_SCORES / rows)))
    made = tokens * jobs.heads * jobs.head_dim / jobs.tp
    gradients = made * (2 * jobs.activation_bytes + 2 * fp32 * _key_share(jobs))
    working: Column = jobs.dropout * (scores * (4 * fp32 + _MASK) + gradients)
    return working


def asynchronous_working(jobs: Jobs, tokens: Column) -> Column:
    """Return the additional bytes of asynchronous tensor parallelism in the backward of a feed-forward layer.

    These are the gradient of its second weight, added up in fp32, and the layer's input with its gradient, split over
    positions (parallel.tensor.ring_matmul).
    """
    width = jobs.feed_forward / jobs.tp
    fp32 = np.maximum(jobs.activation_bytes, _WIDE)
    split = tokens * width * jobs.activation_bytes * (2 - jobs.gated)
    return jobs.overlap_tensor * (jobs.tp > 1) * (jobs.hidden * width * fp32 + split)


def feed_forward_activations(jobs: Jobs, tokens: Column) -> Column:
    """Return the part of LayerActivations.unrecomputed that the feed-forward half keeps, for hpc_train's own models."""
    item, hidden = jobs.activation_bytes, jobs.hidden
    between, norms = _norm_bytes(jobs)
    widened = choose(jobs.gated > 0, 3 + (jobs.fused_elementwise == 0), 2.0) * jobs.feed_forward / jobs.tp * item
    if jobs.has_experts:
        widened = mix_layers(jobs, widened, expert_activations(jobs))
    masks = jobs.dropout * _MASK * hidden / choose(jobs.sequence_parallel > 0, jobs.tp, 1.0)
    return tokens * ((between + norms / 2) * (1 + jobs.output_norms) + item * hidden + widened + masks)


def _published_token_activations(jobs: Jobs) -> tuple[Column, Column, Column]:
    """Return a published stack's activation bytes per token with recompute none, selective and full."""
    item, width = jobs.activation_bytes, choose(jobs.sequence_parallel > 0, jobs.tp, 1.0)
    masks = choose((jobs.gated > 0) | (jobs.stack >= FSDP), 0.0, 2.0)
    # Megatron's 8-bit layers (Transformer Engine) keep the inputs of products in 8 bits; others keep them in 16.
    given = choose((jobs.peak_flops > jobs.peak_flops_attention) & (jobs.stack == MEGATRON), 1.0, item)
    unsplit = (2 * item + 2 * given + masks) * jobs.hidden / width
    # Attention keeps queries, keys, values and its result.
    heads = (2 * jobs.heads + 2 * jobs.kv_heads) * jobs.head_dim / jobs.tp * item
    eager = choose(jobs.fused_elementwise > 0, 0.0, item)
    feed_forward = choose(jobs.gated > 0, 2 * item + eager + given, item + given) * jobs.feed_forward / jobs.tp
    if jobs.has_experts:
        feed_forward = mix_layers(jobs, feed_forward, expert_activations(jobs))
    # Without fused attention: softmax, its dropout's result and a one-byte mask for every pair of positions.
    scores = (2 * item + 1) * jobs.heads / jobs.tp * jobs.sequence * (jobs.fused_attention == 0)
    linear, attention, elementwise = recompute_shares(jobs)
    some = (
        unsplit * choose(elementwise > 0, 0.5, 1.0)
        + heads
        + feed_forward * (1 - 0.5 * elementwise)
        + scores * (1 - attention)
    )
    return unsplit + heads + feed_forward + scores, some * (1 - 0.5 * linear), item * jobs.hidden / width


def _our_token_activations(jobs: Jobs) -> tuple[Column, Column, Column]:
    """Return the activation bytes per token of hpc_train's models with recompute none, selective and full.

    A test compares them with what a rehearsal counts. The inputs of the two norms are split as positions are; the
    inputs of the two column-parallel layers are kept gathered (parallel.tensor.layers). Selective recomputation keeps
    the results of products and attention, those of row-parallel layers before they are summed and scattered.
    """
    item, hidden = jobs.activation_bytes, jobs.hidden
    between, norms = _norm_bytes(jobs)
    eager = jobs.fused_elementwise == 0
    heads = (2 * jobs.heads / jobs.tp + 2 * jobs.rank_key_heads) * jobs.head_dim * item
    inputs, kept_widths = 2 * item * hidden, choose(jobs.gated > 0, 3 + eager, 2.0)
    if jobs.has_adapters:  # products with frozen weights keep no inputs
        frozen = jobs.adapter_weights > 0
        inputs, kept_widths = choose(frozen, 0.0, inputs), kept_widths - frozen
    widened = kept_widths * jobs.feed_forward / jobs.tp * item
    products = (1 + jobs.gated) * jobs.feed_forward / jobs.tp * item
    if np.any(jobs.head_norms):
        normalised = (jobs.heads / jobs.tp + jobs.rank_key_heads) * jobs.head_dim
        # A norm over heads that tp splits keeps only its input (parallel.tensor.full_norms).
        results = choose((jobs.full_norms > 0) & (jobs.tp > 1), 0.0, _norm_result_bytes(jobs))
        heads = heads + jobs.head_norms * normalised * (item + results)
    if jobs.has_latent:
        heads = heads + choose(jobs.key_rank > 0, _latent_bytes(jobs), 0.0)
    if jobs.has_experts:
        widened = mix_layers(jobs, widened, expert_activations(jobs))
        products = mix_layers(jobs, products, (2 * jobs.shared_width / jobs.tp + jobs.experts) * item)
    # ulysses keeps attention's result as its kernel returns it, and again as the output layer reads it.
    exchanged = (jobs.ulysses > 0) * (jobs.cp > 1) * jobs.heads * jobs.head_dim / jobs.tp * item
    normed = (2 * between + norms) * (1 + jobs.output_norms)
    everything = normed + inputs + heads + exchanged + widened + _dropout_bytes(jobs)
    some = between + heads + 2 * item * hidden + products
    if jobs.has_scores:
        everything, some = _add_scores(jobs, everything, some)
    if jobs.has_adapters:
        stored, stored_selective = adapter_activations(jobs)
        everything, some = everything + stored, some + stored_selective
    return everything, some, between


def _latent_bytes(jobs: Jobs) -> Column:
    """Return the bytes per token that latent attention keeps besides queries, keys, values and the result.

    These are the latents before and after their norms, and the result without the columns that pad values to the width
    of keys.
    """
    item = jobs.activation_bytes
    latents = (jobs.query_rank + jobs.key_rank) * (item + _norm_result_bytes(jobs))
    return latents + jobs.heads * jobs.value_dim / jobs.tp * item


def _add_scores(jobs: Jobs, everything: Column, some: Column) -> tuple[Column, Column]:
    """Add what a layer stores of its scores to its activation bytes per token: (without recomputation, selective).

    Of each score the softmax in fp32 is stored, as the product with the values reads it, and tanh of a soft-cap.
    Selective recomputation stores the product itself. Where scores are stored or masked, keys and values are repeated
    for every head. A mask is converted to the format of queries in every layer.
    """
    item = jobs.activation_bytes
    scores = jobs.heads / jobs.tp * jobs.sequence * jobs.stored_scores
    softmax = choose(item == _WIDE, _WIDE, _WIDE + item) + jobs.capped_scores * item
    more_heads = np.maximum(jobs.heads / jobs.tp - jobs.rank_key_heads, 0)
    repeated = 2 * more_heads * jobs.head_dim * item * np.maximum(jobs.stored_scores, jobs.masked_share)
    masks = jobs.masked_share * jobs.sequence * item
    return everything + scores * softmax + repeated + masks, some + scores * item


def stored_scores_working(jobs: Jobs, tokens: Column) -> Column:
    """Return the bytes that the backward of attention with stored scores needs: two gradients in fp32."""
    working: Column = tokens * jobs.heads / jobs.tp * jobs.sequence * jobs.stored_scores * 2 * _WIDE
    return working
