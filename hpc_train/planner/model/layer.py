"""Cost of one layer, and of the head, on one rank for one micro-batch: seconds of work, and bytes of activations.

Matrix products by their shape (tiles, waves, alignment), attention, elementwise work limited by memory bandwidth; then
what is kept until backward and what recomputation does again.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from hpc_train.planner.constants import Constants
from hpc_train.planner.model.jobs import RECOMPUTE, STACKS, Column, Jobs

_TILES = ((256, 128, 1.0), (128, 256, 1.0), (128, 128, 1.06), (128, 64, 1.2))
"""Rows and columns of the result that one multiprocessor computes at a time, and time for an element over that of the
largest, whose operands are used most often: what cuBLAS has to choose from."""
_ALIGNED = 8
"""Elements of a dimension that tensor cores need to be a multiple of, at 16 bits."""
_LINE = 64
"""16-bit elements of a 128-byte line of memory."""
_FOUR_BITS = 2.5
"""Peak of a format over that of attention's 16 bits: 8-bit products have twice it, 4-bit ones four times or more."""


def linear_seconds(jobs: Jobs, constants: Constants, rows: Column, inputs: Column, outputs: Column) -> Column:
    """Seconds of one product [rows, inputs] x [inputs, outputs] of a linear layer.

    Backward is two more of the same size, whose three matrices change places: they take as long.
    """
    flops = 2 * rows * inputs * outputs
    rate = jobs.peak_flops * jobs.gemm_ceiling * constants.gemm_efficiency * _low_precision_share(jobs, constants)
    rate = rate / np.where(_whole_lines(inputs) & _whole_lines(outputs), 1.0, constants.alignment)
    operands = rows * inputs + inputs * outputs
    moved = (operands + rows * outputs) * jobs.activation_bytes * constants.gemm_traffic
    return flops / rate * wave_quantization(jobs, rows, outputs) + moved / jobs.memory_bandwidth


def _whole_lines(width: Column) -> NDArray[np.bool_]:
    """Whether a width is a multiple of a line; rounding is faster than the remainder of a division."""
    lines = width / _LINE
    is_whole: NDArray[np.bool_] = lines == np.floor(lines)
    return is_whole


def _low_precision_share(jobs: Jobs, constants: Constants) -> Column:
    """Share of the peak of 8 and 4 bits that is left when operands have been scaled and cast."""
    over = jobs.peak_flops / jobs.peak_flops_attention
    some = np.where(over > _FOUR_BITS, constants.four_bits, constants.low_precision)
    return np.where(over > 1, some, 1.0)


def wave_quantization(jobs: Jobs, rows: Column, outputs: Column) -> Column:
    """Time over that of multiprocessors that are never idle, with the best of the tiles."""
    best = None
    useful = rows * outputs
    for height, width, cost in _TILES:
        tiles = np.ceil(rows / height) * np.ceil(outputs / width)
        units = np.maximum(jobs.multiprocessors, 1)
        full = np.where(jobs.multiprocessors > 0, np.ceil(tiles / units) * units, tiles)
        slow = full * (height * width * cost) / useful
        best = slow if best is None else np.minimum(best, slow)
    assert best is not None
    return best


def misalignment_factor(width: Column, constants: Constants) -> Column:
    """Time over that with tensor cores, for a dimension of `width` elements."""
    return np.where(width % _ALIGNED == 0, 1.0, constants.misaligned)


# Passes over memory of the elements of hidden states, of the widened ones, and of attention scores, counted in the
# kernels of Megatron-LM (fused bias + GELU, bias + dropout + add, scale + mask + softmax), forward:
_NORM_PASSES = 4.0  # two norms, each read and written
_RESIDUAL_PASSES = 7.0  # twice: input, residual and mask read, result written
_WIDE_PASSES = 2.0
_GATED_PASSES = 3.0
_ROTARY_PASSES = 4.0
_BACKWARD_PASSES = 1.5
"""Backward over forward: the gradient is read besides, and written in place of the result."""
_LOGIT_BYTES = 40.0
"""Moved for one logit, forward and backward, in fp32: cast, maximum, exponentials, sum, and their gradient."""
_KERNELS_FORWARD, _KERNELS_BACKWARD = 26.0, 44.0
"""Launches of a layer, as PyTorch profiles of GPT layers show, plain attention's among them."""
_FUSED_KERNELS = 0.6
"""Of them where attention, or elementwise chains, are one kernel each."""
_DEEPSPEED = STACKS.index("deepspeed")


@dataclass(frozen=True)
class LayerWork:
    """Seconds of a rank for one micro-batch."""

    forward: Column
    """Of one layer."""
    backward: Column
    again: Column
    """Forward work of one layer that recomputation does once more."""
    head: Column
    """Forward and backward of the head and the loss."""
    embedding: Column
    launch_forward: Column
    """Of one layer: the host's time to launch the kernels of its forward."""
    launch_backward: Column
    flops_again: Column
    """FLOPs of `again`, on all ranks of tp and cp together."""


def layer_work(jobs: Jobs, constants: Constants) -> LayerWork:
    """Estimate the seconds of a layer, the head and the embedding."""
    tokens = jobs.micro_batch * jobs.sequence / jobs.cp
    linear, ending = _linear(jobs, constants, tokens)
    core, core_backward = _attention(jobs, constants, tokens)
    plain, plain_backward = _elementwise(jobs, constants, tokens)
    share = np.where(jobs.recompute > 0, jobs.recompute_share, 0.0)
    lin, att, ele = recompute_shares(jobs)
    kernels = np.where(jobs.fused_attention + jobs.fused_elementwise > 0, _FUSED_KERNELS, 1.0)
    kernels = kernels * np.where(jobs.stack == _DEEPSPEED, constants.launch_deepspeed, constants.launch)
    full = share * lin
    return LayerWork(
        forward=linear + core + plain,
        backward=2 * linear + core_backward + plain_backward,
        again=share * (lin * (linear - np.where(jobs.stack >= 2, ending, 0.0)) + att * core + ele * plain),
        head=_head(jobs, constants, tokens),
        embedding=_embedding(jobs, constants, tokens),
        launch_forward=kernels * _KERNELS_FORWARD,
        launch_backward=kernels * (_KERNELS_BACKWARD + _KERNELS_FORWARD * full),
        flops_again=share
        * (lin * 2 * jobs.layer_parameters + att * 2 * attention_score_width(jobs))
        * tokens
        * jobs.cp,
    )


def attention_score_width(jobs: Jobs) -> Column:
    """FLOPs / 2 of a token's products with keys and values, forward: half of the positions if causally fused."""
    return jobs.heads * jobs.head_dim * jobs.sequence * np.where(jobs.fused_attention > 0, 1.0, 2.0)


def recompute_shares(jobs: Jobs) -> tuple[Column, Column, Column]:
    """Return the shares of linear layers, attention's core and elementwise work that a recomputed layer does again.

    full: everything. selective is what each stack means by it: Megatron's is the core of attention (Korthikanti et al.
    2022, arXiv:2205.05198, section 5), torchtitan's every second product, hpc_train's what is neither product nor
    attention.
    """
    full, fsdp, ours = jobs.recompute == 2, jobs.stack == 2, jobs.stack == 3
    some = jobs.recompute == 1
    linear = np.where(full, 1.0, np.where(some & fsdp, 0.5, 0.0))
    core = np.where(full | (some & ~ours & ~fsdp), 1.0, 0.0)
    plain = np.where(full | (some & (fsdp | ours)), 1.0, 0.0)
    return linear, core, plain


def _linear(jobs: Jobs, constants: Constants, tokens: Column) -> tuple[Column, Column]:
    """(the four products of a layer, the last of them alone), forward: split over tp by columns, rows, columns, rows.

    torch's recomputation stops when it has what backward needs, which the last product is not; Megatron's does not.
    """
    queries = jobs.heads * jobs.head_dim / jobs.tp
    keys = jobs.kv_heads * jobs.head_dim / np.minimum(jobs.tp, jobs.kv_heads)
    wide = jobs.feed_forward / jobs.tp
    found = linear_seconds(jobs, constants, tokens, jobs.hidden, queries + 2 * keys)
    found = found + linear_seconds(jobs, constants, tokens, queries, jobs.hidden)
    found = found + linear_seconds(jobs, constants, tokens, jobs.hidden, wide * (1 + jobs.gated))
    ending = linear_seconds(jobs, constants, tokens, wide, jobs.hidden)
    return found + ending, ending


def _attention(jobs: Jobs, constants: Constants, tokens: Column) -> tuple[Column, Column]:
    """Core of attention, forward and backward."""
    width = jobs.heads * jobs.head_dim / jobs.tp
    peak = jobs.peak_flops_attention * jobs.gemm_ceiling
    slow = misalignment_factor(jobs.head_dim, constants)
    # Fused: half of the pairs (causal); backward computes the scores again, 2.5 times forward (Dao et al. 2022).
    flash = jobs.peak_flops_attention * jobs.attention_ceiling * constants.flash_efficiency
    fused = 2 * tokens * jobs.sequence * width * slow / flash
    scores = tokens * jobs.sequence * jobs.heads / jobs.tp * jobs.activation_bytes / jobs.memory_bandwidth
    products = 4 * tokens * jobs.sequence * width * slow / (peak * constants.gemm_efficiency)
    products = products + 2 * scores * constants.gemm_traffic
    passes = scores * constants.score_passes / constants.memory_efficiency
    is_fused = jobs.fused_attention > 0
    forward = np.where(is_fused, fused, products + passes)
    return forward, np.where(is_fused, 2.5 * fused, 2 * products + _BACKWARD_PASSES * passes)


def _elementwise(jobs: Jobs, constants: Constants, tokens: Column) -> tuple[Column, Column]:
    """Norms, residuals and activations, forward and backward: limited by memory."""
    unsplit = (_NORM_PASSES + _RESIDUAL_PASSES) * jobs.hidden / np.where(jobs.sequence_parallel > 0, jobs.tp, 1.0)
    wide = np.where(jobs.gated > 0, _GATED_PASSES, _WIDE_PASSES) * jobs.feed_forward
    rotary = _ROTARY_PASSES * (jobs.heads + jobs.kv_heads) * jobs.head_dim * jobs.gated
    kernels = np.where(jobs.fused_elementwise > 0, constants.compiled, 1.0)
    eager = np.where(jobs.stack >= 2, constants.eager, 1.0)
    elements = tokens * (unsplit + (wide + rotary) / jobs.tp) * kernels * np.where(kernels < 1, 1.0, eager)
    forward = elements * jobs.activation_bytes / (jobs.memory_bandwidth * constants.memory_efficiency)
    return forward, _BACKWARD_PASSES * forward


def _head(jobs: Jobs, constants: Constants, tokens: Column) -> Column:
    """The product with the table, forward and backward, and the loss."""
    logits = tokens * jobs.vocab / jobs.tp
    products = 3 * linear_seconds(jobs, constants, tokens, jobs.hidden, jobs.vocab / jobs.tp)
    return products + logits * _LOGIT_BYTES / (jobs.memory_bandwidth * constants.memory_efficiency)


def _embedding(jobs: Jobs, constants: Constants, tokens: Column) -> Column:
    """Rows of the table gathered, and their gradients scattered."""
    moved = 8 * tokens * jobs.hidden * jobs.activation_bytes
    return moved / (jobs.memory_bandwidth * constants.memory_efficiency)


_MEGATRON, _FSDP, _OURS = (STACKS.index(name) for name in ("megatron", "fsdp", "hpc_train"))
_SELECTIVE, _FULL = RECOMPUTE.index("selective"), RECOMPUTE.index("full")
_WIDE = 4.0
"""Bytes of fp32."""
_MASK = 1.0
"""Bytes of an element of a mask of dropout."""
MAX_SCORES, MIN_QUERIES = 2.0**24, 16.0
"""Scores of attention with dropout that are computed together, and queries at least: as models.dropout has them."""


def layer_activations(jobs: Jobs, constants: Constants, tokens: Column) -> tuple[Column, Column]:
    """Bytes that one layer keeps of one micro-batch, and that a recomputed one needs besides while it is computed.

    Published stacks by Korthikanti et al. 2022, arXiv:2205.05198, table 2, taken apart: inputs of norms and linear
    layers, what attention and the activation function keep; dropout masks for GPTs.
    """
    everything, some, full = _activations(jobs)
    stored = np.where(jobs.recompute == _FULL, full, np.where(jobs.recompute == _SELECTIVE, some, everything))
    share = np.where(jobs.recompute > 0, jobs.recompute_share, 0.0)
    stored = share * stored + (1 - share) * everything
    # Backward: the layer that is made again, gradients of its widest part, and what tp gathers of split positions.
    item = jobs.activation_bytes
    wide_gradient = item * (jobs.feed_forward * (1 + jobs.gated) / jobs.tp + 2 * jobs.hidden)
    gathered = 2 * item * jobs.hidden * (jobs.sequence_parallel > 0) * (jobs.tp > 1)
    stored, alive = tokens * stored * constants.activations, tokens * (wide_gradient + gathered) * constants.activations
    return stored, alive + recomputed_activations(jobs, constants, tokens)


def recomputed_activations(jobs: Jobs, constants: Constants, tokens: Column) -> Column:
    """Return the bytes that the backward of a recomputed layer makes again; 0 if nothing is recomputed."""
    everything, some, _ = _activations(jobs)
    again = np.where((jobs.stack == _OURS) & (jobs.recompute == _SELECTIVE), everything - some, everything)
    found: Column = tokens * again * (jobs.recompute > 0) * constants.activations
    return found


def _activations(jobs: Jobs) -> tuple[Column, Column, Column]:
    """Bytes a token with nothing, with some (selective) and with all recomputed."""
    found = _published_activations(jobs)
    ours = jobs.stack == _OURS
    if np.any(ours):
        everything, some, full = (np.where(ours, *pair) for pair in zip(_own_activations(jobs), found, strict=True))
        return everything, some, full
    return found


def last_norm_bytes(jobs: Jobs, tokens: Column) -> Column:
    """Return the bytes that the norm before the head of hpc_train's own models keeps per micro-batch."""
    between, norms = _norm_bytes(jobs)
    return tokens * (between + norms / 2 + jobs.activation_bytes * jobs.hidden)


def pending_gradient_bytes(jobs: Jobs, tokens: Column) -> Column:
    """Return the bytes kept per layer and micro-batch between a split backward's two parts, for hpc_train's own models.

    These are gradients of the results of products and norms, from which weight gradients will be computed; those of
    row-parallel layers gathered over tp.
    """
    item, hidden = jobs.activation_bytes, jobs.hidden
    width = np.where(jobs.sequence_parallel > 0, jobs.tp, 1.0)
    eager = (jobs.gated > 0) & (jobs.fused_elementwise == 0) & (item < _WIDE)
    norms = 2 * np.where(eager, _WIDE, item) * hidden / width
    heads = (jobs.heads / jobs.tp + 2 * jobs.rank_key_heads) * jobs.head_dim
    return tokens * (norms + item * (heads + 2 * hidden + (1 + jobs.gated) * jobs.feed_forward / jobs.tp))


def _norm_bytes(jobs: Jobs) -> tuple[Column, Column]:
    """Return bytes per token of a norm's input, and of what a layer's two norms keep beside it (hpc_train models)."""
    item, hidden = jobs.activation_bytes, jobs.hidden
    width = np.where(jobs.sequence_parallel > 0, jobs.tp, 1.0)
    autocast = (jobs.zero == 0) & (jobs.tp == 1) & (jobs.pp == 1) & (item < _WIDE)
    eager = jobs.fused_elementwise == 0
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
    """Return the keys that a rank's attention sees over the positions that it has."""
    return np.where(jobs.ulysses > 0, 1.0, jobs.cp)


def embedding_mask_bytes(jobs: Jobs, tokens: Column) -> Column:
    """Return the bytes of the mask of the embedding's dropout, kept for every micro-batch in flight."""
    return jobs.dropout * tokens * _MASK * jobs.hidden / np.where(jobs.sequence_parallel > 0, jobs.tp, 1.0)


def dropout_attention_working(jobs: Jobs, tokens: Column) -> Column:
    """Return the bytes that the backward of attention with dropout needs, for hpc_train's own models; else 0.

    Scores of a block of queries (models.dropout): weights, their gradients before and after the mask, one more while
    that is made, each in fp32, and the mask. Then gradients of queries and of what is given, and of keys and values in
    fp32.
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
    """Return the bytes that asynchronous tensor parallelism needs besides in the backward of a feed-forward layer.

    The gradient of its second weight, added up in fp32, and the layer's input and that one's gradient as they are split
    over positions (parallel.tensor.ring_matmul).
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
    masks = jobs.dropout * _MASK * hidden / np.where(jobs.sequence_parallel > 0, jobs.tp, 1.0)
    return tokens * (between + norms / 2 + item * hidden + widened + masks)


def full_layer_activations(jobs: Jobs, constants: Constants, tokens: Column) -> Column:
    """Bytes of one layer and one micro-batch of which nothing is recomputed."""
    return tokens * _activations(jobs)[0] * constants.activations


def _published_activations(jobs: Jobs) -> tuple[Column, Column, Column]:
    """Bytes a token with nothing, with attention's core or what the stack means by it, and with all recomputed."""
    item, width = jobs.activation_bytes, np.where(jobs.sequence_parallel > 0, jobs.tp, 1.0)
    masks = np.where((jobs.gated > 0) | (jobs.stack >= _FSDP), 0.0, 2.0)
    # Inputs of linear layers are kept as they are multiplied: in 8 bits by Megatron's fused layers.
    given = np.where((jobs.peak_flops > jobs.peak_flops_attention) & (jobs.stack == _MEGATRON), 1.0, item)
    unsplit = (2 * item + 2 * given + masks) * jobs.hidden / width
    heads = (2 * jobs.heads + 2 * jobs.kv_heads) * jobs.head_dim / jobs.tp * item
    eager = np.where(jobs.fused_elementwise > 0, 0.0, item)
    wide = np.where(jobs.gated > 0, 2 * item + eager + given, item + given) * jobs.feed_forward / jobs.tp
    scores = (2 * item + 1) * jobs.heads / jobs.tp * jobs.sequence * (jobs.fused_attention == 0)
    linear, core, plain = recompute_shares(jobs)
    some = unsplit * np.where(plain > 0, 0.5, 1.0) + heads + wide * (1 - 0.5 * plain) + scores * (1 - core)
    return unsplit + heads + wide + scores, some * (1 - 0.5 * linear), item * jobs.hidden / width


def _own_activations(jobs: Jobs) -> tuple[Column, Column, Column]:
    """Return bytes per token of hpc_train's own models, as above; a test ties them to what a rehearsal counts.

    Two inputs of norms lie as positions do; two inputs of column-parallel layers are kept gathered
    (parallel.tensor.layers). An RMSNorm that is not fused keeps its result before the scale, in fp32 and rounded.
    Autocast (no sharding) keeps what lies between layers in fp32. Selective recomputation keeps the results of products
    and of attention, those of row-parallel ones before they are summed and scattered.
    """
    item, hidden = jobs.activation_bytes, jobs.hidden
    between, norms = _norm_bytes(jobs)
    eager = jobs.fused_elementwise == 0
    heads = (2 * jobs.heads / jobs.tp + 2 * jobs.rank_key_heads) * jobs.head_dim * item
    widened = np.where(jobs.gated > 0, 3 + eager, 2.0) * jobs.feed_forward / jobs.tp * item
    # ulysses keeps attention's result as its kernel returns it, and again as the output layer reads it.
    exchanged = (jobs.ulysses > 0) * (jobs.cp > 1) * jobs.heads * jobs.head_dim / jobs.tp * item
    everything = 2 * between + norms + 2 * item * hidden + heads + exchanged + widened + _dropout_bytes(jobs)
    some = between + heads + 2 * item * hidden + (1 + jobs.gated) * jobs.feed_forward / jobs.tp * item
    return everything, some, between
