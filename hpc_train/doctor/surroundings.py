"""What this process was given: the network it will use, and variables that do harm."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from hpc_train.doctor.finding import Finding, bad, ok, warn
from hpc_train.errors import UserError
from hpc_train.placement.environment import inherited
from hpc_train.runtime.network import interfaces, own_address


def surroundings(env: Mapping[str, str], host: str, nodes: int, wanted: str | None, local: int) -> Iterator[Finding]:
    """Every check of this file. wanted: cluster.fabric.interface. local: ranks of this node."""
    yield interface(host, nodes, wanted)
    yield from chosen_interface(env, interfaces())
    yield from harmful(env, local)
    yield from threads(env, local)


def interface(host: str, nodes: int, wanted: str | None) -> Finding:
    """The one that ranks will open sockets on."""
    try:
        address, name = own_address(host, nodes, wanted)
    except UserError as error:
        return bad("interface", str(error), "see `ip -4 address` for what this host has")
    return ok("interface", f"{name}, {address}" + ("" if wanted or nodes > 1 else " (one node needs no network)"))


def chosen_interface(env: Mapping[str, str], have: Mapping[str, str]) -> Iterator[Finding]:
    """A user's own choice always stays, and must be there. have: interface -> IPv4 address."""
    for name in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):
        value = env.get(name, "")
        wanted = [part for part in value.lstrip("=").split(",") if part]
        if not wanted or value.startswith("^"):
            continue
        exact = name.startswith("GLOO") or value.startswith("=")
        matches = [known for known in have if any(known == it if exact else known.startswith(it) for it in wanted)]
        if not matches:
            text = f"{name}={value}: this host has {', '.join(sorted(have))}"
            yield bad("environment", text, f"unset {name}, or name the network with cluster.fabric.interface")


def harmful(env: Mapping[str, str], local: int) -> Iterator[Finding]:
    """Variables from an old script or another machine."""
    found = inherited(env, local)
    for it in found:
        yield warn("environment", f"{it.name}={it.value} is set", it.why)
    if not found:
        yield ok("environment", "no variable that is known to do harm")


def threads(env: Mapping[str, str], local: int) -> Iterator[Finding]:
    """OMP_NUM_THREADS: unset, every rank of a node would start a thread for each core."""
    value = env.get("OMP_NUM_THREADS", "")
    if value and not value.split(",")[0].isdecimal():
        yield bad("threads", f"OMP_NUM_THREADS={value} is no number", "unset it, or set launch.threads")
    elif not value and local > 1:
        text = f"OMP_NUM_THREADS is not set for {local} ranks of a node"
        yield ok("threads", f"{text}; `train` shares the node's cores out, other programs may not")
