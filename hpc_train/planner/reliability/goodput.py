"""Goodput: the share of a job's time spent on steps that are not lost to interruptions.

The model: a job computes for `interval` seconds, stops for `stall` seconds to save, and repeats. A save is complete
`write` seconds after it began, which may be after the stall (asynchronous saves). Interruptions of several kinds arrive
as Poisson processes. An interruption sets the job back to its newest complete save, unless it was announced and the job
saved first. Then the job is down for a while and restarts; a restart may be interrupted too.

Let L be the rate of all kinds together and T the interval. A cycle, from the end of one restart to the end of the next,
takes on average

    exp(L restart) (1/L + mean down)

The useful work in a cycle is, for an interruption that loses unsaved steps (left; k saves are complete after
k (T + stall) + tail seconds, tail = write - stall) and for an announced one (right):

    T exp(-L tail) / (exp(L (T + stall)) - 1)        (1 - exp(-L T)) / (L (1 - exp(-L (T + stall))))

Their mean over the kinds, divided by the length of the cycle, is the exact long-run goodput (renewal-reward theorem).
With one kind, no tail and no down time it is Daly's complete model (Daly 2006, doi:10.1016/j.future.2004.11.016).

All functions broadcast: an argument may be an array over jobs.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from hpc_train.config.model import TransformerConfig, VisionTransformerConfig
from hpc_train.config.run import RunConfig
from hpc_train.models.linear_shapes import count_adapter_weights, list_adapted_layers
from hpc_train.traffic.stages import ELEMENT_BYTES

Number: TypeAlias = float | NDArray[np.float64]
"""One number, or an array of them."""

_GOLDEN = (5**0.5 - 1) / 2
"""Share of its bracket that golden-section search keeps in each iteration."""
_HALVINGS = 60
"""Iterations of the golden-section search: they narrow a bracket of a few powers of ten by 0.618^60."""


@dataclass(frozen=True)
class Interruption:
    """One kind of event that interrupts the whole job."""

    per_second: Number
    """Interruptions of the whole job per second, > 0."""
    down_seconds: Number
    """Time from the event to the start of the restart: detection, a last save, waiting for a node."""
    saved: bool = False
    """Whether it is announced in advance, so that the job saves first and loses no step."""


@dataclass(frozen=True)
class Save:
    """Cost of one checkpoint."""

    stall_seconds: Number
    """Seconds for which training stops."""
    write_seconds: Number
    """Time from the start of the save until a job can resume from it; at least the stall."""


@dataclass(frozen=True)
class Waste:
    """Shares of a job's time; they add up to 1."""

    effective: Number
    """Steps that are not lost: the effective training time ratio."""
    saving: Number
    """Waiting for saves, between steps that are not lost."""
    lost: Number
    """Steps that are repeated after an interruption, with the stalls between them."""
    down: Number
    """Detection, waiting and restarting."""


def effective_share(interval: Number, save: Save, restart: Number, kinds: Sequence[Interruption]) -> Number:
    """Return the share of the time spent on steps that are not lost (formulas: head of this file).

    interval: seconds of steps between two saves. restart: seconds from having nodes to the first step. Without any
    kind of interruption the result is 1 / (1 + stall / interval).
    """
    if not kinds:
        return interval / (interval + save.stall_seconds)
    unannounced, saved_first = _useful_shares(interval, save, _total_rate(kinds))
    announced = _announced_share(kinds)
    return (unannounced * (1 - announced) + saved_first * announced) * _up_share(restart, kinds)


def break_down_waste(interval: Number, save: Save, restart: Number, kinds: Sequence[Interruption]) -> Waste:
    """Return the effective share and what the rest of the time is spent on."""
    effective = effective_share(interval, save, restart, kinds)
    if not kinds:
        return Waste(effective, 1 - effective, 0.0 * effective, 0.0 * effective)
    up, announced = _up_share(restart, kinds), _announced_share(kinds)
    unannounced, saved_first = _useful_shares(interval, save, _total_rate(kinds))
    saving = (unannounced * save.stall_seconds / interval * (1 - announced) + (1 - saved_first) * announced) * up
    return Waste(effective, saving, up - effective - saving, 1 - up)


def _total_rate(kinds: Sequence[Interruption]) -> Number:
    """Return the interruptions per second of all kinds together."""
    return sum((kind.per_second for kind in kinds[1:]), kinds[0].per_second)


def _announced_share(kinds: Sequence[Interruption]) -> Number:
    """Return the share of the interruptions before which the job saves."""
    return sum((kind.per_second for kind in kinds if kind.saved), 0.0) / _total_rate(kinds)


def _up_share(restart: Number, kinds: Sequence[Interruption]) -> Number:
    """Return the share of the time that the job is up: neither down nor restarting."""
    rate = _total_rate(kinds)
    down = sum((kind.per_second * kind.down_seconds for kind in kinds), 0.0) / rate
    return np.exp(-rate * restart) / (1 + rate * down)


def _useful_shares(interval: Number, save: Save, rate: Number) -> tuple[Number, Number]:
    """Return the useful share of the time up to an interruption: (of an unannounced one, of an announced one)."""
    # The formulas at the head of the file, times the rate; expm1 keeps them exact for small rates.
    step, tail = interval + save.stall_seconds, save.write_seconds - save.stall_seconds
    unannounced = rate * interval * np.exp(-rate * (tail + step)) / -np.expm1(-rate * step)
    saved_first = np.expm1(-rate * interval) / np.expm1(-rate * step)
    return unannounced, saved_first


def best_interval(save: Save, restart: Number, kinds: Sequence[Interruption]) -> Number:
    """Return the seconds of steps between two saves that waste the least time; infinite if no step is ever lost.

    At least the time that a save is written beside training, because the next save starts after it. Found by golden
    section over the logarithm: the effective share has a single peak.
    """
    # Only interruptions that lose steps make it worth saving more often. Young's interval is close to the optimum, so
    # the search covers three powers of ten on each side of it.
    lossy = [kind.per_second for kind in kinds if not kind.saved]
    if not lossy:
        return np.inf * np.ones_like(save.write_seconds * 1.0)
    first = young_interval(save, 1 / sum(lossy[1:], lossy[0]))
    least = np.maximum(save.write_seconds - save.stall_seconds, 1e-6)
    low, high = np.log(np.maximum(least, 1e-3 * first)), np.log(np.maximum(least, 1e3 * first) * (1 + 1e-9))

    def value(point: Number) -> Number:
        return effective_share(np.exp(point), save, restart, kinds)

    for _ in range(_HALVINGS):
        left, right = high - _GOLDEN * (high - low), low + _GOLDEN * (high - low)
        up = value(left) < value(right)
        low, high = np.where(up, left, low), np.where(up, high, right)
    return np.exp((low + high) / 2)


def young_interval(save: Save, mean_seconds: Number) -> Number:
    """Return Young's interval sqrt(2 stall M), M the time to interruption (Young 1974, doi:10.1145/361147.361115)."""
    return np.sqrt(2 * np.maximum(save.stall_seconds, 1e-9) * mean_seconds)


def spare_wait_seconds(per_second: Number, repair: Number, spares: int) -> Number:
    """Return the mean seconds that the job waits for a node after a failure, with `spares` spare nodes.

    Each failure takes a node out for `repair` seconds. The job runs while at most `spares` nodes are out, and waits
    while one more is. That is an Erlang loss system with spares + 1 places: the share B of the time that all places are
    taken does not depend on the distribution of repair times, and the mean wait is B / (rate (1 - B)) (Gross et al.
    2008, Fundamentals of Queueing Theory, Erlang's loss formula).
    """
    # Erlang's recursion over the number of places, which needs no factorials.
    offered = per_second * repair
    blocked: Number = np.ones_like(offered * 1.0)
    for places in range(1, spares + 2):
        blocked = offered * blocked / (places + offered * blocked)
    return blocked / (per_second * (1 - blocked))


_LEAST_STALL = 1.0
"""Minimum stall of a save on several nodes, seconds: MegaScale reports several for the copy to the host (Jiang et al.
2024, arXiv:2402.15627, section 4.4)."""
_WRITE_KEYS = "plan.checkpoint_seconds and cluster.filesystem.write_gb_s"


def checkpoint_bytes(config: RunConfig, parameters: float) -> float:
    """Return the size of a checkpoint: parameters and AdamW's two moments, in fp32, or fp64 with precision=fp64.

    Beside adapters frozen parameters have no moments. They are not part of a save if checkpoint.incremental writes them
    once, or if a base in 4 bits is read from the model's files again.
    """
    number_bytes, adapter = 8 if config.precision.name == "fp64" else 4, config.adapter
    if adapter.kind == "none" or not isinstance(config.model, (TransformerConfig, VisionTransformerConfig)):
        return 3 * parameters * number_bytes
    layers = list_adapted_layers(config.model, adapter.targets).values()
    trained = count_adapter_weights(layers, adapter.rank, dora=adapter.kind == "dora")
    frozen_bytes = {"full": number_bytes, "bf16": ELEMENT_BYTES["bf16"], "nf4": 0}[adapter.base]
    return 3 * trained * number_bytes + parameters * (0 if config.checkpoint.incremental else frozen_bytes)


@dataclass(frozen=True)
class SaveCost:
    """Cost of a save, and which of its inputs are unknown."""

    save: Save
    """Unknown parts count as zero seconds."""
    write_known: bool
    """Whether the write time is known."""
    unknown: tuple[str, ...]
    """Unknown inputs, one line each."""


def estimate_saving(config: RunConfig, parameters: float, ranks: int) -> SaveCost:
    """Return stall and duration of a save: plan.checkpoint_stall_seconds and plan.checkpoint_seconds, or estimates.

    The estimate: a background save stalls the job while state is copied to the host, then the file system writes; any
    other save stalls the job until it is written. Ranks hold equal parts, and reach the bandwidths of
    cluster.filesystem and cluster.node; but ranks on several nodes stall for at least a second.
    """
    plan, system = config.plan, config.cluster.filesystem
    size = checkpoint_bytes(config, parameters)
    write = size / (system.write_gb_s * 1e9) if system.write_gb_s else None
    stall, unknown = _estimate_stall(config, size, ranks, write)
    duration = plan.checkpoint_seconds if plan.checkpoint_seconds is not None else write and stall + write
    if not config.checkpoint.background and plan.checkpoint_seconds is None:
        duration = duration and stall
    if duration is None:
        unknown = (*unknown, f"{_WRITE_KEYS}: unknown, writing a checkpoint counts as 0 s")
    return SaveCost(Save(stall, max(stall, duration or 0.0)), duration is not None, unknown)


def _estimate_stall(config: RunConfig, size: float, ranks: int, write: float | None) -> tuple[float, tuple[str, ...]]:
    """Return (seconds, unknown inputs)."""
    plan, node = config.plan, config.cluster.node
    if plan.checkpoint_stall_seconds is not None:
        return plan.checkpoint_stall_seconds, ()
    if not config.checkpoint.background:
        return plan.checkpoint_seconds or write or 0.0, ()
    least = _LEAST_STALL if node.gpus and ranks > config.cluster.ranks_per_node else 0.0
    if not node.gpus:
        return least, ()
    if not node.pcie_gb_s:
        return least, ("cluster.node.pcie_gb_s: unknown, copying a checkpoint to the host counts as 0 s",)
    return max(least, size / ranks / (node.pcie_gb_s * 1e9)), ()


def stored_bytes(config: RunConfig, parameters: float) -> float:
    """Return the bytes on storage at any time: the checkpoints that are kept, and one being written."""
    steps = config.checkpoint.keep + config.checkpoint.keep_best + 1
    return steps * checkpoint_bytes(config, parameters) if config.checkpoint.every else 0.0
