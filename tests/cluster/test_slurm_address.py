"""SLURM_TOPOLOGY_ADDR, which cannot be split on its dots, and clusters made of paths."""

from __future__ import annotations

import pytest
from hypothesis import given
from slurm_specs import trees
from slurm_texts import Spec

from hpc_train.cluster.readers.slurm.slurm_environment import build_cluster_from_paths, parse_address
from hpc_train.cluster.switch_tree import find_paths as paths
from hpc_train.errors import UserError

TREE2, TREE3 = "switch.switch.node", "switch.switch.switch.node"


@pytest.mark.parametrize(
    ("address", "pattern", "node", "expected"),
    [
        ("core.leaf1.n1", TREE2, "n1", ["core", "leaf1"]),
        ("core.leaf1.10.0.0.7", TREE2, "10.0.0.7", ["core", "leaf1"]),
        ("core.leaf1.n1.example.org", TREE2, "n1.example.org", ["core", "leaf1"]),
        ("core..leaf9.n1", TREE3, "n1", ["core", "leaf9"]),
        (".pod.leaf9.n1", TREE3, "n1", ["pod", "leaf9"]),
        ("...n1", TREE3, "n1", []),
        ("b0.10.1.2.3", "block.node", "10.1.2.3", ["b0"]),
        ("n1", "node", "n1", []),
        ("n1.example.org", "node", "n1.example.org", []),
        ("r.0:12.n1", "ring:position.node", "n1", ["r.0"]),
        ("pod:a:0:3:1.n1", "torus:x:y:z.node", "n1", ["pod:a"]),
        ("top[06,14-15,07,11].top13.n-0256", TREE2, "n-0256", ["top[06-07,11,14-15]", "top13"]),
        ("b,a.leaf.n1", TREE2, "n1", ["a,b", "leaf"]),
        ("s.3.1.s.1.4.n1", TREE2, "n1", ["s.3.1.s.1.4"]),
        ("core.leaf1.n1", None, "n1", ["core.leaf1"]),
        ("top.pod[11,2].leaf.1.n1", TREE3, "n1", ["top.pod[11,2].leaf.1"]),
        ("core.leaf1.n1", "switch.node", "n1", ["core.leaf1"]),
    ],
)
def test_the_node_is_cut_off_by_its_name(address: str, pattern: str | None, node: str, expected: list[str]) -> None:
    assert parse_address(address, pattern, node) == tuple(expected)


@pytest.mark.parametrize(
    ("address", "switches", "expected"),
    [
        ("s.3.1.s.1.4.n1", ["s.3.1", "s.1.4"], ["s.3.1", "s.1.4"]),
        ("s.3.1.s.[4-5].n1", ["s.3.1", "s.4", "s.5"], ["s.3.1", "s.[4-5]"]),
        ("s.3.1..n1", ["s.3.1", "s.1.4"], ["s.3.1"]),
        ("a.a.a.n1", ["a", "a.a"], ["a.a.a"]),
        ("s.3.1.s.1.5.n1", ["s.3.1", "s.1.4"], ["s.3.1.s.1.5"]),
    ],
)
def test_known_switches_decide_what_dots_leave_open(address: str, switches: list[str], expected: list[str]) -> None:
    assert parse_address(address, TREE2, "n1", switches) == tuple(expected)


def test_an_address_of_another_node_is_refused() -> None:
    with pytest.raises(UserError, match="does not end in the node's name, n2"):
        parse_address("core.leaf1.n1", TREE2, "n2")


def test_a_hundred_dots_are_no_burden() -> None:
    known = [".".join("a" * length) for length in range(1, 40)]
    address = ".".join("a" * 100)
    pattern = ".".join(["switch"] * 50 + ["node"])
    assert parse_address(f"{address}.z.n1", pattern, "n1", known) == (f"{address}.z",)


@given(trees())
def test_paths_of_all_nodes_make_the_tree(spec: Spec) -> None:
    known = {node: spec.path(node) for nodes in spec.leaves.values() for node in nodes}
    cluster = build_cluster_from_paths(known)
    assert cluster.kind == "slurm_address"
    assert [it.name for it in cluster.nodes] == list(known)
    assert paths(cluster) == known
    for switch in cluster.switches:
        assert switch.nodes == tuple(spec.leaves.get(switch.name, ()))


def test_slurms_addresses_of_a_tree_give_its_paths() -> None:
    """Level by level from the top, empty where no switch of the level is above the node."""
    addresses = {
        "n1": "core.pod[1-2].leaf1.n1",
        "n2": "core.pod[2,1].leaf1.n2",
        "n3": "core..leaf2.n3",
        "n4": "...n4",
    }
    cluster = build_cluster_from_paths(
        {node: parse_address(address, TREE3, node) for node, address in addresses.items()}
    )
    assert paths(cluster) == {
        "n1": ("core", "pod[1-2]", "leaf1"),
        "n2": ("core", "pod[1-2]", "leaf1"),
        "n3": ("core", "leaf2"),
        "n4": (),
    }


def test_paths_that_contradict_each_other_are_refused() -> None:
    with pytest.raises(UserError, match="circle"):
        build_cluster_from_paths({"n1": ("a", "b"), "n2": ("b", "a")})
