"""Familiar layouts, always shown beside the best: plain data parallelism, FSDP, HSDP, TP in the node x PP.

Each is searched separately, with recomputation, micro-batch and, for TP x PP, the number of stages left open. If none
of its variants fits, the one that needs the least memory is shown.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from hpc_train.planner.candidate import GIB, Candidate
from hpc_train.planner.constants import Constants
from hpc_train.planner.estimate import memory
from hpc_train.planner.jobs import SCHEDULES
from hpc_train.planner.kept import Rated
from hpc_train.planner.legal import divisors, tensor_degrees
from hpc_train.planner.search import ROWS, Rest, as_jobs, search
from hpc_train.planner.space import Columns, Fixed, Space, blocks
from hpc_train.planner.words import PART_WORDS, seconds

_PLAIN = {"offload": (0.0,), "offload_activations": (0.0,), "overlap_tensor": (0.0,)}
_DATA = {**_PLAIN, "pp": (1.0,), "cp": (1.0,), "tp": (1.0,)}


@dataclass(frozen=True)
class Kind:
    """One familiar layout, in a world of a given size."""

    name: str
    allowed: dict[str, tuple[float, ...]]
    """Column -> allowed values."""
    impossible: str | None = None
    """Why the layout does not exist here."""


@dataclass(frozen=True)
class Familiar:
    """One familiar layout, compared with the best."""

    name: str
    candidate: Candidate | None
    """None: the layout does not exist."""
    why: str
    """Why it is not the best, in a few words, or that it is."""


def kinds(space: Space, per_node: int) -> list[Kind]:
    """Return all familiar layouts; per_node: ranks of a node."""
    world, shape = space.world, space.shape
    across = [float(n) for n in divisors(world) if 1 < n < world]
    batch = None
    if shape.global_batch % world:
        batch = f"a batch of {shape.global_batch:,} does not divide over {world:,} data-parallel ranks"
    ddp = None if shape.ddp_reduces else "precision.reduce is none that DistributedDataParallel has"
    found = [
        Kind("plain dp", {**_DATA, "zero": (0.0,), "dp_shard": (1.0,)}, batch or ddp),
        Kind("FSDP", {**_DATA, "zero": (3.0,), "dp_shard": (float(world),)}, batch),
    ]
    if world > per_node:
        found.append(Kind("HSDP", {**_DATA, "zero": (3.0,), "dp_shard": tuple(across)}, batch))
    inside = [n for n in tensor_degrees(shape, math.gcd(world, per_node)) if 1 < n <= per_node]
    stages = [float(n) for n in divisors(world) if 1 < n <= shape.layers]
    if inside:
        stages = [n for n in stages if world % (n * inside[-1]) == 0] or [1.0]
        tensor = {"tp": (float(inside[-1]),), "pp": tuple(stages), "cp": (1.0,), "zero": (0.0, 1.0)}
        schedules = tuple(float(SCHEDULES.index(name)) for name in ("1f1b", "interleaved_1f1b"))
        name = "TP in the node x PP" if stages[-1] > 1 else "TP in the node"
        found.append(Kind(name, {**_PLAIN, **tensor, "schedule": schedules}))
    elif per_node > 1:
        why = f"no tp up to {per_node} divides {shape.heads} heads and feed-forward width {shape.feed_forward}"
        found.append(Kind("TP in the node x PP", {}, why))
    return found


def restricted(space: Space, kind: Kind) -> Space | None:
    """Restrict the given search to the variants of one layout; None: none are left."""
    values = dict(space.fixed.values)
    for name, allowed in kind.allowed.items():
        both = space.fixed.of(name, allowed)
        if not both:
            return None
        values[name] = both
    return Space(space.shape, space.world, Fixed(values))


def best_of(rest: Rest, space: Space, constants: Constants) -> Rated:
    """Return the best variant that fits, or may fit, else the one that needs the least memory; empty: there is none."""
    found = search(rest, space, constants, keep=1)
    rated = found.best if found.best.count else found.doubtful
    return rated if rated.count else _leanest(rest, space, constants)


def _leanest(rest: Rest, space: Space, constants: Constants) -> Rated:
    best: tuple[float, Columns] | None = None
    for block in blocks(space, ROWS):
        down = {name: column[:, None] for name, column in block.rows.items()}
        jobs = as_jobs(rest, {**down, **block.techniques.columns}, block.techniques.share)
        total = np.broadcast_to(memory(jobs, constants).total, (len(block.rows["pp"]), block.techniques.count))
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
    nothing = Rated({}, np.empty(0), np.empty(0))
    return nothing if best is None else Rated(best[1], np.array([math.inf]), np.array([best[0]]))


def compare(best: Candidate | None, candidate: Candidate, alike: bool) -> str:
    """Say in a few words why a familiar layout is not the best; alike: it is equal to the best."""
    if best and candidate.settings == best.settings:
        return "recommended"
    if candidate.fits in ("no", "maybe"):
        part = max(candidate.memory, key=lambda name: max(candidate.memory[name]))
        sure = "may not fit" if candidate.fits == "maybe" else "does not fit"
        return f"{sure}, {max(candidate.memory[part]) / GIB:,.1f} GiB are {part}"
    if candidate.step is None or candidate.parts is None or best is None or best.step is None or best.parts is None:
        return ""
    if alike:
        return "equal, and less simple"
    ratio = candidate.step.p50 / best.step.p50 - 1
    if ratio <= 0:
        return "quicker, but not the best by what was asked for"
    parts = best.parts
    part = max(candidate.parts, key=lambda name: (candidate.parts or {})[name] - parts[name])
    more = candidate.parts[part] - parts[part]
    redone = candidate.hfu is not None and candidate.mfu is not None and candidate.hfu > 1.02 * candidate.mfu
    word = "recomputation" if part == "compute" and redone else PART_WORDS.get(part, part)
    return f"slower, {word} +{seconds(more)}"
