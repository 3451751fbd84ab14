"""Search for the order of a pipeline whose stages take unequal times, such as one with a large head.

The shipped schedules are best for equal stages. Blocks are whole, and a vocabulary of 128,000 costs as much as two or
three of them, so the stages of a real model are not equal. The search begins with shipped orders, evens out the work of
*ranks* (which may have several stages) instead of that of stages, moves single blocks between stages as long as the
simulated step gets shorter, and then lets a waiting rank compute a later action of its row early, as long as it holds
no more activations than before. The result is the best of what was tried, not proven to be the best.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import accumulate

from hpc_train.errors import UserError
from hpc_train.schedules.generate import REQUIREMENTS, generate_order
from hpc_train.schedules.order import Action, Kind, Order
from hpc_train.schedules.simulate import ActionTimes, Simulation, simulate_order

Sizes = tuple[int, ...]
"""Blocks of each stage."""


@dataclass(frozen=True)
class PartTimes:
    """Times of one micro-batch in the parts of a model, in any one unit."""

    before: float
    """Forward of the embedding."""
    blocks: tuple[float, ...]
    """Forward of each block."""
    after: float
    """Forward of the head and the loss."""
    inputs: float = 1.0
    """Backward for the inputs, as a multiple of the forward."""
    weights: float = 1.0
    """Backward for the weights, as a multiple of the forward."""
    communication: float = 0.0
    """A message between two ranks."""

    def of_stages(self, sizes: Sizes) -> ActionTimes:
        """Return the times of stages that have these numbers of blocks.

        The first stage needs no gradient of its inputs: all of its backward is that of weights.
        """
        sums = [0.0, *accumulate(self.blocks)]
        ends = list(accumulate(sizes))
        forward = [sums[end] - sums[end - size] for end, size in zip(ends, sizes, strict=True)]
        forward[0] += self.before
        forward[-1] += self.after
        inputs, weights = ([value * factor for value in forward] for factor in (self.inputs, self.weights))
        # The right side is evaluated before the assignment.
        inputs[0], weights[0] = 0.0, inputs[0] + weights[0]
        return ActionTimes(tuple(forward), tuple(inputs), tuple(weights), self.communication)


@dataclass(frozen=True)
class FoundSchedule:
    """The best order that a search has tried."""

    order: Order
    sizes: Sizes
    times: ActionTimes
    simulation: Simulation

    @property
    def live_blocks(self) -> tuple[int, ...]:
        """Largest number of activations, of one block and one micro-batch, that each rank holds at once."""
        return count_live_blocks(self.order, self.sizes)


_BEGINNINGS = (("1f1b", 1), ("interleaved_zero_bubble", 1), ("interleaved_zero_bubble", 2), ("zbv", 2))
"""Orders to begin with, and their stages per rank; the first does not split backwards."""
_WINDOWS = (2, 4, 16)
"""How far ahead of its turn a rank may take an entry of its row."""
_ROUNDS = 4
"""Most rounds over all boundaries between stages, and of reordering."""


def search_schedule(parts: PartTimes, ranks: int, micro_batches: int, *, split_backward: bool = True) -> FoundSchedule:
    """Search for the order and the sizes of stages with the shortest simulated step.

    split_backward: gradients of inputs and weights may be computed apart, which recomputation and compilation do not
    allow. Raises UserError where no order to begin with fits the numbers.
    """
    beginnings = [
        candidate for candidate in _BEGINNINGS if split_backward or not REQUIREMENTS[candidate[0]].splits_backward
    ]
    candidates, refused = [], ""
    for name, virtual in beginnings:
        try:
            order = generate_order(name, ranks, micro_batches, virtual)
        except UserError as error:
            refused = str(error)
            continue
        if order.stages <= len(parts.blocks):
            by_rank = even_out(parts, order.placement)
            by_stage = even_out(parts, tuple(range(order.stages)))
            candidates += [_improve(parts, order, micro_batches, sizes) for sizes in dict.fromkeys((by_rank, by_stage))]
    if not candidates:
        raise UserError(refused or f"parallel.pp={ranks}: the model has {len(parts.blocks)} blocks; lower parallel.pp")
    return min(candidates, key=lambda candidate: candidate.simulation.makespan)


def _improve(parts: PartTimes, order: Order, micro_batches: int, sizes: Sizes) -> FoundSchedule:
    """Improve the sizes of an order's stages, then the order, until neither helps."""
    best = _measure(parts, order, sizes)
    for _ in range(_ROUNDS):
        before = best.simulation.makespan
        best = _move_boundaries(parts, best, micro_batches)
        best = _reorder(parts, best)
        if best.simulation.makespan >= before:
            break
    return best


def _measure(parts: PartTimes, order: Order, sizes: Sizes) -> FoundSchedule:
    times = parts.of_stages(sizes)
    return FoundSchedule(order, sizes, times, simulate_order(order, times))


def even_out(parts: PartTimes, placement: tuple[int, ...]) -> Sizes:
    """Return sizes of stages for which the busiest rank has least to do, by moving one block at a time.

    placement: the rank of each stage; a rank for each of them evens out the stages.
    """
    stages, blocks = len(placement), len(parts.blocks)
    sizes = tuple(blocks * (stage + 1) // stages - blocks * stage // stages for stage in range(stages))
    while True:
        others = list(_move_blocks(sizes))
        better = min(others, key=lambda one: _sum_loads(parts, placement, one), default=sizes)
        if _sum_loads(parts, placement, better) >= _sum_loads(parts, placement, sizes):
            return sizes
        sizes = better


def _move_blocks(sizes: Sizes) -> Iterator[Sizes]:
    """Yield the sizes with one block less in one stage and one more in another; the blocks between shift along."""
    for giver in range(len(sizes)):
        for taker in range(len(sizes)):
            if giver != taker and sizes[giver] > 1:
                yield tuple(size - (stage == giver) + (stage == taker) for stage, size in enumerate(sizes))


def _sum_loads(parts: PartTimes, placement: tuple[int, ...], sizes: Sizes) -> tuple[float, float]:
    """Return the forward of the busiest rank, and the sum of squares over stages as the second criterion."""
    forward = parts.of_stages(sizes).forward
    loads = [0.0] * (max(placement) + 1)
    for stage, rank in enumerate(placement):
        loads[rank] += forward[stage]
    return round(max(loads), 9), round(sum(value * value for value in forward), 9)


def _move_boundaries(parts: PartTimes, best: FoundSchedule, micro_batches: int) -> FoundSchedule:
    """Move single blocks between neighbouring stages as long as that makes the step shorter."""
    work = (1.0 + parts.inputs + parts.weights) * micro_batches
    for _ in range(_ROUNDS):
        before = best.simulation.makespan
        for stage in range(len(best.sizes) - 1):
            for giver, taker in ((stage, stage + 1), (stage + 1, stage)):
                if best.sizes[giver] == 1:
                    continue
                sizes = tuple(size - (index == giver) + (index == taker) for index, size in enumerate(best.sizes))
                if _sum_loads(parts, best.order.placement, sizes)[0] * work >= best.simulation.makespan:
                    continue  # the busiest rank alone takes longer
                best = min(
                    best, _measure(parts, best.order, sizes), key=lambda candidate: candidate.simulation.makespan
                )
        if best.simulation.makespan >= before:
            break
    return best


def _reorder(parts: PartTimes, best: FoundSchedule) -> FoundSchedule:
    """Let ranks that would wait take entries ahead of their turn, with several limits on how far."""
    if any(not isinstance(entry, Action) for row in best.order.rows for entry in row):
        return best
    limits = best.live_blocks
    for window in _WINDOWS:
        rows = _take_ahead(best, window, limits)
        if rows is not None:
            other = _measure(parts, Order(tuple(map(tuple, rows)), best.order.placement), best.sizes)
            best = min(best, other, key=lambda candidate: candidate.simulation.makespan)
    return best


def _take_ahead(schedule: FoundSchedule, window: int, limits: tuple[int, ...]) -> list[list[Action]] | None:
    """Simulate the ranks; each takes the first entry of the next `window` of its row that it can start soonest.

    limits: activations of blocks that each rank may hold. Returns the rows; None if ranks got stuck on those limits.
    """
    ranks = _EagerRanks(schedule, limits)
    while any(ranks.waiting):
        choices = [choice for rank in range(len(ranks.waiting)) for choice in ranks.list_choices(rank, window)]
        if not choices:
            return None
        start, position, rank = min(choices)
        ranks.run(rank, position, start)
    return ranks.rows


class _EagerRanks:
    """The ranks of a simulated step: what each has done, what waits, and what it holds."""

    def __init__(self, schedule: FoundSchedule, limits: tuple[int, ...]) -> None:
        order = schedule.order
        self._schedule, self._limits = schedule, limits
        self.waiting = [list(order.actions(rank)) for rank in range(order.ranks)]
        self.rows: list[list[Action]] = [[] for _ in self.waiting]
        """Actions of each rank in the order in which it runs them."""
        self._free, self._live = [0.0] * order.ranks, [0] * order.ranks
        self._ended: dict[Action, float] = {}

    def list_choices(self, rank: int, window: int) -> list[tuple[float, int, int]]:
        """Return (start, position in its row, rank) of each action that the rank could run next."""
        choices, seen = [], set[tuple[int, Kind]]()
        for position, action in enumerate(self.waiting[rank][:window]):
            key = action.stage, action.kind
            if key in seen or not self._fits(rank, action):  # micro-batches of a stage stay in order
                continue
            seen.add(key)
            if (start := self._find_start(rank, action)) is not None:
                choices.append((start, position, rank))
        return choices

    def run(self, rank: int, position: int, start: float) -> None:
        """Have the rank run the action at this position of its row."""
        action = self.waiting[rank].pop(position)
        self.rows[rank].append(action)
        self._free[rank] = start + self._schedule.times.time_action(action)
        self._ended.update(dict.fromkeys(action.results, self._free[rank]))
        change = (action.kind is Kind.F) - (action.kind in (Kind.W, Kind.B))
        self._live[rank] += self._schedule.sizes[action.stage] * change

    def _find_start(self, rank: int, action: Action) -> float | None:
        """Return when the rank could start the action; None while an input of it has not been computed."""
        order, start = self._schedule.order, self._free[rank]
        for needed in action.list_inputs(order.stages):
            if needed not in self._ended:
                return None
            on_other_rank = order.placement[needed.stage] != rank
            start = max(start, self._ended[needed] + (self._schedule.times.communication if on_other_rank else 0.0))
        return start

    def _fits(self, rank: int, action: Action) -> bool:
        return action.kind is not Kind.F or self._live[rank] + self._schedule.sizes[action.stage] <= self._limits[rank]


def count_live_blocks(order: Order, sizes: Sizes) -> tuple[int, ...]:
    """Count the activations of blocks that each rank holds at most: from F to W or B."""
    peaks = []
    for rank in range(order.ranks):
        live = peak = 0
        for action in order.actions(rank):
            live += sizes[action.stage] * ((action.kind is Kind.F) - (action.kind in (Kind.W, Kind.B)))
            peak = max(peak, live)
        peaks.append(peak)
    return tuple(peaks)
