"""Runs that the planner's tests ask about, each composed once."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import cache
from itertools import product

from hpc_train.config.compose import compose, compose_unchecked, make_typed
from hpc_train.config.run import RunConfig
from hpc_train.errors import UserError
from hpc_train.parallel.rules.check import check_support
from hpc_train.planner.model.inputs import OFFLOAD, RECOMPUTE, SCHEDULES
from hpc_train.planner.plan import Plan, make_plan
from hpc_train.planner.request import make_request
from hpc_train.planner.search.space import LAYOUT_COLUMNS, TECHNIQUE_COLUMNS, SearchSpace, iterate_blocks
from hpc_train.planner.settings import apply_settings, make_settings
from hpc_train.schedules.generate import REQUIREMENTS

NAMES = (*LAYOUT_COLUMNS, *TECHNIQUE_COLUMNS)
Row = tuple[float, ...]
"""One candidate: values of NAMES."""


@cache
def run(*overrides: str) -> RunConfig:
    """Compose overrides as compose does, but also settings that have no effect in a run, which it refuses."""
    if {"parallel=auto", "model=custom"} & set(overrides):
        return compose(overrides)  # what is given counts, and a part is no whole
    return make_typed(compose_unchecked(list(overrides), None), (), None)


def asked(*overrides: str, top: int = 10) -> Plan:
    """Return the answer of `hpc-train plan` to these overrides."""
    return make_plan(make_request(run(*overrides), overrides), top)


def rows_of(space: SearchSpace, candidates: int = 1 << 16) -> Iterator[Row]:
    """Yield every candidate of a space as a row."""
    for block in iterate_blocks(space, candidates):
        outer = zip(*(block.rows[name].tolist() for name in LAYOUT_COLUMNS), strict=True)
        inner = list(zip(*(block.techniques.columns[name].tolist() for name in TECHNIQUE_COLUMNS), strict=True))
        for row, technique in product(outer, inner):
            yield (*row, *technique)


def as_run(config: RunConfig, row: Row) -> RunConfig:
    return apply_settings(config, make_settings(dict(zip(NAMES, row, strict=True))))


def refusal(config: RunConfig, row: Row, ranks: int) -> str | None:
    """Return why the toolkit cannot run a candidate; None if it can."""
    try:
        check_support(as_run(config, row), ranks)
    except UserError as error:
        return str(error)
    return None


def naive_rows(config: RunConfig, world: int, every: tuple[int, ...] = (1, 2)) -> Iterator[Row]:
    """Return every combination of every value, most of which cannot run, as the obvious definition of the space.

    Only combinations that differ from another one in a setting without effect are left out.
    """
    meshes = [mesh for mesh in product(range(1, world + 1), repeat=5) if _product(mesh) == world]
    options = product((0, 1, 2, 3), (1, 0), (1, 0), (0, 1), (0, 1))
    for (pp, replicate, shard, cp, tp), (zero, reshard, sequence, overlap, ulysses) in product(meshes, list(options)):
        if zero and shard * cp == 1:
            continue  # nothing to shard over: the same as ddp
        if config.parallel.context.method == "ulysses" and not ulysses:
            continue  # what the run says of it stays
        if (not reshard and zero != 3) or (tp == 1 and (not sequence or overlap)):
            continue
        layouts = [
            (pp, replicate, shard, cp, ulysses, tp, ep, zero, reshard, sequence, overlap)
            for ep in _expert_degrees(config, zero, shard * cp)
        ]
        sizes = [n for n in range(1, config.train.global_batch + 1) if _divides(n, config, replicate * shard)]
        for layout, (virtual, code), micro, technique in product(layouts, _orders(pp), sizes, _techniques(every)):
            yield tuple(map(float, (*layout, virtual, code, micro, *technique)))


def _expert_degrees(config: RunConfig, zero: int, ranks: int) -> tuple[int, ...]:
    """Return the degrees of ep to try: only 1 without experts, and where nothing is sharded."""
    experts = getattr(config.model, "experts", None)
    return (1, 2, 4) if experts is not None and experts.count and zero and ranks > 1 else (1,)


def _product(sizes: tuple[int, ...]) -> int:
    whole = 1
    for size in sizes:
        whole *= size
    return whole


def _divides(micro: int, config: RunConfig, data_parallel: int) -> bool:
    rows, rest = divmod(config.train.global_batch, data_parallel)
    return rest == 0 and rows % micro == 0


def _orders(pp: int) -> list[tuple[int, int]]:
    if pp == 1:
        return [(1, SCHEDULES.index("1f1b"))]
    return [(virtual, SCHEDULES.index(name)) for name in REQUIREMENTS for virtual in (1, 2, 3, 4)]


def _techniques(every: tuple[int, ...]) -> list[tuple[int, int, int, int]]:
    return [
        (mode, k, moved, offload)
        for mode in range(len(RECOMPUTE))
        for k in (every if mode else (1,))
        for moved in (0, 1)
        for offload in range(len(OFFLOAD))
    ]


def with_batch(config: RunConfig, batch: int) -> RunConfig:
    return replace(config, train=replace(config.train, global_batch=batch))
