"""The tree that is printed, and the units it is made of."""

from __future__ import annotations

import re

import pytest
from rich.console import Console
from small_clusters import gpu_node, rails, two_leaves

from hpc_train.cluster.spec import Cluster, Gpu, Link, Nic, Node, Switch
from hpc_train.cluster.switch_tree import build_units, find_paths, list_nodes_under
from hpc_train.cluster.tree_view import MAX_CHILDREN, build_tree_view


def printed(cluster: Cluster) -> str:
    console = Console(width=160, file=None, highlight=False, force_terminal=False)
    with console.capture() as captured:
        console.print(build_tree_view(cluster))
    return captured.get()


def lines(cluster: Cluster) -> list[str]:
    """Without what draws the branches."""
    return [re.sub(r"^[│├└─\s]+", "", line).rstrip() for line in printed(cluster).splitlines()]


def test_two_leaves_and_what_is_in_a_node() -> None:
    assert printed(two_leaves()).splitlines() == [
        "test: 8 nodes, 32 GPUs, 32 NICs, 3 switches",
        "├── spine (8 nodes)",
        "│   ├── leaf1: n[1-4] (4 nodes)",
        "│   └── leaf2: n[5-8] (4 nodes)",
        "└── n[1-8]: 4 x X100, 4 NICs",
        "    ├── GPUs: NV18 all to all",
        "    ├── GPU[0-1]: NUMA 0, CPUs 0-7",
        "    ├── GPU[2-3]: NUMA 1, CPUs 8-15",
        "    ├── mlx5_0 PIX GPU0 (400 Gbit/s)",
        "    ├── mlx5_1 PIX GPU1 (400 Gbit/s)",
        "    ├── mlx5_2 PIX GPU2 (400 Gbit/s)",
        "    └── mlx5_3 PIX GPU3 (400 Gbit/s)",
    ]


def test_nodes_that_differ_are_shown_apart() -> None:
    cluster = two_leaves(4)
    odd = Node("n3", cluster.nodes[2].gpus[:2], ())
    changed = Cluster("test", (*cluster.nodes[:2], odd, cluster.nodes[3]), cluster.links, cluster.switches)
    found = lines(changed)
    assert "n[1-2,4]: 4 x X100, 4 NICs" in found
    assert "n3: 2 x X100" in found


def test_a_mesh_of_links_is_counted_and_islands_are_named() -> None:
    gpus = tuple(Gpu(f"GPU{number}") for number in range(4))
    kinds = {(0, 1): "NV2", (2, 3): "NV1", (0, 2): "PIX", (0, 3): "SYS", (1, 2): "SYS", (1, 3): "SYS"}
    links = tuple(Link("h", f"GPU{a}", f"GPU{b}", kind) for (a, b), kind in kinds.items())
    found = lines(Cluster("test", (Node("h", gpus),), links))
    assert "GPUs: NV2 1 pair, NV1 1 pair, PIX 1 pair, SYS 3 pairs" in found
    assert "islands: GPU[0-1], GPU[2-3]" in found


def test_nics_without_links_and_down() -> None:
    nics = (Nic("NIC0", "hsn0", layer="slingshot"), Nic("NIC1", "hsn1", layer="slingshot"), Nic("NIC2", active=False))
    found = lines(Cluster("test", (Node("h", (), nics),)))
    assert found[1:] == ["h: 3 NICs", "hsn[0-1] (slingshot)", "NIC2 (down)"]


def test_domains_that_span_nodes() -> None:
    trays = [gpu_node(f"t{number}", 4, "NV18", f"rack{number // 2}")[0] for number in range(4)]
    found = lines(Cluster("test", tuple(trays)))
    assert "2 NVLink domains" in found
    assert "rack0: t[0-1] (8 GPUs)" in found


def test_many_leaves_end_in_one_line() -> None:
    leaves = tuple(Switch(f"leaf{number}", 0, (f"n{number}",)) for number in range(100))
    top = Switch("top", 1, (), tuple(leaf.name for leaf in leaves))
    found = lines(Cluster("test", switches=(*leaves, top)))
    assert len(found) == MAX_CHILDREN + 3
    assert found[-1] == f"60 more, 60 nodes: leaf[{MAX_CHILDREN}-99]"


def test_names_cannot_steer_the_terminal() -> None:
    found = printed(Cluster("test", (Node("a\x1b[2Jb[red]"),), switches=(Switch("s\nx", 0, ("a\x1b[2Jb[red]",)),)))
    assert "\x1b" not in found
    assert r"a\x1b[2Jb[red]" in found
    assert r"s\nx" in found


def test_an_empty_cluster_is_a_line() -> None:
    assert lines(Cluster("test")) == ["test: nothing"]


def test_leaves_of_a_unit_are_one_and_spines_join_the_units() -> None:
    [top] = build_units(rails(3, 2, 4))
    assert set(top.switches) == {"spine1", "spine2"}
    assert sorted(len(unit.switches) for unit in top.units) == [4, 4, 4]
    assert sorted(sorted(unit.nodes) for unit in top.units) == [[f"u{n}h0", f"u{n}h1"] for n in range(3)]
    assert len(list(list_nodes_under(top))) == 6


def test_paths_of_a_rail_optimised_fabric() -> None:
    paths = find_paths(rails(2, 2, 2))
    assert paths == {
        name: ("spine[1-2]", f"u{unit}l[0-1]") for unit in range(2) for name in (f"u{unit}h0", f"u{unit}h1")
    }


def test_paths_of_an_uneven_tree() -> None:
    switches = (
        Switch("leaf1", 0, ("a",)),
        Switch("pod", 1, (), ("leaf1",)),
        Switch("unknown", 0, ("b",)),
        Switch("empty", 0),
        Switch("root", 2, ("c",), ("pod", "unknown")),
    )
    cluster = Cluster("test", switches=switches)
    assert find_paths(cluster) == {"a": ("root", "pod", "leaf1"), "b": ("root", "unknown"), "c": ("root",)}


@pytest.mark.parametrize(("nodes", "expected"), [(1, ("x", "y")), (2, ("x", "y")), (3, ("x",)), (9, ("x",))])
def test_a_node_on_several_roots_has_one_path(nodes: int, expected: tuple[str, ...]) -> None:
    """The roots are one unit only if at least half of what each holds is also on the other."""
    names = tuple(f"n{number}" for number in range(nodes))
    forest = build_units(
        Cluster("test", switches=(Switch("x", 0, names), Switch("y", 0, names[:1]), Switch("z", 0, ("q",))))
    )
    assert [unit.switches for unit in forest] == [expected, ("z",)]
