"""The memory of a pipeline in the course of a step: micro-batches in flight, and moments at which memory may peak.

micro_batches_in_flight is a closed form for all schedules. peak_moments lists the moments at which memory may peak; for
schedules that split backward it walks through their real order.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, fields, replace
from functools import cache, cached_property
from itertools import chain
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from hpc_train.planner.model.distinct import find_distinct
from hpc_train.planner.model.inputs import HPC_TRAIN, SCHEDULES, Column
from hpc_train.planner.model.jobs import Jobs
from hpc_train.schedules.generate import REQUIREMENTS, generate_row
from hpc_train.schedules.order import Kind, OrderEntry, list_actions

_SCHEDULE_CODE = {name: code for code, name in enumerate(SCHEDULES)}


_IN_FLIGHT = {
    "naive": (0, 0, 0, 0, 1),
    "gpipe": (1, 0, 0, 0, 0),
    "1f1b": (0, 0, 1, 0, 1),
    "interleaved_1f1b": (0, 1, 2, 0, 1),
    "looped_bfs": (1, 0, 0, 0, 0),
    "interleaved_zero_bubble": (0, 1, 0, 1, 0),
    "zbv": (0, 0, 0, 2, 0),
    "dualpipev": (0, 0, 0, 2, 1),
    "zb_2p": (0, 0, 0, 2, -1),
}
"""Peak number of activations on a rank, each of one stage and one micro-batch, as multiples that are added up.

They are multiples of: micro-batches times virtual stages; (virtual stages - 1) times ranks, or times micro-batches if
these are fewer; ranks behind this one; ranks; 1. 1F1B holds one activation for each rank behind this one, besides its
own. Interleaving warms up with two forwards for each of them and a round for each virtual stage but one.
"""
assert set(_IN_FLIGHT) == set(SCHEDULES)
_MULTIPLES = np.array([_IN_FLIGHT[name] for name in SCHEDULES], np.float64).T


@dataclass(frozen=True)
class Pipelines:
    """The columns of Jobs, [n], that decide in which order a pipeline computes."""

    schedule: Column
    pp: Column
    virtual_stages: Column
    micro_batches: Column
    stack: Column

    @cached_property
    def has_pipeline(self) -> bool:
        return bool(np.any(self.pp > 1))


def micro_batches_in_flight(jobs: Jobs | Pipelines) -> tuple[Column, Column, Column]:
    """Return the peak number of micro-batches in flight on the first, the second and the last rank.

    One micro-batch means the activations of all layers of the rank, so virtual stages count as fractions. No middle
    rank has more in flight than the second. A test compares this with `live` of schedules.simulate.
    """
    p, m, v = jobs.pp, jobs.micro_batches, jobs.virtual_stages
    everything, rounds, behind, ranks, one = _MULTIPLES[:, jobs.schedule.astype(np.intp)]
    anywhere = everything * m * v + rounds * (v - 1) * np.minimum(p, m) + ranks * p + one
    peaks = anywhere + behind * (p - 1), anywhere + behind * np.maximum(p - 2, 0), anywhere
    first, middle, last = (np.minimum(np.where(p == 1, 1.0, peak) / v, m) for peak in peaks)
    return first, middle, last


V_SHAPED = tuple(SCHEDULES.index(name) for name, needs in REQUIREMENTS.items() if needs.v_shaped)
"""Codes of the schedules that have the last stage on the first rank."""
SPLITS_BACKWARD = tuple(SCHEDULES.index(name) for name, needs in REQUIREMENTS.items() if needs.splits_backward)
"""Codes of the schedules that split backward into input and weight gradients."""
_WHOLE_ROUNDS = tuple(SCHEDULES.index(name) for name in ("gpipe", "looped_bfs"))
_INTERLEAVED = tuple(SCHEDULES.index(name) for name in ("interleaved_1f1b", "looped_bfs"))
_MAX_WALKED_ROUNDS = 4
"""Micro-batches per pipeline rank that are walked through at most; after that the steady state only repeats."""


@dataclass(frozen=True)
class PipelineMoment:
    """State of a pipeline when a computation starts: first rank, a middle one, the last, [3, n] or [3, 1...].

    [1, n] or [1, 1...] if no job has a pipeline.
    """

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

    def take(self, ranks: slice) -> PipelineMoment:
        """Return some of the three ranks."""
        return PipelineMoment(*(getattr(self, field.name)[ranks] for field in fields(self)))

    def end_of_backward(self, virtual_stages: Column) -> PipelineMoment:
        """Return the state when the backward that starts now is done."""
        has_last = np.minimum(self.last, self.loss)
        return replace(
            self,
            stages=np.maximum(self.stages - (1 - has_last), 0),
            last=self.last - has_last,
            input_done=np.maximum(self.input_done - 1, 0),
            input_done_last=np.maximum(self.input_done_last - has_last, 0),
            reduced=np.minimum(self.reduced + 1 / virtual_stages, 1 - self.accumulated),
        )


def peak_moments(jobs: Jobs) -> Iterator[tuple[PipelineMoment, PipelineMoment]]:
    """Yield the moments at which memory may be at its peak: (start of a backward, its end), for all jobs at once.

    They depend on few columns, of which thousands of jobs have few different values: each combination is used once.
    """
    pipelines, index, shape = _find_distinct_pipelines(jobs)
    for start in _list_moments(pipelines):
        end = start.end_of_backward(pipelines.virtual_stages)
        yield _spread_moment(start, index, shape), _spread_moment(end, index, shape)


def first_peak_moment(jobs: Jobs) -> PipelineMoment:
    """Return the first start of a backward that peak_moments yields."""
    pipelines, index, shape = _find_distinct_pipelines(jobs)
    return _spread_moment(_list_moments(pipelines)[0], index, shape)


def _find_distinct_pipelines(jobs: Jobs) -> tuple[Pipelines, NDArray[np.intp], tuple[int, ...]]:
    """Return (the different pipelines, which of them each job has, shape of the jobs)."""
    columns = np.broadcast_arrays(*(getattr(jobs, field.name) for field in fields(Pipelines)))
    keys, index = find_distinct(np.stack([column.ravel() for column in columns]))
    return Pipelines(*keys), index, np.atleast_1d(columns[0]).shape


def _spread_moment(moment: PipelineMoment, index: NDArray[np.intp], shape: tuple[int, ...]) -> PipelineMoment:
    """Return a moment of jobs, [3, *shape]. moment: of pipelines; index: which of them each job has.

    What is the same for all pipelines gets axes of length 1.
    """

    def spread(column: Column) -> Column:
        if (column == column[:, :1]).all():
            return column[:, :1].reshape(len(column), *[1] * len(shape))
        return np.take(column, index, axis=1).reshape(len(column), *shape)

    return PipelineMoment(*(spread(getattr(moment, field.name)) for field in fields(PipelineMoment)))


def _list_moments(jobs: Pipelines) -> list[PipelineMoment]:
    split = (jobs.pp > 1) & (np.isin(jobs.schedule, SPLITS_BACKWARD) | _has_no_steady_state(jobs))
    if not np.any(split):
        return _whole_backward_moments(jobs)
    walked = _split_backward_moments(jobs, split)
    if np.all(split):
        return walked
    plain = _whole_backward_moments(jobs)
    most = max(len(plain), len(walked))
    # Both lists must have one length: the last moment of the shorter one is repeated, which changes no maximum.
    padded = [(plain[min(index, len(plain) - 1)], walked[min(index, len(walked) - 1)]) for index in range(most)]
    names = [field.name for field in fields(PipelineMoment)]
    return [PipelineMoment(*(np.where(split, getattr(b, name), getattr(a, name)) for name in names)) for a, b in padded]


def _has_no_steady_state(jobs: Pipelines) -> NDArray[np.bool_]:
    """Return where a step has so few micro-batches that some stage has no gradients yet when most is in flight."""
    few = (jobs.stack == HPC_TRAIN) & (jobs.micro_batches <= jobs.pp)
    unsteady: NDArray[np.bool_] = few & np.isin(jobs.schedule, _INTERLEAVED)
    return unsteady


def _whole_backward_moments(jobs: Pipelines) -> list[PipelineMoment]:
    """Return the moments of schedules that do not split backward: two or three are enough.

    They are the first backward when most is in flight, the next one, and for interleaved_1f1b a backward of another
    stage while nothing of the last stage is in flight.
    """
    v, m = jobs.virtual_stages, jobs.micro_batches
    ranks = 3 if jobs.has_pipeline else 1
    counts = np.stack(micro_batches_in_flight(jobs)[:ranks]) * v
    shape = (ranks, 1)
    has_loss = np.where(jobs.pp > 1, np.array([0.0, 0.0, 1.0]).reshape(shape), 1.0) if ranks > 1 else np.ones(shape)
    together = has_loss * np.where((jobs.pp > 1) & np.isin(jobs.schedule, _WHOLE_ROUNDS), m, 1.0)
    # If more micro-batches follow, every stage of the rank has had a backward before the most are in flight.
    before = np.where(m * v > counts, 1.0, 0.0)
    zeros = np.zeros(shape)
    first = PipelineMoment(counts - together, together, together, zeros, zeros, before, zeros, has_loss)
    fewer = np.minimum(counts, 1)
    later_last = np.maximum(together - has_loss, np.where(counts > 1, 0.0, has_loss) * (m > 1))
    # looped_bfs goes back through one stage with all micro-batches before it begins with the next.
    one_stage = jobs.schedule == _SCHEDULE_CODE["looped_bfs"]
    second = PipelineMoment(
        np.maximum(counts - together - fewer * (1 - has_loss), 0), later_last, later_last, zeros, zeros,
        np.where(m > 1, np.where(one_stage, 1 / v, np.ones(shape)), 0.0), zeros, has_loss,
    )  # fmt: skip
    without_last = (v > 1) & (jobs.schedule == _SCHEDULE_CODE["interleaved_1f1b"]) & (jobs.pp > 1)
    if not np.any(without_last):
        return [first, second]
    others = replace(first, stages=counts, last=zeros, losses=zeros, loss=zeros)
    names = [column.name for column in fields(PipelineMoment)]
    third = PipelineMoment(*(np.where(without_last, getattr(others, name), getattr(first, name)) for name in names))
    return [first, second, third]


def _split_backward_moments(jobs: Pipelines, split: NDArray[np.bool_]) -> list[PipelineMoment]:
    """Return the moments of schedules that split backward, for the jobs where `split` is true; zeros for the others."""
    # Only whole rounds may be left out: a rest at the end of a step has moments of its own.
    enough = _MAX_WALKED_ROUNDS * jobs.pp
    micro_batches = np.where(
        jobs.micro_batches % jobs.pp == 0, np.minimum(jobs.micro_batches, enough), jobs.micro_batches
    )
    rows = np.stack([jobs.schedule, jobs.pp, jobs.virtual_stages, micro_batches, split]).astype(np.int64).T
    walked = [_moments_of(*row) for row in rows.tolist()]
    most = max(len(counts) for counts in walked)
    padded = np.array([[counts[min(at, len(counts) - 1)] for at in range(most)] for counts in walked])
    return [PipelineMoment(*moment) for moment in padded.transpose(1, 3, 2, 0)]  # [moments, fields, 3, pipelines]


class _Counts(NamedTuple):
    """The fields of PipelineMoment for one rank."""

    stages: float
    last: float
    losses: float
    input_done: float
    input_done_last: float
    accumulated: float
    reduced: float
    loss: float


@cache
def _moments_of(
    schedule: int, pp: int, virtual: int, micro_batches: int, split: int
) -> tuple[tuple[_Counts, ...], ...]:
    """Return the worst moments of one schedule as [moment][rank], for the first rank, the second and the last.

    Each rank has worst moments of its own; those in one row need not happen at the same time.
    """
    if not split:
        return ((_Counts(*[0.0] * len(_Counts._fields)),) * 3,)
    rows = (generate_row(SCHEDULES[schedule], pp, rank, micro_batches, virtual) for rank in (0, min(1, pp - 1), pp - 1))
    ranks = [
        _choose_worst(map(_Counts._make, set(_walk_row(row, pp * virtual - 1, virtual, micro_batches)))) for row in rows
    ]
    most = max(map(len, ranks))
    return tuple(tuple(moments[min(index, len(moments) - 1)] for moments in ranks) for index in range(most))


def _walk_row(row: Iterable[OrderEntry], end: int, virtual: int, micro_batches: int) -> Iterator[tuple[float, ...]]:
    """Walk through a rank's row and yield the counts, in the order of _Counts, at the start of every backward.

    end: the pipeline's last stage. virtual: stages of the rank.
    """
    live, stored, losses, reduced = [0, 0], [0, 0], 0, 0
    accumulated: dict[int, int] = {}  # micro-batches whose gradients are added up, by stage; the last one reduces them
    forward, inputs, weights = Kind.F, Kind.I, Kind.W
    for stage, kind, _ in chain.from_iterable(map(list_actions, row)):
        last = stage == end
        if kind is forward:
            live[last] += 1
            losses += last
            continue
        if kind is inputs and stage == 0:
            continue  # the first stage has no input gradients to compute
        begins = last and kind is not weights
        yield (*live, losses, *stored, len(accumulated) / virtual, reduced / virtual, float(begins))
        losses -= begins
        if kind is inputs:
            stored[last] += 1
            yield (*live, losses, *stored, len(accumulated) / virtual, reduced / virtual, 0.0)
            continue
        stored[last] -= kind is weights and stage > 0
        live[last] -= 1
        accumulated[stage] = accumulated.get(stage, 0) + 1
        if accumulated[stage] == micro_batches:
            del accumulated[stage]
            reduced += 1


def _choose_worst(moments: Iterable[_Counts]) -> list[_Counts]:
    """Choose the moments that may be a memory peak: those with the most of one quantity, and dominated by no other.

    Moments with and without a loss are compared separately, because the logits of a loss need memory of their own.
    """
    listed, chosen = list(moments), set()
    for with_loss in (False, True):
        among = [counts for counts in listed if bool(counts.loss) == with_loss]
        for most in (_by_activations, _by_last_stage, _by_weight_gradients, _by_accumulated) if among else ():
            chosen.add(max(among, key=most))
    return sorted(counts for counts in chosen if not any(_is_below(counts, other) for other in chosen))


def _is_below(one: _Counts, other: _Counts) -> bool:
    return one != other and all(a <= b for a, b in zip(one, other, strict=True))


def _by_activations(one: _Counts) -> tuple[float, ...]:
    held, inputs_done = one.stages + one.last, one.input_done + one.input_done_last
    return held, inputs_done, one.losses, one.accumulated, one.reduced


def _by_last_stage(one: _Counts) -> tuple[float, ...]:
    others = one.stages + one.input_done
    return one.input_done_last, one.losses, one.last, others, one.accumulated, one.reduced


def _by_weight_gradients(one: _Counts) -> tuple[float, ...]:
    inputs_done = one.input_done + one.input_done_last
    return one.stages + one.last + inputs_done, inputs_done, one.accumulated, one.reduced


def _by_accumulated(one: _Counts) -> tuple[float, ...]:
    held = one.stages + one.last + one.input_done + one.input_done_last
    return one.accumulated, held, one.reduced
