"""`topology place`: from a run and an allocation to the placement, its cost, and a picture of both orders."""

from __future__ import annotations

import json as json_module
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from hpc_train.config.compose import compose
from hpc_train.config.degrees import resolve
from hpc_train.config.run import RunConfig
from hpc_train.placement.advice import advice
from hpc_train.placement.algorithm import Backend
from hpc_train.placement.cost import model
from hpc_train.placement.fabric import Fabric
from hpc_train.placement.figures import assumptions
from hpc_train.placement.from_config import fabric_of, ranks_per_node
from hpc_train.placement.levels import levels_of
from hpc_train.placement.result import Placement, as_json
from hpc_train.placement.search import place as search
from hpc_train.topology.allocation import Allocation, allocation, shuffled
from hpc_train.topology.canvas import check_picture
from hpc_train.topology.folding import fold
from hpc_train.topology.report import Report
from hpc_train.topology.show import print_rich
from hpc_train.topology.sides import Sides, chosen_axes
from hpc_train.traffic.flow import Flow
from hpc_train.traffic.flows import flows


@dataclass(frozen=True)
class Options:
    """What the command line says beside the run."""

    nodes: str | None
    """Host list, in its order."""
    shuffle: int | None
    """Seed."""
    axis: str | None
    picture: str | None
    json: bool


@dataclass(frozen=True)
class Problem:
    """What is placed on what."""

    where: Allocation
    fabric: Fabric
    sizes: dict[str, int]
    """Mesh axis -> degree."""
    flows: tuple[Flow, ...]
    backend: Backend


def place(overrides: Sequence[str], config_dir: str | None, env: Mapping[str, str], options: Options) -> int:
    """Print where ranks go. Raises UserError for what is wrong in the run, the allocation or its topology."""
    if options.picture is not None:
        check_picture(Path(options.picture))
    config = compose(overrides, config_dir)
    problem = _problem(config, env, options)
    found = search(problem.fabric, problem.sizes, problem.flows, problem.backend)
    if options.picture is not None:
        _draw(problem, found, options.axis, Path(options.picture))
    notes = _notes(config, problem.where)
    wanted = advice(problem.fabric, problem.sizes, problem.flows, found)
    if options.json:
        print(json_module.dumps(_json(problem, found, notes, wanted)))
    else:
        report = Report(problem.where, problem.fabric, problem.sizes, problem.flows, found, notes, wanted)
        print_rich(*report.parts())
    return 0


def _problem(config: RunConfig, env: Mapping[str, str], options: Options) -> Problem:
    where = allocation(config, options.nodes, env)
    if options.shuffle is not None:
        where = shuffled(where, options.shuffle)
    ranks = ranks_per_node(config) if len(where.nodes) == 1 else config.cluster.ranks_per_node
    world = ranks * len(where.nodes)
    return Problem(
        where=where,
        fabric=fabric_of(config, where.nodes, ranks, where.paths, where.domains),
        sizes=asdict(resolve(config.parallel, world)),
        flows=flows(config, world),
        backend="nccl" if config.cluster.node.gpus else "gloo",
    )


def _draw(problem: Problem, found: Placement, axis: str | None, path: Path) -> None:
    from hpc_train.topology.picture import draw

    where, fabric = problem.where, problem.fabric
    prepared = model(fabric, problem.sizes, problem.flows, len(fabric.nodes), problem.backend)
    axes = chosen_axes(axis, problem.sizes, problem.flows, found)
    levels = levels_of(where.nodes, where.paths, where.domains)
    draw(Sides(prepared, problem.sizes, levels, axes).panels(found), "+".join(axes), path)


def _notes(config: RunConfig, where: Allocation) -> list[str]:
    notes = list(assumptions(config.cluster))
    if where.missing:
        notes.append(f"{where.source} does not say where {fold(where.missing)} is; taken to be alone on a switch")
    return notes


def _json(problem: Problem, found: Placement, notes: Sequence[str], wanted: Sequence[str]) -> dict[str, Any]:
    order = [problem.fabric.nodes[node] for node in found.nodes]
    more = {"nodes": order, "source": problem.where.source, "notes": list(notes), "advice": list(wanted)}
    return {**as_json(found), **more}
