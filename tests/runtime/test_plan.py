"""From facts to a plan: whole nodes move, and every doubt ends in the launcher's order with its reason."""

from __future__ import annotations

import dataclasses
import re

import pytest
from fact_helpers import answer, backwards, changed, facts_of
from hypothesis import given
from hypothesis import strategies as st

from hpc_train.config.run import RunConfig
from hpc_train.errors import UserError
from hpc_train.placement.placement_result import Placement
from hpc_train.runtime.host_info import ProcessInfo
from hpc_train.runtime.rank_assignment import (
    NotPlacedError,
    RankAssignment,
    decide_assignment,
    hash_assignment,
    parse_assignment,
)


def with_placement(how: str) -> RunConfig:
    config = RunConfig()
    config.launch.placement = how
    return config


def test_whole_nodes_move() -> None:
    plan = decide_assignment(RunConfig(), facts_of(3, 2), 6, answer(2, 0, 1))
    assert plan.map_processes() == (2, 3, 4, 5, 0, 1)
    assert [plan.find_rank(process, process // 2, process % 2) for process in range(6)] == list(plan.map_processes())
    assert (plan.master, plan.port) == ("10.0.0.3", 5002)
    assert (plan.reason, plan.warning, plan.hosts) == ("2.00x less", None, ["n0", "n1", "n2"])
    assert plan.result["cost"] == {"identity": 2.0, "placed": 1.0}


@given(st.permutations(range(4)), st.integers(1, 3))
def test_every_order_is_a_bijection_that_keeps_nodes_together(order: list[int], each: int) -> None:
    plan = decide_assignment(RunConfig(), facts_of(4, each), 4 * each, answer(*order, each=each))
    ranks = plan.map_processes()
    assert sorted(ranks) == list(range(4 * each))
    for node in range(4):
        own = ranks[node * each : (node + 1) * each]
        assert list(own) == list(range(own[0], own[0] + each))
        assert own[0] == order.index(node) * each


def test_a_launcher_that_deals_ranks_out_gets_them_put_together() -> None:
    """srun -m cyclic: process 0, 2, 4 on node 0."""
    plan = decide_assignment(RunConfig(), facts_of(2, 3, lambda node, local: 2 * local + node), 6, answer(0, 1, each=3))
    assert plan.map_processes() == (0, 3, 1, 4, 2, 5)
    assert "made consecutive" in plan.reason
    assert plan.warning is None


def test_nodes_that_the_launcher_numbers_otherwise_than_its_ranks() -> None:
    """Slurm 26.05 with a topology: PROCID 0 is on the node with NODEID 1."""
    plan = decide_assignment(RunConfig(), facts_of(2, 2, lambda node, local: 2 * (1 - node) + local), 4, answer(0, 1))
    assert plan.map_processes() == (0, 1, 2, 3)
    assert (plan.nodes, plan.master) == ([1, 0], "10.0.0.2")
    turned = decide_assignment(RunConfig(), facts_of(2, 2, lambda node, local: 2 * (1 - node) + local), 4, answer(1, 0))
    assert turned.map_processes() == (2, 3, 0, 1)


def test_launcher_asks_nobody() -> None:
    plan = decide_assignment(with_placement("launcher"), facts_of(3, 2), 6, _must_not_be_called)
    assert (plan.map_processes(), plan.warning) == ((0, 1, 2, 3, 4, 5), None)
    dealt = facts_of(2, 2, lambda node, local: 2 * local + node)
    assert decide_assignment(with_placement("launcher"), dealt, 4, _must_not_be_called).map_processes() == (0, 1, 2, 3)


def test_one_node_has_nothing_to_place() -> None:
    plan = decide_assignment(RunConfig(), facts_of(1, 4), 4, _must_not_be_called)
    assert (plan.map_processes(), plan.warning) == ((0, 1, 2, 3), None)


def _must_not_be_called(*_: object) -> Placement:
    raise AssertionError


def _fails(error: Exception) -> object:
    def search(*_: object) -> Placement:
        raise error

    return search


@pytest.mark.parametrize(
    ("error", "why"),
    [
        (NotPlacedError("nobody knows"), "nobody knows"),
        (UserError("x.txt:3: no switch"), "x.txt:3: no switch"),
        (ZeroDivisionError("division by zero\nand more"), "the search failed with ZeroDivisionError: division by zero"),
        (AssertionError(), "the search failed with AssertionError"),
    ],
    ids=str,
)
def test_a_search_that_fails_leaves_the_launchers_order(error: Exception, why: str) -> None:
    plan = decide_assignment(RunConfig(), facts_of(2, 2), 4, _fails(error))  # type: ignore[arg-type]
    assert plan.map_processes() == (0, 1, 2, 3)
    assert plan.warning == plan.reason == f"the launcher's order, not placed: {why}"
    assert plan.master == "10.0.0.1"


FOUR = facts_of(2, 2)


@pytest.mark.parametrize(
    ("facts", "why"),
    [
        (facts_of(2, 2)[:3], "3 of 4 processes said where they are"),
        (changed(FOUR, 3, process=0), "or two said the same"),
        (
            changed(FOUR, 3, node=0, local=2, host="n0"),
            r"nodes have not the same number of ranks \(1 with 1, 1 with 3\)",
        ),
        (changed(FOUR, 3, local=0), r"local ranks of node 1 are \[0, 0\]"),
        (changed(FOUR, 1, host="elsewhere"), "ranks of node 0 say that they are on elsewhere and n0"),
        (changed(changed(FOUR, 2, node=4), 3, node=4), "nodes are numbered 0, 4"),
        (changed(changed(FOUR, 2, host="n0"), 3, host="n0"), "the launcher counts n0 as 2 nodes"),
    ],
)
def test_facts_that_cannot_be_leave_the_launchers_order(facts: list[ProcessInfo], why: str) -> None:
    plan = decide_assignment(RunConfig(), facts, 4, backwards)
    assert plan.map_processes() == (0, 1, 2, 3)
    assert plan.warning is not None
    assert re.search(why, plan.warning)


def test_a_search_that_answers_nonsense_is_not_followed() -> None:
    for nonsense in (answer(0, 0), answer(0, 1, each=1), answer(0, 1, 2)):
        plan = decide_assignment(RunConfig(), facts_of(2, 2), 4, nonsense)
        assert plan.map_processes() == (0, 1, 2, 3)
        assert plan.warning


def test_a_plan_is_the_same_after_its_journey() -> None:
    plan = dataclasses.replace(decide_assignment(RunConfig(), facts_of(3, 2), 6, backwards), notes=["ein Wörtchen"])
    text = plan.to_text()
    assert parse_assignment(text) == plan
    assert len(hash_assignment(text)) == 64
    assert hash_assignment(dataclasses.replace(plan, port=1).to_text()) != hash_assignment(text)


def test_a_plan_for_sixteen_thousand_ranks_stays_small() -> None:
    plan = decide_assignment(RunConfig(), facts_of(2048, 8), 16384, backwards)
    assert isinstance(plan, RankAssignment)
    assert len(plan.to_text()) < 64 << 10
    assert plan.map_processes()[-1] == 7
