"""layouts: how the ranks of one stage of the pipeline are split over data, context and tensor parallelism."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from hpc_train.planner.legal import context_degrees, divisors, tensor_degrees

if TYPE_CHECKING:
    from hpc_train.planner.space import Space


@dataclass(frozen=True)
class Layout:
    """One way; the fields are columns of Jobs, in the order of space.OUTER."""

    dp_replicate: int
    dp_shard: int
    cp: int
    ulysses: int
    tp: int
    zero: int
    reshard: int
    """1 where nothing is gathered, too, as parallel.reshard_after_forward has it."""
    sequence_parallel: int
    overlap_tensor: int

    @property
    def values(self) -> tuple[int, ...]:
        data = self.dp_replicate, self.dp_shard, self.cp, self.ulysses, self.tp, self.zero, self.reshard
        return *data, self.sequence_parallel, self.overlap_tensor


def layouts(space: Space, pp: int) -> list[Layout]:
    """All of them for the `world / pp` ranks of a stage."""
    ranks = space.world // pp
    found = []
    for tp in space.fixed.of("tp", tensor_degrees(space.shape, ranks)):
        for cp, ulysses in _context(space, ranks // int(tp), int(tp)):
            dp = ranks // (int(tp) * cp)
            if space.shape.global_batch % dp == 0:
                found += [
                    Layout(*data, cp, ulysses, int(tp), *zero, *tensor)
                    for tensor in _tensor(space, int(tp), cp)
                    for data in _splits(space, dp)
                    for zero in _zero(space, *data, cp, sharded=pp > 1 or tp > 1)
                ]
    return found


def _context(space: Space, ranks: int, tp: int) -> list[tuple[int, int]]:
    """(cp, ulysses)."""
    fixed, found = space.fixed, context_degrees(space.shape, ranks, tp)
    return [(cp, way) for cp, way in found if fixed.of("cp", [cp]) and fixed.of("ulysses", [way])]


def _splits(space: Space, dp: int) -> Iterator[tuple[int, int]]:
    """(dp_replicate, dp_shard)."""
    for shard in space.fixed.of("dp_shard", divisors(dp)):
        if space.fixed.of("dp_replicate", [dp // int(shard)]):
            yield dp // int(shard), int(shard)


def _zero(space: Space, replicate: int, shard: int, cp: int, sharded: bool) -> Iterator[tuple[int, int]]:
    """(zero, reshard). sharded: fully_shard holds parameters whatever the strategy. cp is sharded over, too."""
    fixed = space.fixed
    possible = [0] if shard == 1 and (sharded or space.shape.ddp_reduces) else []
    possible += [1, 2, 3] if shard * cp > 1 else []
    for zero in fixed.of("zero", possible):
        for reshard in fixed.of("reshard", [1, 0] if zero == 3 else [1]):
            yield int(zero), int(reshard)


def _tensor(space: Space, tp: int, cp: int) -> Iterator[tuple[int, int]]:
    """(sequence_parallel, overlap_tensor); without tp only the defaults are not refused."""
    fixed = space.fixed
    if tp == 1:
        if fixed.of("sequence_parallel", [1]) and fixed.of("overlap_tensor", [0]):
            yield 1, 0
        return
    images = space.shape.images
    for sequence in fixed.of("sequence_parallel", [1] if images else [1, 0]):
        if sequence and not images and space.shape.sequence % (cp * tp):
            continue
        for overlap in fixed.of("overlap_tensor", [0, 1] if sequence and not images else [0]):
            yield int(sequence), int(overlap)
