"""Search a space of candidates for the best ones and the Pareto front of time and memory.

Branch and bound over rows (a layout, a schedule and a micro-batch): the fastest technique bounds the step time of a row
from below, the leanest ones bound its memory. A row that can be neither among the best nor on the front is skipped. The
result is exact: `exhaustive=True` estimates every candidate and finds the same, which a test checks.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from hpc_train.planner.constants import Constants
from hpc_train.planner.evidence import handicap, list_unmeasured
from hpc_train.planner.model.inputs import SCHEDULES, Column
from hpc_train.planner.model.jobs import Jobs, replace_columns
from hpc_train.planner.model.memory import (
    MAYBE,
    YES,
    MemoryTotals,
    bound_memory_totals,
    estimate_host_memory,
    estimate_memory_totals,
)
from hpc_train.planner.model.step_time import estimate_step_time
from hpc_train.planner.search.space import (
    LAYOUT_COLUMNS,
    TECHNIQUE_COLUMNS,
    Block,
    Columns,
    FixedColumns,
    SearchSpace,
    Techniques,
    iterate_blocks,
)
from hpc_train.planner.search.top_candidates import (
    ParetoFront,
    RatedCandidates,
    TopCandidates,
    concatenate_rated,
    no_candidates,
)
from hpc_train.processes import keep_freed_memory

FRONT_SLACK = 2.0
"""A search returns no candidates beyond this many times the step time of the best one."""
HOST_SHARE = 0.8
"""Share of a node's memory that offloaded state may use; the system, data and checkpoints need the rest."""
ROWS_AT_ONCE = 1 << 14
"""Rows whose bounds are estimated at a time."""
CANDIDATES_AT_ONCE = 1 << 15
"""Candidates estimated at a time: few columns of them are longer than a core's second cache, and they are so long that
Python's own time hardly counts."""
_PROMISING_SCHEDULES = ("1f1b", "interleaved_1f1b", "interleaved_zero_bubble")
_KEPT_BYTES = 1 << 28
"""Bytes of freed arrays that a search keeps for the next ones, which is a sixth of its time."""


@dataclass(frozen=True)
class SearchResult:
    """Candidates that a search found."""

    best: RatedCandidates
    """Candidates that surely fit, the best of each mesh. Step times have the handicap of unmeasured techniques."""
    doubtful: RatedCandidates
    """Candidates that may fit, the best of each mesh; none if any candidate surely fits."""
    front: RatedCandidates
    """Pareto front of the candidates that surely fit: no other has less time and less memory."""
    searched: int
    """Number of candidates in the space."""
    estimated: int
    """Number that was estimated; bounds ruled out the others."""


@dataclass(frozen=True)
class SearchBase:
    """Properties that all candidates of a search share."""

    base: Jobs
    """One job; columns that candidates do not set are taken from it."""
    reduce_bytes: float = 0.0
    """Bytes of a gradient element that fully_shard reduces; 0: as in base."""
    host_bytes: float = 0.0
    """Memory of a node, of which offloaded state may use HOST_SHARE; 0: unknown, assumed to be enough."""


def search_space(
    rest: SearchBase, space: SearchSpace, constants: Constants, keep: int = 20, exhaustive: bool = False
) -> SearchResult:
    """Find the best candidate of each of the `keep` best meshes, and the Pareto front."""
    keep_freed_memory(_KEPT_BYTES, os.environ)
    search = _Search(rest, constants, keep)
    if exhaustive:
        for block in iterate_blocks(space, CANDIDATES_AT_ONCE):
            search.estimate_all(block)
            search.searched += block.count
        return search.result()
    # A bound rules out nothing before good times are known, so a small promising part is searched first. Its candidates
    # come again in the whole space and must not count twice.
    for blocks in _group_blocks(iterate_blocks(_promising_part(space))):
        search.estimate_within_bounds(blocks)
    # Most candidates of a block are ruled out before they are estimated, so blocks may be larger.
    for blocks in _group_blocks(iterate_blocks(space, ROWS_AT_ONCE << 7)):
        search.estimate_within_bounds(blocks)
        search.searched += sum(block.count for block in blocks)
    return search.result()


def _promising_part(space: SearchSpace) -> SearchSpace:
    """Return a small part of the space that contains good candidates: their times bound the search of the whole."""
    promising = {
        "schedule": tuple(float(SCHEDULES.index(name)) for name in _PROMISING_SCHEDULES),
        "overlap_tensor": (0.0,),
        "sequence_parallel": (1.0,),
        "reshard": (1.0,),
        "recompute_every": (1.0,),
        "virtual_stages": (1.0, 2.0, 4.0),
        "micro_batch": (1.0, 2.0, 4.0, 8.0),
        "offload": (0.0,),
        "cp": (1.0, 2.0, 4.0),
        "ep": (1.0, 8.0),
    }
    fixed = space.fixed.values
    allowed = {name: tuple(v for v in values if v in fixed.get(name, values)) for name, values in promising.items()}
    return replace(space, fixed=FixedColumns({**fixed, **{name: values for name, values in allowed.items() if values}}))


def candidates_to_jobs(rest: SearchBase, columns: Columns, share: Column) -> Jobs:
    """Turn columns of candidates into jobs. share: share of a stage's layers that are recomputed."""
    job_columns: dict[str, Column] = {name: column for name, column in columns.items() if name != "recompute_every"}
    if rest.reduce_bytes:
        # DistributedDataParallel reduces in the parameters' own format; precision.reduce applies to fully_shard only.
        uses_ddp = (columns["zero"] == 0) & (columns["tp"] == 1) & (columns["pp"] == 1)
        job_columns["reduce_bytes"] = np.where(uses_ddp, rest.base.weight_bytes, rest.reduce_bytes)
    return replace_columns(rest.base, **job_columns, recompute_share=share)


def fits_in_host_memory(rest: SearchBase, jobs: Jobs, memory: MemoryTotals) -> NDArray[np.bool_]:
    """Return whether a node's memory has room for what its ranks offload."""
    if not rest.host_bytes:
        return np.ones((), np.bool_)
    host = estimate_host_memory(jobs, memory.waiting)
    enough: NDArray[np.bool_] = host * np.minimum(jobs.gpus_per_node, jobs.world) <= HOST_SHARE * rest.host_bytes
    return enough


class _Search:
    """One search in progress: the best candidates and the front so far, whose times are the bounds."""

    def __init__(self, rest: SearchBase, constants: Constants, keep: int) -> None:
        self._rest, self._constants = rest, constants
        self._unmeasured = list_unmeasured(constants.evidence)
        self._sure, self._maybe = TopCandidates(keep), TopCandidates(keep)
        self._front, self._pareto = ParetoFront(), no_candidates()
        self.searched = self.estimated = 0

    def estimate_all(self, block: Block) -> None:
        """Estimate every candidate of a block."""
        for rows in _slices(block.rows, max(1, CANDIDATES_AT_ONCE // block.techniques.count)):
            jobs = self._combine(rows, block.techniques)
            memory, time = estimate_memory_totals(jobs, self._constants), estimate_step_time(jobs, self._constants)
            shape = block.techniques.count, len(rows["pp"])
            self.estimated += shape[0] * shape[1]
            total, fits, step, spread = (
                np.broadcast_to(column, jobs.shape).reshape(shape)
                for column in (memory.total, memory.fits, time.step, time.spread)
            )
            fits_host = np.broadcast_to(fits_in_host_memory(self._rest, jobs, memory), jobs.shape).reshape(shape)
            possible = (fits >= (MAYBE if self._none_fits else YES)) & (step <= self._slowest) & fits_host
            row, technique = np.nonzero(possible.T)
            if len(row):
                at = technique, row
                columns = {**_take(rows, row), **_take(block.techniques.columns, technique)}
                rated = RatedCandidates(columns, step[at], total[at])
                self._offer(rated, fits[at], handicap(columns, self._unmeasured, spread[at]))

    def _combine(self, rows: Columns, techniques: Techniques) -> Jobs:
        """Return the jobs of all combinations, [offloads, other techniques, rows].

        Each has an axis of its own, so that what depends on one of them is computed once. Rows come last because they
        are the most, and numpy is fast along a long last axis.
        """
        columns, share = techniques.spread_axes()
        rows_across = {name: column[None, None] for name, column in rows.items()}
        return candidates_to_jobs(self._rest, {**rows_across, **columns}, share)

    def estimate_within_bounds(self, blocks: Sequence[Block]) -> None:
        """Estimate the candidates that may be among the best or on the front, of blocks with the same bounds."""
        sizes = [len(block.rows["pp"]) for block in blocks]
        rows = {name: np.concatenate([block.rows[name] for block in blocks]) for name in LAYOUT_COLUMNS}
        block_of = np.repeat(np.arange(len(blocks)), sizes)
        for start in range(0, len(block_of), ROWS_AT_ONCE):
            part = _take(rows, np.arange(start, min(start + ROWS_AT_ONCE, len(block_of))))
            near, fastest, memory, fits = self._bound_rows(part, blocks[0].techniques)
            for number in np.unique(block_of[start + near]):
                of_block = np.flatnonzero(block_of[start + near] == number)
                promising = of_block[self._are_promising(fastest[of_block], memory[of_block], fits[of_block])]
                self.estimate_all(Block(_take(part, near[promising]), blocks[number].techniques))

    def _bound_rows(self, rows: Columns, techniques: Techniques) -> tuple[NDArray[np.intp], Column, Column, Column]:
        """Return (rows that may matter, least seconds of each, least bytes, best verdict on fitting)."""
        # The second bound is estimated only for the rows that the first one leaves. Until some candidate is known to
        # fit, time rules out nothing; after that it is the cheaper bound, and drops most rows.
        if self._none_fits:
            memory, fits = self._bound_memory(rows, techniques)
            near = np.flatnonzero(fits >= MAYBE)
            return near, self._bound_seconds(_take(rows, near), techniques), memory[near], fits[near]
        fastest = self._bound_seconds(rows, techniques)
        near = np.flatnonzero(fastest <= self._slowest)
        return near, fastest[near], *self._bound_memory(_take(rows, near), techniques)

    def _are_promising(self, fastest: Column, memory: Column, fits: Column) -> NDArray[np.bool_]:
        """Return which rows may be among the best or on the front, by their bounds."""
        sure = (fits == YES) & ((fastest <= self._sure.limit) | self._front.is_undominated(fastest, memory))
        maybe = (fits >= MAYBE) & (fastest <= self._maybe.limit)
        promising: NDArray[np.bool_] = sure | maybe if self._none_fits else sure
        return promising

    def _bound_seconds(self, rows: Columns, techniques: Techniques) -> Column:
        """Return each row's step time with its fastest technique, [n]."""
        fastest = np.full(len(rows["pp"]), math.inf)
        for number in _fastest_techniques(techniques) if len(fastest) else ():
            self.estimated += len(fastest)
            jobs = candidates_to_jobs(self._rest, _with_technique(rows, techniques, number), techniques.share[number])
            fastest = np.minimum(fastest, estimate_step_time(jobs, self._constants).step)
        return fastest

    @property
    def _none_fits(self) -> bool:
        """Whether no candidate is known to fit so far: only then do those matter that may fit."""
        return math.isinf(self._sure.quickest)

    @property
    def _slowest(self) -> float:
        """Return the step time beyond which no candidate matters, not even for the front."""
        return self._sure.quickest * FRONT_SLACK

    def _bound_memory(self, rows: Columns, techniques: Techniques) -> tuple[Column, Column]:
        """Return bounds of (least bytes with any technique, best verdict on fitting) of each row, [n]."""
        if not len(rows["pp"]):
            return np.empty(0), np.empty(0)
        lean = techniques.take(_leanest_techniques(techniques))
        memory = bound_memory_totals(self._combine(rows, lean), self._constants)
        return memory.total.min(axis=(0, 1)), memory.fits.max(axis=(0, 1))

    def _offer(self, rated: RatedCandidates, fits: Column, factor: Column) -> None:
        """Add estimated candidates to the best ones and to the front.

        factor: on step times when candidates are compared (evidence.handicap); the front has their own times.
        """
        compared = replace(rated, step=rated.step * factor)
        maybe, sure = (compared.take(np.flatnonzero(fits == kind)) for kind in (MAYBE, YES))
        self._maybe.offer(maybe.take(np.flatnonzero(maybe.step <= self._maybe.limit)))
        self._sure.offer(sure.take(np.flatnonzero(sure.step <= self._sure.limit)))
        sure = rated.take(np.flatnonzero(fits == YES))
        undominated = np.flatnonzero(self._front.is_undominated(sure.step, sure.memory))
        if len(undominated):
            combined = concatenate_rated([self._pareto, sure.take(undominated)])
            self._pareto = combined.take(self._front.update(combined.step, combined.memory))

    def result(self) -> SearchResult:
        """Return what was found, of at most FRONT_SLACK times the best step time.

        That time fell during the search. Slower candidates were estimated before it did, by chance: others of the same
        mesh may be better.
        """
        best, front = (
            found.take(np.flatnonzero(found.step <= self._slowest)) for found in (self._sure.ranked(), self._pareto)
        )
        doubtful = self._maybe.ranked() if self._none_fits else no_candidates()
        return SearchResult(best, doubtful, front, self.searched, self.estimated)


def _group_blocks(blocks: Iterable[Block]) -> Iterator[list[Block]]:
    """Yield the blocks in groups whose rows have the same bounding techniques, of about ROWS_AT_ONCE rows or more."""
    # Blocks of few rows are many. Numpy takes longer to be called for each of them than to compute the bounds.
    waiting: dict[bytes, list[Block]] = {}
    for block in blocks:
        group = waiting.setdefault(_identify_bounds(block.techniques), [])
        group.append(block)
        if sum(len(block.rows["pp"]) for block in group) >= ROWS_AT_ONCE:
            yield list(group)
            group.clear()
    yield from filter(None, waiting.values())


def _identify_bounds(techniques: Techniques) -> bytes:
    """Return the values of the techniques that bound a row's time and memory."""
    at = [*_fastest_techniques(techniques), -1, *_leanest_techniques(techniques)]
    return np.stack([*techniques.columns.values(), techniques.share])[:, at].tobytes()


def _fastest_techniques(techniques: Techniques) -> list[int]:
    """Return the techniques of which one is the fastest of every row.

    The first one recomputes and moves nothing. If all techniques move activations, recomputing a layer may be faster
    than moving its activations, so the one that recomputes all layers is tried too.
    """
    offload, moved = techniques.columns["offload"], techniques.columns["offload_activations"]
    return sorted({0, int(np.flatnonzero(offload == offload[0])[-1])}) if moved[0] else [0]


def _leanest_techniques(techniques: Techniques) -> list[int]:
    """Return the techniques of which one needs the least memory in every row.

    The last one recomputes and offloads everything. Among those that offload as much state these are the one that keeps
    all activations on the device, and the last that recomputes them there, because the inputs of a stage's only layer
    are stored once if they are not moved.
    """
    offload, moved = techniques.columns["offload"], techniques.columns["offload_activations"]
    most = np.flatnonzero(offload == offload[-1])
    stay = most[moved[most] == 0]
    return sorted({techniques.count - 1, int(most[0]), *(int(number) for number in stay[-1:])})


def _with_technique(rows: Columns, techniques: Techniques, number: int) -> Columns:
    """Add the columns of one technique to the rows."""
    return {**rows, **{name: techniques.columns[name][number] for name in TECHNIQUE_COLUMNS}}


def _take(columns: Columns, rows: NDArray[np.int64]) -> Columns:
    return {name: column[rows] for name, column in columns.items()}


def _slices(rows: Columns, most: int) -> Iterator[Columns]:
    for start in range(0, len(rows["pp"]), most):
        yield {name: column[start : start + most] for name, column in rows.items()}
