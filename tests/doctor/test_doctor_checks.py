"""What doctor says of one machine: every check with what is good and what is bad."""

from __future__ import annotations

import resource
import sys
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from hpc_train.cluster.filesystems import Mount
from hpc_train.cluster.spec import Gpu, Nic
from hpc_train.doctor import machine, software
from hpc_train.doctor.findings import (
    Finding,
    Status,
    choose_exit_code,
    fail_check,
    findings_to_json,
    format_findings,
    merge_findings,
    pass_check,
    warn_check,
)
from hpc_train.doctor.machine import GpuClock
from hpc_train.doctor.speeds import check_slow_nodes
from hpc_train.resilience.preflight import NodeFigures, Preflight, SlowNode
from hpc_train.runtime.binding import NodeSurvey


def _is(found: Finding, status: Status, *words: str) -> None:
    assert found.status == status, found
    assert all(word in found.text + " " + found.advice for word in words), found
    assert "\n" not in found.text + found.advice
    assert (found.advice == "") == (status == "ok"), "advice where something is to be done"


# findings


def test_only_what_is_broken_makes_the_command_fail() -> None:
    assert choose_exit_code([]) == choose_exit_code([pass_check("a", "x"), warn_check("b", "y", "z")]) == 0
    assert choose_exit_code([pass_check("a", "x"), fail_check("b", "y", "z")]) == 1


def test_findings_as_text_and_json() -> None:
    found = [pass_check("torch", "there"), fail_check("nvlinks", "uneven", "drain it")]
    text = format_findings(found)
    assert text[0].startswith("ok ")
    assert text[1].startswith("BAD ")
    assert text[2].strip() == "drain it"
    assert text[3] == "1 broken, 0 to look at, 1 in order"
    told = findings_to_json(found)
    assert told["ok"] is False
    assert told["counts"] == {"ok": 1, "warn": 0, "bad": 1}
    assert told["findings"][1]["advice"] == "drain it"


def test_hosts_that_find_the_same_say_it_once() -> None:
    low = warn_check("memlock", "8 MiB", "raise it")
    found = merge_findings(
        [
            ("n1", [pass_check("room", "5 GiB"), pass_check("memlock", "unlimited")]),
            ("n2", [pass_check("room", "7 GiB"), low]),
            ("n3", [low]),
        ]
    )
    assert [(it.name, it.status, it.where) for it in found] == [
        ("room", "ok", "n1, n2"),
        ("memlock", "ok", "n1"),
        ("memlock", "warn", "n2, n3"),
    ]
    everywhere = merge_findings([("n1", [low]), ("n2", [low])])
    assert [it.where for it in everywhere] == [""]


# software


def test_python() -> None:
    _is(software.check_python((3, 11, 0)), "ok", "3.11.0")
    _is(software.check_python((3, 10, 9)), "bad", "3.11")


@pytest.mark.parametrize(
    ("version", "cuda", "hip", "status", "word"),
    [
        ("2.13.0+cpu", None, None, "ok", "CPU only"),
        ("2.12.1", "12.8", None, "ok", "CUDA 12.8"),
        ("2.12.0", None, "6.3", "ok", "ROCm 6.3"),
        ("2.4.1", "12.1", None, "bad", "torch>=2.12"),
        ("99.15.0a0+git", "13.0", None, "warn", "newer than"),
    ],
)
def test_torch(version: str, cuda: str | None, hip: str | None, status: Status, word: str) -> None:
    _is(software.check_torch(version, cuda, hip), status, word)


def test_mpi() -> None:
    _is(software.check_mpi(False, software.run_command), "ok", "not installed")
    _is(software.check_mpi(True, lambda _: (0, "4.1.0 over Open MPI v5.0.1")), "ok", "Open MPI v5.0.1")
    _is(software.check_mpi(True, lambda _: (1, "libmpi.so.40: cannot open")), "bad", "libmpi.so.40", "load the module")
    _is(software.check_mpi(True, software.run_command), "ok", "mpi4py", "over")


def test_hdf5() -> None:
    _is(software.check_hdf5(import_module), "ok", "HDF5")

    def missing(name: str) -> ModuleType:
        raise ImportError("libhdf5.so: undefined symbol")

    _is(software.check_hdf5(missing), "bad", "undefined symbol")


# limits


def test_shared_memory() -> None:
    _is(machine.check_shared_memory(64.0), "ok", "64.0 GiB")
    _is(machine.check_shared_memory(0.06), "warn", "--shm-size")
    _is(machine.check_shared_memory(None), "bad", "is not there")


def test_locked_memory_matters_to_rdma_only() -> None:
    _is(machine.check_memlock(resource.RLIM_INFINITY, rdma=True), "ok", "unlimited")
    _is(machine.check_memlock(8 << 20, rdma=False), "ok", "8 MiB")
    _is(machine.check_memlock(8 << 20, rdma=True), "bad", "8 MiB", "PropagateResourceLimitsExcept")


def test_open_files() -> None:
    _is(machine.check_open_files(65536, 65536), "ok", "65536")
    _is(machine.check_open_files(resource.RLIM_INFINITY, resource.RLIM_INFINITY), "ok", "any number")
    _is(machine.check_open_files(1024, 4096), "warn", "ulimit -n")


@pytest.mark.parametrize(
    ("kind", "several", "status"),
    [
        ("lustre", True, "ok"),
        ("ext4", False, "ok"),
        ("ext4", True, "warn"),
        ("tmpfs", True, "bad"),
        ("tmpfs", False, "ok"),
    ],
)
def test_the_folder_of_runs(kind: str, several: bool, status: Status) -> None:
    found = machine.check_run_folder(
        Path("/scratch/me/runs"), Mount(Path("/scratch"), kind, "server:/scratch", ()), several
    )
    _is(found, status, kind, "/scratch/me/runs")
    _is(machine.check_run_folder(Path("/x"), None, several), "warn", "no file system")


def test_room_for_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _is(machine.check_free_space(tmp_path / "not" / "there" / "yet"), "ok", "GiB free")
    monkeypatch.setattr(machine.shutil, "disk_usage", lambda _: (100 << 30, 99 << 30, 1 << 30))
    _is(machine.check_free_space(tmp_path), "warn", "1.0 of 100.0 GiB")
    monkeypatch.setattr(machine.os, "access", lambda *_: False)
    _is(machine.check_free_space(tmp_path), "bad", "cannot be written")


# tools


def test_slurm_client() -> None:
    everything = {name: f"/usr/bin/{name}" for name in software.SLURM_PROGRAMS}
    _is(software.check_slurm_client(everything.get), "ok", "sbatch")
    _is(software.check_slurm_client({}.get), "ok", "no Slurm")
    del everything["sacct"]
    _is(software.check_slurm_client(everything.get), "warn", "no sacct")


def test_controller() -> None:
    _is(software.check_controller(lambda _: (0, "Slurmctld(primary) at ctl is UP")), "ok", "is UP")
    _is(software.check_controller(lambda _: (0, "Slurmctld(primary) at ctl is DOWN")), "warn", "is DOWN")
    _is(software.check_controller(lambda _: (124, "no answer within 20 s")), "warn", "no answer")


def test_a_command_that_hangs_or_is_not_there(monkeypatch: pytest.MonkeyPatch) -> None:
    assert software.run_command(["/no/such/command"])[0] == 127
    assert software.run_command([sys.executable, "-c", "print('a\\nb')"]) == (0, "a b")
    monkeypatch.setattr(software, "_TIMEOUT_SECONDS", 0.2)
    assert software.run_command(["sleep", "100"])[0] == 124


def test_lustre_and_modules() -> None:
    _is(software.check_lustre({"lfs": "/usr/bin/lfs"}.get), "ok", "is here")
    _is(software.check_lustre({}.get), "ok", "no lfs")
    _is(
        software.check_modules({"LMOD_VERSION": "8.7", "LOADEDMODULES": "gcc/13:cuda/12.8"}),
        "ok",
        "Lmod",
        "gcc/13, cuda/12.8",
    )
    _is(software.check_modules({"MODULESHOME": "/usr/share/modules"}), "ok", "none")
    _is(software.check_modules({}), "ok", "no environment modules")


# surroundings


def test_interface() -> None:
    _is(software.check_interface("localhost", 1, None), "ok", "127.0.0.1")
    _is(software.check_interface("localhost", 2, None), "bad", "cluster.fabric.interface")
    _is(software.check_interface("localhost", 2, "nosuch0"), "bad", "nosuch0")


HAVE = {"lo": "127.0.0.1", "ib0": "10.0.0.1", "eth0": "192.168.0.1"}


@pytest.mark.parametrize(
    ("name", "value", "fine"),
    [
        ("GLOO_SOCKET_IFNAME", "ib0", True),
        ("GLOO_SOCKET_IFNAME", "ib", False),
        ("NCCL_SOCKET_IFNAME", "ib", True),
        ("NCCL_SOCKET_IFNAME", "=ib", False),
        ("NCCL_SOCKET_IFNAME", "hsn,eth", True),
        ("NCCL_SOCKET_IFNAME", "^lo", True),
        ("NCCL_SOCKET_IFNAME", "hsn0", False),
    ],
)
def test_an_interface_that_the_user_chose_must_be_there(name: str, value: str, fine: bool) -> None:
    found = list(software.check_chosen_interface({name: value}, HAVE))
    assert [it.status for it in found] == ([] if fine else ["bad"])


def test_variables_that_do_harm() -> None:
    _is(next(software.check_harmful_variables({}, 8)), "ok", "no variable")
    found = list(software.check_harmful_variables({"NCCL_P2P_DISABLE": "1", "NCCL_ALGO": "Ring"}, 8))
    assert [(it.status, it.text) for it in found] == [
        ("warn", "NCCL_ALGO=Ring is set"),
        ("warn", "NCCL_P2P_DISABLE=1 is set"),
    ]


def test_threads() -> None:
    assert list(software.check_threads({"OMP_NUM_THREADS": "4"}, 8)) == []
    assert [it.status for it in software.check_threads({}, 8)] == ["ok"]
    assert [it.status for it in software.check_threads({"OMP_NUM_THREADS": "many"}, 8)] == ["bad"]


# GPUs and NICs


def _gpus(links: list[int | None], name: str = "H100") -> list[Gpu]:
    return [Gpu(f"GPU{index}", name=name, nvlinks=count) for index, count in enumerate(links)]


def test_gpus_that_torch_sees() -> None:
    listed = _gpus([18] * 8)
    _is(machine.check_gpus_in_torch(listed, 8, True), "ok", "8 x H100")
    _is(machine.check_gpus_in_torch([], 0, False), "ok", "none")
    _is(machine.check_gpus_in_torch(listed, 1, True), "ok", "may use 1")
    _is(machine.check_gpus_in_torch(listed, 0, True), "bad", "torch sees none")
    _is(machine.check_gpus_in_torch(listed, 0, False), "bad", "CPUs only")
    _is(machine.check_gpus_in_torch(listed, 9, True), "warn", "9")


def test_nvlinks() -> None:
    (even,) = machine.check_nvlinks(_gpus([18] * 8))
    _is(even, "ok", "18 up")
    assert list(machine.check_nvlinks(_gpus([None] * 4))) == []
    (uneven,) = machine.check_nvlinks(_gpus([18, 18, 17, 18, 18, 18, None, 18]))
    _is(uneven, "bad", "18 up on most", "GPU2 has 17", "GPU6 has 0")
    (mixed,) = machine.check_nvlinks([*_gpus([12] * 4, "A100"), *_gpus([None], "T1000")])
    _is(mixed, "ok", "12 up")


def _nics(*states: tuple[bool, float | None], layer: str = "infiniband") -> list[Nic]:
    return [
        Nic(f"NIC{index}", f"mlx5_{index}", active=up, gbit_s=rate, layer=layer)
        for index, (up, rate) in enumerate(states)
    ]


def test_ports() -> None:
    (good,) = machine.check_ports(_nics((True, 400.0), (True, 400.0)))
    _is(good, "ok", "mlx5_0, mlx5_1 up at 400 Gbit/s")
    (down,) = machine.check_ports(_nics((True, 400.0), (False, None)))
    _is(down, "warn", "down: mlx5_1")
    (none,) = machine.check_ports(_nics((False, None)))
    _is(none, "bad", "no port is up")
    (slow,) = machine.check_ports(_nics((True, 400.0), (True, 200.0), (True, 400.0)))
    _is(slow, "warn", "mlx5_1 200 Gbit/s")
    assert list(machine.check_ports([])) == []


def test_ethernet_beside_a_fabric_may_be_unplugged() -> None:
    (found,) = machine.check_ports([*_nics((True, 400.0)), *_nics((False, None), layer="ethernet")])
    _is(found, "ok", "mlx5_0 up")


def test_the_nics_that_ranks_would_be_told() -> None:
    nics = [Nic(f"NIC{n}", f"mlx5_{n}") for n in range(2)]
    names = {f"mlx5_{n}": {"UCX_NET_DEVICES": f"mlx5_{n}:1"} for n in range(2)}
    survey = NodeSurvey(fit_nics=nics, nic_of={"a": "mlx5_1", "b": "mlx5_0"}, nic_variables=names)
    (found,) = machine.check_nic_variables(survey, 2)
    assert found.text == "UCX_NET_DEVICES by GPU, unless it is set: mlx5_1:1, mlx5_0:1"
    (found,) = machine.check_nic_variables(survey, 1)
    assert found.text == "UCX chooses: 2 NICs for 1 GPUs"
    assert not list(machine.check_nic_variables(replace(survey, nic_variables={}), 2))
    assert not list(machine.check_nic_variables(NodeSurvey(fit_nics=nics[:1]), 1))


@pytest.mark.parametrize(
    ("name", "value", "fine"),
    [
        ("UCX_NET_DEVICES", "mlx5_0:1,eth0", True),
        ("UCX_NET_DEVICES", "all", True),
        ("UCX_NET_DEVICES", "mlx5_7:1", False),
        ("FI_VERBS_DEVICE_NAME", "mlx5", True),
        ("FI_VERBS_DEVICE_NAME", "rxe", False),
        ("FI_CXI_DEVICE_NAME", "cxi0,cxi9", False),
        ("FI_EFA_IFACE", "", True),
    ],
)
def test_a_nic_that_a_variable_names_must_be_there(name: str, value: str, fine: bool, tmp_path: Path) -> None:
    for device in ("infiniband/mlx5_0", "net/eth0", "cxi/cxi0"):
        (tmp_path / "sys/class" / device).mkdir(parents=True)
    found = list(machine.check_named_nics({name: value}, tmp_path))
    assert [it.status for it in found] == ([] if fine else ["bad"])
    assert all(it.text.startswith(f"{name}={value}: this host has ") for it in found)


def test_clocks() -> None:
    assert list(machine.check_clocks([])) == []
    (fine,) = machine.check_clocks([GpuClock(0, 1980, 1980, 0x4), GpuClock(1, 1700, 1980, 0x0)])
    _is(fine, "ok", "2 GPUs")
    (hot,) = machine.check_clocks([GpuClock(0, 1980, 1980, 0), GpuClock(1, 345, 1980, 0x48)])
    _is(hot, "bad", "GPU1 hardware slowdown, 345 of 1980 MHz", "GPU1 too hot")


class _Nvml:
    """As much of NVML as clocks take; its second GPU is lost."""

    NVML_CLOCK_SM = 1

    class NVMLError(Exception):
        """What every function of it raises."""

    def __init__(self, driver: bool = True) -> None:
        self.driver = driver

    def nvmlInit(self) -> None:
        if not self.driver:
            raise self.NVMLError

    def nvmlShutdown(self) -> None:
        """Nothing to do."""

    def nvmlDeviceGetCount(self) -> int:
        return 2

    def nvmlDeviceGetHandleByIndex(self, index: int) -> Any:
        if index:
            raise self.NVMLError
        return SimpleNamespace()

    def nvmlDeviceGetClockInfo(self, handle: Any, kind: int) -> int:
        return 1410

    def nvmlDeviceGetMaxClockInfo(self, handle: Any, kind: int) -> int:
        return 1980

    def nvmlDeviceGetCurrentClocksThrottleReasons(self, handle: Any) -> int:
        return 0x4


def test_clocks_are_read_where_nvml_tells() -> None:
    assert machine.read_clocks(_Nvml()) == [GpuClock(0, 1410, 1980, 0x4)]
    assert machine.read_clocks(_Nvml(driver=False)) == []
    assert machine.read_clocks(None) == []


def test_what_this_machine_says_of_itself() -> None:
    found = [
        *software.check_software(),
        *machine.check_gpus({}),
        *software.check_tools({}),
        *machine.check_limits(Path.cwd(), False),
    ]
    assert {"python", "torch", "hdf5", "gpus", "slurm", "/dev/shm", "memlock", "nofile", "run_dir"} <= {
        it.name for it in found
    }


def test_slow_nodes_of_a_job_are_named_with_what_to_do() -> None:
    nodes = [NodeFigures(f"n{index}", 2e-3, exchange=5e-3) for index in range(3)]
    found = check_slow_nodes(Preflight(nodes))
    assert (found.status, found.text) == (
        "ok",
        "none of 3 stands out: matrix product 2 ms, exchange with another node 5 ms",
    )
    slow = [
        SlowNode("n1", "matrix product", 6e-3, 2e-3),
        SlowNode("n2", "exchange with other nodes", 1e-2, 5e-3, blamed=False),
    ]
    found = check_slow_nodes(Preflight(nodes, slow))
    assert found.status == "warn"
    assert "n1: matrix product takes 6 ms, 3.0 x the usual 2 ms" in found.text
    assert "n2: exchange with other nodes takes 10 ms, 2.0 x the usual 5 ms, or its partner is slow" in found.text
    assert "launch.exclude" in found.advice
