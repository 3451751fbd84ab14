"""The validator against brute force: orders that are changed at random, judged by counting and by a graph's circles."""

from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from graphlib import CycleError, TopologicalSorter

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from hpc_train.config.parallel import SCHEDULES
from hpc_train.errors import UserError
from hpc_train.schedules.generate import generate_order
from hpc_train.schedules.order import Action, Kind, Order, OrderEntry, list_actions, parse_action
from hpc_train.schedules.validate import find_problem, find_runtime_problem, validate_order


def order(*lines: str, placement: tuple[int, ...] | None = None) -> Order:
    steps = tuple(tuple(step for cell in line.split() if (step := parse_action(cell))) for line in lines)
    return Order(steps, placement or tuple(range(len(lines))))


def is_complete(candidate: Order, micro_batches: int) -> bool:
    """Count what every stage does, and where."""
    counted: Counter[tuple[int, int, int]] = Counter()
    kinds: dict[tuple[int, int, int], list[str]] = {}
    for rank in range(candidate.ranks):
        for action in candidate.actions(rank):
            place = (rank, action.stage, action.micro_batch)
            kinds.setdefault(place, []).append(action.kind)
            counted[place] += 1
    expected = {
        (rank, stage, micro) for stage, rank in enumerate(candidate.placement) for micro in range(micro_batches)
    }
    return set(kinds) == expected and all("".join(sorted(done)) in ("BF", "FIW") for done in kinds.values())


def has_no_circle(candidate: Order) -> bool:
    """Entries are nodes; each comes after the one before it on its rank and after those that give what it needs."""
    givers: dict[Action, tuple[int, int]] = {}
    nodes: list[tuple[tuple[int, int], OrderEntry]] = []
    for rank, row in enumerate(candidate.rows):
        for position, step in enumerate(row):
            nodes.append(((rank, position), step))
            for action in list_actions(step):
                for gives in action.results:
                    givers[gives] = (rank, position)
    graph: dict[tuple[int, int], set[tuple[int, int]]] = {}
    for (rank, position), step in nodes:
        before = {(rank, position - 1)} if position else set()
        for index, action in enumerate(list_actions(step)):
            for needed in action.list_inputs(candidate.stages):
                inside = [gives for other in list_actions(step)[:index] for gives in other.results]
                if needed not in inside:
                    before.add(givers[needed])
        graph[rank, position] = before
    try:
        TopologicalSorter(graph).prepare()
    except CycleError:
        return False
    return True


@st.composite
def changed_orders(draw: st.DrawFn) -> tuple[Order, int]:
    """An order of a schedule with up to three changes: two entries swapped, moved, dropped, doubled, renumbered."""
    name = draw(st.sampled_from(SCHEDULES))
    ranks = draw(st.integers(1, 3))
    micro_batches = draw(st.integers(1, 3)) * ranks * (2 if name == "dualpipev" else 1)
    made = generate_order(name, ranks, micro_batches)
    rows = [list(row) for row in made.rows]
    for _ in range(draw(st.integers(0, 3))):
        _change(draw, rows, made.stages, micro_batches)
    return Order(tuple(tuple(row) for row in rows), made.placement), micro_batches


def _change(draw: st.DrawFn, rows: list[list[OrderEntry]], stages: int, micro_batches: int) -> None:
    how = draw(st.sampled_from(["swap", "swap", "swap next", "move", "drop", "double", "another"]))
    row = rows[draw(st.integers(0, len(rows) - 1))]
    assume(len(row) > 1)
    first = draw(st.integers(0, len(row) - 2))
    second = draw(st.integers(first + 1, len(row) - 1)) if how == "swap" else first + 1
    other = rows[draw(st.integers(0, len(rows) - 1))]
    if how in ("swap", "swap next"):
        row[first], row[second] = row[second], row[first]
    elif how == "move":
        other.insert(draw(st.integers(0, len(other))), row.pop(first))
    elif how == "drop":
        del row[first]
    elif how == "double":
        other.insert(draw(st.integers(0, len(other))), row[first])
    else:
        kind = draw(st.sampled_from(list(Kind)))
        row[first] = Action(draw(st.integers(0, stages)), kind, draw(st.integers(0, micro_batches)))


@settings(max_examples=600)
@given(changed_orders())
def test_it_agrees_with_brute_force(case: tuple[Order, int]) -> None:
    candidate, micro_batches = case
    found = find_problem(candidate, micro_batches)
    if not is_complete(candidate, micro_batches):
        assert found is not None
        assert "deadlock" not in found
    elif not has_no_circle(candidate):
        assert found is not None
        assert found.startswith("deadlock: ")
    else:
        assert found is None


@pytest.mark.parametrize("change", [lambda row: row[::-1], lambda row: [*row[1:], row[0]]])
def test_the_random_changes_include_deadlocks_that_brute_force_sees(
    change: Callable[[list[OrderEntry]], list[OrderEntry]],
) -> None:
    made = generate_order("1f1b", 2, 2)
    candidate = replace(made, rows=(tuple(change(list(made.rows[0]))), made.rows[1]))
    assert is_complete(candidate, 2)
    assert not has_no_circle(candidate)
    assert (find_problem(candidate, 2) or "").startswith("deadlock")


@pytest.mark.parametrize(
    ("candidate", "micro_batches", "words"),
    [
        (order("0F0 0B0", "1F0"), 1, "rank 1: 1I0 and 1W0 is missing"),
        (order("0F0 0B0", "1F0 1I0"), 1, "rank 1: 1W0 is missing"),
        (order("0F0 0B0", "1F0 1B0"), 2, "rank 0: 0F1 and 0I1 and 0W1 is missing"),
        (order("0F0 0B0 0B0", "1F0 1B0"), 1, "rank 0, position 2: 0B0 does again what 0B0 does at position 1"),
        (order("0F0 0B0", "1F0 1B0 1W0"), 1, "rank 1, position 2: 1W0 does again what 1B0 does at position 1"),
        (order("0F0 0B0", "1F0 1B0 0F1"), 2, "rank 1, position 2: 0F1: stage 0 is on rank 0"),
        (order("0F0 0B0", "1F0 1B0 2F0"), 1, "rank 1, position 2: 2F0: there are 2 stages"),
        (order("0F0 0B0", "1F0 1B0 1F1"), 1, "rank 1, position 2: 1F1: there are 1 micro-batches"),
        (order("0F0 0B0", "", placement=(0,)), 1, "rank 1 has no stage"),
        (order("0F0 0B0", placement=(1,)), 1, "stage 0 is placed on rank 1, and there are 1 ranks"),
        (
            order("0B0 0F0", "1F0 1B0"),
            1,
            "deadlock: rank 0, position 0: 0B0 waits for 0F0 at rank 0, position 1",
        ),
        (
            order("0F0 0B0 0F1 0B1", "1F0 1F1 1B0 1B1"),
            2,
            "deadlock: rank 0, position 1: 0B0 waits for 1B0 at rank 1, position 2; "
            "rank 1, position 1: 1F1 waits for 0F1 at rank 0, position 2",
        ),
        (
            order("(0F0;0B0)OVERLAP_F_B", "1F0 1B0"),
            1,
            "deadlock: rank 0, position 0: (0F0;0B0)OVERLAP_F_B waits for 1B0 at rank 1, position 1; "
            "rank 1, position 0: 1F0 waits for (0F0",
        ),
    ],
)
def test_what_is_wrong_is_named_with_its_place(candidate: Order, micro_batches: int, words: str) -> None:
    found = find_problem(candidate, micro_batches)
    assert found is not None
    assert found.startswith(words.removesuffix("(0F0"))
    with pytest.raises(UserError) as caught:
        validate_order(candidate, micro_batches)
    assert str(caught.value) == found
    assert "\n" not in found


def test_one_of_an_overlap_may_wait_for_the_other() -> None:
    assert find_problem(order("0F0 0B0", "(1F0;1B0)OVERLAP_F_B"), 1) is None


def test_what_torch_cannot_run() -> None:
    candidate = order("0F1 0F0 0B1 0B0", "1F1 1F0 1B1 1B0")
    assert find_problem(candidate, 2) is None
    assert find_runtime_problem(candidate) == (
        "rank 1, position 0: 1F1, but the last stage has to take its micro-batches in order"
    )
    assert find_runtime_problem(generate_order("zbv", 2, 4)) is None
