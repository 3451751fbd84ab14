"""Estimate the seconds of one layer and one micro-batch: computation, and what communication and copies add to it.

Communication over tp, cp and ep is part of a layer; that over dp and pp is part of a step (step_time.py).
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np

from hpc_train.config.cluster import PCIE_BANDWIDTH
from hpc_train.planner.constants import Constants
from hpc_train.planner.model.distinct import find_distinct_jobs, take_columns
from hpc_train.planner.model.inputs import FLOAT8_RECIPES, FSDP, FULL, Column
from hpc_train.planner.model.jobs import Jobs, choose
from hpc_train.planner.model.layer.activations import layer_activations
from hpc_train.planner.model.layer.experts import expert_launch_seconds, exposed_exchange_seconds
from hpc_train.planner.model.layer.layer_work import LayerWork, attention_score_width, layer_work
from hpc_train.planner.model.network import all_reduce_seconds, all_to_all_seconds, make_rank_group, send_seconds


@dataclass(frozen=True)
class LayerTime:
    """Seconds of one layer and one micro-batch, [n]. Exposed means not hidden behind computation."""

    forward: Column
    """Computation, and the copy of activations to the host."""
    backward: Column
    """Computation with recomputation, and the copy of activations back."""
    moved: Column
    """The part of forward and backward in which only copies go on."""
    tensor_forward: Column
    """Exposed communication over tp."""
    tensor_backward: Column
    context: Column
    """Exposed communication over cp, forward and backward."""
    experts: Column
    """Exposed communication over ep, forward and backward."""
    launch_forward: Column
    """Time that forward waits for the host to launch kernels."""
    launch_backward: Column

    @cached_property
    def launch(self) -> Column:
        return self.launch_forward + self.launch_backward

    @cached_property
    def tensor(self) -> Column:
        return self.tensor_forward + self.tensor_backward

    @cached_property
    def total(self) -> Column:
        return self.forward + self.backward + self.tensor + self.context + self.experts + self.launch


_TENSORWISE = FLOAT8_RECIPES.index("tensorwise")
_OUTSIDE_LAYERS = frozenset(
    (
        *("global_batch", "dp_replicate", "dp_shard", "pp", "virtual_stages", "schedule"),
        *("zero", "reshard", "offload", "reduce_bytes", "overlap_data"),
    )
)
"""Columns that do not change the seconds of a layer, unless its activations are offloaded."""


def estimate_layer_time(jobs: Jobs, constants: Constants) -> tuple[LayerWork, LayerTime]:
    """Return the work of a layer of each job and its seconds.

    A search has thousands of jobs with few different layers: each of these is estimated once.
    """
    distinct = None if np.any(jobs.offload_activations) else find_distinct_jobs(jobs, _OUTSIDE_LAYERS)
    if distinct is None:
        work = layer_work(jobs, constants)
        return work, _time_layer(jobs, constants, work)
    different_jobs, index = distinct
    work = layer_work(different_jobs, constants)
    return take_columns(work, index), take_columns(_time_layer(different_jobs, constants, work), index)


def _time_layer(jobs: Jobs, constants: Constants, work: LayerWork) -> LayerTime:
    copy = _copy_seconds(jobs, constants)
    once, back = work.forward, work.backward + work.recomputation
    forward, backward = np.maximum(once, copy), np.maximum(back, copy)
    tensor_forward, tensor_backward = _tensor_seconds(jobs, constants)
    waits = expert_launch_seconds(jobs, constants) if jobs.has_experts else np.zeros(())
    # The host launches kernels ahead of the device, which waits only if launching takes longer than computing. A CPU
    # computes the kernels itself.
    hidden_forward, hidden_backward = (
        choose(jobs.host_computes > 0, 0.0, part) for part in (forward + tensor_forward, backward + tensor_backward)
    )
    return LayerTime(
        forward=forward,
        backward=backward,
        moved=forward - once + backward - back,
        tensor_forward=tensor_forward,
        tensor_backward=tensor_backward,
        context=_context_seconds(jobs, constants, work),
        experts=exposed_exchange_seconds(jobs, constants, forward, backward) if jobs.has_experts else np.zeros(()),
        launch_forward=np.maximum(work.launch_forward - hidden_forward, 0) + waits,
        launch_backward=np.maximum(work.launch_backward - hidden_backward, 0) + 2 * waits,
    )


def _copy_seconds(jobs: Jobs, constants: Constants) -> Column:
    """Return the seconds of copying a layer's activations to the host, or back.

    They run beside the computation of a neighbouring layer (parallel.memory.activation_offload): a layer takes as long
    as the longer of both. Bytes over the bandwidth of PCIe (Rhu et al. 2016, arXiv:1602.08124, section 3.1).
    """
    if not np.any(jobs.offload_activations):
        return np.zeros(())
    stored = layer_activations(jobs, constants, jobs.micro_batch * jobs.sequence / jobs.cp).stored
    return choose(jobs.offload_activations > 0, stored / get_pcie_bandwidth(jobs), 0.0)


def get_pcie_bandwidth(jobs: Jobs) -> Column:
    """Return bytes/s between a GPU and its host, one direction; PCIE_BANDWIDTH where it is unknown."""
    return choose(jobs.host_bandwidth > 0, jobs.host_bandwidth, PCIE_BANDWIDTH)


def _tensor_seconds(jobs: Jobs, constants: Constants) -> tuple[Column, Column]:
    """Return the exposed seconds of tp in one layer: (forward, backward).

    Each has two all-reduces of the micro-batch's activations, or as many pairs of gather and scatter, which take as
    long (traffic.model_axes.count_block_calls); norms over all heads have one more, of their sums of squares.
    Communication of recomputation counts as backward.
    """
    size = jobs.micro_batch * jobs.sequence / jobs.cp * jobs.hidden * jobs.activation_bytes
    once = all_reduce_seconds(make_rank_group(jobs, constants, jobs.tp, np.ones(()), jobs.overlap_tensor), size)
    # A ring of n ranks has 2 (n - 1) hops; with CUDA_LAUNCH_BLOCKING ranks arrive late at each of them.
    once = once + 2 * (jobs.tp - 1) * jobs.launch_blocking * constants.blocking
    # NCCL gathers along the first dimension, but tp splits positions, which are the second: PyTorch copies the result
    # of each gather and the input of each scatter, a read and a write of the whole tensor each.
    copies = 4 * size / (jobs.memory_bandwidth * constants.memory_efficiency)
    once = once + choose((jobs.stack >= FSDP) & (jobs.sequence_parallel > 0) & (jobs.tp > 1), copies, 0.0)
    exposed = 1 - choose(jobs.overlap_tensor > 0, constants.overlap_tensor, 0.0)
    again = choose(jobs.recompute == FULL, jobs.recompute_share, 0.0)
    # An all-reduce counts as a gather and a scatter, of half its seconds each.
    half, sums = once / 2 * exposed, 2 - jobs.parallel_block
    gathers, backward_scatters = _count_gathers(jobs, sums)
    forward = (gathers + sums) * half
    backward = (sums + backward_scatters) * half
    if np.any(jobs.full_norms):  # two numbers of a token, which nothing overlaps
        small = 2 * jobs.micro_batch * jobs.sequence / jobs.cp * np.maximum(jobs.activation_bytes, 4)
        norms = jobs.full_norms * all_reduce_seconds(make_rank_group(jobs, constants, jobs.tp, np.ones(())), small)
        forward, backward = forward + norms, backward + norms
    return forward, again * forward + backward


def _count_gathers(jobs: Jobs, sums: Column) -> tuple[Column, Column]:
    """Return (gathers of a layer's forward, scatters of its backward), in gathers of 16 bits. sums: its all-reduces."""
    gathers = scatters = sums
    if np.any(jobs.separate_gathers):
        # Queries, keys, values and both branches of the feed-forward layer. torch.compile merges equal gathers of
        # forward, but not the scatters of their different gradients.
        more = jobs.separate_gathers * (2 + jobs.gated)
        gathers = gathers + choose(jobs.fused_elementwise > 0, 0.0, more)
        scatters = scatters + more
    # torchao casts inputs before it gathers them, if all ranks use one scale (torchtitan, docs/float8.md).
    narrow = (jobs.float8 == _TENSORWISE) & (jobs.stack == FSDP) & (jobs.sequence_parallel > 0)
    return (gathers / choose(narrow, 2.0, 1.0) if np.any(jobs.float8) else gathers), scatters


def _context_seconds(jobs: Jobs, constants: Constants, work: LayerWork) -> Column:
    """Return the exposed seconds of cp in one layer's attention, forward and backward."""
    ring = _ring_seconds(jobs, constants, work)
    if not np.any(jobs.ulysses):
        return ring
    return choose(jobs.ulysses > 0, _ulysses_seconds(jobs, constants), ring)


def ulysses_bytes(jobs: Jobs) -> Column:
    """Return the bytes of one layer's all-to-alls for one micro-batch, forward and backward.

    These move queries, keys, values and the result (traffic.model_axes.list_ulysses_flows).
    """
    tokens = jobs.micro_batch * jobs.sequence / jobs.cp
    # If there are fewer key and value heads than cp ranks, they are repeated until every rank has one.
    key_heads = np.maximum(jobs.kv_heads / jobs.tp, np.minimum(jobs.cp, jobs.heads / jobs.tp))
    elements = tokens * (jobs.heads / jobs.tp + key_heads) * jobs.head_dim
    return 2 * _count_attention_passes(jobs) * elements * jobs.activation_bytes


def _count_attention_passes(jobs: Jobs) -> Column:
    """Return how often a layer's attention runs: forward, backward, and once more if it is recomputed."""
    return 2 + choose(jobs.recompute == FULL, jobs.recompute_share, 0.0)


def _ulysses_seconds(jobs: Jobs, constants: Constants) -> Column:
    """Return the seconds of Ulysses' all-to-alls, which nothing hides: attention cannot start without them."""
    group = make_rank_group(jobs, constants, jobs.cp, jobs.tp)
    return all_to_all_seconds(group, ulysses_bytes(jobs), 4 * _count_attention_passes(jobs))


def _ring_seconds(jobs: Jobs, constants: Constants, work: LayerWork) -> Column:
    """Return the exposed seconds of ring attention (traffic.model_axes.list_ring_attention_flows)."""
    tokens = jobs.micro_batch * jobs.sequence / jobs.cp
    # With fewer key and value heads than tp ranks each rank holds a whole copy of one head.
    keys = tokens * jobs.kv_heads * jobs.head_dim / np.minimum(jobs.tp, jobs.kv_heads)
    hop = send_seconds(jobs, constants, 2 * keys * jobs.activation_bytes, jobs.tp)
    # Gradients of keys and values are summed on their way round, in fp32 or wider.
    gradients = send_seconds(jobs, constants, 2 * keys * np.maximum(jobs.activation_bytes, 4), jobs.tp)
    # Keys and values go round in forward and again in backward, the gradients of both in backward.
    moved = (jobs.cp - 1) * (2 * hop + gradients)
    # Only attention itself runs beside the transfers: its share of the layer by FLOPs.
    width = attention_score_width(jobs)
    attention = (work.forward + work.backward) * width / (jobs.layer_parameters + width)
    return choose(jobs.cp > 1, np.maximum(moved - constants.overlap_data * attention, hop), 0.0)
