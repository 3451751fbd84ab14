"""One NIC a rank for UCX and libfabric: which variables, on which fabrics, and where none is set."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path

from hpc_train.cluster.local_nics import NicPort, read_local_nics, read_nic_ports
from hpc_train.cluster.spec import Nic
from hpc_train.cluster.sysfs import NumaNode
from hpc_train.cluster.this_machine import describe_this_node
from hpc_train.placement.node.nic_variables import choose_rank_nic_settings, name_nics, pick_nic_of_processors
from hpc_train.runtime.binding import NodeSurvey, survey_node

sys.path.insert(0, str(Path(__file__).parents[1] / "cluster"))

from fake_nvml import FakeGpu, FakeNvml
from fake_sysfs import GPUS, FakeMachine, dgx

HERE = "fe80000000000000"


def infiniband(*devices: str) -> tuple[list[Nic], dict[str, NicPort]]:
    nics = [Nic(f"NIC{n}", device, n % 2, layer="infiniband") for n, device in enumerate(devices)]
    return nics, {nic.id: NicPort(1, HERE) for nic in nics}


def of_layer(layer: str, *devices: str) -> list[Nic]:
    return [Nic(f"NIC{n}", device, layer=layer) for n, device in enumerate(devices)]


def survey(root: Path) -> NodeSurvey:
    nvml = FakeNvml([FakeGpu(f"0000:{bus}:00.0", links=["switch"] * 18) for bus in GPUS])
    return survey_node(lambda: describe_this_node(root, nvml), lambda nics: read_nic_ports(nics, root))


def test_each_gpu_of_a_dgx_has_the_adapter_of_its_own_switch(tmp_path: Path) -> None:
    dgx(tmp_path)
    found = survey(tmp_path)
    assert found.nics == [f"mlx5_{n}" for n in range(8)]
    assert [found.nic_variables[found.nic_of[f"0000:{bus}:00.0"]] for bus in GPUS] == [
        {"UCX_NET_DEVICES": f"mlx5_{n}:1", "FI_VERBS_DEVICE_NAME": f"mlx5_{n}"} for n in range(8)
    ]


def test_the_port_that_is_up_and_its_subnet_are_read(tmp_path: Path) -> None:
    machine = FakeMachine(tmp_path)
    down, up = ("1: DOWN", "10 Gb/sec", "InfiniBand"), ("4: ACTIVE", "400 Gb/sec", "InfiniBand")
    machine.rdma("mlx5_0", "0000:00/0000:01:00.0", ports=(down, up), subnet="fec0:0000:0000:0a01")
    machine.rdma("mlx5_1", "0000:00/0000:02:00.0", ports=(down,))
    machine.interface("eth0", "0000:00/0000:03:00.0")
    nics = [local.nic for local in read_local_nics(tmp_path)]
    assert read_nic_ports(nics, tmp_path) == {"NIC0": NicPort(2, "fec0000000000a01"), "NIC1": NicPort()}


def test_slingshot_is_named_by_its_device_and_not_by_its_interface(tmp_path: Path) -> None:
    machine = FakeMachine(tmp_path)
    for number, (interface, device) in enumerate((("hsn0", "cxi1"), ("hsn1", "cxi0"))):
        path = f"0000:00/0000:0{number + 1}:00.0"
        machine.interface(interface, path)
        machine.cxi(device, path)
    nics = [local.nic for local in read_local_nics(tmp_path)]
    assert name_nics(nics, read_nic_ports(nics, tmp_path)) == {
        "hsn0": {"FI_CXI_DEVICE_NAME": "cxi1"},
        "hsn1": {"FI_CXI_DEVICE_NAME": "cxi0"},
    }


def test_omni_path_by_unit_and_efa_by_device() -> None:
    nics, ports = infiniband("hfi1_0", "hfi1_1")
    assert name_nics(nics, ports) == {"hfi1_0": {"FI_OPX_HFI_SELECT": "0"}, "hfi1_1": {"FI_OPX_HFI_SELECT": "1"}}
    efa = of_layer("efa", "rdmap16s27", "rdmap32s27")
    assert name_nics(efa, {nic.id: NicPort(1, HERE) for nic in efa}) == {
        nic.device: {"FI_EFA_IFACE": nic.device} for nic in efa
    }


def test_a_name_that_begins_a_longer_one_is_not_given_to_libfabric() -> None:
    found = name_nics(*infiniband("mlx5_1", "mlx5_10"))
    assert found["mlx5_1"] == {"UCX_NET_DEVICES": "mlx5_1:1"}
    assert found["mlx5_10"] == {"UCX_NET_DEVICES": "mlx5_10:1", "FI_VERBS_DEVICE_NAME": "mlx5_10"}


def test_ranks_that_could_not_reach_each_other_get_nothing() -> None:
    nics, ports = infiniband("mlx5_0", "mlx5_1")
    assert name_nics(nics, ports)
    assert name_nics(nics, {**ports, "NIC1": NicPort(1, "fec0000000000001")}) == {}  # another plane
    assert name_nics(nics, {**ports, "NIC1": NicPort(1, None)}) == {}  # who knows
    assert name_nics([nics[0], replace(nics[1], layer="ethernet")], ports) == {}
    roce = of_layer("ethernet", "mlx5_0", "mlx5_1")
    assert name_nics(roce, {nic.id: NicPort(1, HERE) for nic in roce}) == {}
    assert name_nics([], {}) == {}
    assert name_nics(of_layer("ethernet", "eth0", "eth1"), {}) == {}


def test_nccls_plugin_for_libfabric_keeps_all_nics() -> None:
    variables = {"UCX_NET_DEVICES": "mlx5_0:1", "FI_VERBS_DEVICE_NAME": "mlx5_0"}
    with_nccl = choose_rank_nic_settings(variables, "this rank's GPU", with_nccl=True)
    assert [str(setting) for setting in with_nccl] == ["UCX_NET_DEVICES=mlx5_0:1 (the NIC nearest to this rank's GPU)"]
    assert len(choose_rank_nic_settings(variables, "its processors", with_nccl=False)) == 2


def test_a_rank_without_gpu_takes_a_nic_of_its_numa_node() -> None:
    nics, _ = infiniband("mlx5_0", "mlx5_1", "mlx5_2", "mlx5_3")
    numa = (NumaNode(0, "0-3", None), NumaNode(1, "4-7", None), NumaNode(2, "", 1 << 30), NumaNode(3, "8-9", None))
    taken = [pick_nic_of_processors(nics, frozenset({5}), numa, local) for local in range(3)]
    assert [nic.device if nic else None for nic in taken] == ["mlx5_1", "mlx5_3", "mlx5_1"]
    assert pick_nic_of_processors(nics, frozenset({3, 4}), numa, 0) is None  # of two NUMA nodes
    assert pick_nic_of_processors(nics, frozenset({8}), numa, 0) is None  # no NIC there
    assert pick_nic_of_processors([], frozenset({1}), numa, 0) is None
