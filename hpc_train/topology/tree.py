"""A cluster as a tree that a person can read: switches, NVLink domains, and what is in a node, each kind once."""

from __future__ import annotations

from collections.abc import Sequence

from rich.text import Text
from rich.tree import Tree

from hpc_train.cluster.spec import Cluster, Link, Node
from hpc_train.cluster.tree import Unit, nodes_under, rails, scalable_units, units_of
from hpc_train.topology.folding import fold, heading, printable
from hpc_train.topology.hardware import details, headline

MOST_CHILDREN = 40
"""Branches below one switch that are drawn; the others share one line."""


def tree_of(cluster: Cluster) -> Tree:
    """The tree to print."""
    forest = units_of(cluster)
    tree = Tree(_text(_summary(cluster), "bold"))
    _add_rails(tree, cluster)
    _add_units(tree, forest)
    _add_domains(tree, cluster.nodes)
    _add_nodes(tree, cluster, {node for unit in forest for node in nodes_under(unit)})
    return tree


def _summary(cluster: Cluster) -> str:
    hanging = {name for switch in cluster.switches for name in switch.nodes}
    nodes = len(hanging | {node.name for node in cluster.nodes})
    gpus, nics = (sum(map(len, them)) for them in ([n.gpus for n in cluster.nodes], [n.nics for n in cluster.nodes]))
    counts = [(nodes, "node"), (gpus, "GPU"), (nics, "NIC"), (len(cluster.switches), "switch")]
    return f"{cluster.kind}: {', '.join(_count(number, word) for number, word in counts if number) or 'nothing'}"


def _count(number: int, word: str) -> str:
    plural = "es" if word.endswith("ch") else "s"
    return f"{number} {word}{plural * (number != 1)}"


def _text(text: str, style: str = "") -> Text:
    return Text(printable(text), style=style)


def _add_units(tree: Tree, units: Sequence[Unit]) -> None:
    for unit in units[:MOST_CHILDREN]:
        _add_unit(tree, unit)
    if rest := units[MOST_CHILDREN:]:
        count = sum(1 for unit in rest for _ in nodes_under(unit))
        tree.add(_text(f"{len(rest)} more, {_count(count, 'node')}: {fold(_name(unit) for unit in rest)}", "dim"))


def _add_unit(tree: Tree, unit: Unit) -> None:
    """A leaf and its nodes are one line; above leaves a line says how many nodes are below."""
    line = Text.assemble((_name(unit), "cyan"))
    if unit.nodes:
        line.append(f": {fold(unit.nodes)}")
    count = sum(1 for _ in nodes_under(unit))
    line.append(f" ({_count(count, 'node')})", "dim")
    _add_units(tree.add(line), unit.units)


def _name(unit: Unit) -> str:
    return fold(unit.switches)


def _add_rails(tree: Tree, cluster: Cluster) -> None:
    """Whether the fabric is one of rails, where the source tells which NIC is on which leaf."""
    of_leaf = rails(cluster)
    units = [unit for unit in scalable_units(cluster) if len(unit) > 1]
    if len(units) > 1 and len(of_leaf) > len(units):
        pure = sum(len(names) == 1 for names in of_leaf.values())
        tree.add(_text(f"{len(units)} scalable units; {pure} of {len(of_leaf)} leaves serve one rail"))


def _add_domains(tree: Tree, nodes: Sequence[Node]) -> None:
    domains: dict[str, dict[str, int]] = {}
    for node in nodes:
        for gpu in node.gpus:
            if gpu.clique is not None:
                held = domains.setdefault(gpu.clique, {})
                held[node.name] = held.get(node.name, 0) + 1
    lines = [f"{name}: {fold(held)} ({_count(sum(held.values()), 'GPU')})" for name, held in domains.items()]
    if len(lines) == 1:
        tree.add(_text(f"NVLink domain {lines[0]}"))
    elif lines:
        branch = tree.add(_text(f"{len(lines)} NVLink domains"))
        for line in [*lines[:MOST_CHILDREN], *[f"{len(lines) - MOST_CHILDREN} more"] * (len(lines) > MOST_CHILDREN)]:
            branch.add(_text(line))


def _add_nodes(tree: Tree, cluster: Cluster, hanging: set[str]) -> None:
    links: dict[str, list[Link]] = {}
    for link in cluster.links:
        links.setdefault(link.node, []).append(link)
    alike: dict[tuple[str, ...], list[str]] = {}
    for node in cluster.nodes:
        if node.gpus or node.nics or node.name not in hanging:
            alike.setdefault(_lines(node, links.get(node.name, ())), []).append(node.name)
    for (first, *more), names in alike.items():
        branch = tree.add(Text.assemble((heading(names), "green"), f": {printable(first)}"))
        for line in more:
            branch.add(_text(line))


def _lines(node: Node, links: Sequence[Link]) -> tuple[str, ...]:
    return (headline(node), *details(node, links))
