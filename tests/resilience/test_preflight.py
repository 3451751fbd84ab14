"""Slow nodes are found by a pre-flight, and no others: by brute force over numbers of nodes, and on real ranks."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest

from hpc_train.interfaces import World
from hpc_train.resilience.preflight import (
    FILE,
    SIZES,
    NodeFigures,
    Preflight,
    check_nodes,
    find_slow_nodes,
    measure_nodes,
    pair_neighbours,
    pair_slow_with_fast,
    read_earlier_figures,
    run_preflight,
)
from hpc_train.testing import run_ranks

QUICK = SIZES["quick", "cpu"]


def simulate_exchange(nodes: int, slow: dict[int, float]) -> list[NodeFigures]:
    """Go through both rounds with a pair as slow as its slower node; `slow` has factors."""
    speed = {node: slow.get(node, 1.0) * (1 + 0.02 * (node % 5)) for node in range(nodes)}

    def measure(pairs: list[tuple[int, int]]) -> dict[int, float]:
        best: dict[int, float] = {}
        for pair in pairs:
            took = max(speed[node] for node in pair)
            best |= {node: min(best.get(node, took), took) for node in pair}
        return best

    first = pair_neighbours(range(nodes))
    once = measure(first)
    again = measure(pair_slow_with_fast(once, first))
    return [NodeFigures(f"node{node}", 1.0, exchange=min(once[node], again[node])) for node in range(nodes)]


@pytest.mark.parametrize("nodes", range(3, 18))
def test_any_one_slow_node_is_named_and_no_other(nodes: int) -> None:
    for bad in range(nodes):
        found = find_slow_nodes(simulate_exchange(nodes, {bad: 3.0}))
        assert [node.host for node in found] == [f"node{bad}"], (nodes, bad)


@pytest.mark.parametrize("nodes", [8, 9, 16, 17, 64])
def test_any_two_slow_nodes_are_named_and_no_others(nodes: int) -> None:
    for one in range(nodes):
        for other in range(one):
            found = find_slow_nodes(simulate_exchange(nodes, {one: 3.0, other: 5.0}))
            assert {node.host for node in found} == {f"node{one}", f"node{other}"}, (nodes, one, other)


@pytest.mark.parametrize("nodes", range(2, 40))
def test_every_node_exchanges_in_both_rounds_with_another_partner(nodes: int) -> None:
    draw = random.Random(nodes)
    for _ in range(50):
        first = pair_neighbours(range(nodes))
        seconds = {node: draw.choice([1.0, 1.0, 1.1, 4.0]) for node in range(nodes)}
        second = pair_slow_with_fast(seconds, first)
        for pairs in (first, second):
            assert {node for pair in pairs for node in pair} == set(range(nodes))
            assert all(one != other for one, other in pairs)
            assert len(pairs) == (nodes + 1) // 2
        if nodes > 3 and nodes % 2 == 0:
            assert not {frozenset(pair) for pair in first} & {frozenset(pair) for pair in second}


def test_of_two_nodes_none_is_blamed_without_an_earlier_attempt() -> None:
    slow = [NodeFigures("a", 1.0, exchange=9.0), NodeFigures("b", 1.0, exchange=9.0)]
    assert find_slow_nodes(slow) == []
    earlier = [replace(node, exchange=2.0) for node in slow]
    found = find_slow_nodes(slow, earlier)
    assert [(node.host, node.blamed) for node in found] == [("a", False), ("b", False)]


def test_all_nodes_slower_than_at_an_earlier_attempt_are_named() -> None:
    earlier = [NodeFigures(name, 1.0) for name in "abcd"]
    assert [node.host for node in find_slow_nodes([NodeFigures(name, 2.0) for name in "abcd"], earlier)] == list("abcd")
    assert find_slow_nodes([NodeFigures(name, 1.4) for name in "abcd"], earlier) == []


def test_a_node_that_computes_slowly_is_named_once() -> None:
    nodes = [NodeFigures(f"n{i}", 5.0 if i == 2 else 1.0, exchange=4.0 if i == 2 else 1.0) for i in range(6)]
    assert [(node.host, node.what) for node in find_slow_nodes(nodes)] == [("n2", "matrix product")]


def _one_rank_a_node(world: World) -> World:
    cpus = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, {cpus[0 if world.rank != 2 else -1]})
    return replace(world, node=world.rank, local_rank=0)


@contextmanager
def busy_cpu(cpu: int, processes: int) -> Iterator[None]:
    """Keep one CPU busy with several processes, all of which run when this begins."""
    spin = f"import os\nos.sched_setaffinity(0, {{{cpu}}})\nany(os.fork() == 0 for _ in range({processes - 1}))\n"
    spin += "os.write(1, b'.')\nwhile True: pass"
    # A group, and no session: Linux shares a CPU out evenly among sessions, however many processes each has.
    parent = subprocess.Popen([sys.executable, "-c", spin], stdout=subprocess.PIPE, process_group=0)
    assert parent.stdout is not None
    try:
        for _ in range(processes):
            parent.stdout.read(1)
        yield
    finally:
        os.killpg(parent.pid, signal.SIGKILL)
        parent.stdout.read()  # ends when the last of them has
        parent.stdout.close()
        parent.wait()


def test_every_rank_gets_the_same_figures_of_every_node() -> None:
    def measure(world: World) -> list[NodeFigures]:
        return measure_nodes(
            replace(world, node=world.rank // 2, local_rank=world.rank % 2), f"node{world.rank // 2}", QUICK
        )

    results = run_ranks(measure, 6)
    assert all(result == results[0] for result in results)
    assert [node.host for node in results[0]] == ["node0", "node1", "node2"]
    assert all(node.product > 0 and node.exchange > 0 and node.copy == 0 for node in results[0])
    assert set(results[0][1].partners) == {"node0", "node2"}


def test_a_node_whose_cpu_is_busy_is_found() -> None:
    if len(os.sched_getaffinity(0)) < 2:
        pytest.skip("needs two CPUs: one of them is kept busy")

    def check(world: World) -> Preflight:
        return run_preflight(_one_rank_a_node(world), f"node{world.rank}", QUICK)

    with busy_cpu(sorted(os.sched_getaffinity(0))[-1], 30):  # far more than the other tests that run on the other CPU
        result = run_ranks(check, 4)[0]
    assert [node.host for node in result.slow if node.blamed] == ["node2"]
    assert "node2: matrix product takes" in result.slow[0].describe()


def test_nodes_with_unequal_numbers_of_ranks_are_measured() -> None:
    def measure(world: World) -> list[NodeFigures]:
        node = 0 if world.rank < 2 else 1
        return measure_nodes(replace(world, node=node, local_rank=world.rank % 2), f"node{node}", QUICK)

    assert [node.host for node in run_ranks(measure, 3)[0]] == ["node0", "node1"]


def test_an_earlier_attempt_is_compared_with(tmp_path: Path) -> None:
    figures = Preflight([NodeFigures("node0", 1e-9, exchange=1e-9), NodeFigures("node1", 1e-9, exchange=1e-9)])
    for attempt in ("0", "1", "2"):
        (tmp_path / attempt).mkdir()
    (tmp_path / "0" / FILE).write_text(json.dumps(figures.as_json()))
    (tmp_path / "1" / FILE).write_text("damaged")

    def check(world: World) -> Preflight:
        spread = replace(world, node=world.rank, local_rank=0)
        return check_nodes("quick", spread, f"node{world.rank}", tmp_path / "2")

    result = run_ranks(check, 2)[0]
    assert {node.host for node in result.slow} == {"node0", "node1"}
    assert read_earlier_figures(tmp_path / "0") == []
