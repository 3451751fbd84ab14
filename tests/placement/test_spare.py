"""A failed node: who takes its place."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from placement_fabrics import fabrics, tree_fabric

from hpc_train.errors import UserError
from hpc_train.placement.spare import replace_failed

FABRIC = tree_fabric([("a", 0), ("a", 0), ("a", 0), ("b", 0), ("b", 0), ("c", 1), ("c", 1)])


@pytest.mark.parametrize(
    ("order", "failed", "result"),
    [
        ([0, 1, 3, 5], [1], (0, 2, 3, 5)),
        ([0, 1, 2, 3], [0], (4, 1, 2, 3)),
        ([0, 1, 2, 3, 4], [4], (0, 1, 2, 3, 5)),
        ([5, 0, 1, 3], [5], (6, 0, 1, 3)),
        ([0, 1, 2, 3], [1, 3], (0, 5, 2, 4)),
        ([0, 1, 3], [2], (0, 1, 3)),
        ([0, 1], [], (0, 1)),
    ],
    ids=["same leaf", "same group", "any", "not the first", "each the nearest that all can have", "a spare", "none"],
)
def test_the_nearest_spare_takes_the_place(order, failed, result):
    assert replace_failed(FABRIC, order, failed) == result


def test_too_few_spares_are_one_line():
    with pytest.raises(UserError, match="2 nodes of the job have failed and 1 spares are left; ask for more nodes"):
        replace_failed(FABRIC, [0, 1, 2, 3, 4, 5], [0, 5])


@settings(max_examples=200)
@given(fabrics(least=2, most=20), st.data())
def test_nobody_else_moves(fabric, data):
    count = len(fabric.nodes)
    nodes = data.draw(st.permutations(range(count)))
    used = data.draw(st.integers(1, count))
    order, spares = nodes[:used], nodes[used:]
    failed = data.draw(st.lists(st.sampled_from(order), max_size=len(spares), unique=True))
    result = replace_failed(fabric, order, failed)
    assert len(set(result)) == used
    for position, node in enumerate(order):
        taken = result[position]
        assert (taken in spares) if node in failed else (taken == node)
    for level in fabric.levels[1:]:
        near = sum(level.group[a] == level.group[b] for a, b in zip(order, result, strict=True) if a in failed)
        possible = sum(
            min(
                sum(level.group[node] == group for node in failed),
                sum(level.group[node] == group for node in spares),
            )
            for group in range(len(level.uplink))
        )
        assert near == possible
