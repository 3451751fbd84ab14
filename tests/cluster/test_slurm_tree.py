"""topology.conf and `scontrol show topology`: the same cluster from both, and what neither may hold."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from slurm_specs import trees
from slurm_texts import Spec, shown_blocks, shown_tree, topology_conf

from hpc_train.cluster.readers.formats import read_topology_text
from hpc_train.cluster.spec import Cluster, Switch
from hpc_train.cluster.switch_tree import find_paths as paths
from hpc_train.errors import UserError


def switches(cluster: Cluster) -> dict[str, Switch]:
    return {it.name: it for it in cluster.switches}


@given(trees(), st.booleans())
def test_every_node_hangs_where_the_file_says(spec: Spec, upper_first: bool) -> None:
    read = read_topology_text(topology_conf(spec, upper_first).replace("Nodes=\n", "\n"), "topology.conf")
    assert read.kind == "slurm_tree"
    assert [it.name for it in read.switches] == (
        [*spec.upper, *spec.leaves] if upper_first else [*spec.leaves, *spec.upper]
    )
    for it in read.switches:
        assert it.level == spec.level(it.name)
        assert it.nodes == tuple(spec.leaves.get(it.name, ()))
        assert it.switches == tuple(spec.upper.get(it.name, ()))
    assert paths(read) == {node: spec.path(node) for nodes in spec.leaves.values() for node in nodes}


@given(trees(), st.booleans())
def test_scontrol_tells_the_same(spec: Spec, upper_first: bool) -> None:
    from_file = read_topology_text(topology_conf(spec, upper_first).replace("Nodes=\n", "\n"), "topology.conf")
    shown = read_topology_text(shown_tree(spec, upper_first), "scontrol")
    assert shown.kind == from_file.kind
    assert shown.switches == from_file.switches
    assert {it.name for it in shown.nodes} == {it.name for it in from_file.nodes}


@given(trees(), st.booleans(), st.data())
def test_an_excerpt_puts_no_node_where_it_is_not(spec: Spec, upper_first: bool, data: st.DataObject) -> None:
    lines = shown_tree(spec, upper_first).splitlines(keepends=True)
    kept = data.draw(
        st.lists(st.sampled_from(lines), min_size=1, unique=True).map(lambda it: sorted(it, key=lines.index))
    )
    for node, found in paths(read_topology_text("".join(kept), "excerpt")).items():
        assert set(found) <= set(spec.path(node))


def test_keys_in_any_case_comments_continued_lines_and_quotes() -> None:
    text = """
# leaf=real name
switchname=leaf1 NODES="n[1-2]" LinkSpeed=100   # a comment
SwitchName = leaf2 \\
    Nodes = n[3-4],n9
SWITCHNAME=core.1 Switches=leaf[1-2]
"""
    read = switches(read_topology_text(text, "topology.conf"))
    assert read["leaf1"].nodes == ("n1", "n2")
    assert read["leaf2"].nodes == ("n3", "n4", "n9")
    assert read["core.1"] == Switch("core.1", 1, (), ("leaf1", "leaf2"))


def test_two_parents_and_rails_are_legal() -> None:
    text = (
        "SwitchName=a Nodes=n[1-2]\nSwitchName=b Nodes=n[1-2]\nSwitchName=x Switches=a,b\nSwitchName=y Switches=a,b\n"
    )
    assert paths(read_topology_text(text, "topology.conf")) == {"n1": ("x,y", "a,b"), "n2": ("x,y", "a,b")}


def test_blocks_and_rings_of_topology_conf() -> None:
    blocks = read_topology_text(
        "BlockName=b1 Nodes=n[1-4]\nBlockName=b2 Nodes=n[5-8]\nBlockSizes=4,8\n", "topology.conf"
    )
    assert blocks.kind == "slurm_block"
    assert blocks.switches == (Switch("b1", 0, ("n1", "n2", "n3", "n4")), Switch("b2", 0, ("n5", "n6", "n7", "n8")))
    rings = read_topology_text("RingName=r0 Nodes=n[3,1-2]\n", "topology.conf")
    assert rings.kind == "slurm_ring"
    assert rings.switches == (Switch("r0", 0, ("n3", "n1", "n2")),)
    assert "ring or torus" in rings.notes[0]


def test_aggregated_blocks_nest() -> None:
    blocks = {f"b{it}": [f"10.0.{it}.{node}" for node in (9, 1)] for it in range(5)}
    aggregated = [("b0", "b1"), ("b2", "b3"), tuple(blocks)]
    read = read_topology_text(shown_blocks(blocks, aggregated, 2), "scontrol")
    assert read.kind == "slurm_block"
    assert switches(read)["b0,b1,b2,b3,b4"] == Switch("b0,b1,b2,b3,b4", 2, (), ("b0,b1", "b2,b3", "b4"))
    assert paths(read)["10.0.2.9"] == ("b0,b1,b2,b3,b4", "b2,b3", "b2")
    assert paths(read)["10.0.4.1"] == ("b0,b1,b2,b3,b4", "b4")
    ranged = shown_blocks(blocks, aggregated, 2).replace("=b0,b1,b2,b3,b4", "=b[0-4]").replace("=b0,b1 ", "=b[0-1] ")
    assert paths(read_topology_text(ranged, "scontrol"))["10.0.0.9"] == ("b[0-4]", "b[0-1]", "b0")


def test_rings_and_toruses_as_scontrol_shows_them() -> None:
    ring = read_topology_text(
        "RingName=r.0 Nodes=n[1-3] RingSize=3\nRingName=r.1 Nodes=n[4-5] RingSize=2\n", "scontrol"
    )
    assert ring.kind == "slurm_ring"
    assert paths(ring)["n5"] == ("r.1",)
    torus = "TorusName=pod1 Dims=2x2x1 Nodes=n[1-4]\n  TorusName=pod1 PlacementDims=2x1x1(2) Anchors=2\n"
    assert read_topology_text(torus, "scontrol").switches == (Switch("pod1", 0, ("n1", "n2", "n3", "n4")),)


def test_an_uneven_tree_and_a_level_without_nodes_of_its_own() -> None:
    text = (
        "$ scontrol show topology\n"
        "SwitchName=top Level=2 LinkSpeed=1 Nodes=n[1-3] Switches=mid,unknown\n"
        "SwitchName=mid Level=1 LinkSpeed=1 Switches=leaf\n"
        "SwitchName=leaf Level=0 LinkSpeed=1 Nodes=n[1-2]\n"
        "SwitchName=unknown Level=0 LinkSpeed=1 Nodes=n3\n"
    )
    assert paths(read_topology_text(text, "x")) == {
        "n1": ("top", "mid", "leaf"),
        "n2": ("top", "mid", "leaf"),
        "n3": ("top", "unknown"),
    }


def test_in_an_excerpt_the_rest_hangs_on_the_switch_above() -> None:
    text = (
        "SwitchName=cell Level=1 LinkSpeed=1 Nodes=n[1-4] Switches=s1[00,02]\n"
        "SwitchName=s100 Level=0 LinkSpeed=1 Nodes=n[1-2]\n"
    )
    read = read_topology_text(text, "x")
    assert switches(read)["cell"] == Switch("cell", 1, ("n3", "n4"), ("s100", "s102"))
    assert list(switches(read)) == ["cell", "s100"]
    alone = "SwitchName=core Level=3 LinkSpeed=1 Nodes=n1 Switches=cell\n"
    assert switches(read_topology_text(alone, "x"))["core"].level == 3


LEAF = "SwitchName=leaf1 Nodes=n[1-2]\n"
SHOWN = "SwitchName=leaf1 Level=0 LinkSpeed=1 Nodes=n[1-2]\n"


@pytest.mark.parametrize(
    ("text", "line", "why"),
    [
        (LEAF + "SwitchName=leaf1 Nodes=n3", 2, "line 1 already"),
        (LEAF + "SwitchName=core Switches=leaf[1-2]", 2, "switch leaf2, which no line defines"),
        (LEAF + "SwitchName=core Switches=core", 2, "circle"),
        (LEAF + "SwitchName=a Switches=b\nSwitchName=b Switches=a", 2, "circle"),
        (LEAF + "SwitchName=core Switches=leaf1 Nodes=n3", 2, "one of them"),
        (LEAF + "SwitchName=leaf2 Nodes=n[3-", 2, "bracket"),
        (LEAF + "SwitchName=leaf2 Nodes=n[4-3]", 2, "backwards"),
        (LEAF + "SwitchName=leaf2 Nodes=", 2, "expected KEY=VALUE"),
        (LEAF + "SwitchName=leaf2 Nod", 2, "expected KEY=VALUE"),
        (LEAF + "SwitchName=leaf2 Node=n3", 2, "node="),
        (LEAF + "SwitchName=leaf2 Nodes=n3 Nodes=n4", 2, "twice"),
        (LEAF + "SwitchName=leaf[2-3] Nodes=n3", 2, "one name"),
        (LEAF + "SwitchName=leaf2 Nodes=n3 LinkSpeed=fast", 2, "expected linkspeed=NUMBER"),
        (LEAF + "BlockName=b1 Nodes=n3", 2, "blockname= in a slurm_tree"),
        (LEAF + "Include other.conf", 2, "expected KEY=VALUE"),
        (LEAF + "Nodes=n3", 2, "begins with nodes="),
        (LEAF + "SwitchName=leaf2 Nodes=n[1-9999999]", 2, "more than"),
        (LEAF + "".join(f"SwitchName=l{it} Nodes=m[1-262144]\n" for it in range(5)), 5, "more than"),
        ("BlockName=b1 Nodes=n[1-2]\nBlockName=b2 Nodes=n[2-3]", 2, "node n2 is in b2 and in b1"),
        ("BlockName=b1 Nodes=n1\nBlockName=b2 Nodes=n2 BlockSizes=1", 2, "line of its own"),
        (SHOWN + "SwitchName=leaf2 Level=0 LinkS", 2, "expected KEY=VALUE"),
        (SHOWN + "SwitchName=leaf2", 2, "expected level=NUMBER"),
        (SHOWN + "SwitchName=leaf2 Level=0", 2, "expected linkspeed=NUMBER"),
        (SHOWN + "SwitchName=core Level=1 LinkSpeed=1 Nodes=n[1-2]", 2, "cut short"),
        (SHOWN + "SwitchName=core Level=1 LinkSpeed=1 Nodes=n[1-3] Switches=leaf1", 2, "lists node n3"),
        (SHOWN + "SwitchName=core Level=1 LinkSpeed=1 Nodes=n1 Switches=leaf1", 2, "lacks node n2"),
        (SHOWN + "scontrol: error: no contact", 2, "expected KEY=VALUE"),
        ("BlockName=b0 BlockIndex=0 Nodes=n1 BlockSize=1\nBlockName=b1 BlockIndex=1 Nodes=n2", 2, "blocksize=NUMBER"),
        ("RingName=r0 Nodes=n[1-2] RingSize=3", 1, "RingSize=3 but 2 nodes"),
        ("TorusName=t0 Nodes=n[1-2]", 1, "Dims=XxYxZ"),
    ],
)
def test_refuses_with_file_and_line(text: str, line: int, why: str) -> None:
    with pytest.raises(UserError, match=why) as caught:
        read_topology_text(text, "FILE")
    assert str(caught.value).startswith(f"FILE:{line}: ")
    assert "\n" not in str(caught.value)
