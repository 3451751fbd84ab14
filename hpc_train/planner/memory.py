"""Memory of a rank, part by part, for the first, a middle and the last stage of the pipeline."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from hpc_train.planner.activations import layer_activations, whole_layer
from hpc_train.planner.constants import Constants
from hpc_train.planner.jobs import STACKS, Column, Jobs, columns_of
from hpc_train.planner.peak import peak
from hpc_train.planner.stages import in_flight, layers_of

NO, MAYBE, YES = 0, 1, 2
"""Whether a job fits in memory: Memory.fits."""
FITS = ("no", "maybe", "yes")
_MEGATRON, _DEEPSPEED, _FSDP, _OURS = (STACKS.index(name) for name in ("megatron", "deepspeed", "fsdp", "hpc_train"))
_DEEPSPEED_BUFFERS = 3 * 5e8 * 2.0
"""Bytes of DeepSpeed's buckets as it comes: two to reduce and one to gather, of 5e8 16-bit elements."""
_DEEPSPEED_LIVE = 2e9 * 2.0
"""Bytes of what its zero 3 gathers at most as it comes: 1e9 16-bit parameters in use and as many ahead."""


@dataclass(frozen=True)
class Memory:
    """Bytes on one rank. Parts are [3, n]: of the first stage of the pipeline, a middle one, and the last; where a job
    has one stage the three are the same."""

    parameters: Column
    gradients: Column
    optimizer: Column
    activations: Column
    """What forward keeps for backward, of all micro-batches in flight, and what one layer needs while it computes."""
    logits: Column
    buffers: Column
    """Communication: gathered parameters, buckets."""
    fragmentation: Column
    """What the allocator holds beyond that."""
    context: Column
    """Of the driver, libraries and communicators: nvidia-smi shows it, torch does not."""
    capacity: Column
    """[n] bytes of the device."""
    host: Column
    """[n] bytes in host memory, by one rank."""
    margin: Column
    """[n]: by how much less than predicted it may be, a fraction."""
    headroom: Column
    """[n]: by how much more."""

    @property
    def stages(self) -> Column:
        """[3, n]: total of each stage."""
        parts = (self.parameters, self.gradients, self.optimizer, self.activations, self.logits, self.buffers)
        return sum(parts, self.fragmentation + self.context)

    @property
    def total(self) -> Column:
        """[n]: of the stage that needs most."""
        highest: Column = self.stages.max(axis=0)
        return highest

    @property
    def allocated(self) -> Column:
        """[3, n]: total of each stage without what only the allocator and the driver know of."""
        return self.stages - self.fragmentation - self.context

    @property
    def reserved(self) -> Column:
        """[3, n]: what the allocator has of each stage, as torch.cuda.max_memory_reserved says."""
        return self.stages - self.context

    @property
    def fits(self) -> Column:
        """[n]: NO, MAYBE or YES."""
        total = self.total
        sure, out = total * (1 + self.headroom) <= self.capacity, total * (1 - self.margin) > self.capacity
        return np.where(sure, float(YES), np.where(out, float(NO), float(MAYBE)))


def memory(jobs: Jobs, constants: Constants) -> Memory:
    """Bytes of each part on each kind of stage."""
    tokens = jobs.micro_batch * jobs.sequence / jobs.cp
    weights = _weights(jobs)
    shard = jobs.dp_shard * jobs.cp
    parameters, buffers = _parameters(jobs, weights, shard)
    gradients = weights * jobs.gradient_bytes / np.where(jobs.zero >= 2, shard, 1.0)
    deepspeed = jobs.stack == _DEEPSPEED
    # DeepSpeed has fp32 gradients of its share at the update, and beside fp32 ones that it adds up, 16-bit ones.
    shares = np.where(jobs.zero >= 1, shard, 1.0)
    gradients = gradients + weights * np.where(deepspeed, _twice(jobs) + 4 / shares * (jobs.zero >= 1), 0.0)
    buffers = buffers + np.where(deepspeed & (jobs.zero >= 1), _DEEPSPEED_BUFFERS, 0.0) + _accumulated(jobs, weights)
    optimizer = weights * jobs.optimizer_bytes / shares
    activations, waiting = _activations(jobs, constants, tokens)
    last = np.array([0.0, 0.0, 1.0]).reshape(3, *[1] * (weights.ndim - 1))
    logits = np.where(jobs.pp > 1, last, 1.0) * (tokens * jobs.vocab / jobs.tp * jobs.logit_bytes)
    host = _host(jobs, weights, optimizer, shard) + waiting
    optimizer = optimizer * (jobs.offload == 0)
    # Offloaded parameters take their reduced gradients to the host; zero1 accumulates whole ones on the device first.
    gradients = gradients * np.where((jobs.offload > 1) & (jobs.zero >= 2), 0.0, 1.0)
    if np.any(jobs.stack == _OURS):
        ours = peak(jobs, constants)
        own = (ours.parameters, ours.gradients, ours.optimizer, ours.activations, ours.logits, ours.buffers)
        theirs = (parameters, gradients, optimizer, activations, logits, buffers)
        chosen = (np.where(jobs.stack == _OURS, mine, other) for mine, other in zip(own, theirs, strict=True))
        parameters, gradients, optimizer, activations, logits, buffers = chosen
        host = np.where(jobs.stack == _OURS, host - waiting + ours.waiting, host)
    held = parameters + gradients + optimizer + activations + logits + buffers
    rows = np.broadcast_shapes(held.shape[1:], jobs.memory_bytes.shape)
    if not any(it.ndim for it in columns_of(jobs).values()):
        rows = ()

    def shaped(part: Column) -> Column:
        whole = np.broadcast_to(part, held.shape)
        return np.broadcast_to(whole if rows else whole[:, 0], (3, *rows))

    return Memory(
        parameters=shaped(parameters),
        gradients=shaped(gradients),
        optimizer=shaped(optimizer),
        activations=shaped(activations),
        logits=shaped(logits),
        buffers=shaped(buffers),
        fragmentation=shaped(constants.fragmentation * held),
        context=np.broadcast_to(np.float64(constants.context), (3, *rows)),
        capacity=np.broadcast_to(jobs.memory_bytes, rows),
        host=shaped(host).max(axis=0),
        margin=np.broadcast_to(np.float64(constants.memory_margin), rows),
        headroom=np.broadcast_to(_headroom(jobs, constants), rows),
    )


def _headroom(jobs: Jobs, constants: Constants) -> Column:
    ours = np.where(jobs.stack == _OURS, constants.headroom_unmeasured, constants.headroom)
    return np.where(jobs.stack == _DEEPSPEED, constants.headroom_deepspeed, ours)


def _twice(jobs: Jobs) -> Column:
    """DeepSpeed's bf16 optimizer keeps 16-bit gradients beside those it adds up in fp32."""
    return np.where(jobs.gradient_bytes > jobs.activation_bytes, jobs.activation_bytes, 0.0)


def _accumulated(jobs: Jobs, weights: Column) -> Column:
    """[3, n]: ddp's buckets hold a step's gradients from the start; those of all micro-batches but the last lie beside
    them, until the last backward copies them there (torch, reducer.cpp: mark_variable_ready_dense)."""
    ddp = (jobs.stack == _OURS) & (jobs.zero == 0) & (jobs.tp == 1) & (jobs.pp == 1) & (jobs.world > 1)
    return weights * np.where(ddp & (jobs.micro_batches > 1), jobs.gradient_bytes, 0.0)


def _weights(jobs: Jobs) -> Column:
    """[3, n]: parameters of a rank before any sharding over data-parallel axes."""
    layers = layers_of(jobs)
    table, layer = jobs.vocab * jobs.hidden / jobs.tp, jobs.layer_parameters / jobs.tp
    whole = layers.first * layer + (2 - jobs.tied) * table
    stages = (layers.first * layer + table, layers.middle * layer, layers.last * layer + table)
    return _stacked(*(np.where(jobs.pp == 1, whole, it) for it in stages))


def _stacked(*stages: Column) -> Column:
    """[3, n], n at least 1, so that it broadcasts against columns."""
    return np.stack(np.broadcast_arrays(*map(np.atleast_1d, stages)))


def _parameters(jobs: Jobs, weights: Column, shard: Column) -> tuple[Column, Column]:
    """Kept between steps, and gathered or cast while they are used."""
    kept_whole = np.where(jobs.stack >= _FSDP, jobs.zero < 1, jobs.zero < 3)
    kept = weights * jobs.weight_bytes / np.where(kept_whole, 1.0, shard)
    # Two layers of zero 3 are there at once, the next one being gathered, and one is in gradients; others of FSDP2
    # stay gathered in 16 bits for the whole step.
    table = jobs.vocab * jobs.hidden / jobs.tp
    some = (3 * jobs.layer_parameters / jobs.tp + table) * jobs.activation_bytes
    some = np.where(jobs.stack == _DEEPSPEED, np.minimum(some, _DEEPSPEED_LIVE), some)
    some = np.minimum(some, weights * jobs.activation_bytes)
    cast = weights * np.where(jobs.weight_bytes > jobs.activation_bytes, jobs.activation_bytes, 0.0)
    gathered = np.where(jobs.zero >= 3, np.where(jobs.reshard > 0, some, cast), cast)
    return kept * (jobs.offload < 2), np.where(jobs.stack >= _FSDP, gathered, np.where(jobs.zero >= 3, some, 0.0))


def _host(jobs: Jobs, weights: Column, optimizer: Column, shard: Column) -> Column:
    """Return [3, n]: a rank's share of the offloaded state.

    That is the optimizer's, with the copy of the parameters that it updates there (parallel.zero.offload_optimizer), or
    with the parameters themselves and their gradients.
    """
    shares = np.where(jobs.zero >= 1, shard, 1.0)
    beside = np.where(jobs.offload > 1, jobs.weight_bytes + jobs.gradient_bytes, jobs.weight_bytes)
    return (optimizer + weights * beside / shares) * (jobs.offload > 0)


def _activations(jobs: Jobs, constants: Constants, tokens: Column) -> tuple[Column, Column]:
    """[3, n] on the device: of all layers of a rank and all micro-batches in flight, and of one layer that is being
    computed; [3, n] on the host, where they are offloaded.

    Then the device has one layer's at a time (Rhu et al. 2016, arXiv:1602.08124, section 3.1), and of every micro-batch
    in flight what a stage was given and what it gave on, which the pipeline itself keeps.
    """
    kept, alive = layer_activations(jobs, constants, tokens)
    layers = layers_of(jobs)
    counts = in_flight(jobs)
    # DeepSpeed's pipeline keeps each stage's outputs, and room for their gradients, for every micro-batch in flight.
    moved, piped = jobs.offload_activations > 0, jobs.pp > 1
    ends = tokens * jobs.hidden * jobs.activation_bytes * np.where(piped & (moved | (jobs.stack == _DEEPSPEED)), 2.0, 0)
    alive = alive + np.where(moved, whole_layer(jobs, constants, tokens) * (jobs.recompute == 0), 0.0)
    split = list(zip((layers.first, layers.middle, layers.last), counts, strict=True))
    whole = _stacked(*(kept * each * count for each, count in split))
    rest = _stacked(*(ends * count + alive for _, count in split))
    return np.where(moved, rest, whole + rest), np.where(moved, whole, 0.0)
