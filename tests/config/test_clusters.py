"""conf/cluster against facts written down here by hand, and against itself."""

from __future__ import annotations

import math
from dataclasses import dataclass
from importlib.resources import files
from itertools import pairwise
from pathlib import Path
from urllib.parse import urlsplit

import pytest
from omegaconf import OmegaConf

from hpc_train.config.cluster import ClusterConfig, GpuConfig, parse_gpu_pairs
from hpc_train.config.compose import compose

FOLDER = Path(str(files("hpc_train.conf"))) / "cluster"
FILES = sorted(path.stem for path in FOLDER.glob("*.yaml"))
WITHOUT_FACTS = ["local", "slurm"]
PRECISIONS = {"fp64", "fp32", "tf32", "bf16", "fp16", "fp8"}


@dataclass(frozen=True)
class Facts:
    """GPUs of a node, dense bf16 peak (10^12 FLOP/s) and memory (GiB) of one, all ports of a node together (Gbit/s)."""

    gpus: int
    bf16_tflops: float
    memory_gib: float
    network_gbit_s: float


KNOWN = {
    "a100_pcie": Facts(4, 312, 80, 0),
    "alps": Facts(4, 989.4, 96, 800),
    "aws_p4d": Facts(8, 312, 40, 400),
    "aws_p5": Facts(8, 989.4, 80, 3200),
    "azure_nd_h100_v5": Facts(8, 989.4, 80, 3200),
    "delta": Facts(4, 312, 40, 200),
    "delta_ai": Facts(4, 989.4, 96, 800),
    "dgx_a100": Facts(8, 312, 80, 1600),
    "dgx_b200": Facts(8, 2250, 179, 3200),
    "dgx_b300": Facts(8, 2250, 268, 6400),
    "dgx_h100": Facts(8, 989.4, 80, 3200),
    "dgx_h200": Facts(8, 989.4, 141, 3200),
    "el_capitan": Facts(4, 980.6, 128, 800),
    "frontier": Facts(8, 191.5, 64, 800),
    "gb200_nvl72": Facts(4, 2500, 186, 1600),
    "gb300_nvl72": Facts(4, 2500, 277, 3200),
    "gcp_a3_mega": Facts(8, 989.4, 80, 1600),
    "gh200": Facts(4, 989.4, 96, 0),
    "h100_nvl": Facts(4, 835.5, 94, 0),
    "h100_pcie": Facts(4, 756, 80, 0),
    "h20": Facts(8, 148, 96, 0),
    "isambard_ai": Facts(4, 989.4, 96, 800),
    "jupiter": Facts(4, 989.4, 96, 800),
    "juwels_booster": Facts(4, 312, 40, 800),
    "karolina": Facts(8, 312, 40, 800),
    "l40s": Facts(4, 362.05, 48, 0),
    "leonardo": Facts(4, 358.2, 64, 400),
    "lumi_g": Facts(8, 191.5, 64, 800),
    "marenostrum5": Facts(4, 989.4, 64, 800),
    "meta_roce_24k": Facts(8, 989.4, 80, 3200),
    "mi250x": Facts(8, 191.5, 64, 0),
    "mi300x": Facts(8, 1307.4, 192, 0),
    "mi325x": Facts(8, 1307.4, 256, 0),
    "mi355x": Facts(8, 2516.6, 288, 0),
    "perlmutter": Facts(4, 312, 40, 800),
    "vista": Facts(1, 989.4, 96, 400),
}
NODES_ALONE = sorted(name for name, facts in KNOWN.items() if not facts.network_gbit_s)
"""A product in its usual server: whoever builds the cluster decides on the network."""
UNKNOWN_GROUPS = ["alps", "delta", "delta_ai", "el_capitan", "isambard_ai"]
"""Dragonflies whose pages do not state how many nodes are in a group."""

every_file = pytest.mark.parametrize("name", FILES)
every_machine = pytest.mark.parametrize("name", sorted(KNOWN))


def load(name: str) -> ClusterConfig:
    """The file alone on the schema: an unknown key or a wrong type raises."""
    merged = OmegaConf.merge(OmegaConf.structured(ClusterConfig), OmegaConf.load(FOLDER / f"{name}.yaml"))
    config = OmegaConf.to_object(merged)
    assert isinstance(config, ClusterConfig)
    return config


def test_the_table_and_the_folder_name_the_same_machines() -> None:
    assert sorted([*KNOWN, *WITHOUT_FACTS]) == FILES


@every_file
def test_the_file_is_what_cluster_equals_its_name_composes_to(name: str) -> None:
    assert load(name) == compose([f"cluster={name}"]).cluster


@every_file
def test_the_name_is_the_file_name_and_the_first_line_says_what_it_is(name: str) -> None:
    first = (FOLDER / f"{name}.yaml").read_text(encoding="utf-8").splitlines()[0]
    assert load(name).name == name
    assert first.startswith("# ")
    assert first.endswith(".")


@every_machine
def test_the_file_matches_the_known_facts(name: str) -> None:
    cluster = load(name)
    found = Facts(
        cluster.node.gpus,
        cluster.gpu.peak_tflops["bf16"],
        cluster.gpu.memory_gib,
        cluster.node.nics * cluster.node.nic_gbit_s,
    )
    assert found == KNOWN[name]


@every_machine
def test_sources_are_public_pages(name: str) -> None:
    sources = load(name).source
    assert sources
    assert len(set(sources)) == len(sources)
    for source in sources:
        url = urlsplit(source)
        assert url.scheme == "https"
        assert "." in url.netloc
        assert url.path.strip("/")


@pytest.mark.parametrize("name", WITHOUT_FACTS)
def test_a_cluster_that_stands_for_any_machine_claims_nothing_of_its_hardware(name: str) -> None:
    cluster = load(name)
    assert cluster.gpu == GpuConfig()
    assert cluster.node.gpus == 0
    assert cluster.fabric.kind == "none"
    assert cluster.source == []
    assert cluster.ranks_per_node == 1


@every_machine
def test_one_rank_a_gpu(name: str) -> None:
    assert load(name).ranks_per_node == KNOWN[name].gpus


@every_machine
def test_an_nvlink_domain_is_made_of_whole_nodes(name: str) -> None:
    node = load(name).node
    if node.gpu_link not in ("nvlink", "nvswitch"):
        assert node.nvlink_domain_gpus == 0
        return
    assert node.nvlink_domain_gpus >= node.gpus
    assert node.nvlink_domain_gpus % node.gpus == 0


@every_machine
def test_peaks_are_dense(name: str) -> None:
    """Ratios between precisions are fixed by the hardware; a sparse or a vector figure among them breaks one."""
    peak = load(name).gpu.peak_tflops
    assert set(peak) <= PRECISIONS
    assert peak["fp16"] == peak["bf16"]
    rounding = 2e-2 if name == "l40s" else 1e-3  # its data sheet rounds twice
    assert peak.get("tf32", peak["bf16"] / 2) == pytest.approx(peak["bf16"] / 2, rel=rounding)
    assert peak.get("fp8", peak["bf16"] * 2) == pytest.approx(peak["bf16"] * 2, rel=rounding)


@every_machine
def test_units_are_those_of_the_field_names(name: str) -> None:
    """Known machines do 100 to 420 bf16 FLOP a byte of memory, and reach a peer GPU faster than another node.

    The H20 does 37: its matrix cores are limited. On PCIe a peer is no nearer than the host, and NVLink-C2C is as fast.
    """
    cluster = load(name)
    node, gpu = cluster.node, cluster.gpu
    if gpu.memory_bandwidth_gb_s == 0:
        assert name == "marenostrum5"  # its pages do not state that of its custom memory
    else:
        assert (30 if name == "h20" else 100) <= gpu.peak_tflops["bf16"] * 1000 / gpu.memory_bandwidth_gb_s <= 420
    if node.gpus == 1:
        assert node.gpu_link_gb_s == 0
        return
    assert node.nics * node.nic_gbit_s / 8 / node.gpus < node.gpu_link_gb_s
    assert node.gpu_link_gb_s < (gpu.memory_bandwidth_gb_s or math.inf)
    assert node.pcie_gb_s <= node.gpu_link_gb_s
    assert (node.pcie_gb_s == node.gpu_link_gb_s) == (node.gpu_link == "pcie" or "GH200" in (gpu.name or ""))


@every_machine
def test_the_links_of_pairs_add_up_to_those_of_a_gpu(name: str) -> None:
    node = load(name).node
    if node.gpu_pair_gb_s:
        assert node.gpu_link in ("nvlink", "xgmi"), "behind a switch a pair has all of it"
        assert node.gpu_pair_gb_s * (node.gpus - 1) == pytest.approx(node.gpu_link_gb_s)
    pairs = parse_gpu_pairs(node)
    assert all(bandwidth > node.gpu_link_gb_s for bandwidth in pairs.values())
    assert len({gpu for pair in pairs for gpu in pair}) == 2 * len(pairs), "each GPU has one such peer"


def test_one_product_has_the_same_figures_in_every_file() -> None:
    products: dict[str, list[GpuConfig]] = {}
    for name in KNOWN:
        gpu = load(name).gpu
        assert gpu.name is not None
        products.setdefault(gpu.name, []).append(gpu)
    assert len(products) < len(KNOWN)
    assert all(gpu == same[0] for same in products.values() for gpu in same)


@every_machine
def test_leaf_group_and_machine_nest(name: str) -> None:
    cluster = load(name)
    known = [size for size in (cluster.fabric.nodes_per_leaf, cluster.fabric.nodes_per_group) if size]
    assert known == sorted(known)
    assert all(larger % smaller == 0 for smaller, larger in pairwise(known))
    if known and cluster.total_nodes:
        assert known[-1] < cluster.total_nodes


@every_machine
def test_the_fabric_is_described(name: str) -> None:
    fabric = load(name).fabric
    assert (fabric.kind == "none") == (name in NODES_ALONE)
    assert (fabric.topology == "none") == (name in NODES_ALONE)
    if fabric.topology.startswith("dragonfly"):
        assert (fabric.nodes_per_group == 0) == (name in UNKNOWN_GROUPS)


@every_machine
def test_runs_are_written_where_every_node_sees_them(name: str) -> None:
    filesystem = load(name).filesystem
    assert filesystem.kind != "local"
    if filesystem.osts:
        assert filesystem.kind == "lustre"
