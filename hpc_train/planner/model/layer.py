"""Cost of one layer, and of embedding and head, on one rank for one micro-batch: seconds and bytes of activations.

Matrix products are timed by their shape (tiles, waves, alignment), elementwise work by memory bandwidth. Activations
are what forward keeps for backward, and what recomputation needs for a moment.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from hpc_train.planner.constants import Constants
from hpc_train.planner.model.experts import (
    expert_activations,
    expert_elementwise,
    expert_gradients,
    expert_kernels,
    expert_products,
    mix_layers,
)
from hpc_train.planner.model.jobs import RECOMPUTE, STACKS, Column, Jobs
from hpc_train.planner.model.products import linear_seconds, misalignment_factor, wide_products

# Elementwise work is limited by memory bandwidth. A pass reads or writes every element of a tensor once. These are the
# passes of a layer's forward in the fused kernels of Megatron-LM (bias + GELU, bias + dropout + add, scale + mask +
# softmax).
_NORM_PASSES = 4.0  # two norms, each reads its input and writes its result
_RESIDUAL_PASSES = 7.0  # two additions, each reads input, residual and a one-byte mask, and writes the result
_WIDE_PASSES = 2.0  # the activation function reads and writes the widened tensor
_GATED_PASSES = 3.0  # SwiGLU reads both branches and writes one
_ROTARY_PASSES = 4.0  # rotary embeddings read and write queries and keys, with one result in between
_BACKWARD_PASSES = 1.5
"""Passes of backward over those of forward: it also reads the incoming gradient."""
_LOGIT_BYTES = 40.0
"""Bytes moved per logit, forward and backward, in fp32: cast, maximum, exponentials, sum, and their gradients."""
_KERNELS_FORWARD, _KERNELS_BACKWARD = 26.0, 44.0
"""Kernel launches of a layer in PyTorch profiles of GPT layers without fused attention."""
_FUSED_KERNELS = 0.6
"""Share of these launches that is left if attention, or chains of elementwise operations, are fused."""
_MEGATRON, _DEEPSPEED, _FSDP, _OURS = (STACKS.index(name) for name in ("megatron", "deepspeed", "fsdp", "hpc_train"))


@dataclass(frozen=True)
class LayerWork:
    """Seconds of work of one rank for one micro-batch."""

    forward: Column
    """Forward of one layer."""
    backward: Column
    """Backward of one layer, without recomputation."""
    again: Column
    """Recomputation of one layer."""
    head: Column
    """Forward and backward of the head and the loss."""
    embedding: Column
    """Forward and backward of the embedding."""
    launch_forward: Column
    """Time of the host to launch the kernels of one layer's forward."""
    launch_backward: Column
    flops_again: Column
    """FLOPs of recomputing one layer, on all tp and cp ranks together."""


def layer_work(jobs: Jobs, constants: Constants) -> LayerWork:
    """Estimate the seconds of a layer, the head and the embedding."""
    tokens = jobs.micro_batch * jobs.sequence / jobs.cp
    linear, ending = _linear(jobs, constants, tokens)
    core, core_backward = _attention(jobs, constants, tokens)
    plain, plain_backward = _elementwise(jobs, constants, tokens)
    share = np.where(jobs.recompute > 0, jobs.recompute_share, 0.0)
    lin, att, ele = recompute_shares(jobs)
    # torch stops recomputing before a layer's last product, since backward does not need its result (stack >= 2: FSDP
    # and hpc_train). Megatron and DeepSpeed recompute it.
    kernels = np.where(jobs.fused_attention + jobs.fused_elementwise > 0, _FUSED_KERNELS, 1.0)
    kernels = kernels * _launch_seconds(jobs, constants)
    full, more = share * lin, expert_kernels(jobs)
    products: Column = np.full((), 2.0)
    if jobs.has_adapters:
        # Frozen weights have no gradients: one product of backward is left. The adapter's own are thin.
        adapters = _adapter_elementwise(jobs, constants, tokens)
        plain, plain_backward = plain + adapters, plain_backward + 2 * adapters
        products = np.where(jobs.adapter_weights > 0, 1.0, 2.0)
    return LayerWork(
        forward=linear + core + plain,
        backward=products * linear + core_backward + plain_backward,
        again=share * (lin * (linear - np.where(jobs.stack >= 2, ending, 0.0)) + att * core + ele * plain),
        head=_head(jobs, constants, tokens),
        embedding=_embedding(jobs, constants, tokens),
        launch_forward=kernels * (_KERNELS_FORWARD + more),
        launch_backward=kernels * (_KERNELS_BACKWARD + 2 * more + (_KERNELS_FORWARD + more) * full),
        flops_again=share
        * (lin * 2 * jobs.layer_parameters + att * 2 * attention_score_width(jobs))
        * tokens
        * jobs.cp,
    )


def _launch_seconds(jobs: Jobs, constants: Constants) -> Column:
    """Return the host's seconds to launch one kernel. hpc_train's own tp has plain tensors inside of its layers."""
    dispatched = (jobs.stack == _FSDP) & (jobs.tp > 1) & (jobs.fused_elementwise == 0)
    found: Column = np.where(jobs.stack == _DEEPSPEED, constants.launch_deepspeed, constants.launch)
    return np.where(dispatched, constants.launch_dtensor, found)


def attention_score_width(jobs: Jobs) -> Column:
    """Return the multiply-adds of one token's attention in forward: scores, then the weighted sum of values.

    Fused causal attention skips the half of the positions that are masked.
    """
    return jobs.heads * jobs.attention_dim * jobs.sequence * np.where(jobs.fused_attention > 0, 1.0, 2.0)


def recompute_shares(jobs: Jobs) -> tuple[Column, Column, Column]:
    """Return the shares of linear layers, of attention and of elementwise work that a recomputed layer repeats.

    full repeats everything. selective differs between stacks: Megatron and DeepSpeed repeat attention (Korthikanti et
    al. 2022, arXiv:2205.05198, section 5), torchtitan (FSDP) every second product and elementwise work, hpc_train
    elementwise work only.
    """
    full, fsdp, is_ours = jobs.recompute == 2, jobs.stack == 2, jobs.stack == 3
    some = jobs.recompute == 1
    linear = np.where(full, 1.0, np.where(some & fsdp, 0.5, 0.0))
    core = np.where(full | (some & ~is_ours & ~fsdp), 1.0, 0.0)
    plain = np.where(full | (some & (fsdp | is_ours)), 1.0, 0.0)
    return linear, core, plain


def _linear(jobs: Jobs, constants: Constants, tokens: Column) -> tuple[Column, Column]:
    """Return the forward seconds of a layer's linear layers: (all four products, the last one alone).

    tp splits them by columns, rows, columns and rows: queries, keys and values; attention's output; the two of the
    feed-forward layer.
    """
    # If tp exceeds the number of key and value heads, ranks compute the same heads more than once.
    queries = jobs.heads * jobs.head_dim / jobs.tp
    keys = jobs.kv_heads * jobs.head_dim / np.minimum(jobs.tp, jobs.kv_heads)
    wide = jobs.feed_forward / jobs.tp
    found = linear_seconds(jobs, constants, tokens, jobs.hidden, queries + 2 * keys)
    found = found + linear_seconds(jobs, constants, tokens, queries, jobs.hidden)
    if jobs.has_latent:
        found = np.where(jobs.key_rank > 0, _latent(jobs, constants, tokens), found)
    first = linear_seconds(jobs, constants, tokens, jobs.hidden, wide * (1 + jobs.gated))
    ending = linear_seconds(jobs, constants, tokens, wide, jobs.hidden)
    if jobs.has_experts:
        routed = expert_products(jobs, constants, tokens)
        first, ending = (mix_layers(jobs, *pair) for pair in zip((first, ending), routed, strict=True))
    return found + first + ending, ending


def _latent(jobs: Jobs, constants: Constants, tokens: Column) -> Column:
    """Return the forward seconds of the linear layers of latent attention."""
    has_queries = jobs.query_rank > 0
    narrow = jobs.query_rank + jobs.key_rank + jobs.rotary_width
    queries, values = jobs.heads * jobs.head_dim / jobs.tp, jobs.heads * jobs.value_dim / jobs.tp
    expanded = jobs.heads * (jobs.head_dim - jobs.rotary_width + jobs.value_dim) / jobs.tp
    # Where tp splits positions, each rank makes the latents of its own.
    own = tokens / np.where(jobs.sequence_parallel > 0, jobs.tp, 1.0)
    found = linear_seconds(jobs, constants, own, jobs.hidden, np.maximum(narrow, 1))
    found = found + linear_seconds(
        jobs, constants, tokens, np.where(has_queries, jobs.query_rank, jobs.hidden), queries
    )
    found = found + linear_seconds(jobs, constants, tokens, np.maximum(jobs.key_rank, 1), expanded)
    return found + linear_seconds(jobs, constants, tokens, np.maximum(values, 1), jobs.hidden)


def _attention(jobs: Jobs, constants: Constants, tokens: Column) -> tuple[Column, Column]:
    """Return the seconds of attention without its projections: (forward, backward)."""
    width = jobs.heads * jobs.attention_dim / jobs.tp
    peak = jobs.peak_flops_attention * jobs.gemm_ceiling
    slow = misalignment_factor(jobs.head_dim, constants)
    # Fused: half of the pairs, since causal. Its backward takes 2.5 times forward: five products in place of two,
    # because it computes the scores again (Dao et al. 2022, arXiv:2205.14135).
    flash = jobs.peak_flops_attention * jobs.attention_ceiling * constants.flash_efficiency
    # Ring attention computes blocks of one rank's positions by another's.
    positions = jobs.sequence / np.where(jobs.ulysses > 0, 1.0, jobs.cp)
    flash = flash * positions / (positions + constants.flash_half)
    fused = 2 * tokens * jobs.sequence * width * slow / flash
    # Not fused: two products over all pairs, and passes over the scores in memory.
    scores = tokens * jobs.sequence * jobs.heads / jobs.tp * jobs.activation_bytes / jobs.memory_bandwidth
    products = 4 * tokens * jobs.sequence * width * slow / (peak * constants.gemm_efficiency)
    products = products + 2 * scores * constants.gemm_traffic
    passes = scores * constants.score_passes / constants.memory_efficiency
    is_fused = jobs.fused_attention > 0
    # Short sequences: fused attention is at least as fast as computing the scores one after another.
    unfused, unfused_backward = products + passes, 2 * products + _BACKWARD_PASSES * passes
    forward = np.where(is_fused, np.minimum(fused, unfused), unfused)
    return forward, np.where(is_fused, np.minimum(2.5 * fused, unfused_backward), unfused_backward)


def _elementwise(jobs: Jobs, constants: Constants, tokens: Column) -> tuple[Column, Column]:
    """Return the seconds of norms, residuals and activation functions: (forward, backward)."""
    # tp splits norms and residuals only if it splits positions (sequence parallelism).
    unsplit = (_NORM_PASSES + _RESIDUAL_PASSES) * jobs.hidden / np.where(jobs.sequence_parallel > 0, jobs.tp, 1.0)
    wide = np.where(jobs.gated > 0, _GATED_PASSES, _WIDE_PASSES) * jobs.feed_forward
    rotary = _ROTARY_PASSES * (jobs.heads + jobs.kv_heads) * jobs.head_dim * jobs.gated
    kernels = np.where(jobs.fused_elementwise > 0, constants.compiled, 1.0)
    # The passes are those of Megatron's hand-fused kernels; FSDP and hpc_train (stack >= 2) run plain PyTorch kernels
    # unless they are compiled.
    eager = np.where(jobs.stack >= 2, constants.eager, 1.0)
    widened = wide / jobs.tp
    if jobs.has_experts:
        widened = mix_layers(jobs, widened, expert_elementwise(jobs, constants))
    elements = tokens * (unsplit + widened + rotary / jobs.tp) * kernels * np.where(kernels < 1, 1.0, eager)
    forward = elements * jobs.activation_bytes / (jobs.memory_bandwidth * constants.memory_efficiency)
    return forward, _BACKWARD_PASSES * forward


def _adapter_elementwise(jobs: Jobs, constants: Constants, tokens: Column) -> Column:
    """Return the forward seconds of a layer's adapters.

    Their products are so thin that memory bounds them: each reads its input, and writes, scales and adds its output.
    """
    queries, keys = jobs.heads * jobs.head_dim, jobs.kv_heads * jobs.head_dim
    inputs = 5 * jobs.hidden + queries + jobs.feed_forward
    outputs = queries + 2 * keys + 2 * jobs.hidden + (1 + jobs.gated) * jobs.feed_forward
    moved = tokens * (inputs + 4 * outputs) / jobs.tp * jobs.activation_bytes
    return (jobs.adapter_weights > 0) * moved / (jobs.memory_bandwidth * constants.memory_efficiency)


def _head(jobs: Jobs, constants: Constants, tokens: Column) -> Column:
    """Return the seconds of the head's product and the loss, forward and backward."""
    logits = tokens * jobs.vocab / jobs.tp
    if np.any(jobs.float8):
        jobs = wide_products(jobs)
    products = 3 * linear_seconds(jobs, constants, tokens, jobs.hidden, jobs.vocab / jobs.tp)
    return products + logits * _LOGIT_BYTES / (jobs.memory_bandwidth * constants.memory_efficiency)


def _embedding(jobs: Jobs, constants: Constants, tokens: Column) -> Column:
    """Return the seconds of looking up embeddings in forward and adding up their gradients in backward."""
    moved = 8 * tokens * jobs.hidden * jobs.activation_bytes
    return moved / (jobs.memory_bandwidth * constants.memory_efficiency)


_SELECTIVE, _FULL = RECOMPUTE.index("selective"), RECOMPUTE.index("full")
_WIDE = 4.0
"""Bytes of an fp32 element."""
_MASK = 1.0
"""Bytes of an element of a dropout mask."""
MAX_SCORES, MIN_QUERIES = 2.0**24, 16.0
"""Attention with dropout is computed in blocks of queries: at most so many scores, at least so many queries each.

The values are those of models.attention.plain_attention.
"""


def layer_activations(jobs: Jobs, constants: Constants, tokens: Column) -> tuple[Column, Column]:
    """Return (bytes that a layer keeps of a micro-batch until backward, bytes that its backward needs besides).

    The second part is for one layer at a time: gradients, and what is recomputed. Published stacks follow Korthikanti
    et al. 2022, arXiv:2205.05198, table 2, tensor by tensor: inputs of norms and linear layers, what attention and the
    activation function keep, and dropout masks for GPTs.
    """
    everything, some, full = _activations(jobs)
    stored = np.where(jobs.recompute == _FULL, full, np.where(jobs.recompute == _SELECTIVE, some, everything))
    share = np.where(jobs.recompute > 0, jobs.recompute_share, 0.0)
    stored = share * stored + (1 - share) * everything
    # Backward needs the gradients of the layer's widest tensors, and the positions that tp gathers.
    item = jobs.activation_bytes
    wide_gradient = item * (jobs.feed_forward * (1 + jobs.gated) / jobs.tp + 2 * jobs.hidden)
    if jobs.has_experts:
        wide_gradient = np.where(jobs.experts > 0, expert_gradients(jobs), wide_gradient)
    gathered = 2 * item * jobs.hidden * (jobs.sequence_parallel > 0) * (jobs.tp > 1)
    stored, alive = tokens * stored * constants.activations, tokens * (wide_gradient + gathered) * constants.activations
    return stored, alive + recomputed_activations(jobs, constants, tokens)


def recomputed_activations(jobs: Jobs, constants: Constants, tokens: Column) -> Column:
    """Return the bytes of activations that backward recomputes for one layer; 0 without recomputation."""
    everything, some, _ = _activations(jobs)
    again = np.where((jobs.stack == _OURS) & (jobs.recompute == _SELECTIVE), everything - some, everything)
    found: Column = tokens * again * (jobs.recompute > 0) * constants.activations
    return found


def _activations(jobs: Jobs) -> tuple[Column, Column, Column]:
    """Return a layer's activation bytes per token with recompute none, selective and full."""
    found = _published_activations(jobs)
    is_ours = jobs.stack == _OURS
    if np.any(is_ours):
        everything, some, full = (np.where(is_ours, *pair) for pair in zip(_own_activations(jobs), found, strict=True))
        return everything, some, full
    return found


def last_norm_bytes(jobs: Jobs, tokens: Column) -> Column:
    """Return the bytes that the norm before the head of hpc_train's own models keeps per micro-batch."""
    between, norms = _norm_bytes(jobs)
    return tokens * (between + norms / 2 + jobs.activation_bytes * jobs.hidden)


def pending_gradient_bytes(jobs: Jobs, tokens: Column) -> Column:
    """Return the bytes that a layer keeps of a micro-batch between I and W, the two parts of a split backward.

    These are the gradients of the outputs of products and norms, from which W computes weight gradients; those of
    row-parallel layers are gathered over tp. For hpc_train's own models.
    """
    item, hidden = jobs.activation_bytes, jobs.hidden
    width = np.where(jobs.sequence_parallel > 0, jobs.tp, 1.0)
    eager = (jobs.gated > 0) & (jobs.fused_elementwise == 0) & (item < _WIDE)
    norms = 2 * np.where(eager, _WIDE, item) * hidden / width
    heads = (jobs.heads / jobs.tp + 2 * jobs.rank_key_heads) * jobs.head_dim
    return tokens * (norms + item * (heads + 2 * hidden + (1 + jobs.gated) * jobs.feed_forward / jobs.tp))


def _norm_bytes(jobs: Jobs) -> tuple[Column, Column]:
    """Return bytes per token of hpc_train's models: (input of one norm, what a layer's two norms keep besides)."""
    item, hidden = jobs.activation_bytes, jobs.hidden
    width = np.where(jobs.sequence_parallel > 0, jobs.tp, 1.0)
    # Without fully_shard, precision is autocast's: the residual stream stays in fp32.
    autocast = (jobs.zero == 0) & (jobs.tp == 1) & (jobs.pp == 1) & (item < _WIDE)
    eager = jobs.fused_elementwise == 0
    # An RMSNorm that is not fused keeps its normalised input, in fp32 and rounded to 16 bits.
    norms = 2 * np.where(item < _WIDE, _WIDE + item, item) * hidden / width * (jobs.gated * eager)
    norms = norms + np.where(autocast, 2 * item * hidden, 0.0)
    return np.where(autocast, _WIDE, item) * hidden / width, norms


def _dropout_bytes(jobs: Jobs) -> Column:
    """Return the bytes per token that dropout adds to a layer: two masks, and keys and values for every head.

    Over cp, attention with dropout gathers the keys and values of the whole sequence (parallel.context).
    """
    width = np.where(jobs.sequence_parallel > 0, jobs.tp, 1.0)
    more_heads = jobs.heads / jobs.tp * _key_share(jobs) - jobs.rank_key_heads
    more_keys = 2 * more_heads * jobs.head_dim * jobs.activation_bytes
    return jobs.dropout * (2 * _MASK * jobs.hidden / width + more_keys)


def _key_share(jobs: Jobs) -> Column:
    """Return the ratio of the keys that a rank's attention sees to the positions that it has."""
    return np.where(jobs.ulysses > 0, 1.0, jobs.cp)


def embedding_mask_bytes(jobs: Jobs, tokens: Column) -> Column:
    """Return the bytes of the mask of the embedding's dropout, kept for every micro-batch in flight."""
    return jobs.dropout * tokens * _MASK * jobs.hidden / np.where(jobs.sequence_parallel > 0, jobs.tp, 1.0)


def dropout_attention_working(jobs: Jobs, tokens: Column) -> Column:
    """Return the bytes that the backward of attention with dropout needs at its peak; 0 without dropout.

    For hpc_train's models (plain_attention). For one block of queries: four fp32 tensors of the size of its
    scores (weights, their gradients before and after the mask, one temporary) and the mask. For all queries: gradients
    of queries and of the result, and of keys and values in fp32.
    """
    wide = np.maximum(jobs.activation_bytes, _WIDE)
    heads = jobs.heads / jobs.tp / np.where(jobs.ulysses > 0, jobs.cp, 1.0)
    queries = jobs.sequence / np.where(jobs.ulysses > 0, 1.0, jobs.cp)
    rows = jobs.micro_batch * heads * jobs.sequence
    scores = rows * np.minimum(queries, np.maximum(MIN_QUERIES, np.floor(MAX_SCORES / rows)))
    made = tokens * jobs.heads * jobs.head_dim / jobs.tp
    gradients = made * (2 * jobs.activation_bytes + 2 * wide * _key_share(jobs))
    found: Column = jobs.dropout * (scores * (4 * wide + _MASK) + gradients)
    return found


def asynchronous_working(jobs: Jobs, tokens: Column) -> Column:
    """Return the additional bytes of asynchronous tensor parallelism in the backward of a feed-forward layer.

    These are the gradient of its second weight, added up in fp32, and the layer's input with its gradient, split over
    positions (parallel.tensor.ring_matmul).
    """
    width = jobs.feed_forward / jobs.tp
    wide = np.maximum(jobs.activation_bytes, _WIDE)
    split = tokens * width * jobs.activation_bytes * (2 - jobs.gated)
    return jobs.overlap_tensor * (jobs.tp > 1) * (jobs.hidden * width * wide + split)


def feed_forward_activations(jobs: Jobs, tokens: Column) -> Column:
    """Return the part of full_layer_activations that the feed-forward half keeps, for hpc_train's own models."""
    item, hidden = jobs.activation_bytes, jobs.hidden
    between, norms = _norm_bytes(jobs)
    widened = np.where(jobs.gated > 0, 3 + (jobs.fused_elementwise == 0), 2.0) * jobs.feed_forward / jobs.tp * item
    if jobs.has_experts:
        widened = mix_layers(jobs, widened, expert_activations(jobs))
    masks = jobs.dropout * _MASK * hidden / np.where(jobs.sequence_parallel > 0, jobs.tp, 1.0)
    return tokens * (between + norms / 2 + item * hidden + widened + masks)


def full_layer_activations(jobs: Jobs, constants: Constants, tokens: Column) -> Column:
    """Return the activation bytes of one layer and one micro-batch without recomputation."""
    return tokens * _activations(jobs)[0] * constants.activations


def _published_activations(jobs: Jobs) -> tuple[Column, Column, Column]:
    """Return a published stack's activation bytes per token with recompute none, selective and full."""
    item, width = jobs.activation_bytes, np.where(jobs.sequence_parallel > 0, jobs.tp, 1.0)
    masks = np.where((jobs.gated > 0) | (jobs.stack >= _FSDP), 0.0, 2.0)
    # Megatron's 8-bit layers (Transformer Engine) keep the inputs of products in 8 bits; others keep them in 16.
    given = np.where((jobs.peak_flops > jobs.peak_flops_attention) & (jobs.stack == _MEGATRON), 1.0, item)
    unsplit = (2 * item + 2 * given + masks) * jobs.hidden / width
    # Attention keeps queries, keys, values and its result.
    heads = (2 * jobs.heads + 2 * jobs.kv_heads) * jobs.head_dim / jobs.tp * item
    eager = np.where(jobs.fused_elementwise > 0, 0.0, item)
    wide = np.where(jobs.gated > 0, 2 * item + eager + given, item + given) * jobs.feed_forward / jobs.tp
    if jobs.has_experts:
        wide = mix_layers(jobs, wide, expert_activations(jobs))
    # Without fused attention: softmax, its dropout's result and a one-byte mask for every pair of positions.
    scores = (2 * item + 1) * jobs.heads / jobs.tp * jobs.sequence * (jobs.fused_attention == 0)
    linear, core, plain = recompute_shares(jobs)
    some = unsplit * np.where(plain > 0, 0.5, 1.0) + heads + wide * (1 - 0.5 * plain) + scores * (1 - core)
    return unsplit + heads + wide + scores, some * (1 - 0.5 * linear), item * jobs.hidden / width


def _own_activations(jobs: Jobs) -> tuple[Column, Column, Column]:
    """Return the activation bytes per token of hpc_train's models with recompute none, selective and full.

    A test compares them with what a rehearsal counts. The inputs of the two norms are split as positions are; the
    inputs of the two column-parallel layers are kept gathered (parallel.tensor.layers). Selective recomputation keeps
    the results of products and attention, those of row-parallel layers before they are summed and scattered.
    """
    item, hidden = jobs.activation_bytes, jobs.hidden
    between, norms = _norm_bytes(jobs)
    eager = jobs.fused_elementwise == 0
    heads = (2 * jobs.heads / jobs.tp + 2 * jobs.rank_key_heads) * jobs.head_dim * item
    widened = np.where(jobs.gated > 0, 3 + eager, 2.0) * jobs.feed_forward / jobs.tp * item
    products = (1 + jobs.gated) * jobs.feed_forward / jobs.tp * item
    if np.any(jobs.head_norms):
        normalised = (jobs.heads / jobs.tp + jobs.rank_key_heads) * jobs.head_dim
        heads = heads + jobs.head_norms * normalised * (item + np.where(item < _WIDE, _WIDE + item, item))
    if jobs.has_latent:
        heads = heads + np.where(jobs.key_rank > 0, _latent_bytes(jobs), 0.0)
    if jobs.has_experts:
        widened = mix_layers(jobs, widened, expert_activations(jobs))
        products = mix_layers(jobs, products, (2 * jobs.shared_width / jobs.tp + jobs.experts) * item)
    # ulysses keeps attention's result as its kernel returns it, and again as the output layer reads it.
    exchanged = (jobs.ulysses > 0) * (jobs.cp > 1) * jobs.heads * jobs.head_dim / jobs.tp * item
    everything = 2 * between + norms + 2 * item * hidden + heads + exchanged + widened + _dropout_bytes(jobs)
    some = between + heads + 2 * item * hidden + products
    return everything, some, between


def _latent_bytes(jobs: Jobs) -> Column:
    """Return the bytes per token that latent attention keeps besides queries, keys, values and the result.

    These are the latents before and after their norms, and the result without the columns that pad values to the width
    of keys.
    """
    item = jobs.activation_bytes
    eager = np.where(item < _WIDE, _WIDE + item, item)
    latents = (jobs.query_rank + jobs.key_rank) * (item + eager)
    return latents + jobs.heads * jobs.value_dim / jobs.tp * item
