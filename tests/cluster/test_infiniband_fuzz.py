"""Whatever is done to a dump: it is refused in one line, or gives a part of the true fabric; never a traceback."""

from __future__ import annotations

from collections import deque

import pytest
from fake_fabric import FakeFabric, rail_fabric, three_levels
from hypothesis import given, settings
from hypothesis import strategies as st

from hpc_train.cluster.readers.infiniband.ibnetdiscover import matches_ibnetdiscover, read_ibnetdiscover
from hpc_train.cluster.spec import Cluster
from hpc_train.cluster.switch_tree import build_units, find_rails, find_scalable_units, list_nodes_under
from hpc_train.errors import UserError

LINES = ['Switch 8 "a"', 'Ca 1 "b"', '[1] "a"[1]', '[1]"b"[1]', '[2] "a"', "#", "", "x=", '"']


@st.composite
def fabrics(draw: st.DrawFn) -> FakeFabric:
    """Any cabling of some switches and hosts, parallel cables and loops included."""
    fabric = FakeFabric()
    switches = [fabric.switch(f"MF0;s{n}:X/U1", 64) for n in range(draw(st.integers(1, 6)))]
    one = st.sampled_from(switches)
    for a, b in draw(st.lists(st.tuples(one, one), max_size=12)):
        fabric.cable(a, b)
    for host in range(draw(st.integers(1, 6))):
        for nic in range(draw(st.integers(1, 3))):
            adapter = fabric.adapter(f"h{host} mlx5_{nic}", ports=2)
            for switch in draw(st.lists(one, max_size=2)):
                fabric.cable(switch, adapter)
    return fabric


def true_levels(fabric: FakeFabric) -> dict[str, int]:
    """Hops to a host, less one; 0 where there is none."""
    name = {it.guid: it.name[4:].split(":")[0] for it in fabric.devices}
    start = [it.guid for it in fabric.devices if it.letter == "H" and "Aggregation" not in it.name]
    far, queue = dict.fromkeys(start, 0), deque(start)
    device = {it.guid: it for it in fabric.devices}
    while queue:
        at = queue.popleft()
        for other, _, _ in device[at].cables.values():
            if other.guid not in far and other.letter == "S":
                far[other.guid] = far[at] + 1
                queue.append(other.guid)
    return {name[it.guid]: max(far.get(it.guid, 1) - 1, 0) for it in fabric.devices if it.letter == "S"}


def true_cables(fabric: FakeFabric) -> set[tuple[str, str]]:
    """Pairs of names of a switch and what is cabled to it."""
    names = {it.guid: it.name.removeprefix("MF0;").split(":")[0].split()[0] for it in fabric.devices}
    return {(names[a.guid], names[b.guid]) for a in fabric.devices if a.letter == "S" for b, _, _ in a.cables.values()}


def told_cables(cluster: Cluster) -> set[tuple[str, str]]:
    return {(it.name, far) for it in cluster.switches for far in (*it.nodes, *it.switches)}


@settings(max_examples=150)
@given(fabrics())
def test_what_is_read_is_what_was_written(fabric: FakeFabric) -> None:
    cluster = read_ibnetdiscover(fabric.dump(), "dump")
    levels = true_levels(fabric)
    assert {it.name: it.level for it in cluster.switches} == levels
    wanted = {(a, b) for a, b in true_cables(fabric) if b not in levels or levels[b] == levels[a] - 1}
    assert told_cables(cluster) == wanted
    assert sum(len(it.nics) for it in cluster.nodes) == sum(it.letter == "H" for it in fabric.devices)
    assert {it.name for unit in find_scalable_units(cluster) for it in cluster.nodes if it.name in unit} == {
        it.name for it in cluster.nodes
    }
    held = [node for unit in build_units(cluster) for node in list_nodes_under(unit)]
    assert len(held) == len(set(held))
    assert set(held) == {node for it in cluster.switches for node in it.nodes}
    assert set(find_rails(cluster)) == {it.name for it in cluster.switches if it.nodes}


@pytest.mark.parametrize("fabric", [three_levels(), rail_fabric(2, 2, 2, 1)], ids=["three levels", "rails"])
def test_every_truncation_is_refused_or_a_part(fabric: FakeFabric) -> None:
    text = fabric.dump()
    levels, cables = true_levels(fabric), true_cables(fabric)
    guids = {f"{it.guid:016x}" for it in fabric.devices if it.letter == "H"}
    whole = read_ibnetdiscover(text, "dump")
    outcomes = {"refused": 0, "part": 0}
    for end in range(text.index("vendid") + 12, len(text)):
        assert matches_ibnetdiscover(text[:end])
        part = read_or_refuse(text[:end])
        outcomes["part" if part else "refused"] += 1
        if part is None:
            continue
        assert {it.name: it.level for it in part.switches}.items() <= levels.items()
        assert told_cables(part) <= cables
        assert {nic.guid for it in part.nodes for nic in it.nics} <= guids
        assert {it.name for it in part.nodes} <= {it.name for it in whole.nodes}
    assert min(outcomes.values()) > 100


@settings(max_examples=400)
@given(st.data())
def test_a_changed_line_is_refused_or_changes_nothing_but_that(data: st.DataObject) -> None:
    """One character of one port number or GUID: both ends of each cable are told, so it is seen."""
    text = three_levels().dump()
    lines = text.split("\n")
    ports = [n for n, line in enumerate(lines) if line.startswith("[")]
    row = data.draw(st.sampled_from(ports))
    end = lines[row].index("]", lines[row].index('"[')) + 1
    places = [n for n in range(end) if lines[row][n] in "0123456789abcdef" and "(" not in lines[row][:n][-17:]]
    place = data.draw(st.sampled_from(places))
    digit = data.draw(st.sampled_from("0123456789"))
    changed = lines[row][:place] + digit + lines[row][place + 1 :]
    cluster = read_or_refuse("\n".join([*lines[:row], changed, *lines[row + 1 :]]))
    assert cluster in (None, read_ibnetdiscover(text, "dump"))


@settings(max_examples=300)
@given(st.data())
def test_no_input_makes_a_traceback(data: st.DataObject) -> None:
    """Lines dropped, doubled, swapped, cut and filled with anything."""
    lines = rail_fabric(1, 2, 2, 1).dump().split("\n")
    for _ in range(data.draw(st.integers(1, 4))):
        row = data.draw(st.integers(0, len(lines) - 1))
        other = data.draw(st.integers(0, len(lines) - 1))
        change = data.draw(st.sampled_from(("drop", "double", "swap", "cut", "fill")))
        if change == "drop":
            lines[row] = ""
        elif change == "double":
            lines.insert(other, lines[row])
        elif change == "swap":
            lines[row], lines[other] = lines[other], lines[row]
        elif change == "cut":
            lines[row] = lines[row][: data.draw(st.integers(0, 60))]
        else:
            place = data.draw(st.integers(0, len(lines[row])))
            lines[row] = lines[row][:place] + data.draw(st.text(max_size=8)) + lines[row][place:]
    read_or_refuse("\n".join(lines))


@settings(max_examples=300)
@given(
    st.one_of(
        st.binary(max_size=300).map(lambda it: it.decode("utf-8", "replace")),
        st.lists(st.sampled_from(LINES)).map("\n".join),
    )
)
def test_any_text_is_refused_or_read(text: str) -> None:
    matches_ibnetdiscover(text)
    read_or_refuse(text)


def read_or_refuse(text: str) -> Cluster | None:
    """What is read, after a look at what holds of every fabric; None if it is refused."""
    try:
        cluster = read_ibnetdiscover(text, "dump")
    except UserError as error:
        refusal = str(error)
    else:
        names = [it.name for it in cluster.switches]
        assert len(set(names)) == len(names)
        assert len({it.name for it in cluster.nodes}) == len(cluster.nodes)
        assert told_cables(cluster) <= {(a, b) for a in names for b in (*names, *(it.name for it in cluster.nodes))}
        return cluster
    assert refusal.startswith("dump:")
    assert "\n" not in refusal
    return None
