"""topology.yaml and Topograph's models."""

from __future__ import annotations

import pytest
from hypothesis import given
from slurm_specs import trees
from slurm_texts import Spec, topograph_model, topology_conf, tree_yaml

from hpc_train.cluster.readers.formats import read_topology_text
from hpc_train.cluster.readers.slurm.topology_yaml import read_named_topologies
from hpc_train.cluster.spec import Cluster, Switch
from hpc_train.cluster.switch_tree import find_paths as paths
from hpc_train.errors import UserError

OTHERS = """\
- topology: blocks
  block:
    block_sizes: [2, 4]
    blocks:
      - block: b1
        nodes: n[01-02]
      - {block: b2, nodes: [n03, n04]}
- topology: none
  flat: true
- topology: none.sorted
  flat:
    alpha_step_rank: true
- topology: rings
  ring:
    rings:
      - ring: r0
        nodes: n[03,01-02]
- topology: pods
  torus3d:
    toruses:
      - name: whole
        dims: {x: 2, y: 2, z: 1}
        nodes: n[01-04]
        placements:
          - dims: {x: 1, y: 1, z: 1}
      - name: parts
        dims: {x: 2, y: 2, z: 1}
        regions:
          - {anchor: {x: 1, y: 0, z: 0}, dims: {x: 1, y: 2, z: 1}, nodes: "m[1-2]"}
          - {anchor: {x: 0, y: 0, z: 0}, dims: {x: 1, y: 2, z: 1}, nodes: "m[3-4]"}
"""


@given(trees())
def test_a_tree_is_what_topology_conf_says(spec: Spec) -> None:
    conf = read_topology_text(topology_conf(spec, upper_first=True).replace("Nodes=\n", "\n"), "topology.conf")
    assert read_topology_text("---\n" + OTHERS + tree_yaml("mine", spec, default=True), "topology.yaml") == conf


def test_every_kind() -> None:
    found = read_named_topologies("---\n" + OTHERS, "topology.yaml")
    assert {name: it.kind for name, it in found.items()} == {
        "blocks": "slurm_block",
        "none": "slurm_flat",
        "none.sorted": "slurm_flat",
        "rings": "slurm_ring",
        "pods": "slurm_torus3d",
    }
    assert found["blocks"].switches == (Switch("b1", 0, ("n01", "n02")), Switch("b2", 0, ("n03", "n04")))
    assert found["none"] == Cluster("slurm_flat")
    assert found["rings"].switches == (Switch("r0", 0, ("n03", "n01", "n02")),)


def test_nodes_of_a_torus_by_coordinate_x_fastest() -> None:
    whole, parts = read_named_topologies(OTHERS, "topology.yaml")["pods"].switches
    assert whole == Switch("whole", 0, ("n01", "n02", "n03", "n04"))
    assert parts == Switch("parts", 0, ("m3", "m1", "m4", "m2"))


def test_the_default_topology_else_the_first() -> None:
    tree = Spec({"s1": ["n1"]})
    assert read_topology_text(OTHERS + tree_yaml("t", tree, default=False), "x").kind == "slurm_block"
    both = OTHERS + tree_yaml("t", tree, default=True) + tree_yaml("u", tree, default=True)
    assert next(iter(read_named_topologies(both, "x"))) == "t"


@given(trees())
def test_a_model_of_topograph(spec: Spec) -> None:
    read = read_topology_text(
        topograph_model(spec).replace("nodes:\n-", "nodes: []\n-").replace("switches:\nblocks", "blocks"), "x"
    )
    assert read.kind == "topograph"
    assert {it.name: it.level for it in read.switches} == {it: spec.level(it) for it in [*spec.upper, *spec.leaves]}
    assert paths(read) == {node: spec.path(node) for nodes in spec.leaves.values() for node in nodes}


def test_topograph_adds_up_blocks_and_lets_switches_be_named_only() -> None:
    text = """\
switches:
  core:
    labels: {zone: a}
    switches: ["leaf-[1-2]", leaf-9]
blocks:
- switch: leaf-1
  nodes: ["[1101-1102]"]
  annotations: {domain: nvl1}
- switch: leaf-1
  nodes: n7
"""
    assert read_topology_text(text, "x").switches == (
        Switch("core", 1, (), ("leaf-1", "leaf-2", "leaf-9")),
        Switch("leaf-1", 0, ("1101", "1102", "n7")),
    )


TREE = "- topology: t\n  tree:\n    switches:\n"


@pytest.mark.parametrize(
    ("text", "line", "why"),
    [
        ("- topology: t\n", 1, "exactly one of tree, block"),
        ("- topology: t\n  flat: true\n  tree: {switches: []}\n", 1, "exactly one of"),
        ("- topology: t\n  flat: true\n- topology: t\n  flat: true\n", 3, "there twice"),
        ("- topology: t\n  cluster_default: perhaps\n  flat: true\n", 2, "true or false"),
        ("- topology: t\n  mesh: true\n", 2, "'mesh' is not known here"),
        ("- topology: t\n  flat: true\n  flat: true\n", 3, "twice"),
        (TREE, 3, "expected a list"),
        (TREE + "      - switch: a\n        children: b\n", 4, "switch b, which no line defines"),
        (TREE + "      - switch: a\n        node: b\n", 5, "'node' is not known here"),
        (TREE + "      - switch: a\n        nodes: n[1-\n", 5, "bracket"),
        (TREE + "      - switch: a\n      - switch: a\n", 5, "line 4 already"),
        (TREE + "      - nodes: a\n", 4, "expected switch: NAME"),
        (TREE + "      - switch: a\n        nodes: [n1\n", 6, "expected ',' or '\\]'"),
        (TREE + "      - switch: [a]\n", 4, "expected a name"),
        ("- topology: t\n  block: {blocks: [{block: a, nodes: n1}, {block: b, nodes: n1}]}\n", 2, "node n1 is in b"),
        ("- topology: t\n  torus3d: {toruses: [{name: a, dims: {x: 2, y: 1, z: 1}, nodes: n1}]}\n", 2, "1 nodes for 2"),
        ("- topology: t\n  torus3d: {toruses: [{name: a, dims: {x: 2, y: 1}, nodes: n1}]}\n", 2, "positive"),
        ("- topology: t\n  torus3d: {toruses: [{name: a, nodes: n1}]}\n", 2, "dims"),
        ("switches:\n  a: {switches: [b]}\n  b: {switches: [a]}\n", 2, "circle"),
        ("switches:\n  a: {switches: [b]}\nracks: []\n", 3, "'racks' is not known"),
        ("blocks:\n- switch: a\n", 2, "expected switch: and nodes:"),
        ("blocks:\n- switch: a\n  nodes: [\x07]\n", 0, "not YAML"),
        ("blocks:\n " + "[" * 1500, 0, "nested too deep"),
    ],
)
def test_refuses_with_file_and_line(text: str, line: int, why: str) -> None:
    with pytest.raises(UserError, match=why) as caught:
        read_topology_text(text, "FILE")
    assert str(caught.value).startswith(f"FILE:{line}: " if line else "FILE: ")
    assert "\n" not in str(caught.value)
