"""Estimate the time of a step, part by part, and combine it with memory into the estimate of a job."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np

from hpc_train.planner.constants import Constants, residual_factor
from hpc_train.planner.model import network
from hpc_train.planner.model.activations import layer_activations
from hpc_train.planner.model.distinct import find_distinct_jobs, take_columns
from hpc_train.planner.model.experts import exchange_seconds
from hpc_train.planner.model.jobs import PCIE, STACKS, Column, Jobs
from hpc_train.planner.model.layer import LayerWork, attention_score_width, layer_work
from hpc_train.planner.model.memory import Memory, estimate_memory
from hpc_train.planner.model.network import all_reduce_seconds, all_to_all_seconds, make_rank_group, send_seconds
from hpc_train.planner.model.pipeline import bubble_seconds
from hpc_train.planner.model.stage_layers import LayerSplit, split_layers


@dataclass(frozen=True)
class StepTime:
    """Seconds of a step on the critical rank. The parts are [n], do not overlap, and add up to `step`."""

    compute: Column
    """Matrix products, attention and elementwise work of all micro-batches on the slowest stage, with recomputation."""
    offload: Column
    """Copies of activations to the host and back."""
    launch: Column
    """Time that the device waits for the host to launch kernels."""
    tensor: Column
    """Exposed communication over tp; exposed means not hidden behind computation."""
    context: Column
    """Exposed communication over cp."""
    experts: Column
    """Exposed communication over ep."""
    data: Column
    """Exposed communication over dp_replicate and dp_shard."""
    pipeline: Column
    """Exposed communication over pp."""
    bubble: Column
    """Time that the critical rank waits for other stages."""
    optimizer: Column
    jitter: Column
    """Delay by stragglers: every step takes as long as its slowest rank."""
    checkpoint: Column
    """Time that training waits for saves, per step."""
    spread: Column
    """[n]: expected standard deviation of log(measured / predicted), from the residuals of the fit."""
    hardware_flops: Column
    """[n]: FLOPs that the whole job really computes in a step, with recomputation."""

    @cached_property
    def step(self) -> Column:
        """Median of the expected step time (p50)."""
        exposed = (self.tensor, self.context, self.experts, self.data, self.pipeline)
        parts = (self.launch, *exposed, self.bubble, self.optimizer)
        return sum(parts, self.compute + self.offload + self.jitter + self.checkpoint)

    def quantile(self, p: float) -> Column:
        """Return the p-quantile of the step time, assuming that the error of log(step) is normal."""
        from statistics import NormalDist

        return self.step * np.exp(NormalDist().inv_cdf(p) * self.spread)


@dataclass(frozen=True)
class _Layer:
    """Seconds of one layer and one micro-batch."""

    forward: Column
    """Computation, and the copy of activations to the host."""
    backward: Column
    """Computation with recomputation, and the copy of activations back."""
    moved: Column
    """The part of forward and backward in which only copies go on."""
    tensor: Column
    """Exposed communication over tp, forward and backward."""
    context: Column
    experts: Column
    """Exposed communication over ep, forward and backward."""
    launch_forward: Column
    """Time that forward waits for the host to launch kernels."""
    launch_backward: Column

    @cached_property
    def launch(self) -> Column:
        return self.launch_forward + self.launch_backward

    @cached_property
    def total(self) -> Column:
        return self.forward + self.backward + self.tensor + self.context + self.experts + self.launch


_BESIDE_LAYERS = frozenset(
    (
        *("global_batch", "dp_replicate", "dp_shard", "pp", "virtual_stages", "schedule"),
        *("zero", "reshard", "offload", "reduce_bytes", "overlap_data"),
    )
)
"""Columns that do not change the seconds of a layer, unless its activations are offloaded."""
_FSDP = STACKS.index("fsdp")
"""Stacks from this one on are PyTorch's: FSDP of others, and hpc_train."""


def estimate_step_time(jobs: Jobs, constants: Constants) -> StepTime:
    """Estimate the seconds of each part of a step."""
    done, layer = _layers(jobs, constants)
    layers = split_layers(jobs)
    slow, ends = _slowest(jobs, layers, layer, done)
    # What is left of a micro-batch's way through the pipeline while the slowest rank waits for it.
    others = _all_ranks_seconds(jobs, layer, done) - slow * layer.total - ends
    m = jobs.micro_batches
    compute = m * (slow * (layer.forward + layer.backward - layer.moved) + ends)
    waiting = _bubble(jobs, layer, done, others)
    message = _messages(jobs, constants)
    heaviest = _heaviest(jobs, layers)
    data = _data(jobs, constants, layer, *heaviest)
    update, accumulation = _optimizer(jobs, constants, *heaviest)
    parts = [
        compute + accumulation,
        m * slow * layer.moved,
        m * slow * layer.launch,
        m * slow * layer.tensor,
        m * slow * layer.context,
        m * slow * layer.experts,
        data,
        message,
        waiting,
        update,
    ]
    doublings = np.log2(np.maximum(jobs.world / jobs.gpus_per_node, 1))
    if constants.residuals:
        parts = [part * (constants.scale * residual_factor(jobs, constants.residuals)) for part in parts]
    elif constants.scale != 1:
        parts = [part * constants.scale for part in parts]
    # The slowest of n ranks is later the more ranks there are: about the same share of a step for each doubling.
    jitter = constants.jitter * doublings * sum(parts[1:], parts[0])
    # Not scaled by the fit: a copy at a known bandwidth.
    checkpoint = _checkpoint(jobs)
    found = np.broadcast_arrays(*parts, jitter, checkpoint, _spread(jobs, constants), _flops(jobs, done))
    return StepTime(*found)


def _spread(jobs: Jobs, constants: Constants) -> Column:
    """Return the standard deviation of log(measured / predicted), wider where fewer runs were measured."""
    wider = max(constants.spread_pytorch, constants.spread)
    spread: Column = np.where((jobs.stack >= _FSDP) & (jobs.tp > 1), wider, constants.spread)
    if np.any(jobs.float8):
        spread = np.where(jobs.float8 > 0, np.maximum(constants.spread_float8, spread), spread)
    if jobs.has_experts:
        spread = np.where(jobs.experts > 0, np.maximum(constants.spread_experts, spread), spread)
    return spread


def _layers(jobs: Jobs, constants: Constants) -> tuple[LayerWork, _Layer]:
    """Return the seconds of a layer of each job. A search has thousands of jobs with few different layers."""
    found = None if np.any(jobs.offload_activations) else find_distinct_jobs(jobs, _BESIDE_LAYERS)
    if found is None:
        done = layer_work(jobs, constants)
        return done, _layer(jobs, constants, done)
    distinct, index = found
    done = layer_work(distinct, constants)
    return take_columns(done, index), take_columns(_layer(distinct, constants, done), index)


def _layer(jobs: Jobs, constants: Constants, done: LayerWork) -> _Layer:
    copy = _copy(jobs, constants)
    once, back = done.forward, done.backward + done.again
    forward, backward = np.maximum(once, copy), np.maximum(back, copy)
    tensor_forward, tensor_backward = _tensor(jobs, constants)
    context = _context(jobs, constants, done)
    exchanged = sum(exchange_seconds(jobs, constants), np.zeros(())) if jobs.has_experts else np.zeros(())
    # The host launches kernels ahead of the device. The device waits only if launching takes longer than computing.
    waits = (
        np.maximum(done.launch_forward - forward - tensor_forward, 0),
        np.maximum(done.launch_backward - backward - tensor_backward, 0),
    )
    shown = forward - once + backward - back
    return _Layer(forward, backward, shown, tensor_forward + tensor_backward, context, exchanged, *waits)


def _copy(jobs: Jobs, constants: Constants) -> Column:
    """Return the seconds of copying a layer's activations to the host, or back.

    They run beside the computation of a neighbouring layer (parallel.memory.activation_offload): a layer takes as long
    as the longer of both. Bytes over the bandwidth of PCIe (Rhu et al. 2016, arXiv:1602.08124, section 3.1).
    """
    if not np.any(jobs.offload_activations):
        return np.zeros(())
    stored = layer_activations(jobs, constants, jobs.micro_batch * jobs.sequence / jobs.cp).stored
    return np.where(jobs.offload_activations > 0, stored / _pcie(jobs), 0.0)


def _pcie(jobs: Jobs) -> Column:
    return np.where(jobs.host_bandwidth > 0, jobs.host_bandwidth, PCIE)


def _tensor(jobs: Jobs, constants: Constants) -> tuple[Column, Column]:
    """Return the exposed seconds of tp in one layer: (forward, backward).

    Each has two all-reduces of the micro-batch's activations, or as many pairs of gather and scatter, which take as
    long (traffic.model_axes.count_block_calls). Communication of recomputation counts as backward.
    """
    size = jobs.micro_batch * jobs.sequence / jobs.cp * jobs.hidden * jobs.activation_bytes
    once = all_reduce_seconds(make_rank_group(jobs, constants, jobs.tp, np.ones(()), jobs.overlap_tensor), size)
    # A ring of n ranks has 2 (n - 1) hops; with CUDA_LAUNCH_BLOCKING ranks arrive late at each of them.
    once = once + 2 * (jobs.tp - 1) * jobs.launch_blocking * constants.blocking
    once = once * np.where(jobs.stack >= _FSDP, constants.tensor_pytorch, 1.0)
    # NCCL gathers along the first dimension, but tp splits positions, which are the second: PyTorch copies the result
    # of each gather and the input of each scatter, a read and a write of the whole tensor each.
    copies = 4 * size / (jobs.memory_bandwidth * constants.memory_efficiency)
    once = once + np.where((jobs.stack >= _FSDP) & (jobs.sequence_parallel > 0) & (jobs.tp > 1), copies, 0.0)
    shown = 1 - np.where(jobs.overlap_tensor > 0, constants.overlap_tensor, 0.0)
    again = np.where(jobs.recompute == 2, jobs.recompute_share, 0.0)
    sums = 2 - jobs.parallel_block
    return sums * once * shown, sums * (1 + again) * once * shown


def _context(jobs: Jobs, constants: Constants, done: LayerWork) -> Column:
    """Return the exposed seconds of cp in one layer's attention, forward and backward."""
    ring = _ring(jobs, constants, done)
    if not np.any(jobs.ulysses):
        return ring
    return np.where(jobs.ulysses > 0, _exchanges(jobs, constants), ring)


def ulysses_bytes(jobs: Jobs) -> Column:
    """Return the bytes of one layer's all-to-alls for one micro-batch, forward and backward.

    These move queries, keys, values and the result (traffic.model_axes.list_ulysses_flows).
    """
    tokens = jobs.micro_batch * jobs.sequence / jobs.cp
    # If there are fewer key and value heads than cp ranks, they are repeated until every rank has one.
    keys = np.maximum(jobs.kv_heads / jobs.tp, np.minimum(jobs.cp, jobs.heads / jobs.tp))
    numbers = tokens * (jobs.heads / jobs.tp + keys) * jobs.head_dim
    return 2 * _passes(jobs) * numbers * jobs.activation_bytes


def _passes(jobs: Jobs) -> Column:
    """Return how often a layer's attention runs: forward, backward, and once more if it is recomputed."""
    return 2 + np.where(jobs.recompute == 2, jobs.recompute_share, 0.0)


def _exchanges(jobs: Jobs, constants: Constants) -> Column:
    """Return the seconds of Ulysses' all-to-alls, which nothing hides: attention cannot start without them."""
    return all_to_all_seconds(
        make_rank_group(jobs, constants, jobs.cp, jobs.tp), ulysses_bytes(jobs), 4 * _passes(jobs)
    )


def _ring(jobs: Jobs, constants: Constants, done: LayerWork) -> Column:
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
    beside = (
        (done.forward + done.backward)
        * attention_score_width(jobs)
        / (jobs.layer_parameters + attention_score_width(jobs))
    )
    return np.where(jobs.cp > 1, np.maximum(moved - constants.overlap_data * beside, hop), 0.0)


def _slowest(jobs: Jobs, layers: LayerSplit, layer: _Layer, done: LayerWork) -> tuple[Column, Column]:
    """Return (layers, seconds of embedding and head) of the slowest rank."""
    single = jobs.pp == 1
    first, last = layers.first * layer.total + done.embedding, layers.last * layer.total + done.head
    middle = np.where(jobs.pp > 2, layers.middle * layer.total, 0.0)
    # Of ranks that take equally long the last one counts, which is the one with the head.
    is_last = (last >= first) & (last >= middle)
    is_first = ~is_last & (first >= middle)
    count = np.where(is_last, layers.last, np.where(is_first, layers.first, layers.middle))
    ends = np.where(is_last, done.head, np.where(is_first, done.embedding, 0.0))
    return np.where(single, layers.first, count), np.where(single, done.head + done.embedding, ends)


def _all_ranks_seconds(jobs: Jobs, layer: _Layer, done: LayerWork) -> Column:
    """Return the seconds of one micro-batch on all ranks of the pipeline together."""
    return jobs.layers * layer.total + done.head + done.embedding


def _bubble(jobs: Jobs, layer: _Layer, done: LayerWork, others: Column) -> Column:
    """Return the seconds of the bubble. others: seconds of a micro-batch on all ranks but the slowest.

    Zero-bubble schedules need the time of weight gradients: as much as the forward of the linear layers, since each of
    their two backward products costs what the forward product does.
    """
    per_rank = jobs.layers / jobs.pp
    exchanged = layer.tensor + layer.experts
    forward = layer.forward + exchanged / 2
    weights = done.forward * _linear_share(jobs)
    inputs = layer.backward + exchanged / 2 - weights
    return bubble_seconds(jobs, others, per_rank * forward, per_rank * inputs, per_rank * weights)


def _linear_share(jobs: Jobs) -> Column:
    """Return the approximate share of a layer's forward that its linear layers take."""
    linear = jobs.layer_parameters
    # In multiply-adds per token. Attention counts twice and elementwise work 40 for each element of the hidden state,
    # since both are slower than large products for the same FLOPs.
    return linear / (linear + 2 * attention_score_width(jobs) + 40 * jobs.hidden)


def _messages(jobs: Jobs, constants: Constants) -> Column:
    """Return the exposed seconds of messages between stages: one forward and one back per micro-batch and stage."""
    # A tp rank sends only its part if tp splits positions. Megatron and DeepSpeed (stacks 0 and 1) always do.
    pieces = np.where((jobs.sequence_parallel > 0) | (jobs.stack < 2), jobs.tp, 1.0)
    size = jobs.micro_batch * jobs.sequence / jobs.cp * jobs.hidden * jobs.activation_bytes / pieces
    stride = jobs.tp * jobs.cp * jobs.data_parallel
    once = send_seconds(jobs, constants, size, stride) * constants.pipeline_exposed
    return np.where(jobs.pp > 1, 2 * jobs.micro_batches * jobs.virtual_stages * once, 0.0)


def _heaviest(jobs: Jobs, layers: LayerSplit) -> tuple[Column, Column]:
    """Return (layers, parameters of embedding and head before sharding) of the rank with the most parameters."""
    table = jobs.vocab * jobs.hidden / jobs.tp
    layer = jobs.all_layer_parameters / jobs.tp
    inner = (jobs.pp > 2) & (layers.middle * layer > layers.first * layer + table)
    ends = np.where(jobs.pp > 1, np.where(inner, 0.0, table), (2 - jobs.tied) * table)
    return np.where(inner, layers.middle, layers.first), ends


def _data(jobs: Jobs, constants: Constants, layer: _Layer, count: Column, ends: Column) -> Column:
    """Return the exposed seconds of the data-parallel axes, and of a tied embedding's gradients.

    count, ends: as _heaviest returns them.
    """
    parameters = count * jobs.all_layer_parameters / jobs.tp
    experts = count * jobs.sparse_share * jobs.experts * jobs.expert_parameters / jobs.tp if jobs.has_experts else None
    beside = layer.forward + layer.launch_forward, layer.backward + layer.launch_backward
    windows = network.OverlapWindows(count * beside[0], count * beside[1])
    seconds = network.data_seconds(jobs, constants, parameters, ends, windows, experts)
    if not np.any(jobs.tied) or not jobs.has_pipeline:
        return seconds
    # First and last stage exchange the gradients of a tied table (traffic.model_axes.list_tied_embedding_flows).
    table = jobs.vocab * jobs.hidden / jobs.tp
    tied = send_seconds(jobs, constants, table * jobs.gradient_bytes, jobs.tp * jobs.cp * jobs.data_parallel)
    return seconds + np.where((jobs.pp > 1) & (jobs.tied > 0), tied, 0.0)


def _optimizer(jobs: Jobs, constants: Constants, count: Column, ends: Column) -> tuple[Column, Column]:
    """Return (seconds of the update, seconds of adding up the gradients of micro-batches).

    count, ends: as _heaviest returns them.
    """
    parameters = count * jobs.all_layer_parameters / jobs.tp + ends
    if jobs.has_adapters:
        frozen = jobs.adapter_weights > 0
        parameters = np.where(frozen, count * jobs.adapter_weights / jobs.tp, parameters)
    shards = np.where(jobs.zero > 0, jobs.dp_shard * jobs.cp, 1.0)
    # The update reads and writes optimizer state and parameters, reads gradients, and clipping reads and writes them.
    bytes_ = 2 * (jobs.optimizer_bytes + jobs.weight_bytes) + 3 * jobs.gradient_bytes
    update = parameters / shards * bytes_ / jobs.memory_bandwidth * constants.optimizer
    host = parameters / shards * (jobs.gradient_bytes + jobs.weight_bytes) / _pcie(jobs)
    update = update + np.where(jobs.offload > 0, 4 * host, 0.0)
    if jobs.has_experts:  # micro-batches are added up for the experts that a rank has
        routed = count * jobs.sparse_share * jobs.experts * jobs.expert_parameters / jobs.tp
        parameters = parameters - routed * (1 - 1 / jobs.ep)
    added = parameters * (2 * jobs.gradient_bytes + jobs.activation_bytes) / jobs.memory_bandwidth
    times = np.maximum(jobs.micro_batches - 1, 0) / np.where(jobs.zero == 3, shards, 1.0)
    return update, times * added / constants.memory_efficiency


def _checkpoint(jobs: Jobs) -> Column:
    """Return the seconds per step in which training waits while state is copied for a save."""
    state = jobs.parameters * (jobs.weight_bytes + jobs.optimizer_bytes) / jobs.world
    return state / jobs.checkpoint_bandwidth / jobs.checkpoint_every


def _flops(jobs: Jobs, done: LayerWork) -> Column:
    """Return the FLOPs of a step of the whole job, with recomputation."""
    micro_batches = jobs.global_batch / jobs.micro_batch
    return jobs.model_flops + micro_batches * jobs.layers * done.flops_again


@dataclass(frozen=True)
class Estimate:
    """Estimated memory, time and rates of jobs, one value per job."""

    memory: Memory
    time: StepTime
    model_flops: Column
    """[n]: FLOPs of a step of the whole job, without recomputation."""
    mfu: Column
    hfu: Column
    tokens_per_second: Column
    """Per GPU."""


def estimate_jobs(jobs: Jobs, constants: Constants) -> Estimate:
    """Estimate memory and time. The search calls both separately, since memory alone rules out many jobs."""
    spent = estimate_step_time(jobs, constants)
    rate = 1 / (spent.step * jobs.world)
    flops = jobs.model_flops
    # A run's own MFU is of the peak of precision.name, also where some products are in 8 bits.
    peak = np.where(jobs.float8 > 0, jobs.peak_flops_attention, jobs.peak_flops)
    mfu, hfu = flops * rate / peak, spent.hardware_flops * rate / peak
    return Estimate(estimate_memory(jobs, constants), spent, flops, mfu, hfu, jobs.tokens * rate)
