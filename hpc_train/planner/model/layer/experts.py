"""Cost of a mixture of experts on one rank for one micro-batch: products, elementwise work, exchange and activations.

A router sends each token to top_k of a layer's experts. With ep the experts are on different ranks, so that rows travel
by all-to-all, and a rank multiplies what it gets with the experts it holds, in one grouped product. On average a rank
gets as many rows as it sends; Jobs.imbalance says how many more the busiest one gets, and all others wait for it.
"""

from __future__ import annotations

import numpy as np

from hpc_train.planner.constants import Constants
from hpc_train.planner.model.inputs import FULL, GRAPHED_STEP, MEGATRON, Column
from hpc_train.planner.model.jobs import Jobs, choose
from hpc_train.planner.model.layer.products import grouped_seconds, linear_seconds
from hpc_train.planner.model.network import all_to_all_seconds, make_rank_group

_GATED_PASSES = 3.0
"""Passes of SwiGLU over its width: it reads both branches and writes one (see layer_work.py)."""
_EXCHANGE_UNITS = 20 / 132
"""Share of a GPU's multiprocessors that run an all-to-all beside computation (DeepSeek-AI 2024, arXiv:2412.19437,
section 3.2.2: 20 of an H800's 132)."""
_KERNELS = 30.0
"""Kernel launches of router, sort, gather and sum in forward, in addition to those of a dense layer."""
_SCORE_BYTES = 12.0
"""Bytes per token and expert that the router keeps: scores in fp32, and the sorted indices, which are 64-bit."""
_INDEX_BYTES = 24.0
"""Bytes per row: its place in three orders of 64-bit numbers."""


def mix_layers(jobs: Jobs, dense: Column, mixed: Column) -> Column:
    """Return the mean over a model's layers. dense, mixed: values of a layer without experts, and with them."""
    return dense + jobs.sparse_share * (mixed - dense)


def rank_rows(jobs: Jobs, tokens: Column) -> Column:
    """Return the rows that the busiest rank computes. tokens: of a rank's micro-batch."""
    return tokens * _rows_of_token(jobs)


def _rows_of_token(jobs: Jobs) -> Column:
    """Return the rows per token of the busiest rank; without ep every rank has all experts, and none is busier."""
    return jobs.top_k * choose(jobs.ep > 1, jobs.imbalance, 1.0)


def expert_products(jobs: Jobs, constants: Constants, tokens: Column) -> tuple[Column, Column]:
    """Return the forward seconds of a mixture's products: (all but the last, the last one)."""
    # Where tp does not split the experts, each of its ranks computes the rows of its own positions.
    rows = np.maximum(rank_rows(jobs, tokens), 1) * jobs.expert_tp / jobs.tp
    local_experts = np.maximum(jobs.experts / jobs.ep, 1)
    width, shared = np.maximum(jobs.expert_width, 1) / jobs.expert_tp, jobs.shared_width / jobs.tp
    first = grouped_seconds(jobs, constants, rows, local_experts, jobs.hidden, 2 * width)
    last = grouped_seconds(jobs, constants, rows, local_experts, width, jobs.hidden)
    first = first + linear_seconds(jobs, constants, tokens, jobs.hidden, np.maximum(jobs.experts, 1))
    if np.any(shared):
        some = np.maximum(shared, 1)
        first = first + (shared > 0) * linear_seconds(jobs, constants, tokens, jobs.hidden, 2 * some)
        last = last + (shared > 0) * linear_seconds(jobs, constants, tokens, some, jobs.hidden)
    return first, last


def expert_elementwise(jobs: Jobs, constants: Constants) -> Column:
    """Return the elements per token that a mixture's elementwise work passes over in forward."""
    rows = _rows_of_token(jobs)
    activation = _GATED_PASSES * (rows * jobs.expert_width + jobs.shared_width) / jobs.tp
    return activation + constants.expert_passes * rows * jobs.hidden * jobs.expert_tp / jobs.tp


def bias_elementwise(jobs: Jobs) -> tuple[Column, Column]:
    """Return the 16-bit elements per token that kernels of biases and clamps read and write: (forward, backward).

    Megatron-Core (transformer/moe/experts.py: _apply_bias, and fusions/fused_bias_geglu.py) scales the bias of the last
    product by each row's weight, adds it expert by expert, and joins the parts: 6 passes over the hidden states of a
    row, and 8 in backward, which sums the gradients of bias and weight. DeepEP and HybridEP have weights in fp32, so
    that these are 14 and 20 of 16 bits. It clamps both branches of the first product and joins them: 4 passes over
    both, and 5 in backward. Experts whose products Transformer Engine fuses with all this have none of these passes.
    """
    wide = jobs.sends_once > 0
    both, rows = 2 * jobs.expert_width, _rows_of_token(jobs) * jobs.expert_biases / jobs.tp
    hidden = jobs.hidden * jobs.expert_tp
    forward = rows * (choose(wide, 14.0, 6.0) * hidden + 4 * both)
    return forward, rows * (choose(wide, 20.0, 8.0) * hidden + 5 * both)


def expert_kernels(jobs: Jobs) -> Column:
    """Return the additional kernel launches of a layer's forward, on average over the layers."""
    return jobs.sparse_share * _KERNELS


def expert_launch_seconds(jobs: Jobs, constants: Constants) -> Column:
    """Return the seconds of a forward that the device waits for the launches of experts, on average over the layers.

    Megatron launches the products and casts of each of a rank's experts; PyTorch has one kernel for all of them.
    """
    experts = choose(jobs.stack == MEGATRON, np.maximum(jobs.experts / jobs.ep, 1), 1.0)
    return choose(jobs.cuda_graphs == GRAPHED_STEP, 0.0, jobs.sparse_share * experts * constants.launch_expert)


def exposed_exchange_seconds(jobs: Jobs, constants: Constants, forward: Column, backward: Column) -> Column:
    """Return the seconds of one layer's all-to-alls that a rank waits for, forward and backward.

    forward, backward: seconds of the layer's computation. If jobs.overlap_experts is set, the all-to-alls of another
    micro-batch run beside it, on some of the multiprocessors.
    """
    exchange = sum(exchange_seconds(jobs, constants), np.zeros(()))
    if not np.any(jobs.overlap_experts):
        return exchange
    hidden = np.minimum(exchange, constants.overlap_experts * jobs.sparse_share * (forward + backward))
    return exchange - choose(jobs.overlap_experts > 0, hidden * (1 - _EXCHANGE_UNITS), 0.0)


def exchange_seconds(jobs: Jobs, constants: Constants) -> tuple[Column, Column]:
    """Return the seconds of one layer's all-to-alls: (forward, backward); recomputed ones count as backward.

    Each pass sends a rank's rows to their experts and the results back (traffic.model_axes.list_expert_flows).
    """
    tokens = jobs.micro_batch * jobs.sequence / jobs.cp
    # Over tp, hpc_train splits the width of each expert, so that every rank sends all rows of its micro-batch; in
    # Megatron a rank sends those of its own positions, and ep takes neighbours.
    size = rank_rows(jobs, tokens) * jobs.hidden * jobs.activation_bytes * jobs.expert_tp / jobs.tp
    group = make_rank_group(jobs, constants, jobs.ep, jobs.expert_tp)
    # One way to the experts, and one back in 16 bits.
    both_ways = 1 + jobs.dispatch_bytes / jobs.activation_bytes
    exchange = all_to_all_seconds(group, both_ways * size, np.full((), 2.0))
    if np.any(jobs.sends_once):
        nodes = group.ranks / group.within
        # Expected number of different nodes that have some of top_k experts, if these are drawn evenly from those that
        # the router may choose for a token.
        allowed = np.maximum(nodes * jobs.routed_share, 1)
        different = allowed * (1 - (1 - 1 / allowed) ** jobs.top_k)
        exchange = exchange * choose((jobs.sends_once > 0) & (nodes > 1), different / np.maximum(jobs.top_k, 1), 1.0)
    once = constants.exchange * jobs.sparse_share * exchange
    again = choose(jobs.recompute == FULL, jobs.recompute_share, 0.0)
    return once, (1 + again) * once


def expert_activations(jobs: Jobs) -> Column:
    """Return the bytes per token that a mixture keeps for backward besides its input, without recomputation.

    For every row: its input, the results of both branches, what SwiGLU makes of them, and the result before and after
    it is put back in order; with ep also the result before it travels back. For every token: the router's input.
    Beside adapters experts and router are frozen, so that the inputs of their products are not kept. What adapters of
    shared experts keep is counted with the adapters.
    """
    item, rows = jobs.activation_bytes, _rows_of_token(jobs)
    kept_widths = choose(jobs.fused_elementwise > 0, 3.0, 4.0)
    tp_share = jobs.expert_tp / jobs.tp
    copies = choose(jobs.ep > 1, 4.0, 3.0)
    frozen = choose(jobs.adapter_weights > 0, 1.0, 0.0)
    widths = (copies - frozen) * jobs.hidden + (kept_widths - frozen) * jobs.expert_width / jobs.expert_tp
    routed = rows * tp_share * widths
    return (
        (routed + (kept_widths - frozen) * jobs.shared_width / jobs.tp + (1 - frozen) * jobs.hidden) * item
        + jobs.experts * _SCORE_BYTES
        + rows * _INDEX_BYTES
    )


def expert_gradients(jobs: Jobs) -> Column:
    """Return the bytes per token of the gradients that are alive at the widest place of a mixture's backward."""
    rows = _rows_of_token(jobs)
    widest = rows * (2 * jobs.hidden + 2 * jobs.expert_width / jobs.tp) + 2 * jobs.shared_width / jobs.tp
    return jobs.activation_bytes * (widest + 2 * jobs.hidden)
