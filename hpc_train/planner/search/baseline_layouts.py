"""Baseline layouts to compare the best one with, and fallbacks for machines of unknown speed.

Baselines are plain data parallelism, FSDP, HSDP, and tensor parallelism in the node x pipeline; each is searched for
its best variant, and the table says why it is not the best. If the accelerator's speed is unknown, nothing can be
searched: then data-parallel settings are tried, the simplest first.
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
from hpc_train.planner.model.inputs import SCHEDULES
from hpc_train.planner.model.memory import estimate_memory_totals
from hpc_train.planner.search.degree_limits import list_divisors, list_tensor_degrees
from hpc_train.planner.search.search import ROWS_AT_ONCE, SearchBase, candidates_to_jobs, search_space
from hpc_train.planner.search.space import Columns, FixedColumns, SearchSpace, iterate_blocks
from hpc_train.planner.search.top_candidates import RatedCandidates
from hpc_train.planner.settings import Settings, apply_settings
from hpc_train.units import GIB, format_seconds

_NO_OFFLOAD = {"offload": (0.0,), "offload_activations": (0.0,), "overlap_tensor": (0.0,)}
_DATA_PARALLEL = {**_NO_OFFLOAD, "pp": (1.0,), "cp": (1.0,), "tp": (1.0,)}


@dataclass(frozen=True)
class BaselineKind:
    """One kind of baseline, in a world of a given size."""

    name: str
    allowed: dict[str, tuple[float, ...]]
    """Allowed values by column."""
    impossible: str | None = None
    """Why no such layout exists in this world; None: it does."""


@dataclass(frozen=True)
class BaselineLayout:
    """The best variant of one baseline, compared with the best layout."""

    name: str
    candidate: Candidate | None
    """None: no such layout exists."""
    why: str
    """Why it is not the best, in a few words, or "recommended"."""


def baseline_kinds(space: SearchSpace, per_node: int) -> list[BaselineKind]:
    """List the kinds of baselines for a search space. per_node: ranks on a node."""
    world, shape = space.world, space.shape
    across = [float(n) for n in list_divisors(world) if 1 < n < world]
    # The first three kinds have samples of their own on every rank, so the batch must divide over all of them.
    batch = None
    if shape.global_batch % world:
        batch = f"a batch of {shape.global_batch:,} does not divide over {world:,} data-parallel ranks"
    ddp = None if shape.ddp_reduces else "DistributedDataParallel cannot reduce in precision.reduce"
    ddp = "it has nothing to gather in 8 bits" if shape.float8_gather else ddp
    kinds = [
        BaselineKind("plain dp", {"ep": (1.0,), **_DATA_PARALLEL, "zero": (0.0,), "dp_shard": (1.0,)}, batch or ddp),
        BaselineKind("FSDP", {**_DATA_PARALLEL, "zero": (3.0,), "dp_shard": (float(world),)}, batch),
    ]
    if world > per_node:
        kinds.append(BaselineKind("HSDP", {**_DATA_PARALLEL, "zero": (3.0,), "dp_shard": tuple(across)}, batch))
    inside = [n for n in list_tensor_degrees(shape, math.gcd(world, per_node)) if 1 < n <= per_node]
    stages = [float(n) for n in list_divisors(world) if 1 < n <= shape.layers]
    if inside:
        # As people do it by hand: the largest tp that a node has, and stages over what is left.
        stages = [n for n in stages if world % (n * inside[-1]) == 0] or [1.0]
        tensor = {"tp": (float(inside[-1]),), "pp": tuple(stages), "cp": (1.0,), "zero": (0.0, 1.0)}
        schedules = tuple(float(SCHEDULES.index(name)) for name in ("1f1b", "interleaved_1f1b"))
        name = "TP in the node x PP" if stages[-1] > 1 else "TP in the node"
        kinds.append(BaselineKind(name, {**_NO_OFFLOAD, **tensor, "schedule": schedules}))
    elif per_node > 1:
        why = f"no tp up to {per_node} divides {shape.heads} heads and feed-forward width {shape.feed_forward}"
        kinds.append(BaselineKind("TP in the node x PP", {}, why))
    return kinds


def restrict_space(space: SearchSpace, kind: BaselineKind) -> SearchSpace | None:
    """Restrict a search space to the variants of one baseline; None: none is allowed."""
    values = dict(space.fixed.values)
    for name, allowed in kind.allowed.items():
        remaining = space.fixed.of(name, allowed)
        if not remaining:
            return None
        values[name] = remaining
    return SearchSpace(space.shape, space.world, FixedColumns(values))


def find_best_variant(rest: SearchBase, space: SearchSpace, constants: Constants) -> RatedCandidates:
    """Return the fastest variant that fits or may fit, else the one that needs the least memory; empty: none exists."""
    result = search_space(rest, space, constants, keep=1)
    rated = result.best if result.best.count else result.doubtful
    return rated if rated.count else _find_leanest(rest, space, constants)


def _find_leanest(rest: SearchBase, space: SearchSpace, constants: Constants) -> RatedCandidates:
    """Return the candidate that needs the least memory; its step time is infinite."""
    best: tuple[float, Columns] | None = None
    for block in iterate_blocks(space, ROWS_AT_ONCE):
        rows_down = {name: column[:, None] for name, column in block.rows.items()}
        jobs = candidates_to_jobs(rest, {**rows_down, **block.techniques.columns}, block.techniques.share)
        shape = len(block.rows["pp"]), block.techniques.count
        total = np.broadcast_to(estimate_memory_totals(jobs, constants).total, shape)
        row, technique = np.unravel_index(int(np.argmin(total)), total.shape)
        if best is None or total[row, technique] < best[0]:
            layout = {name: column[[row]] for name, column in block.rows.items()}
            best = (
                float(total[row, technique]),
                {
                    **layout,
                    **{name: column[[technique]] for name, column in block.techniques.columns.items()},
                },
            )
    none_found = RatedCandidates({}, np.empty(0), np.empty(0))
    return none_found if best is None else RatedCandidates(best[1], np.array([math.inf]), np.array([best[0]]))


def explain_why_not_best(best: Candidate | None, candidate: Candidate, equals_best: bool) -> str:
    """Return in a few words why a baseline is not the best. equals_best: it is as good as the best within tolerance."""
    if best and candidate.settings == best.settings:
        return "recommended"
    if candidate.fits in ("no", "maybe"):
        part = max(candidate.memory, key=lambda name: max(candidate.memory[name]))
        verdict = "may not fit" if candidate.fits == "maybe" else "does not fit"
        return f"{verdict}: {part} {max(candidate.memory[part]) / GIB:,.1f} GiB"
    if candidate.step is None or candidate.parts is None or best is None or best.step is None or best.parts is None:
        return ""
    if equals_best:
        return "as fast, but more complex"
    ratio = candidate.step.p50 / best.step.p50 - 1
    if ratio <= 0:
        return "faster, but not the best by the chosen goal"
    parts = best.parts
    part = max(candidate.parts, key=lambda name: (candidate.parts or {})[name] - parts[name])
    more = candidate.parts[part] - parts[part]
    recomputes = candidate.hfu is not None and candidate.mfu is not None and candidate.hfu > 1.02 * candidate.mfu
    word = "recomputation" if part == "compute" and recomputes else PART_LABELS.get(part, part)
    return f"slower: {word} +{format_seconds(more)}"


_FALLBACKS: tuple[Settings, ...] = (
    {"parallel.strategy": "ddp"},
    {"parallel.strategy": "zero1"},
    {"parallel.strategy": "zero2"},
    {"parallel.strategy": "zero3"},
    {"parallel.strategy": "zero3", "parallel.recompute.mode": "full"},
)
"""Simplest first; each needs less memory than the one before."""


def fallback_settings(config: RunConfig, ranks: int) -> Iterator[Settings]:
    """Yield the fallback settings that the run supports, simplest first, without changing what the run fixes.

    Raises the run's own UserError if none is supported.
    """
    fixed, first = set(config.parallel.fixed or ()), None
    supported = False
    for fallback in _FALLBACKS:
        settings = {key: value for key, value in fallback.items() if key not in fixed}
        try:
            check_support(apply_settings(config, settings), ranks)
        except UserError as error:
            first = first or error
            continue
        supported = True
        yield settings
    if not supported and first is not None:
        raise first
