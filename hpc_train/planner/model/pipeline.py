"""Pipeline model: layers of each rank, micro-batches in flight, and the bubble.

split_layers and micro_batches_in_flight are closed forms for all schedules. peak_moments lists the moments at which
memory may peak; for schedules that split backward it walks through their real order. bubble_seconds is the time that
the slowest rank waits for others.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, fields, replace
from functools import cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hpc_train.planner.model.jobs import SCHEDULES, STACKS, Column, Jobs
from hpc_train.schedules.generate import REQUIREMENTS, generate_order
from hpc_train.schedules.order import Action, Kind, Order, list_actions

_SCHEDULE_CODE = {name: code for code, name in enumerate(SCHEDULES)}
HPC_TRAIN_STACK = STACKS.index("hpc_train")


@dataclass(frozen=True)
class LayerSplit:
    """Layers of the first rank of a pipeline, a middle one and the last, counting all virtual stages of the rank."""

    first: Column
    middle: Column
    last: Column


def split_layers(jobs: Jobs) -> LayerSplit:
    """Return how many layers the ranks of the pipeline have.

    Megatron and other published stacks give every stage the same number. If the layers do not divide, embedding and
    head count as one layer each if that makes them divide; otherwise the last stage has fewer. hpc_train balances
    stages by FLOPs (traffic.stages.split_blocks).
    """
    stages = jobs.pp * jobs.virtual_stages
    even = jobs.layers / stages
    with_ends = ((jobs.layers + 2) % stages == 0) & (jobs.layers % stages != 0)
    middle = np.where(with_ends, (jobs.layers + 2) / stages, np.ceil(even))
    last = np.where(with_ends, middle - 1, np.maximum(jobs.layers - (stages - 1) * middle, 0))
    ours_middle, ours_last = _balanced(jobs, stages)
    is_ours = jobs.stack == HPC_TRAIN_STACK
    middle, last = np.where(is_ours, ours_middle, middle), np.where(is_ours, ours_last, last)
    rank, last_rank = middle * jobs.virtual_stages, middle * (jobs.virtual_stages - 1) + last
    # hpc_train's stages differ by one layer if the layers do not divide, and earlier stages have fewer. A middle rank
    # has the most of any; the first one has what the others leave, but no fewer than its smallest possible stages.
    fewest = np.floor((jobs.layers - last) / np.maximum(stages - 1, 1)) * jobs.virtual_stages
    left = jobs.layers - (jobs.pp - 2) * rank - last_rank
    first = np.clip(np.where(is_ours, np.maximum(left, fewest), left), 0, rank)
    unsplit = jobs.pp == 1
    return LayerSplit(*(np.where(unsplit, jobs.layers, count) for count in (first, rank, last_rank)))


def _balanced(jobs: Jobs, stages: Column) -> tuple[Column, Column]:
    """Return (layers of a stage, layers of the last stage) for which the costliest stage is as cheap as possible."""
    layers, others = jobs.layers, np.maximum(stages - 1, 1)
    # The head costs as much as `head` layers. The optimum is where the last stage and the others cost the same; as
    # layers are whole, it is one of the two whole numbers around that point.
    head = jobs.vocab * jobs.hidden / (jobs.layer_parameters + jobs.heads * jobs.attention_dim * jobs.sequence)
    fewer = np.clip(np.floor((layers - head * others) / stages), 1, np.maximum(layers - others, 1))
    more = np.minimum(fewer + 1, np.maximum(layers - others, 1))
    options = [(np.ceil((layers - last) / others), last) for last in (fewer, more)]
    (middle, last), (other_middle, other_last) = options
    better = np.maximum(other_middle, other_last + head) <= np.maximum(middle, last + head)
    return np.where(better, other_middle, middle), np.where(better, other_last, last)


def rank_layers(jobs: Jobs, v_shaped: NDArray[np.bool_]) -> Column:
    """Return numbers of layers in hpc_train's pipeline: [4, n].

    The rows are: the first rank, the middle rank with the most layers, the last rank, and the last stage.
    v_shaped: jobs in which rank r has the stages r and 2 pp - 1 - r.
    """
    head = jobs.vocab * jobs.hidden / (jobs.layer_parameters + jobs.heads * jobs.attention_dim * jobs.sequence)
    columns = np.broadcast_arrays(jobs.layers, jobs.pp, jobs.virtual_stages, head, v_shaped)
    # Thousands of jobs differ in few of these values: split each distinct combination once.
    keys, index = _find_distinct(np.stack([column.ravel() for column in columns]))
    table = np.array([_rank_layers(int(n), int(pp), int(v), h, bool(bent)) for n, pp, v, h, bent in keys.T.tolist()])
    found: Column = np.moveaxis(table[index], -1, 0).reshape(4, *columns[0].shape)
    return found


def _find_distinct(values: NDArray[Any]) -> tuple[NDArray[Any], NDArray[np.intp]]:
    """Return the distinct columns of values [k, n], and the index of each of the n columns among them.

    np.unique along an axis does the same, but sorts whole columns, which takes several times as long.
    """
    codes, size = np.zeros(values.shape[1], np.int64), 1
    for row in values:
        if row.size and row.min() != row.max():
            found, code = np.unique(row, return_inverse=True)
            if size * len(found) > np.iinfo(np.int64).max:
                codes, size = np.unique(codes, return_inverse=True)[1], len(codes)
            codes, size = codes * len(found) + code, size * len(found)
    _, first, index = np.unique(codes, return_index=True, return_inverse=True)
    return values[:, first], index


@cache
def _rank_layers(layers: int, pp: int, virtual: int, head: float, v_shaped: bool) -> tuple[float, ...]:
    stages = pp * virtual
    layers_of_stage = _stage_layers(layers, stages, head)
    ranks = [stage % pp if not v_shaped or stage < pp else stages - 1 - stage for stage in range(stages)]
    sums = [sum(n for n, rank in zip(layers_of_stage, ranks, strict=True) if rank == mine) for mine in range(pp)]
    return sums[0], max(sums[1:-1], default=sums[-1]), sums[-1], layers_of_stage[-1]


def _stage_layers(layers: int, stages: int, head: float) -> tuple[float, ...]:
    """Return the layers of each stage, as traffic.stages.split_blocks splits equal blocks. head: its cost in blocks.

    Searching the size of the last stage alone is enough, because all other stages are alike.
    """
    if stages == 1 or stages > layers:
        return (layers / stages,) * stages

    def rated(last: int) -> tuple[float, float, tuple[int, ...]]:
        fewer, more = divmod(layers - last, stages - 1)
        layers_of_stage = (*(fewer,) * (stages - 1 - more), *(fewer + 1,) * more, last)
        costs = (*layers_of_stage[:-1], last + head)
        return max(costs), sum(cost * cost for cost in costs), layers_of_stage

    # Least maximum first; among these the most even split, by the sum of squares, as split_blocks chooses.
    return min(rated(last) for last in range(1, layers - stages + 2))[2]


def micro_batches_in_flight(jobs: Jobs) -> tuple[Column, Column, Column]:
    """Return the peak number of micro-batches in flight on the first, the second and the last rank.

    One micro-batch means the activations of all layers of the rank, so virtual stages count as fractions. Of the middle
    ranks the second has the most in flight. A test compares this with `live` of schedules.simulate.
    """
    p, m, v = jobs.pp, jobs.micro_batches, jobs.virtual_stages
    first = np.minimum(_peak_in_flight(jobs, np.zeros_like(p)) / v, m)
    middle = np.minimum(_peak_in_flight(jobs, np.minimum(p - 1, 1)) / v, m)
    last = np.minimum(_peak_in_flight(jobs, p - 1) / v, m)
    return first, middle, last


def _peak_in_flight(jobs: Jobs, rank: Column) -> Column:
    """Return the peak number of activations on a rank; each is of one stage and one micro-batch."""
    p, m, v, code = jobs.pp, jobs.micro_batches, jobs.virtual_stages, jobs.schedule
    # 1F1B holds one activation for each rank behind this one, besides its own. Interleaving warms up with two forwards
    # for each of them and a round of p micro-batches for each virtual stage but one.
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
"""Codes of the schedules that have the last stage on the first rank."""
SPLITS_BACKWARD = tuple(SCHEDULES.index(name) for name, needs in REQUIREMENTS.items() if needs.splits_backward)
"""Codes of the schedules that split backward into input and weight gradients."""
_WHOLE_ROUNDS = tuple(SCHEDULES.index(name) for name in ("gpipe", "looped_bfs"))
_INTERLEAVED = tuple(SCHEDULES.index(name) for name in ("interleaved_1f1b", "looped_bfs"))
_ENOUGH = 4
"""Micro-batches per pipeline rank that are walked through at most; after that the steady state only repeats."""


@dataclass(frozen=True)
class PipelineMoment:
    """State of a pipeline when a computation starts: first rank, a middle one, the last, [3, n] or [3, 1...]."""

    stages: Column
    """Activations held, each of one micro-batch and one stage other than the pipeline's last."""
    last: Column
    """Activations held of the pipeline's last stage."""
    losses: Column
    """Micro-batches whose loss has been computed but not yet used in a backward."""
    input_done: Column
    """How many of `stages` have had their I but not their W: the inputs of the weight gradients are still held."""
    input_done_last: Column
    """How many of `last` have had their I but not their W."""
    accumulated: Column
    """Share of the rank's stages with gradients from earlier micro-batches that are not complete yet."""
    reduced: Column
    """Share of the rank's stages whose gradients are complete."""
    loss: Column
    """1 if the backward of a loss begins, else 0."""


def peak_moments(jobs: Jobs) -> list[PipelineMoment]:
    """List the moments at which memory may be at its peak, for all jobs at once."""
    plain = _whole_backward_moments(jobs)
    split = (jobs.pp > 1) & (np.isin(jobs.schedule, SPLITS_BACKWARD) | _has_no_steady_state(jobs))
    if not np.any(split):
        return plain
    walked = _split_backward_moments(jobs, split)
    most = max(len(plain), len(walked))
    # Both lists must have one length: the last moment of the shorter one is repeated, which changes no maximum.
    padded = [(plain[min(index, len(plain) - 1)], walked[min(index, len(walked) - 1)]) for index in range(most)]
    names = [field.name for field in fields(PipelineMoment)]
    return [PipelineMoment(*(np.where(split, getattr(b, name), getattr(a, name)) for name in names)) for a, b in padded]


def _has_no_steady_state(jobs: Jobs) -> NDArray[np.bool_]:
    """Return where a step has so few micro-batches that some stage has no gradients yet when most is in flight."""
    few = (jobs.stack == HPC_TRAIN_STACK) & (jobs.micro_batches <= jobs.pp)
    found: NDArray[np.bool_] = few & np.isin(jobs.schedule, _INTERLEAVED)
    return found


def _whole_backward_moments(jobs: Jobs) -> list[PipelineMoment]:
    """Return the moments of schedules that do not split backward: two or three are enough.

    They are the first backward when most is in flight, the next one, and for interleaved_1f1b a backward of another
    stage while nothing of the last stage is in flight.
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
    if not np.any(without_last):
        return [first, second]
    others = replace(first, stages=counts, last=nothing, losses=nothing, loss=nothing)
    names = [column.name for column in fields(PipelineMoment)]
    third = PipelineMoment(*(np.where(without_last, getattr(others, name), getattr(first, name)) for name in names))
    return [first, second, third]


def _split_backward_moments(jobs: Jobs, split: NDArray[np.bool_]) -> list[PipelineMoment]:
    """Return the moments of schedules that split backward, for the jobs where `split` is true; zeros for the others."""
    columns = np.broadcast_arrays(jobs.schedule, jobs.pp, jobs.virtual_stages, jobs.micro_batches, split)
    keys, index = _find_distinct(np.stack([column.ravel() for column in columns]).astype(np.int64))
    found = [_moments_of(*map(int, key)) for key in keys.T]
    most = max(len(counts) for counts in found)
    table = np.array([[counts[min(at, len(counts) - 1)] for at in range(most)] for counts in found])
    rows = table[index]  # [jobs, moments, 3, fields]
    shaped = np.moveaxis(rows, 0, -1).reshape(most, 3, rows.shape[-1], *np.atleast_1d(columns[0]).shape)
    return [PipelineMoment(*(shaped[at, :, field] for field in range(rows.shape[-1]))) for at in range(most)]


_Counts = tuple[float, ...]
"""The fields of PipelineMoment for one rank."""


@cache
def _moments_of(
    schedule: int, pp: int, virtual: int, micro_batches: int, split: int
) -> tuple[tuple[_Counts, ...], ...]:
    """Return the worst moments of one schedule as [moment][rank], for the first rank, the second and the last.

    Each rank has worst moments of its own; those in one row need not happen at the same time.
    """
    if not split:
        return (((0.0,) * len(fields(PipelineMoment)),) * 3,)
    # Only whole rounds may be left out: a rest at the end of a step has moments of its own.
    if micro_batches > _ENOUGH * pp and micro_batches % pp == 0:
        micro_batches = _ENOUGH * pp
    order = generate_order(SCHEDULES[schedule], pp, micro_batches, virtual)
    ranks = [_worst(set(_walk(order, rank, micro_batches))) for rank in (0, min(1, pp - 1), pp - 1)]
    most = max(map(len, ranks))
    return tuple(tuple(found[min(index, len(found) - 1)] for found in ranks) for index in range(most))


def _walk(order: Order, rank: int, micro_batches: int) -> Iterator[_Counts]:
    """Walk through a rank's row and yield the counts at the start of every backward."""
    end, virtual = order.stages - 1, order.placement.count(rank)
    live, stored, losses, reduced = [0, 0], [0, 0], 0, 0
    accumulated: dict[int, int] = {}  # micro-batches whose gradients are added up, by stage; the last one reduces them
    for action in _actions(order, rank):
        last = action.stage == end
        if action.kind is Kind.F:
            live[last] += 1
            losses += last
            continue
        if action.kind is Kind.I and action.stage == 0:
            continue  # the first stage has no input gradients to compute
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
        yield from list_actions(step)


def _worst(found: set[_Counts]) -> list[_Counts]:
    """Choose the moments that may be a memory peak: those with the most of one quantity, and dominated by no other.

    Moments with and without a loss are compared separately, because the logits of a loss need memory of their own.
    """
    chosen = set()
    for with_loss in (False, True):
        among = [counts for counts in found if bool(counts[-1]) == with_loss]
        for most in (_held_of, _of_last, _of_gradients, _of_accumulated) if among else ():
            chosen.add(max(among, key=most))
    return sorted(counts for counts in chosen if not any(_less(counts, other) for other in chosen))


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
"""Schedules with this code or a larger one split backward."""


def bubble_seconds(jobs: Jobs, others: Column, forward: Column, inputs: Column, weights: Column) -> Column:
    """Return the seconds of a step for which the slowest rank waits.

    others: seconds of one micro-batch on all other ranks together. forward, inputs, weights: seconds of one micro-batch
    on an average rank, all its virtual stages together.
    """
    # A rank waits while the first micro-batch comes to it and the last one leaves the ranks behind it. naive waits so
    # for every micro-batch; v virtual stages cut the wait to one v-th (Narayanan et al. 2021, section 2.2).
    p, m, v, code = jobs.pp, jobs.micro_batches, jobs.virtual_stages, jobs.schedule
    found = np.where(code == _SCHEDULE_CODE["naive"], m * others, others / v)
    if np.any(code >= _SPLITS):
        found = np.where(code >= _SPLITS, _split_bubble(jobs, forward, inputs, weights), found)
    return np.where(p > 1, found, 0.0)


def _split_bubble(jobs: Jobs, forward: Column, inputs: Column, weights: Column) -> Column:
    """Return the bubble of the schedules that compute weight gradients separately.

    ZB-H1 (p - 1)(F + I - W), over v virtual stages, and ZB-H2 (p - 1)(F + I - 2 W): Qi et al. 2024, arXiv:2401.10241,
    table 2. The forms of the V-shaped schedules are ours; a test compares them with simulated orders.
    """
    after, v, code = jobs.pp - 1, jobs.virtual_stages, jobs.schedule
    there = forward + inputs
    few = np.where(jobs.micro_batches < 2 * jobs.pp - 1, 2.0, 1.0)
    v_shaped = few * np.maximum(np.maximum(forward, inputs) / 2, inputs - weights)
    both = there / 2 + np.maximum(there / 2 - weights, 0) / 2
    found = np.where(code == _SCHEDULE_CODE["zbv"], v_shaped, np.maximum(there - weights, 0) / v)
    found = np.where(code == _SCHEDULE_CODE["dualpipev"], both, found)
    return after * np.where(code == _SCHEDULE_CODE["zb_2p"], np.maximum(there - 2 * weights, 0), found)
