"""conf/cluster: what a machine is made of, from public facts. Units are in every field's name."""

from __future__ import annotations

import re

from omegaconf import MISSING

from hpc_train.config.schema import config_dataclass, config_field
from hpc_train.errors import UserError

PCIE_BANDWIDTH = 25e9
"""Assumed bytes/s of a PCIe port in one direction where pcie_gb_s is unknown: 80 % of the 31.5 GB/s of 16 lanes of PCIe
4.0 (16 Gbit/s each, 128 of 130 bits), because packets have headers."""
_PAIR = re.compile(r"(\d{1,3})-(\d{1,3})")
_LIBRARY = re.compile(r"(?:NCCL|RCCL|TORCH_NCCL|GLOO|FI|UCX)_[A-Z0-9_]{1,60}")
_TPU = re.compile(r"\bTPU", re.IGNORECASE)


@config_dataclass
class GpuConfig:
    """One accelerator as the scheduler counts it (on MI250X, one of its two dies)."""

    name: str | None = None
    """Product name as the vendor's library prints it, such as NVIDIA H100 80GB HBM3; None without GPUs."""
    memory_gib: float = config_field(default=0.0, ge=0)
    """Memory of one GPU, GiB."""
    memory_bandwidth_gb_s: float = config_field(default=0.0, ge=0)
    """Peak memory bandwidth, 10^9 bytes/s."""
    peak_tflops: dict[str, float] = config_field(default={})
    """Dense peak in 10^12 FLOP/s by precision: fp64, fp32, tf32, bf16, fp16, fp8. Sparse figures do not belong here."""


@config_dataclass
class NodeConfig:
    """One compute node."""

    gpus: int = config_field(default=0, ge=0)
    """GPUs of a node; 0 on a node without GPUs."""
    ranks: int | None = config_field(default=None, ge=1)
    """Ranks a node; None means one per GPU (and one on a node without GPUs)."""
    cpus: int = config_field(default=1, ge=1)
    """Physical cores."""
    sockets: int = config_field(default=1, ge=1)
    """CPU sockets of a node."""
    memory_gib: float = config_field(default=0.0, ge=0)
    """Main memory of a node, GiB; 0 if unknown."""
    gpu_link: str = config_field(default="none", choices=("none", "pcie", "nvlink", "nvswitch", "xgmi"))
    """Links between the GPUs of a node: nvlink is point to point, nvswitch any to any."""
    gpu_link_gb_s: float = config_field(default=0.0, ge=0)
    """Bandwidth of one GPU to all its peers together over that link, one direction, 10^9 bytes/s."""
    gpu_pair_gb_s: float = config_field(default=0.0, ge=0)
    """Bandwidth of the link that two GPUs have for themselves, one direction, 10^9 bytes/s; 0: a GPU can send all of
    gpu_link_gb_s to one peer (a switch), or unknown."""
    gpu_pairs_gb_s: dict[str, float] = config_field(default={})
    """Pairs of GPUs with a bandwidth of their own, such as {0-1: 200}: halves of a module, NVLink bridges."""
    nvlink_domain_gpus: int = config_field(default=0, ge=0)
    """GPUs that reach each other over NVLink: of a node, or of several (72 in an NVL72 rack); 0 without NVLink."""
    pcie_gb_s: float = config_field(default=0.0, ge=0)
    """Host to GPU bandwidth, one direction, 10^9 bytes/s."""
    nics: int = config_field(default=0, ge=0)
    """Network ports used by jobs."""
    nic_gbit_s: float = config_field(default=0.0, ge=0)
    """Line rate of one port, one direction, 10^9 bit/s."""


@config_dataclass
class FabricConfig:
    """The network between nodes."""

    kind: str = config_field(
        default="none", choices=("none", "infiniband", "slingshot", "ethernet", "roce", "efa", "omni_path")
    )
    """Kind of network between nodes."""
    topology: str = config_field(
        default="none", choices=("none", "flat", "fat_tree", "rail_optimised", "dragonfly", "dragonfly_plus")
    )
    """How switches are joined; none if unknown."""
    nodes_per_leaf: int = config_field(default=0, ge=0)
    """Nodes under one leaf switch (a scalable unit if rail-optimised, a switch of a dragonfly group); 0 if unknown."""
    nodes_per_group: int = config_field(default=0, ge=0)
    """Nodes in one dragonfly group or one pod; 0 if unknown."""
    oversubscription: float | None = config_field(default=None, ge=1)
    """Taper: what all nodes of a leaf can send over what its uplinks carry; 1 is non-blocking, None unknown."""
    group_oversubscription: float | None = config_field(default=None, ge=1)
    """Taper of a dragonfly group or a pod: what all its nodes can send over what its uplinks carry."""
    interface: str | None = None
    """Network interface for rendezvous and sockets, such as hsn0; None: the one that its own name resolves to."""


@config_dataclass
class FileSystemConfig:
    """The shared file system that runs and checkpoints are written to."""

    kind: str = config_field(
        default="local", choices=("local", "shared", "lustre", "gpfs", "nfs", "weka", "fsx_lustre", "daos")
    )
    """shared: every node sees it, but which kind it is depends on the site."""
    write_gb_s: float = config_field(default=0.0, ge=0)
    """Aggregate write bandwidth, 10^9 bytes/s; 0 if unknown."""
    osts: int = config_field(default=0, ge=0)
    """Object storage targets (Lustre); 0 if unknown or another kind."""


@config_dataclass
class SlurmConfig:
    """How jobs are asked for at this site. What a job wants for itself is in `launch`."""

    partition: str | None = None
    """sbatch --partition; None: the site's default."""
    constraint: str | None = None
    """sbatch --constraint, such as gpu; None: no constraint."""
    gpu_request: str = config_field(default="gpus_per_node", choices=("none", "gpus_per_node", "gres"))
    """Which sbatch option asks for a node's GPUs; none where a node is always given whole."""
    max_time_minutes: int | None = config_field(default=None, ge=1)
    """Longest time limit of the partition; None if unknown."""
    exclusive: bool = False
    """Ask for whole nodes."""


@config_dataclass
class ClusterConfig:
    """A machine that jobs run on."""

    name: str = MISSING
    """Name of the machine in plans, logs and error lines."""
    source: list[str] = config_field(default=[])
    """Public pages that the figures come from."""
    total_nodes: int = config_field(default=0, ge=0)
    """Nodes of this kind at the site; 0 if unknown or unbounded."""
    nodes: int | None = config_field(default=None, ge=1)
    """Nodes a job asks for; None: as many as the parallel degrees need."""
    gpu: GpuConfig = config_field(default=GpuConfig)
    node: NodeConfig = config_field(default=NodeConfig)
    fabric: FabricConfig = config_field(default=FabricConfig)
    filesystem: FileSystemConfig = config_field(default=FileSystemConfig)
    slurm: SlurmConfig = config_field(default=SlurmConfig)
    modules: list[str] = config_field(default=[])
    """Modules that batch scripts load (Lmod, Environment Modules), in order, such as cuda/12.4."""
    module_path: list[str] = config_field(default=[])
    """Folders of modulefiles to look in first, beside the site's."""
    module_purge: bool = False
    """Unload first what the submitting shell had loaded."""
    environment: dict[str, str | None] = config_field(default={})
    """Variables of communication libraries (NCCL_, RCCL_, TORCH_NCCL_, GLOO_, FI_, UCX_) to set on every rank, such as
    {NCCL_TOPO_FILE: /opt/topo.xml}; null: never set by hpc_train. What the user has set stays."""
    topology: str | None = None
    """File that describes switches and nodes, in any format of `hpc-train topology read`; None: what Slurm says."""
    calibration: str | None = None
    """File of measured constants that `hpc-train bench collectives` or `plan calibrate` wrote; None: the figures above.
    """

    @property
    def ranks_per_node(self) -> int:
        return self.node.ranks or max(self.node.gpus, 1)


def check_cluster(cluster: ClusterConfig) -> None:
    """Raise UserError for a TPU, and for links that contradict one another."""
    node = cluster.node
    if cluster.gpu.name is not None and _TPU.search(cluster.gpu.name):
        raise UserError(
            f"cluster.gpu.name={cluster.gpu.name}: TPUs are not supported, only what PyTorch's CUDA, ROCm and CPU "
            "backends run on; describe a cluster of GPUs"
        )
    if node.gpu_pair_gb_s > node.gpu_link_gb_s > 0:
        raise UserError(
            f"cluster.node.gpu_pair_gb_s={node.gpu_pair_gb_s:g}: more than gpu_link_gb_s={node.gpu_link_gb_s:g}, which "
            "is all that a GPU can send to its peers together; correct one of them"
        )
    parse_gpu_pairs(node)
    for name in cluster.environment:
        if not _LIBRARY.fullmatch(str(name)):
            raise UserError(
                f"cluster.environment: {str(name)[:60]!r} is not a variable of a communication library, which are read "
                "after the ranks have started; expected NCCL_..., RCCL_..., TORCH_NCCL_..., GLOO_..., FI_... or UCX_..."
            )


def parse_gpu_pairs(node: NodeConfig) -> dict[tuple[int, int], float]:
    """Return the bandwidth of the pairs of GPUs that have one of their own, 10^9 bytes/s; the lower number is first.

    Raises UserError for what is not a pair of the node's GPUs, and for a pair that is given twice.
    """
    pairs: dict[tuple[int, int], float] = {}
    for name, bandwidth in node.gpu_pairs_gb_s.items():
        match = _PAIR.fullmatch(str(name))
        a, b = sorted((int(match[1]), int(match[2]))) if match else (0, 0)
        if match is None or a == b or (node.gpus and b >= node.gpus):
            raise UserError(
                f"cluster.node.gpu_pairs_gb_s: {str(name)[:40]!r} is not a pair of two of {node.gpus} GPUs, such as 0-1"
            )
        if bandwidth <= 0:
            raise UserError(f"cluster.node.gpu_pairs_gb_s: {name} has {bandwidth:g}; expected more than 0 GB/s")
        if (a, b) in pairs:
            raise UserError(f"cluster.node.gpu_pairs_gb_s: {a}-{b} is there twice; leave one out")
        pairs[a, b] = bandwidth
    return pairs
