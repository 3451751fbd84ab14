"""NCCL's graph XML: what channels tell of GPUs and NICs, and files that are damaged."""

from __future__ import annotations

import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from reader_outcome import NAME, check, outcome

from hpc_train.cluster.readers.node.nccl_graph_xml import matches_nccl_graph, read_nccl_graph
from hpc_train.cluster.readers.node.nccl_xml import matches_nccl_xml
from hpc_train.cluster.spec import Cluster


def graph(*channels: str, inside: str = "NVL", outside: str = "PIX", pattern: int = 4) -> str:
    """A graph; a channel is written `n0 g0 g1 n1`."""
    lines = [
        f'<graph id="0" pattern="{pattern}" crossnic="0" nchannels="{len(channels)}" speedintra="20" '
        f'typeintra="{inside}" typeinter="{outside}" samechannels="0">'
    ]
    for channel in channels:
        devices = [f'<{"gpu" if word[0] == "g" else "net"} dev="{word[1:]}"/>' for word in channel.split()]
        lines.append("  <channel>\n" + "\n".join(f"    {device}" for device in devices) + "\n  </channel>")
    return "\n".join([*lines, "</graph>"])


def file(*graphs: str) -> str:
    return "\n".join(['<graphs version="1">', *graphs, "</graphs>", ""])


def read(text: str) -> Cluster:
    assert matches_nccl_graph(text)
    assert not matches_nccl_xml(text)
    cluster = check(outcome(read_nccl_graph, text))
    assert cluster is not None
    return cluster


def test_neighbours_of_a_ring_and_its_nics() -> None:
    cluster = read(file(graph("n0 g0 g2 g1 n1")))
    (node,) = cluster.nodes
    assert [gpu.id for gpu in node.gpus] == ["GPU0", "GPU1", "GPU2"]
    assert [nic.id for nic in node.nics] == ["NIC0", "NIC1"]
    assert [(link.a, link.b, link.kind) for link in cluster.links] == [
        ("GPU0", "GPU2", "NVL"),
        ("GPU0", "NIC0", "PIX"),
        ("GPU1", "GPU2", "NVL"),
        ("GPU1", "NIC1", "PIX"),
    ]
    assert "the first is NIC0 GPU0 GPU2 GPU1 NIC1" in cluster.notes[1]


def test_of_two_graphs_the_nearer_path_counts() -> None:
    cluster = read(file(graph("g0 g1 g2", inside="SYS"), graph("g2 g1", inside="PXB", pattern=1), graph()))
    assert {(link.a, link.b): link.kind for link in cluster.links} == {("GPU0", "GPU1"): "SYS", ("GPU1", "GPU2"): "PXB"}
    assert len(cluster.notes) == 3


def test_a_nic_with_the_number_of_its_node() -> None:
    assert [nic.id for nic in read(file(graph("n0x100000000000003 g0"))).nodes[0].nics] == ["NIC3"]


REFUSED = {
    '<graphs version="1"><graph id="0" typeintra="NVL" typeinter="PIX"/></graphs>': "no channel with a GPU",
    '<graphs version="1">\n<graph id="0">': "XML",
    file(graph("g0 g1")).replace('nchannels="1"', 'nchannels="2"'): "topo.txt:2: 1 channels where nchannels='2'",
    file(graph("g0 g1")).replace("NVL", "?"): r"topo.txt:2: typeintra='\?' of <graph>",
    file(graph("g0 g512")): "dev='512' of <gpu>; expected 0 to 511",
    file(graph("g-1")): "dev='-1'",
}


@pytest.mark.parametrize("number", range(len(REFUSED)))
def test_damaged_files_are_refused_in_one_line(number: int) -> None:
    text, expected = list(REFUSED.items())[number]
    result = outcome(read_nccl_graph, text)
    assert isinstance(result, str)
    assert check(result) is None
    assert re.search(expected, result)


WHOLE = file(graph("n0 g0 g1 g2 g3 n1", "n1 g3 g2 g1 g0 n0"), graph("n0 g0 g1", pattern=1))


@settings(max_examples=150)
@given(st.data())
def test_mutated_files_are_refused_or_consistent(data: st.DataObject) -> None:
    at = data.draw(st.integers(0, len(WHOLE)))
    if data.draw(st.booleans()):
        assert check(outcome(read_nccl_graph, WHOLE[:at])) is None or WHOLE[at:].strip() == ""
        return
    text = WHOLE[:at] + data.draw(st.text(max_size=3)) + WHOLE[at + data.draw(st.integers(0, 3)) :]
    matches_nccl_graph(text)
    result = outcome(read_nccl_graph, text)
    check(result)
    assert not isinstance(result, str) or result.startswith(NAME)
