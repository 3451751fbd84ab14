"""What each schedule asks of the numbers of ranks, micro-batches and stages, and the line that says what would work."""

from __future__ import annotations

from dataclasses import dataclass

from hpc_train.config.techniques import SCHEDULES
from hpc_train.errors import UserError


@dataclass(frozen=True)
class Requirements:
    """Of one schedule. Where torch has the schedule, these are torch's."""

    virtual_stages: int = 1
    """Stages a rank, where nothing else is asked for."""
    least_virtual: int = 1
    most_virtual: int | None = 1
    """None: any number."""
    v_shaped: bool = False
    """The stages of a rank are r and 2p - 1 - r, in place of r, r + p, ..."""
    splits_backward: bool = False
    rounds: bool = False
    """Micro-batches go through in max(1, m // p) equal rounds."""
    micro_batches_per_rank: int = 0
    """So many times p micro-batches at least."""


REQUIREMENTS = {
    "naive": Requirements(),
    "gpipe": Requirements(),
    "1f1b": Requirements(micro_batches_per_rank=1),
    "interleaved_1f1b": Requirements(2, 2, None, rounds=True),
    "looped_bfs": Requirements(2, 2, None),
    "interleaved_zero_bubble": Requirements(2, 1, None, splits_backward=True, rounds=True),
    "zbv": Requirements(2, 2, 2, v_shaped=True, splits_backward=True),
    "dualpipev": Requirements(2, 2, 2, v_shaped=True, splits_backward=True, micro_batches_per_rank=2),
}
assert set(REQUIREMENTS) == set(SCHEDULES)


def requirements(name: str) -> Requirements:
    """Of the schedule `name`; UserError if there is none."""
    if name not in REQUIREMENTS:
        raise UserError(f"parallel.pipeline.schedule={name}: no such schedule; there are {', '.join(REQUIREMENTS)}")
    return REQUIREMENTS[name]


def check(name: str, ranks: int, micro_batches: int, virtual_stages: int, blocks: int | None = None) -> None:
    """Raise UserError if the schedule cannot do these numbers; blocks: of the model, if they are known."""
    needs = requirements(name)
    for what, count in (("ranks", ranks), ("micro-batches", micro_batches), ("virtual stages", virtual_stages)):
        if count < 1:
            raise UserError(f"parallel.pipeline.schedule={name}: {count} {what}; there must be at least 1")
    _check_virtual_stages(name, needs, virtual_stages)
    _check_micro_batches(name, needs, ranks, micro_batches)
    if blocks is not None and blocks < ranks * virtual_stages:
        raise UserError(
            f"parallel.pp={ranks}: with {virtual_stages} virtual stages a rank there are {ranks * virtual_stages} "
            f"stages, but the model has {blocks} blocks, and each stage needs one; lower parallel.pp or "
            "parallel.pipeline.virtual_stages"
        )


def _check_virtual_stages(name: str, needs: Requirements, count: int) -> None:
    least, most = needs.least_virtual, needs.most_virtual
    if least <= count and (most is None or count <= most):
        return
    range_ = f"exactly {least}" if least == most else f"at least {least}"
    instead = {1: "gpipe or 1f1b"}.get(count, "interleaved_1f1b, looped_bfs or interleaved_zero_bubble")
    raise UserError(
        f"parallel.pipeline.virtual_stages={count}: {name} has {range_} a rank; leave it out, or use "
        f"parallel.pipeline.schedule={instead}"
    )


def _check_micro_batches(name: str, needs: Requirements, ranks: int, count: int) -> None:
    least = needs.micro_batches_per_rank * ranks
    if count < least:
        raise UserError(
            f"parallel.pipeline.schedule={name}: over {ranks} ranks it needs at least {least} micro-batches and "
            f"has {count}; lower train.micro_batch, or use parallel.pipeline.schedule=gpipe"
        )
    rounds = max(1, count // ranks)
    if needs.rounds and count % rounds:
        below, above = _equal_rounds(ranks, count, -1), _equal_rounds(ranks, count, 1)
        raise UserError(
            f"parallel.pipeline.schedule={name}: {count} micro-batches do not make {rounds} equal rounds over {ranks} "
            f"ranks; {below} or {above} would, or use parallel.pipeline.schedule=looped_bfs"
        )


def _equal_rounds(ranks: int, count: int, direction: int) -> int:
    """The nearest number of micro-batches that works; any multiple of `ranks` does."""
    while count % max(1, count // ranks):
        count += direction
    return count
