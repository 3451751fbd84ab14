"""What one layer keeps of a micro-batch until backward, and what it needs while it is computed."""

from __future__ import annotations

import numpy as np

from hpc_train.planner.constants import Constants
from hpc_train.planner.jobs import RECOMPUTE, STACKS, Column, Jobs
from hpc_train.planner.work import again_shares

_MEGATRON, _FSDP, _OURS = (STACKS.index(name) for name in ("megatron", "fsdp", "hpc_train"))
_SELECTIVE, _FULL = RECOMPUTE.index("selective"), RECOMPUTE.index("full")
_WIDE = 4.0
"""Bytes of fp32."""


def layer_activations(jobs: Jobs, constants: Constants, tokens: Column) -> tuple[Column, Column]:
    """Bytes that one layer keeps of one micro-batch, and that a recomputed one needs besides while it is computed.

    Published stacks by Korthikanti et al. 2022, arXiv:2205.05198, table 2, taken apart: inputs of norms and linear
    layers, what attention and the activation function keep; dropout masks for GPTs.
    """
    everything, some, full = _published(jobs)
    ours = jobs.stack == _OURS
    if np.any(ours):
        pairs = zip(_ours(jobs), (everything, some, full), strict=True)
        everything, some, full = (np.where(ours, mine, theirs) for mine, theirs in pairs)
    kept = np.where(jobs.recompute == _FULL, full, np.where(jobs.recompute == _SELECTIVE, some, everything))
    share = np.where(jobs.recompute > 0, jobs.recompute_share, 0.0)
    kept = share * kept + (1 - share) * everything
    # Backward: the layer that is made again, gradients of its widest part, and what tp gathers of split positions.
    item = jobs.activation_bytes
    wide_gradient = item * (jobs.feed_forward * (1 + jobs.gated) / jobs.tp + 2 * jobs.hidden)
    gathered = 2 * item * jobs.hidden * (jobs.sequence_parallel > 0) * (jobs.tp > 1)
    again = np.where(ours & (jobs.recompute == _SELECTIVE), everything - some, everything)
    alive = again * np.where(jobs.recompute > 0, 1.0, 0.0) + wide_gradient + gathered
    return tokens * kept * constants.activations, tokens * alive * constants.activations


def last_norm(jobs: Jobs, tokens: Column) -> Column:
    """Return the bytes that the norm before the head of hpc_train's own models keeps per micro-batch."""
    between, norms = _between(jobs)
    return tokens * (between + norms / 2 + jobs.activation_bytes * jobs.hidden)


def pending_gradients(jobs: Jobs, tokens: Column) -> Column:
    """Return the bytes kept per layer and micro-batch between a split backward's two parts, for hpc_train's own models.

    These are gradients of the results of products and norms, from which weight gradients will be computed.
    """
    item, hidden = jobs.activation_bytes, jobs.hidden
    width = np.where(jobs.sequence_parallel > 0, jobs.tp, 1.0)
    eager = (jobs.gated > 0) & (jobs.fused_elementwise == 0) & (item < _WIDE)
    norms = 2 * np.where(eager, _WIDE, item) * hidden / width
    heads = (jobs.heads + 2 * jobs.kv_heads) * jobs.head_dim / jobs.tp
    return tokens * (norms + item * (heads + 2 * hidden / width + (1 + jobs.gated) * jobs.feed_forward / jobs.tp))


def _between(jobs: Jobs) -> tuple[Column, Column]:
    """Return bytes per token of a norm's input, and of what a layer's two norms keep beside it (hpc_train models)."""
    item, hidden = jobs.activation_bytes, jobs.hidden
    width = np.where(jobs.sequence_parallel > 0, jobs.tp, 1.0)
    autocast = (jobs.zero == 0) & (jobs.tp == 1) & (jobs.pp == 1) & (item < _WIDE)
    eager = jobs.fused_elementwise == 0
    norms = 2 * np.where(item < _WIDE, _WIDE + item, item) * hidden / width * (jobs.gated * eager)
    norms = norms + np.where(autocast, 2 * item * hidden, 0.0)
    return np.where(autocast, _WIDE, item) * hidden / width, norms


def whole_layer(jobs: Jobs, constants: Constants, tokens: Column) -> Column:
    """Bytes of one layer and one micro-batch of which nothing is recomputed."""
    everything = _published(jobs)[0]
    ours = jobs.stack == _OURS
    if np.any(ours):
        everything = np.where(ours, _ours(jobs)[0], everything)
    return tokens * everything * constants.activations


def _published(jobs: Jobs) -> tuple[Column, Column, Column]:
    """Bytes a token with nothing, with attention's core or what the stack means by it, and with all recomputed."""
    item, width = jobs.activation_bytes, np.where(jobs.sequence_parallel > 0, jobs.tp, 1.0)
    masks = np.where((jobs.gated > 0) | (jobs.stack >= _FSDP), 0.0, 2.0)
    # Inputs of linear layers are kept as they are multiplied: in 8 bits by Megatron's fused layers.
    given = np.where((jobs.peak_flops > jobs.peak_flops_attention) & (jobs.stack == _MEGATRON), 1.0, item)
    whole = (2 * item + 2 * given + masks) * jobs.hidden / width
    heads = (2 * jobs.heads + 2 * jobs.kv_heads) * jobs.head_dim / jobs.tp * item
    eager = np.where(jobs.fused_elementwise > 0, 0.0, item)
    wide = np.where(jobs.gated > 0, 2 * item + eager + given, item + given) * jobs.feed_forward / jobs.tp
    scores = (2 * item + 1) * jobs.heads / jobs.tp * jobs.sequence * (jobs.fused_attention == 0)
    linear, core, plain = again_shares(jobs)
    some = whole * np.where(plain > 0, 0.5, 1.0) + heads + wide * (1 - 0.5 * plain) + scores * (1 - core)
    return whole + heads + wide + scores, some * (1 - 0.5 * linear), item * jobs.hidden / width


def _ours(jobs: Jobs) -> tuple[Column, Column, Column]:
    """The same of hpc_train: a test ties them to what a rehearsal counts.

    Two inputs of norms lie as positions do; two inputs of column-parallel layers are kept gathered
    (parallel.tensor.layers). An RMSNorm that is not fused keeps its result before the scale, in fp32 and rounded.
    Autocast (no sharding) keeps what lies between layers in fp32. Selective recomputation keeps the results of products
    and of attention, those of row-parallel ones before they are summed and scattered.
    """
    item, hidden = jobs.activation_bytes, jobs.hidden
    between, norms = _between(jobs)
    eager = jobs.fused_elementwise == 0
    heads = (2 * jobs.heads + 2 * jobs.kv_heads) * jobs.head_dim / jobs.tp * item
    widened = np.where(jobs.gated > 0, 3 + eager, 2.0) * jobs.feed_forward / jobs.tp * item
    everything = 2 * between + norms + 2 * item * hidden + heads + widened
    some = between + heads + 2 * item * hidden + (1 + jobs.gated) * jobs.feed_forward / jobs.tp * item
    return everything, some, between
