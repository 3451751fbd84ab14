"""Assign a NIC to every GPU of a node: least total PCIe distance, and no NIC twice if another is as close."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hpc_train.cluster.spec import Gpu, Link, Nic, Node

_KINDS = ("C2C", "PIX", "PXB", "PHB", "NODE", "SYS")
"""Link kinds from near to far, after NVLink. PIX: one PCIe switch in between; SYS: the link between sockets."""
_UNKNOWN = len(_KINDS) + 1
NO_PORT_UP = "no port is up"
_BOND = re.compile(r"bond", re.IGNORECASE)


@dataclass(frozen=True)
class NicAssignment:
    """The NICs of one node."""

    nic_of: dict[str, str]
    """NIC id by GPU id; empty if no NIC is suitable."""
    dropped: dict[str, str]
    """Reason why a NIC is not used, by NIC id."""


def measure_distance(kind: str) -> int:
    """Return the distance of two devices by their link: 0 (NVLink, xGMI) to 6 (SYS), 7 for an unknown kind."""
    if kind.startswith(("NV", "XGMI")):
        return 0
    return _KINDS.index(kind) + 1 if kind in _KINDS else _UNKNOWN


def assign_nics(node: Node, links: Sequence[Link]) -> NicAssignment:
    """Assign one NIC to every GPU of a node. Ties go by NUMA node, then PCI domain, then the order of both lists."""
    nics, dropped = select_usable_nics(node.nics)
    if not nics or not node.gpus:
        return NicAssignment({}, dropped)
    far = _measure_distances(node, nics, links)
    chosen = _solve_assignment(far, _rank_ties(node.gpus, nics))
    nic_of = {gpu.id: nics[column].id for gpu, column in zip(node.gpus, chosen, strict=True)}
    return NicAssignment(nic_of, dropped)


def select_usable_nics(nics: Sequence[Nic]) -> tuple[list[Nic], dict[str, str]]:
    """Return (NICs fit for GPU traffic, id -> why another is not): down, a bond, or of an unusual layer or rate."""
    dropped = {nic.id: NO_PORT_UP for nic in nics if nic.active is False}
    bonds = {nic.id: f"{nic.device} is a bond" for nic in nics if nic.device and _BOND.search(nic.device)}
    if 2 * len(bonds.keys() - dropped) <= len(nics) - len(dropped):  # some sites bond the ports that GPUs use
        dropped = bonds | dropped
    for what in ("layer", "gbit_s"):
        left = [nic for nic in nics if nic.id not in dropped and getattr(nic, what) is not None]
        usual = _find_usual_value([getattr(nic, what) for nic in left])
        for nic in left:
            if getattr(nic, what) != usual:
                dropped[nic.id] = f"{getattr(nic, what)} where most have {usual}"
    return [nic for nic in nics if nic.id not in dropped], dropped


def _find_usual_value(values: list[Any]) -> Any:
    """Return the most frequent value; of several the greatest: a fast NIC is for GPUs, a slow one for the site."""
    count = Counter(values)
    return max(sorted(count, reverse=True), key=lambda value: count[value], default=None)


def _measure_distances(node: Node, nics: Sequence[Nic], links: Sequence[Link]) -> NDArray[np.int64]:
    """Return the distances, [gpus, nics]."""
    kinds = {
        pair: link.kind for link in links if link.node == node.name for pair in ((link.a, link.b), (link.b, link.a))
    }
    return np.array([[measure_distance(kinds.get((gpu.id, nic.id), "")) for nic in nics] for gpu in node.gpus])


def _rank_ties(gpus: Sequence[Gpu], nics: Sequence[Nic]) -> NDArray[np.int64]:
    """Return [gpus, nics]: smaller is preferred among NICs at equal distance."""
    rows, columns = len(gpus), len(nics)
    domain = rows * columns + 1  # more than all differences of order together
    numa = domain * (rows + 1)
    return np.array(
        [
            [
                numa * (str(gpu.numa) != str(nic.numa))
                + domain * (_get_pci_domain(gpu) != _get_pci_domain(nic))
                + abs(j - i * columns // rows)
                for j, nic in enumerate(nics)
            ]
            for i, gpu in enumerate(gpus)
        ]
    )


def _get_pci_domain(device: Gpu | Nic) -> str | None:
    return device.pci.split(":")[0] if device.pci else None


def _solve_assignment(far: NDArray[np.int64], ties: NDArray[np.int64]) -> list[int]:
    """Return the column of every row.

    Minimises lexicographically: total distance, then how often columns are used twice, then ties.
    """
    from scipy.optimize import linear_sum_assignment  # a third of a second, which ranks without GPUs need not wait

    rows, columns = far.shape
    again = int(ties.max()) * rows + 1
    step = again * rows * rows + 1
    # The k-th user of a column pays k: a convex price, which an assignment to copies of the column minimises.
    price = [far * step + ties + again * copy for copy in range(rows)]
    matched_rows, matched = linear_sum_assignment(np.concatenate(price, axis=1).astype(np.float64))
    assert list(matched_rows) == list(range(rows))
    return [int(column) % columns for column in matched]
