"""The space of candidates: every layout and technique that this toolkit can run a model with, in blocks of columns.

The rules are those of parallel/support and schedules/requirements, said once more for whole columns; a test asks both
about every candidate of small spaces.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import product

import numpy as np

from hpc_train.planner.jobs import OFFLOAD, RECOMPUTE, SCHEDULES, Column
from hpc_train.planner.layouts import Layout, layouts
from hpc_train.planner.legal import Shape, divisors
from hpc_train.schedules.requirements import REQUIREMENTS, Requirements

Columns = dict[str, Column]
OUTER = (
    *("pp", "dp_replicate", "dp_shard", "cp", "ulysses", "tp", "zero", "reshard", "sequence_parallel"),
    *("overlap_tensor", "virtual_stages", "schedule", "micro_batch"),
)
"""Columns of a row of a block, in the order in which rows are enumerated: the plain ways first."""
INNER = ("recompute", "recompute_every", "offload_activations", "offload")
EVERY = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32)
"""Recomputation of every k-th block: the numbers k that are tried."""


@dataclass(frozen=True)
class Fixed:
    """Column -> the values it may have; a column that is not named may have all."""

    values: Mapping[str, tuple[float, ...]] = field(default_factory=dict)

    def of(self, name: str, among: Sequence[float]) -> tuple[float, ...]:
        """Those of `among` that are allowed, in their order."""
        allowed = self.values.get(name)
        return tuple(among) if allowed is None else tuple(value for value in among if value in allowed)

    def unless(self, name: str, value: float) -> Fixed:
        """The same with this value, where nothing is said of the column."""
        return Fixed({name: (value,), **self.values})


@dataclass(frozen=True)
class Space:
    """All candidates of one model, world size and global batch."""

    shape: Shape
    world: int
    fixed: Fixed = Fixed()


@dataclass(frozen=True)
class Techniques:
    """What does not change how a rank's work is laid out: recomputation and offload. Columns of INNER, [k]."""

    columns: Columns
    share: Column
    """[k]: of the blocks of a stage that are recomputed."""

    @property
    def count(self) -> int:
        return len(self.share)


@dataclass(frozen=True)
class Block:
    """Every row together with every technique: rows x techniques candidates, all of them legal."""

    rows: Columns
    """Columns of OUTER, [n]."""
    techniques: Techniques

    @property
    def count(self) -> int:
        return len(self.rows["pp"]) * self.techniques.count


@dataclass(frozen=True)
class _Kind:
    """What decides which techniques there are."""

    blocks: int
    """Of the model in one stage, rounded up."""
    sharded: bool
    asynchronous: bool
    split: bool
    """The schedule splits backward."""


def blocks(space: Space, candidates: int = 1 << 16) -> Iterator[Block]:
    """The whole space, about `candidates` at a time, so that memory stays bounded whatever its size."""
    waiting: dict[_Kind, list[Columns]] = {}
    rows: dict[_Kind, int] = {}
    techniques: dict[_Kind, Techniques] = {}
    for kind, part in _parts(space):
        if kind not in techniques:
            techniques[kind] = _techniques(space, kind)
        most = max(1, candidates // max(1, techniques[kind].count))
        waiting.setdefault(kind, []).append(part)
        rows[kind] = rows.get(kind, 0) + len(part["pp"])
        if rows[kind] >= most:
            yield from _cut(waiting.pop(kind), techniques[kind], most)
            rows[kind] = 0
    for kind, parts in waiting.items():
        if techniques[kind].count:
            yield from _cut(parts, techniques[kind], max(1, candidates // techniques[kind].count))


def _cut(parts: list[Columns], techniques: Techniques, most: int) -> Iterator[Block]:
    if techniques.count == 0:
        return
    whole = {name: np.concatenate([part[name] for part in parts]) for name in OUTER}
    for start in range(0, len(whole["pp"]), most):
        yield Block({name: it[start : start + most] for name, it in whole.items()}, techniques)


def _parts(space: Space) -> Iterator[tuple[_Kind, Columns]]:
    """Rows of one kind: the layouts of a (pp, dp), times its (schedule, micro-batch) of one number of stages."""
    shape = space.shape
    for pp in space.fixed.of("pp", [n for n in divisors(space.world) if n <= shape.layers]):
        found = layouts(space, int(pp))
        for dp in sorted({it.dp_replicate * it.dp_shard for it in found}):
            same = [it for it in found if it.dp_replicate * it.dp_shard == dp]
            kinds = _by_kind(same)
            for virtual, split, middle in _middles(space, int(pp), shape.global_batch // dp):
                for (sharded, asynchronous), group in kinds.items():
                    if asynchronous and split:
                        continue
                    kind = _Kind(-(-shape.layers // (int(pp) * virtual)), sharded, asynchronous, split)
                    yield kind, _product(int(pp), group, virtual, middle)


def _by_kind(found: Sequence[Layout]) -> dict[tuple[bool, bool], Column]:
    """(zero strategy, asynchronous) -> [columns of a layout, layouts]."""
    kinds: dict[tuple[bool, bool], list[tuple[int, ...]]] = {}
    for layout in found:
        kinds.setdefault((layout.zero > 0, bool(layout.overlap_tensor)), []).append(layout.values)
    return {kind: np.array(group, np.float64).T for kind, group in kinds.items()}


Pairs = list[tuple[int, int]]
"""(code of a schedule, micro-batch)."""


def _middles(space: Space, pp: int, rows: int) -> Iterator[tuple[int, bool, Pairs]]:
    """(virtual stages, whether backward is split, pairs); rows: sequences of a data-parallel rank."""
    shape, fixed = space.shape, space.fixed
    sizes = [int(size) for size in fixed.of("micro_batch", divisors(rows, fixed.values.get("micro_batch")))]
    codes = [int(code) for code in fixed.of("schedule", _schedule_codes(pp))]
    kinds: dict[tuple[int, bool], Pairs] = {}
    for code in codes:
        needs = REQUIREMENTS[SCHEDULES[code]]
        split = pp > 1 and needs.splits_backward
        if split and not shape.split_backward:
            continue
        for virtual in fixed.of("virtual_stages", _virtual_stages(shape.layers, pp, needs)):
            legal = [(code, size) for size in sizes if _runs(needs, pp, -(-rows // size))]
            kinds.setdefault((int(virtual), split), []).extend(legal)
    for (virtual, split), pairs in kinds.items():
        if pairs:
            yield virtual, split, pairs


def _schedule_codes(pp: int) -> list[int]:
    """Without a pipeline there is the default only."""
    first = SCHEDULES.index("1f1b")
    return [first] if pp == 1 else [first, *(SCHEDULES.index(name) for name in REQUIREMENTS if name != "1f1b")]


def _virtual_stages(layers: int, pp: int, needs: Requirements) -> list[int]:
    """Those that leave stages of equal size, and powers of two."""
    if pp == 1:
        return [1]
    most = min(layers // pp, needs.most_virtual or layers)
    found = range(needs.least_virtual, most + 1)
    return [n for n in found if layers % (pp * n) == 0 or n & (n - 1) == 0]


def _runs(needs: Requirements, pp: int, micro_batches: int) -> bool:
    """The rules of schedules.requirements for the number of micro-batches."""
    if pp == 1:
        return True
    if micro_batches < needs.micro_batches_per_rank * pp:
        return False
    return not needs.rounds or micro_batches % max(1, micro_batches // pp) == 0


def _product(pp: int, group: Column, virtual: int, middle: Pairs) -> Columns:
    inner = np.array(middle, np.float64).T
    count = group.shape[1] * len(middle)
    layout = dict(zip(OUTER[1:10], np.repeat(group, len(middle), axis=1), strict=True))
    schedule, micro = np.tile(inner, group.shape[1])
    single = {"pp": np.full(count, float(pp)), "virtual_stages": np.full(count, float(virtual))}
    return {**single, **layout, "schedule": schedule, "micro_batch": micro}


def _techniques(space: Space, kind: _Kind) -> Techniques:
    """All that go together; the quickest first, which is what bounds the time of a row from below."""
    fixed = space.fixed
    modes = fixed.of("recompute", [0] if kind.split else [0, 1, 2])
    # What asynchronous tensor parallelism computes in parts, selective recomputation cannot keep.
    pairs = [(mode, every) for mode in modes if not (kind.asynchronous and mode == 1) for every in _every(mode, kind)]
    pairs = [(mode, every) for mode, every in pairs if fixed.of("recompute_every", [every])]
    # What selective recomputation keeps cannot be moved (parallel.support.memory).
    moved = fixed.of("offload_activations", [0, 1] if space.shape.device else [0])
    ways = [
        (*pair, move) for move, pair in product(moved, pairs) if not (move and RECOMPUTE[int(pair[0])] == "selective")
    ]
    offload = fixed.of("offload", range(len(OFFLOAD)) if kind.sharded else [0])
    table = np.array([(*way, place) for place, way in product(offload, ways)], np.float64).reshape(-1, 4).T
    return Techniques(dict(zip(INNER, table, strict=True)), np.ceil(kind.blocks / table[1]) / kind.blocks)


def _every(mode: float, kind: _Kind) -> list[int]:
    """Fewest recomputed blocks first, each number of them once."""
    if RECOMPUTE[int(mode)] == "none":
        return [1]
    distinct = {-(-kind.blocks // every): every for every in reversed(EVERY) if every <= kind.blocks}
    return [distinct[count] for count in sorted(distinct)]


def size(space: Space) -> int:
    """Candidates of the space, counted without estimating any."""
    return sum(block.count for block in blocks(space, 1 << 22))
