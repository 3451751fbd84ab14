"""Estimate the time of a step, part by part, and combine it with memory into the estimate of a job."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np

from hpc_train.planner.constants import Constants, residual_factor
from hpc_train.planner.model.inputs import DEEPSPEED, FSDP, MEGATRON, SCHEDULES, Column
from hpc_train.planner.model.jobs import Jobs, choose
from hpc_train.planner.model.layer.layer_time import LayerTime, estimate_layer_time, get_pcie_bandwidth
from hpc_train.planner.model.layer.layer_work import LayerWork, attention_score_width
from hpc_train.planner.model.layer.products import is_blackwell
from hpc_train.planner.model.memory import Memory, estimate_memory
from hpc_train.planner.model.network import OverlapWindows, data_seconds, send_seconds
from hpc_train.planner.model.pipeline import SPLITS_BACKWARD
from hpc_train.planner.model.stage_layers import LayerSplit, split_layers

_HOST_UPDATE = 4.0
"""Time of an update on the CPU over that of copying gradients to the host and parameters back.

An assumption: no measured run offloads its optimizer (evidence in constants.json). For each parameter in fp32 the
copies move 8 bytes, and AdamW reads and writes 28 of host memory. A GPU's share of the host's memory bandwidth is about
its PCIe bandwidth, so both together take about four times as long as the copies.
"""
_NAIVE, _ZBV, _DUALPIPEV, _ZB_2P = (SCHEDULES.index(name) for name in ("naive", "zbv", "dualpipev", "zb_2p"))
_SPLITS = np.isin(np.arange(len(SCHEDULES)), (*SPLITS_BACKWARD, _ZB_2P))
"""Whether a schedule splits backward into input and weight gradients, by its code."""


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


def estimate_step_time(jobs: Jobs, constants: Constants) -> StepTime:
    """Estimate the seconds of each part of a step."""
    shape = jobs.shape
    jobs = jobs.condensed
    work, layer = estimate_layer_time(jobs, constants)
    split = split_layers(jobs)
    slow, ends = _find_slowest_rank(jobs, split, layer, work)
    m = jobs.micro_batches
    compute = m * (slow * (layer.forward + layer.backward - layer.moved) + ends)
    # What is left of a micro-batch's way through the pipeline while the slowest rank waits for it.
    all_ranks = jobs.layers * layer.total + work.head + work.embedding
    bubble = _bubble_seconds(jobs, layer, work, all_ranks - slow * layer.total - ends)
    heaviest_layers, heaviest_ends = _find_heaviest_rank(jobs, split)
    update, accumulation = _optimizer_seconds(jobs, constants, heaviest_layers, heaviest_ends)
    parts = [
        compute + accumulation,
        m * slow * layer.moved,
        m * slow * layer.launch,
        m * slow * layer.tensor,
        m * slow * layer.context,
        m * slow * layer.experts,
        _data_seconds(jobs, constants, layer, heaviest_layers, heaviest_ends),
        _message_seconds(jobs, constants),
        bubble,
        update,
    ]
    if constants.residuals:
        parts = [part * (constants.scale * residual_factor(jobs, constants.residuals)) for part in parts]
    elif constants.scale != 1:
        parts = [part * constants.scale for part in parts]
    # The slowest of n ranks is later the more ranks there are: about the same share of a step for each doubling.
    doublings = np.log2(np.maximum(jobs.world / jobs.gpus_per_node, 1))
    jitter = constants.jitter * doublings * sum(parts[1:], parts[0])
    # Not scaled by the fit: a copy at a known bandwidth.
    checkpoint = _checkpoint_seconds(jobs)
    columns = (*parts, jitter, checkpoint, _choose_spread(jobs, constants), _count_flops(jobs, work))
    return StepTime(*(np.broadcast_to(column, shape) for column in columns))


def _find_slowest_rank(jobs: Jobs, split: LayerSplit, layer: LayerTime, work: LayerWork) -> tuple[Column, Column]:
    """Return (layers, seconds of embedding and head in a micro-batch) of the slowest rank."""
    first, last = split.first * layer.total + work.embedding, split.last * layer.total + work.head
    middle = choose(jobs.pp > 2, split.middle * layer.total, 0.0)
    # If ranks take equally long the last one counts, which has the head.
    is_last = (last >= first) & (last >= middle)
    is_first = ~is_last & (first >= middle)
    count = choose(is_last, split.last, choose(is_first, split.first, split.middle))
    ends = choose(is_last, work.head, choose(is_first, work.embedding, 0.0))
    alone = jobs.pp == 1
    return choose(alone, split.first, count), choose(alone, work.head + work.embedding, ends)


def _find_heaviest_rank(jobs: Jobs, split: LayerSplit) -> tuple[Column, Column]:
    """Return (layers, parameters of embedding and head before sharding) of the rank with the most parameters."""
    table = jobs.vocab * jobs.hidden / jobs.tp
    layer = jobs.all_layer_parameters / jobs.tp
    is_middle = (jobs.pp > 2) & (split.middle * layer > split.first * layer + table)
    ends = choose(jobs.pp > 1, choose(is_middle, 0.0, table), (2 - jobs.tied) * table)
    return choose(is_middle, split.middle, split.first), ends


# The pipeline.


def _bubble_seconds(jobs: Jobs, layer: LayerTime, work: LayerWork, others: Column) -> Column:
    """Return the seconds of the bubble. others: seconds of a micro-batch on all ranks but the slowest.

    Zero-bubble schedules need the time of weight gradients: as much as the forward of the linear layers, since each of
    their two backward products costs what the forward product does.
    """
    per_rank = jobs.layers / jobs.pp
    exchanged = layer.tensor + layer.experts
    forward = layer.forward + exchanged / 2
    weights = work.forward * _compute_linear_share(jobs)
    inputs = layer.backward + exchanged / 2 - weights
    return bubble_seconds(jobs, others, per_rank * forward, per_rank * inputs, per_rank * weights)


def _compute_linear_share(jobs: Jobs) -> Column:
    """Return the approximate share of a layer's forward that its linear layers take."""
    linear = jobs.layer_parameters
    # In multiply-adds per token. Attention counts twice and elementwise work 40 for each element of the hidden state,
    # since both are slower than large products for the same FLOPs.
    return linear / (linear + 2 * attention_score_width(jobs) + 40 * jobs.hidden)


def bubble_seconds(jobs: Jobs, others: Column, forward: Column, inputs: Column, weights: Column) -> Column:
    """Return the seconds of a step for which the slowest rank waits.

    others: seconds of one micro-batch on all other ranks together. forward, inputs, weights: seconds of one micro-batch
    on an average rank, all its virtual stages together.
    """
    # A rank waits while the first micro-batch comes to it and the last one leaves the ranks behind it. naive waits so
    # for every micro-batch; v virtual stages cut the wait to one v-th (Narayanan et al. 2021, section 2.2).
    schedule = jobs.schedule
    bubble = choose(schedule == _NAIVE, jobs.micro_batches * others, others / jobs.virtual_stages)
    splits = _SPLITS[schedule.astype(np.intp)]
    if np.any(splits):
        bubble = choose(splits, _split_bubble_seconds(jobs, forward, inputs, weights), bubble)
    return choose(jobs.pp > 1, bubble, 0.0)


def _split_bubble_seconds(jobs: Jobs, forward: Column, inputs: Column, weights: Column) -> Column:
    """Return the bubble of the schedules that compute weight gradients separately.

    ZB-H1 (p - 1)(F + I - W), over v virtual stages, and ZB-H2 (p - 1)(F + I - 2 W): Qi et al. 2024, arXiv:2401.10241,
    table 2. The forms of the V-shaped schedules are ours; a test compares them with simulated orders.
    """
    schedule, both = jobs.schedule, forward + inputs
    few = choose(jobs.micro_batches < 2 * jobs.pp - 1, 2.0, 1.0)
    zbv = few * np.maximum(np.maximum(forward, inputs) / 2, inputs - weights)
    dualpipev = both / 2 + np.maximum(both / 2 - weights, 0) / 2
    zb_h1 = np.maximum(both - weights, 0) / jobs.virtual_stages
    zb_h2 = np.maximum(both - 2 * weights, 0)
    bubble = choose(schedule == _ZBV, zbv, zb_h1)
    bubble = choose(schedule == _DUALPIPEV, dualpipev, bubble)
    return (jobs.pp - 1) * choose(schedule == _ZB_2P, zb_h2, bubble)


def _message_seconds(jobs: Jobs, constants: Constants) -> Column:
    """Return the exposed seconds of messages between stages: one forward and one back per micro-batch and stage."""
    # A tp rank sends only its part if tp splits positions. Megatron and DeepSpeed always do.
    pieces = choose((jobs.sequence_parallel > 0) | (jobs.stack < FSDP), jobs.tp, 1.0)
    size = jobs.micro_batch * jobs.sequence / jobs.cp * jobs.hidden * jobs.activation_bytes / pieces
    stride = jobs.tp * jobs.cp * jobs.data_parallel
    once = send_seconds(jobs, constants, size, stride) * constants.pipeline_exposed
    return choose(jobs.pp > 1, 2 * jobs.micro_batches * jobs.virtual_stages * once, 0.0)


# Once a step: gradients, the update, a save.


def _data_seconds(jobs: Jobs, constants: Constants, layer: LayerTime, layers: Column, ends: Column) -> Column:
    """Return the exposed seconds of the data-parallel axes, and of a tied embedding's gradients.

    layers, ends: as _find_heaviest_rank returns them.
    """
    parameters = layers * jobs.all_layer_parameters / jobs.tp
    experts = _count_rank_experts(jobs, layers) if jobs.has_experts else None
    forward = layer.forward + layer.launch_forward + layer.tensor_forward
    backward = layer.backward + layer.launch_backward + layer.tensor_backward
    windows = OverlapWindows(layers * forward, layers * backward)
    seconds = data_seconds(jobs, constants, parameters, ends, windows, experts)
    if not np.any(jobs.tied) or not jobs.has_pipeline:
        return seconds
    # First and last stage exchange the gradients of a tied table (traffic.model_axes.list_tied_embedding_flows).
    table = jobs.vocab * jobs.hidden / jobs.tp
    tied = send_seconds(jobs, constants, table * jobs.gradient_bytes, jobs.tp * jobs.cp * jobs.data_parallel)
    return seconds + choose((jobs.pp > 1) & (jobs.tied > 0), tied, 0.0)


def _count_rank_experts(jobs: Jobs, layers: Column) -> Column:
    """Return the weights of all routed experts in `layers` layers on a rank of tp, before ep splits them."""
    return layers * jobs.sparse_share * jobs.experts * jobs.expert_parameters / jobs.tp


def _optimizer_seconds(jobs: Jobs, constants: Constants, layers: Column, ends: Column) -> tuple[Column, Column]:
    """Return (seconds of the update, seconds of adding up the gradients of micro-batches).

    layers, ends: as _find_heaviest_rank returns them.
    """
    parameters = layers * jobs.all_layer_parameters / jobs.tp + ends
    if jobs.has_adapters:
        frozen = jobs.adapter_weights > 0
        parameters = choose(frozen, layers * jobs.rank_adapter_weights, parameters)
    shards = choose(jobs.zero > 0, jobs.dp_shard * jobs.cp, 1.0)
    # The update reads and writes optimizer state and parameters, reads gradients, and clipping reads and writes them.
    moved = 2 * (jobs.optimizer_bytes + jobs.weight_bytes) + 3 * jobs.gradient_bytes
    update = parameters / shards * moved / jobs.memory_bandwidth * constants.optimizer
    copies = parameters / shards * (jobs.gradient_bytes + jobs.weight_bytes) / get_pcie_bandwidth(jobs)
    update = update + choose(jobs.offload > 0, _HOST_UPDATE * copies, 0.0)
    if jobs.has_experts:  # micro-batches are added up for the experts that a rank has
        parameters = parameters - _count_rank_experts(jobs, layers) * (1 - 1 / jobs.ep)
    added = (2 * jobs.gradient_bytes + jobs.activation_bytes) / (jobs.memory_bandwidth * constants.memory_efficiency)
    # Megatron-Core adds up in the product that computes a weight's gradient (gradient_accumulation_fusion), behind its
    # arithmetic: a multiply-add of each token for each weight.
    is_fused = (jobs.stack == MEGATRON) & (jobs.fused_elementwise > 0)
    if np.any(is_fused):
        tokens = jobs.micro_batch * jobs.sequence / jobs.cp
        product = 2 * tokens / (jobs.peak_flops * jobs.gemm_ceiling * constants.gemm_efficiency)
        added = choose(is_fused, np.maximum(added - product, 0), added)
    times = np.maximum(jobs.micro_batches - 1, 0) / choose(jobs.zero == 3, shards, 1.0)
    return update, times * parameters * added


def _checkpoint_seconds(jobs: Jobs) -> Column:
    """Return the seconds per step in which training waits while state is copied for a save."""
    state = jobs.parameters * (jobs.weight_bytes + jobs.optimizer_bytes)
    if jobs.has_adapters:
        adapters = jobs.layers * jobs.adapter_weights * (jobs.weight_bytes + jobs.optimizer_bytes)
        stored = choose(jobs.frozen_bytes > 0, jobs.frozen_bytes, jobs.weight_bytes)
        # A base in 4 bits is read from the model's files again and not saved.
        base = choose(jobs.four_bit_weights > 0, 0.0, jobs.parameters * stored)
        state = choose(jobs.adapter_weights > 0, base + adapters, state)
    return state / jobs.world / jobs.checkpoint_bandwidth / jobs.checkpoint_every


def _choose_spread(jobs: Jobs, constants: Constants) -> Column:
    """Return the standard deviation of log(measured / predicted), larger where fewer runs were measured."""
    pytorch = choose(jobs.tp > 1, constants.spread_pytorch, constants.spread_fsdp)
    narrow = choose(jobs.peak_flops > jobs.peak_flops_attention, constants.spread_narrow, constants.spread)
    others = choose(jobs.stack == DEEPSPEED, constants.spread_deepspeed, narrow)
    spread: Column = choose(jobs.stack >= FSDP, pytorch, others)
    is_new = is_blackwell(jobs.peak_flops_attention)
    spread = choose(is_new, np.maximum(constants.spread_blackwell, spread), spread)
    if np.any(jobs.float8):
        spread = choose(jobs.float8 > 0, np.maximum(constants.spread_float8, spread), spread)
    if jobs.has_experts:
        spread = choose(jobs.experts > 0, np.maximum(constants.spread_experts, spread), spread)
    return spread


def _count_flops(jobs: Jobs, work: LayerWork) -> Column:
    """Return the FLOPs of a step of the whole job, with recomputation."""
    micro_batches = jobs.global_batch / jobs.micro_batch
    return jobs.model_flops + micro_batches * jobs.layers * work.recomputed_flops


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
    peak = choose(jobs.float8 > 0, jobs.peak_flops_attention, jobs.peak_flops)
    mfu, hfu = flops * rate / peak, spent.hardware_flops * rate / peak
    return Estimate(estimate_memory(jobs, constants), spent, flops, mfu, hfu, jobs.tokens * rate)
