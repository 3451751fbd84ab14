"""NICs to GPUs: least distance in all, as brute force finds it, and no NIC twice where others are as near."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from itertools import pairwise, product
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hpc_train.cluster.readers.formats import list_formats, read_topology_file
from hpc_train.cluster.spec import Gpu, Link, Nic, Node
from hpc_train.placement.node.nic_assignment import assign_nics, measure_distance, select_usable_nics

SAMPLES = Path(__file__).parents[2].parent / "shared/data/topology"
KINDS = ("NV2", "C2C", "PIX", "PXB", "PHB", "NODE", "SYS")


def node_of(table: Sequence[Sequence[str]]) -> tuple[Node, list[Link]]:
    """A node by the kinds of its GPUs' links to its NICs."""
    gpus = tuple(Gpu(f"GPU{row}") for row in range(len(table)))
    nics = tuple(Nic(f"NIC{column}", f"mlx5_{column}") for column in range(len(table[0])))
    links = [
        Link("here", gpu.id, nic.id, kind)
        for gpu, row in zip(gpus, table, strict=True)
        for nic, kind in zip(nics, row, strict=True)
    ]
    return Node("here", gpus, nics), links


@st.composite
def tables(draw: st.DrawFn) -> list[list[str]]:
    rows, columns = draw(st.integers(1, 5)), draw(st.integers(1, 4))
    return draw(
        st.lists(st.lists(st.sampled_from(KINDS), min_size=columns, max_size=columns), min_size=rows, max_size=rows)
    )


def brute_force(table: Sequence[Sequence[str]]) -> tuple[int, int]:
    """(least total distance, least sum of squared users of a NIC at that distance) over all maps."""
    return min(
        (
            sum(measure_distance(row[nic]) for row, nic in zip(table, chosen, strict=True)),
            sum(count**2 for count in Counter(chosen).values()),
        )
        for chosen in product(range(len(table[0])), repeat=len(table))
    )


@settings(max_examples=150)
@given(tables())
def test_as_near_as_brute_force_and_as_seldom_doubled(table: list[list[str]]) -> None:
    found = assign_nics(*node_of(table))
    users = Counter(found.nic_of.values())
    pairs = [(int(gpu.removeprefix("GPU")), int(nic.removeprefix("NIC"))) for gpu, nic in found.nic_of.items()]
    assert len(pairs) == len(table)
    distance = sum(measure_distance(table[row][column]) for row, column in pairs)
    assert (distance, sum(count**2 for count in users.values())) == brute_force(table)


def test_the_nearest_nic_is_not_doubled_where_the_next_is_as_near() -> None:
    found = assign_nics(
        *node_of([["PXB", "PXB", "SYS", "SYS"], ["PXB", "PXB", "SYS", "SYS"], ["SYS", "SYS", "PIX", "PIX"]])
    )
    assert found.nic_of == {"GPU0": "NIC0", "GPU1": "NIC1", "GPU2": "NIC2"}


def test_fewer_nics_than_gpus_are_shared_evenly() -> None:
    found = assign_nics(*node_of([["NODE", "NODE"]] * 6))
    assert Counter(found.nic_of.values()) == {"NIC0": 3, "NIC1": 3}


def test_ties_go_by_numa_then_by_domain_then_by_order() -> None:
    gpus = tuple(Gpu(f"GPU{i}", numa=i // 2, pci=f"{i:04x}:01:00.0") for i in range(4))
    nics = tuple(Nic(f"NIC{i}", numa=1 - i // 2, pci=f"{3 - i:04x}:01:00.0") for i in range(4))
    links = [Link("tray", gpu.id, nic.id, "SYS") for gpu in gpus for nic in nics]
    found = assign_nics(Node("tray", gpus, nics), links)
    assert found.nic_of == {"GPU0": "NIC3", "GPU1": "NIC2", "GPU2": "NIC1", "GPU3": "NIC0"}


def test_equal_nics_keep_the_order_of_the_gpus() -> None:
    found = assign_nics(*node_of([["NODE"] * 4] * 4))
    assert list(found.nic_of.values()) == ["NIC0", "NIC1", "NIC2", "NIC3"]


def test_nics_that_are_down_slow_of_another_layer_or_bonds_are_dropped() -> None:
    fast = [Nic(f"NIC{i}", f"mlx5_{i}", active=True, gbit_s=400.0, layer="infiniband") for i in range(4)]
    odd = [
        Nic("NIC4", "mlx5_4", active=False, layer="infiniband"),
        Nic("NIC5", "mlx5_5", active=True, gbit_s=100.0, layer="infiniband"),
        Nic("NIC6", "mlx5_6", active=True, gbit_s=400.0, layer="ethernet"),
        Nic("NIC7", "mlx5_bond_0", active=True, gbit_s=200.0, layer="ethernet"),
    ]
    left, dropped = select_usable_nics([*odd, *fast])
    assert left == fast
    assert dropped == {
        "NIC4": "no port is up",
        "NIC5": "100.0 where most have 400.0",
        "NIC6": "ethernet where most have infiniband",
        "NIC7": "mlx5_bond_0 is a bond",
    }


def test_bonds_stay_where_the_site_bonds_what_gpus_use() -> None:
    bonds = [Nic(f"NIC{i}", f"mlx5_bond_{i}", active=True, gbit_s=400.0) for i in range(4)]
    management = Nic("NIC4", "mlx5_0", active=True, gbit_s=25.0)
    left, dropped = select_usable_nics([management, *bonds])
    assert left == bonds
    assert list(dropped) == ["NIC4"]


def test_a_node_without_nics_or_without_gpus_has_no_pairs() -> None:
    assert assign_nics(Node("a", (Gpu("GPU0"),)), []).nic_of == {}
    assert assign_nics(Node("b", (), (Nic("NIC0"),)), []).nic_of == {}


def sample_files() -> list[Path]:
    """Tables of nvidia-smi, where they lie beside the checkout."""
    return sorted((SAMPLES / "nvidia-smi-topo").glob("*.txt")) if SAMPLES.is_dir() else []


def test_no_sample_machine_has_a_nic_doubled_at_need() -> None:
    """Each table that is read here: every GPU at its least distance, and no NIC twice while one as near idles."""
    for path in sample_files():
        if not any(it.matches(path.read_text(errors="replace")) for it in list_formats()):
            continue
        cluster = read_topology_file(path)
        for node in cluster.nodes:
            found = assign_nics(node, cluster.links)
            kinds = {(link.a, link.b): measure_distance(link.kind) for link in cluster.links if link.node == node.name}
            away = {
                pair: kinds.get(pair, kinds.get(pair[::-1], 7))
                for pair in product(*([g.id for g in node.gpus], [n.id for n in node.nics]))
            }
            fit = [nic.id for nic in node.nics if nic.id not in found.dropped]
            users = Counter(found.nic_of.values())
            for gpu, nic in found.nic_of.items():
                nearest = min(away[gpu, other] for other in fit)
                assert away[gpu, nic] == nearest, (path.name, gpu)
                spare = [other for other in fit if away[gpu, other] == nearest and users[other] < users[nic] - 1]
                assert spare == [], (path.name, gpu, nic)


@pytest.mark.parametrize(("near", "far"), list(pairwise(KINDS)))
def test_kinds_are_ordered(near: str, far: str) -> None:
    assert measure_distance(near) < measure_distance(far) < measure_distance("what is this")
