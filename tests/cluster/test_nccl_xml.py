"""NCCL's topology XML: the PCI tree's closeness, NVLinks of every kind, vendors' files, and XML that is refused."""

import itertools
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from reader_outcome import check, outcome
from render_nccl_xml import Leaf, Spec, render

from hpc_train.cluster.readers.node import nccl_xml
from hpc_train.cluster.readers.xml_elements import MAX_DEPTH
from hpc_train.cluster.spec import Cluster
from hpc_train.errors import UserError

CPUS = ((0, "00000000,0000ffff"), (1, "0000ffff,00000000"))
MASKS = {None: None, "00000000,0000ffff": "0-15", "0000ffff,00000000": "32-47", "1,80000001": "0,31-32", "000": None}


def kinds(cluster: Cluster) -> dict[tuple[str, str], str]:
    return {(link.a, link.b): link.kind for link in cluster.links}


def pcie(a: Leaf, b: Leaf, spec: Spec) -> str:
    """Closeness by the definition: bridges between the two, then the processor."""
    if a.cpu != b.cpu:
        same = spec.cpus[a.cpu][0] is not None and spec.cpus[a.cpu][0] == spec.cpus[b.cpu][0]
        return "NODE" if same else "SYS"
    if not a.path or not b.path or a.path[0] != b.path[0]:
        return "NODE"
    return "PIX" if a.path == b.path else "PXB"


@st.composite
def specs(draw: st.DrawFn) -> Spec:
    cpus = draw(
        st.lists(st.tuples(st.sampled_from([0, 1, None]), st.sampled_from(list(MASKS))), min_size=1, max_size=3)
    )
    paths = st.lists(st.integers(0, 2), max_size=3).map(tuple)
    leaf = st.builds(Leaf, st.sampled_from(["gpu", "net"]), paths, st.integers(0, len(cpus) - 1))
    found = draw(st.lists(leaf, max_size=9))
    leaves = tuple(
        replace(it, device=f"mlx5_{at}", mbit_s=draw(st.sampled_from([100_000, 400_000])))
        for at, it in enumerate(found)
    )
    count = len([it for it in leaves if it.kind == "gpu"])
    links: dict[tuple[int, int | str], int] = {}
    if draw(st.booleans()):
        links = {(gpu, "switch"): draw(st.sampled_from([18, 17, 0])) for gpu in range(count)}
    else:
        for a, b in itertools.combinations(range(count), 2):
            links[a, b] = links[b, a] = draw(st.integers(0, 2))
    return Spec(tuple(cpus), leaves, {key: it for key, it in links.items() if it})


def nvlink(spec: Spec, a: int, b: int) -> int:
    direct = spec.nvlinks.get((a, b), 0)
    return direct or min(spec.nvlinks.get((a, "switch"), 0), spec.nvlinks.get((b, "switch"), 0))


@settings(max_examples=200)
@given(specs(), st.booleans())
def test_what_is_rendered_is_read_back(spec: Spec, vendor: bool) -> None:
    text = render(spec, vendor)
    assert nccl_xml.matches_nccl_xml(text)
    read = nccl_xml.read_nccl_xml(text, "topo.xml")
    node = read.nodes[0]
    assert sorted(it.pci or "" for it in node.gpus) == sorted(spec.address(it) for it in spec.of("gpu"))
    by_address = {it.pci: it for it in (*node.gpus, *node.nics)}
    for leaf in spec.leaves:
        device = by_address[spec.address(leaf)]
        numa, mask = spec.cpus[leaf.cpu]
        assert device.numa == numa
        if leaf.kind == "gpu":
            number = spec.of("gpu").index(leaf)
            listed = sum(it for (gpu, _), it in spec.nvlinks.items() if gpu == number)
            assert (device.cpus, device.nvlinks) == (MASKS[mask], None if vendor else listed)
        else:
            assert (device.device, device.gbit_s) == ((None, None) if vendor else (leaf.device, leaf.mbit_s / 1000))
    found = kinds(read)
    ids = {leaf: by_address[spec.address(leaf)].id for leaf in spec.leaves}
    for a, b in itertools.combinations(spec.leaves, 2):
        count = 0
        if a.kind == b.kind == "gpu" and not vendor:
            count = nvlink(spec, spec.of("gpu").index(a), spec.of("gpu").index(b))
        told = found.get((ids[a], ids[b])) or found.get((ids[b], ids[a]))
        assert told == (f"NV{count}" if count else pcie(a, b, spec))


def test_a_gpu_that_lost_its_nvlinks_shows() -> None:
    """The rest of the node is silent about it: NCCL falls back without an error."""
    leaves = tuple(Leaf("gpu", (at,)) for at in range(4))
    spec = Spec(CPUS[:1], leaves, {(gpu, "switch"): 18 for gpu in (0, 2, 3)})
    read = nccl_xml.read_nccl_xml(render(spec), "topo.xml")
    assert [it.nvlinks for it in read.nodes[0].gpus] == [18, 0, 18, 18]
    assert kinds(read)["GPU0", "GPU2"] == "NV18"
    assert kinds(read)["GPU0", "GPU1"] == "NODE"


def test_xgmi_of_both_rccl_forms() -> None:
    leaves = (Leaf("gpu", (0, 0)), Leaf("gpu", (0, 1)), Leaf("gpu", (1,)))
    spec = Spec(CPUS[:1], leaves, {(0, 1): 1, (1, 0): 1}, version=2, link="xgmi")
    read = nccl_xml.read_nccl_xml(render(spec), "topo.xml")
    assert kinds(read) == {("GPU0", "GPU1"): "XGMI", ("GPU0", "GPU2"): "NODE", ("GPU1", "GPU2"): "NODE"}
    xgmi = '<xgmi maxcount="8"><link target="{1}" count="4"/></xgmi>'
    gpu = f'<pci busid="0000:0{{0}}:00.0"><gpu dev="{{0}}">{xgmi}</gpu></pci>'
    text = '<system version="2"><cpu numaid="0">' + gpu.format(1, 2) + gpu.format(2, 1) + "</cpu></system>"
    read = nccl_xml.read_nccl_xml(text, "topo.xml")
    assert kinds(read) == {("GPU1", "GPU2"): "XGMI"}
    assert [it.nvlinks for it in read.nodes[0].gpus] == [4, 4]


def test_partitions_of_one_gpu_share_its_place() -> None:
    text = (
        '<system version="1"><cpu numaid="0" affinity="f"><pci busid="0000:01:00.0"><gpu dev="0" mlopart="0"/>'
        '<gpu dev="1" mlopart="1"/></pci></cpu></system>'
    )
    read = nccl_xml.read_nccl_xml(text, "topo.xml")
    assert [(it.id, it.pci, it.cpus) for it in read.nodes[0].gpus] == [
        ("GPU0", "0000:01:00.0", "0-3"),
        ("GPU1", "0000:01:00.0", "0-3"),
    ]
    assert kinds(read) == {("GPU0", "GPU1"): "PIX"}


def test_root_buses_ports_and_nics_without_pci() -> None:
    port = '<net name="mlx5_0" dev="{0}" speed="100000" port="{0}"/>'
    both = f'<pci busid="0000:00:02.0" class="0x0200"><nic>{port.format(1)}{port.format(2)}</nic></pci>'
    text = (
        '\n<?xml version="1.0"?><system version="1"><cpu numaid="-1"><pci busid="00000000:00:01.0"><gpu dev="3"/></pci>'
        + both
        + '<nic><net name="eth0" speed="10000"/></nic></cpu></system>'
    )
    read = nccl_xml.read_nccl_xml(text.lstrip("\n"), "topo.xml")
    node = read.nodes[0]
    assert [(it.id, it.pci, it.numa) for it in node.gpus] == [("GPU3", "0000:00:01.0", None)]
    assert [(it.id, it.device, it.gbit_s, it.pci) for it in node.nics] == [
        ("NIC0", "eth0", 10.0, None),
        ("NIC1", "mlx5_0", 200.0, "0000:00:02.0"),
    ]
    assert kinds(read) == {("GPU3", "NIC1"): "PHB"}


def test_several_hosts_of_one_nvlink_domain() -> None:
    tray = '<cpu host_hash="0x{0}" numaid="0"><pci busid="0008:01:00.0"><gpu dev="0" rank="{0}"/></pci></cpu>'
    read = nccl_xml.read_nccl_xml('<system version="1">' + tray.format(1) + tray.format(2) + "</system>", "topo.xml")
    assert [(it.name, [gpu.id for gpu in it.gpus]) for it in read.nodes] == [("0x1", ["GPU0"]), ("0x2", ["GPU0"])]


AT_1 = '<pci busid="0:1:0.0"><gpu/></pci>'
BOMB = '<!DOCTYPE system [<!ENTITY a "ha"><!ENTITY b "&a;&a;">]>\n<system version="1">&b;</system>'
REFUSED = {
    BOMB: r"topo.txt:1: a document type is refused",
    '<!DOCTYPE system SYSTEM "file:///etc/passwd">\n<system/>': "a document type is refused",
    '<system version="1">\n <cpu numaid="0">\n': r"topo.txt:3: XML: no element found",
    '<system version="7"/>': r"topo.txt:1: <system version='7'>",
    "<system>" + '<pci busid="0000:00:00.0">' * (MAX_DEPTH + 1): "elements, or 64 in one another",
    '<system version="1">\n<cpu numaid="x"/></system>': r"topo.txt:2: numaid='x'",
    '<system version="1"><cpu affinity="ffq"/></system>': "affinity='ffq'",
    '<system version="1"><cpu>\n<pci class="0x0302"/></cpu></system>': r"topo.txt:2: busid='' of <pci>",
    '<system><cpu><pci busid="0:1:0.0"><gpu><nvlink target="?" count="1"/></gpu></pci></cpu></system>': r"target='\?'",
    '<pci busid="0:1:0.0"><gpu><nvlink target="0:2:0.0" count="-1"/></gpu></pci>': "count='-1'",
    f'<cpu>{AT_1}<pci busid="0:2:0.0">{AT_1}</pci></cpu>': "second GPU",
}


@pytest.mark.parametrize("text", list(REFUSED))
def test_other_xml_is_refused_in_one_line(text: str) -> None:
    assert nccl_xml.matches_nccl_xml(text)
    result = outcome(nccl_xml.read_nccl_xml, text)
    assert check(result) is None
    with pytest.raises(UserError, match=REFUSED[text]):
        nccl_xml.read_nccl_xml(text, "topo.txt")


@settings(max_examples=200)
@given(specs(), st.data())
def test_mutated_files_are_refused_or_consistent(spec: Spec, data: st.DataObject) -> None:
    text = render(spec)
    at = data.draw(st.integers(0, len(text)))
    if data.draw(st.booleans()):
        assert check(outcome(nccl_xml.read_nccl_xml, text[:at])) is None or text[at:].strip() == ""
        return
    text = text[:at] + data.draw(st.text(max_size=3)) + text[at + data.draw(st.integers(0, 3)) :]
    nccl_xml.matches_nccl_xml(text)
    check(outcome(nccl_xml.read_nccl_xml, text))


@settings(max_examples=150)
@given(st.text() | st.text(alphabet="<>/system cpu=\"01'!-&;"))
def test_any_text_is_refused_in_one_line(text: str) -> None:
    nccl_xml.matches_nccl_xml(text)
    check(outcome(nccl_xml.read_nccl_xml, text))
    check(outcome(nccl_xml.read_nccl_xml, f"<system>{text}</system>"))
