"""The devices of a node in a few lines: links by kind, NICs by the GPUs next to them, instead of a matrix of pairs."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence

from hpc_train.cluster.spec import Gpu, Link, Nic, Node
from hpc_train.topology.folding import fold

_NEAREST_FIRST = ("X", "NV", "XGMI", "C2C", "PIX", "PXB", "PHB", "NODE", "SYS")
_ACROSS = ("NV", "XGMI", "C2C")
"""Kinds that join GPUs without PCI Express."""


def headline(node: Node) -> str:
    """What it has, in one line: 8 x NVIDIA H100 80GB HBM3, 8 NICs."""
    names = Counter(gpu.name or "GPU" for gpu in node.gpus)
    parts = [f"{count} x {name}" for name, count in names.items()]
    nics = f"{len(node.nics)} NIC{'s' * (len(node.nics) != 1)}"
    return ", ".join([*parts, nics] if node.nics else parts) or "no devices listed"


def details(node: Node, links: Sequence[Link]) -> list[str]:
    """The lines below the headline: GPU links, where GPUs are, and each NIC with the GPUs next to it."""
    kinds = {frozenset((link.a, link.b)): link.kind for link in links}
    return [*_gpu_links(node.gpus, kinds), *_places(node.gpus), *_nics(node, kinds)]


def _gpu_links(gpus: Sequence[Gpu], kinds: Mapping[frozenset[str], str]) -> list[str]:
    pairs = [(a.id, b.id) for number, a in enumerate(gpus) for b in gpus[number + 1 :]]
    known = [(pair, kind) for pair in pairs if (kind := kinds.get(frozenset(pair))) is not None]
    if not known:
        return _link_counts(gpus)
    counts = Counter(kind for _, kind in known)
    if len(counts) == 1 and len(known) == len(pairs):
        [kind] = counts
        return [f"GPUs: {kind} all to all" if len(gpus) > 2 else f"GPUs: {kind} between the two"]
    lines = [f"GPUs: {', '.join(_pairs(kind, counts[kind]) for kind in sorted(counts, key=_distance))}"]
    islands = _islands([gpu.id for gpu in gpus], [pair for pair, kind in known if kind.startswith(_ACROSS)])
    if 1 < len(islands) < len(gpus):
        lines.append(f"islands: {', '.join(fold(island) for island in islands)}")
    return lines


def _link_counts(gpus: Sequence[Gpu]) -> list[str]:
    """Where only the number of each GPU's links is known."""
    counts: dict[int, list[str]] = {}
    for gpu in gpus:
        if gpu.nvlinks is not None:
            counts.setdefault(gpu.nvlinks, []).append(gpu.id)
    if not any(counts):
        return []
    if len(counts) == 1:
        return [f"GPUs: {next(iter(counts))} links each"]
    return [f"{fold(ids)}: {count} links" for count, ids in counts.items()]


def _pairs(kind: str, count: int) -> str:
    return f"{kind} {count} pair{'s' * (count != 1)}"


def _islands(ids: Sequence[str], pairs: Iterable[tuple[str, str]]) -> list[list[str]]:
    """GPUs that reach each other over their own links, directly or through others."""
    island = {name: name for name in ids}
    for a, b in pairs:
        old, new = island[b], island[a]
        island = {name: new if of == old else of for name, of in island.items()}
    groups: dict[str, list[str]] = {}
    for name in ids:
        groups.setdefault(island[name], []).append(name)
    return list(groups.values())


def _places(gpus: Sequence[Gpu]) -> list[str]:
    """GPUs of one NUMA node and one set of processors in one line."""
    places: dict[tuple[str, ...], list[str]] = {}
    for gpu in gpus:
        facts = [f"NUMA {gpu.numa}"] * (gpu.numa is not None)
        facts += [f"CPUs {gpu.cpus}"] * (gpu.cpus is not None)
        if facts:
            places.setdefault(tuple(facts), []).append(gpu.id)
    return [f"{fold(ids)}: {', '.join(facts)}" for facts, ids in places.items()]


def _nics(node: Node, kinds: Mapping[frozenset[str], str]) -> list[str]:
    """NICs that differ in their name only share a line."""
    lines: dict[tuple[str, str], list[str]] = {}
    for nic in node.nics:
        lines.setdefault((_nearest(nic, node.gpus, kinds), _nic_facts(nic)), []).append(nic.device or nic.id)
    return [f"{fold(names)}{near}{facts}" for (near, facts), names in lines.items()]


def _nearest(nic: Nic, gpus: Sequence[Gpu], kinds: Mapping[frozenset[str], str]) -> str:
    known = {gpu.id: kind for gpu in gpus if (kind := kinds.get(frozenset((nic.id, gpu.id)))) is not None}
    if not known:
        return ""
    best = min(known.values(), key=_distance)
    near = [gpu for gpu, kind in known.items() if kind == best]
    return f" {best} {'all GPUs' if len(near) == len(gpus) > 1 else fold(near)}"


def _nic_facts(nic: Nic) -> str:
    facts = [
        f"{nic.gbit_s:g} Gbit/s" if nic.gbit_s else "",
        nic.layer or "",
        f"NUMA {nic.numa}" * (nic.numa is not None),
    ]
    facts.append("down" if nic.active is False else "")
    known = [fact for fact in facts if fact]
    return f" ({', '.join(known)})" if known else ""


def _distance(kind: str) -> tuple[int, int, str]:
    """Nearest first; of two NVLink counts the larger."""
    name, count = re.fullmatch(r"(.*?)(\d*)", kind, re.DOTALL).groups()  # type: ignore[union-attr]
    order = _NEAREST_FIRST.index(name) if name in _NEAREST_FIRST else len(_NEAREST_FIRST)
    return order, -int(count[:9] or 0), kind
