"""From a schedule's name to its order."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator

from hpc_train.schedules.actions import Action, Kind, Order, Step, looped, v_shaped
from hpc_train.schedules.one_forward_one_backward import interleaved, one_forward_one_backward, zero_bubble
from hpc_train.schedules.requirements import check, requirements
from hpc_train.schedules.v_shape import dualpipev, zbv

_Row = Callable[[int, int, int, int], Iterable[Step]]
"""(ranks, rank, micro-batches, virtual stages) -> the rank's entries."""


def orders(name: str, ranks: int, micro_batches: int, virtual_stages: int | None = None) -> Order:
    """The order of the schedule `name` (config.techniques.SCHEDULES); virtual_stages: a rank, None for its default.

    Where torch.distributed.pipelining has the schedule, it is the same order. Raises UserError for numbers that the
    schedule cannot do, see `check`.
    """
    needs = requirements(name)
    virtual_stages = needs.virtual_stages if virtual_stages is None else virtual_stages
    check(name, ranks, micro_batches, virtual_stages)
    rows = tuple(tuple(_ROWS[name](ranks, rank, micro_batches, virtual_stages)) for rank in range(ranks))
    return Order(rows, v_shaped(ranks) if needs.v_shaped else looped(ranks, virtual_stages))


def _naive(rank: int, micro_batches: int) -> Iterator[Step]:
    """One micro-batch after another through all stages and back: one rank works at a time."""
    for micro_batch in range(micro_batches):
        yield Action(rank, Kind.F, micro_batch)
        yield Action(rank, Kind.B, micro_batch)


def _gpipe(rank: int, micro_batches: int) -> Iterator[Step]:
    """All forwards, then all backwards (Huang et al. 2019, arXiv:1811.06965)."""
    for kind in (Kind.F, Kind.B):
        yield from (Action(rank, kind, micro_batch) for micro_batch in range(micro_batches))


def _looped_bfs(ranks: int, rank: int, micro_batches: int, virtual_stages: int) -> Iterator[Step]:
    """All micro-batches through a stage, then through the rank's next (Lamy-Poirier 2023, arXiv:2211.05953)."""
    stages = [rank + turn * ranks for turn in range(virtual_stages)]
    for stage in stages:
        yield from (Action(stage, Kind.F, micro_batch) for micro_batch in range(micro_batches))
    for stage in reversed(stages):
        yield from (Action(stage, Kind.B, micro_batch) for micro_batch in reversed(range(micro_batches)))


_ROWS: dict[str, _Row] = {
    "naive": lambda ranks, rank, micro_batches, virtual: _naive(rank, micro_batches),
    "gpipe": lambda ranks, rank, micro_batches, virtual: _gpipe(rank, micro_batches),
    "1f1b": lambda ranks, rank, micro_batches, virtual: one_forward_one_backward(ranks, rank, micro_batches),
    "interleaved_1f1b": interleaved,
    "looped_bfs": _looped_bfs,
    "interleaved_zero_bubble": zero_bubble,
    "zbv": lambda ranks, rank, micro_batches, virtual: zbv(ranks, rank, micro_batches),
    "dualpipev": lambda ranks, rank, micro_batches, virtual: dualpipev(ranks, rank, micro_batches),
}
