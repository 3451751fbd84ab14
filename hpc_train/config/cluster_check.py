"""Check the description of a machine: links between GPUs, variables, and machines that are not supported."""

from __future__ import annotations

import re

from hpc_train.config.cluster import ClusterConfig, NodeConfig
from hpc_train.errors import UserError

_PAIR = re.compile(r"(\d{1,3})-(\d{1,3})")
_LIBRARY = re.compile(r"(?:NCCL|RCCL|TORCH_NCCL|GLOO|FI|UCX)_[A-Z0-9_]{1,60}")
_TPU = re.compile(r"\bTPU", re.IGNORECASE)


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
            "is all that a GPU can send to its peers together"
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

    Raises UserError for what is no pair of the node's GPUs, and for a pair that is given twice.
    """
    pairs: dict[tuple[int, int], float] = {}
    for name, bandwidth in node.gpu_pairs_gb_s.items():
        match = _PAIR.fullmatch(str(name))
        a, b = sorted((int(match[1]), int(match[2]))) if match else (0, 0)
        if match is None or a == b or (node.gpus and b >= node.gpus):
            raise UserError(
                f"cluster.node.gpu_pairs_gb_s: {str(name)[:40]!r} is no pair of two of {node.gpus} GPUs, such as 0-1"
            )
        if bandwidth <= 0:
            raise UserError(f"cluster.node.gpu_pairs_gb_s: {name} has {bandwidth:g}; expected more than 0 GB/s")
        if (a, b) in pairs:
            raise UserError(f"cluster.node.gpu_pairs_gb_s: {a}-{b} is there twice")
        pairs[a, b] = bandwidth
    return pairs
