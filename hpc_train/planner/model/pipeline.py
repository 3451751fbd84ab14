"""Layers, micro-batches in flight and waiting time of each rank of a pipeline.

split_layers and micro_batches_in_flight are closed forms for all schedules; peak_moments walks the real order of the
schedules that split their backward; bubble_seconds is the waiting of the slowest rank.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, fields, replace
from functools import cache

import numpy as np
from numpy.typing import NDArray

from hpc_train.planner.model.jobs import SCHEDULES, STACKS, Column, Jobs
from hpc_train.schedules.generate import REQUIREMENTS, generate_order
from hpc_train.schedules.order import Action, Kind, Order, entry_actions

_SCHEDULE_CODE = {name: code for code, name in enumerate(SCHEDULES)}
HPC_TRAIN_STACK = STACKS.index("hpc_train")


@dataclass(frozen=True)
class LayerSplit:
    """Layers of one rank, all its virtual stages together; without a pipeline, all layers."""

    first: Column
    middle: Column
    last: Column


def split_layers(jobs: Jobs) -> LayerSplit:
    """The split.

    Published stacks give each stage as many layers; where these do not divide, embedding and head count as a layer each
    if then they do, and else the last stage gets what is left. hpc_train balances by FLOPs (parallel.pipeline.stages),
    for which two candidates of the last stage are enough; of the others the earlier ones have fewer.
    """
    stages = jobs.pp * jobs.virtual_stages
    even = jobs.layers / stages
    with_ends = ((jobs.layers + 2) % stages == 0) & (jobs.layers % stages != 0)
    middle = np.where(with_ends, (jobs.layers + 2) / stages, np.ceil(even))
    last = np.where(with_ends, middle - 1, np.maximum(jobs.layers - (stages - 1) * middle, 0))
    ours_middle, ours_last = _balanced(jobs, stages)
    ours = jobs.stack == HPC_TRAIN_STACK
    middle, last = np.where(ours, ours_middle, middle), np.where(ours, ours_last, last)
    rank, last_rank = middle * jobs.virtual_stages, middle * (jobs.virtual_stages - 1) + last
    fewest = np.floor((jobs.layers - last) / np.maximum(stages - 1, 1)) * jobs.virtual_stages
    left = jobs.layers - (jobs.pp - 2) * rank - last_rank
    first = np.clip(np.where(ours, np.maximum(left, fewest), left), 0, rank)
    unsplit = jobs.pp == 1
    return LayerSplit(*(np.where(unsplit, jobs.layers, count) for count in (first, rank, last_rank)))


def _balanced(jobs: Jobs, stages: Column) -> tuple[Column, Column]:
    """(layers of a stage, layers of the last stage) whose costliest stage has fewest FLOPs."""
    layers, others = jobs.layers, np.maximum(stages - 1, 1)
    head = jobs.vocab * jobs.hidden / (jobs.layer_parameters + jobs.heads * jobs.head_dim * jobs.sequence)
    fewer = np.clip(np.floor((layers - head * others) / stages), 1, np.maximum(layers - others, 1))
    more = np.minimum(fewer + 1, np.maximum(layers - others, 1))
    options = [(np.ceil((layers - last) / others), last) for last in (fewer, more)]
    (middle, last), (other_middle, other_last) = options
    better = np.maximum(other_middle, other_last + head) <= np.maximum(middle, last + head)
    return np.where(better, other_middle, middle), np.where(better, other_last, last)


def rank_layers(jobs: Jobs, v_shaped: NDArray[np.bool_]) -> Column:
    """Return the layers of an hpc_train pipeline's ranks: [4, n].

    They are those of the first rank, of the fullest one in the middle, of the last rank, and of the last stage.
    v_shaped: the jobs in which rank r has the stages r and 2 pp - 1 - r.
    """
    head = jobs.vocab * jobs.hidden / (jobs.layer_parameters + jobs.heads * jobs.head_dim * jobs.sequence)
    columns = np.broadcast_arrays(jobs.layers, jobs.pp, jobs.virtual_stages, head, v_shaped)
    keys, index = np.unique(np.stack([column.ravel() for column in columns]), axis=1, return_inverse=True)
    table = np.array([_rank_layers(int(n), int(pp), int(v), h, bool(bent)) for n, pp, v, h, bent in keys.T.tolist()])
    found: Column = np.moveaxis(table[index.ravel()], -1, 0).reshape(4, *columns[0].shape)
    return found


@cache
def _rank_layers(layers: int, pp: int, virtual: int, head: float, v_shaped: bool) -> tuple[float, ...]:
    stages = pp * virtual
    layers_of_stage = _stage_layers(layers, stages, head)
    ranks = [stage % pp if not v_shaped or stage < pp else stages - 1 - stage for stage in range(stages)]
    sums = [sum(n for n, rank in zip(layers_of_stage, ranks, strict=True) if rank == mine) for mine in range(pp)]
    return sums[0], max(sums[1:-1], default=sums[-1]), sums[-1], layers_of_stage[-1]


def _stage_layers(layers: int, stages: int, head: float) -> tuple[float, ...]:
    """Layers of each stage, as parallel.pipeline.stages splits equal blocks and a head that costs `head` blocks."""
    if stages == 1 or stages > layers:
        return (layers / stages,) * stages

    def rated(last: int) -> tuple[float, float, tuple[int, ...]]:
        fewer, more = divmod(layers - last, stages - 1)
        layers_of_stage = (*(fewer,) * (stages - 1 - more), *(fewer + 1,) * more, last)
        costs = (*layers_of_stage[:-1], last + head)
        return max(costs), sum(cost * cost for cost in costs), layers_of_stage

    return min(rated(last) for last in range(1, layers - stages + 2))[2]


def micro_batches_in_flight(jobs: Jobs) -> tuple[Column, Column, Column]:
    """Micro-batches, in units of all layers of the rank, whose activations the first, the second and the last rank hold
    at most (the second: of those in the middle it holds most). Tied to schedules.simulate's `live` by a test."""
    p, m, v = jobs.pp, jobs.micro_batches, jobs.virtual_stages
    first = np.minimum(_peak_in_flight(jobs, np.zeros_like(p)) / v, m)
    middle = np.minimum(_peak_in_flight(jobs, np.minimum(p - 1, 1)) / v, m)
    last = np.minimum(_peak_in_flight(jobs, p - 1) / v, m)
    return first, middle, last


def _peak_in_flight(jobs: Jobs, rank: Column) -> Column:
    """Of activations of one stage and one micro-batch."""
    p, m, v, code = jobs.pp, jobs.micro_batches, jobs.virtual_stages, jobs.schedule
    after = p - 1 - rank
    interleaved = (v - 1) * np.minimum(p, m) + 2 * after + 1
    peaks = {
        "naive": 1 + 0 * m,
        "gpipe": m * v,
        "1f1b": after + 1,
        "interleaved_1f1b": interleaved,
        "looped_bfs": m * v,
        "interleaved_zero_bubble": (v - 1) * np.minimum(p, m) + p,
        "zbv": 2 * p,
        "dualpipev": 2 * p + 1,
        "zb_2p": 2 * p - 1,
    }
    peak = peaks["1f1b"]
    for name, value in peaks.items():
        peak = np.where(code == _SCHEDULE_CODE[name], value, peak)
    return np.where(p == 1, 1.0, peak)


V_SHAPED = tuple(SCHEDULES.index(name) for name, needs in REQUIREMENTS.items() if needs.v_shaped)
"""Codes of the schedules with the last stage on the first rank."""
SPLITS_BACKWARD = tuple(SCHEDULES.index(name) for name, needs in REQUIREMENTS.items() if needs.splits_backward)
"""Codes of the schedules that split backwards."""
_WHOLE_ROUNDS = tuple(SCHEDULES.index(name) for name in ("gpipe", "looped_bfs"))
_INTERLEAVED = tuple(SCHEDULES.index(name) for name in ("interleaved_1f1b", "looped_bfs"))
_ENOUGH = 4
"""Micro-batches simulated per pipeline rank; more would not change the peak."""


@dataclass(frozen=True)
class PipelineMoment:
    """Start of a computation, on the first rank, one in the middle and the last: [3, n], or [3, 1...]."""

    stages: Column
    """Number of activations held, of one stage and micro-batch each, for all stages but the last."""
    last: Column
    """Number of activations held for the last stage."""
    losses: Column
    """Micro-batches whose loss has been computed but not yet used in a backward."""
    input_done: Column
    """Members of `stages` whose input gradients are computed; the inputs of their weight gradients are still held."""
    input_done_last: Column
    """Members of `last` whose input gradients are computed."""
    accumulated: Column
    """Share of the rank's stages that have gradients from an earlier micro-batch, and wait for more."""
    reduced: Column
    """Share of the rank's stages whose gradients are complete."""
    loss: Column
    """1 if the backward of a loss begins, else 0."""


def peak_moments(jobs: Jobs) -> list[PipelineMoment]:
    """Return enough moments to include the peak."""
    plain = _whole_backward_moments(jobs)
    split = (jobs.pp > 1) & (np.isin(jobs.schedule, SPLITS_BACKWARD) | _has_no_steady_state(jobs))
    if not np.any(split):
        return plain
    walked = _split_backward_moments(jobs, split)
    most = max(len(plain), len(walked))
    padded = [(plain[min(at, len(plain) - 1)], walked[min(at, len(walked) - 1)]) for at in range(most)]
    names = [field.name for field in fields(PipelineMoment)]
    return [PipelineMoment(*(np.where(split, getattr(b, name), getattr(a, name)) for name in names)) for a, b in padded]


def _has_no_steady_state(jobs: Jobs) -> NDArray[np.bool_]:
    """Whether so few micro-batches are in a step that some stages have no gradients when most is in flight."""
    few = (jobs.stack == HPC_TRAIN_STACK) & (jobs.micro_batches <= jobs.pp)
    found: NDArray[np.bool_] = few & np.isin(jobs.schedule, _INTERLEAVED)
    return found


def _whole_backward_moments(jobs: Jobs) -> list[PipelineMoment]:
    """Handle schedules with whole backwards: the first backward while most is in flight, and the next one.

    In interleaved_1f1b, also a backward of another stage than the last one when nothing of the last is in flight.
    """
    v, m = jobs.virtual_stages, jobs.micro_batches
    counts = np.stack(np.broadcast_arrays(*map(np.atleast_1d, micro_batches_in_flight(jobs)))) * v
    shape = (3, *[1] * (counts.ndim - 1))
    has_loss = np.where(jobs.pp > 1, np.array([0.0, 0.0, 1.0]).reshape(shape), 1.0)
    together = has_loss * np.where((jobs.pp > 1) & np.isin(jobs.schedule, _WHOLE_ROUNDS), m, 1.0)
    rank = np.array([0.0, 1.0, 2.0]).reshape(shape)
    # If more micro-batches follow, every stage of the rank has had a backward before the most are in flight.
    before = np.where(m * v > counts, 1.0, 0.0) * (rank >= 0)
    nothing = np.zeros(shape)
    first = PipelineMoment(counts - together, together, together, nothing, nothing, before, nothing, has_loss)
    fewer = np.minimum(counts, 1)
    later_last = np.maximum(together - has_loss, np.where(counts > 1, 0.0, has_loss) * (m > 1))
    # looped_bfs goes back through one stage with all micro-batches before it begins with the next.
    one_stage = jobs.schedule == _SCHEDULE_CODE["looped_bfs"]
    second = PipelineMoment(
        np.maximum(counts - together - fewer * (1 - has_loss), 0), later_last, later_last, nothing, nothing,
        np.where(m > 1, np.where(one_stage, 1 / v, np.ones(shape)), 0.0), nothing, has_loss,
    )  # fmt: skip
    without_last = (v > 1) & (jobs.schedule == _SCHEDULE_CODE["interleaved_1f1b"]) & (jobs.pp > 1)
    others = replace(first, stages=counts, last=nothing, losses=nothing, loss=nothing)
    names = [column.name for column in fields(PipelineMoment)]
    third = PipelineMoment(*(np.where(without_last, getattr(others, name), getattr(first, name)) for name in names))
    return [first, second, third]


def _split_backward_moments(jobs: Jobs, split: NDArray[np.bool_]) -> list[PipelineMoment]:
    """Handle schedules that split backwards, for the jobs where `split` is true."""
    columns = np.broadcast_arrays(jobs.schedule, jobs.pp, jobs.virtual_stages, jobs.micro_batches, split)
    keys, index = np.unique(
        np.stack([column.ravel() for column in columns]).astype(np.int64), axis=1, return_inverse=True
    )
    found = [_moments_of(*map(int, key)) for key in keys.T]
    most = max(len(one) for one in found)
    table = np.array([[one[min(at, len(one) - 1)] for at in range(most)] for one in found])
    rows = table[index.ravel()]  # [jobs, moments, 3, fields]
    shaped = np.moveaxis(rows, 0, -1).reshape(most, 3, rows.shape[-1], *np.atleast_1d(columns[0]).shape)
    return [PipelineMoment(*(shaped[at, :, field] for field in range(rows.shape[-1]))) for at in range(most)]


_Counts = tuple[float, ...]
"""Fields of Moment, on one rank."""


@cache
def _moments_of(
    schedule: int, pp: int, virtual: int, micro_batches: int, split: int
) -> tuple[tuple[_Counts, ...], ...]:
    """Return the moments of the first rank, the next one and the last; each rank's worst moments separately."""
    if not split:
        return (((0.0,) * len(fields(PipelineMoment)),) * 3,)
    if micro_batches > _ENOUGH * pp and micro_batches % pp == 0:
        micro_batches = _ENOUGH * pp
    order = generate_order(SCHEDULES[schedule], pp, micro_batches, virtual)
    ranks = [_worst(set(_walk(order, rank, micro_batches))) for rank in (0, min(1, pp - 1), pp - 1)]
    most = max(map(len, ranks))
    return tuple(tuple(found[min(at, len(found) - 1)] for found in ranks) for at in range(most))


def _walk(order: Order, rank: int, micro_batches: int) -> Iterator[_Counts]:
    """Yield the counts at the start of every backward of a rank."""
    end, virtual = order.stages - 1, order.placement.count(rank)
    live, stored, losses, reduced = [0, 0], [0, 0], 0, 0
    accumulated: dict[int, int] = {}  # micro-batches added up, by stage; the last one reduces them
    for action in _actions(order, rank):
        last = action.stage == end
        if action.kind is Kind.F:
            live[last] += 1
            losses += last
            continue
        if action.kind is Kind.I and action.stage == 0:
            continue  # nothing to compute
        begins = last and action.kind is not Kind.W
        yield (live[0], live[1], losses, *stored, len(accumulated) / virtual, reduced / virtual, float(begins))
        losses -= begins
        if action.kind is Kind.I:
            stored[last] += 1
            yield (live[0], live[1], losses, *stored, len(accumulated) / virtual, reduced / virtual, 0.0)
            continue
        stored[last] -= action.kind is Kind.W and action.stage > 0
        live[last] -= 1
        accumulated[action.stage] = accumulated.get(action.stage, 0) + 1
        if accumulated[action.stage] == micro_batches:
            del accumulated[action.stage]
            reduced += 1


def _actions(order: Order, rank: int) -> Iterator[Action]:
    for step in order.rows[rank]:
        yield from entry_actions(step)


def _worst(found: set[_Counts]) -> list[_Counts]:
    """Keep the moments with the most of something: stages keep about the same, and the last one differs most."""
    chosen = set()
    for with_loss in (False, True):
        among = [one for one in found if bool(one[-1]) == with_loss]
        for most in (_held_of, _of_last, _of_gradients, _of_accumulated) if among else ():
            chosen.add(max(among, key=most))
    return sorted(one for one in chosen if not any(_less(one, other) for other in chosen))


def _less(one: _Counts, other: _Counts) -> bool:
    return one != other and all(a <= b for a, b in zip(one, other, strict=True))


def _held_of(one: _Counts) -> tuple[float, ...]:
    return one[0] + one[1], one[3] + one[4], one[2], one[5], one[6]


def _of_last(one: _Counts) -> tuple[float, ...]:
    return one[4], one[2], one[1], one[0] + one[3], one[5], one[6]


def _of_gradients(one: _Counts) -> tuple[float, ...]:
    return one[0] + one[1] + one[3] + one[4], one[3] + one[4], one[5], one[6]


def _of_accumulated(one: _Counts) -> tuple[float, ...]:
    return one[5], one[0] + one[1] + one[3] + one[4], one[6]


_SPLITS = _SCHEDULE_CODE["interleaved_zero_bubble"]
"""Codes from here on are of schedules that split backward."""


def bubble_seconds(jobs: Jobs, others: Column, forward: Column, inputs: Column, weights: Column) -> Column:
    """Seconds that the slowest rank waits; others: seconds of a micro-batch on all other ranks together.

    forward, inputs, weights: seconds of a micro-batch on an average rank, all its stages.
    """
    p, m, v, code = jobs.pp, jobs.micro_batches, jobs.virtual_stages, jobs.schedule
    found = np.where(code == _SCHEDULE_CODE["naive"], m * others, others / v)
    if np.any(code >= _SPLITS):
        found = np.where(code >= _SPLITS, _split_bubble(jobs, forward, inputs, weights), found)
    return np.where(p > 1, found, 0.0)


def _split_bubble(jobs: Jobs, forward: Column, inputs: Column, weights: Column) -> Column:
    """Return the bubble of the schedules that compute gradients of weights apart."""
    after, v, code = jobs.pp - 1, jobs.virtual_stages, jobs.schedule
    there = forward + inputs
    few = np.where(jobs.micro_batches < 2 * jobs.pp - 1, 2.0, 1.0)
    v_shaped = few * np.maximum(np.maximum(forward, inputs) / 2, inputs - weights)
    both = there / 2 + np.maximum(there / 2 - weights, 0) / 2
    found = np.where(code == _SCHEDULE_CODE["zbv"], v_shaped, np.maximum(there - weights, 0) / v)
    found = np.where(code == _SCHEDULE_CODE["dualpipev"], both, found)
    return after * np.where(code == _SCHEDULE_CODE["zb_2p"], np.maximum(there - 2 * weights, 0), found)
