"""ibnetdiscover's dumps and ibsim's net files: hosts, adapters, switches, levels, units."""

from __future__ import annotations

from dataclasses import replace

import pytest
from fake_fabric import FakeFabric, rail_fabric, three_levels

from hpc_train.cluster.readers.infiniband.ibnetdiscover import matches_ibnetdiscover, read_ibnetdiscover
from hpc_train.cluster.readers.infiniband.infiniband_names import parse_description
from hpc_train.cluster.readers.infiniband.subnet_devices import parse_rate
from hpc_train.cluster.spec import Cluster, Switch, Trunk
from hpc_train.cluster.switch_tree import build_units, find_paths, find_rails, find_scalable_units
from hpc_train.errors import UserError


def by_name(cluster: Cluster) -> dict[str, Switch]:
    return {switch.name: switch for switch in cluster.switches}


def refused(text: str) -> str:
    assert matches_ibnetdiscover(text)
    with pytest.raises(UserError) as caught:
        read_ibnetdiscover(text, "dump")
    message = str(caught.value)
    assert message.startswith("dump:")
    assert "\n" not in message
    return message


@pytest.mark.parametrize("full", [False, True])
def test_rail_optimised_fabric(full: bool) -> None:
    cluster = read_ibnetdiscover(rail_fabric(units=3, hosts=4, nics=8, spines=5).dump(full), "dump")
    assert [node.name for node in cluster.nodes] == [f"gpu{u}-{h}" for u in range(3) for h in range(4)]
    for node in cluster.nodes:
        assert [nic.device for nic in node.nics] == [f"mlx5_{n}" for n in range(8)]
        assert [nic.id for nic in node.nics] == [f"NIC{n}" for n in range(8)]
        unit = node.name[3]
        assert [nic.switches for nic in node.nics] == [(f"leaf{unit}-{n}",) for n in range(8)]
        assert {(nic.gbit_s, nic.active, nic.layer) for nic in node.nics} == {(400.0, True, "infiniband")}
        assert len({nic.guid for nic in node.nics}) == 8
    switches = by_name(cluster)
    assert {name for name, switch in switches.items() if switch.level == 1} == {f"spine{n}" for n in range(5)}
    assert switches["leaf1-3"].nodes == tuple(f"gpu1-{h}" for h in range(4))
    assert switches["leaf1-3"].switches == ()
    assert set(switches["spine4"].switches) == {f"leaf{u}-{n}" for u in range(3) for n in range(8)}
    assert switches["spine4"].nodes == ()
    assert not cluster.links


def test_units_and_rails_of_a_rail_optimised_fabric() -> None:
    cluster = read_ibnetdiscover(rail_fabric(units=3, hosts=4, nics=8, spines=5).dump(), "dump")
    assert find_scalable_units(cluster) == tuple(tuple(f"gpu{u}-{h}" for h in range(4)) for u in range(3))
    assert find_rails(cluster) == {f"leaf{u}-{n}": (f"mlx5_{n}",) for u in range(3) for n in range(8)}
    (top,) = build_units(cluster)
    assert top.switches == tuple(f"spine{n}" for n in range(5))
    assert [(unit.level, unit.nodes) for unit in top.units] == [
        (0, [f"gpu{u}-{h}" for h in range(4)]) for u in range(3)
    ]
    assert find_paths(cluster)["gpu1-2"] == ("spine[0-4]", "leaf1-[0-7]")


def test_three_levels_and_their_units() -> None:
    cluster = read_ibnetdiscover(three_levels(pods=3, leaves=2, hosts=2).dump(), "dump")
    levels = {switch.name: switch.level for switch in cluster.switches}
    assert {name: level for name, level in levels.items() if name.startswith("leaf")} == dict.fromkeys(
        [f"leaf{p}-{n}" for p in range(3) for n in range(2)], 0
    )
    assert levels["spine2-1"] == 1
    assert levels["core0"] == 2
    assert by_name(cluster)["core1"].switches == tuple(f"spine{p}-{n}" for p in range(3) for n in range(2))
    assert len(find_scalable_units(cluster)) == 6
    assert find_paths(cluster)[find_scalable_units(cluster)[2][0]] == ("core[0-1]", "spine1-[0-1]", "leaf1-0")


def test_hosts_that_share_a_leaf_only_through_others_are_one_unit() -> None:
    fabric = FakeFabric()
    leaves = [fabric.switch(f"MF0;leaf{n}:X/U1") for n in range(4)]
    for host, on in {"a": (0, 1), "b": (1, 2), "c": (3,), "d": ()}.items():
        for n, leaf in enumerate(on):
            fabric.cable(leaves[leaf], fabric.adapter(f"{host} mlx5_{n}"))
        if not on:
            fabric.adapter(f"{host} mlx5_0")
    cluster = read_ibnetdiscover(fabric.dump(), "dump")
    assert find_scalable_units(cluster) == (("a", "b"), ("c",), ("d",))
    assert [node.nics[0].active for node in cluster.nodes] == [True, True, True, False]
    assert find_rails(cluster)["leaf1"] == ("mlx5_1", "mlx5_0")


def test_one_adapter_with_two_ports() -> None:
    fabric = FakeFabric()
    leaves = [fabric.switch("MF0;a:X/U1"), fabric.switch("MF0;b:X/U1")]
    both, one = fabric.adapter("n1 mlx4_0", ports=2), fabric.adapter("n2 mlx4_0", ports=2)
    fabric.cable(leaves[0], both, "4xFDR")
    fabric.cable(leaves[1], both, "4xEDR")
    fabric.cable(leaves[1], one, "4xEDR", ports=(9, 2))
    cluster = read_ibnetdiscover(fabric.dump(), "dump")
    first, second = cluster.nodes
    assert [(nic.gbit_s, nic.switches) for nic in first.nics] == [(156.0, ("a", "b"))]
    assert [(nic.gbit_s, nic.switches) for nic in second.nics] == [(100.0, ("b",))]
    assert find_scalable_units(cluster) == (("n1", "n2"),)


def test_aggregation_nodes_and_routers_are_no_hosts() -> None:
    fabric = FakeFabric()
    leaf, spine = fabric.switch("MF0;leaf:X/U1"), fabric.switch("MF0;spine:X/U1")
    fabric.cable(leaf, spine)
    fabric.cable(leaf, fabric.adapter("n1 HCA-1"))
    for switch in (leaf, spine):
        fabric.cable(switch, fabric.adapter("Mellanox Technologies Aggregation Node"))
    fabric.cable(spine, fabric.add("R", "router1", 2))
    cluster = read_ibnetdiscover(fabric.dump(), "dump")
    assert [node.name for node in cluster.nodes] == ["n1"]
    assert {switch.name: switch.level for switch in cluster.switches} == {"leaf": 0, "spine": 1}


def test_adapters_without_a_host_name_are_grouped_by_system_image() -> None:
    fabric = FakeFabric()
    leaf = fabric.switch("MF0;leaf:X/U1")
    for name, system in (("MT4129 ConnectX7   Mellanox Technologies", 0xABC), ("MT4129 ConnectX7", 0xABC)):
        fabric.cable(leaf, fabric.adapter(name, system=system))
    fabric.cable(leaf, fabric.adapter("n1 mlx5_0", system=0xDEF))
    fabric.cable(leaf, fabric.adapter("MT4129 ConnectX7 Mellanox Technologies", system=0xDEF))
    for system in (0x111, 0x222):
        fabric.cable(leaf, fabric.adapter("localhost mlx5_0", system=system))
    nodes = {node.name: len(node.nics) for node in read_ibnetdiscover(fabric.dump(), "dump").nodes}
    assert nodes == {f"{0xABC:016x}": 2, "n1": 2, f"{0x111:016x}": 1, f"{0x222:016x}": 1}


def test_two_hosts_of_one_name_are_told_apart() -> None:
    """Two hosts with adapters called `image HCA-1` and `image HCA-2`; one where a single name was not renewed."""
    fabric = FakeFabric()
    leaf = fabric.switch("MF0;leaf:X/U1")
    for system in (1, 2):
        for n in (1, 2):
            fabric.cable(leaf, fabric.adapter(f"image HCA-{n}", system=system))
    for n in (1, 1, 2, 3):
        fabric.cable(leaf, fabric.adapter(f"real HCA-{n}"))
    nodes = {node.name: len(node.nics) for node in read_ibnetdiscover(fabric.dump(), "dump").nodes}
    assert nodes == {f"{1:016x}": 2, f"{2:016x}": 2, "real": 4}


@pytest.mark.parametrize(
    ("description", "expected"),
    [
        ("node018 HCA-1", ("node018", "HCA-1")),
        ("gpu-7.cluster mlx5_10", ("gpu-7.cluster", "mlx5_10")),
        ("RMD70 ibp11s0f0", ("RMD70", "ibp11s0f0")),
        ("kvm mlx4_0", ("kvm", "mlx4_0")),
        ("h1 hca_0", ("h1", "hca_0")),
        ("h1 mlx5_bond_0", ("h1", "mlx5_bond_0")),
        ("h1 rocep1s0f1", ("h1", "rocep1s0f1")),
        ("'h1 HCA-2'", ("h1", "HCA-2")),
        ("h1  HCA-2  (storage)", ("h1", "HCA-2")),
        ("dgx01:mlx5_3", ("dgx01", "mlx5_3")),
        ("node-12-HCA-1", ("node-12", "HCA-1")),
        ("node001 compute_ib0", ("node001", "compute_ib0")),
        ("login", ("login", None)),
        ("MT25408 ConnectX Mellanox Technologies", None),
        ("MT4129 ConnectX7   Mellanox Technologies", None),
        ("Quantum-2 Something NVIDIA", None),
        ("IBM Logical HCA", None),
        ("localhost HCA-1", None),
        ("mlx5_0", None),
        ("HCA-1", None),
        ("", None),
        (None, None),
    ],
)
def test_host_of_a_description(description: str | None, expected: tuple[str, str | None] | None) -> None:
    assert parse_description(description) == expected


def test_switch_names_are_unique() -> None:
    fabric = FakeFabric()
    names = ["MF0;chassis:CS8500/S01/U1", "MF0;chassis:CS8500/L01/U1", "SwitchIB Mellanox Technologies", "leaf-7"]
    names += ["SwitchIB Mellanox Technologies", "MF0;twin:M/U1", "MF0;twin:M/U1", "Sun DCS 36 QDR switch localhost"]
    names += ["MF0;plain", "MF0; spaced name:M/U1"]
    switches = [fabric.switch(name) for name in names]
    fabric.adapter("n1 HCA-1")
    found = [switch.name for switch in read_ibnetdiscover(fabric.dump(), "dump").switches]
    guids = [switch.id[2:] for switch in switches]
    assert found == [
        *("chassis:CS8500/S01/U1", "chassis:CS8500/L01/U1", guids[2], "leaf-7", guids[4], guids[5], guids[6], guids[7]),
        *("plain", "spaced name"),
    ]


def test_names_that_the_site_gave_to_switches() -> None:
    fabric = FakeFabric()
    leaf = fabric.switch("SwitchX Mellanox Technologies")
    fabric.cable(leaf, fabric.adapter("n1 HCA-1"))
    cluster = read_ibnetdiscover(fabric.dump(node_map={leaf.guid: "rack1-leaf"}), "dump")
    assert [switch.name for switch in cluster.switches] == ["rack1-leaf"]
    assert cluster.nodes[0].nics[0].switches == ("rack1-leaf",)


def test_cables_of_a_switch_to_itself_and_between_peers_are_no_tree() -> None:
    fabric = FakeFabric()
    a, b = fabric.switch("MF0;a:X/U1"), fabric.switch("MF0;b:X/U1")
    fabric.cable(a, a)
    for _ in range(3):
        fabric.cable(a, b)
    for leaf, name in ((a, "n1"), (b, "n2")):
        fabric.cable(leaf, fabric.adapter(f"{name} HCA-1"))
    cluster = read_ibnetdiscover(fabric.dump(), "dump")
    assert cluster.switches == (
        Switch("a", 0, ("n1",), uplinks=(Trunk("b", 3, 600.0),)),
        Switch("b", 0, ("n2",), uplinks=(Trunk("a", 3, 600.0),)),
    )


def test_back_to_back_hosts() -> None:
    fabric = FakeFabric()
    fabric.cable(fabric.adapter("n1 HCA-1"), fabric.adapter("n2 HCA-1"))
    cluster = read_ibnetdiscover(fabric.dump(), "dump")
    assert [(node.name, node.nics[0].switches) for node in cluster.nodes] == [("n1", ()), ("n2", ())]
    assert cluster.switches == ()


def test_switches_without_hosts() -> None:
    fabric = FakeFabric()
    fabric.cable(fabric.switch("MF0;a:X/U1"), fabric.switch("MF0;b:X/U1"))
    assert "no adapter of a host" in refused(fabric.dump())
    fabric.cable(fabric.switch("MF0;c:X/U1"), fabric.adapter("n HCA-1"))
    found = read_ibnetdiscover(fabric.dump(), "dump").switches
    assert [(switch.name, switch.level, switch.nodes, switch.switches) for switch in found] == [
        ("a", 0, (), ()),
        ("b", 0, (), ()),
        ("c", 0, ("n",), ()),
    ]


def test_net_file_of_the_simulator() -> None:
    fabric = three_levels()
    for device in fabric.devices:
        device.name = device.name.removeprefix("MF0;").split(":")[0].split()[0]
    cluster, original = read_ibnetdiscover(fabric.net(), "net"), read_ibnetdiscover(three_levels().dump(), "dump")
    assert {node.name for node in cluster.nodes} == {node.name for node in original.nodes}
    assert by_name(cluster).keys() == by_name(original).keys()
    for name, switch in by_name(original).items():
        counted = tuple(replace(trunk, gbit_s=None) for trunk in switch.uplinks)  # net files have no rates
        assert by_name(cluster)[name] == replace(switch, uplinks=counted)
    assert cluster.nodes[0].nics[0].guid is None
    assert cluster.nodes[0].nics[0].gbit_s is None


def test_default_port_and_options_of_the_simulator() -> None:
    text = 'Switch 8 "s1"\n[1] "h1" w=4\n# a comment\n[2] "h2"[1] w=1 s=2\n\nHca 2 "h1"\n[1] "s1"[1]\nhcaguids=0x10\n'
    cluster = read_ibnetdiscover(text + 'Ca 1 "h2"\n', "net")
    assert cluster.switches == (Switch("s1", 0, ("h1", "h2")),)


def test_what_surrounds_a_dump() -> None:
    text = three_levels().dump()
    around = (
        f"[root@mgmt ~]# ibnetdiscover\nsrc/query_smp.c:195; umad failed\nibwarn: [5] x: y\n{text}[root@mgmt ~]# \n"
    )
    grouped = text.replace("\nvendid", "\nChassis 1 (guid 0x2c9)\n\n# Spine Nodes\nvendid", 1) + "\nNon-Chassis Nodes\n"
    grouped = grouped.replace('"[1]', '"[1][ext 14]').replace("\n[2]", "\n[2][ext 3]")
    assert (
        read_ibnetdiscover(around, "dump")
        == read_ibnetdiscover(text, "dump")
        == read_ibnetdiscover(text.replace("\n", "\r\n"), "dump")
    )
    assert read_ibnetdiscover(grouped, "dump") == read_ibnetdiscover(text, "dump")


def test_the_same_dump_twice_is_the_same_fabric() -> None:
    text = three_levels().dump()
    assert read_ibnetdiscover(text + text, "dump") == read_ibnetdiscover(text, "dump")


@pytest.mark.parametrize(
    ("rate", "expected"),
    [
        *[("4xSDR", 10), ("4xDDR", 20), ("4xQDR", 40), ("4xFDR10", 40), ("4xFDR", 56), ("4xEDR", 100), ("4xHDR", 200)],
        *[("2xHDR", 100), ("4xNDR", 400), ("2xNDR", 200), ("1xNDR", 100), ("4xXDR", 800), ("12xQDR", 120)],
        *[("1xSDR", 2.5), ("4x???", None), ("??EDR", None), ("4xEDR2", None), ("", None), (None, None)],
    ],
)
def test_rates(rate: str | None, expected: float | None) -> None:
    assert parse_rate(rate) == expected


def test_part_of_a_subnet() -> None:
    """Only the first leaf has a record: the hosts on it are known, its spines are not, for hosts may hang on them."""
    text = three_levels().dump()
    records = text.split("\n\n")
    leaf = next(
        record
        for record in records
        if record.startswith("vendid") and "Switch\t40" in record and "leaf0-1" in record.split("[1]")[0]
    )
    cluster = read_ibnetdiscover(f"{records[0]}\n\n{leaf}\n", "dump")
    (switch,) = cluster.switches
    assert (switch.name, switch.level, switch.nodes, switch.switches) == ("leaf0-1", 0, ("node010", "node011"), ())
    assert [(trunk.cables, trunk.gbit_s) for trunk in switch.uplinks] == [(1, 200.0), (1, 200.0)]
    assert [(node.name, node.nics[0].gbit_s) for node in cluster.nodes] == [("node010", 200.0), ("node011", 200.0)]


def test_hosts_of_a_leaf_without_a_record() -> None:
    """The end of a dump: adapters tell which leaf they hang on."""
    text = three_levels().dump()
    adapters = text[text.index("vendid", text.index('Switch\t40 "S-', text.rindex("Switch\t"))) :]
    cluster = read_ibnetdiscover(adapters, "dump")
    assert {switch.name: switch.nodes for switch in cluster.switches} == {
        f"leaf{p}-{n}": (f"node{p}{n}0", f"node{p}{n}1") for p in range(2) for n in range(2)
    }


def test_a_level_that_is_not_told() -> None:
    """A core next to a spine without a record might be level 1 as well as 2."""
    gone = [f'# "{name}' for name in ("MF0;spine1", "MF0;leaf1", "node1")]
    records = three_levels(pods=2).dump().split("\n\n")
    kept = [record for record in records if not any(name in record.split("\n[")[0] for name in gone)]
    assert "have no whole record" in refused("\n\n".join(kept))


def test_ends_that_disagree() -> None:
    text = three_levels().dump()
    lines = text.split("\n")
    row = next(n for n, line in enumerate(lines) if "node000 HCA-1" in line and line.startswith("["))
    other = next(n for n, line in enumerate(lines) if line.startswith("[1](") and "leaf0-0" in line)
    lines[row] = lines[row].replace("[1]", "[19]", 1)
    message = refused("\n".join(lines))
    assert "expected both ends of a cable to agree" in message
    assert str(other + 1) in message


@pytest.mark.parametrize(
    ("change", "what"),
    [
        (lambda dump: dump.replace("Switch\t40", "Swtch\t40", 3), "not understood"),
        (lambda dump: dump[dump.index("\n[") + 1 :], "began before the file"),
        (lambda dump: dump.replace('"[1]', '"', 1), "is missing"),
        (lambda dump: dump.replace("\n[1]", "\n[41]", 1), "expected 1 to 40"),
        (lambda dump: dump.replace("\n[1]", "\n[0]", 1), "expected 1 to 40"),
        (lambda dump: dump.replace("\n[2]", "\n[1]", 1), "expected one cable a port"),
        (lambda dump: dump.replace('40 "S-', '40 "H-', 1), "the kind that its letter says"),
        (lambda dump: dump.replace(' enhanced port 0', '\nwhat is this', 1), "not understood"),
        (lambda dump: dump[: dump.rindex('"')], "a name that does not end"),
        (lambda dump: dump[: dump.index("[", dump.rindex('"S-')) + 1], "cut off or misspelt"),
        (lambda dump: dump[: dump.index("Switch")], "ends before any device"),
        (lambda dump: dump.replace("node000", "-_" * 5000), "expected at most 1000"),
        (lambda dump: "module \"x\"\n" + dump, "command of ibsim"),
    ],
)  # fmt: skip
def test_refused(change: object, what: str) -> None:
    assert callable(change)
    assert what in refused(change(three_levels().dump()))


def test_a_switch_whose_record_is_cut() -> None:
    """Its spines say that they are cabled to it, its own record does not: it has lost hosts too."""
    text = three_levels().dump()
    start = text.index('# "MF0;leaf1-1')
    assert "ends within" in refused(text[: text.index("\n[2]", start)])


@pytest.mark.parametrize(
    "text",
    [
        'Switch\t : 0x0002c90000000110 ports 36 devid 0xd2f0 vendid 0x2c9 "MF0;a:b/U1"\n',
        "SW     5  1 0x0002c90000000110 4x EDR - CA     7  1 0x0002c90000000210 ( 'a' - 'b' )\n",
    ],
)
def test_other_tools_are_named(text: str) -> None:
    assert "is not read; expected what ibnetdiscover prints" in refused(text)
