"""Draw a cluster as a tree in the terminal: switches, NVLink domains, and each kind of node once.

The devices of a node take a few lines instead of a matrix of pairs: links by kind, NICs by the GPUs next to them.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence

from rich.text import Text
from rich.tree import Tree

from hpc_train.cluster.hostlist import fold_names, shorten_names
from hpc_train.cluster.similar_sets import DisjointSets
from hpc_train.cluster.spec import Cluster, Gpu, Link, Nic, Node
from hpc_train.cluster.switch_tree import SwitchUnit, build_units, find_rails, find_scalable_units, list_nodes_under
from hpc_train.terminal import one_line

MAX_CHILDREN = 40
"""Branches below one switch that are drawn; the others share one line."""


def build_tree_view(cluster: Cluster) -> Tree:
    """Build the tree to print."""
    forest = build_units(cluster)
    tree = Tree(_make_text(_summarise_cluster(cluster), "bold"))
    _add_rails(tree, cluster)
    _add_units(tree, forest)
    _add_domains(tree, cluster.nodes)
    _add_nodes(tree, cluster, {node for unit in forest for node in list_nodes_under(unit)})
    return tree


def _summarise_cluster(cluster: Cluster) -> str:
    hanging = {name for switch in cluster.switches for name in switch.nodes}
    nodes = len(hanging | {node.name for node in cluster.nodes})
    gpus, nics = (sum(map(len, lists)) for lists in ([n.gpus for n in cluster.nodes], [n.nics for n in cluster.nodes]))
    counts = [(nodes, "node"), (gpus, "GPU"), (nics, "NIC"), (len(cluster.switches), "switch")]
    return f"{cluster.kind}: {', '.join(_format_count(number, word) for number, word in counts if number) or 'nothing'}"


def _format_count(number: int, word: str) -> str:
    plural = "es" if word.endswith("ch") else "s"
    return f"{number} {word}{plural * (number != 1)}"


def _make_text(text: str, style: str = "") -> Text:
    return Text(one_line(text), style=style)


def _add_units(tree: Tree, units: Sequence[SwitchUnit]) -> None:
    for unit in units[:MAX_CHILDREN]:
        _add_unit(tree, unit)
    if rest := units[MAX_CHILDREN:]:
        count = sum(1 for unit in rest for _ in list_nodes_under(unit))
        names = fold_names(_fold_switches(unit) for unit in rest)
        tree.add(_make_text(f"{len(rest)} more, {_format_count(count, 'node')}: {names}", "dim"))


def _add_unit(tree: Tree, unit: SwitchUnit) -> None:
    """Add a unit. A leaf and its nodes share one line; a higher unit says how many nodes are below it."""
    line = Text.assemble((_fold_switches(unit), "cyan"))
    if unit.nodes:
        line.append(f": {fold_names(unit.nodes)}")
    count = sum(1 for _ in list_nodes_under(unit))
    line.append(f" ({_format_count(count, 'node')})", "dim")
    _add_units(tree.add(line), unit.units)


def _fold_switches(unit: SwitchUnit) -> str:
    return fold_names(unit.switches)


def _add_rails(tree: Tree, cluster: Cluster) -> None:
    """Add a line on rails, if the source says which NIC is on which leaf."""
    of_leaf = find_rails(cluster)
    units = [unit for unit in find_scalable_units(cluster) if len(unit) > 1]
    if len(units) > 1 and len(of_leaf) > len(units):
        pure = sum(len(names) == 1 for names in of_leaf.values())
        tree.add(_make_text(f"{len(units)} scalable units; {pure} of {len(of_leaf)} leaves serve one rail"))


def _add_domains(tree: Tree, nodes: Sequence[Node]) -> None:
    domains: dict[str, dict[str, int]] = {}
    for node in nodes:
        for gpu in node.gpus:
            if gpu.clique is not None:
                gpus_by_node = domains.setdefault(gpu.clique, {})
                gpus_by_node[node.name] = gpus_by_node.get(node.name, 0) + 1
    lines = [
        f"{name}: {fold_names(gpus_by_node)} ({_format_count(sum(gpus_by_node.values()), 'GPU')})"
        for name, gpus_by_node in domains.items()
    ]
    if len(lines) == 1:
        tree.add(_make_text(f"NVLink domain {lines[0]}"))
    elif lines:
        branch = tree.add(_make_text(f"{len(lines)} NVLink domains"))
        for line in [*lines[:MAX_CHILDREN], *[f"{len(lines) - MAX_CHILDREN} more"] * (len(lines) > MAX_CHILDREN)]:
            branch.add(_make_text(line))


def _add_nodes(tree: Tree, cluster: Cluster, hanging: set[str]) -> None:
    links: dict[str, list[Link]] = {}
    for link in cluster.links:
        links.setdefault(link.node, []).append(link)
    names_by_description: dict[tuple[str, ...], list[str]] = {}
    for node in cluster.nodes:
        if node.gpus or node.nics or node.name not in hanging:
            names_by_description.setdefault(_describe_node(node, links.get(node.name, ())), []).append(node.name)
    for (first, *more), names in names_by_description.items():
        branch = tree.add(Text.assemble((shorten_names(names), "green"), f": {one_line(first)}"))
        for line in more:
            branch.add(_make_text(line))


def _describe_node(node: Node, links: Sequence[Link]) -> tuple[str, ...]:
    return (summarise_node(node), *list_node_details(node, links))


_NEAREST_FIRST = ("X", "NV", "XGMI", "C2C", "PIX", "PXB", "PHB", "NODE", "SYS")
_ACROSS = ("NV", "XGMI", "C2C")
"""Kinds that join GPUs without PCI Express."""


def summarise_node(node: Node) -> str:
    """Describe a node in one line: 8 x NVIDIA H100 80GB HBM3, 8 NICs."""
    names = Counter(gpu.name or "GPU" for gpu in node.gpus)
    parts = [f"{count} x {name}" for name, count in names.items()]
    nics = f"{len(node.nics)} NIC{'s' * (len(node.nics) != 1)}"
    return ", ".join([*parts, nics] if node.nics else parts) or "no devices listed"


def list_node_details(node: Node, links: Sequence[Link]) -> list[str]:
    """List the lines below a node's headline: GPU links, NUMA nodes, and each NIC with the GPUs next to it."""
    kinds = {frozenset((link.a, link.b)): link.kind for link in links}
    return [*_list_gpu_links(node.gpus, kinds), *_list_places(node.gpus), *_list_nics(node, kinds)]


def _list_gpu_links(gpus: Sequence[Gpu], kinds: Mapping[frozenset[str], str]) -> list[str]:
    pairs = [(a.id, b.id) for number, a in enumerate(gpus) for b in gpus[number + 1 :]]
    known_pairs = [(pair, kind) for pair in pairs if (kind := kinds.get(frozenset(pair))) is not None]
    if not known_pairs:
        return _list_link_counts(gpus)
    counts = Counter(kind for _, kind in known_pairs)
    if len(counts) == 1 and len(known_pairs) == len(pairs):
        [kind] = counts
        return [f"GPUs: {kind} all to all" if len(gpus) > 2 else f"GPUs: {kind} between the two"]
    lines = [f"GPUs: {', '.join(_format_pairs(kind, counts[kind]) for kind in sorted(counts, key=_sort_key))}"]
    islands = _find_islands([gpu.id for gpu in gpus], [pair for pair, kind in known_pairs if kind.startswith(_ACROSS)])
    if 1 < len(islands) < len(gpus):
        lines.append(f"islands: {', '.join(fold_names(island) for island in islands)}")
    return lines


def _list_link_counts(gpus: Sequence[Gpu]) -> list[str]:
    """List the number of links of each GPU, for sources that do not say where they lead."""
    counts: dict[int, list[str]] = {}
    for gpu in gpus:
        if gpu.nvlinks is not None:
            counts.setdefault(gpu.nvlinks, []).append(gpu.id)
    if not any(counts):
        return []
    if len(counts) == 1:
        return [f"GPUs: {next(iter(counts))} links each"]
    return [f"{fold_names(ids)}: {count} links" for count, ids in counts.items()]


def _format_pairs(kind: str, count: int) -> str:
    return f"{kind} {count} pair{'s' * (count != 1)}"


def _find_islands(ids: Sequence[str], pairs: Iterable[tuple[str, str]]) -> list[list[str]]:
    """Group GPUs that reach each other over their own links, directly or through others."""
    number = {name: index for index, name in enumerate(ids)}
    islands = DisjointSets(len(ids))
    for a, b in pairs:
        islands.join(number[a], number[b])
    groups: dict[int, list[str]] = {}
    for name in ids:
        groups.setdefault(islands.find(number[name]), []).append(name)
    return list(groups.values())


def _list_places(gpus: Sequence[Gpu]) -> list[str]:
    """List GPUs by NUMA node and processors, one line each."""
    places: dict[tuple[str, ...], list[str]] = {}
    for gpu in gpus:
        facts = [f"NUMA {gpu.numa}"] * (gpu.numa is not None)
        facts += [f"CPUs {gpu.cpus}"] * (gpu.cpus is not None)
        if facts:
            places.setdefault(tuple(facts), []).append(gpu.id)
    return [f"{fold_names(ids)}: {', '.join(facts)}" for facts, ids in places.items()]


def _list_nics(node: Node, kinds: Mapping[frozenset[str], str]) -> list[str]:
    """List NICs; those that differ only in their name share a line."""
    lines: dict[tuple[str, str], list[str]] = {}
    for nic in node.nics:
        lines.setdefault((_find_nearest_gpus(nic, node.gpus, kinds), _format_nic_facts(nic)), []).append(
            nic.device or nic.id
        )
    return [f"{fold_names(names)}{near}{facts}" for (near, facts), names in lines.items()]


def _find_nearest_gpus(nic: Nic, gpus: Sequence[Gpu], kinds: Mapping[frozenset[str], str]) -> str:
    kind_by_gpu = {gpu.id: kind for gpu in gpus if (kind := kinds.get(frozenset((nic.id, gpu.id)))) is not None}
    if not kind_by_gpu:
        return ""
    best = min(kind_by_gpu.values(), key=_sort_key)
    near = [gpu for gpu, kind in kind_by_gpu.items() if kind == best]
    return f" {best} {'all GPUs' if len(near) == len(gpus) > 1 else fold_names(near)}"


def _format_nic_facts(nic: Nic) -> str:
    facts = [
        f"{nic.gbit_s:g} Gbit/s" if nic.gbit_s else "",
        nic.layer or "",
        f"NUMA {nic.numa}" * (nic.numa is not None),
    ]
    facts.append("down" if nic.active is False else "")
    shown = [fact for fact in facts if fact]
    return f" ({', '.join(shown)})" if shown else ""


def _sort_key(kind: str) -> tuple[int, int, str]:
    """Sort key of a link kind, nearest first; of two NVLink counts the larger is nearer."""
    name, count = re.fullmatch(r"(.*?)(\d*)", kind, re.DOTALL).groups()  # type: ignore[union-attr]
    order = _NEAREST_FIRST.index(name) if name in _NEAREST_FIRST else len(_NEAREST_FIRST)
    return order, -int(count[:9] or 0), kind
