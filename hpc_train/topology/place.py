"""`topology place`: from a run and an allocation to the placement, its cost, and a picture of both orders."""

from __future__ import annotations

import json as json_module
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hpc_train.config.compose import compose
from hpc_train.config.degrees import resolve
from hpc_train.config.run import RunConfig
from hpc_train.parallel.support import check_support
from hpc_train.parallel.support.pipeline import check_blocks
from hpc_train.placement.advice import advice
from hpc_train.placement.cost import model
from hpc_train.placement.figures import assumptions
from hpc_train.placement.from_config import ranks_per_node
from hpc_train.placement.levels import levels_of
from hpc_train.placement.locate import Locations
from hpc_train.placement.place_nodes import Job, job_of, place_nodes
from hpc_train.placement.reason import taper_settings
from hpc_train.placement.result import Placement, as_json
from hpc_train.topology.allocation import allocation, shuffled
from hpc_train.topology.canvas import check_picture
from hpc_train.topology.report import Report
from hpc_train.topology.show import print_rich
from hpc_train.topology.sides import Sides, chosen_axes


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


def place(overrides: Sequence[str], config_dir: str | None, env: Mapping[str, str], options: Options) -> int:
    """Print where ranks go. Raises UserError for what is wrong in the run, the allocation or its topology."""
    if options.picture is not None:
        check_picture(Path(options.picture))
    config = compose(overrides, config_dir)
    where = allocation(config, options.nodes, env)
    if options.shuffle is not None:
        where = shuffled(where, options.shuffle)
    ranks = ranks_per_node(config) if len(where.nodes) == 1 else config.cluster.ranks_per_node
    job = _job(config, where, ranks)
    found = place_nodes(job)
    if options.picture is not None:
        _draw(job, where, found, options.axis, Path(options.picture))
    notes = _notes(config, job, where)
    fabric = job.tapered or job.fabric
    wanted = advice(fabric, job.sizes, job.flows, found)
    if options.json:
        print(json_module.dumps(_json(job, where, found, notes, wanted)))
    else:
        print_rich(*Report(where, fabric, job.sizes, job.flows, found, notes, wanted).parts())
    return 0


def _job(config: RunConfig, where: Locations, ranks: int) -> Job:
    """Make the job. Raises UserError for a model with fewer blocks than stages, or that an axis cannot split."""
    world = ranks * len(where.nodes)
    degrees, layers = resolve(config.parallel, world), getattr(config.model, "layers", None)
    if degrees.pp > 1 and layers is not None:
        check_blocks(config.parallel.pipeline, layers, degrees)
    try:
        return job_of(config, where, ranks)
    except AssertionError:  # traffic asserts what the trainer's rules check; those say it in one line
        check_support(config, world)
        raise


def _draw(job: Job, where: Locations, found: Placement, axis: str | None, path: Path) -> None:
    from hpc_train.topology.picture import draw

    fabric = job.tapered or job.fabric
    prepared = model(fabric, job.sizes, job.flows, len(fabric.nodes), job.backend)
    axes = chosen_axes(axis, job.sizes, job.flows, found)
    levels = levels_of(where.nodes, where.paths, where.domains)
    draw(Sides(prepared, job.sizes, levels, axes).panels(found), "+".join(axes), path)


def _notes(config: RunConfig, job: Job, where: Locations) -> list[str]:
    notes = [*assumptions(config.cluster, where.node_gbit_s), *job.notes]
    if where.problem is not None:
        notes.append(f"{where.problem}; the launcher's order stays")
    if job.unknown:
        levels = " and ".join(job.unknown)
        notes.append(
            f"what the {levels} uplinks carry is not known; if you know their taper, give {taper_settings(job.unknown)}"
        )
    return notes


def _json(job: Job, where: Locations, found: Placement, notes: Sequence[str], wanted: Sequence[str]) -> dict[str, Any]:
    order = [job.fabric.nodes[node] for node in found.nodes]
    more = {
        "nodes": order,
        "source": where.source,
        "unknown_tapers": list(job.unknown),
        "notes": list(notes),
        "advice": list(wanted),
    }
    return {**as_json(found), **more}
