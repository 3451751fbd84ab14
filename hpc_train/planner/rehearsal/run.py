"""rehearse: all of it, in a few processes, each of which is one rank after another."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping

from torch import nn

from hpc_train.compat_rehearsal import Pretending, load_all
from hpc_train.config.degrees import Degrees
from hpc_train.config.run import RunConfig
from hpc_train.parallel.memory.blocks import named_blocks
from hpc_train.parallel.support import check_support
from hpc_train.planner.rehearsal.choose import Chosen, choose
from hpc_train.planner.rehearsal.closed_form import closed_form
from hpc_train.planner.rehearsal.coverage import cover
from hpc_train.planner.rehearsal.fit import device_of, judge
from hpc_train.planner.rehearsal.one_rank import rehearse_rank, shapes_of, whole_model
from hpc_train.planner.rehearsal.order import enough, prove
from hpc_train.planner.rehearsal.planned import planned
from hpc_train.planner.rehearsal.processes import in_own_processes
from hpc_train.planner.rehearsal.result import Built, Rehearsal
from hpc_train.planner.rehearsal.servers import server_bytes
from hpc_train.planner.rehearsal.stand_in import stand_in
from hpc_train.planner.rehearsal.tiling import SHARED
from hpc_train.planner.rehearsal.world import coordinates

MOST_PROCESSES = 4
"""Each takes up to a gigabyte."""


def rehearse(config: RunConfig, world: int, which: str = "sample", processes: int | None = None) -> Rehearsal:
    """Build the ranks that `which` names (see choose) of a world, train a step on some, and prove the layout.

    processes: None: one a core that this process may use, at most MOST_PROCESSES.
    Raises UserError for a layout that is refused, an order that cannot complete, and a rank that cannot be built.
    """
    started = time.perf_counter()
    degrees = check_support(config, world)
    stood_in, notes = stand_in(config)
    chosen = choose(which, degrees)
    load_all()
    with Pretending(lambda *_: None):
        model = whole_model(config)
    proof = prove(config, degrees) if degrees.pp > 1 else None
    micro_batches, fewer = enough(config, degrees, _blocks(model, degrees), proof)
    processes = min(processes or _processes(), len(chosen.built))
    missing = sorted({*range(degrees.pp)} - {coordinates(rank, degrees)["pp"] for rank in chosen.built})
    ranks = _build(stood_in, degrees, chosen, micro_batches, processes)
    notes += [fewer] if fewer else []
    notes += [f"what pipeline ranks {', '.join(map(str, missing))} hold: none of them was built"] if missing else []
    notes += [f"a step: {built.unknown}" for built in ranks.values() if built.unknown]
    stages = {rank: ranks[rank].at["pp"] for rank in chosen.stepped}
    plan, real = planned(stood_in, degrees, stages), planned(config, degrees, stages)
    more = {rank: sum(real[rank].values()) - sum(plan[rank].values()) for rank in real}
    return Rehearsal(
        degrees=degrees,
        ranks=tuple(ranks.values()),
        coverage=cover(shapes_of(model), tuple(ranks.values()), degrees),
        proof=proof,
        micro_batches=micro_batches,
        closed_form=_closed_forms(config, degrees, ranks),
        planned=plan,
        fit=judge(tuple(ranks.values()), plan, device_of(config), more),
        servers=server_bytes(config, model),
        not_rehearsed=tuple(dict.fromkeys(notes)),
        seconds=time.perf_counter() - started,
        processes=processes,
    )


def _closed_forms(config: RunConfig, degrees: Degrees, ranks: Mapping[int, Built]) -> dict[int, dict[str, int]]:
    """Of those it is made for: the first of each stage."""
    first = {rank: built.at["pp"] for rank, built in ranks.items() if not any(built.at[axis] for axis in SHARED)}
    return {rank: closed_form(config, degrees, pp) for rank, pp in first.items()}


def _blocks(model: nn.Module, degrees: Degrees) -> int:
    """Of one rank, about."""
    return max(1, -(-len(named_blocks(model)) // degrees.pp))


def _processes() -> int:
    return min(MOST_PROCESSES, len(os.sched_getaffinity(0)))


def _build(config: RunConfig, degrees: Degrees, chosen: Chosen, micro_batches: int, processes: int) -> dict[int, Built]:
    count = dict.fromkeys(chosen.stepped, micro_batches)
    longest_first = sorted(chosen.built, key=lambda rank: rank not in count)
    found = in_own_processes(
        lambda rank: rehearse_rank(config, degrees, rank, count.get(rank, 0)), longest_first, processes
    )
    return {rank: found[rank] for rank in chosen.built}
