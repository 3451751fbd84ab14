"""Schedules whose steady state alternates one forward and one backward; with v stages a rank, in rounds over these.

1F1B: Narayanan et al. 2019 (PipeDream) and 2021, arXiv:2104.04473, section 2.2, where interleaving comes from too.
Zero bubble: Qi et al. 2024, arXiv:2401.10241, section 2.1 (ZB-H1 with one stage a rank).
"""

from __future__ import annotations

from collections.abc import Iterator

from hpc_train.schedules.actions import Action, Kind


def one_forward_one_backward(ranks: int, rank: int, micro_batches: int) -> Iterator[Action]:
    """As many forwards first as there are ranks after this one."""
    forwards, backwards = ([Action(rank, kind, micro) for micro in range(micro_batches)] for kind in (Kind.F, Kind.B))
    return _alternate(forwards, backwards, ranks - 1 - rank)


def interleaved(ranks: int, rank: int, micro_batches: int, virtual_stages: int) -> Iterator[Action]:
    """Two forwards more for each rank after this one, and a round more for each stage of the rank but one."""
    forwards = _passes(Kind.F, ranks, rank, micro_batches, virtual_stages)
    backwards = _passes(Kind.B, ranks, rank, micro_batches, virtual_stages)
    first = (virtual_stages - 1) * _round(ranks, micro_batches) + 2 * (ranks - 1 - rank)
    return _alternate(forwards, backwards, first)


def zero_bubble(ranks: int, rank: int, micro_batches: int, virtual_stages: int) -> Iterator[Action]:
    """A rank puts its first gradients of weights off, as many as its index, to fill the end of the pipeline with."""
    forwards = _passes(Kind.F, ranks, rank, micro_batches, virtual_stages)
    inputs = _passes(Kind.I, ranks, rank, micro_batches, virtual_stages)
    weights = iter(_passes(Kind.W, ranks, rank, micro_batches, virtual_stages))
    first = (virtual_stages - 1) * _round(ranks, micro_batches) + ranks - 1 - rank
    done = 0
    for action in _alternate(forwards, inputs, first):
        yield action
        done += action.kind is Kind.I
        if action.kind is Kind.I and done > rank:
            yield next(weights)
    yield from weights


def _round(ranks: int, micro_batches: int) -> int:
    """Micro-batches that go through one stage of a rank before its next stage has its turn."""
    rounds = max(1, micro_batches // ranks)
    assert micro_batches % rounds == 0, "see requirements"
    return micro_batches // rounds


def _passes(kind: Kind, ranks: int, rank: int, micro_batches: int, virtual_stages: int) -> list[Action]:
    """All forwards of a rank, or all its backwards, which take its stages from the last to the first."""
    together = _round(ranks, micro_batches)
    stages = [rank + turn * ranks for turn in range(virtual_stages)]
    return [
        Action(stage, kind, micro_batch)
        for start in range(0, micro_batches, together)
        for stage in (stages if kind is Kind.F else reversed(stages))
        for micro_batch in range(start, start + together)
    ]


def _alternate(forwards: list[Action], backwards: list[Action], first: int) -> Iterator[Action]:
    """`first` forwards, then a forward and a backward in turn, then the backwards that are left."""
    first = min(first, len(forwards))
    yield from forwards[:first]
    for forward, backward in zip(forwards[first:], backwards, strict=False):
        yield from (forward, backward)
    yield from backwards[len(forwards) - first :]
