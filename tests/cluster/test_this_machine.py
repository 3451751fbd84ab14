"""This machine by sysfs and NVML: of trees of machines that are not here, and of the one that is."""

from __future__ import annotations

import os
import socket
from pathlib import Path

import pynvml
import pytest
from fake_nvml import FakeGpu, FakeNvml
from fake_sysfs import GPUS, FakeMachine, dgx

from hpc_train.cluster.hostlist import natural_key
from hpc_train.cluster.local_gpus import load_nvml, read_nvml_gpus
from hpc_train.cluster.local_nics import read_local_nics
from hpc_train.cluster.spec import Cluster, Nic
from hpc_train.cluster.sysfs import read_numa_nodes
from hpc_train.cluster.this_machine import describe_this_node

UUID = bytes(range(16))


def kinds(cluster: Cluster) -> dict[tuple[str, str], str]:
    return {(it.a, it.b): it.kind for it in cluster.links}


def nics(root: Path) -> list[Nic]:
    return [it.nic for it in read_local_nics(root)]


def test_dgx(tmp_path: Path) -> None:
    dgx(tmp_path)
    nvml = FakeNvml([FakeGpu(f"0000:{bus}:00.0", links=["switch"] * 18) for bus in GPUS])
    cluster = describe_this_node(tmp_path, nvml)
    (node,) = cluster.nodes
    assert (cluster.kind, node.name) == ("machine", "dgx01")
    assert [it.id for it in node.gpus] == [f"GPU{n}" for n in range(8)]
    assert [it.pci for it in node.gpus] == [f"0000:{bus}:00.0" for bus in GPUS]
    assert [it.numa for it in node.gpus] == [0, 0, 0, 0, 1, 1, 1, 1]
    assert {it.cpus for it in node.gpus[:4]} == {"0-55,112-167"}
    assert {it.cpus for it in node.gpus[4:]} == {"56-111,168-223"}
    assert {(it.nvlinks, it.clique, it.name) for it in node.gpus} == {(18, None, "NVIDIA H100 80GB HBM3")}
    assert [it.device for it in node.nics] == [*(f"mlx5_{n}" for n in range(10)), "eno1"]
    assert [it.gbit_s for it in node.nics] == [400.0] * 8 + [200.0, None, 10.0]
    assert [it.active for it in node.nics] == [True] * 9 + [False, True]
    assert [it.layer for it in node.nics] == ["infiniband"] * 8 + ["ethernet"] * 3
    assert node.nics[3].guid == "0002c90300000003"
    assert node.nics[3].pci == "0000:33:00.0"
    assert [it.numa for it in node.nics] == [0] * 4 + [1] * 6 + [0]
    assert nvml.open == 0


def test_links_of_dgx(tmp_path: Path) -> None:
    dgx(tmp_path)
    links = kinds(
        describe_this_node(tmp_path, FakeNvml([FakeGpu(f"0000:{b}:00.0", links=["switch"] * 18) for b in GPUS]))
    )
    assert len(links) == 19 * 18 // 2
    for a in range(8):
        assert links[f"GPU{a}", f"NIC{a}"] == "PIX"
        for b in range(8):
            if a < b:
                assert links[f"GPU{a}", f"GPU{b}"] == "NV18"
            if a != b:
                assert links[f"GPU{a}", f"NIC{b}"] == ("NODE" if a // 4 == b // 4 else "SYS")
    assert links["NIC8", "NIC9"] == "PIX"
    assert links["GPU0", "NIC8"] == "SYS"


def test_bonds_and_virtual_devices_are_not_nics(tmp_path: Path) -> None:
    dgx(tmp_path)
    assert not {"lo", "bond0", "docker0"} & {it.device for it in nics(tmp_path)}


def test_four_gpus_with_cables_between_them(tmp_path: Path) -> None:
    """Pairs of 4 NVLinks, one link of GPU 3 down; two NICs behind the host bridges of two of four NUMA nodes."""
    machine = FakeMachine(tmp_path)
    machine.numa({n: f"{16 * n}-{16 * n + 15}" for n in range(4)})
    pci = [f"0000:{bus}:00.0" for bus in ("03", "41", "82", "c1")]
    for n, it in enumerate(pci):
        machine.pci(f"0000:{it[5]}0/0000:{it[5]}0:03.1/{it}", 3 - n)
    for n, bus in enumerate("04"):
        machine.rdma(f"hsn_mlx{n}", f"0000:{bus}0/0000:{bus}0:01.1/0000:{bus}9:00.0", 3 - n)
    ends = {n: [far for m, far in enumerate(pci) if m != n for _ in range(4)] for n in range(4)}
    gpus = [
        FakeGpu(it, links=[*ends[n][: -1 if n == 3 else None], *([None] if n == 3 else [])]) for n, it in enumerate(pci)
    ]
    cluster = describe_this_node(tmp_path, FakeNvml(gpus))
    links = kinds(cluster)
    assert [it.nvlinks for it in cluster.nodes[0].gpus] == [12, 12, 12, 11]
    assert [it.numa for it in cluster.nodes[0].gpus] == [3, 2, 1, 0]
    assert links["GPU0", "GPU1"] == "NV4"
    assert links["GPU0", "NIC0"] == "PHB"
    assert links["GPU0", "NIC1"] == "SYS"
    assert links["GPU1", "NIC1"] == "PHB"


def test_virtual_machine(tmp_path: Path) -> None:
    """Firmware says no NUMA node, the bus is flat, the interface is virtio's, and its speed is not known."""
    machine = FakeMachine(tmp_path)
    machine.numa({0: "0-15"})
    machine.pci("0000:00/0000:00:06.0")
    machine.interface("eth0", "0000:00/0000:00:03.0", speed="-1", below="virtio2")
    machine.rdma("mlx5_0", "0001:00/0001:00:00.0", guid="0000:0000:0000:0000")
    cluster = describe_this_node(tmp_path, FakeNvml([FakeGpu("0000:00:06.0", name=b"Tesla V100")]))
    (node,) = cluster.nodes
    assert node.name == "localhost"
    assert (node.gpus[0].numa, node.gpus[0].cpus, node.gpus[0].nvlinks, node.gpus[0].name) == (
        None,
        None,
        None,
        "Tesla V100",
    )
    assert [(it.device, it.numa, it.guid, it.gbit_s) for it in node.nics] == [
        ("mlx5_0", None, None, 400.0),
        ("eth0", None, None, None),
    ]
    assert node.nics[1].pci == "0000:00:03.0"
    assert kinds(cluster) == {("GPU0", "NIC0"): "NODE", ("GPU0", "NIC1"): "PHB", ("NIC0", "NIC1"): "NODE"}


def test_tray_of_a_rack_wide_domain(tmp_path: Path) -> None:
    """GB200-like: every GPU in a PCI domain of its own, one clique over the rack."""
    machine = FakeMachine(tmp_path)
    machine.numa({0: "0-71", 1: "72-143", 2: "", 10: ""})
    gpus = []
    for n, domain in enumerate(("0008", "0009", "0018", "0019")):
        machine.pci(f"{domain}:00/{domain}:00:00.0/{domain}:01:00.0", n // 2)
        gpus.append(FakeGpu(f"{domain}:01:00.0", links=["switch"] * 18, fabric=(UUID, 32766, 3, 0)))
    cluster = describe_this_node(tmp_path, FakeNvml(gpus))
    assert {it.clique for it in cluster.nodes[0].gpus} == {"00010203-0405-0607-0809-0a0b0c0d0e0f.32766"}
    assert [it.cpus for it in cluster.nodes[0].gpus] == ["0-71", "0-71", "72-143", "72-143"]
    assert set(kinds(cluster).values()) == {"NV18"}
    assert [it.cpus for it in read_numa_nodes(tmp_path)] == ["0-71", "72-143", "", ""]


@pytest.mark.parametrize(
    "fabric", [None, (UUID, 1, 2, 0), (UUID, 1, 0, 0), (bytes(16), 0, 3, 0), (UUID, 1, 3, pynvml.NVML_ERROR_UNKNOWN)]
)
def test_no_domain_before_the_fabric_manager_has_finished(
    fabric: tuple[bytes, int, int, int] | None, tmp_path: Path
) -> None:
    assert read_nvml_gpus(FakeNvml([FakeGpu("0000:01:00.0", fabric=fabric)]))[0].clique is None


def test_a_lost_gpu_is_named_and_the_others_are_there() -> None:
    nvml = FakeNvml([FakeGpu("0000:01:00.0"), FakeGpu("0000:02:00.0", lost=True), FakeGpu("0000:03:00.0")])
    with pytest.warns(UserWarning, match="GPU 1 does not answer"):
        found = read_nvml_gpus(nvml)
    assert [(it.index, it.pci) for it in found] == [(0, "0000:01:00.0"), (2, "0000:03:00.0")]
    assert nvml.open == 0


def test_a_driver_of_another_version_is_said() -> None:
    with pytest.warns(UserWarning, match="mismatch"):
        assert read_nvml_gpus(FakeNvml(init_error=pynvml.NVML_ERROR_LIB_RM_VERSION_MISMATCH)) == ()


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("error", [pynvml.NVML_ERROR_LIBRARY_NOT_FOUND, pynvml.NVML_ERROR_DRIVER_NOT_LOADED])
def test_no_driver_is_no_gpus(error: int) -> None:
    assert read_nvml_gpus(FakeNvml(init_error=error)) == ()
    assert read_nvml_gpus(None) == ()


def test_an_older_library_without_newer_functions() -> None:
    class Older(FakeNvml):
        nvmlDeviceGetGpuFabricInfoV = property()  # type: ignore[assignment]
        nvmlDeviceGetNvLinkRemoteDeviceType = property()  # type: ignore[assignment]

    gpus = read_nvml_gpus(Older([FakeGpu("0000:01:00.0", links=["0000:02:00.0"] * 2, fabric=(UUID, 1, 3, 0))]))
    assert [(it.nvlinks, it.ends, it.clique) for it in gpus] == [(2, {"0000:02:00.0": 2}, None)]


def test_every_function_that_is_faked_is_one_of_the_library() -> None:
    assert load_nvml() is pynvml
    names = [it for it in vars(FakeNvml) if it.startswith(("nvml", "NVML", "c_nvml"))]
    assert len(names) > 10
    assert all(hasattr(pynvml, it) for it in names)


def test_slingshot(tmp_path: Path) -> None:
    machine = FakeMachine(tmp_path)
    for n in range(2):
        path = f"0000:{n}0/0000:{n}0:01.0/0000:{n}1:00.0"
        machine.cxi(f"cxi{n}", path, n)
        machine.interface(f"hsn{n}", path, n, "200000")
    machine.cxi("cxi2", "0000:20/0000:20:01.0/0000:21:00.0", 1)
    assert [(it.id, it.device, it.layer, it.gbit_s, it.numa) for it in nics(tmp_path)] == [
        ("NIC0", "hsn0", "slingshot", 200.0, 0),
        ("NIC1", "hsn1", "slingshot", 200.0, 1),
        ("NIC2", "cxi2", "slingshot", None, 1),
    ]


def test_efa_roce_and_two_ports(tmp_path: Path) -> None:
    machine = FakeMachine(tmp_path)
    up, down = ("4: ACTIVE", "100 Gb/sec (4X EDR)", "Ethernet"), ("1: DOWN", "40 Gb/sec (4X QDR)", "InfiniBand")
    efa = (("4: ACTIVE", "100 Gb/sec (4X EDR)", "Unspecified"),)
    machine.rdma("rdmap16s27", "0000:10/0000:10:1b.0", 0, efa, driver="efa")
    machine.rdma("mlx5_0", "0000:20/0000:20:01.0", 0, (down, up, up))
    machine.interface("ens1np0", "0000:20/0000:20:01.0", 0)
    assert [(it.device, it.layer, it.gbit_s, it.active) for it in nics(tmp_path)] == [
        ("mlx5_0", "ethernet", 200.0, True),
        ("rdmap16s27", "efa", 100.0, True),
    ]


def test_virtual_functions_usb_wireless_and_soft_devices_are_left_out(tmp_path: Path) -> None:
    machine = FakeMachine(tmp_path)
    physical = machine.rdma("mlx5_0", "0000:10/0000:10:01.0/0000:11:00.0")
    virtual = machine.rdma("mlx5_1", "0000:10/0000:10:01.0/0000:11:00.1")
    machine.link(str((virtual / "physfn").relative_to(tmp_path)), physical)
    machine.interface("usb0", "0000:00/0000:00:14.0", below="usb1/1-1/1-1:1.0")
    wireless = machine.interface("wlp1", "0000:00/0000:00:15.0") / "net/wlp1/wireless"
    wireless.mkdir()
    soft = tmp_path / "sys/devices/virtual/infiniband/rxe0"
    machine.file("sys/devices/virtual/infiniband/rxe0/node_guid", "0202:0202:0202:0202")
    machine.link("sys/class/infiniband/rxe0", soft)
    machine.interface("eno1", "0000:00/0000:00:16.0", state="down")
    machine.interface("eno2", "0000:00/0000:00:16.0", state="unknown")
    assert [(it.device, it.active) for it in nics(tmp_path)] == [("mlx5_0", True), ("eno1", False), ("eno2", None)]


def test_amd_gpus(tmp_path: Path) -> None:
    """Two processors, four GPUs, of which two and two are cabled."""
    machine = FakeMachine(tmp_path)
    machine.numa({0: "0-63", 1: "64-127"})
    for n in range(2):
        machine.kfd(n, 0, {}, simd=0)
    for n, peer in ((2, 3), (3, 2), (4, 5), (5, 4)):
        bus = 0x10 * n + 1
        machine.pci(f"0000:{n}0/0000:{n}0:01.0/0000:{bus:02x}:00.0", n // 4)
        machine.kfd(n, bus << 8, {n // 4: 2, peer: 11, 1: 11})
    cluster = describe_this_node(tmp_path)
    (node,) = cluster.nodes
    assert [(it.id, it.pci, it.numa, it.nvlinks, it.name) for it in node.gpus] == [
        (f"GPU{n - 2}", f"0000:{n}1:00.0", n // 4, 1, "gfx942") for n in range(2, 6)
    ]
    links = kinds(cluster)
    assert {pair for pair, kind in links.items() if kind == "XGMI"} == {("GPU0", "GPU1"), ("GPU2", "GPU3")}
    assert links["GPU0", "GPU2"] == "SYS"


def test_an_empty_tree(tmp_path: Path) -> None:
    (node,) = describe_this_node(tmp_path).nodes
    assert (node.name, node.gpus, node.nics) == ("localhost", (), ())
    assert read_numa_nodes(tmp_path) == ()


def test_files_that_hold_nonsense(tmp_path: Path) -> None:
    machine = dgx(tmp_path)
    for file in sorted(tmp_path.glob("sys/devices/**/*")):
        if file.is_file():
            file.write_bytes(b"\xff\x00 nonsense 99999999999999999999999\n")
    machine.link("sys/class/net/loop", tmp_path / "sys/class/net/loop")
    cluster = describe_this_node(tmp_path, FakeNvml([FakeGpu("0000:1b:00.0")]))
    assert {it.gbit_s for it in cluster.nodes[0].nics} == {None}
    assert {it.numa for it in cluster.nodes[0].nics} == {None}


def test_this_machine_itself() -> None:
    cluster = describe_this_node()
    (node,) = cluster.nodes
    assert node.name == socket.gethostname()
    here = read_numa_nodes()
    assert here
    assert sum((it.memory or 0) for it in here) > 0
    interfaces = {it.name for it in Path("/sys/class/net").iterdir()}
    rdma = Path("/sys/class/infiniband")
    devices = interfaces | ({it.name for it in rdma.iterdir()} if rdma.exists() else set())
    assert {it.device for it in node.nics} <= devices
    assert "lo" not in {it.device for it in node.nics}
    assert len({it.id for it in (*node.gpus, *node.nics)}) == len(node.gpus) + len(node.nics)


def test_a_process_that_may_use_one_processor_sees_the_same_machine() -> None:
    allowed = os.sched_getaffinity(0)
    whole = describe_this_node()
    try:
        os.sched_setaffinity(0, {min(allowed)})
        assert describe_this_node() == whole
    finally:
        os.sched_setaffinity(0, allowed)


def test_natural_order() -> None:
    names = ["mlx5_10", "mlx5_9", "mlx4_0", "eth0", "10", "9", "a", ""]
    assert sorted(names, key=natural_key) == ["", "a", "eth0", "mlx4_0", "mlx5_9", "mlx5_10", "9", "10"]
