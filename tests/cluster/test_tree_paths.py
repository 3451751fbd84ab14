"""From switches to one path a node."""

from __future__ import annotations

from hpc_train.cluster.spec import Cluster, Node, Switch
from hpc_train.cluster.switch_tree import find_paths as paths


def cluster(nodes: str, *switches: Switch) -> Cluster:
    return Cluster("test", tuple(Node(it) for it in nodes.split()), switches=switches)


def test_deep_and_uneven() -> None:
    deep = [Switch(f"s{level}", level, (), (f"s{level - 1}",)) for level in range(1, 50)]
    found = paths(cluster("b a", Switch("s0", 0, ("a",)), *deep, Switch("top", 50, ("b",), ("s49",))))
    assert list(found) == ["b", "a"]
    assert found["a"] == ("top", *(f"s{level}" for level in range(49, -1, -1)))
    assert found["b"] == ("top",)


def test_several_roots_and_nodes_without_a_switch() -> None:
    found = paths(
        cluster("a b c", Switch("x", 0, ("a",)), Switch("y", 0, ("b",)), Switch("z", 1, (), ("y", "unlisted")))
    )
    assert found == {"a": ("x",), "b": ("z", "y"), "c": ()}


def test_several_switches_of_one_level_are_one_group_whatever_their_order() -> None:
    rails = [Switch(f"leaf{rail}", 0, ("a", "b") if rail % 2 else ("b", "a")) for rail in (8, 2, 1, 3, 10)]
    tops = [Switch("q", 1, (), ("leaf1", "leaf2", "leaf3")), Switch("p", 1, (), ("leaf8", "leaf10"))]
    assert paths(cluster("a b", *rails, *tops)) == dict.fromkeys("ab", ("p,q", "leaf[1-3,8,10]"))


def test_a_parent_two_levels_up_stands_on_its_own_level() -> None:
    leaf, mid = Switch("leaf", 0, ("a",)), Switch("mid", 1, (), ("leaf",))
    assert paths(cluster("a", leaf, mid, Switch("top", 2, (), ("mid", "leaf"))))["a"] == ("top", "mid", "leaf")


def test_nodes_that_only_a_switch_names() -> None:
    assert paths(cluster("", Switch("leaf", 0, ("a",)))) == {"a": ("leaf",)}
