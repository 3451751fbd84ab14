"""Simulate a pipeline schedule, given the time of each kind of computation of each stage.

The tests compare the simulated bubble with the published closed forms. For p ranks, m micro-batches and v stages per
rank, as a share of the step: naive 1 - 1/p; GPipe and 1F1B (p - 1) / (m + p - 1); interleaved 1F1B
(p - 1) / (v m + p - 1) (Narayanan et al. 2021, arXiv:2104.04473, section 2.2, who divide by the time without bubble).
ZB-H1 idles for (p - 1)(F + I - W) seconds on each rank (Qi et al. 2024, arXiv:2401.10241, table 2).
"""

from __future__ import annotations

from dataclasses import dataclass

from hpc_train.schedules.order import Action, Kind, Order, OrderEntry, list_actions


@dataclass(frozen=True)
class ActionTimes:
    """Duration of each kind of computation, one value for each stage, in any one unit of time."""

    forward: tuple[float, ...]
    inputs: tuple[float, ...]
    """Backward for the inputs (I)."""
    weights: tuple[float, ...]
    """Backward for the weights (W). A whole backward (B) takes both times."""
    communication: float = 0.0
    """Time of a message between ranks. It does not delay computation; stages of one rank need no message."""

    @staticmethod
    def even(
        stages: int, forward: float = 1.0, inputs: float = 1.0, weights: float = 1.0, communication: float = 0.0
    ) -> ActionTimes:
        """Return the same times for every stage."""
        return ActionTimes((forward,) * stages, (inputs,) * stages, (weights,) * stages, communication)

    def time_action(self, action: Action) -> float:
        """Return the duration of one computation."""
        by_kind = {Kind.F: self.forward, Kind.I: self.inputs, Kind.W: self.weights}
        return sum(by_kind[result.kind][result.stage] for result in action.results)


@dataclass(frozen=True)
class ActionSpan:
    """Start and end of one computation."""

    action: Action
    start: float
    end: float


@dataclass(frozen=True)
class Simulation:
    """Result of a simulation; the step begins at time 0."""

    spans: tuple[tuple[ActionSpan, ...], ...]
    """The computations of each rank, in order."""
    live: tuple[int, ...]
    """Peak number of activations on each rank. One activation belongs to one stage and one micro-batch, and lives from
    the start of its F to the end of its W or B."""

    @property
    def makespan(self) -> float:
        """Time at which the last rank is done."""
        return max((span.end for spans in self.spans for span in spans), default=0.0)

    @property
    def busy(self) -> tuple[float, ...]:
        """Total computing time of each rank."""
        return tuple(sum(span.end - span.start for span in spans) for spans in self.spans)

    @property
    def bubble(self) -> tuple[float, ...]:
        """Share of the makespan during which each rank idles."""
        total = self.makespan
        return tuple(1 - busy / total if total else 0.0 for busy in self.busy)

    @property
    def mean_bubble(self) -> float:
        """Mean bubble of all ranks: the share of the pipeline's time that is lost."""
        return sum(self.bubble) / len(self.bubble)


def simulate_order(order: Order, times: ActionTimes) -> Simulation:
    """Simulate one step: every entry starts as soon as its rank is free and its inputs have arrived.

    Results are sent when their entry ends; an overlap sends both of its results at its end, as torch does. The order
    must be valid (see validate_order).
    """
    clock = _Clock(order, times)
    waiting = [list(reversed(row)) for row in order.rows]
    # Let each rank run until it waits for another one; repeat until no rank gets any further.
    moved = True
    while moved:
        moved = False
        for rank, row in enumerate(waiting):
            while row and clock.is_ready(row[-1]):
                clock.run_entry(rank, row.pop())
                moved = True
    assert not any(waiting), "the order has a deadlock; see validate"
    return Simulation(tuple(tuple(spans) for spans in clock.spans), tuple(map(_count_live, order.rows)))


class _Clock:
    """Start and end of everything that has been computed so far."""

    def __init__(self, order: Order, times: ActionTimes) -> None:
        self.spans: list[list[ActionSpan]] = [[] for _ in order.rows]
        self._order, self._times = order, times
        self._ended: dict[Action, float] = {}

    def is_ready(self, entry: OrderEntry) -> bool:
        """Return whether all inputs of an entry have been computed; halves of an overlap may feed each other."""
        own = {result for action in list_actions(entry) for result in action.results}
        needs = {needed for action in list_actions(entry) for needed in action.list_inputs(self._order.stages)}
        return all(needed in self._ended for needed in needs - own)

    def run_entry(self, rank: int, entry: OrderEntry) -> None:
        """Run an entry on a rank at the earliest possible time."""
        for action in list_actions(entry):
            free = self.spans[rank][-1].end if self.spans[rank] else 0.0
            start = max(
                [free, *(self._find_arrival(rank, needed) for needed in action.list_inputs(self._order.stages))]
            )
            self.spans[rank].append(ActionSpan(action, start, start + self._times.time_action(action)))
        # All results of the entry are sent when its last action ends.
        for result in (result for action in list_actions(entry) for result in action.results):
            self._ended[result] = self.spans[rank][-1].end

    def _find_arrival(self, rank: int, needed: Action) -> float:
        """Return when a result arrives at a rank; 0 for the result of the other half of the same overlap."""
        on_other_rank = self._order.placement[needed.stage] != rank
        return self._ended.get(needed, 0.0) + (self._times.communication if on_other_rank else 0.0)


def _count_live(row: tuple[OrderEntry, ...]) -> int:
    """Return the largest number of activations of a row: forwards without their W or B yet."""
    live = peak = 0
    for kind in (action.kind for entry in row for action in list_actions(entry)):
        live += (kind is Kind.F) - (kind in (Kind.W, Kind.B))
        peak = max(peak, live)
    return peak
