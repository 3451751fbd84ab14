"""The model of a cluster that NVIDIA's Topograph simulates: switches by name, blocks of nodes under leaf switches."""

from __future__ import annotations

import re
from collections.abc import Iterator

from hpc_train.cluster.slurm.assemble import Unit, cluster, gather
from hpc_train.cluster.slurm.yaml_nodes import Value, parse
from hpc_train.cluster.spec import Cluster

_SECTION = re.compile(r"^(?:switches|blocks)[ \t]*:[ \t]*(?:#.*)?$", re.MULTILINE)


def matches(text: str) -> bool:
    """Whether it is YAML with `switches:` or `blocks:` on the first column."""
    return bool(_SECTION.search(text))


def read(text: str, name: str) -> Cluster:
    """The cluster; kind topograph. The switches of the file, then leaf switches that only blocks name.

    A block hangs its nodes on its switch; accelerator domains (annotations) are not read. A model may name a switch
    below another and say no more of it. Raises UserError `FILE:LINE: ...` for another structure.
    """
    fields = parse(text, name).mapping({"switches", "blocks"})
    units = gather(_switches(fields["switches"]) if "switches" in fields else (), name)
    for unit in _blocks(fields["blocks"]) if "blocks" in fields else ():
        known = units.get(unit.name, Unit(unit.name, unit.line))
        nodes = tuple(dict.fromkeys((*known.nodes, *unit.nodes)))
        units[unit.name] = Unit(known.name, known.line, nodes, known.switches)
    return cluster("topograph", gather(units.values(), name), name)


def _switches(value: Value) -> Iterator[Unit]:
    for title, entry in value.mapping().items():
        fields = entry.mapping({"switches", "labels", "annotations", "nodes"})
        switches = fields["switches"].names() if "switches" in fields else ()
        nodes = fields["nodes"].names() if "nodes" in fields else ()
        yield Unit(title, entry.line, nodes, switches)


def _blocks(value: Value) -> Iterator[Unit]:
    for entry in value.items():
        fields = entry.mapping({"switch", "nodes", "annotations", "labels", "name"})
        if "switch" not in fields or "nodes" not in fields:
            raise entry.error("expected switch: and nodes: of a block")
        yield Unit(fields["switch"].name(), entry.line, fields["nodes"].names())
