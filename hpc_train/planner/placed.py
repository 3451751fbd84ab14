"""placed: what the real switches make of a candidate's communication.

The closed form takes all switches of a level to be alike, and filled one after the other. Where cluster.topology tells
of the real ones, ranks are placed on its first nodes as those of a run are (hpc_train.placement), and what an axis
takes of a step is multiplied by what the placement costs over what it would cost on switches that are alike.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace

from hpc_train.cluster.tree import Uplink
from hpc_train.config.degrees import resolve
from hpc_train.config.run import RunConfig
from hpc_train.placement.algorithm import Backend
from hpc_train.placement.cost import cost
from hpc_train.placement.fabric import Fabric
from hpc_train.placement.figures import figures_of
from hpc_train.placement.from_config import fabric_at, ranks_per_node
from hpc_train.placement.locate import Host, Locations, locate
from hpc_train.placement.search import place
from hpc_train.planner.estimate import Estimate
from hpc_train.planner.switches import paths_in, switches_of
from hpc_train.traffic.flows import flows

_PARTS = {"tp": "tensor", "cp": "context", "pp": "pipeline"}
"""Axis -> part of the step; whatever goes over other axes, or over several, is of `data`."""


def placed(config: RunConfig, ranks: int, found: Estimate) -> Estimate:
    """The estimate of one job on the first nodes of cluster.topology; as it is without one, and where it has too few.

    Raises UserError for a topology that cannot be read or tells of no switch.
    """
    nodes = nodes_of(config, ranks)
    if not nodes:
        return found
    by = _factors(config, ranks, nodes)
    spent = replace(found.time, **{name: getattr(found.time, name) * it for name, it in by.items()})
    faster = found.time.step / spent.step
    rates = {name: getattr(found, name) * faster for name in ("mfu", "hfu", "tokens_per_second")}
    return replace(found, time=spent, **rates)


def nodes_of(config: RunConfig, ranks: int) -> tuple[str, ...]:
    """The first nodes of cluster.topology, as many as the ranks need; none without one, or if it has too few."""
    paths = paths_in(config.cluster)
    count = math.ceil(ranks / ranks_per_node(config))
    return tuple(paths)[:count] if len(paths) >= count else ()


def _factors(config: RunConfig, ranks: int, nodes: Sequence[str]) -> dict[str, float]:
    """Part of the step -> its time over that on switches that are alike."""
    sizes, moved = asdict(resolve(config.parallel, ranks)), flows(config, ranks)
    backend: Backend = "nccl" if config.cluster.node.gpus else "gloo"
    where = locate(config.cluster, [Host(name) for name in nodes], in_slurm=False)
    real, alike = _fabric(config, where), _fabric(config, _alike(config, nodes))
    if not moved:
        return {}
    before = _parts(cost(alike, sizes, moved, backend=backend).per_axis)
    after = _parts(place(real, sizes, moved, backend).placed.per_axis)
    return {name: after[name] / seconds for name, seconds in before.items() if seconds}


def _fabric(config: RunConfig, where: Locations) -> Fabric:
    """NVLink domains are filled in the order of the nodes, as the closed form has them."""
    within = config.cluster.node.nvlink_domain_gpus // max(config.cluster.node.gpus, 1)
    domains = {node: f"domain{at // within}" for at, node in enumerate(where.nodes)} if within > 1 else {}
    return fabric_at(config, replace(where, domains=domains), ranks_per_node(config))


def _alike(config: RunConfig, nodes: Sequence[str]) -> Locations:
    """Switches of the sizes that the closed form knows."""
    leaf, group = switches_of(config.cluster, figures_of(config.cluster))
    sizes = [(name, it.nodes) for name, it in (("group", group), ("leaf", leaf)) if math.isfinite(it.nodes)]
    paths = {node: tuple(f"{name}{int(at // size)}" for name, size in sizes) for at, node in enumerate(nodes)}
    uplinks = {path[:end]: Uplink(int(size)) for path in paths.values() for end, (_, size) in enumerate(sizes, start=1)}
    return Locations(tuple(nodes), paths, uplinks=uplinks)


def _parts(per_axis: Mapping[str, float]) -> dict[str, float]:
    found: dict[str, float] = {}
    for axes, seconds in per_axis.items():
        part = _PARTS.get(axes, "data")
        found[part] = found.get(part, 0.0) + seconds
    return found
