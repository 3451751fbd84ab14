"""Dragonflies and tori are recognised from their cables, and nothing else is taken for one."""

from __future__ import annotations

import itertools
import math
import random

import pytest
from fake_fabric import FakeDevice, FakeFabric, rail_fabric, three_levels

from hpc_train.cluster.readers.formats import read_topology_text
from hpc_train.cluster.spec import Cluster
from hpc_train.cluster.switch_tree import find_paths, find_uplinks


def add_hosts(fabric: FakeFabric, switches: list[FakeDevice], hosts: int = 2) -> None:
    for number, switch in enumerate(switches):
        for host in range(hosts):
            fabric.cable(switch, fabric.adapter(f"n{number:03d}-{host} mlx5_0"))


def dragonfly(groups: int, switches: int, cables: int = 1) -> FakeFabric:
    """Every two groups are joined by `cables` cables, spread over their switches."""
    fabric = FakeFabric()
    members = [[fabric.switch(f"MF0;g{g}s{s}:X/U1", 64) for s in range(switches)] for g in range(groups)]
    for group in members:
        for a, b in itertools.combinations(group, 2):
            fabric.cable(a, b)
    for number, (first, second) in enumerate(itertools.combinations(members, 2)):
        for cable in range(cables):
            fabric.cable(first[(number + cable) % switches], second[(number + 2 * cable + 1) % switches])
    add_hosts(fabric, [switch for group in members for switch in group])
    return fabric


def torus(*extent: int) -> FakeFabric:
    fabric = FakeFabric()
    cells = list(itertools.product(*map(range, extent)))
    switches = {cell: fabric.switch(f"MF0;t{'-'.join(map(str, cell))}:X/U1", 64) for cell in cells}
    for cell, (axis, length) in itertools.product(cells, enumerate(extent)):
        if length > 2 or cell[axis] == 0:
            beside = (*cell[:axis], (cell[axis] + 1) % length, *cell[axis + 1 :])
            fabric.cable(switches[cell], switches[beside])
    add_hosts(fabric, list(switches.values()))
    return fabric


def read(fabric: FakeFabric) -> Cluster:
    return read_topology_text(fabric.dump(), "dump")


@pytest.mark.parametrize(("groups", "switches", "cables"), [(3, 3, 1), (5, 4, 1), (9, 4, 2), (4, 8, 3)])
def test_the_groups_of_a_dragonfly(groups: int, switches: int, cables: int) -> None:
    fabric = dragonfly(groups, switches, cables)
    random.Random(groups).shuffle(fabric.devices)
    cluster = read(fabric)
    assert cluster.notes == (f"the cables are those of a dragonfly of {groups} groups of {switches} switches",)
    top = [switch for switch in cluster.switches if switch.level == 1]
    assert {frozenset(switch.switches) for switch in top} == {
        frozenset(f"g{g}s{s}" for s in range(switches)) for g in range(groups)
    }
    paths = find_paths(cluster)
    assert all(len(path) == 2 for path in paths.values())
    uplinks = find_uplinks(cluster)
    for path in set(paths.values()):
        assert uplinks[path[:1]].cables == (groups - 1) * cables, "out of a group, only the cables to other groups"
        assert uplinks[path[:1]].nodes == 2 * switches


@pytest.mark.parametrize("extent", [(8,), (4, 4), (4, 3, 2), (3, 3, 3), (5, 4), (4, 4, 4), (2, 2, 2), (6, 2)])
def test_the_extent_of_a_torus(extent: tuple[int, ...]) -> None:
    cluster = read(torus(*extent))
    (note,) = cluster.notes
    found = note.split("a torus of ")[1].split(" switches")[0]
    # A ring of four is also two dimensions of two: the same cables.
    assert math.prod(map(int, found.split(" x "))) == math.prod(extent)
    assert sorted(length for length in map(int, found.split(" x ")) if length not in (2, 4)) == sorted(
        length for length in extent if length not in (2, 4)
    )
    assert all(switch.level == 0 for switch in cluster.switches)


def test_trees_with_joined_tops_are_dragonfly_plus() -> None:
    fabric = FakeFabric()
    tops = []
    for group in range(4):
        spines = [fabric.switch(f"MF0;g{group}spine{n}:X/U1", 64) for n in range(3)]
        leaves = [fabric.switch(f"MF0;g{group}leaf{n}:X/U1", 64) for n in range(2)]
        for leaf, spine in itertools.product(leaves, spines):
            fabric.cable(leaf, spine)
        add_hosts(fabric, leaves)
        tops.append(spines)
    for number, (first, second) in enumerate(itertools.combinations(tops, 2)):
        fabric.cable(first[number % 3], second[(number + 1) % 3])
    hosts = [device for device in fabric.devices if device.letter == "H"]
    for number, host in enumerate(hosts):
        host.name = f"n{number:03d} mlx5_0"
    cluster = read(fabric)
    assert cluster.notes == ("the cables are those of a dragonfly+ of 4 groups of 5 switches",)
    uplinks = find_uplinks(cluster)
    assert all(uplinks[path[:1]].cables == 3 for path in find_paths(cluster).values())


@pytest.mark.parametrize("name", ["one cable less", "two groups", "broken torus", "all joined", "fat tree", "rails"])
def test_what_is_neither_stays_as_it_is(name: str) -> None:
    fabric = {
        "one cable less": dragonfly(5, 4),
        "two groups": dragonfly(2, 4),
        "broken torus": torus(4, 4),
        "all joined": dragonfly(1, 9),
        "fat tree": three_levels(),
        "rails": rail_fabric(2, 2, 2, 1),
    }[name]
    if name in ("one cable less", "broken torus"):
        switch = next(device for device in fabric.devices if device.letter == "S")
        port, (far, far_port, _) = next(it for it in switch.cables.items() if it[1][0].letter == "S")
        del switch.cables[port], far.cables[far_port]
    cluster = read(fabric)
    assert not any("the cables are those" in note for note in cluster.notes)
    assert not any(switch.name.startswith("dragonfly") for switch in cluster.switches)
    if name not in ("fat tree", "rails"):
        assert "as in a dragonfly or torus: its groups are not read" in cluster.notes[0]
