"""ibdiagnet's and OpenSM's tables: the same fabric as ibnetdiscover's dump of it, and what is refused."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
from fake_fabric import FakeFabric, rail_fabric, three_levels
from hypothesis import given, settings
from hypothesis import strategies as st
from reader_outcome import NAME, check, outcome
from test_direct_networks import dragonfly

from hpc_train.cluster.readers.formats import list_formats, read_topology_text
from hpc_train.cluster.readers.infiniband.ibdiagnet_csv import read_ibdiagnet_csv
from hpc_train.cluster.readers.infiniband.ibnetdiscover import read_ibnetdiscover
from hpc_train.cluster.readers.infiniband.subnet_lst import read_subnet_lst
from hpc_train.cluster.spec import Cluster
from hpc_train.errors import UserError

FABRICS = {
    "rails": rail_fabric(units=2, hosts=3, nics=4, spines=3),
    "three levels": three_levels(),
    "FDR10": rail_fabric(2, 2, 1, 1, "4xFDR10"),
    "XDR": rail_fabric(2, 2, 1, 1, "4xXDR"),
    "dragonfly": dragonfly(5, 4),
}
READERS: dict[str, tuple[Callable[[FakeFabric], str], Callable[[str, str], Cluster]]] = {
    "subnet_lst": (FakeFabric.subnet_lst, read_subnet_lst),
    "ibdiagnet_csv": (FakeFabric.ibdiagnet_csv, read_ibdiagnet_csv),
}


def comparable(cluster: Cluster) -> tuple[object, ...]:
    """All that a reader tells, whatever the order of devices in its source."""
    switches = {
        it.name: replace(
            it,
            nodes=tuple(sorted(it.nodes)),
            switches=tuple(sorted(it.switches)),
            uplinks=tuple(sorted(it.uplinks, key=lambda trunk: trunk.switch)),
        )
        for it in cluster.switches
        if not it.name.startswith("dragonfly group")  # numbered in the order of devices
    }
    return {node.name: node for node in cluster.nodes}, switches, cluster.notes


@pytest.mark.parametrize("kind", list(READERS))
@pytest.mark.parametrize("name", list(FABRICS))
def test_the_same_fabric_as_ibnetdiscover(name: str, kind: str) -> None:
    render, read = READERS[kind]
    text = render(FABRICS[name])
    assert [it.name for it in list_formats() if it.matches(text)] == [kind]
    found = read(text, NAME)
    assert comparable(found) == comparable(read_ibnetdiscover(FABRICS[name].dump(), NAME))
    assert found.kind == kind


def test_ports_without_a_table_have_no_rates() -> None:
    fabric = FABRICS["three levels"]
    (nic,) = read_ibdiagnet_csv(fabric.ibdiagnet_csv(ports=False), NAME).nodes[0].nics
    assert (nic.gbit_s, nic.active) == (None, True)


LST = FABRICS["FDR10"].subnet_lst()
CSV = FABRICS["FDR10"].ibdiagnet_csv()
SPINE = FABRICS["FDR10"].devices[0]
NET_DUMP = (
    '"MF0;leaf1:MQM8700/U1", Mellanox, 0x1070fd03001adeb4, LID 24\n'
    "  #          : IB# : Sta  : PhysSta    : MTU : LWA     : LSA     : FEC mode\n"
    "  1          : 1   : ACT  : LINK UP    : 5   : 4x      : 50      : MLNX_RS_271_257_PLR\n"
)
UFM = '[{"source_guid": "1c34da0300728606", "source_port": "37", "destination_guid": "1c34", "destination_port": "2"}]'
REFUSED = {
    LST[: len(LST) // 2]: "not a link, or cut off",
    LST[: LST.index("\n", len(LST) // 3) + 1]: "listed from both ends; expected the whole list",
    LST.replace("Ports:FF", "Ports:00", 1): "expected 1 to 0",
    LST.replace("PN:02 }", "PN:01 }", 1): "expected one cable a port",
    CSV[: CSV.index("END_LINKS")]: "the section LINKS does not end; expected a line END_LINKS",
    CSV[: CSV.index("START_LINKS")]: "no section LINKS; expected a whole ibdiagnet2.db_csv",
    CSV.replace("NodeGuid2", "Guid"): "the section LINKS has no column NodeGuid2",
    CSV.replace(",2,1,0x", ",7,1,0x", 1): "NodeType '7'; expected 1 .adapter., 2 .switch. or 3 .router.",
    CSV.replace(f'"{SPINE.name}",', "", 1): "5 values in a row; expected 6, as columns",
    CSV.replace(f",0x{SPINE.guid:016x}\n", ",0x77\n", 1): "is not in the section NODES",
    CSV.replace(
        "START_LINKS\nNodeGuid1,PortNum1,NodeGuid2,PortNum2\n0x",
        "START_LINKS\nNodeGuid1,PortNum1,NodeGuid2,PortNum2\nx",
    ): ("expected a GUID such as 0x0002c90300001234"),
    NET_DUMP: "ibdiagnet2.net_dump is not read; expected ibdiagnet2.lst",
    UFM: "UFM's table of links is not read; expected ibdiagnet2.lst",
}


@pytest.mark.parametrize("text", list(REFUSED), ids=range(len(REFUSED)))
def test_parts_and_other_tables_are_refused_in_one_line(text: str) -> None:
    assert check(outcome(read_topology_text, text)) is None
    with pytest.raises(UserError, match=REFUSED[text]):
        read_topology_text(text, NAME)


@given(st.data())
@settings(max_examples=150)
def test_changed_tables_are_refused_or_consistent(data: st.DataObject) -> None:
    kind = data.draw(st.sampled_from(list(READERS)))
    text, read = (LST, read_subnet_lst) if kind == "subnet_lst" else (CSV, read_ibdiagnet_csv)
    at = data.draw(st.integers(0, len(text)))
    changed = text[:at] + data.draw(st.text(max_size=3)) + text[at + data.draw(st.integers(0, 40)) :]
    check(outcome(read, changed))
