"""Read the log of a job with NCCL_DEBUG=INFO: its hosts in the order of ranks, their GPUs and NICs, and NCCL's links.

A log shows what NCCL uses, not all of the hardware. Its lines come from all ranks, in any order, and often only some of
them are in a file: the ranks that are missing are named.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field

from hpc_train.cluster.hostlist import natural_key
from hpc_train.cluster.spec import Cluster, Gpu, Link, Nic, Node
from hpc_train.errors import UserError

MAX_LINE = 1 << 16
"""Longest line that is read whole, in characters."""
MAX_DEVICES = 512
MAX_HOSTS = 20_000
MAX_PROCESSES = 4096
"""Processes of one host, those of restarts included."""
_MAX_RINGS = 64
"""Rings of one size that are kept: more than NCCL has channels in use."""
_MARK = "NCCL INFO "
_PREFIX_CHARACTERS = 300
"""Longest prefix of a line that is looked at: labels of srun or mpirun, host, process, thread, device."""
_PREFIX = re.compile(r"(?:^|[\s:>\]])([A-Za-z0-9][\w.-]{0,127}):(\d{1,10}):(\d{1,10}) \[(\d{1,3})\] $")
_COMM = re.compile(
    r"comm 0x[0-9a-fA-F]+ rank (\d{1,7}) nranks (\d{1,7}) cudaDev (\d{1,3})(?: nvmlDev (\d{1,3}))?"
    r" busId ([0-9a-fA-F]{1,16})\b"
)
_NETS = re.compile(r"NET/(IB|OFI|Socket|\w{1,20}) ?: Using ((?:\[\d{1,3}\]\S{1,200} ?)+)")
_NET = re.compile(r"\[(\d{1,3})\]([^\s:]{1,100}):(\d{1,3})/(IB|RoCE)\b")
_RING = re.compile(r"Channel (\d{2,3})/(\d{1,3}) : {1,8}(\d[\d ]*)")
_VIA = re.compile(
    r"Channel \d{2,3}(?:/\d{1,3})? : (\d{1,7})\[[0-9a-fA-F]{1,16}\] -> (\d{1,7})\[[0-9a-fA-F]{1,16}\]"
    r"(?: \[(send|receive)\])? via (P2P|SHM|NET|direct)(\S{0,80})"
)
_LAYERS = {"IB": "infiniband", "RoCE": "ethernet"}
_NEAR_TO_FAR = ("P2P", "SHM", "GDRDMA", "NET")
"""Kinds of the links of a log: memory of the peer, memory of the host, the network with and without GPUDirect."""


@dataclass
class _Process:
    """A rank as its own lines describe it."""

    host: str
    device: int
    """cudaDev."""
    ranks: dict[int, int] = field(default_factory=dict)
    """Rank by the size of the communicator."""
    physical: int | None = None
    """nvmlDev: the number of the GPU in its node, whatever CUDA_VISIBLE_DEVICES says."""
    bus: str | None = None


@dataclass
class _Host:
    """One host, put together from the lines of all its ranks."""

    name: str
    processes: dict[tuple[str, int], _Process] = field(default_factory=dict)
    """Processes by process id and cudaDev."""
    nics: dict[int, tuple[str, str]] = field(default_factory=dict)
    """Index -> device and layer."""
    transports: dict[tuple[int, int, str, int | None], None] = field(default_factory=dict)
    """(Rank on this host, other rank, kind, index of the NIC)."""
    gpus: dict[str | int, int] = field(default_factory=dict)
    """Number of each GPU by its identity; see number_gpus."""
    masked: bool = False
    """Whether processes see different GPUs under one number, as CUDA_VISIBLE_DEVICES makes them."""

    def identify(self, process: _Process) -> str | int | None:
        """Return what tells a process's GPU from the others of its host; None if nothing does."""
        return process.bus if self.masked else process.device

    def number_gpus(self) -> None:
        """Number the GPUs as NVML does if all processes say so, else as CUDA does, else in the order of addresses."""
        processes = list(self.processes.values())
        addresses = {(process.device, process.bus) for process in processes if process.bus is not None}
        # One number with two addresses: each process sees its own GPU as number 0, so only addresses tell GPUs apart.
        self.masked = len(addresses) > len({device for device, _ in addresses})
        by_gpu = {key: process for process in processes if (key := self.identify(process)) is not None}
        for process in processes:  # several processes may use one GPU, and only some of them print its number
            key = self.identify(process)
            if key in by_gpu and by_gpu[key].physical is None:
                by_gpu[key] = process
        physical = [process.physical for process in by_gpu.values()]
        if None not in physical and len(set(physical)) == len(physical):
            self.gpus = {key: number for key, number in zip(by_gpu, physical, strict=True) if number is not None}
        else:
            self.gpus = {
                key: key if isinstance(key, int) else index for index, key in enumerate(sorted(by_gpu, key=_format_key))
            }

    def find_gpu(self, process: _Process) -> str | None:
        """Return the id of a process's GPU; None if it is not known."""
        key = self.identify(process)
        return f"GPU{self.gpus[key]}" if key in self.gpus else None


def _format_key(key: str | int) -> str:
    """Return a sort key for addresses and numbers alike; zeros in front make numbers sort by value."""
    return key if isinstance(key, str) else f"{key:04d}"


@dataclass
class _JobLog:
    hosts: dict[str, _Host] = field(default_factory=dict)
    rings: dict[int, list[tuple[str, str]]] = field(default_factory=dict)
    """Length of a ring -> its channels, as (number, ranks)."""


def matches_nccl_log(text: str) -> bool:
    """Whether the text has lines that NCCL prints with NCCL_DEBUG=INFO."""
    at = text.find(_MARK)
    while at >= 0:
        if _PREFIX.search(text[max(0, at - _PREFIX_CHARACTERS) : at].rpartition("\n")[2]):
            return True
        at = text.find(_MARK, at + len(_MARK) + _PREFIX_CHARACTERS)
    return False


def read_nccl_log(text: str, name: str) -> Cluster:
    """Read the hosts. Nodes are in the order of their lowest rank; `pci` and the NICs' devices are as NCCL names them.

    Links are the transports that NCCL chose: P2P, SHM, GDRDMA or NET. Notes name the ranks that are not in the log,
    and the order of NCCL's first ring. Raises UserError if a log contradicts itself or tells of no GPU.
    """
    log = _JobLog()
    for number, prefix, message in _list_lines(text):
        _take_message(log, prefix, message, f"{name}:{number}")
    if not log.hosts:
        raise UserError(f"{name}:1: no line of NCCL with a host and a GPU; expected a log of NCCL_DEBUG=INFO")
    processes = [process for host in log.hosts.values() for process in host.processes.values()]
    largest = max((size for process in processes for size in process.ranks), default=0)
    places = _place_ranks(processes, largest, name)
    for host in log.hosts.values():
        host.number_gpus()
    nodes, links = [], []
    for host in _order_hosts(log, largest):
        node = _make_node(host, name)
        nodes.append(node)
        links += _list_links(host, node, places)
    return Cluster("nccl_log", tuple(nodes), tuple(links), notes=tuple(_list_notes(log, places, largest)))


def _list_lines(text: str) -> Iterator[tuple[int, re.Match[str], str]]:
    """Yield (line number, its prefix, message) of NCCL's lines, without a copy of the whole text."""
    at, counted, number = text.find(_MARK), 0, 1
    while at >= 0:
        end = text.find("\n", at)
        end = len(text) if end < 0 else end
        prefix = _PREFIX.search(text[max(0, at - _PREFIX_CHARACTERS) : at].rpartition("\n")[2])
        # Line numbers are counted from the last hit on, so the whole text is scanned once.
        number += text.count("\n", counted, at)
        counted = at
        if prefix is not None:
            yield number, prefix, text[at + len(_MARK) : min(end, at + MAX_LINE)]
        at = text.find(_MARK, end)


def _take_message(log: _JobLog, prefix: re.Match[str], message: str, where: str) -> None:
    host, device = log.hosts.setdefault(prefix[1], _Host(prefix[1])), int(prefix[4])
    process = host.processes.setdefault((prefix[2], device), _Process(host.name, device))
    if len(log.hosts) > MAX_HOSTS or len(host.processes) > MAX_PROCESSES:
        raise UserError(
            f"{where}: more than {MAX_HOSTS} hosts, or {MAX_PROCESSES} processes on one; not the log of one job"
        )
    if message.startswith("comm "):
        _take_communicator(process, message, where)
    elif message.startswith("NET/"):
        _take_nics(host, message, where)
    elif message.startswith("Channel "):
        if ring := _RING.fullmatch(message.rstrip()):
            _take_ring(log, ring)
        elif via := _VIA.match(message):
            _take_transport(host, via)


def _take_ring(log: _JobLog, ring: re.Match[str]) -> None:
    ranks = " ".join(ring[3].split())
    entry = (ring[1], ranks)
    rings = log.rings.setdefault(len(ranks.split()), [])
    # Every rank prints every ring, so most are repeats.
    if len(rings) < _MAX_RINGS and entry not in rings:
        rings.append(entry)


def _take_communicator(process: _Process, message: str, where: str) -> None:
    match = _COMM.match(message)
    if match is None:
        return
    rank, size = int(match[1]), int(match[2])
    if rank >= size:
        raise UserError(f"{where}: rank {rank} of {size}; expected a rank below that")
    bus = _format_bus(match[5])
    if process.bus not in (None, bus) or int(match[3]) != process.device:
        raise UserError(
            f"{where}: GPU {bus}, cudaDev {match[3]}, of a process that had {process.bus}, cudaDev {process.device}; "
            "expected the log of one job"
        )
    process.bus = bus
    process.physical = int(match[4]) if match[4] is not None else process.physical
    # A job makes several communicators; the largest is the whole job (see _place_ranks).
    process.ranks.setdefault(size, rank)


def _format_bus(digits: str) -> str:
    """Write busId, the digits of a PCI address as one hexadecimal number, as Linux does: cb000 is 0000:cb:00.0."""
    padded = digits.lower().zfill(9)
    return f"{padded[:-5]}:{padded[-5:-3]}:{padded[-3:-1]}.{padded[-1]}"


def _take_nics(host: _Host, message: str, where: str) -> None:
    # With TCP sockets or OFI there are no InfiniBand devices to list.
    match = _NETS.match(message)
    if match is None or match[1] != "IB":
        return
    listed = {int(index): (device, _LAYERS[layer]) for index, device, _, layer in _NET.findall(match[2])}
    if len(listed) != match[2].count("["):
        raise UserError(f"{where}: adapters not understood: {match[2][:60]!r}; expected [0]mlx5_0:1/IB [1]...")
    host.nics = host.nics or listed
    if host.nics != listed:
        raise UserError(f"{where}: {host.name} lists other adapters than before; expected the log of one job")


def _take_transport(host: _Host, via: re.Match[str]) -> None:
    receives = via[3] == "receive"
    rank, other = (int(via[2]), int(via[1])) if receives else (int(via[1]), int(via[2]))
    kind, nic = ("P2P" if via[4] == "direct" else via[4]), None
    if kind == "NET":
        index = re.match(r"/\w{1,20}/(\d{1,3})", via[5])
        nic = int(index[1]) if index else None
        kind = "GDRDMA" if "/GDRDMA" in via[5] else "NET"
    host.transports[rank, other, kind, nic] = None


def _place_ranks(processes: Iterable[_Process], largest: int, name: str) -> dict[int, _Process]:
    """Map the ranks of the largest communicator to their processes."""
    places: dict[int, _Process] = {}
    for process in processes:
        rank = process.ranks.get(largest)
        if rank is None:
            continue
        other = places.setdefault(rank, process)
        if (other.host, other.bus) != (process.host, process.bus):
            raise UserError(
                f"{name}:1: rank {rank} of {largest} on {other.host} and on {process.host}; expected the log of one job"
            )
    return places


def _order_hosts(log: _JobLog, largest: int) -> list[_Host]:
    """Order hosts by their lowest rank, then by name."""
    lowest = {
        host.name: min(process.ranks.get(largest, 1 << 30) for process in host.processes.values())
        for host in log.hosts.values()
    }
    return sorted(log.hosts.values(), key=lambda host: (lowest[host.name], natural_key(host.name)))


def _make_node(host: _Host, name: str) -> Node:
    if len(host.gpus) > MAX_DEVICES:
        raise UserError(f"{name}:1: {len(host.gpus)} GPUs on {host.name}; not the log of one job")
    addresses = {host.identify(process): process.bus for process in host.processes.values() if process.bus is not None}
    ordered = sorted(host.gpus, key=host.gpus.__getitem__)
    gpus = tuple(Gpu(f"GPU{host.gpus[key]}", pci=addresses.get(key)) for key in ordered)
    nics = tuple(Nic(f"NIC{index}", device, layer=layer) for index, (device, layer) in sorted(host.nics.items()))
    return Node(host.name, gpus, nics)


def _list_links(host: _Host, node: Node, places: Mapping[int, _Process]) -> list[Link]:
    """List the links inside a node, each with the nearest transport that a channel has."""
    order = {id: index for index, id in enumerate([*(gpu.id for gpu in node.gpus), *(nic.id for nic in node.nics)])}
    kinds: dict[tuple[str, str], str] = {}
    for rank, other, kind, nic in host.transports:
        ends = [_find_end(host, places.get(rank)), _find_end(host, places.get(other)) if nic is None else f"NIC{nic}"]
        listed = sorted((end for end in ends if end is not None and end in order), key=order.__getitem__)
        if len(listed) == 2 and listed[0] != listed[1]:
            pair = listed[0], listed[1]
            # Channels of one pair may differ; the nearest transport shows what the hardware can do.
            kinds[pair] = min(kinds.get(pair, kind), kind, key=_NEAR_TO_FAR.index)
    return [
        Link(host.name, a, b, kinds[a, b]) for a, b in sorted(kinds, key=lambda pair: (order[pair[0]], order[pair[1]]))
    ]


def _find_end(host: _Host, process: _Process | None) -> str | None:
    return host.find_gpu(process) if process is not None and process.host == host.name else None


def _list_notes(log: _JobLog, places: Mapping[int, _Process], largest: int) -> Iterator[str]:
    yield "links are the transports that NCCL chose; how devices are joined is not in its log (NCCL_TOPO_DUMP_FILE)"
    if not largest:
        yield "no line tells the ranks ('comm ... rank ... nranks'): hosts are in the order of their names"
    elif len(places) < largest:
        missing = [rank for rank in range(min(largest, max(places) + 17)) if rank not in places]
        shown = ", ".join(map(str, missing[:8])) + (" ..." if largest - len(places) > 8 else "")
        yield (
            f"{largest - len(places)} of {largest} ranks are not in this log ({shown}): some GPUs, links and hosts may "
            "be missing"
        )
    if rings := log.rings.get(largest):
        number, ranks = rings[0]
        words = ranks.split()
        shown = " ".join(words[:32]) + (" ..." if len(words) > 32 else "")
        yield f"NCCL's rings over all {largest} ranks: {len(rings)} in this log; channel {number} is {shown}"
