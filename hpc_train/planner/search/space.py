"""The search space: every layout and technique that the trainer can run a model with, in blocks of columns.

A layout is a factorisation of the world over the mesh axes plus a data-parallel strategy. A row adds a schedule and a
micro-batch. Every row is combined with every technique (recomputation, offload). Combinations that parallel.rules
refuses are not in the space, which a test checks.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import product

import numpy as np

from hpc_train.planner.model.inputs import OFFLOAD, RECOMPUTE, SCHEDULES, Column
from hpc_train.planner.search.degree_limits import (
    DegreeLimits,
    list_context_degrees,
    list_divisors,
    list_tensor_degrees,
)
from hpc_train.schedules.generate import REQUIREMENTS, Requirements


@dataclass(frozen=True)
class StageLayout:
    """One layout of a stage's ranks. The fields are columns of Jobs, in the order of LAYOUT_COLUMNS."""

    dp_replicate: int
    dp_shard: int
    cp: int
    ulysses: int
    tp: int
    ep: int
    zero: int
    reshard: int
    """1 also if nothing is gathered, which is the default of parallel.reshard_after_forward."""
    sequence_parallel: int
    overlap_tensor: int

    @property
    def values(self) -> tuple[int, ...]:
        data = self.dp_replicate, self.dp_shard, self.cp, self.ulysses, self.tp, self.ep, self.zero, self.reshard
        return *data, self.sequence_parallel, self.overlap_tensor


def list_layouts(space: SearchSpace, pp: int) -> list[StageLayout]:
    """List all layouts of the `world / pp` ranks of a stage."""
    ranks = space.world // pp
    layouts = []
    for tp in space.fixed.of("tp", list_tensor_degrees(space.shape, ranks)):
        for cp, ulysses in _context_choices(space, ranks // int(tp), int(tp)):
            dp = ranks // (int(tp) * cp)
            if space.shape.global_batch % dp == 0:
                layouts += [
                    StageLayout(*data, cp, ulysses, int(tp), ep, *zero, *tensor)
                    for tensor in _tensor_choices(space, int(tp), cp)
                    for data in _data_splits(space, dp)
                    for ep in list_expert_degrees(space, data[1] * cp)
                    for zero in _zero_choices(space, *data, cp, sharded=pp > 1 or tp > 1)
                    if ep == 1 or zero[0]
                ]
    return layouts


def _context_choices(space: SearchSpace, ranks: int, tp: int) -> list[tuple[int, int]]:
    """List the allowed (cp, ulysses)."""
    fixed, degrees = space.fixed, list_context_degrees(space.shape, ranks, tp)
    return [(cp, way) for cp, way in degrees if fixed.of("cp", [cp]) and fixed.of("ulysses", [way])]


def list_expert_degrees(space: SearchSpace, ranks: int) -> list[int]:
    """List the degrees of ep that divide the experts and the `ranks` of dp_shard x cp (parallel.rules.experts)."""
    possible = (
        list_divisors(math.gcd(space.shape.experts, ranks)) if space.shape.experts and not space.shape.adapter else [1]
    )
    return [int(ep) for ep in space.fixed.of("ep", possible)]


def _data_splits(space: SearchSpace, dp: int) -> Iterator[tuple[int, int]]:
    """Yield the allowed (dp_replicate, dp_shard)."""
    for shard in space.fixed.of("dp_shard", list_divisors(dp)):
        if space.fixed.of("dp_replicate", [dp // int(shard)]):
            yield dp // int(shard), int(shard)


def _zero_choices(space: SearchSpace, replicate: int, shard: int, cp: int, sharded: bool) -> Iterator[tuple[int, int]]:
    """Yield the allowed (zero, reshard). sharded: fully_shard is used with any strategy. cp counts as sharding."""
    fixed = space.fixed
    # 0 is ddp. It cannot shard, and DistributedDataParallel reduces in the parameters' own format only.
    possible = [0] if shard == 1 and (sharded or space.shape.ddp_reduces) and not space.shape.float8_gather else []
    possible += [1, 2, 3] if shard * cp > 1 else []
    for zero in fixed.of("zero", possible):
        # Only zero 3 has a choice: zero 1 and 2 keep parameters gathered in any case.
        for reshard in fixed.of("reshard", [1, 0] if zero == 3 else [1]):
            yield int(zero), int(reshard)


def _tensor_choices(space: SearchSpace, tp: int, cp: int) -> Iterator[tuple[int, int]]:
    """Yield the allowed (sequence_parallel, overlap_tensor); with tp=1 only the defaults."""
    fixed = space.fixed
    if tp == 1:
        if fixed.of("sequence_parallel", [1]) and fixed.of("overlap_tensor", [0]):
            yield 1, 0
        return
    images = space.shape.images
    synchronous = images or space.shape.adapter or space.shape.float8
    for sequence in fixed.of("sequence_parallel", [1] if images else [1, 0] if space.shape.positions else [0]):
        if sequence and not images and space.shape.sequence % (cp * tp):
            continue  # tp splits what cp leaves of the positions
        for overlap in fixed.of("overlap_tensor", [0, 1] if sequence and not synchronous else [0]):
            yield int(sequence), int(overlap)


Columns = dict[str, Column]
LAYOUT_COLUMNS = (
    *("pp", "dp_replicate", "dp_shard", "cp", "ulysses", "tp", "ep", "zero", "reshard", "sequence_parallel"),
    *("overlap_tensor", "virtual_stages", "schedule", "micro_batch"),
)
"""Columns of a row, in the order in which rows are enumerated: simple layouts first."""
TECHNIQUE_COLUMNS = ("recompute", "recompute_every", "offload_activations", "offload")
RECOMPUTE_EVERY = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32)
"""Values of k that are tried for recomputing every k-th block."""


@dataclass(frozen=True)
class FixedColumns:
    """Allowed values by column; a column that is not listed may have any value."""

    values: Mapping[str, tuple[float, ...]] = field(default_factory=dict)

    def of(self, name: str, values: Sequence[float]) -> tuple[float, ...]:
        """Return the allowed ones of `values`, in their order."""
        allowed = self.values.get(name)
        return tuple(values) if allowed is None else tuple(value for value in values if value in allowed)

    def unless(self, name: str, value: float) -> FixedColumns:
        """Return a copy that fixes a column to this value, unless it is fixed already."""
        return FixedColumns({name: (value,), **self.values})


@dataclass(frozen=True)
class SearchSpace:
    """All candidates of one model, world size and global batch."""

    shape: DegreeLimits
    world: int
    fixed: FixedColumns = FixedColumns()


@dataclass(frozen=True)
class Techniques:
    """Recomputation and offload, which do not change the layout. Columns TECHNIQUE_COLUMNS, [k]."""

    columns: Columns
    share: Column
    """Share of a stage's blocks that are recomputed, [k]."""
    offloads: int = 1
    """Number of equal parts of the columns that differ in `offload` only; 1 also if they are no such parts."""

    @property
    def count(self) -> int:
        return len(self.share)

    @property
    def shape(self) -> tuple[int, int]:
        """[offloads, others]"""
        return self.offloads, self.count // self.offloads

    def spread_axes(self) -> tuple[Columns, Column]:
        """Return (columns, share): `offload` along the first of three axes, the others along the second.

        The third is for rows.
        """
        if self.offloads == 1:
            return {name: column[:, None] for name, column in self.columns.items()}, self.share[:, None]
        columns = {name: column.reshape(self.shape)[0, :, None] for name, column in self.columns.items()}
        columns["offload"] = self.columns["offload"].reshape(self.shape)[:, :1, None]
        return columns, self.share.reshape(self.shape)[0, :, None]

    def take(self, numbers: Sequence[int]) -> Techniques:
        """Return some of the techniques."""
        return Techniques(
            {name: column[list(numbers)] for name, column in self.columns.items()}, self.share[list(numbers)]
        )


@dataclass(frozen=True)
class Block:
    """All combinations of rows and techniques: rows x techniques candidates, all of them valid."""

    rows: Columns
    """Columns LAYOUT_COLUMNS, [n]."""
    techniques: Techniques

    @property
    def count(self) -> int:
        return len(self.rows["pp"]) * self.techniques.count


@dataclass(frozen=True)
class _Kind:
    """Properties of a row that decide which techniques it can use."""

    blocks: int
    """Blocks of the model in one stage, rounded up."""
    sharded: bool
    asynchronous: bool
    split: bool
    """The schedule splits backward."""
    exchanges: bool
    """ep sends tokens to other ranks."""


def iterate_blocks(space: SearchSpace, candidates: int = 1 << 16) -> Iterator[Block]:
    """Yield the whole space in blocks of about `candidates`, so that memory stays bounded."""
    # Rows of one kind can use the same techniques, so they are collected until a block is full. A dict keeps the order
    # of first appearance, which makes the search deterministic.
    waiting: dict[_Kind, list[Columns]] = {}
    rows: dict[_Kind, int] = {}
    techniques: dict[_Kind, Techniques] = {}
    for kind, part in _layout_rows(space):
        if kind not in techniques:
            techniques[kind] = _techniques(space, kind)
        most = max(1, candidates // max(1, techniques[kind].count))
        waiting.setdefault(kind, []).append(part)
        rows[kind] = rows.get(kind, 0) + len(part["pp"])
        if rows[kind] >= most:
            yield from _cut_blocks(waiting.pop(kind), techniques[kind], most)
            rows[kind] = 0
    for kind, parts in waiting.items():
        if techniques[kind].count:
            yield from _cut_blocks(parts, techniques[kind], max(1, candidates // techniques[kind].count))


def _cut_blocks(parts: list[Columns], techniques: Techniques, most: int) -> Iterator[Block]:
    if techniques.count == 0:
        return
    columns = {name: np.concatenate([part[name] for part in parts]) for name in LAYOUT_COLUMNS}
    for start in range(0, len(columns["pp"]), most):
        yield Block({name: column[start : start + most] for name, column in columns.items()}, techniques)


def _layout_rows(space: SearchSpace) -> Iterator[tuple[_Kind, Columns]]:
    """Yield (kind, rows): the layouts of one (pp, dp) times the schedules and micro-batches of one number of stages."""
    shape = space.shape
    for pp in space.fixed.of("pp", [n for n in list_divisors(space.world) if n <= shape.layers]):
        layouts = list_layouts(space, int(pp))
        for dp in sorted({layout.dp_replicate * layout.dp_shard for layout in layouts}):
            same = [layout for layout in layouts if layout.dp_replicate * layout.dp_shard == dp]
            kinds = _by_kind(same)
            for virtual, split, middle in _schedule_rows(space, int(pp), shape.global_batch // dp):
                for (sharded, asynchronous, exchanges), group in kinds.items():
                    if asynchronous and split:
                        continue
                    kind = _Kind(-(-shape.layers // (int(pp) * virtual)), sharded, asynchronous, split, exchanges)
                    yield kind, _combine(int(pp), group, virtual, middle)


def _by_kind(layouts: Sequence[StageLayout]) -> dict[tuple[bool, bool, bool], Column]:
    """Group layouts by (uses a zero strategy, asynchronous tp, ep over 1); values are [columns, layouts]."""
    kinds: dict[tuple[bool, bool, bool], list[tuple[int, ...]]] = {}
    for layout in layouts:
        kinds.setdefault((layout.zero > 0, bool(layout.overlap_tensor), layout.ep > 1), []).append(layout.values)
    return {kind: np.array(group, np.float64).T for kind, group in kinds.items()}


Pairs = list[tuple[int, int]]
"""(code of a schedule, micro-batch)."""


def _schedule_rows(space: SearchSpace, pp: int, rows: int) -> Iterator[tuple[int, bool, Pairs]]:
    """Yield (virtual stages, splits backward, [(schedule, micro-batch)]). rows: sequences of a data-parallel rank."""
    shape, fixed = space.shape, space.fixed
    sizes = [int(size) for size in fixed.of("micro_batch", list_divisors(rows, fixed.values.get("micro_batch")))]
    if shape.experts and pp > 1:
        sizes = [size for size in sizes if rows % size == 0]  # padding would count in the loads of experts
    codes = [int(code) for code in fixed.of("schedule", _schedule_codes(pp))]
    kinds: dict[tuple[int, bool], Pairs] = {}
    for code in codes:
        needs = REQUIREMENTS[SCHEDULES[code]]
        split = pp > 1 and needs.splits_backward
        if split and not shape.split_backward:
            continue
        for virtual in fixed.of("virtual_stages", _virtual_stages(shape.layers, pp, needs)):
            legal = [(code, size) for size in sizes if _allows_micro_batches(needs, pp, -(-rows // size))]
            kinds.setdefault((int(virtual), split), []).extend(legal)
    for (virtual, split), pairs in kinds.items():
        if pairs:
            yield virtual, split, pairs


def _schedule_codes(pp: int) -> list[int]:
    """List the schedules; without a pipeline only the default."""
    first = SCHEDULES.index("1f1b")
    return [first] if pp == 1 else [first, *(SCHEDULES.index(name) for name in REQUIREMENTS if name != "1f1b")]


def _virtual_stages(layers: int, pp: int, needs: Requirements) -> list[int]:
    """List the numbers of virtual stages that give stages of equal size, and powers of two."""
    if pp == 1:
        return [1]
    most = min(layers // pp, needs.most_virtual or layers)
    # Any other number gives stages of unequal size.
    counts = range(needs.least_virtual, most + 1)
    return [n for n in counts if layers % (pp * n) == 0 or n & (n - 1) == 0]


def _allows_micro_batches(needs: Requirements, pp: int, micro_batches: int) -> bool:
    """Whether a schedule allows this number of micro-batches (schedules.generate.REQUIREMENTS)."""
    if pp == 1:
        return True
    if micro_batches < needs.micro_batches_per_rank * pp:
        return False
    return not needs.rounds or micro_batches % max(1, micro_batches // pp) == 0


def _combine(pp: int, group: Column, virtual: int, middle: Pairs) -> Columns:
    inner = np.array(middle, np.float64).T
    count = group.shape[1] * len(middle)
    layout = dict(zip(LAYOUT_COLUMNS[1:11], np.repeat(group, len(middle), axis=1), strict=True))
    schedule, micro = np.tile(inner, group.shape[1])
    single = {"pp": np.full(count, float(pp)), "virtual_stages": np.full(count, float(virtual))}
    return {**single, **layout, "schedule": schedule, "micro_batch": micro}


def _techniques(space: SearchSpace, kind: _Kind) -> Techniques:
    """List the valid techniques, the fastest first: search.py bounds the step time with it."""
    fixed = space.fixed
    modes = fixed.of("recompute", [0] if kind.split else [0, 1, 2])
    if kind.split:  # what is recomputed waits for the gradients of weights, of which there is no model
        modes = tuple(mode for mode in modes if mode == 0)
    # Asynchronous tensor parallelism computes products in parts, whose results selective recomputation cannot store.
    # Selective recomputation cannot keep results while experts of other ranks are gathered (parallel.rules.experts).
    no_selective = kind.asynchronous or kind.exchanges
    pairs = [(mode, every) for mode in modes if not (no_selective and mode == 1) for every in _every(mode, kind)]
    pairs = [(mode, every) for mode, every in pairs if fixed.of("recompute_every", [every])]
    # Activations that selective recomputation stores cannot be offloaded (parallel.rules.memory).
    moved = fixed.of("offload_activations", [0, 1] if space.shape.device else [0])
    ways = [
        (*pair, move) for move, pair in product(moved, pairs) if not (move and RECOMPUTE[int(pair[0])] == "selective")
    ]
    # All of these keep parameters on the device.
    stays = kind.exchanges or space.shape.float8_gather or space.shape.four_bits
    places = range(len(OFFLOAD) - stays) if kind.sharded else [0]
    offload = fixed.of("offload", places)
    table = np.array([(*way, place) for place, way in product(offload, ways)], np.float64).reshape(-1, 4).T
    share = np.ceil(kind.blocks / table[1]) / kind.blocks
    return Techniques(dict(zip(TECHNIQUE_COLUMNS, table, strict=True)), share, max(1, len(offload)))


def _every(mode: float, kind: _Kind) -> list[int]:
    """List the values of k that recompute different numbers of blocks, fewest blocks first."""
    if RECOMPUTE[int(mode)] == "none":
        return [1]
    # Several k may recompute the same number of blocks; the smallest of them stands for all.
    distinct = {-(-kind.blocks // every): every for every in reversed(RECOMPUTE_EVERY) if every <= kind.blocks}
    return [distinct[count] for count in sorted(distinct)]
