"""Which address of this host the other processes of the job can reach."""

from __future__ import annotations

import fcntl
import ipaddress
import socket
import struct

from hpc_train.errors import UserError

_SIOCGIFADDR = 0x8915  # linux/sockios.h


def interface_address(name: str) -> str | None:
    """IPv4 address of a network interface of this host; None if it has none."""
    request = struct.pack("256s", name.encode()[:15])
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            answer = fcntl.ioctl(probe.fileno(), _SIOCGIFADDR, request)
        except OSError:
            return None
    return socket.inet_ntoa(answer[20:24])


def interfaces() -> dict[str, str]:
    """Interfaces of this host that have an IPv4 address: name -> address."""
    found = ((name, interface_address(name)) for _, name in socket.if_nameindex())
    return {name: address for name, address in found if address}


def own_address(host: str, nodes: int, interface: str | None) -> tuple[str, str]:
    """(IPv4 address, interface) that the job's processes should use on this host.

    interface: the one that the cluster's configuration names; else, on several nodes, the one the node's own name
    resolves to; on one node the loopback. Raises UserError rather than take an address that others cannot reach.
    """
    have = interfaces()
    if interface is not None:
        if interface not in have:
            raise UserError(f"cluster.fabric.interface={interface}: {host} has {', '.join(sorted(have))}")
        return have[interface], interface
    if nodes == 1:
        return "127.0.0.1", next((name for name, address in have.items() if address == "127.0.0.1"), "lo")
    try:
        address = socket.gethostbyname(host)
    except OSError:
        raise UserError(f"{host} does not resolve on itself: name the network with cluster.fabric.interface") from None
    by_address = {address: name for name, address in have.items()}
    if ipaddress.ip_address(address).is_loopback or address not in by_address:
        raise UserError(
            f"{host} resolves to {address} on itself, which other nodes cannot reach: "
            f"name the network with cluster.fabric.interface (one of {', '.join(sorted(set(have) - {'lo'}))})"
        )
    return address, by_address[address]
