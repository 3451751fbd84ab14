"""Name one NIC to the libraries that can use one NIC a process: UCX, and the providers of libfabric.

NCCL is not among them: it expects the same NICs on every rank of a node, and shares them out itself.

Sources: UCX_NET_DEVICES in UCX's FAQ (openucx/ucx, docs/source/faq.md); FI_VERBS_DEVICE_NAME, FI_CXI_DEVICE_NAME,
FI_OPX_HFI_SELECT and FI_EFA_IFACE in libfabric's manual pages fi_verbs(7), fi_cxi(7), fi_opx(7) and fi_efa(7).
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence

from hpc_train.cluster.local_nics import NicPort
from hpc_train.cluster.spec import Nic
from hpc_train.cluster.sysfs import NumaNode
from hpc_train.placement.communication_environment import VariableSetting
from hpc_train.placement.node.cpu_binding import parse_cpus

_OMNI_PATH = re.compile(r"hfi1_(\d+)")
"""The kernel's name of an Omni-Path adapter; its number is the unit of FI_OPX_HFI_SELECT."""


def name_nics(nics: Sequence[Nic], ports: Mapping[str, NicPort]) -> dict[str, dict[str, str]]:
    """Map the device of each NIC to the variables that make UCX or libfabric use this NIC and no other.

    nics: those of one node that are fit for data. ports: by NIC id.
    NICs that may not reach each other get no variables, because two ranks on different ones could then not talk: those
    of more than one kind or InfiniBand subnet, and RoCE's, between which only the site's routes tell.
    """
    prefixes = {ports[nic.id].subnet for nic in nics if nic.id in ports}
    if len({nic.layer for nic in nics}) != 1 or len(prefixes) != 1:
        return {}
    devices = [nic.device for nic in nics if nic.device]
    names = {nic.device: _name_nic(nic, nic.device, ports[nic.id], devices) for nic in nics if nic.device}
    # A rank without variables beside ranks with them would be the odd one out: all or none.
    return names if all(names.values()) else {}


def _name_nic(nic: Nic, device: str, port: NicPort, devices: Iterable[str]) -> dict[str, str]:
    if nic.layer == "slingshot":
        return {"FI_CXI_DEVICE_NAME": port.cxi} if port.cxi else {}
    if nic.layer == "efa":
        return {"FI_EFA_IFACE": device}
    if nic.layer != "infiniband" or port.number is None or port.subnet is None:
        return {}
    if omni_path := _OMNI_PATH.fullmatch(device):
        return {"FI_OPX_HFI_SELECT": omni_path[1]}
    names = {"UCX_NET_DEVICES": f"{device}:{port.number}"}
    # libfabric takes the name as a prefix: mlx5_1 would also be mlx5_10.
    if not any(other.startswith(device) for other in devices if other != device):
        names["FI_VERBS_DEVICE_NAME"] = device
    return names


def choose_rank_nic_settings(variables: Mapping[str, str], nearest: str, with_nccl: bool) -> list[VariableSetting]:
    """Choose the variables of one rank. variables: those of its NIC. nearest: what the NIC is nearest to.

    with_nccl: NCCL moves data in this run. Its libfabric plugin obeys the same FI_ variables and needs all NICs of the
    node, so they are left out.
    """
    return [
        VariableSetting(name, value, f"the NIC nearest to {nearest}")
        for name, value in variables.items()
        if not (with_nccl and name.startswith("FI_"))
    ]


def pick_nic_of_processors(
    nics: Sequence[Nic], allowed: frozenset[int], numa: Iterable[NumaNode], local: int
) -> Nic | None:
    """Pick a NIC for a rank without a GPU: one of the NUMA node that holds all processors it may use.

    local: local rank, by which ranks of one NUMA node take its NICs in turn. None if the processors are of several
    NUMA nodes, or if their node has no NIC: then no NIC is nearest.
    """
    homes = [node.id for node in numa if parse_cpus(node.cpus) & allowed]
    near = [nic for nic in nics if homes == [nic.numa]]
    return near[local % len(near)] if near else None
