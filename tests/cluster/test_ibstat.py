"""ibstat's and ibstatus's output."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hpc_train.cluster.readers.infiniband.ibstat import matches_ibstat, read_ibstat
from hpc_train.cluster.spec import Nic
from hpc_train.errors import UserError


@dataclass(frozen=True)
class Port:
    state: str = "Active"
    rate: str = "400"
    layer: str = "InfiniBand"


def ibstat(adapters: dict[str, list[Port]], guid: str | None = "0x0002c90300{n:06x}", indent: str = "\t") -> str:
    """As ibstat prints it; guid: None for adapters that have none, whose fields are empty."""
    lines = []
    for n, (device, ports) in enumerate(adapters.items()):
        own = guid.format(n=n + 16) if guid else ""
        lines += [f"CA '{device}'", f"{indent}CA type: MT4129", f"{indent}Number of ports: {len(ports)}"]
        lines += [f"{indent}Firmware version: ", f"{indent}Node GUID: {own}", f"{indent}System image GUID: {own}"]
        for number, port in enumerate(ports, 1):
            fields = {"State": port.state, "Physical state": "LinkUp", "Rate": port.rate, "Base lid": "7"}
            fields |= {"Port GUID": own, "Link layer": port.layer}
            lines += [f"{indent}Port {number}:", *(f"{indent * 2}{name}: {value}" for name, value in fields.items())]
    return "\n".join(lines) + "\n"


def ibstatus(adapters: dict[str, list[Port]]) -> str:
    lines = []
    for device, ports in adapters.items():
        for number, port in enumerate(ports, 1):
            lines += [
                f"Infiniband device '{device}' port {number} status:",
                "\tdefault gid:\t fe80:0000:0000:0000:0002:1",
            ]
            lines += [f"\tstate:\t\t {port.state}", "\tphys state:\t 5: LinkUp", f"\trate:\t\t {port.rate}"]
            lines += [f"\tlink_layer:\t {port.layer}", ""]
    return "\n".join(lines)


def nics(text: str) -> tuple[Nic, ...]:
    assert matches_ibstat(text)
    (node,) = read_ibstat(text, "file").nodes
    assert node.name == "localhost"
    return node.nics


def refused(text: str) -> str:
    with pytest.raises(UserError) as caught:
        read_ibstat(text, "file")
    assert str(caught.value).startswith("file:")
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_several_adapters() -> None:
    down, ethernet = Port("Down", "10"), Port(rate="100", layer="Ethernet")
    text = ibstat({"mlx5_0": [Port()], "mlx5_1": [down], "mlx5_10": [ethernet], "mlx4_0": [Port(rate="56"), down]})
    found = nics(text)
    assert [it.id for it in found] == ["NIC0", "NIC1", "NIC2", "NIC3"]
    assert [it.device for it in found] == ["mlx5_0", "mlx5_1", "mlx5_10", "mlx4_0"]
    assert [it.active for it in found] == [True, False, True, True]
    assert [it.gbit_s for it in found] == [400.0, None, 100.0, 56.0]
    assert [it.layer for it in found] == ["infiniband", "infiniband", "ethernet", "infiniband"]
    assert [it.guid for it in found] == [f"0002c90300{n:06x}" for n in (16, 17, 18, 19)]
    assert read_ibstat(text, "file").kind == "ibstat"


def test_two_ports_up_and_layers_that_differ() -> None:
    (nic,) = nics(ibstat({"mlx4_0": [Port("Down", "10", "InfiniBand"), Port(rate="40", layer="Ethernet")]}))
    assert (nic.layer, nic.gbit_s) == ("ethernet", 40.0)
    (nic,) = nics(ibstat({"mlx4_0": [Port(rate="2.5"), Port(rate="40 (FDR10)")]}))
    assert nic.gbit_s == 42.5


def test_states_that_are_not_active() -> None:
    ports = {f"m{n}": [Port(state)] for n, state in enumerate(["Initializing", "Armed", "Down", "???", "Active"])}
    assert [it.active for it in nics(ibstat(ports))] == [False, False, False, False, True]


def test_empty_fields_and_what_a_terminal_adds() -> None:
    text = ibstat({"rxe0": [Port(rate="10 (FDR10)", layer="")]}, guid=None, indent="        ")
    (nic,) = nics(text.replace("Port GUID: ", "Port GUID:"))
    assert (nic.guid, nic.gbit_s, nic.layer, nic.active) == (None, 10.0, None, True)
    around = f"[root@n01 ~]# ibstat\n{text}[root@n01 ~]# \n".replace("\n", "\r\n")
    assert nics(around) == nics(text)


def test_one_port_asked_for() -> None:
    text = ibstat({"mlx5_0": [Port()]}).replace("CA '", "CA: '").replace("\t", "")
    kept = [line for line in text.split("\n") if not line.startswith(("CA type", "Number", "Firm", "Node", "System"))]
    assert [(it.device, it.gbit_s, it.guid) for it in nics("\n".join(kept))] == [("mlx5_0", 400.0, None)]


def test_ibstatus() -> None:
    up = Port("4: ACTIVE", "200 Gb/sec (4X HDR)")
    text = ibstatus(
        {
            "mlx5_0": [up],
            "mlx5_1": [Port("1: DOWN", "2.5 Gb/sec (1X SDR)"), up],
            "siw": [Port("unknown", "unknown", "IB")],
        }
    )
    found = nics(text)
    assert [(it.device, it.active, it.gbit_s, it.layer) for it in found] == [
        ("mlx5_0", True, 200.0, "infiniband"),
        ("mlx5_1", True, 200.0, "infiniband"),
        ("siw", False, None, "infiniband"),
    ]
    assert read_ibstat(text, "file").kind == "ibstatus"


@pytest.mark.parametrize(
    ("old", "new", "what"),
    [
        ("Number of ports: 1", "Number of ports: 2", "has 1 of 2 ports"),
        ("\t\tState: Active\n", "", "no state"),
        ("\t\tRate: 400\n", "", "no rate"),
        ("Rate: 400", "Rate: fast", "rate 'fast'"),
        ("Link layer: InfiniBand", "Link layer: Infini", "expected InfiniBand or Ethernet"),
        ("Node GUID: 0x0002c90300000010", "Node GUID: 0x0002c9", "16 hexadecimal digits"),
        ("CA 'mlx5_1'", "CA 'mlx5_0'", "is there twice"),
        ("CA 'mlx5_0'\n", "", "a port of no adapter"),
    ],
)
def test_refused(old: str, new: str, what: str) -> None:
    text = ibstat({"mlx5_0": [Port()], "mlx5_1": [Port()]})
    assert old in text
    if "no adapter" in what:
        text = text[: text.index("CA 'mlx5_1'")]
    assert what in refused(text.replace(old, new, 1))


def test_truncations_are_refused_or_a_part() -> None:
    text = ibstat({"mlx5_0": [Port(), Port()], "mlx5_1": [Port()]})
    whole = nics(text)
    parts = set()
    for end in range(len("CA 'mlx5_0'"), len(text)):
        try:
            cluster = read_ibstat(text[:end], "file")
        except UserError:
            continue
        parts.add(cluster)
        for nic, true in zip(cluster.nodes[0].nics, whole, strict=False):
            assert (nic.device, nic.guid, nic.gbit_s) == (true.device, true.guid, true.gbit_s)
    assert 1 <= len(parts) <= 3


@settings(max_examples=300)
@given(st.data())
def test_no_input_makes_a_traceback(data: st.DataObject) -> None:
    up = Port("4: ACTIVE", "200 Gb/sec (4X HDR)")
    text = data.draw(st.sampled_from([ibstat({"a": [Port()], "b": [Port(), Port()]}), ibstatus({"a": [up, up]}), ""]))
    for _ in range(3):
        start = data.draw(st.integers(0, len(text)))
        end = data.draw(st.integers(start, min(len(text), start + 40)))
        text = text[:start] + data.draw(st.one_of(st.just(""), st.text(max_size=10))) + text[end:]
    matches_ibstat(text)
    try:
        cluster = read_ibstat(text, "file")
    except UserError as error:
        refusal = str(error)
    else:
        assert len(cluster.nodes) == 1
        refusal = "file:"
    assert refusal.startswith("file:")
    assert "\n" not in refusal
