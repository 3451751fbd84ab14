"""Count what a pipeline rank holds, in stages and micro-batches, at the moments of a step that may be its peak.

Only a rank's own order decides that. If all backwards are whole there are closed forms; if a schedule splits them, the
rank's order is simulated once, for as many micro-batches as change anything, and cached.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, fields
from functools import cache

import numpy as np
from numpy.typing import NDArray

from hpc_train.planner.jobs import SCHEDULES, Column, Jobs
from hpc_train.planner.stages import in_flight
from hpc_train.schedules.actions import Action, Kind, Order, parts
from hpc_train.schedules.generate import orders
from hpc_train.schedules.requirements import REQUIREMENTS

V_SHAPED = tuple(SCHEDULES.index(name) for name, needs in REQUIREMENTS.items() if needs.v_shaped)
"""Codes of the schedules with the last stage on the first rank."""
SPLIT = tuple(SCHEDULES.index(name) for name, needs in REQUIREMENTS.items() if needs.splits_backward)
"""Codes of the schedules that split backwards."""
_WHOLE_ROUNDS = tuple(SCHEDULES.index(name) for name in ("gpipe", "looped_bfs"))
_ENOUGH = 4
"""Micro-batches simulated per pipeline rank; more would not change the peak."""


@dataclass(frozen=True)
class Moment:
    """Start of a computation, on the first rank, one in the middle and the last: [3, n], or [3, 1...]."""

    stages: Column
    """Number of activations held, of one stage and micro-batch each, for all stages but the last."""
    last: Column
    """Number of activations held for the last stage."""
    losses: Column
    """Micro-batches whose loss has been computed but not yet used in a backward."""
    kept: Column
    """Members of `stages` whose input gradients are computed; the inputs of their weight gradients are still held."""
    kept_last: Column
    """Members of `last` whose input gradients are computed."""
    accumulated: Column
    """Share of the rank's stages that have gradients from an earlier micro-batch."""
    loss: Column
    """1 if the backward of a loss begins, else 0."""


def moments(jobs: Jobs) -> list[Moment]:
    """Return enough moments to include the peak."""
    plain = _whole(jobs)
    split = (jobs.pp > 1) & np.isin(jobs.schedule, SPLIT)
    if not np.any(split):
        return plain
    walked = _walked(jobs, split)
    most = max(len(plain), len(walked))
    padded = [(plain[min(at, len(plain) - 1)], walked[min(at, len(walked) - 1)]) for at in range(most)]
    names = [it.name for it in fields(Moment)]
    return [Moment(*(np.where(split, getattr(b, it), getattr(a, it)) for it in names)) for a, b in padded]


def _whole(jobs: Jobs) -> list[Moment]:
    """Handle schedules with whole backwards: the first backward while most is in flight, and the next one."""
    v, m = jobs.virtual_stages, jobs.micro_batches
    counts = np.stack(np.broadcast_arrays(*map(np.atleast_1d, in_flight(jobs)))) * v
    shape = (3, *[1] * (counts.ndim - 1))
    has_loss = np.where(jobs.pp > 1, np.array([0.0, 0.0, 1.0]).reshape(shape), 1.0)
    together = has_loss * np.where((jobs.pp > 1) & np.isin(jobs.schedule, _WHOLE_ROUNDS), m, 1.0)
    rank = np.array([0.0, 1.0, 2.0]).reshape(shape)
    # If more micro-batches follow, every stage of the rank has had a backward before the most are in flight.
    before = np.where(m * v > counts, 1.0, 0.0) * (rank >= 0)
    nothing = np.zeros(shape)
    first = Moment(counts - together, together, together, nothing, nothing, before, has_loss)
    fewer = np.minimum(counts, 1)
    later_last = np.maximum(together - has_loss, np.where(counts > 1, 0.0, has_loss) * (m > 1))
    second = Moment(
        np.maximum(counts - together - fewer * (1 - has_loss), 0), later_last, later_last, nothing, nothing,
        (m > 1) * np.ones(shape), has_loss,
    )  # fmt: skip
    return [first, second]


def _walked(jobs: Jobs, split: NDArray[np.bool_]) -> list[Moment]:
    """Handle schedules that split backwards, for the jobs where `split` is true."""
    columns = np.broadcast_arrays(jobs.schedule, jobs.pp, jobs.virtual_stages, jobs.micro_batches, split)
    keys, index = np.unique(np.stack([it.ravel() for it in columns]).astype(np.int64), axis=1, return_inverse=True)
    found = [_moments_of(*map(int, key)) for key in keys.T]
    most = max(len(one) for one in found)
    table = np.array([[one[min(at, len(one) - 1)] for at in range(most)] for one in found])
    rows = table[index.ravel()]  # [jobs, moments, 3, fields]
    shaped = np.moveaxis(rows, 0, -1).reshape(most, 3, rows.shape[-1], *np.atleast_1d(columns[0]).shape)
    return [Moment(*(shaped[at, :, field] for field in range(rows.shape[-1]))) for at in range(most)]


_Counts = tuple[float, ...]
"""Fields of Moment, on one rank."""


@cache
def _moments_of(
    schedule: int, pp: int, virtual: int, micro_batches: int, split: int
) -> tuple[tuple[_Counts, ...], ...]:
    """Return the moments of the first rank, the next one and the last; each rank's worst moments separately."""
    if not split:
        return (((0.0,) * 7,) * 3,)
    if micro_batches > _ENOUGH * pp and micro_batches % pp == 0:
        micro_batches = _ENOUGH * pp
    order = orders(SCHEDULES[schedule], pp, micro_batches, virtual)
    ranks = [_worst(set(_walk(order, rank))) for rank in (0, min(1, pp - 1), pp - 1)]
    most = max(map(len, ranks))
    return tuple(tuple(found[min(at, len(found) - 1)] for found in ranks) for at in range(most))


def _walk(order: Order, rank: int) -> Iterator[_Counts]:
    """Yield the counts at the start of every backward of a rank."""
    end, virtual = order.stages - 1, order.placement.count(rank)
    live, kept, losses = [0, 0], [0, 0], 0
    accumulated: set[int] = set()
    for action in _actions(order, rank):
        last = action.stage == end
        if action.kind is Kind.F:
            live[last] += 1
            losses += last
            continue
        if action.kind is Kind.I and action.stage == 0:
            continue  # nothing to compute
        begins = last and action.kind is not Kind.W
        yield (live[0], live[1], losses, *kept, len(accumulated) / virtual, float(begins))
        losses -= begins
        if action.kind is Kind.I:
            kept[last] += 1
            yield (live[0], live[1], losses, *kept, len(accumulated) / virtual, 0.0)
            continue
        kept[last] -= action.kind is Kind.W and action.stage > 0
        live[last] -= 1
        accumulated.add(action.stage)


def _actions(order: Order, rank: int) -> Iterator[Action]:
    for step in order.rows[rank]:
        yield from parts(step)


def _worst(found: set[_Counts]) -> list[_Counts]:
    """Keep the moments with the most of something: stages keep about the same, and the last one differs most."""
    chosen = set()
    for with_loss in (False, True):
        among = [one for one in found if bool(one[-1]) == with_loss]
        for most in (_held, _of_last, _of_gradients) if among else ():
            chosen.add(max(among, key=most))
    return sorted(one for one in chosen if not any(_less(one, other) for other in chosen))


def _less(one: _Counts, other: _Counts) -> bool:
    return one != other and all(a <= b for a, b in zip(one, other, strict=True))


def _held(one: _Counts) -> tuple[float, ...]:
    return one[0] + one[1], one[3] + one[4], one[2], one[5]


def _of_last(one: _Counts) -> tuple[float, ...]:
    return one[4], one[2], one[1], one[0] + one[3], one[5]


def _of_gradients(one: _Counts) -> tuple[float, ...]:
    return one[0] + one[1] + one[3] + one[4], one[3] + one[4], one[5]
