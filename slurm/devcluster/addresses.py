"""Addresses, device names and ports of a cluster, all fixed by its number on this machine.

The addresses are of 198.18.0.0/15, set aside by RFC 2544 for test networks, so no real network is hidden.
"""

from __future__ import annotations

import contextlib
import socket

from .processes import ClusterError

CLUSTERS = 16
SLURMD_PORT = 6818


def host_device(network: int) -> str:
    return f"devcluster{network}"


def host_address(network: int) -> str:
    return f"198.18.{network}.254"


def management(network: int, node: str) -> str:
    """Return the address of the node's eth0, which carries Slurm's own traffic."""
    return f"198.18.{network}.{number(node)}"


def data(network: int, node: str) -> str:
    """Return the address of the node's hsn0, on the high-speed network."""
    return f"198.19.{network}.{number(node)}"


def hardware(address: str) -> str:
    """Return the MAC address for the interface with this IPv4 address. A node that is booted again keeps its MAC:
    otherwise its peers would send to the old one until their ARP entries expire, which takes longer than Slurm's job
    credentials last.
    """
    return "02:00:" + ":".join(f"{int(part):02x}" for part in address.split("."))


def number(node: str) -> int:
    return int(node.removeprefix("node"))


def free_ports(network: int, count: int) -> list[int]:
    """Find TCP ports for daemons on the host, below the ephemeral range so that no client socket takes one first."""
    first = 28800 + 100 * network
    found = [port for port in range(first, first + 100) if _is_free(port)]
    if len(found) < count:
        raise ClusterError(f"fewer than {count} free TCP ports in {first}..{first + 99}")
    return found[:count]


def _is_free(port: int) -> bool:
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        with contextlib.suppress(OSError):
            probe.bind(("0.0.0.0", port))
            return True
    return False
