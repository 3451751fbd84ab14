"""Locate a job's nodes from a file, from scontrol and from Slurm's addresses, and without any source."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from fact_helpers import facts_of

from hpc_train.cluster.spec import Cluster, Node, Switch
from hpc_train.config.cluster import ClusterConfig, NodeConfig
from hpc_train.errors import UserError
from hpc_train.placement.node_locations import NodeLocations, locate_hosts
from hpc_train.runtime.host_info import ProcessInfo
from hpc_train.runtime.rank_assignment import make_hosts

PLAIN = ClusterConfig(name="x")
RACKS = ClusterConfig(name="x", node=NodeConfig(gpus=4, nvlink_domain_gpus=8))
"""A cluster with NVLink domains of two nodes."""
SHOWN = Cluster(
    "slurm_tree", switches=(Switch("a", 0, ("n0",)), Switch("b", 0, ("n1",)), Switch("t", 1, (), ("a", "b")))
)


def heads(*addresses: str, pattern: str = "switch.switch.node") -> list[ProcessInfo]:
    """Facts of nodes n0, n1, ... with these addresses (without the node); empty: none."""
    found = []
    for number, address in enumerate(addresses):
        name = f"n{number}"
        slurm = {"SLURMD_NODENAME": name}
        if address:
            slurm |= {"SLURM_TOPOLOGY_ADDR": f"{address}.{name}", "SLURM_TOPOLOGY_ADDR_PATTERN": pattern}
        found.append(replace(facts_of(number + 1, 1)[number], slurm=slurm))
    return found


def found(
    given: list[ProcessInfo], shown: Cluster | None = None, cluster: ClusterConfig = PLAIN, in_slurm: bool = True
) -> NodeLocations:
    return locate_hosts(cluster, make_hosts(given), in_slurm, lambda: shown)


def unasked() -> Cluster | None:
    raise AssertionError("scontrol is not to be asked")


def counted(cluster: Cluster | None) -> tuple[list[int], Callable[[], Cluster | None]]:
    calls: list[int] = []

    def ask() -> Cluster | None:
        calls.append(1)
        return cluster

    return calls, ask


def test_addresses_of_slurm() -> None:
    assert found(heads("top.a", "top.b")).paths == {"n0": ("top", "a"), "n1": ("top", "b")}


def test_scontrol_is_asked_once_and_only_in_a_job() -> None:
    calls, ask = counted(SHOWN)
    where = locate_hosts(PLAIN, make_hosts(heads("t.a", "t.b")), True, ask)
    assert where.paths == {"n0": ("t", "a"), "n1": ("t", "b")}
    assert calls == [1]
    assert where.uplinks[("t", "a")].nodes == 1
    assert locate_hosts(PLAIN, make_hosts(heads("t.a", "t.b")), False, unasked).paths == where.paths


def test_dotted_names_are_told_apart_by_the_switches_that_scontrol_knows() -> None:
    switches = (Switch("s.1", 1), Switch("l.1", 0), Switch("l.2", 0))
    shown = Cluster("slurm_tree", switches=switches)
    assert found(heads("s.1.l.1", "s.1.l.2"), shown).paths == {"n0": ("s.1", "l.1"), "n1": ("s.1", "l.2")}
    assert found(heads("s.1.l.1", "s.1.l.2")).paths == {"n0": ("s.1.l.1",), "n1": ("s.1.l.2",)}


def test_a_flat_slurm_tells_nothing() -> None:
    flat = [replace(head, slurm={**head.slurm, "SLURM_TOPOLOGY_ADDR": head.host}) for head in heads("", "")]
    for given in (flat, heads("", "")):
        where = found(given)
        assert where.problem == "no source says which switches the nodes are on; give cluster.topology=FILE"


def test_scontrol_answers_where_a_launcher_hides_the_addresses() -> None:
    assert found(facts_of(2, 1), SHOWN).paths == {"n0": ("t", "a"), "n1": ("t", "b")}


def test_addresses_count_where_scontrol_tells_of_another_topology() -> None:
    """Partitions may have their own topologies; scontrol shows the default one."""
    where = found(heads("other.x", "other.y"), SHOWN)
    assert where.paths == {"n0": ("other", "x"), "n1": ("other", "y")}
    assert "puts the nodes elsewhere" in where.notes[0]


def test_a_file_is_asked_first_and_knows_short_names(tmp_path: Path) -> None:
    file = tmp_path / "topology.conf"
    file.write_text("SwitchName=l1 Nodes=n0\nSwitchName=l2 Nodes=n1\nSwitchName=t Switches=l[1-2]\n")
    given = heads("top.a", "top.b")
    given[1] = replace(given[1], host="n1.example.org")
    config = ClusterConfig(name="x", topology=str(file))
    assert locate_hosts(config, make_hosts(given), True, unasked).paths == {
        "n0": ("t", "l1"),
        "n1.example.org": ("t", "l2"),
    }
    with pytest.raises(UserError, match=r"absent.conf: No such file"):
        locate_hosts(ClusterConfig(name="x", topology=str(tmp_path / "absent.conf")), make_hosts(given), True, unasked)
    (tmp_path / "hosts").write_text("n0\nn1\n")
    with pytest.raises(UserError, match="needs switches with nodes on them"):
        locate_hosts(ClusterConfig(name="x", topology=str(tmp_path / "hosts")), make_hosts(given), True, unasked)


def test_a_node_that_nobody_names_costs_only_itself(tmp_path: Path) -> None:
    file = tmp_path / "topology.conf"
    file.write_text("SwitchName=l1 Nodes=n0\nSwitchName=l2 Nodes=n1\nSwitchName=t Switches=l[1-2]\n")
    config = ClusterConfig(name="x", topology=str(file))
    sources = (
        locate_hosts(config, make_hosts(heads("a", "b", "c")), True, unasked),
        found(heads("t.l1", "t.l2", "")),
        found(facts_of(3, 1), SHOWN),
    )
    for where in sources:
        assert set(where.paths) == {"n0", "n1"}
        assert where.missing == ("n2",)
        assert where.problem is None
        assert "does not say where n2 is" in where.notes[0]


def test_a_source_that_names_no_node_of_the_job(tmp_path: Path) -> None:
    assert found(facts_of(3, 1)[1:2], Cluster("slurm_tree", switches=(Switch("a", 0, ("z",)),))).problem == (
        "Slurm names none of the nodes (n1)"
    )


def test_the_environment_of_another_node_does_not_count() -> None:
    same = heads("top.a", "top.b")
    same[1] = replace(same[1], slurm=same[0].slurm)  # mpirun gives every rank the first node's environment
    problem = found(same).problem
    assert problem is not None
    assert problem.startswith("2 nodes have the environment of n0")
    assert found(same, SHOWN).paths == {"n0": ("t", "a"), "n1": ("t", "b")}, "by the hosts' own names"


def blocks(*sizes: int) -> Cluster:
    names = iter(f"n{number}" for number in range(sum(sizes)))
    held = [tuple(next(names) for _ in range(size)) for size in sizes]
    switches = tuple(Switch(f"b{number}", 0, nodes) for number, nodes in enumerate(held))
    return Cluster("slurm_block", tuple(Node(name) for nodes in held for name in nodes), switches=switches)


def test_nvlink_domains_by_nvml_count_before_slurms_blocks() -> None:
    one, two, three, four = facts_of(4, 1)
    assert found([one, two, three, four], blocks(2, 2), RACKS).domains == {
        "n0": "b0",
        "n1": "b0",
        "n2": "b1",
        "n3": "b1",
    }
    told = [replace(one, clique="c.1"), replace(two, clique="c.2"), replace(three, clique="c.1")]
    where = found([*told, four], blocks(2, 2), RACKS)
    assert where.domains == {"n0": "c.1", "n1": "c.2", "n2": "c.1"}
    assert where.notes[-1] == "NVML reports other NVLink domains than Slurm's blocks; NVML's are used"
    agreed = [replace(it, clique=f"c.{number // 2}") for number, it in enumerate((one, two, three, four))]
    assert not any("NVML" in note for note in found(agreed, blocks(2, 2), RACKS).notes)


def test_blocks_are_nvlink_domains_only_where_the_cluster_has_domains_of_that_size() -> None:
    given = facts_of(4, 1)
    assert found(given, blocks(2, 2), PLAIN).domains == {}
    large = found(given, blocks(3, 1), RACKS)
    assert large.domains == {}
    assert "blocks are not taken for domains" in large.notes[-1]
    addressed = heads("b0", "b0", "b1", "b1", pattern="block.node")
    assert found(addressed, None, RACKS).domains == {"n0": "b0", "n1": "b0", "n2": "b1", "n3": "b1"}
