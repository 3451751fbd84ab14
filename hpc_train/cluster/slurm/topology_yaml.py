"""topology.yaml (Slurm 25.05 and newer): named topologies of the kinds tree, block, flat, ring and torus3d."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from itertools import product
from math import prod

from hpc_train.cluster.slurm.assemble import Unit, cluster, demand_defined, demand_disjoint, gather, link_speed
from hpc_train.cluster.slurm.yaml_nodes import Value, parse
from hpc_train.cluster.spec import Cluster

_FIRST = re.compile(r"^[ \t]*-[ \t]+[\"']?topology[\"']?[ \t]*:", re.MULTILINE)
_LARGEST_TORUS = 1 << 20
"""Cells."""


def matches(text: str) -> bool:
    """Whether it is a YAML list whose entries begin with `topology:`."""
    return bool(_FIRST.search(text))


def read(text: str, name: str) -> Cluster:
    """The topology that the cluster itself uses: the first with `cluster_default: true`, else the first of the file.

    One file may describe the same nodes several times, for different partitions: putting all of them into one Cluster
    would hang nodes on switches that never were together. `read_all` gives each.
    """
    return next(iter(_default_first(text, name).values()))


def read_all(text: str, name: str) -> dict[str, Cluster]:
    """Every topology of the file by its name, the default one first.

    Kinds slurm_tree, slurm_block, slurm_flat (no switches, no nodes: it names none), slurm_ring and slurm_torus3d (one
    switch a torus, its nodes by coordinate, x fastest). Raises UserError `FILE:LINE: ...` for everything that Slurm
    refuses too, and for a node in two blocks, rings or toruses.
    """
    return _default_first(text, name)


def _default_first(text: str, name: str) -> dict[str, Cluster]:
    found: dict[str, Cluster] = {}
    default: str | None = None
    root = parse(text, name)
    for entry in root.items():
        fields = entry.mapping({"topology", "cluster_default", *_KINDS})
        if "topology" not in fields:
            raise entry.error("a topology without a name; expected topology: NAME")
        title = fields["topology"].text()
        if title in found:
            raise entry.error(f"topology {title[:60]} is there twice")
        found[title] = _topology(entry, fields)
        if "cluster_default" in fields and fields["cluster_default"].is_true():
            default = default if default is not None else title
    if not found:
        raise root.error("no topology; expected - topology: NAME")
    return found if default is None else {default: found.pop(default), **found}


def _topology(entry: Value, fields: Mapping[str, Value]) -> Cluster:
    kinds = [kind for kind in _KINDS if kind in fields]
    if len(kinds) != 1:
        raise entry.error(f"expected exactly one of {', '.join(_KINDS)} in a topology")
    return _KINDS[kinds[0]](fields[kinds[0]])


def _tree(value: Value) -> Cluster:
    units = gather(_switches(value.mapping({"switches"}).get("switches", value)), value.file)
    demand_defined(units, value.file)
    return cluster("slurm_tree", units, value.file)


def _switches(value: Value) -> Iterator[Unit]:
    for entry in value.items():
        fields = entry.mapping({"switch", "children", "nodes", "link_speed"})
        unit = _unit(entry, fields, "switch")
        if unit.nodes and unit.switches:
            raise entry.error(f"{unit.name} has nodes and children; expected one of them")
        yield unit


def _block(value: Value) -> Cluster:
    fields = value.mapping({"block_sizes", "blocks"})
    for size in fields["block_sizes"].items() if "block_sizes" in fields else ():
        size.number()
    return _disjoint("slurm_block", value, _named(fields.get("blocks", value), "block"))


def _ring(value: Value) -> Cluster:
    return _disjoint("slurm_ring", value, _named(value.mapping({"rings"}).get("rings", value), "ring"))


def _flat(value: Value) -> Cluster:
    return Cluster("slurm_flat")


def _torus3d(value: Value) -> Cluster:
    return _disjoint("slurm_torus3d", value, _toruses(value.mapping({"toruses"}).get("toruses", value)))


_KINDS: dict[str, Callable[[Value], Cluster]] = {
    "tree": _tree,
    "block": _block,
    "flat": _flat,
    "ring": _ring,
    "torus3d": _torus3d,
}


def _disjoint(kind: str, value: Value, units: Iterator[Unit]) -> Cluster:
    found = gather(units, value.file)
    demand_disjoint(found, value.file)
    return cluster(kind, found, value.file)


def _named(value: Value, key: str) -> Iterator[Unit]:
    for entry in value.items():
        yield _unit(entry, entry.mapping({key, "nodes"}), key)


def _unit(entry: Value, fields: Mapping[str, Value], key: str) -> Unit:
    if key not in fields:
        raise entry.error(f"no name; expected {key}: NAME")
    nodes = fields["nodes"].names() if "nodes" in fields else ()
    switches = fields["children"].names() if "children" in fields else ()
    speed = link_speed(fields["link_speed"].number()) if "link_speed" in fields else None
    return Unit(fields[key].name(), entry.line, nodes, switches, link_speed=speed)


def _toruses(value: Value) -> Iterator[Unit]:
    for entry in value.items():
        fields = entry.mapping({"name", "dims", "nodes", "regions", "placements"})
        if "name" not in fields or "dims" not in fields:
            raise entry.error("expected name: and dims: of a torus")
        size = _xyz(fields["dims"])
        if min(size) < 1 or prod(size) > _LARGEST_TORUS:
            raise fields["dims"].error(f"dims {size}; expected positive numbers, at most {_LARGEST_TORUS} cells")
        if ("nodes" in fields) == ("regions" in fields):
            raise entry.error("expected either nodes: or regions: of a torus")
        whole = {"nodes": fields["nodes"]} if "nodes" in fields else {}
        nodes = _cells(entry, whole, (0, 0, 0), size) if whole else _regions(fields["regions"], size)
        by_coordinate = sorted(nodes, key=lambda cell: cell[::-1])
        yield Unit(fields["name"].name(), entry.line, tuple(nodes[cell] for cell in by_coordinate))


_Cell = tuple[int, int, int]


def _regions(value: Value, size: _Cell) -> dict[_Cell, str]:
    nodes: dict[_Cell, str] = {}
    for entry in value.items():
        fields = entry.mapping({"anchor", "dims", "nodes"})
        if "dims" not in fields or "nodes" not in fields:
            raise entry.error("expected anchor:, dims: and nodes: of a region")
        anchor = _xyz(fields["anchor"]) if "anchor" in fields else (0, 0, 0)
        extent = _xyz(fields["dims"])
        if any(a + e > s for a, e, s in zip(anchor, extent, size, strict=True)):
            raise entry.error("the region reaches out of its torus")
        cells = _cells(entry, fields, anchor, extent)
        if nodes.keys() & cells.keys():
            raise entry.error("the region overlaps another")
        nodes.update(cells)
    return nodes


def _cells(entry: Value, fields: Mapping[str, Value], anchor: _Cell, extent: _Cell) -> dict[_Cell, str]:
    names = fields["nodes"].names()
    if len(names) != prod(extent):
        raise entry.error(f"{len(names)} nodes for {prod(extent)} cells (dims {extent})")
    z, y, x = (range(start, start + length) for start, length in zip(anchor[::-1], extent[::-1], strict=True))
    return {(i, j, k): name for (k, j, i), name in zip(product(z, y, x), names, strict=True)}


def _xyz(value: Value) -> _Cell:
    fields = value.mapping({"x", "y", "z"})
    x, y, z = (fields[axis].number() if axis in fields else 0 for axis in "xyz")
    return x, y, z
