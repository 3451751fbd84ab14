"""Generate a schedule's order by its name, and say what each schedule requires of ranks, micro-batches and stages.

To add a schedule: name it in config (SCHEDULES), say in REQUIREMENTS what it needs, write the function that yields one
rank's row, and enter it in _ROWS. Checks, simulation and the trainer follow from the order. The planner needs its
micro-batches in flight (_IN_FLIGHT of planner/model/pipeline.py) and its bubble (bubble_seconds of step_time.py there).
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

from hpc_train.config.parallel import SCHEDULES
from hpc_train.errors import UserError
from hpc_train.near_names import suggest_names
from hpc_train.schedules.order import (
    Action,
    Kind,
    Order,
    OrderEntry,
    Overlap,
    make_looped_placement,
    make_v_shaped_placement,
)


@dataclass(frozen=True)
class Requirements:
    """Numbers of stages and micro-batches that a schedule can run; the same as torch's where torch has the schedule."""

    virtual_stages: int = 1
    """Default number of stages per rank."""
    least_virtual: int = 1
    most_virtual: int | None = 1
    """None: no upper limit."""
    v_shaped: bool = False
    """Rank r has the stages r and 2p - 1 - r; otherwise it has r, r + p, r + 2p, ..."""
    splits_backward: bool = False
    rounds: bool = False
    """The m micro-batches run in max(1, m // p) rounds of equal size, so m must be divisible by that number."""
    micro_batches_per_rank: int = 0
    """Minimum number of micro-batches, as a multiple of p."""


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


def find_requirements(name: str) -> Requirements:
    """Return the requirements of the schedule `name`. Raises UserError if there is none."""
    if name not in REQUIREMENTS:
        raise UserError(f"parallel.pipeline.schedule={name}: no such schedule; {suggest_names(name, REQUIREMENTS)}")
    return REQUIREMENTS[name]


def check_schedule(name: str, ranks: int, micro_batches: int, virtual_stages: int) -> None:
    """Raise UserError if the schedule cannot run with these numbers. virtual_stages: per rank."""
    needs = find_requirements(name)
    for what, count in (("ranks", ranks), ("micro-batches", micro_batches), ("virtual stages", virtual_stages)):
        if count < 1:
            raise UserError(f"parallel.pipeline.schedule={name}: {count} {what}; there must be at least 1")
    _check_virtual_stages(name, needs, virtual_stages)
    _check_micro_batches(name, needs, ranks, micro_batches)


def _check_virtual_stages(name: str, needs: Requirements, count: int) -> None:
    least, most = needs.least_virtual, needs.most_virtual
    if least <= count and (most is None or count <= most):
        return
    range_ = f"exactly {least}" if least == most else f"at least {least}"
    instead = {1: "gpipe or 1f1b"}.get(count, "interleaved_1f1b, looped_bfs or interleaved_zero_bubble")
    raise UserError(
        f"parallel.pipeline.virtual_stages={count}: {name} has {range_} per rank; leave it out, or use "
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
        below, above = _find_equal_rounds(ranks, count, -1), _find_equal_rounds(ranks, count, 1)
        raise UserError(
            f"parallel.pipeline.schedule={name}: {count} micro-batches do not make {rounds} equal rounds over {ranks} "
            f"ranks; {below} or {above} would, or use parallel.pipeline.schedule=looped_bfs"
        )


def _find_equal_rounds(ranks: int, count: int, direction: int) -> int:
    """Return the nearest number of micro-batches that divides into equal rounds. direction: +1 or -1.

    The search ends, because every multiple of `ranks` does.
    """
    while count % max(1, count // ranks):
        count += direction
    return count


def generate_1f1b_row(ranks: int, rank: int, micro_batches: int) -> Iterator[Action]:
    """Generate one rank's row of 1F1B; it warms up with one forward for each rank after this one."""
    forwards, backwards = ([Action(rank, kind, micro) for micro in range(micro_batches)] for kind in (Kind.F, Kind.B))
    return _alternate(forwards, backwards, ranks - 1 - rank)


def generate_interleaved_row(ranks: int, rank: int, micro_batches: int, virtual_stages: int) -> Iterator[Action]:
    """Generate one rank's row of interleaved 1F1B (Narayanan et al. 2021, arXiv:2104.04473, section 2.2).

    It warms up with one round of forwards for each of its stages but the last, and two for each rank after this one.
    """
    forwards = _list_passes(Kind.F, ranks, rank, micro_batches, virtual_stages)
    backwards = _list_passes(Kind.B, ranks, rank, micro_batches, virtual_stages)
    first = (virtual_stages - 1) * _compute_round_size(ranks, micro_batches) + 2 * (ranks - 1 - rank)
    return _alternate(forwards, backwards, first)


def generate_zero_bubble_row(ranks: int, rank: int, micro_batches: int, virtual_stages: int) -> Iterator[Action]:
    """Generate one rank's row of interleaved ZB-H1 (Qi et al. 2024, arXiv:2401.10241).

    On rank r the weight gradients are always r micro-batches behind the input gradients; they fill the bubble at the
    end of the step.
    """
    forwards = _list_passes(Kind.F, ranks, rank, micro_batches, virtual_stages)
    inputs = _list_passes(Kind.I, ranks, rank, micro_batches, virtual_stages)
    weights = iter(_list_passes(Kind.W, ranks, rank, micro_batches, virtual_stages))
    first = (virtual_stages - 1) * _compute_round_size(ranks, micro_batches) + ranks - 1 - rank
    done = 0
    for action in _alternate(forwards, inputs, first):
        yield action
        done += action.kind is Kind.I
        if action.kind is Kind.I and done > rank:
            yield next(weights)
    yield from weights


def _compute_round_size(ranks: int, micro_batches: int) -> int:
    """Return how many micro-batches pass through one stage of a rank before the rank turns to its next stage."""
    rounds = max(1, micro_batches // ranks)
    assert micro_batches % rounds == 0, "see requirements"
    return micro_batches // rounds


def _list_passes(kind: Kind, ranks: int, rank: int, micro_batches: int, virtual_stages: int) -> list[Action]:
    """List all forwards of a rank, first stage first, or all its backwards, last stage first."""
    together = _compute_round_size(ranks, micro_batches)
    stages = [rank + turn * ranks for turn in range(virtual_stages)]
    return [
        Action(stage, kind, micro_batch)
        for start in range(0, micro_batches, together)
        for stage in (stages if kind is Kind.F else reversed(stages))
        for micro_batch in range(start, start + together)
    ]


def _alternate(forwards: list[Action], backwards: list[Action], first: int) -> Iterator[Action]:
    """Yield `first` forwards, then forwards and backwards alternately, then the remaining backwards."""
    first = min(first, len(forwards))
    yield from forwards[:first]
    for forward, backward in zip(forwards[first:], backwards, strict=False):
        yield from (forward, backward)
    yield from backwards[len(forwards) - first :]


class _RowBuilder:
    """Builds the row of a rank with two stages, from words such as F0 (forward of its first stage).

    The micro-batch is implied: each kind of computation of each stage counts its own micro-batches from 0.
    """

    def __init__(self, ranks: int, rank: int) -> None:
        self.steps: list[OrderEntry] = []
        self._stages = (rank, 2 * ranks - 1 - rank)
        self._next: Counter[tuple[int, Kind]] = Counter()
        self._owed: deque[Action] = deque()

    def add(self, *words: str) -> None:
        """Append one entry for each word; F0 is the forward of the rank's first stage with its next micro-batch."""
        self.steps += [self._take(word) for word in words]

    def overlap(self, forward: str, backward: str) -> None:
        """Append a forward and a backward as one overlapped entry."""
        self.steps.append(Overlap(self._take(forward), self._take(backward)))

    def add_owed_weights(self) -> None:
        """Append the weight gradient of the oldest I whose W has not been appended yet, if there is one."""
        if self._owed:
            owed = self._owed.popleft()
            self.steps.append(Action(owed.stage, Kind.W, owed.micro_batch))

    def _take(self, word: str) -> Action:
        kind, local = Kind(word[0]), int(word[1])
        # B is I and W at once, so B and I share one counter of micro-batches.
        counted = local, Kind.I if kind is Kind.B else kind
        action = Action(self._stages[local], kind, self._next[counted])
        self._next[counted] += 1
        if kind is Kind.I:
            self._owed.append(action)
        return action


def generate_zbv_row(ranks: int, rank: int, micro_batches: int) -> list[OrderEntry]:
    """Generate one rank's row of ZB-V (Qi et al. 2024, arXiv:2401.10241, section 6).

    No rank idles between its first and last entry if F, I and W take the same time.
    """
    # The pattern below needs 2p - 1 micro-batches to fill the pipeline. With fewer it is built for 2p - 1, and the
    # entries of micro-batches that do not exist are removed at the end.
    count = max(2 * ranks - 1, micro_batches)
    row = _RowBuilder(ranks, rank)
    # Warm-up: forwards down the first leg of the V until the first micro-batch comes back up the second leg.
    row.add(*["F0"] * (2 * (ranks - rank) - 1))
    row.add(*["F1", "F0"] * rank)
    row.add(*["F1", "I1", "W1"] * (ranks - rank))
    # Steady state: one forward, input gradient and weight gradient of each of the two stages per micro-batch.
    ahead = 2 * ranks - 1 - rank
    for more in range(count - ranks):
        row.add(*["F0"] * (ahead + more < count), "I0", "W0", "F1", "I1", "W1")
    # Cool-down: input gradients first, since other ranks wait for them; weight gradients fill the rest.
    row.add(*["I0", "I1"] * rank)
    row.add(*["I0", "W0"] * (ranks - rank))
    row.add(*["W1"] * rank, *["W0"] * rank)
    return [step for step in row.steps if isinstance(step, Action) and step.micro_batch < micro_batches]


def generate_dualpipev_row(ranks: int, rank: int, micro_batches: int) -> list[OrderEntry]:
    """Generate one rank's row of DualPipeV, the V-shaped half of DualPipe (arXiv:2412.19437, section 3.2.1).

    The forward of one stage overlaps the backward of the other, so that each hides the other's communication.
    """
    after = ranks - 1 - rank
    row = _RowBuilder(ranks, rank)
    row.add(*["F0"] * (2 * after))
    row.add(*["F0", "F1"] * (rank + 1))
    # While the pipeline still fills, split backwards send input gradients to the rank before as early as possible.
    for _ in range(after):
        row.add("I1")
        row.add_owed_weights()
        row.add("F1")
    for turn in range(micro_batches - 2 * ranks + rank + 1):
        if turn == 0 and after == 0:
            row.add("F0", "B1")  # apart, so that the rank before gets its input sooner
        else:
            row.overlap("F0", "B1")
        row.overlap("F1", "B0")
    for _ in range(after):
        row.add("B1")
        row.overlap("F1", "B0")
    _drain(row, rank, after)
    return row.steps


def _drain(row: _RowBuilder, rank: int, after: int) -> None:
    """Append the remaining backwards; the later half is split, and its weight gradients fill the waits at the end."""
    backwards = [f"{local}" for _ in range(rank + 1) for local in "10"]
    whole_backwards = 2 * ((rank + 1) // 2) + (rank % 2 == 0)
    row.add(*[f"{'B' if index < whole_backwards else 'I'}{local}" for index, local in enumerate(backwards)])
    for _ in range(after):
        row.add_owed_weights()
        row.add("I0")
    for _ in range(rank + 1):
        row.add_owed_weights()


_RowGenerator = Callable[[int, int, int, int], Iterable[OrderEntry]]
"""Generates one rank's row from (ranks, rank, micro-batches, virtual stages per rank)."""


def generate_order(name: str, ranks: int, micro_batches: int, virtual_stages: int | None = None) -> Order:
    """Generate the order of the schedule `name`, one of config.parallel.SCHEDULES.

    virtual_stages: stages per rank; None for the schedule's default. The order is the one of
    torch.distributed.pipelining where torch has the schedule. Raises UserError as check_schedule does.
    """
    needs = find_requirements(name)
    virtual_stages = needs.virtual_stages if virtual_stages is None else virtual_stages
    check_schedule(name, ranks, micro_batches, virtual_stages)
    rows = tuple(tuple(_ROWS[name](ranks, rank, micro_batches, virtual_stages)) for rank in range(ranks))
    return Order(
        rows, make_v_shaped_placement(ranks) if needs.v_shaped else make_looped_placement(ranks, virtual_stages)
    )


def generate_row(name: str, ranks: int, rank: int, micro_batches: int, virtual_stages: int) -> tuple[OrderEntry, ...]:
    """Generate one rank's row of the order that generate_order makes. Raises UserError as that does."""
    check_schedule(name, ranks, micro_batches, virtual_stages)
    return tuple(_ROWS[name](ranks, rank, micro_batches, virtual_stages))


def _generate_naive_row(rank: int, micro_batches: int) -> Iterator[OrderEntry]:
    """Run one micro-batch after another through all stages and back: one rank works at a time."""
    for micro_batch in range(micro_batches):
        yield Action(rank, Kind.F, micro_batch)
        yield Action(rank, Kind.B, micro_batch)


def _generate_gpipe_row(rank: int, micro_batches: int) -> Iterator[OrderEntry]:
    """Run all forwards, then all backwards (Huang et al. 2019, arXiv:1811.06965)."""
    for kind in (Kind.F, Kind.B):
        yield from (Action(rank, kind, micro_batch) for micro_batch in range(micro_batches))


def _generate_looped_bfs_row(ranks: int, rank: int, micro_batches: int, virtual_stages: int) -> Iterator[OrderEntry]:
    """Run all micro-batches through one stage, then through the rank's next (Lamy-Poirier 2023, arXiv:2211.05953)."""
    stages = [rank + turn * ranks for turn in range(virtual_stages)]
    # Backwards go through the micro-batches in reverse, so that the last activation that was stored is freed first.
    for stage in stages:
        yield from (Action(stage, Kind.F, micro_batch) for micro_batch in range(micro_batches))
    for stage in reversed(stages):
        yield from (Action(stage, Kind.B, micro_batch) for micro_batch in reversed(range(micro_batches)))


_ROWS: dict[str, _RowGenerator] = {
    "naive": lambda ranks, rank, micro_batches, virtual: _generate_naive_row(rank, micro_batches),
    "gpipe": lambda ranks, rank, micro_batches, virtual: _generate_gpipe_row(rank, micro_batches),
    "1f1b": lambda ranks, rank, micro_batches, virtual: generate_1f1b_row(ranks, rank, micro_batches),
    "interleaved_1f1b": generate_interleaved_row,
    "looped_bfs": _generate_looped_bfs_row,
    "interleaved_zero_bubble": generate_zero_bubble_row,
    "zbv": lambda ranks, rank, micro_batches, virtual: generate_zbv_row(ranks, rank, micro_batches),
    "dualpipev": lambda ranks, rank, micro_batches, virtual: generate_dualpipev_row(ranks, rank, micro_batches),
}
