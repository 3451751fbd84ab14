"""Host lists, topology and addresses as the real Slurm has them."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from slurm_client import SlurmCluster

from hpc_train.cluster.hostlist import compress_hostlist, expand_hostlist
from hpc_train.cluster.readers.formats import read_topology_file, read_topology_text
from hpc_train.cluster.readers.slurm.slurm_environment import build_cluster_from_paths, parse_address
from hpc_train.cluster.readers.slurm.slurm_topology import query_topology
from hpc_train.cluster.spec import Switch
from hpc_train.cluster.switch_tree import find_paths as paths

LEAVES = {
    "node1": ("spine", "leaf1"),
    "node2": ("spine", "leaf1"),
    "node3": ("spine", "leaf2"),
    "node4": ("spine", "leaf2"),
}

LITERALS = st.sampled_from(["n", "rack-", "x9", "a.b", "10.0.0."])


@st.composite
def numbers(draw: st.DrawFn) -> str:
    low = draw(st.integers(0, 120))
    high = low + draw(st.integers(0, 6))
    written = f"{low:0{draw(st.integers(1, 5))}d}"
    return draw(st.sampled_from([written, f"{written}-{high}", f"{written}-{high:0{draw(st.integers(1, 6))}d}"]))


GROUPS = st.lists(numbers(), min_size=1, max_size=3).map(lambda it: f"[{','.join(it)}]")
ITEMS = st.one_of(
    st.builds("{}{}".format, LITERALS, st.integers(0, 20)),
    st.builds("{}{}".format, LITERALS, GROUPS),
    st.builds("{}{}{}{}".format, LITERALS, GROUPS, st.one_of(st.just(""), LITERALS), GROUPS),
    st.builds("{}{}{}{}{}{}".format, LITERALS, GROUPS, LITERALS, GROUPS, st.one_of(st.just(""), LITERALS), GROUPS),
)
LISTS = st.lists(ITEMS, min_size=1, max_size=40).map(",".join)


@settings(max_examples=30, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(LISTS)
def test_a_host_list_is_what_scontrol_makes_of_it(slurm_cluster: SlurmCluster, text: str) -> None:
    names = expand_hostlist(text)
    assert slurm_cluster.scontrol("show", "hostnames", text).splitlines() == names
    assert slurm_cluster.scontrol("show", "hostnames", compress_hostlist(names)).splitlines() == names


def test_empty_items_blanks_and_duplicates(slurm_cluster: SlurmCluster) -> None:
    text = ",b,,a[1-2,1] a1,\tc,"
    assert slurm_cluster.scontrol("show", "hostnames", text).splitlines() == expand_hostlist(text)


def test_scontrol_shows_the_cluster_that_was_started(slurm_cluster: SlurmCluster) -> None:
    shown = query_topology()
    assert shown is not None
    assert shown.kind == "slurm_tree"
    assert shown.switches == (
        Switch("leaf1", 0, ("node1", "node2")),
        Switch("leaf2", 0, ("node3", "node4")),
        Switch("spine", 1, (), ("leaf1", "leaf2")),
    )
    assert paths(shown) == LEAVES
    assert read_topology_file(slurm_cluster.conf.with_name("topology.conf")) == shown


def test_an_address_in_a_step_names_the_same_leaf(slurm_cluster: SlurmCluster) -> None:
    found = addressed(slurm_cluster, [])
    assert found == LEAVES
    assert paths(build_cluster_from_paths(found)) == LEAVES


ODD = """\
SwitchName=leaf.1 Nodes=node1
SwitchName=leaf.2 Nodes=node[2-3]
SwitchName=leaf3 Nodes=node4
SwitchName=pod11 Switches=leaf.1,leaf.2
SwitchName=pod2 Switches=leaf.1,leaf.2
SwitchName=mid Switches=pod[11,2]
SwitchName=top Switches=mid,leaf3
"""
"""Dots in names, two parents, uneven depth."""


@contextlib.contextmanager
def other_topology(cluster: SlurmCluster, text: str) -> Iterator[None]:
    """The cluster has another topology inside, and its own again afterwards."""
    file = cluster.conf.with_name("topology.conf")
    own = file.read_text()
    try:
        reconfigure(cluster, text)
        yield
    finally:
        reconfigure(cluster, own)


def reconfigure(cluster: SlurmCluster, text: str) -> None:
    """Returns when the controller and every node go by it."""
    cluster.conf.with_name("topology.conf").write_text(text)
    wanted = paths(read_topology_text(text, "topology.conf"))
    cluster.scontrol("reconfigure")
    end = time.monotonic() + 60
    while True:
        shown = query_topology()
        if shown is not None and paths(shown) == wanted == addressed(cluster, [it.name for it in shown.switches]):
            return
        assert time.monotonic() < end, f"Slurm does not go by its new topology: {shown}"
        time.sleep(0.5)


def addressed(cluster: SlurmCluster, switches: list[str]) -> dict[str, tuple[str, ...]]:
    """What the address of each node says."""
    show = 'echo "$SLURMD_NODENAME $SLURM_TOPOLOGY_ADDR $SLURM_TOPOLOGY_ADDR_PATTERN"'
    lines = [line.split() for line in cluster.srun("-N4", "sh", "-c", show)]
    return {node: parse_address(address, pattern, node, switches) for node, address, pattern in lines}


def test_names_with_dots_two_parents_and_uneven_depth(slurm_cluster: SlurmCluster) -> None:
    with other_topology(slurm_cluster, ODD):
        shown = query_topology()
        assert shown is not None
        assert addressed(slurm_cluster, [it.name for it in shown.switches]) == {
            "node1": ("top", "mid", "pod[2,11]", "leaf.1"),
            "node2": ("top", "mid", "pod[2,11]", "leaf.2"),
            "node3": ("top", "mid", "pod[2,11]", "leaf.2"),
            "node4": ("top", "leaf3"),
        }
        assert addressed(slurm_cluster, [])["node1"] == ("top.mid.pod[11,2].leaf.1",)
        assert paths(read_topology_text(ODD, "topology.conf")) == paths(shown)


def test_the_environment_of_a_step(slurm_cluster: SlurmCluster) -> None:
    dump = slurm_cluster.command("srun", "-N3", "--exclude=node2", "-l", "sh", "-c", "env | grep ^SLURM")
    read = read_topology_text(dump, "env")
    assert read.kind == "slurm_environment"
    assert [it.name for it in read.nodes] == ["node1", "node3", "node4"]
    assert paths(read) == {node: LEAVES[node] for node in ("node1", "node3", "node4")}
