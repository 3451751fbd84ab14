"""Compute the bandwidth between the GPUs of one node, from the links in its topology or in the cluster's description.

Direct links (NVLink, xGMI) add up. All other traffic of a GPU shares its PCIe port, whatever the peer.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from hpc_train.cluster.spec import Link
from hpc_train.config.cluster import PCIE_BANDWIDTH, NodeConfig, parse_gpu_pairs

Floats = NDArray[np.float64]

NVLINK_BANDWIDTH = 25e9
"""Bytes/s of one NVLink in one direction (generations 2 to 4: NVIDIA's architecture white papers of V100, A100 and H100
give 50 GB/s for both directions). Only ratios within a node decide."""
XGMI_BANDWIDTH = 50e9
"""Bytes/s of a pair over xGMI in one direction, unless described: one link of MI200, 16 lanes of 25 Gbit/s (AMD's white
paper of CDNA 2). Here, too, only ratios matter."""
_FAR = {"SYS": 0.5}
"""Assumed share of a PCIe port that reaches a GPU, by the kind of their link: SYS crosses the link between sockets,
which others use too; the other kinds do not leave the socket."""


@dataclass(frozen=True)
class GpuLinks:
    """The links between the GPUs of a node."""

    direct: Floats
    """[gpus, gpus]: bytes/s over links that only these two have, one direction, symmetric; 0 without any."""
    port: float
    """Bytes/s of a GPU's PCIe port, one direction; 0 where all traffic takes direct links."""
    share: Floats
    """[gpus, gpus]: share of the port that reaches the other GPU, 0 to 1."""

    @property
    def count(self) -> int:
        """Return the number of GPUs."""
        return len(self.direct)

    @property
    def is_uniform(self) -> bool:
        """Whether every two GPUs are joined alike, so that no order of them is better than another."""
        is_pair = ~np.eye(self.count, dtype=bool)
        return all(
            np.ptp(table[is_pair]) <= 1e-9 * table[is_pair].max(initial=0.0) for table in (self.direct, self.share)
        )


def build_described_links(node: NodeConfig) -> GpuLinks | None:
    """Build the links that conf/cluster describes; None where all pairs are alike."""
    pairs = parse_gpu_pairs(node)
    if node.gpus < 2 or not pairs:
        return None
    over_port = node.gpu_link in ("none", "pcie")
    others = 0.0 if over_port else (node.gpu_pair_gb_s or node.gpu_link_gb_s) * 1e9
    direct = np.full((node.gpus, node.gpus), others)
    for (a, b), bandwidth in pairs.items():
        direct[a, b] = direct[b, a] = bandwidth * 1e9
    np.fill_diagonal(direct, 0.0)
    port = (node.pcie_gb_s or node.gpu_link_gb_s) * 1e9 or PCIE_BANDWIDTH
    return GpuLinks(direct, 0.0 if others else port, np.ones_like(direct))


def build_listed_links(gpus: Sequence[str], links: Sequence[Link] | Mapping[tuple[str, str], str]) -> GpuLinks:
    """Build the links of GPUs from their kinds. gpus: ids in the order of the result; others are left out."""
    kinds = links if isinstance(links, Mapping) else {(link.a, link.b): link.kind for link in links}
    place = {gpu: number for number, gpu in enumerate(gpus)}
    direct, share = np.zeros((len(gpus), len(gpus))), np.ones((len(gpus), len(gpus)))
    for (a, b), kind in kinds.items():
        if a in place and b in place:
            pair = place[a], place[b]
            for ends in (pair, pair[::-1]):
                direct[ends], share[ends] = _get_direct_bandwidth(kind), _FAR.get(kind, 1.0)
    return GpuLinks(direct, PCIE_BANDWIDTH, share)


def _get_direct_bandwidth(kind: str) -> float:
    if kind.startswith("XGMI"):
        return XGMI_BANDWIDTH
    match = re.fullmatch(r"NV(\d{1,2})", kind)
    return int(match[1]) * NVLINK_BANDWIDTH if match else 0.0
