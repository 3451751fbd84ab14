"""Simulate an order: an event simulation with a time for each kind of computation of each stage.

Closed forms that it meets, for p ranks, m micro-batches, v stages a rank, as shares of the whole time of a rank:
naive 1 - 1/p; GPipe and 1F1B (p - 1) / (m + p - 1), interleaved 1F1B (p - 1) / (v m + p - 1) (Narayanan et al. 2021,
arXiv:2104.04473, section 2.2, who give them over the time without bubble); ZB-H1 idle for (p - 1)(F + I - W) on each
rank (Qi et al. 2024, arXiv:2401.10241, table 2).
"""

from __future__ import annotations

from dataclasses import dataclass

from hpc_train.schedules.order import Action, Kind, Order, OrderEntry, entry_actions


@dataclass(frozen=True)
class ActionTimes:
    """Seconds, or any unit; one value for each stage."""

    forward: tuple[float, ...]
    inputs: tuple[float, ...]
    """Backward for the inputs, I."""
    weights: tuple[float, ...]
    """Backward for the weights, W; B takes both."""
    communication: float = 0.0
    """From one rank to another, beside whatever these compute; between stages of one rank there is none."""

    @staticmethod
    def even(
        stages: int, forward: float = 1.0, inputs: float = 1.0, weights: float = 1.0, communication: float = 0.0
    ) -> ActionTimes:
        """Return the same times for every stage."""
        return ActionTimes((forward,) * stages, (inputs,) * stages, (weights,) * stages, communication)

    def of(self, action: Action) -> float:
        """Of one computation."""
        by_kind = {Kind.F: self.forward, Kind.I: self.inputs, Kind.W: self.weights}
        return sum(by_kind[given.kind][given.stage] for given in action.results)


@dataclass(frozen=True)
class ActionSpan:
    """When a computation is done."""

    action: Action
    start: float
    end: float


@dataclass(frozen=True)
class Simulation:
    """Times of a simulated order; everything begins at 0."""

    spans: tuple[tuple[ActionSpan, ...], ...]
    """Of each rank."""
    live: tuple[int, ...]
    """Largest number of activations that each rank holds at once: of one stage and one micro-batch, from the start of
    its F to the end of its W or B."""

    @property
    def makespan(self) -> float:
        """Until the last rank is done."""
        return max((span.end for spans in self.spans for span in spans), default=0.0)

    @property
    def busy(self) -> tuple[float, ...]:
        """Time that each rank computes."""
        return tuple(sum(span.end - span.start for span in spans) for spans in self.spans)

    @property
    def bubble(self) -> tuple[float, ...]:
        """Share of the makespan that each rank does not compute."""
        total = self.makespan
        return tuple(1 - busy / total if total else 0.0 for busy in self.busy)

    @property
    def mean_bubble(self) -> float:
        """Over the ranks: the share of the pipeline that is lost."""
        return sum(self.bubble) / len(self.bubble)


def simulate_order(order: Order, times: ActionTimes) -> Simulation:
    """Every entry starts as soon as its rank is free and what it needs is there.

    A result is on its way when its entry has ended: for an overlap, both at the end of the second, as torch does it.
    The order must be valid (see validate).
    """
    clock = _Clock(order, times)
    waiting = [list(reversed(row)) for row in order.rows]
    moved = True
    while moved:
        moved = False
        for rank, row in enumerate(waiting):
            while row and clock.knows(row[-1]):
                clock.do(rank, row.pop())
                moved = True
    assert not any(waiting), "the order has a deadlock; see validate"
    return Simulation(tuple(tuple(spans) for spans in clock.spans), tuple(map(_live, order.rows)))


class _Clock:
    """When everything that has been done was done."""

    def __init__(self, order: Order, times: ActionTimes) -> None:
        self.spans: list[list[ActionSpan]] = [[] for _ in order.rows]
        self._order, self._times = order, times
        self._ended: dict[Action, float] = {}

    def knows(self, step: OrderEntry) -> bool:
        """Whether the end of all that an entry needs is known."""
        own = {given for action in entry_actions(step) for given in action.results}
        needs = {needed for action in entry_actions(step) for needed in action.list_inputs(self._order.stages)}
        return all(needed in self._ended for needed in needs - own)

    def do(self, rank: int, step: OrderEntry) -> None:
        """Let a rank do an entry as early as it can."""
        for action in entry_actions(step):
            free = self.spans[rank][-1].end if self.spans[rank] else 0.0
            start = max([free, *(self._arrival(rank, needed) for needed in action.list_inputs(self._order.stages))])
            self.spans[rank].append(ActionSpan(action, start, start + self._times.of(action)))
        for given in (given for action in entry_actions(step) for given in action.results):
            self._ended[given] = self.spans[rank][-1].end

    def _arrival(self, rank: int, needed: Action) -> float:
        """When a result is there; 0 for what the other half of an overlap has just given."""
        away = self._order.placement[needed.stage] != rank
        return self._ended.get(needed, 0.0) + (self._times.communication if away else 0.0)


def _live(row: tuple[OrderEntry, ...]) -> int:
    """Largest number of forwards without their W or B."""
    live = peak = 0
    for kind in (action.kind for step in row for action in entry_actions(step)):
        live += (kind is Kind.F) - (kind in (Kind.W, Kind.B))
        peak = max(peak, live)
    return peak
