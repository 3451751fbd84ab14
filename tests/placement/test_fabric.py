"""The fabric of an allocation, against figures worked out by hand."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hpc_train.cluster.calibration import Calibration, LevelConstants, write_calibration
from hpc_train.config.compose import compose
from hpc_train.config.run import RunConfig
from hpc_train.errors import UserError
from hpc_train.placement.described_cluster import (
    count_nodes,
    count_ranks_per_node,
    locate_described_cluster,
    name_described_nodes,
)
from hpc_train.placement.fabric import Fabric, FabricLevel, build_levels
from hpc_train.placement.fabric_from_config import (
    DEFAULT_INSIDE,
    DEFAULT_UPLINK,
    build_located_fabric,
    list_assumptions,
)
from hpc_train.placement.node_locations import NodeLocations

FIGURES = (
    "cluster=slurm",
    "cluster.node.gpus=4",
    "cluster.node.gpu_link=nvswitch",
    "cluster.node.gpu_link_gb_s=300",
    "cluster.node.nics=2",
    "cluster.node.nic_gbit_s=200",
    "cluster.fabric.kind=infiniband",
    "cluster.fabric.oversubscription=2",
    "cluster.fabric.group_oversubscription=5",
)
"""50 GB/s out of a node, 1200 GB/s of NVLink."""
PODS = {
    "a": ("top", "pod1", "leaf1"),
    "b": ("top", "pod1", "leaf1"),
    "c": ("top", "pod1", "leaf2"),
    "d": ("top", "pod2", "leaf3"),
}


def level(fabric: Fabric, name: str) -> FabricLevel:
    [found] = [it for it in fabric.levels if it.name == name]
    return found


def names(fabric: Fabric) -> list[str]:
    return [it.name for it in fabric.levels]


def build_fabric(
    config: RunConfig,
    nodes: Sequence[str],
    ranks_per_node: int,
    paths: Mapping[str, Sequence[str]] | None = None,
    domains: Mapping[str, str] | None = None,
) -> Fabric:
    """The fabric of a job on these nodes, of which these switches and domains are known."""
    return build_located_fabric(config, NodeLocations(tuple(nodes), paths or {}, domains or {}), ranks_per_node)


def build_described_fabric(config: RunConfig) -> Fabric:
    """The fabric that cluster=<name> describes, for a job of its first nodes: node0001, node0002, ..."""
    nodes = locate_described_cluster(config, name_described_nodes(count_nodes(config)))
    return build_located_fabric(config, nodes, count_ranks_per_node(config))


@pytest.fixture
def config() -> RunConfig:
    return compose(FIGURES)


def test_a_tree_of_pods_by_hand(config: RunConfig) -> None:
    fabric = build_fabric(config, ["a", "d", "b", "c"], 4, PODS)
    assert fabric.nodes == ("a", "d", "b", "c")
    assert (fabric.ranks_per_node, fabric.inside_bandwidth) == (4, 300e9)
    assert names(fabric) == ["node", "leaf", "group"]  # nothing leaves the top
    assert [it.group.tolist() for it in fabric.levels] == [[0, 1, 2, 3], [0, 1, 0, 2], [0, 1, 0, 0]]
    assert level(fabric, "node").uplink.tolist() == [50e9] * 4
    # A switch's node count is unknown: assume that of the job's fullest one, however many the job has on it.
    assert level(fabric, "leaf").uplink.tolist() == [2 * 50e9 / 2] * 3
    assert level(fabric, "leaf").busy_uplink.tolist() == [2 * 50e9 / 2, 50e9 / 2, 50e9 / 2]
    assert level(fabric, "group").uplink.tolist() == [3 * 50e9 / 5] * 2
    assert level(fabric, "group").busy_uplink.tolist() == [3 * 50e9 / 5, 50e9 / 5]
    latencies = [fabric.inside_latency, *(it.latency for it in fabric.levels)]
    assert latencies == sorted(latencies)
    assert len(set(latencies)) == len(latencies)


def test_the_name_of_a_level_does_not_depend_on_the_allocation(config: RunConfig) -> None:
    """One leaf of each pod: leaf and group have the same members, and both limit."""
    assert names(build_fabric(config, ["c", "d"], 4, PODS)) == ["node", "leaf", "group"]
    assert names(build_fabric(config, ["a", "c"], 4, PODS)) == ["node", "leaf"]
    assert names(build_fabric(config, ["a", "b"], 4, PODS)) == ["node"]
    deep = {"x": tuple("edcba"), "y": tuple("fghij")}
    assert names(build_fabric(config, ["x", "y"], 4, deep)) == ["node", "leaf", "group", "level3", "level4", "level5"]


def test_a_domain_that_spans_nodes_has_nvlink_inside_and_nics_outside(config: RunConfig) -> None:
    domains = {"a": "rack", "b": "rack", "c": "other"}
    fabric = build_fabric(config, ["a", "b", "c", "d"], 4, PODS, domains)
    assert names(fabric) == ["node", "domain", "leaf", "group"]
    assert level(fabric, "node").uplink.tolist() == [4 * 300e9] * 4
    assert level(fabric, "domain").group.tolist() == [0, 0, 1, 2]
    assert level(fabric, "domain").uplink.tolist() == [100e9, 50e9, 50e9]
    assert fabric.levels[0].latency == fabric.inside_latency < level(fabric, "domain").latency


def test_a_domain_of_one_node_is_no_level(config: RunConfig) -> None:
    assert names(build_fabric(config, ["a", "b"], 4, None, {"a": "1", "b": "2"})) == ["node"]


def test_leaves_that_share_a_domain_are_one(config: RunConfig) -> None:
    fabric = build_fabric(config, ["a", "c", "b", "d"], 4, PODS, {"a": "rack", "c": "rack"})
    assert level(fabric, "leaf").group.tolist() == [0, 0, 0, 1]
    assert level(fabric, "leaf").uplink.tolist() == [75e9, 75e9]
    assert level(fabric, "leaf").busy_uplink.tolist() == [75e9, 25e9]


def test_uneven_and_missing_paths(config: RunConfig) -> None:
    """x hangs on the top itself, y on a leaf of it, of z nothing is known."""
    paths = {**PODS, "x": ("top",), "y": ("top", "leaf9"), "v": ("top", "leaf9")}
    fabric = build_fabric(config, ["a", "x", "y", "z", "v", "b"], 4, paths)
    assert level(fabric, "leaf").group.tolist() == [0, 1, 2, 3, 2, 0]
    assert level(fabric, "group").group.tolist() == [0, 1, 2, 3, 2, 0]
    assert level(fabric, "level3").group.tolist() == [0, 0, 0, 1, 0, 0]


def test_equal_names_on_two_branches_are_two_groups(config: RunConfig) -> None:
    fabric = build_fabric(config, ["a", "b"], 4, {"a": ("p", "leaf1"), "b": ("q", "leaf1")})
    assert level(fabric, "leaf").group.tolist() == [0, 1]


def test_calibration_replaces_what_it_measured(tmp_path: Path) -> None:
    measured = (LevelConstants("inside", 1e-6, 7e9), LevelConstants("leaf", 3e-4, 12.5e6))
    write_calibration(tmp_path / "found.json", Calibration("lab", "gloo", "2026-01-01T00:00:00Z", measured))
    config = compose([*FIGURES, f"cluster.calibration={tmp_path / 'found.json'}"])
    fabric = build_fabric(config, ["a", "b", "c", "d"], 4, PODS)
    assert (fabric.inside_bandwidth, fabric.inside_latency) == (7e9, 1e-6)
    assert level(fabric, "leaf").uplink.tolist() == [12.5e6] * 3  # of one group, however many nodes are in it
    assert level(fabric, "leaf").latency == 3e-4
    assert level(fabric, "node").uplink.tolist() == [50e9] * 4
    assert level(fabric, "group").uplink.tolist() == [30e9, 30e9]
    assert level(fabric, "leaf").busy_uplink.tolist() == [12.5e6] * 3


def test_a_calibration_that_is_none_is_one_line(tmp_path: Path, config: RunConfig) -> None:
    with pytest.raises(UserError, match=r"none\.json: No such file") as raised:
        build_fabric(compose([*FIGURES, f"cluster.calibration={tmp_path}/none.json"]), ["a", "b"], 4, PODS)
    assert "\n" not in str(raised.value)


def test_unknown_figures_are_stated_and_keep_their_ratios(tmp_path: Path) -> None:
    config = compose(["cluster=slurm", "cluster.fabric.oversubscription=4"])
    fabric = build_fabric(config, ["a", "b", "c"], 1, PODS)
    assert fabric.inside_bandwidth == DEFAULT_INSIDE
    assert level(fabric, "node").uplink.tolist() == [DEFAULT_UPLINK] * 3
    assert level(fabric, "leaf").uplink.tolist() == [DEFAULT_UPLINK / 2] * 2
    assert level(fabric, "leaf").busy_uplink.tolist() == [DEFAULT_UPLINK / 2, DEFAULT_UPLINK / 4]
    assert ["nic_gbit_s" in note for note in list_assumptions(config.cluster)] == [True, False]
    assert list_assumptions(compose(FIGURES).cluster) == ()
    measured = (LevelConstants("inside", 1e-6, 7e9), LevelConstants("node", 3e-4, 12.5e6))
    write_calibration(tmp_path / "c.json", Calibration("lab", "gloo", "2026-01-01T00:00:00Z", measured))
    assert list_assumptions(compose(["cluster=slurm", f"cluster.calibration={tmp_path}/c.json"]).cluster) == ()


def test_synthetic_fabrics() -> None:
    llama = build_described_fabric(compose(["cluster=meta_roce_24k", "cluster.nodes=1000"]))
    assert llama.nodes[:2] == ("node0001", "node0002")
    assert np.bincount(level(llama, "group").group).tolist() == [384, 384, 232]
    assert level(llama, "group").uplink[0] == pytest.approx(384 * 400e9 / 7)
    assert level(llama, "leaf").uplink.tolist() == [2 * 400e9] * 500
    nvl = build_described_fabric(compose(["cluster=gb200_nvl72", "cluster.nodes=40"]))
    assert names(nvl) == ["node", "domain"]
    assert level(nvl, "domain").uplink.tolist() == [18 * 200e9, 18 * 200e9, 4 * 200e9]
    assert level(nvl, "node").uplink.tolist() == [4 * 900e9] * 40


def test_a_group_without_known_leaves_still_has_its_own_taper() -> None:
    fabric = build_described_fabric(compose(["cluster=juwels_booster", "cluster.nodes=96"]))
    assert names(fabric) == ["node", "leaf", "group"]
    assert level(fabric, "group").uplink.tolist() == pytest.approx([48 * 100e9 / 1.01] * 2)


@pytest.mark.parametrize(
    ("overrides", "nodes", "ranks"),
    [
        ([], 1, 2),
        (["launch.ranks=6"], 1, 6),
        (["parallel.tp=4"], 1, 4),
        (["cluster=dgx_h100"], 1, 8),
        (["cluster=dgx_h100", "launch.ranks=4"], 1, 4),
        (["cluster=dgx_h100", "launch.ranks=20"], 3, 8),
        (["cluster=dgx_h100", "parallel.tp=8", "parallel.pp=4"], 4, 8),
        (["cluster=gb200_nvl72", "cluster.nodes=5", "parallel.tp=4"], 5, 4),
        (["cluster=slurm", "cluster.node.ranks=3", "cluster.nodes=2"], 2, 3),
    ],
)
def test_how_many_nodes_and_ranks_a_description_means(overrides: list[str], nodes: int, ranks: int) -> None:
    config = compose(overrides)
    assert (len(build_described_fabric(config).nodes), count_ranks_per_node(config)) == (nodes, ranks)


trees = st.dictionaries(
    st.sampled_from([f"n{number}" for number in range(12)]),
    st.lists(st.sampled_from("abc"), max_size=4).map(tuple),
    min_size=1,
)


@given(
    paths=trees,
    domains=st.dictionaries(st.sampled_from([f"n{number}" for number in range(12)]), st.sampled_from("xyz")),
)
def test_groups_always_nest_and_are_dense(paths: dict[str, tuple[str, ...]], domains: dict[str, str]) -> None:
    levels = build_levels(list(paths), paths, domains)
    for level in levels:
        assert list(dict.fromkeys(level.group.tolist())) == list(range(len(level.labels)))
    for inner, outer in pairwise(levels):
        assert len(set(zip(inner.group.tolist(), outer.group.tolist(), strict=True))) == len(inner.labels)
