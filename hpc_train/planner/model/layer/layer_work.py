"""Seconds of one layer, and of embedding and head, on one rank for one micro-batch.

Matrix products are timed by their shape (tiles, waves, alignment), elementwise work by memory bandwidth.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from hpc_train.planner.constants import Constants
from hpc_train.planner.model.inputs import DEEPSPEED, FSDP, FULL, HPC_TRAIN, SELECTIVE, Column
from hpc_train.planner.model.jobs import Jobs, choose
from hpc_train.planner.model.layer.adapters import adapter_seconds, expansion_seconds
from hpc_train.planner.model.layer.experts import (
    bias_elementwise,
    expert_elementwise,
    expert_kernels,
    expert_products,
    mix_layers,
)
from hpc_train.planner.model.layer.products import linear_seconds, misalignment_factor, wide_products

# Elementwise work is limited by memory bandwidth. A pass reads or writes every element of a tensor once. These are the
# passes of a layer's forward in the fused kernels of Megatron-LM (bias + GELU, bias + dropout + add, scale + mask +
# softmax).
_NORM_PASSES = 4.0  # two norms, each reads its input and writes its result
_COMPOSITE_NORM_PASSES = 16.0  # besides these, one norm as RMSNorm's six operations in fp32: 36 bytes an element
_RESIDUAL_PASSES = 7.0  # two additions, each reads input, residual and a one-byte mask, and writes the result
_ACTIVATION_PASSES = 2.0  # the activation function reads and writes the widened tensor
_GATED_PASSES = 3.0  # SwiGLU reads both branches and writes one
_ROTARY_PASSES = 4.0  # rotary embeddings read and write queries and keys, with one result in between
_BACKWARD_PASSES = 1.5
"""Passes of backward over those of forward: it also reads the incoming gradient."""
_LOGIT_BYTES = 40.0
"""Bytes moved per logit, forward and backward, in fp32: cast, maximum, exponentials, sum, and their gradients."""
_CAP_PASSES = 15.0
"""Passes of a soft-cap, forward and backward: it divides, takes tanh and multiplies, one operation after another."""
_EAGER_SCORE_PASSES, _SCORE_CAP_PASSES = 14.0, 6.0
"""Passes over scores that plain operations store in 16 bits (eager attention of transformers): scale 2, mask 2, to fp32
3, softmax 4, back 3; a soft-cap divides, takes tanh and multiplies."""
_KERNELS_FORWARD, _KERNELS_BACKWARD = 26.0, 44.0
"""Kernel launches of a layer in PyTorch profiles of GPT layers without fused attention."""
_FUSED_KERNELS = 0.6
"""Share of these launches that is left if attention, or chains of elementwise operations, are fused."""


@dataclass(frozen=True)
class LayerWork:
    """Seconds of work of one rank for one micro-batch."""

    forward: Column
    """Forward of one layer."""
    backward: Column
    """Backward of one layer, without recomputation."""
    recomputation: Column
    """Recomputation of one layer."""
    head: Column
    """Forward and backward of the head and the loss."""
    embedding: Column
    """Forward and backward of the embedding."""
    launch_forward: Column
    """Time of the host to launch the kernels of one layer's forward."""
    launch_backward: Column
    """Time of the host to launch the kernels of its backward and its recomputation."""
    recomputed_flops: Column
    """FLOPs of recomputing one layer, on all tp and cp ranks together."""


def layer_work(jobs: Jobs, constants: Constants) -> LayerWork:
    """Estimate the seconds of a layer, the head and the embedding."""
    tokens = jobs.micro_batch * jobs.sequence / jobs.cp
    linear, last_product = _all_products_seconds(jobs, constants, tokens)
    attention, attention_backward = _attention_seconds(jobs, constants, tokens)
    elementwise, elementwise_backward = _elementwise_seconds(jobs, constants, tokens)
    backward_products: Column = np.full((), 2.0)
    if jobs.has_adapters:
        # Frozen weights have no gradients: one product of backward is left. The adapter's own are thin.
        adapters, expansion = adapter_seconds(jobs, constants, tokens), expansion_seconds(jobs, constants)
        elementwise = elementwise + adapters + expansion
        elementwise_backward = elementwise_backward + 2 * adapters + expansion
        backward_products = choose(jobs.adapter_weights > 0, 1.0, 2.0)
    recomputed_share = choose(jobs.recompute > 0, jobs.recompute_share, 0.0)
    linear_again, attention_again, elementwise_again = recompute_shares(jobs)
    # torch stops recomputing before a layer's last product, since backward does not need its result (FSDP and
    # hpc_train). Megatron and DeepSpeed recompute it.
    products_again = linear - choose(jobs.stack >= FSDP, last_product, 0.0)
    # attention_score_width is multiply-adds of one token, as layer_parameters are: two FLOPs each.
    token_flops = linear_again * 2 * jobs.layer_parameters + attention_again * 2 * attention_score_width(jobs)
    # Kernels: those of all products are launched again only by full recomputation.
    kernels = choose(jobs.fused_attention + jobs.fused_elementwise > 0, _FUSED_KERNELS, 1.0)
    kernels = kernels * _launch_seconds(jobs, constants)
    forward_kernels, expert_launches = _KERNELS_FORWARD + expert_kernels(jobs), 2 * expert_kernels(jobs)
    return LayerWork(
        forward=linear + attention + elementwise,
        backward=backward_products * linear + attention_backward + elementwise_backward,
        recomputation=recomputed_share
        * (linear_again * products_again + attention_again * attention + elementwise_again * elementwise),
        head=_head_seconds(jobs, constants, tokens),
        embedding=_embedding_seconds(jobs, constants, tokens),
        launch_forward=kernels * forward_kernels,
        launch_backward=kernels
        * (_KERNELS_BACKWARD + expert_launches + forward_kernels * (recomputed_share * linear_again)),
        recomputed_flops=recomputed_share * token_flops * tokens * jobs.cp,
    )


def _launch_seconds(jobs: Jobs, constants: Constants) -> Column:
    """Return the host's seconds to launch one kernel; 0 where CUDA graphs do (expert_launch_seconds: of experts).

    hpc_train's own tp has plain tensors inside of its layers.
    """
    dispatched = (jobs.stack == FSDP) & (jobs.tp > 1) & (jobs.fused_elementwise == 0)
    seconds = choose(jobs.stack == DEEPSPEED, constants.launch_deepspeed, constants.launch)
    return choose(jobs.cuda_graphs > 0, 0.0, choose(dispatched, constants.launch_dtensor, seconds))


def attention_score_width(jobs: Jobs) -> Column:
    """Return the multiply-adds of one token's attention in forward: scores, then the weighted sum of values.

    Fused causal attention skips the half of the positions that are masked.
    """
    pairs = choose(jobs.fused_attention > 0, pair_share(jobs), 2.0)
    return jobs.heads * jobs.attention_dim * jobs.sequence * pairs


def pair_share(jobs: Jobs) -> Column:
    """Return the pairs of query and key that a fused kernel computes, over those of causal attention.

    Our own models have FlexAttention for windows, which skips the keys that no query sees. transformers gives a window
    to torch's kernel as a mask of all pairs, so that a masked layer computes twice those of causal attention.
    """
    share: Column = choose(jobs.masked_share > 0, 1 + jobs.masked_share, jobs.seen_share)
    return share


def _count_score_passes(jobs: Jobs, constants: Constants) -> Column:
    """Return the passes of forward over scores that are in memory."""
    eager = _EAGER_SCORE_PASSES + _SCORE_CAP_PASSES * jobs.capped_scores
    passes: Column = choose(jobs.stored_scores > 0, eager, constants.score_passes)
    return passes


def recompute_shares(jobs: Jobs) -> tuple[Column, Column, Column]:
    """Return the shares of linear layers, of attention and of elementwise work that a recomputed layer repeats.

    full repeats everything. selective differs between stacks: Megatron and DeepSpeed repeat attention (Korthikanti et
    al. 2022, arXiv:2205.05198, section 5), torchtitan (FSDP) every second product and elementwise work, hpc_train
    elementwise work only.
    """
    full, some = jobs.recompute == FULL, jobs.recompute == SELECTIVE
    is_fsdp, is_ours = jobs.stack == FSDP, jobs.stack == HPC_TRAIN
    linear = choose(full, 1.0, choose(some & is_fsdp, 0.5, 0.0))
    attention = choose(full | (some & ~is_ours & ~is_fsdp), 1.0, 0.0)
    elementwise = choose(full | (some & (is_fsdp | is_ours)), 1.0, 0.0)
    return linear, attention, elementwise


def _all_products_seconds(jobs: Jobs, constants: Constants, tokens: Column) -> tuple[Column, Column]:
    """Return the forward seconds of a layer's linear layers: (all four products, the last one alone).

    tp splits them by columns, rows, columns and rows: queries, keys and values; attention's output; the two of the
    feed-forward layer.
    """
    # If tp exceeds the number of key and value heads, ranks compute the same heads more than once.
    queries = jobs.heads * jobs.head_dim / jobs.tp
    keys = jobs.kv_heads * jobs.head_dim / np.minimum(jobs.tp, jobs.kv_heads)
    attention = linear_seconds(jobs, constants, tokens, jobs.hidden, queries + 2 * keys)
    attention = attention + linear_seconds(jobs, constants, tokens, queries, jobs.hidden)
    if jobs.has_latent:
        attention = choose(jobs.key_rank > 0, _latent_seconds(jobs, constants, tokens), attention)
    width = jobs.feed_forward / jobs.tp
    first = linear_seconds(jobs, constants, tokens, jobs.hidden, width * (1 + jobs.gated))
    last = linear_seconds(jobs, constants, tokens, width, jobs.hidden)
    if jobs.has_experts:
        routed = expert_products(jobs, constants, tokens)
        first, last = (mix_layers(jobs, *pair) for pair in zip((first, last), routed, strict=True))
    return attention + first + last, last


def _latent_seconds(jobs: Jobs, constants: Constants, tokens: Column) -> Column:
    """Return the forward seconds of the linear layers of latent attention."""
    latents = jobs.query_rank + jobs.key_rank + jobs.rotary_width
    queries, values = jobs.heads * jobs.head_dim / jobs.tp, jobs.heads * jobs.value_dim / jobs.tp
    keys_and_values = jobs.heads * (jobs.head_dim - jobs.rotary_width + jobs.value_dim) / jobs.tp
    # Where tp splits positions, each rank makes the latents of its own. Widths of 0 belong to jobs without latents.
    positions = tokens / choose(jobs.sequence_parallel > 0, jobs.tp, 1.0)
    query_inputs = choose(jobs.query_rank > 0, jobs.query_rank, jobs.hidden)
    seconds = linear_seconds(jobs, constants, positions, jobs.hidden, np.maximum(latents, 1))
    seconds = seconds + linear_seconds(jobs, constants, tokens, query_inputs, queries)
    seconds = seconds + linear_seconds(jobs, constants, tokens, np.maximum(jobs.key_rank, 1), keys_and_values)
    return seconds + linear_seconds(jobs, constants, tokens, np.maximum(values, 1), jobs.hidden)


def _attention_seconds(jobs: Jobs, constants: Constants, tokens: Column) -> tuple[Column, Column]:
    """Return the seconds of attention without its projections: (forward, backward)."""
    width = jobs.heads * jobs.attention_dim / jobs.tp
    peak = jobs.peak_flops_attention * jobs.gemm_ceiling
    slow = misalignment_factor(jobs.head_dim, constants)
    # Fused: half of the pairs, since causal. Its backward takes 2.5 times forward: five products in place of two,
    # because it computes the scores again (Dao et al. 2022, arXiv:2205.14135).
    flash = jobs.peak_flops_attention * jobs.attention_ceiling * constants.flash_efficiency
    # Ring attention computes blocks of one rank's positions by another's.
    positions = jobs.sequence / choose(jobs.ulysses > 0, 1.0, jobs.cp)
    flash = flash * positions / (positions + constants.flash_half)
    fused = 2 * tokens * jobs.sequence * width * slow / flash * pair_share(jobs)
    # Not fused: two products over all pairs, and passes over the scores in memory.
    scores = tokens * jobs.sequence * jobs.heads / jobs.tp * jobs.activation_bytes / jobs.memory_bandwidth
    products = 4 * tokens * jobs.sequence * width * slow / (peak * constants.gemm_efficiency)
    products = products + 2 * scores * constants.gemm_traffic
    passes = scores * _count_score_passes(jobs, constants) / constants.memory_efficiency
    is_fused = jobs.fused_attention > 0
    # Short sequences: fused attention is at least as fast as computing the scores one after another.
    unfused, unfused_backward = products + passes, 2 * products + _BACKWARD_PASSES * passes
    forward = choose(is_fused, np.minimum(fused, unfused), unfused)
    return forward, choose(is_fused, np.minimum(2.5 * fused, unfused_backward), unfused_backward)


def _elementwise_seconds(jobs: Jobs, constants: Constants, tokens: Column) -> tuple[Column, Column]:
    """Return the seconds of norms, residuals and activation functions: (forward, backward)."""
    # tp splits norms and residuals only if it splits positions (sequence parallelism).
    norms = _NORM_PASSES * (1 + jobs.output_norms)
    heads = (jobs.heads + jobs.kv_heads) * jobs.head_dim
    unsplit = (norms + _RESIDUAL_PASSES) * jobs.hidden / choose(jobs.sequence_parallel > 0, jobs.tp, 1.0)
    activation = choose(jobs.gated > 0, _GATED_PASSES, _ACTIVATION_PASSES) * jobs.feed_forward
    rotary = (_ROTARY_PASSES * jobs.gated + _NORM_PASSES / 2 * jobs.head_norms) * heads
    kernels = choose(jobs.fused_elementwise > 0, constants.compiled, 1.0)
    if np.any(jobs.composite_norms):
        is_composite = (jobs.composite_norms > 0) & (jobs.fused_elementwise == 0)
        many = 2 * _COMPOSITE_NORM_PASSES * jobs.hidden / choose(jobs.sequence_parallel > 0, jobs.tp, 1.0)
        unsplit = unsplit + choose(is_composite, many / constants.eager, 0.0)
    # The passes are those of Megatron's hand-fused kernels; FSDP and hpc_train run plain PyTorch kernels unless they
    # are compiled.
    eager = choose(jobs.stack >= FSDP, constants.eager, 1.0)
    activation = activation / jobs.tp
    if jobs.has_experts:
        activation = mix_layers(jobs, activation, expert_elementwise(jobs, constants))
    elements = tokens * (unsplit + activation + rotary / jobs.tp) * kernels * choose(kernels < 1, 1.0, eager)
    rate = jobs.memory_bandwidth * constants.memory_efficiency
    forward = elements * jobs.activation_bytes / rate
    if not np.any(jobs.expert_biases):
        return forward, _BACKWARD_PASSES * forward
    biases, biases_backward = (
        jobs.sparse_share * tokens * passed * jobs.activation_bytes / rate for passed in bias_elementwise(jobs)
    )
    return forward + biases, _BACKWARD_PASSES * forward + biases_backward


def _head_seconds(jobs: Jobs, constants: Constants, tokens: Column) -> Column:
    """Return the seconds of the head's product and the loss, forward and backward."""
    logits = tokens * jobs.vocab / jobs.tp
    if np.any(jobs.float8):
        jobs = wide_products(jobs)
    # Beside adapters the head is frozen, too.
    passes = choose(jobs.adapter_weights > 0, 2.0, 3.0)
    products = passes * linear_seconds(jobs, constants, tokens, jobs.hidden, jobs.vocab / jobs.tp)
    moved = _LOGIT_BYTES + _CAP_PASSES * jobs.activation_bytes * jobs.capped_logits
    return products + logits * moved / (jobs.memory_bandwidth * constants.memory_efficiency)


def _embedding_seconds(jobs: Jobs, constants: Constants, tokens: Column) -> Column:
    """Return the seconds of looking up embeddings in forward and adding up their gradients in backward."""
    # Forward reads and writes; backward reads the gradient, and reads and writes sums in fp32. About 8 passes of 16
    # bits, which are small beside all layers.
    moved = 8 * tokens * jobs.hidden * jobs.activation_bytes
    return moved / (jobs.memory_bandwidth * constants.memory_efficiency)
