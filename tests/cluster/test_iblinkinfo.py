"""iblinkinfo: the same fabric as ibnetdiscover's dump of it, parts of the output, and lines that are refused."""

from dataclasses import replace

import pytest
from fake_fabric import FakeFabric, rail_fabric, three_levels
from hypothesis import given, settings
from hypothesis import strategies as st
from reader_outcome import NAME, check, outcome

from hpc_train.cluster.readers.infiniband.iblinkinfo import matches_iblinkinfo, read_iblinkinfo
from hpc_train.cluster.readers.infiniband.ibnetdiscover import matches_ibnetdiscover, read_ibnetdiscover
from hpc_train.errors import UserError

FABRICS = {
    "rails": rail_fabric(units=3, hosts=4, nics=8, spines=5),
    "three levels": three_levels(),
    "EDR": rail_fabric(2, 2, 1, 2, "4xEDR"),
    "FDR10": rail_fabric(2, 2, 1, 1, "4xFDR10"),
}


@pytest.mark.parametrize("name", list(FABRICS))
def test_the_same_fabric_as_ibnetdiscover(name: str) -> None:
    fabric = FABRICS[name]
    text = fabric.link_info()
    assert matches_iblinkinfo(text)
    assert not matches_ibnetdiscover(text)
    expected = read_ibnetdiscover(fabric.dump(), NAME)
    read = read_iblinkinfo(text, NAME)
    assert {node.name: node for node in read.nodes} == {node.name: node for node in expected.nodes}
    assert {switch.name: switch for switch in read.switches} == {switch.name: switch for switch in expected.switches}
    assert read.kind == "iblinkinfo"


def test_switches_alone_give_the_same_tree_without_guids() -> None:
    fabric = FABRICS["rails"]
    whole, read = read_iblinkinfo(fabric.link_info(), NAME), read_iblinkinfo(fabric.link_info(adapters=False), NAME)
    assert {switch.name: set(switch.nodes) for switch in read.switches} == {
        switch.name: set(switch.nodes) for switch in whole.switches
    }
    without = {node.name: {replace(nic, guid=None) for nic in node.nics} for node in whole.nodes}
    assert {node.name: set(node.nics) for node in read.nodes} == without


def test_an_adapter_with_two_ports_is_one_device() -> None:
    fabric = FakeFabric()
    first, second = fabric.switch("leaf1"), fabric.switch("leaf2")
    both = fabric.adapter("n1 mlx5_0", ports=2)
    fabric.cable(both, first)
    fabric.cable(both, second)
    fabric.cable(fabric.adapter("n2 mlx5_0"), first)
    (nic,) = {node.name: node for node in read_iblinkinfo(fabric.link_info(), NAME).nodes}["n1"].nics
    assert (nic.switches, nic.gbit_s) == (("leaf1", "leaf2"), 400)


TEXT = FABRICS["EDR"].link_info()
LINES = TEXT.splitlines()
UP = [line for line in LINES if "LinkUp" in line]
REFUSED = {
    "\n".join(UP): ":1: a port without its device",
    "\n".join(line for line in LINES if not line.startswith("CA")): "a port without its device",
    "\n".join(LINES[4:]): "has no ports of its own here",
    TEXT + UP[-1] + "\n": "again; expected each port once",
    TEXT + next(line for line in LINES if line.startswith("Switch")): "again, first in line",
    '0x1 "n1 mlx5_0" 5 1[ ] ==( 4X 25.78125 Gbps Active/ LinkUp)==> 0x2 4 1[ ] "leaf" ( )': "not a port of iblinkinfo",
    TEXT + "error: no such device\n": "not understood",
}


@pytest.mark.parametrize("text", list(REFUSED))
def test_parts_and_other_outputs_are_refused_in_one_line(text: str) -> None:
    assert matches_iblinkinfo(text)
    assert check(outcome(read_iblinkinfo, text)) is None
    with pytest.raises(UserError, match=REFUSED[text]):
        read_iblinkinfo(text, NAME)


@given(st.data())
@settings(max_examples=150)
def test_changed_output_is_refused_or_consistent(data: st.DataObject) -> None:
    at = data.draw(st.integers(0, len(TEXT)))
    changed = TEXT[:at] + data.draw(st.text(max_size=3)) + TEXT[at + data.draw(st.integers(0, 40)) :]
    check(outcome(read_iblinkinfo, changed))
