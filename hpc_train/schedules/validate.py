"""Check that a schedule can train: every computation exactly once, on its rank, and no deadlock."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from hpc_train.errors import UserError
from hpc_train.schedules.order import Action, Kind, Order, OrderEntry, list_actions


def validate_order(order: Order, micro_batches: int) -> None:
    """Raise UserError, in one line, if the order is incomplete or has a deadlock."""
    if wrong := find_problem(order, micro_batches):
        raise UserError(wrong)


def find_problem(order: Order, micro_batches: int) -> str | None:
    """Return a description of what is wrong with the order; None if it can train.

    Complete: each stage does F and B, or F, I and W, exactly once with each micro-batch, on the rank of its placement.
    Free of deadlock: executed with every entry waiting for its inputs, it reaches the end. One execution is proof for
    every timing, because a finished computation never makes another one wait.
    """
    return _find_misplaced(order, micro_batches) or _find_incomplete(order, micro_batches) or _find_deadlock(order)


def find_runtime_problem(order: Order) -> str | None:
    """Return what torch's pipeline runtime cannot execute of a valid order; None if it can.

    It finds the loss of a micro-batch by counting the forwards of the last stage.
    """
    last = order.stages - 1
    expected = 0
    for rank, position, action in _iterate_actions(order):
        if (action.stage, action.kind) == (last, Kind.F):
            if action.micro_batch != expected:
                place = _describe_place(rank, position)
                return f"{place}: {action}, but the last stage has to take its micro-batches in order"
            expected += 1
    return None


def _iterate_actions(order: Order) -> Iterator[tuple[int, int, Action]]:
    """Yield every action as (rank, position in its row, action)."""
    for rank, row in enumerate(order.rows):
        for position, step in enumerate(row):
            for action in list_actions(step):
                yield rank, position, action


def _describe_place(rank: int, position: int) -> str:
    return f"rank {rank}, position {position}"


def _find_misplaced(order: Order, micro_batches: int) -> str | None:
    for stage, rank in enumerate(order.placement):
        if not 0 <= rank < order.ranks:
            return f"stage {stage} is placed on rank {rank}, and there are {order.ranks} ranks"
    for rank in range(order.ranks):
        if rank not in order.placement:
            return f"rank {rank} has no stage, and so nothing to do"
    for rank, position, action in _iterate_actions(order):
        where = f"{_describe_place(rank, position)}: {action}"
        if not 0 <= action.stage < order.stages:
            return f"{where}: there are {order.stages} stages, counted from 0"
        if not 0 <= action.micro_batch < micro_batches:
            return f"{where}: there are {micro_batches} micro-batches, counted from 0"
        if order.placement[action.stage] != rank:
            return f"{where}: stage {action.stage} is on rank {order.placement[action.stage]}"
    return None


def _find_incomplete(order: Order, micro_batches: int) -> str | None:
    first: dict[Action, tuple[Action, int]] = {}
    for rank, position, action in _iterate_actions(order):
        for given in action.results:
            if given in first:
                by, where = first[given]
                return f"{_describe_place(rank, position)}: {action} does again what {by} does at position {where}"
            first[given] = action, position
    for stage in range(order.stages):
        for micro_batch in range(micro_batches):
            missing = [kind for kind in (Kind.F, Kind.I, Kind.W) if Action(stage, kind, micro_batch) not in first]
            if missing:
                names = " and ".join(f"{stage}{kind}{micro_batch}" for kind in missing)
                return f"rank {order.placement[stage]}: {names} is missing (B is I and W at once)"
    return None


@dataclass
class _Waiting:
    """A run of the order in which a rank waits for its inputs: the position of each rank, and all results so far."""

    order: Order
    position: list[int]
    done: set[Action]

    def get_entry(self, rank: int) -> OrderEntry | None:
        """Return the next entry of a rank; None at the end of its row."""
        row = self.order.rows[rank]
        return row[self.position[rank]] if self.position[rank] < len(row) else None

    def find_missing_input(self, step: OrderEntry) -> Action | None:
        """Return an input that an entry waits for; None if it can run.

        The second half of an overlap may use the result of the first.
        """
        own: set[Action] = set()
        for action in list_actions(step):
            for needed in action.list_inputs(self.order.stages):
                if needed not in self.done and needed not in own:
                    return needed
            own.update(action.results)
        return None

    def advance(self, rank: int) -> bool:
        """Run a rank until it has to wait; return whether it got any further."""
        before = self.position[rank]
        while (step := self.get_entry(rank)) is not None and self.find_missing_input(step) is None:
            self.done.update(given for action in list_actions(step) for given in action.results)
            self.position[rank] += 1
        return self.position[rank] > before


def _find_deadlock(order: Order) -> str | None:
    state = _Waiting(order, [0] * order.ranks, set())
    ranks = range(order.ranks)
    while any(state.advance(rank) for rank in ranks):
        pass
    stuck = next((rank for rank in ranks if state.get_entry(rank) is not None), None)
    return None if stuck is None else f"deadlock: {'; '.join(_describe_circle(state, stuck))}"


def _describe_circle(state: _Waiting, rank: int) -> list[str]:
    """Describe the ranks that wait for one another, one line each, starting the search at `rank`."""
    descriptions: dict[int, str] = {}
    while rank not in descriptions:
        step = state.get_entry(rank)
        assert step is not None
        needed = state.find_missing_input(step)
        assert needed is not None
        other = state.order.placement[needed.stage]
        descriptions[rank] = (
            f"{_describe_place(rank, state.position[rank])}: {step} waits for {_describe_giver(state.order, needed)}"
        )
        rank = other
    names = list(descriptions)
    return [descriptions[name] for name in names[names.index(rank) :]]


def _describe_giver(order: Order, needed: Action) -> str:
    """Describe the action that computes a result, and its place in the order."""
    places = (
        (rank, position, action) for rank, position, action in _iterate_actions(order) if needed in action.results
    )
    rank, position, action = next(places)
    return f"{action} at {_describe_place(rank, position)}"
