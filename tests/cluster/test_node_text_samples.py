"""Real outputs, where the folder of them is there: facts that were read off each by eye."""

from collections import Counter
from dataclasses import dataclass
from pathlib import Path

import pytest
from reader_outcome import check, outcome

from hpc_train.cluster.readers.formats import list_formats
from hpc_train.cluster.spec import Cluster

SAMPLES = Path(__file__).parents[2].parent / "shared/data/topology"


@dataclass(frozen=True)
class Facts:
    gpus: int
    nics: int = 0
    kinds: str = ""
    """How many links of each kind, GPUs and NICs alike."""
    near: str = ""
    """Some links: a-b=kind."""
    numa: tuple[int | str | None, ...] = ()
    """Of each GPU."""
    cpus: tuple[str | None, ...] = ()
    """Of the first GPU and of the last."""
    nvlinks: int | None = None
    """Of every GPU."""
    devices: tuple[str | None, ...] = ()
    """Of the first NIC and of the last."""


TWO, HALVES = (None, None), (0, 0, 0, 0, 1, 1, 1, 1)
MLX_8 = ("mlx5_0", "mlx5_7")
NVIDIA_SMI = {
    "01_2gpu_nv2_workstation": Facts(2, 0, "NV2 1", "", TWO, ("0-23", "0-23"), 2),
    "02_2gpu_phb_workstation": Facts(2, 0, "PHB 1", "", TWO, ("0-11", "0-11")),
    "03_a100x8_nv12_spaces": Facts(8, 0, "NV12 28", "", HALVES, ("0-23", "24-47"), 12),
    "04_h100x8_nv18_spaces": Facts(8, 0, "NV18 28", "", HALVES, ("0-51", "52-103"), 18),
    "05_h100x8_smt_cpuaffinity": Facts(8, 0, "NV18 28", "", HALVES, ("0-51,104-155", "52-103,156-207"), 18),
    "06_v100x8_hybridcube_mesh_mlx5": Facts(
        8,
        1,
        "NV1 8 NV2 8 SYS 16 NODE 2 PIX 2",
        "GPU0-GPU4=NV2 GPU2-GPU6=NV1 GPU3-NIC0=PIX GPU4-NIC0=SYS",
        (None,) * 8,
        ("0-11,24-35", "12-23,36-47"),
        6,
        ("mlx5_0", "mlx5_0"),
    ),
    "07_v100x8_tabs_2mlx5_numa": Facts(
        8,
        2,
        "NV1 8 NV2 8 SYS 21 NODE 4 PIX 4",
        "GPU0-GPU7=NV2 GPU2-NIC0=PIX GPU6-NIC1=PIX GPU4-NIC1=NODE NIC0-NIC1=SYS",
        HALVES,
        ("0-23,48-71", "24-47,72-95"),
        6,
        ("mlx5_0", "mlx5_1"),
    ),
    "08_v100x8_legend": Facts(
        8,
        1,
        "NV1 8 NV2 8 SYS 16 NODE 2 PIX 2",
        "GPU2-NIC0=PIX",
        (None,) * 8,
        ("0-11,24-35", "12-23,36-47"),
        6,
        ("mlx5_0", "mlx5_0"),
    ),
    "12_hopper_8gpu_8nic_railopt_spaces": Facts(
        8,
        8,
        "NV18 28 PIX 8 NODE 36 SYS 48",
        "GPU0-NIC0=PIX GPU7-NIC7=PIX GPU3-NIC4=SYS NIC6-NIC7=NODE",
        HALVES,
        ("0-47,96-143", "48-95,144-191"),
        18,
        MLX_8,
    ),
    "13_gb200_tray_4gpu_6nic_ansi_container": Facts(
        4, 6, "NV18 6 NODE 39", "GPU0-NIC5=NODE", (0, 0, 1, 1), ("0-35", None), 18, ("mlx5_0", "mlx5_5")
    ),
    "14_leonardo_a100x4_mlx5cols": Facts(
        4,
        4,
        "NV4 6 PXB 4 NODE 18",
        "GPU2-NIC2=PXB GPU2-NIC3=NODE",
        (0,) * 4,
        ("0-15", "0-15"),
        12,
        ("mlx5_0", "mlx5_3"),
    ),
    "16_perlmutter_like_a100x4_slingshot_nonics": Facts(
        4, 0, "NV4 6", "", (3, 2, 1, 0), ("24-31,56-63", "0-7,32-39"), 12
    ),
    "17_a100x4_2nic_nps4": Facts(
        4,
        2,
        "NV4 6 PXB 4 SYS 5",
        "GPU1-NIC0=PXB GPU2-NIC1=PXB NIC0-NIC1=SYS",
        (2, 2, 6, 6),
        ("32-47", "96-111"),
        12,
        ("mlx5_0", "mlx5_1"),
    ),
    "19_pcie_6gpu_ansi_before_tab": Facts(
        6, 0, "PIX 3 NODE 4 SYS 8", "GPU4-GPU5=PIX", (0, 0, 0, 0, 1, 1), ("0-23,48-71", "24-47,72-95")
    ),
    "20_h100pcie_vm_1gpu_1nic": Facts(1, 1, "PHB 1", "", (0,), ("0-251",) * 2, None, ("mlx5_0",) * 2),
    "21_2gpu_nv12_mlx4": Facts(2, 1, "NV12 1 NODE 2", "", (0, 0), ("0-95",) * 2, 12, ("mlx4_0",) * 2),
    "25_1gpu_only": Facts(1, 0, "", "", (0,), ("0-31,64-95",) * 2),
    "26_h200x8_nano4_slurm_cgroup_blank_cpuaffinity": Facts(
        8,
        10,
        "NV18 28 PIX 9 NODE 116",
        "GPU1-NIC3=PIX GPU7-NIC9=PIX NIC1-NIC2=PIX GPU0-NIC1=NODE",
        HALVES,
        (None, "56"),
        18,
        ("mlx5_0", "mlx5_9"),
    ),
    "28_h100x3_interleaved_cores_ansi": Facts(
        3,
        1,
        "NV18 3 SYS 1 NODE 2",
        "GPU0-NIC0=SYS",
        (0, 1, 1),
        ("0,2,4,6,8,10", "1,3,5,7,9,11"),
        18,
        TWO,
    ),
}
ROCM_SMI = {
    "04_two_hives_8gpu_partial": Facts(8, 0, "XGMI 12 PCIE 16", "GPU0-GPU3=XGMI GPU3-GPU4=PCIE", (None,) * 8, TWO),
    "06_single_gpu_linktype_only": Facts(1, 0, "", "", (None,), TWO),
}
P4D = "PIX 12 PHB 18 SYS 36"
NCCL_XML = {
    "aws_p4d-24xl-topo": Facts(
        8, 4, P4D, "GPU0-GPU1=PIX GPU1-NIC0=PIX GPU0-NIC1=PHB", HALVES, ("0-23,48-71", "24-47,72-95"), None, TWO
    ),
    "uccl_p4d-24xl-topo": Facts(8, 4, P4D, "GPU6-NIC3=PIX", HALVES, ("0-23", "72-95"), None, TWO),
    "azure_ndv2-topo": Facts(
        8, 1, "NODE 16 SYS 20", "GPU3-NIC0=NODE GPU4-NIC0=SYS", HALVES, ("0-19", "20-39"), None, TWO
    ),
    "frag_gb10_spark": Facts(1, 2, "NODE 3", "", (None,), TWO, 0, ("rocep1s0f0", "roceP2p1s0f0")),
    "frag_gb300_missing_nvlink": Facts(1, 0, "", "", (None,), TWO, 0),
    "nemo_launcher_aws_topo": Facts(0),
    "nemo_launcher_azure_topo": Facts(
        8, 8, "PIX 24 PHB 96", "GPU0-NIC0=PIX GPU1-NIC0=PIX", (0,) * 8, ("0-15,32-47",) * 2, None, TWO
    ),
    "nemo_launcher_oci_topo": Facts(
        8, 8, "PIX 24 SYS 96", "GPU2-NIC3=PIX", (3, 3, 1, 1, 7, 7, 5, 5), ("24-31,88-95", "40-47,104-111"), None, TWO
    ),
    "oci_H100-topology-kubernetes": Facts(
        8,
        16,
        "NV18 28 PIX 8 PXB 16 NODE 96 SYS 128",
        "GPU0-NIC0=PXB GPU0-NIC1=PXB GPU0-NIC2=NODE GPU0-NIC8=SYS NIC0-NIC1=PIX",
        HALVES,
        ("0-55,112-167", "56-111,168-223"),
        18,
        ("mlx5_18", "mlx5_25"),
    ),
    "rccl_system_v2_xgmi_test": Facts(1, 0, "", "", (0,), TWO, 8),
    "rccl_topo_4p1h": Facts(
        4, 1, "XGMI 4 PXB 6", "GPU0-GPU1=XGMI GPU0-GPU3=PXB", (0,) * 4, ("0-13,28-41",) * 2, 2, ("mlx5_0",) * 2
    ),
    "rccl_topo_4p3l_n4": Facts(
        8,
        1,
        "XGMI 12 NODE 2 SYS 22",
        "GPU0-GPU2=XGMI GPU1-GPU2=NODE GPU0-NIC0=SYS",
        (1, 2, 2, 3, 5, 5, 6, 7),
        ("16-31", "112-127"),
        3,
        ("mlx5_0",) * 2,
    ),
    "rccl_topo_8p6l_6nic": Facts(
        8, 6, "XGMI 24 NODE 30 SYS 37", "GPU0-GPU5=SYS", HALVES, ("0-23,48-71", "24-47,72-95"), 6, ("mlx5_0", "mlx5_5")
    ),
    "rccl_topo_8p_940": Facts(
        8,
        8,
        "XGMI 28 PXB 8 NODE 36 SYS 48",
        "GPU3-NIC3=PXB GPU3-NIC2=NODE GPU3-NIC4=SYS",
        HALVES,
        ("0-55,112-167", "56-111,168-223"),
        7,
        MLX_8,
    ),
    "rccl_topo_8p_pcie": Facts(
        8, 1, "PXB 16 NODE 20", "GPU3-NIC0=PXB GPU4-NIC0=NODE", (0,) * 8, ("0-7,16-23",) * 2, 0, ("mlx5_0",) * 2
    ),
    "rccl_topo_8p_ts1_n4": Facts(
        8,
        2,
        "XGMI 8 NODE 1 SYS 36",
        "GPU0-GPU1=XGMI GPU1-GPU2=XGMI GPU5-GPU6=NODE",
        (1, 2, 2, 3, 4, 5, 5, 7),
        ("16-31", "112-127"),
        2,
        ("mlx5_0", "mlx5_2"),
    ),
    "rccl_topo_collnet_n4": Facts(
        8,
        4,
        "XGMI 12 PXB 8 SYS 46",
        "GPU0-GPU3=XGMI GPU0-NIC0=PXB GPU4-NIC2=PXB GPU3-GPU4=SYS",
        (0, 0, 1, 1, 2, 2, 3, 3),
        ("0-31,128-159", "96-127,224-255"),
        3,
        ("mlx5_1", "mlx5_7"),
    ),
    "superbench_ndv4-topo": Facts(
        8, 8, "PIX 24 SYS 96", "GPU5-NIC4=PIX", (0, 0, 1, 1, 2, 2, 3, 3), ("0-15,32-47",) * 2, None, TWO
    ),
    "superbench_ndv5-topo": Facts(
        8, 8, "PIX 8 PHB 48 SYS 64", "GPU4-NIC4=PIX GPU4-NIC5=PHB", HALVES, ("48-95", "0-47"), None, TWO
    ),
}
HWLOC = {
    "aws_g6.48xl": Facts(
        8, 1, "SYS 20 NODE 16", "GPU0-GPU7=SYS", HALVES, ("0-47,96-143", "48-95,144-191"), None, ("rdmap150s0",) * 2
    ),
    "aws_p3dn.24xl": Facts(8, 1, "PHB 36", "", (None,) * 8, ("0-95", "0-95"), None, ("rdmap0s21", "rdmap0s21")),
    "aws_p5.48xl": Facts(
        8,
        32,
        "PIX 80 NODE 300 SYS 400",
        "GPU0-NIC0=PIX GPU0-NIC3=PIX GPU0-NIC4=NODE NIC0-NIC3=PIX GPU0-GPU4=SYS",
        HALVES,
        ("0-47", "48-95"),
        None,
        ("rdmap79s0", "rdmap201s0"),
    ),
    "flux_sierra": Facts(
        4,
        4,
        "SYS 16 PHB 4 NODE 8",
        "GPU0-GPU1=PHB NIC0-NIC1=PHB GPU0-NIC0=NODE GPU0-GPU2=SYS",
        (0, 0, 8, 8),
        ("0-87", "88-175"),
        None,
        ("mlx5_0", "mlx5_3"),
    ),
    "flux_tuo.SPX": Facts(
        4,
        4,
        "XGMI 6 PHB 4 SYS 18",
        "GPU0-GPU3=XGMI GPU2-NIC2=PHB GPU2-NIC1=SYS",
        (0, 1, 2, 3),
        ("0-23,96-119", "72-95,168-191"),
        None,
        ("hsi0", "hsi3"),
    ),
}
FACTS = (
    {f"nvidia-smi-topo/{name}.txt": it for name, it in NVIDIA_SMI.items()}
    | {f"rocm-smi/{name}.txt": it for name, it in ROCM_SMI.items()}
    | {f"nccl-xml/{name}.xml": it for name, it in NCCL_XML.items()}
    | {f"hwloc/{name}.hwloc.xml": it for name, it in HWLOC.items()}
)
FORMATS = {"nvidia-smi-topo": "nvidia_smi", "rocm-smi": "rocm_smi", "nccl-xml": "nccl_xml", "hwloc": "hwloc_xml"}
GRAPHS = {"graph_ring_gb10_generated.xml": "nccl_graph"}


def read(path: Path) -> Cluster | str:
    """By the one format that claims it."""
    text = path.read_text()
    claiming = [it for it in list_formats() if it.matches(text)]
    assert [it.name for it in claiming] == [GRAPHS.get(path.name, FORMATS[path.parent.name])]
    return outcome(claiming[0].read, text)


@pytest.mark.parametrize("name", list(FACTS))
def test_facts(name: str) -> None:
    if not (SAMPLES / name).exists():
        return
    facts, cluster = FACTS[name], check(read(SAMPLES / name))
    assert cluster is not None
    node = cluster.nodes[0]
    gpus, nics = node.gpus, node.nics
    assert (len(cluster.nodes), len(gpus), len(nics)) == (1, facts.gpus, facts.nics)
    counts = facts.kinds.split()
    assert Counter(it.kind for it in cluster.links) == dict(zip(counts[::2], map(int, counts[1::2]), strict=True))
    links = {f"{it.a}-{it.b}={it.kind}" for it in cluster.links}
    assert set(facts.near.split()) <= links
    assert tuple(it.numa for it in gpus) == facts.numa
    assert tuple(it.cpus for it in gpus[:1] + gpus[-1:]) == facts.cpus
    assert {it.nvlinks for it in gpus} <= {facts.nvlinks}
    assert tuple(it.device for it in nics[:1] + nics[-1:]) == facts.devices


@pytest.mark.parametrize("folder", list(FORMATS))
def test_every_other_sample_is_read(folder: str) -> None:
    for path in sorted((SAMPLES / folder).glob("*.*[!2]")) if SAMPLES.exists() else ():
        assert check(read(path)) is not None
