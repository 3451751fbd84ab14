"""Cost of interruptions: the share of a job's time that goes into steps that are kept.

A job makes steps for `interval` seconds, stops `stall` seconds to save, and so on. A save is whole `write` seconds
after it began, which may be later than the stall (asynchronous saves). Interruptions of several kinds come as Poisson
processes; each sets the job back to the newest whole save, or, where it was announced, to nowhere, keeps it down for a
while, and is followed by a restart, which may be interrupted too.

With L the rate of all kinds together and p of each its share, a cycle from one end of a restart to the next takes

    exp(L restart) (1/L + mean down)

and keeps, of work, where the interruption loses what is not saved (k saves are whole after k (T + stall) + tail
seconds, with tail = write - stall), and where it loses nothing:

    T exp(-L tail) / (exp(L (T + stall)) - 1)        (1 - exp(-L T)) / (L (1 - exp(-L (T + stall))))

Their mean over the kinds, divided by the length of the cycle, is exact in the long run (renewal-reward theorem). With
one kind, no tail and no down time it is Daly's complete model (Daly 2006, doi:10.1016/j.future.2004.11.016).

Everything broadcasts: an argument may be an array of jobs.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from hpc_train.config.run import RunConfig

Number: TypeAlias = float | NDArray[np.float64]
"""One, or an array of them."""

_GOLDEN = (5**0.5 - 1) / 2
_HALVINGS = 60
"""Steps of the search for the best interval: 0.618^60 of a bracket of a few powers of ten."""


@dataclass(frozen=True)
class Interruption:
    """A kind of event that ends an attempt of the whole job."""

    per_second: Number
    """Rate for the whole job, > 0."""
    down_seconds: Number
    """From the event until the restart begins: noticing it, the last save, waiting for a node."""
    saved: bool = False
    """Announced: a checkpoint is made first, and no step is lost."""


@dataclass(frozen=True)
class Save:
    """Cost of one checkpoint."""

    stall_seconds: Number
    """The job makes no steps."""
    write_seconds: Number
    """Until it can be resumed from, from the beginning; at least the stall."""


@dataclass(frozen=True)
class Waste:
    """Shares of the time of a job; they and the effective one add up to 1."""

    effective: Number
    """Steps that are kept: the effective training time ratio."""
    saving: Number
    """Stalls of saves between steps that are kept."""
    lost: Number
    """Steps that are made again, with the stalls between them."""
    down: Number
    """Noticing, waiting and restarting."""


def effective_share(interval: Number, save: Save, restart: Number, kinds: Sequence[Interruption]) -> Number:
    """Share of the time that goes into steps that are kept (see the head of this file).

    interval: seconds of steps between two saves. restart: seconds from nodes to the first step. 1 / (1 + stall /
    interval) where no kind is given.
    """
    if not kinds:
        return interval / (interval + save.stall_seconds)
    losing, keeping = _kept_share(interval, save, _total(kinds))
    announced = _announced(kinds)
    return (losing * (1 - announced) + keeping * announced) * _up_share(restart, kinds)


def break_down_waste(interval: Number, save: Save, restart: Number, kinds: Sequence[Interruption]) -> Waste:
    """Return the effective share, and where the rest of the time goes."""
    kept = effective_share(interval, save, restart, kinds)
    if not kinds:
        return Waste(kept, 1 - kept, 0.0 * kept, 0.0 * kept)
    up, announced = _up_share(restart, kinds), _announced(kinds)
    losing, keeping = _kept_share(interval, save, _total(kinds))
    saving = (losing * save.stall_seconds / interval * (1 - announced) + (1 - keeping) * announced) * up
    return Waste(kept, saving, up - kept - saving, 1 - up)


def _total(kinds: Sequence[Interruption]) -> Number:
    """Interruptions a second."""
    return sum((kind.per_second for kind in kinds[1:]), kinds[0].per_second)


def _announced(kinds: Sequence[Interruption]) -> Number:
    """Share of the interruptions before which a checkpoint is made."""
    return sum((kind.per_second for kind in kinds if kind.saved), 0.0) / _total(kinds)


def _up_share(restart: Number, kinds: Sequence[Interruption]) -> Number:
    """Share of the time between restarts and interruptions."""
    rate = _total(kinds)
    down = sum((kind.per_second * kind.down_seconds for kind in kinds), 0.0) / rate
    return np.exp(-rate * restart) / (1 + rate * down)


def _kept_share(interval: Number, save: Save, rate: Number) -> tuple[Number, Number]:
    """Of the time until an interruption, steps that are kept: where it loses what is not saved, and where nothing."""
    step, tail = interval + save.stall_seconds, save.write_seconds - save.stall_seconds
    losing = rate * interval * np.exp(-rate * (tail + step)) / -np.expm1(-rate * step)
    keeping = np.expm1(-rate * interval) / np.expm1(-rate * step)
    return losing, keeping


def best_interval(save: Save, restart: Number, kinds: Sequence[Interruption]) -> Number:
    """Seconds of steps between two saves that waste least; infinite where nothing is ever lost.

    Not less than it takes to write one beside training, as the next begins when the last one is whole. By golden
    section over the logarithm: the effective share has one peak.
    """
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
    """Young's interval sqrt(2 stall M), M the mean time to interruption (Young 1974, doi:10.1145/361147.361115)."""
    return np.sqrt(2 * np.maximum(save.stall_seconds, 1e-9) * mean_seconds)


def spare_wait_seconds(per_second: Number, repair: Number, spares: int) -> Number:
    """Mean seconds that a failure makes the job wait for a node, with so many spare ones.

    Each failure sends a node away for `repair` seconds. The job fails while 0 to `spares` nodes are away, and stands
    still while one more is: an Erlang loss system with spares + 1 places, in which the share of the time that all are
    taken, B, does not depend on the distribution of repair times. A failure waits B / (rate (1 - B)) on average.
    (Gross et al. 2008, Fundamentals of Queueing Theory, Erlang's loss formula.)
    """
    offered = per_second * repair
    blocked: Number = np.ones_like(offered * 1.0)
    for places in range(1, spares + 2):
        blocked = offered * blocked / (places + offered * blocked)
    return blocked / (per_second * (1 - blocked))


_LEAST_STALL = 1.0
"""Seconds. MegaScale tells of several for copying to the host (Jiang et al. 2024, arXiv:2402.15627, section 4.4)."""
_WRITE = "plan.checkpoint_seconds and cluster.filesystem.write_gb_s"


def checkpoint_bytes(config: RunConfig, parameters: float) -> float:
    """Of a whole job: parameters and both of AdamW's moments in fp32, in fp64 for precision=fp64. Copies on several
    ranks are written once."""
    return 3 * parameters * (8 if config.precision.name == "fp64" else 4)


@dataclass(frozen=True)
class SaveCost:
    """Cost of a save, and what is not known of it."""

    save: Save
    """What is not known counts as no time."""
    known: bool
    """How long it takes until a job can be resumed from it."""
    unknown: tuple[str, ...]
    """One line each."""


def estimate_saving(config: RunConfig, parameters: float, ranks: int) -> SaveCost:
    """Stall and duration of a save, as plan.checkpoint_stall_seconds and plan.checkpoint_seconds say.

    Where they do not: in the background the job stops while state is copied to the host, and the file system takes the
    rest of the time; else it stops for all of it. Every rank has an equal part, and the figures of cluster.filesystem
    and cluster.node are taken as reached, except that ranks on several nodes stop for a second at least.
    """
    plan, system = config.plan, config.cluster.filesystem
    size = checkpoint_bytes(config, parameters)
    write = size / (system.write_gb_s * 1e9) if system.write_gb_s else None
    stall, told = _stall(config, size, ranks, write)
    whole = plan.checkpoint_seconds if plan.checkpoint_seconds is not None else write and stall + write
    if not config.checkpoint.background and plan.checkpoint_seconds is None:
        whole = whole and stall
    if whole is None:
        told = (*told, f"{_WRITE}: writing counts as no time")
    return SaveCost(Save(stall, max(stall, whole or 0.0)), whole is not None, told)


def _stall(config: RunConfig, size: float, ranks: int, write: float | None) -> tuple[float, tuple[str, ...]]:
    """Seconds, and what is not known of them."""
    plan, node = config.plan, config.cluster.node
    if plan.checkpoint_stall_seconds is not None:
        return plan.checkpoint_stall_seconds, ()
    if not config.checkpoint.background:
        return plan.checkpoint_seconds or write or 0.0, ()
    least = _LEAST_STALL if node.gpus and ranks > config.cluster.ranks_per_node else 0.0
    if not node.gpus:
        return least, ()
    if not node.pcie_gb_s:
        return least, ("cluster.node.pcie_gb_s: copying a checkpoint to the host counts as no time",)
    return max(least, size / ranks / (node.pcie_gb_s * 1e9)), ()


def stored_bytes(config: RunConfig, parameters: float) -> float:
    """Return the bytes on storage all the time: the checkpoints kept, and one that is being written."""
    kept = config.checkpoint.keep + config.checkpoint.keep_best + 1
    return kept * checkpoint_bytes(config, parameters) if config.checkpoint.every else 0.0
