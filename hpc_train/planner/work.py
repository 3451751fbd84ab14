"""What a layer, and the head, take on one rank for one micro-batch: products, attention and elementwise work."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from hpc_train.planner.constants import Constants
from hpc_train.planner.gemm import linear_seconds, misaligned
from hpc_train.planner.jobs import STACKS, Column, Jobs

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
class Work:
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


def work(jobs: Jobs, constants: Constants) -> Work:
    """All of it."""
    tokens = jobs.micro_batch * jobs.sequence / jobs.cp
    linear, ending = _linear(jobs, constants, tokens)
    core, core_backward = _attention(jobs, constants, tokens)
    plain, plain_backward = _elementwise(jobs, constants, tokens)
    share = np.where(jobs.recompute > 0, jobs.recompute_share, 0.0)
    lin, att, ele = again_shares(jobs)
    kernels = np.where(jobs.fused_attention + jobs.fused_elementwise > 0, _FUSED_KERNELS, 1.0)
    kernels = kernels * np.where(jobs.stack == _DEEPSPEED, constants.launch_deepspeed, constants.launch)
    full = share * lin
    return Work(
        forward=linear + core + plain,
        backward=2 * linear + core_backward + plain_backward,
        again=share * (lin * (linear - np.where(jobs.stack >= 2, ending, 0.0)) + att * core + ele * plain),
        head=_head(jobs, constants, tokens),
        embedding=_embedding(jobs, constants, tokens),
        launch_forward=kernels * _KERNELS_FORWARD,
        launch_backward=kernels * (_KERNELS_BACKWARD + _KERNELS_FORWARD * full),
        flops_again=share * (lin * 2 * jobs.layer_parameters + att * 2 * score_width(jobs)) * tokens * jobs.cp,
    )


def score_width(jobs: Jobs) -> Column:
    """FLOPs / 2 of a token's products with keys and values, forward: half of the positions if causally fused."""
    return jobs.heads * jobs.head_dim * jobs.sequence * np.where(jobs.fused_attention > 0, 1.0, 2.0)


def again_shares(jobs: Jobs) -> tuple[Column, Column, Column]:
    """What of the linear layers, of attention's core, and of elementwise work is done again, in a recomputed layer.

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
    slow = misaligned(jobs.head_dim, constants)
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
    whole = (_NORM_PASSES + _RESIDUAL_PASSES) * jobs.hidden / np.where(jobs.sequence_parallel > 0, jobs.tp, 1.0)
    wide = np.where(jobs.gated > 0, _GATED_PASSES, _WIDE_PASSES) * jobs.feed_forward
    rotary = _ROTARY_PASSES * (jobs.heads + jobs.kv_heads) * jobs.head_dim * jobs.gated
    kernels = np.where(jobs.fused_elementwise > 0, constants.compiled, 1.0)
    eager = np.where(jobs.stack >= 2, constants.eager, 1.0)
    elements = tokens * (whole + (wide + rotary) / jobs.tp) * kernels * np.where(kernels < 1, 1.0, eager)
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
