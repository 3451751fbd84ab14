"""Real dumps, where their folder is there, against facts that were read off them by hand."""

from __future__ import annotations

import tarfile
from dataclasses import dataclass
from pathlib import Path

import pytest

from hpc_train.cluster.filesystems import find_mount
from hpc_train.cluster.readers.formats import list_formats, read_topology_file
from hpc_train.cluster.spec import Cluster
from hpc_train.cluster.switch_tree import find_paths, find_rails, find_scalable_units
from hpc_train.cluster.sysfs import read_numa_nodes
from hpc_train.cluster.this_machine import describe_this_node
from hpc_train.errors import UserError

FOLDER = Path(__file__).parents[2].parent / "shared/data/topology"


@dataclass(frozen=True)
class Facts:
    """What a dump tells."""

    hosts: dict[str, int]
    """Host -> adapters."""
    levels: dict[str, int]
    """Switch -> level."""
    holds: dict[str, tuple[str, ...]]
    """Some switch -> what hangs on it."""
    gbit_s: frozenset[float | None]
    units: int


def azure() -> Facts:
    hosts = [
        f"RMD70109190{n}" for n in ("1003", "1019", "1053", "1037", "2003", "2019", "6003", "6019", "6053", "6037")
    ]
    edge = [f"rmd70-0101-0919-{n}ib0" for n in ("01", "02", "03", "11", "12")]
    chassis = "rmd70-0101-0908-01ib1-A:MCS8500/"
    levels = dict.fromkeys(edge, 0) | {f"{chassis}L01/U1": 1, f"{chassis}L02/U1": 1, f"{chassis}S01/U1": 2}
    holds = {f"{chassis}L01/U1": tuple(edge[:3]), f"{chassis}L02/U1": tuple(edge[3:]), edge[4]: tuple(hosts[8:])}
    return Facts(dict.fromkeys(hosts, 1), levels, holds, frozenset({200.0}), 5)


FACTS = {
    "superbench_topo_aware_ibnetdiscover.txt": azure(),
    "ibnetdiscover_edr_36port_head.txt": Facts(
        {f"node0{n}": 1 for n in ("18", "20", "14", "16", "10", "12", "06")},
        {"ec0d9a0300ec8240": 0},
        {"ec0d9a0300ec8240": ("node018", "node020", "node014", "node016", "node010", "node012", "node006")},
        frozenset({100.0}),
        1,
    ),
    "ibnetdiscover_mixed_fdr_edr_hdr_switch.txt": Facts(
        {"r-dcs96": 2}, {"r-ufm-sw95": 0}, {"r-ufm-sw95": ("r-dcs96",)}, frozenset({100.0}), 1
    ),
    "ibsim_net.txt": Facts(
        {"Hca1": 1, "Hca2": 1}, {"Switch1": 0, "Switch2": 1}, {"Switch2": ("Switch1",)}, frozenset({None}), 1
    ),
    "ibtopotool_2.topo": Facts(
        {"compute-00-01": 1, "compute-00-00": 1},
        {"000b8cffff0053ee": 0},
        {"000b8cffff0053ee": ("compute-00-01", "compute-00-00")},
        frozenset({10.0}),
        1,
    ),
    "ibtopotool_3.topo": Facts(
        {"r-ufm111": 1, "r-ufm216": 1, "r-ufm101": 2, "r-ufm100": 1, "r-ufm96": 1},
        {"e41d2d030003e470": 0, "switch-de779e": 0},
        {"e41d2d030003e470": ("r-ufm216", "r-ufm111"), "switch-de779e": ("r-ufm101", "r-ufm100", "r-ufm96")},
        frozenset({10.0, 40.0, 56.0, 100.0}),
        2,
    ),
    "ibtopotool_4.topo": Facts(
        {"nsn33-43": 1}, {"0021283a8389a0a0": 0}, {"0021283a8389a0a0": ("nsn33-43",)}, frozenset({40.0}), 1
    ),
}
ADAPTERS = {
    "ibstat_mlx4_dualport_down.txt": ("mlx4_0", "480fcffffff09140", True, 40.0, "infiniband"),
    "ibstat_mlx5_single_edr.txt": ("mlx5_0", "ec0d9a03003d677a", True, 100.0, "infiniband"),
    "ibstat_roce_ethernet.txt": ("mlx5_0", "58a2e10300e07c20", True, 100.0, "ethernet"),
    "ibstat_rxe_softroce.txt": ("rxe0", "020c29fffe9122a4", True, 10.0, "ethernet"),
}


def facts_of(cluster: Cluster, holds: dict[str, tuple[str, ...]]) -> Facts:
    switches = {it.name: it for it in cluster.switches}
    return Facts(
        {it.name: len(it.nics) for it in cluster.nodes},
        {it.name: it.level for it in cluster.switches},
        {name: switches[name].nodes + switches[name].switches for name in holds},
        frozenset(nic.gbit_s for it in cluster.nodes for nic in it.nics),
        len(find_scalable_units(cluster)),
    )


def test_dumps() -> None:
    for name, facts in FACTS.items():
        if (path := FOLDER / "ib" / name).exists():
            cluster = read_topology_file(path)
            assert facts_of(cluster, facts.holds) == facts, name
            assert set(find_rails(cluster)) <= set(facts.levels)
            assert list(find_paths(cluster)) == [node.name for node in cluster.nodes]


def test_adapters() -> None:
    for name, facts in ADAPTERS.items():
        if (path := FOLDER / "ib" / name).exists():
            (nic,) = read_topology_file(path).nodes[0].nics
            assert (nic.device, nic.guid, nic.active, nic.gbit_s, nic.layer) == facts


def test_every_file_of_the_folder_has_at_most_one_reader_of_these() -> None:
    """Those of the other formats are not claimed by these two, nor these by others."""
    mine = {"ibnetdiscover", "ibstat"}
    for path in FOLDER.rglob("*"):
        if not path.is_file() or path.suffix == ".bz2":
            continue
        text = path.read_bytes().decode("utf-8", "replace")
        claims = {it.name for it in list_formats() if it.matches(text)}
        if claims & mine:
            assert len(claims) == 1, path
            assert path.parent.name == "ib", path


def test_iblinkinfo_of_two_hosts_and_of_a_file_that_lost_its_headers() -> None:
    for path in FOLDER.glob("ib/iblinkinfo_ca_mode.txt"):
        cluster = read_topology_file(path)
        assert [node.name for node in cluster.nodes] == ["0002c90300002779", "hostname"]
        assert {nic.gbit_s for node in cluster.nodes for nic in node.nics} == {20}
    for path in FOLDER.glob("ib/iblinkinfo_edr_switch.txt"):
        with pytest.raises(UserError, match="1: a port without its device"):
            read_topology_file(path)


def test_a_node_whose_sysfs_was_kept(tmp_path: Path) -> None:
    """Four NUMA nodes, one InfiniBand adapter with one port, four Ethernet ports of which one is up."""
    for path in FOLDER.glob("hwloc/hwloc_sysfs_40intel64*.tar.bz2"):
        with tarfile.open(path) as archive:
            parts = (
                "/devices/system/node/",
                "/devices/pci",
                "/bus/pci/",
                "/class/net/",
                "/class/infiniband/",
                "/proc/mounts",
            )
            wanted = [it for it in archive.getmembers() if any(part in it.name for part in parts)]
            archive.extractall(tmp_path, wanted, filter="data")
        (root,) = tmp_path.iterdir()
        assert [it.cpus[:5] for it in read_numa_nodes(root)] == ["0,4,8", "1,5,9", "2,6,1", "3,7,1"]
        cluster = describe_this_node(root)
        assert [(it.device, it.numa, it.pci, it.active, it.gbit_s) for it in cluster.nodes[0].nics] == [
            ("qib0", 2, "0000:43:00.0", True, 40.0),
            ("eth0", None, "0000:02:00.0", True, 1.0),
            ("eth1", None, "0000:02:00.1", False, None),
            ("eth2", None, "0000:03:00.0", False, None),
            ("eth3", None, "0000:03:00.1", False, None),
        ]
        assert [it.kind for it in cluster.links] == [*["SYS"] * 4, "PIX", "PHB", "PHB", "PHB", "PHB", "PIX"]
        table = tmp_path / "mountinfo"  # the archive has the same facts in the older form
        for line in (root / "proc/mounts").read_text().splitlines():
            source, point, kind, options, *_ = line.split()
            with table.open("a") as file:
                file.write(f"1 0 0:1 / {point} {options} - {kind} {source} {options}\n")
        mount = find_mount(Path("/scratch/run"), table)
        assert mount is not None
        assert (mount.kind, mount.shared) == ("beegfs", True)
