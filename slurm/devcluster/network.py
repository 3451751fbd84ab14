"""The cables and switches: one more network namespace, the fabric, holds every bridge.

Management: all of eth0 on one bridge with the host. Data: every hsn0 on the bridge of its leaf switch, the leaves
joined by a spine. The host sees a single interface, and the end of the fabric's process removes everything.
"""

from __future__ import annotations

import contextlib
import signal
import sys
from functools import partial
from pathlib import Path

from . import addresses
from .processes import ClusterError, Process, enter, run, succeeds, wait_for
from .state import State

RELAY = Path(__file__).resolve().with_name("relay.py")


def start_fabric(state: State) -> None:
    """Create the fabric and take the first free cluster number of this machine."""
    fabric = state.launch("fabric", ["unshare", "--net", "sleep", "infinity"])
    wait_for("fabric", lambda: has_own_network(fabric), 10, state.log("fabric"), fabric)
    inside = enter(fabric, "n")
    run(*inside, "ip", "-batch", "-", text="\n".join(fabric_links(len(state.options.leaves()), state.options.mtu)))
    state.network = connect_host(fabric)
    state.save()
    device = addresses.host_device(state.network)
    address = addresses.host_address(state.network)
    run("ip", "-batch", "-", text=f"addr add {address}/24 dev {device}\nlink set {device} up")
    run(*inside, "ip", "link", "set", "host", "master", "management", "up")


def has_own_network(process: Process) -> bool:
    theirs = Path(f"/proc/{process.pid}/ns/net")
    return process.alive() and theirs.readlink() != Path("/proc/self/ns/net").readlink()


def fabric_links(leaves: int, mtu: int) -> list[str]:
    """Return the `ip` commands for the bridges, and for the cable from each leaf (up<k>) to the spine (down<k>)."""
    lines = ["link set lo up"]
    for bridge in ("management", "spine", *(f"leaf{k}" for k in range(1, leaves + 1))):
        lines += [f"link add {bridge} type bridge", f"link set {bridge} up"]
    for k in range(1, leaves + 1):
        lines += [
            f"link add up{k} mtu {mtu} type veth peer name down{k} mtu {mtu}",
            f"link set up{k} master leaf{k} up",
            f"link set down{k} master spine up",
        ]
    return lines


def connect_host(fabric: Process) -> int:
    """Make the link to the host and return the cluster's number. The kernel refuses a name in use, so two clusters
    never take the same number.
    """
    for network in range(addresses.CLUSTERS):
        peer = ("peer", "name", "host", "netns", fabric.pid)
        if succeeds("ip", "link", "add", addresses.host_device(network), "type", "veth", *peer):
            return network
    raise ClusterError(f"no network device devcluster0..{addresses.CLUSTERS - 1} can be made: are other clusters up?")


def stop_fabric(state: State) -> None:
    """Stop the fabric. The kernel removes its devices, and the host's end, a moment after the process has ended."""
    if not state.alive("fabric"):
        return
    device = addresses.host_device(state.network)
    before = device_number(device)
    state.stop("fabric", signal.SIGKILL)
    wait_for(f"{device} to go", lambda: before is None or device_number(device) != before, 10)


def device_number(device: str) -> int | None:
    with contextlib.suppress(OSError):
        return int(Path(f"/sys/class/net/{device}/ifindex").read_text())
    return None


def connect_node(state: State, node: str) -> None:
    network, mtu, number = state.network, state.options.mtu, addresses.number(node)
    fabric, inside = enter(state.processes["fabric"], "n"), enter(state.processes[node], "n")
    pid, leaf = state.processes[node].pid, state.options.leaf_of(node)
    for port in (f"m{number}", f"d{number}"):  # the kernel removes those of a killed node a moment later
        wait_for(f"old port {port} to go", partial(lacks_device, fabric, port), 10)
    cables = [
        f"link add m{number} type veth peer name eth0 netns {pid}",
        f"link set m{number} master management up",
        f"link add d{number} mtu {mtu} type veth peer name hsn0 mtu {mtu} netns {pid}",
        f"link set d{number} master leaf{leaf} up",
    ]
    ends = [
        f"addr add {addresses.management(network, node)}/24 dev eth0",
        f"link set eth0 address {addresses.hardware(addresses.management(network, node))} up",
        f"addr add {addresses.data(network, node)}/24 dev hsn0",
        f"link set hsn0 address {addresses.hardware(addresses.data(network, node))} up",
    ]
    run(*fabric, "ip", "-batch", "-", text="\n".join(cables))
    run(*inside, "ip", "-batch", "-", text="\n".join(ends))


def lacks_device(inside: list[str], device: str) -> bool:
    return not succeeds(*inside, "ip", "link", "show", device)


def change_cable(state: State, target: str, verb: str, value: str | None, of_management: bool) -> None:
    """Apply `verb` to both directions of the cable of a node, or of a leaf switch to the spine."""
    if verb in ("rate", "loss", "delay") and value is None:
        raise ClusterError(f"`net {target} {verb}` needs a value, such as {'100mbit' if verb == 'rate' else '5'}")
    ends = cable_ends(state, target, of_management)
    if verb == "delay":
        delay_uplink(state, target, milliseconds(value))
    elif verb == "clear" and target.startswith("leaf"):
        delay_uplink(state, target, 0)
    for process, device in ends:
        change_end(enter(process, "n"), device, verb, value)


def cable_ends(state: State, target: str, of_management: bool) -> list[tuple[Process, str]]:
    fabric = state.processes["fabric"]
    if target in state.options.node_names():
        if not state.alive(target):
            raise ClusterError(f"{target} is not running: dev-cluster node boot {target}")
        number = addresses.number(target)
        node_end, port = ("eth0", f"m{number}") if of_management else ("hsn0", f"d{number}")
        return [(state.processes[target], node_end), (fabric, port)]
    leaves = [f"leaf{k}" for k in range(1, len(state.options.leaves()) + 1)]
    if target in leaves:
        number = int(target.removeprefix("leaf"))
        return [(fabric, f"up{number}"), (fabric, f"down{number}")]
    raise ClusterError(f"no node or leaf switch {target}: there are {', '.join(state.options.node_names() + leaves)}")


def change_end(inside: list[str], device: str, verb: str, value: str | None) -> None:
    # A cable is pulled at the switch's end, so that addresses and routes in the node stay.
    if verb in ("up", "down") and device not in ("eth0", "hsn0"):
        run(*inside, "ip", "link", "set", device, verb)
    if verb in ("rate", "clear"):
        run(*inside, "tc", "qdisc", "del", "dev", device, "root", check=False)
    if verb == "rate":
        shaper = ("tbf", "rate", value, "burst", "128kb", "latency", "100ms")
        run(*inside, "tc", "qdisc", "add", "dev", device, "root", *shaper)
    if verb in ("loss", "clear"):
        run(*inside, "nft", "delete", "table", "netdev", f"loss_{device}", check=False)
    if verb == "loss":
        run(*inside, "nft", "-f", "-", text=loss_rules(device, percent(value)))


def loss_rules(device: str, percentage: float) -> str:
    share = round(percentage * 100)
    # nft refuses comparisons that are always true or always false
    rule = {0: "", 10_000: "drop"}.get(share, f"numgen random mod 10000 < {share} drop")
    return (
        f"table netdev loss_{device} {{\n chain loss {{\n  type filter hook ingress device {device} priority 0;\n"
        f"  {rule}\n }}\n}}\n"
    )


def percent(text: str | None) -> float:
    return number_within(text, "a loss in percent", 100)


def milliseconds(text: str | None) -> float:
    return number_within(text, "a delay in milliseconds", 10_000)


def number_within(text: str | None, what: str, most: float) -> float:
    try:
        found = float(text or "")
    except ValueError:
        raise ClusterError(f"{text!r} is not {what}: give a number") from None
    if not 0 <= found <= most:
        raise ClusterError(f"{text} is not {what}: must be 0 to {most:g}")
    return found


def delay_uplink(state: State, leaf: str, delay: float) -> None:
    """Replace the leaf's uplink by a relay that holds every frame `delay` milliseconds; 0 puts the cable back."""
    if not leaf.startswith("leaf"):
        raise ClusterError("delay works on leaf switches: use `up --switches N` and give the node a leaf of its own")
    name, number, inside = f"{leaf}-relay", leaf.removeprefix("leaf"), enter(state.processes["fabric"], "n")
    state.stop(name)
    if not delay:
        run(*inside, "ip", "link", "set", f"up{number}", "up")
        return
    run(*inside, "ip", "link", "set", f"up{number}", "down")
    taps = (f"tapup{number}", f"tapdown{number}")
    process = state.launch(name, [*inside, sys.executable, RELAY, *taps, delay])
    wait_for(name, lambda: succeeds(*inside, "ip", "link", "show", taps[1]), 10, state.log(name), process)
    for tap, bridge in zip(taps, (leaf, "spine"), strict=True):
        run(*inside, "ip", "link", "set", tap, "mtu", state.options.mtu, "master", bridge, "up")
