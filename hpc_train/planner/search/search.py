"""search: the best candidates of a space, and its Pareto front, exactly, without estimating most of it.

Branch and bound over rows (a layout, a schedule and a micro-batch): the quickest technique of a row bounds the time of
all of them from below, and the leanest two bound their memory. What can neither be among the best nor on the front is
left out. `exhaustive` estimates everything instead, and finds the same; a test compares them.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from hpc_train.planner.constants import Constants
from hpc_train.planner.model.jobs import SCHEDULES, Column, Jobs, replace_columns
from hpc_train.planner.model.memory import MAYBE, YES, Memory, estimate_memory
from hpc_train.planner.model.step_time import estimate_step_time
from hpc_train.planner.search.space import (
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

FRONT_SLACK = 2.0
"""The Pareto front goes as far as this many times the step time of the best; slower ones nobody would take."""
HOST_SHARE = 0.8
"""Of a node's memory, that offloaded state can have; the rest is the system's, the data's and the checkpoint's."""
ROWS_AT_ONCE = 1 << 15
"""Candidates estimated at a time: their columns stay in the cache of a core."""


@dataclass(frozen=True)
class SearchResult:
    """Candidates that a search found."""

    best: RatedCandidates
    """Those that fit for sure, one a mesh."""
    doubtful: RatedCandidates
    """Those that may fit, one a mesh."""
    front: RatedCandidates
    """Of those that fit for sure: no other has both less time and less memory."""
    searched: int
    """Candidates of the space."""
    estimated: int
    """Of which not left out by a bound."""


@dataclass(frozen=True)
class SearchBase:
    """Properties that all candidates of a search share."""

    base: Jobs
    """One job, whose other columns are those of all candidates."""
    reduce_bytes: float = 0.0
    """Of a gradient where fully_shard reduces it; 0: as in base."""
    host_bytes: float = 0.0
    """Memory of a node, of which what is offloaded can have HOST_SHARE; 0: unknown, and taken to be enough."""


def search_space(
    rest: SearchBase, space: SearchSpace, constants: Constants, keep: int = 20, exhaustive: bool = False
) -> SearchResult:
    """The best candidate of each of the `keep` best meshes of a space."""
    one = _Search(rest, constants, keep)
    if not exhaustive:
        for block in iterate_blocks(_coarse(space)):
            one.bounded(block)
        one.searched = 0
    for block in iterate_blocks(space, ROWS_AT_ONCE if exhaustive else ROWS_AT_ONCE << 5):
        one.searched += block.count
        if exhaustive:
            one.whole(block)
        else:
            one.bounded(block)
    return one.found()


def _coarse(space: SearchSpace) -> SearchSpace:
    """A small part of the space, in which good candidates are: what they take bounds the search of the whole."""
    tried = {
        "schedule": tuple(float(SCHEDULES.index(name)) for name in ("1f1b", "interleaved_1f1b")),
        "overlap_tensor": (0.0,),
        "sequence_parallel": (1.0,),
        "reshard": (1.0,),
        "recompute_every": (1.0,),
        "virtual_stages": (1.0, 2.0, 4.0),
        "micro_batch": (1.0, 2.0, 4.0, 8.0),
        "offload": (0.0,),
        "cp": (1.0, 2.0, 4.0),
    }
    own = space.fixed.values
    both = {name: tuple(v for v in values if v in own.get(name, values)) for name, values in tried.items()}
    return replace(space, fixed=FixedColumns({**own, **{name: it for name, it in both.items() if it}}))


def candidates_to_jobs(rest: SearchBase, columns: Columns, share: Column) -> Jobs:
    """Candidates as jobs; share: of the layers of a stage that are recomputed."""
    own: dict[str, Column] = {name: it for name, it in columns.items() if name != "recompute_every"}
    if rest.reduce_bytes:
        whole = (columns["zero"] == 0) & (columns["tp"] == 1) & (columns["pp"] == 1)
        own["reduce_bytes"] = np.where(whole, rest.base.weight_bytes, rest.reduce_bytes)
    return replace_columns(rest.base, **own, recompute_share=share)


def fits_in_host_memory(rest: SearchBase, jobs: Jobs, held: Memory) -> NDArray[np.bool_]:
    """Whether a node's memory has room for what its ranks offload."""
    if not rest.host_bytes:
        return np.ones((), np.bool_)
    enough: NDArray[np.bool_] = held.host * np.minimum(jobs.gpus_per_node, jobs.world) <= HOST_SHARE * rest.host_bytes
    return enough


class _Search:
    """The state of one search."""

    def __init__(self, rest: SearchBase, constants: Constants, keep: int) -> None:
        self._rest, self._constants = rest, constants
        self._sure, self._maybe = TopCandidates(keep), TopCandidates(keep)
        self._front, self._pareto = ParetoFront(), no_candidates()
        self.searched = self.estimated = 0

    def whole(self, block: Block) -> None:
        """Estimate every candidate: rows down, techniques across, so that what rows alone decide is computed once."""
        for rows in _slices(block.rows, max(1, ROWS_AT_ONCE // block.techniques.count)):
            down = {name: it[:, None] for name, it in rows.items()}
            jobs = candidates_to_jobs(self._rest, {**down, **block.techniques.columns}, block.techniques.share)
            held, step = estimate_memory(jobs, self._constants), estimate_step_time(jobs, self._constants).step
            shape = len(rows["pp"]), block.techniques.count
            self.estimated += shape[0] * shape[1]
            total, fits, step = (np.broadcast_to(it, shape) for it in (held.total, held.fits, step))
            held_by_host = np.broadcast_to(fits_in_host_memory(self._rest, jobs, held), shape)
            row, technique = np.nonzero((fits >= MAYBE) & (step <= self._slowest) & held_by_host)
            if len(row):
                columns = {**_at(rows, row), **_at(block.techniques.columns, technique)}
                self._offer(RatedCandidates(columns, step[row, technique], total[row, technique]), fits[row, technique])

    def bounded(self, block: Block) -> None:
        """Estimate those that may be among the best or on the front."""
        for rows in _slices(block.rows, ROWS_AT_ONCE):
            fastest = self._fastest(rows, block.techniques)
            near = np.flatnonzero(fastest <= self._slowest)
            rows, fastest = _at(rows, near), fastest[near]
            held, fits = self._leanest(rows, block.techniques)
            sure = (fits == YES) & ((fastest <= self._sure.limit) | self._front.free(fastest, held))
            worth = sure | ((fits >= MAYBE) & (fastest <= self._maybe.limit))
            self.whole(Block(_at(rows, np.flatnonzero(worth)), block.techniques))

    def _fastest(self, rows: Columns, techniques: Techniques) -> Column:
        """[n] step time with the quickest technique."""
        found = np.full(len(rows["pp"]), math.inf)
        for number in _quick(techniques):
            self.estimated += len(found)
            jobs = candidates_to_jobs(self._rest, _with(rows, techniques, number), techniques.share[number])
            found = np.minimum(found, estimate_step_time(jobs, self._constants).step)
        return found

    @property
    def _slowest(self) -> float:
        """Slower ones are of no interest at all."""
        return self._sure.quickest * FRONT_SLACK

    def _leanest(self, rows: Columns, techniques: Techniques) -> tuple[Column, Column]:
        """(least bytes of any technique, best chance to fit), [n]."""
        held, fits = np.full(len(rows["pp"]), math.inf), np.zeros(len(rows["pp"]))
        for number in _lean(techniques):
            jobs = candidates_to_jobs(self._rest, _with(rows, techniques, number), techniques.share[number])
            found = estimate_memory(jobs, self._constants)
            held, fits = np.minimum(held, found.total), np.maximum(fits, found.fits)
        return held, fits

    def _offer(self, rated: RatedCandidates, fits: Column) -> None:
        maybe, sure = (rated.take(np.flatnonzero(fits == kind)) for kind in (MAYBE, YES))
        self._maybe.offer(maybe.take(np.flatnonzero(maybe.step <= self._maybe.limit)))
        self._sure.offer(sure.take(np.flatnonzero(sure.step <= self._sure.limit)))
        free = np.flatnonzero(self._front.free(sure.step, sure.memory))
        if len(free):
            both = concatenate_rated([self._pareto, sure.take(free)])
            self._pareto = both.take(self._front.of(both.step, both.memory))

    def found(self) -> SearchResult:
        """The result. How far the front goes, and what may fit is worth, the best of all decides."""
        front = self._pareto.take(np.flatnonzero(self._pareto.step <= self._slowest))
        maybe = self._maybe.ranked()
        maybe = maybe.take(np.flatnonzero(maybe.step <= self._slowest))
        return SearchResult(self._sure.ranked(), maybe, front, self.searched, self.estimated)


def _quick(techniques: Techniques) -> list[int]:
    """The first, which recomputes and moves nothing. Where all move activations, recomputing them may take less than
    moving them: each layer the one or the other, so all layers one of the two."""
    offload, moved = techniques.columns["offload"], techniques.columns["offload_activations"]
    return sorted({0, int(np.flatnonzero(offload == offload[0])[-1])}) if moved[0] else [0]


def _lean(techniques: Techniques) -> list[int]:
    """The last has everything recomputed and offloaded; of others with as much of the state offloaded, the one that
    keeps all activations on the device, and the last that recomputes them there: inputs of a stage's only layer are
    kept once where they are not moved."""
    offload, moved = techniques.columns["offload"], techniques.columns["offload_activations"]
    most = np.flatnonzero(offload == offload[-1])
    stay = most[moved[most] == 0]
    return sorted({techniques.count - 1, int(most[0]), *(int(it) for it in stay[-1:])})


def _with(rows: Columns, techniques: Techniques, number: int) -> Columns:
    """Rows with one technique."""
    return {**rows, **{name: techniques.columns[name][number] for name in TECHNIQUE_COLUMNS}}


def _at(columns: Columns, rows: NDArray[np.int64]) -> Columns:
    return {name: it[rows] for name, it in columns.items()}


def _slices(rows: Columns, most: int) -> Iterator[Columns]:
    for start in range(0, len(rows["pp"]), most):
        yield {name: it[start : start + most] for name, it in rows.items()}
