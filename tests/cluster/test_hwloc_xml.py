"""hwloc's XML of both versions: closeness of devices, xGMI hops, this machine's own, and files that are refused."""

import itertools
import shutil
import subprocess

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from reader_outcome import NAME, check, outcome
from render_hwloc import Device, Spec, render

from hpc_train.cluster.readers.formats import read_topology_text
from hpc_train.cluster.readers.node.hwloc_xml import matches_hwloc_xml, read_hwloc_xml
from hpc_train.errors import UserError

DEVICES = st.builds(
    Device, st.sampled_from(["gpu", "nic"]), st.integers(0, 1), st.integers(0, 1), st.sampled_from([None, 0, 1])
)


@st.composite
def specs(draw: st.DrawFn) -> Spec:
    devices = draw(st.lists(DEVICES, min_size=1, max_size=9, unique=True))
    ordered = sorted(devices, key=lambda device: (device.package, device.bridge))
    return Spec(2, tuple(ordered), draw(st.sampled_from([1, 2])), draw(st.booleans()))


def closeness(a: Device, b: Device, spec: Spec) -> str:
    if spec.xgmi and a.kind == b.kind == "gpu":
        return "XGMI"
    if a.package != b.package:
        return "SYS"
    if a.bridge != b.bridge:
        return "NODE"
    return "PIX" if a.switch == b.switch is not None else "PHB"


@given(specs())
@settings(max_examples=100)
def test_devices_are_as_close_as_the_tree_says(spec: Spec) -> None:
    cluster = check(outcome(read_hwloc_xml, render(spec)))
    assert cluster is not None
    (node,) = cluster.nodes
    assert node.name == "node7"
    gpus = [device for device in spec.devices if device.kind == "gpu"]
    nics = [device for device in spec.devices if device.kind == "nic"]
    assert [gpu.pci for gpu in node.gpus] == [spec.address(gpu) for gpu in gpus]
    assert [gpu.numa for gpu in node.gpus] == [gpu.package for gpu in gpus]
    assert [gpu.cpus for gpu in node.gpus] == [f"{gpu.package},64-67" for gpu in gpus]
    assert [nic.device for nic in node.nics] == [f"mlx5_{spec.devices.index(nic)}" for nic in nics]
    assert {nic.guid for nic in node.nics} <= {"0002c903000027af"}
    ids = {gpu: f"GPU{n}" for n, gpu in enumerate(gpus)} | {nic: f"NIC{n}" for n, nic in enumerate(nics)}
    expected = {(ids[a], ids[b]): closeness(a, b, spec) for a, b in itertools.combinations([*gpus, *nics], 2)}
    assert {(link.a, link.b): link.kind for link in cluster.links} == expected


ONE = render(Spec(1, (Device("gpu", 0, 0, None), Device("nic", 0, 0, 0))))
REFUSED = {
    "<topology><object/></topology>": "0 machines",
    '<topology version="3.0"/>': "expected hwloc's <topology>, 1 or 2",
    '<topology><object type="Machine" cpuset="0x3"/></topology>': "no PCI device",
    '<!DOCTYPE topology [<!ENTITY a "ha">]>\n<topology/>': "document type is refused",
    ONE[: len(ONE) // 2]: "XML",
    ONE.replace("0302 [10de:2330]", "display"): "pci_type='display",
    ONE.replace('pci_busid="0000:10:00.0"', 'pci_busid="nowhere"'): "pci_busid='nowhere'",
    ONE.replace("0000:11:00.0", "0000:10:00.0"): "a second device at 0000:10:00.0",
    ONE.replace('nodeset="0x00000001"', 'nodeset="all"'): "nodeset='all'",
}


@pytest.mark.parametrize("text", list(REFUSED))
def test_other_files_are_refused_in_one_line(text: str) -> None:
    assert matches_hwloc_xml(text)
    assert check(outcome(read_hwloc_xml, text)) is None
    with pytest.raises(UserError, match=REFUSED[text].replace("[", r"\[")):
        read_hwloc_xml(text, NAME)


@given(specs(), st.data())
@settings(max_examples=100)
def test_changed_files_are_refused_or_consistent(spec: Spec, data: st.DataObject) -> None:
    text = render(spec)
    at = data.draw(st.integers(0, len(text)))
    check(
        outcome(read_hwloc_xml, text[:at] + data.draw(st.text(max_size=3)) + text[at + data.draw(st.integers(0, 3)) :])
    )


def test_displays_of_management_controllers_are_no_gpus() -> None:
    cluster = read_hwloc_xml(ONE.replace("0302 [10de:2330]", "0300 [1a03:2000]"), NAME)
    assert cluster.nodes[0].gpus == ()


def test_nvlinks_that_are_bandwidths_are_said_not_to_be_read() -> None:
    text = ONE.replace("</topology>", '<distances2 name="NVLinkBandwidth" type="OSDev"/></topology>')
    assert "nvidia-smi topo -m" in read_topology_text(text, NAME).notes[0]


def test_this_machine_as_hwloc_itself_writes_it() -> None:
    tool = shutil.which("lstopo-no-graphics")
    assert tool is not None, "apt-get install hwloc-nox"
    text = subprocess.run([tool, "--of", "xml"], capture_output=True, text=True, check=True, timeout=60).stdout
    result = outcome(read_topology_text, text)
    check(result)
    assert not isinstance(result, str) or "no PCI device" in result
