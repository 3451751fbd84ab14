"""Read topologies in YAML: Slurm's topology.yaml (25.05 and newer), and the clusters that NVIDIA's Topograph simulates.

YAML is read with the line of everything, so that a message can name it; scalars stay text, so that a node called 0010
keeps its name. topology.yaml has named topologies of the kinds tree, block, flat, ring and torus3d.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass
from itertools import product
from math import prod

import yaml  # type: ignore[import-untyped]

from hpc_train.cluster.readers.slurm.slurm_records import (
    ListedUnit,
    build_cluster,
    check_defined,
    check_disjoint,
    check_single_name,
    collect_units,
    expand_names,
    parse_link_speed,
)
from hpc_train.cluster.spec import Cluster
from hpc_train.errors import UserError


@dataclass(frozen=True)
class YamlValue:
    """A value of a YAML file; scalars stay text, so that a node called 0010 or 1e3 keeps its name."""

    file: str
    node: yaml.Node

    @property
    def line(self) -> int:
        return int(self.node.start_mark.line) + 1

    def error(self, what: str) -> UserError:
        return UserError(f"{self.file}:{self.line}: {what}")

    def mapping(self, allowed: Collection[str] | None = None) -> dict[str, YamlValue]:
        """Return the entries. Raises UserError if it is no mapping, or has a key twice or one that is not `allowed`."""
        if not isinstance(self.node, yaml.MappingNode):
            raise self.error(f"expected a mapping{_list_choices(allowed)}")
        entries: dict[str, YamlValue] = {}
        for key, value in self.node.value:
            name = YamlValue(self.file, key).text()
            if name in entries or (allowed is not None and name not in allowed):
                what = "stands there twice" if name in entries else f"is not known here{_list_choices(allowed)}"
                raise YamlValue(self.file, key).error(f"{name[:60]!r} {what}")
            entries[name] = YamlValue(self.file, value)
        return entries

    def items(self) -> list[YamlValue]:
        """Return the elements of a list. Raises UserError if it is not a list."""
        if not isinstance(self.node, yaml.SequenceNode):
            raise self.error("expected a list")
        return [YamlValue(self.file, node) for node in self.node.value]

    def text(self) -> str:
        """Return a scalar. Raises UserError for anything else, and for an empty one."""
        if not isinstance(self.node, yaml.ScalarNode) or not self.node.value:
            raise self.error("expected a name, a number or a host list")
        return str(self.node.value)

    def name(self) -> str:
        return check_single_name(self.text(), f"{self.file}:{self.line}: ")

    def number(self) -> int:
        if not re.fullmatch("[0-9]{1,9}", text := self.text()):
            raise self.error(f"{text[:60]!r}; expected a number")
        return int(text)

    def is_true(self) -> bool:
        text = self.text().lower()
        if text not in {"true", "yes", "on", "1", "false", "no", "off", "0"}:
            raise self.error(f"{text[:60]!r}; expected true or false")
        return text in {"true", "yes", "on", "1"}

    def names(self) -> tuple[str, ...]:
        """Return the names of a host list, or of a list of them, each once; () for nothing."""
        if isinstance(self.node, yaml.ScalarNode) and not self.node.value:
            return ()
        parts = self.items() if isinstance(self.node, yaml.SequenceNode) else [self]
        expanded = (name for part in parts for name in expand_names(part.text(), f"{part.file}:{part.line}"))
        return tuple(dict.fromkeys(expanded))


def parse_yaml(text: str, file: str) -> YamlValue:
    """Parse the one document of a text. Raises UserError `FILE:LINE: ...` for text that is no YAML."""
    try:
        # libyaml's loader is faster, but a file of 100,000 brackets crashes the process in it.
        root = yaml.compose(text, Loader=yaml.SafeLoader)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        raise UserError(f"{file}:{mark.line + 1 if mark else 1}: {error.problem or 'not YAML'}") from None
    except (yaml.YAMLError, ValueError) as error:
        raise UserError(f"{file}: not YAML ({str(error).splitlines()[0]})") from None
    except RecursionError:
        raise UserError(f"{file}: nested too deep; not a topology") from None
    if root is None:
        raise UserError(f"{file}: nothing in it")
    return YamlValue(file, root)


def _list_choices(names: Collection[str] | None) -> str:
    return f"; expected {', '.join(sorted(names))}" if names else ""


_FIRST = re.compile(r"^[ \t]*-[ \t]+[\"']?topology[\"']?[ \t]*:", re.MULTILINE)
_LARGEST_TORUS = 1 << 20
"""Cells."""


def matches_topology_yaml(text: str) -> bool:
    """Whether the text is a YAML list whose entries begin with `topology:`."""
    return bool(_FIRST.search(text))


def read_topology_yaml(text: str, name: str) -> Cluster:
    """Read the topology that the cluster itself uses.

    That is the first with `cluster_default: true`, else the first of the file. One file may describe the same nodes
    several times, for different partitions: putting all of them into one Cluster would put nodes on switches that were
    never together. `read_named_topologies` returns each.
    """
    return next(iter(read_named_topologies(text, name).values()))


def read_named_topologies(text: str, name: str) -> dict[str, Cluster]:
    """Read every topology of the file by its name, the default one first.

    Kinds slurm_tree, slurm_block, slurm_flat (no switches, no nodes: it names none), slurm_ring and slurm_torus3d (one
    switch a torus, its nodes by coordinate, x fastest). Raises UserError `FILE:LINE: ...` for everything that Slurm
    refuses too, and for a node in two blocks, rings or toruses.
    """
    clusters: dict[str, Cluster] = {}
    default: str | None = None
    root = parse_yaml(text, name)
    for entry in root.items():
        fields = entry.mapping({"topology", "cluster_default", *_KINDS})
        if "topology" not in fields:
            raise entry.error("a topology without a name; expected topology: NAME")
        title = fields["topology"].text()
        if title in clusters:
            raise entry.error(f"topology {title[:60]} is there twice")
        clusters[title] = _read_topology(entry, fields)
        if "cluster_default" in fields and fields["cluster_default"].is_true():
            default = default if default is not None else title
    if not clusters:
        raise root.error("no topology; expected - topology: NAME")
    return clusters if default is None else {default: clusters.pop(default), **clusters}


def _read_topology(entry: YamlValue, fields: Mapping[str, YamlValue]) -> Cluster:
    kinds = [kind for kind in _KINDS if kind in fields]
    if len(kinds) != 1:
        raise entry.error(f"expected exactly one of {', '.join(_KINDS)} in a topology")
    return _KINDS[kinds[0]](fields[kinds[0]])


def _read_tree(value: YamlValue) -> Cluster:
    units = collect_units(_read_switches(value.mapping({"switches"}).get("switches", value)), value.file)
    check_defined(units, value.file)
    return build_cluster("slurm_tree", units, value.file)


def _read_switches(value: YamlValue) -> Iterator[ListedUnit]:
    for entry in value.items():
        fields = entry.mapping({"switch", "children", "nodes", "link_speed"})
        unit = _read_unit(entry, fields, "switch")
        if unit.nodes and unit.switches:
            raise entry.error(f"{unit.name} has nodes and children; expected one of them")
        yield unit


def _read_blocks(value: YamlValue) -> Cluster:
    fields = value.mapping({"block_sizes", "blocks"})
    for size in fields["block_sizes"].items() if "block_sizes" in fields else ():
        size.number()
    return _collect_disjoint("slurm_block", value, _read_named_units(fields.get("blocks", value), "block"))


def _read_ring(value: YamlValue) -> Cluster:
    rings = value.mapping({"rings"}).get("rings", value)
    return _collect_disjoint("slurm_ring", value, _read_named_units(rings, "ring"))


def _read_flat(value: YamlValue) -> Cluster:
    return Cluster("slurm_flat")


def _read_torus3d(value: YamlValue) -> Cluster:
    return _collect_disjoint("slurm_torus3d", value, _read_toruses(value.mapping({"toruses"}).get("toruses", value)))


_KINDS: dict[str, Callable[[YamlValue], Cluster]] = {
    "tree": _read_tree,
    "block": _read_blocks,
    "flat": _read_flat,
    "ring": _read_ring,
    "torus3d": _read_torus3d,
}


def _collect_disjoint(kind: str, value: YamlValue, units: Iterator[ListedUnit]) -> Cluster:
    by_name = collect_units(units, value.file)
    check_disjoint(by_name, value.file)
    return build_cluster(kind, by_name, value.file)


def _read_named_units(value: YamlValue, key: str) -> Iterator[ListedUnit]:
    for entry in value.items():
        yield _read_unit(entry, entry.mapping({key, "nodes"}), key)


def _read_unit(entry: YamlValue, fields: Mapping[str, YamlValue], key: str) -> ListedUnit:
    if key not in fields:
        raise entry.error(f"no name; expected {key}: NAME")
    nodes = fields["nodes"].names() if "nodes" in fields else ()
    switches = fields["children"].names() if "children" in fields else ()
    speed = parse_link_speed(fields["link_speed"].number()) if "link_speed" in fields else None
    return ListedUnit(fields[key].name(), entry.line, nodes, switches, link_speed=speed)


def _read_toruses(value: YamlValue) -> Iterator[ListedUnit]:
    for entry in value.items():
        fields = entry.mapping({"name", "dims", "nodes", "regions", "placements"})
        if "name" not in fields or "dims" not in fields:
            raise entry.error("expected name: and dims: of a torus")
        size = _read_xyz(fields["dims"])
        if min(size) < 1 or prod(size) > _LARGEST_TORUS:
            raise fields["dims"].error(f"dims {size}; expected positive numbers, at most {_LARGEST_TORUS} cells")
        if ("nodes" in fields) == ("regions" in fields):
            raise entry.error("expected either nodes: or regions: of a torus")
        all_nodes = {"nodes": fields["nodes"]} if "nodes" in fields else {}
        nodes = _list_cells(entry, all_nodes, (0, 0, 0), size) if all_nodes else _read_regions(fields["regions"], size)
        by_coordinate = sorted(nodes, key=lambda cell: cell[::-1])
        yield ListedUnit(fields["name"].name(), entry.line, tuple(nodes[cell] for cell in by_coordinate))


_Cell = tuple[int, int, int]


def _read_regions(value: YamlValue, size: _Cell) -> dict[_Cell, str]:
    nodes: dict[_Cell, str] = {}
    for entry in value.items():
        fields = entry.mapping({"anchor", "dims", "nodes"})
        if "dims" not in fields or "nodes" not in fields:
            raise entry.error("expected anchor:, dims: and nodes: of a region")
        anchor = _read_xyz(fields["anchor"]) if "anchor" in fields else (0, 0, 0)
        extent = _read_xyz(fields["dims"])
        if any(a + e > s for a, e, s in zip(anchor, extent, size, strict=True)):
            raise entry.error("the region reaches out of its torus")
        cells = _list_cells(entry, fields, anchor, extent)
        if nodes.keys() & cells.keys():
            raise entry.error("the region overlaps another")
        nodes.update(cells)
    return nodes


def _list_cells(entry: YamlValue, fields: Mapping[str, YamlValue], anchor: _Cell, extent: _Cell) -> dict[_Cell, str]:
    names = fields["nodes"].names()
    if len(names) != prod(extent):
        raise entry.error(f"{len(names)} nodes for {prod(extent)} cells (dims {extent})")
    z, y, x = (range(start, start + length) for start, length in zip(anchor[::-1], extent[::-1], strict=True))
    return {(i, j, k): name for (k, j, i), name in zip(product(z, y, x), names, strict=True)}


def _read_xyz(value: YamlValue) -> _Cell:
    fields = value.mapping({"x", "y", "z"})
    x, y, z = (fields[axis].number() if axis in fields else 0 for axis in "xyz")
    return x, y, z


_SECTION = re.compile(r"^(?:switches|blocks)[ \t]*:[ \t]*(?:#.*)?$", re.MULTILINE)


def matches_topograph(text: str) -> bool:
    """Whether the text is YAML with `switches:` or `blocks:` in the first column."""
    return bool(_SECTION.search(text))


def read_topograph(text: str, name: str) -> Cluster:
    """Read the cluster; kind topograph. The switches of the file come first, then leaf switches that only blocks name.

    A block hangs its nodes on its switch; accelerator domains (annotations) are not read. A model may name a switch
    below another and say no more of it. Raises UserError `FILE:LINE: ...` for another structure.
    """
    fields = parse_yaml(text, name).mapping({"switches", "blocks"})
    units = collect_units(_read_topograph_switches(fields["switches"]) if "switches" in fields else (), name)
    for unit in _read_topograph_blocks(fields["blocks"]) if "blocks" in fields else ():
        earlier = units.get(unit.name, ListedUnit(unit.name, unit.line))
        nodes = tuple(dict.fromkeys((*earlier.nodes, *unit.nodes)))
        units[unit.name] = ListedUnit(earlier.name, earlier.line, nodes, earlier.switches)
    return build_cluster("topograph", collect_units(units.values(), name), name)


def _read_topograph_switches(value: YamlValue) -> Iterator[ListedUnit]:
    for title, entry in value.mapping().items():
        fields = entry.mapping({"switches", "labels", "annotations", "nodes"})
        switches = fields["switches"].names() if "switches" in fields else ()
        nodes = fields["nodes"].names() if "nodes" in fields else ()
        yield ListedUnit(title, entry.line, nodes, switches)


def _read_topograph_blocks(value: YamlValue) -> Iterator[ListedUnit]:
    for entry in value.items():
        fields = entry.mapping({"switch", "nodes", "annotations", "labels", "name"})
        if "switch" not in fields or "nodes" not in fields:
            raise entry.error("expected switch: and nodes: of a block")
        yield ListedUnit(fields["switch"].name(), entry.line, fields["nodes"].names())
