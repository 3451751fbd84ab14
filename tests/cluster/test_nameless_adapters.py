"""Assign adapters whose description names no host to servers, by GUIDs and by cabling."""

from __future__ import annotations

import pytest
from fake_fabric import FakeFabric, rail_fabric

from hpc_train.cluster.readers.infiniband.ibnetdiscover import read_ibnetdiscover

NAMELESS = "MT4129 ConnectX7   Mellanox Technologies"


def servers(fabric: FakeFabric) -> set[frozenset[str]]:
    """List each server as the GUIDs of its adapters."""
    return {frozenset(nic.guid or "" for nic in node.nics) for node in read_ibnetdiscover(fabric.dump(), "dump").nodes}


def hide(fabric: FakeFabric, *names: str) -> None:
    for device in fabric.devices:
        if device.name in names:
            device.name = NAMELESS


@pytest.mark.parametrize(
    "hidden",
    [
        ("gpu0-1 mlx5_2",),
        tuple(f"gpu0-1 mlx5_{n}" for n in range(4)),
        ("gpu0-1 mlx5_0", "gpu0-2 mlx5_0", "gpu1-3 mlx5_3"),
    ],
)
def test_by_the_port_of_the_leaves(hidden: tuple[str, ...]) -> None:
    """Each server uses one port number on all leaves of its unit, as real rail-optimised fabrics do."""
    fabric = rail_fabric(units=2, hosts=6, nics=4, spines=2)
    expected = servers(fabric)
    hide(fabric, *hidden)
    assert servers(fabric) == expected


@pytest.mark.parametrize("hidden", [1, 2, 4])
def test_by_the_guid_where_ports_tell_nothing(hidden: int) -> None:
    """Servers have four adapters with consecutive GUIDs, each cabled to other ports."""
    fabric = FakeFabric()
    leaves = [fabric.switch(f"MF0;leaf{n}:X/U1") for n in range(4)]
    spine = fabric.switch("MF0;spine:X/U1")
    for leaf in leaves:
        fabric.cable(leaf, spine)
    for host in range(8):
        fabric.next_guid += 4096
        for n, leaf in enumerate(leaves):
            adapter = fabric.adapter(f"gpu{host} mlx5_{n}")
            fabric.cable(leaf, adapter, ports=(2 + (host + 3 * n) % 8, 1))
    expected = servers(fabric)
    hide(fabric, *(f"gpu3 mlx5_{n}" for n in range(hidden)))
    assert servers(fabric) == expected


def test_by_one_system_image_guid() -> None:
    fabric = FakeFabric()
    leaf = fabric.switch("MF0;leaf:X/U1")
    for host in range(3):
        for _ in range(2):
            fabric.cable(leaf, fabric.adapter(NAMELESS, system=0xA000 + host))
    assert sorted(len(server) for server in servers(fabric)) == [2, 2, 2]


def test_what_nothing_tells_of_stays_apart() -> None:
    """Two adapters on one leaf, of unrelated boards, with no named server to learn from."""
    fabric = FakeFabric()
    leaf = fabric.switch("MF0;leaf:X/U1")
    for _ in range(2):
        fabric.next_guid += 1 << 20
        fabric.cable(leaf, fabric.adapter(NAMELESS))
    assert sorted(len(server) for server in servers(fabric)) == [1, 1]
