"""Layouts that everybody knows: shown beside the best, with the reason why they are not; and what is tried blindly.

Familiar ones are plain data parallelism, FSDP, HSDP, and TP in the node x PP, each searched for its best variant. Where
the accelerator's speed is unknown nothing can be searched for: then data parallelism is tried, the simplest first.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from hpc_train.config.run import RunConfig
from hpc_train.errors import UserError
from hpc_train.parallel.rules.check import check_support
from hpc_train.planner.candidate import Candidate
from hpc_train.planner.candidate_text import PART_LABELS
from hpc_train.planner.constants import Constants
from hpc_train.planner.model.jobs import SCHEDULES
from hpc_train.planner.model.memory import estimate_memory
from hpc_train.planner.search.search import ROWS_AT_ONCE, SearchBase, candidates_to_jobs, search_space
from hpc_train.planner.search.space import (
    Columns,
    FixedColumns,
    SearchSpace,
    iterate_blocks,
    list_divisors,
    tensor_degrees,
)
from hpc_train.planner.search.top_candidates import RatedCandidates
from hpc_train.planner.settings import Settings, apply_settings
from hpc_train.units import GIB, format_seconds

_PLAIN = {"offload": (0.0,), "offload_activations": (0.0,), "overlap_tensor": (0.0,)}
_DATA = {**_PLAIN, "pp": (1.0,), "cp": (1.0,), "tp": (1.0,)}


@dataclass(frozen=True)
class BaselineKind:
    """One familiar layout, in a world of a given size."""

    name: str
    allowed: dict[str, tuple[float, ...]]
    """Column -> allowed values."""
    impossible: str | None = None
    """Why the layout does not exist here."""


@dataclass(frozen=True)
class BaselineLayout:
    """One familiar layout, compared with the best."""

    name: str
    candidate: Candidate | None
    """None: the layout does not exist."""
    why: str
    """Why it is not the best, in a few words, or that it is."""


def baseline_kinds(space: SearchSpace, per_node: int) -> list[BaselineKind]:
    """Return all familiar layouts; per_node: ranks of a node."""
    world, shape = space.world, space.shape
    across = [float(n) for n in list_divisors(world) if 1 < n < world]
    batch = None
    if shape.global_batch % world:
        batch = f"a batch of {shape.global_batch:,} does not divide over {world:,} data-parallel ranks"
    ddp = None if shape.ddp_reduces else "precision.reduce is none that DistributedDataParallel has"
    found = [
        BaselineKind("plain dp", {**_DATA, "zero": (0.0,), "dp_shard": (1.0,)}, batch or ddp),
        BaselineKind("FSDP", {**_DATA, "zero": (3.0,), "dp_shard": (float(world),)}, batch),
    ]
    if world > per_node:
        found.append(BaselineKind("HSDP", {**_DATA, "zero": (3.0,), "dp_shard": tuple(across)}, batch))
    inside = [n for n in tensor_degrees(shape, math.gcd(world, per_node)) if 1 < n <= per_node]
    stages = [float(n) for n in list_divisors(world) if 1 < n <= shape.layers]
    if inside:
        stages = [n for n in stages if world % (n * inside[-1]) == 0] or [1.0]
        tensor = {"tp": (float(inside[-1]),), "pp": tuple(stages), "cp": (1.0,), "zero": (0.0, 1.0)}
        schedules = tuple(float(SCHEDULES.index(name)) for name in ("1f1b", "interleaved_1f1b"))
        name = "TP in the node x PP" if stages[-1] > 1 else "TP in the node"
        found.append(BaselineKind(name, {**_PLAIN, **tensor, "schedule": schedules}))
    elif per_node > 1:
        why = f"no tp up to {per_node} divides {shape.heads} heads and feed-forward width {shape.feed_forward}"
        found.append(BaselineKind("TP in the node x PP", {}, why))
    return found


def restrict_space(space: SearchSpace, kind: BaselineKind) -> SearchSpace | None:
    """Restrict the given search to the variants of one layout; None: none are left."""
    values = dict(space.fixed.values)
    for name, allowed in kind.allowed.items():
        both = space.fixed.of(name, allowed)
        if not both:
            return None
        values[name] = both
    return SearchSpace(space.shape, space.world, FixedColumns(values))


def find_best_variant(rest: SearchBase, space: SearchSpace, constants: Constants) -> RatedCandidates:
    """Return the best variant that fits, or may fit, else the one that needs the least memory; empty: there is none."""
    found = search_space(rest, space, constants, keep=1)
    rated = found.best if found.best.count else found.doubtful
    return rated if rated.count else _leanest(rest, space, constants)


def _leanest(rest: SearchBase, space: SearchSpace, constants: Constants) -> RatedCandidates:
    best: tuple[float, Columns] | None = None
    for block in iterate_blocks(space, ROWS_AT_ONCE):
        down = {name: column[:, None] for name, column in block.rows.items()}
        jobs = candidates_to_jobs(rest, {**down, **block.techniques.columns}, block.techniques.share)
        total = np.broadcast_to(estimate_memory(jobs, constants).total, (len(block.rows["pp"]), block.techniques.count))
        row, technique = np.unravel_index(int(np.argmin(total)), total.shape)
        if best is None or total[row, technique] < best[0]:
            own = {name: column[[row]] for name, column in block.rows.items()}
            best = (
                float(total[row, technique]),
                {
                    **own,
                    **{name: column[[technique]] for name, column in block.techniques.columns.items()},
                },
            )
    nothing = RatedCandidates({}, np.empty(0), np.empty(0))
    return nothing if best is None else RatedCandidates(best[1], np.array([math.inf]), np.array([best[0]]))


def explain_why_not_best(best: Candidate | None, candidate: Candidate, equals_best: bool) -> str:
    """Say in a few words why a familiar layout is not the best. equals_best: no estimate tells them apart."""
    if best and candidate.settings == best.settings:
        return "recommended"
    if candidate.fits in ("no", "maybe"):
        part = max(candidate.memory, key=lambda name: max(candidate.memory[name]))
        sure = "may not fit" if candidate.fits == "maybe" else "does not fit"
        return f"{sure}, {max(candidate.memory[part]) / GIB:,.1f} GiB are {part}"
    if candidate.step is None or candidate.parts is None or best is None or best.step is None or best.parts is None:
        return ""
    if equals_best:
        return "equal, and less simple"
    ratio = candidate.step.p50 / best.step.p50 - 1
    if ratio <= 0:
        return "quicker, but not the best by what was asked for"
    parts = best.parts
    part = max(candidate.parts, key=lambda name: (candidate.parts or {})[name] - parts[name])
    more = candidate.parts[part] - parts[part]
    redone = candidate.hfu is not None and candidate.mfu is not None and candidate.hfu > 1.02 * candidate.mfu
    word = "recomputation" if part == "compute" and redone else PART_LABELS.get(part, part)
    return f"slower, {word} +{format_seconds(more)}"


_LADDER: tuple[Settings, ...] = (
    {"parallel.strategy": "ddp"},
    {"parallel.strategy": "zero1"},
    {"parallel.strategy": "zero2"},
    {"parallel.strategy": "zero3"},
    {"parallel.strategy": "zero3", "parallel.recompute.mode": "full"},
)
"""Each needs less memory than the one before."""


def fallback_settings(config: RunConfig, ranks: int) -> Iterator[Settings]:
    """Yield the settings of the ladder that the run supports, with what it fixes as it is.

    Raises UserError, as the run itself would, if it can have none.
    """
    fixed, first = set(config.parallel.fixed or ()), None
    found = False
    for step in _LADDER:
        settings = {key: value for key, value in step.items() if key not in fixed}
        try:
            check_support(apply_settings(config, settings), ranks)
        except UserError as error:
            first = first or error
            continue
        found = True
        yield settings
    if not found and first is not None:
        raise first
