"""`hpc-train topology place`: place the ranks of a run on an allocation; print the cost, draw both orders."""

from __future__ import annotations

import json as json_module
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from hpc_train.cli.output import print_rich
from hpc_train.config.compose import compose
from hpc_train.config.parallel import resolve_degrees
from hpc_train.config.run import RunConfig
from hpc_train.parallel.rules.check import check_support
from hpc_train.parallel.rules.pipeline import check_blocks
from hpc_train.placement.allocation import find_allocation, shuffle_nodes
from hpc_train.placement.cost.cost_model import build_cost_model
from hpc_train.placement.cost.dragonfly import RoutingBounds, bound_routing
from hpc_train.placement.described_cluster import count_ranks_per_node
from hpc_train.placement.diagram.canvas import check_picture_path
from hpc_train.placement.diagram.picture import PlacementPanels, choose_axes
from hpc_train.placement.explanation import advise_allocation, name_taper_settings
from hpc_train.placement.fabric import build_levels
from hpc_train.placement.fabric_from_config import list_assumptions
from hpc_train.placement.node.gpu_links import build_described_links
from hpc_train.placement.node.gpu_order import GpuOrder, order_gpus
from hpc_train.placement.node_locations import NodeLocations
from hpc_train.placement.placement_result import Placement, placement_to_json
from hpc_train.placement.placement_view import PlacementView
from hpc_train.placement.search import PlacementJob, make_placement_job, place_nodes


@dataclass(frozen=True)
class PlaceOptions:
    """Options of `topology place`."""

    nodes: str | None
    """Host list; its order is that of the launcher."""
    shuffle: int | None
    """Seed of a random order of the nodes; None: keep the order."""
    axis: str | None
    picture: str | None
    json: bool


def place_command(
    overrides: Sequence[str], config_dir: str | None, env: Mapping[str, str], options: PlaceOptions
) -> int:
    """Print the placement. Raises UserError for a wrong run, allocation or topology."""
    if options.picture is not None:
        check_picture_path(Path(options.picture))
    config = compose(overrides, config_dir)
    locations = find_allocation(config, options.nodes, env)
    if options.shuffle is not None:
        locations = shuffle_nodes(locations, options.shuffle)
    job = make_checked_job(config, locations)
    placement = place_nodes(job)
    if options.picture is not None:
        _draw_placement(job, locations, placement, options.axis, Path(options.picture))
    gpus = _order_described_gpus(config, job)
    notes = _list_placement_notes(config, job, locations)
    if gpus is not None and not gpus.is_identity:
        notes.append(f"local ranks take GPUs {', '.join(map(str, gpus.gpus))}: {gpus.reason}")
    routing = _bound_placed_routing(config, job, placement)
    if routing is not None:
        notes.append(routing.describe())
    fabric = job.tapered or job.fabric
    advice = advise_allocation(fabric, job.sizes, job.flows, placement)
    if options.json:
        print(json_module.dumps(_placement_to_json(job, locations, placement, notes, advice, gpus, routing)))
    else:
        print_rich(
            *PlacementView(
                locations=locations,
                fabric=fabric,
                sizes=job.sizes,
                flows=job.flows,
                placement=placement,
                notes=notes,
                advice=advice,
            ).render()
        )
    return 0


def make_checked_job(config: RunConfig, where: NodeLocations) -> PlacementJob:
    """Make the job. Raises UserError for a model with fewer blocks than stages, or that an axis cannot split."""
    ranks = count_ranks_per_node(config) if len(where.nodes) == 1 else config.cluster.ranks_per_node
    world = ranks * len(where.nodes)
    degrees, layers = resolve_degrees(config.parallel, world), getattr(config.model, "layers", None)
    if degrees.pp > 1 and layers is not None:
        check_blocks(config.parallel.pipeline, layers, degrees)
    try:
        return make_placement_job(config, where, ranks)
    except AssertionError:  # traffic asserts what the trainer's rules check; those say it in one line
        check_support(config, world)
        raise


def _draw_placement(
    job: PlacementJob, locations: NodeLocations, placement: Placement, axis: str | None, path: Path
) -> None:
    from hpc_train.placement.diagram.picture import draw_panels

    fabric = job.tapered or job.fabric
    prepared = build_cost_model(fabric, job.sizes, job.flows, len(fabric.nodes), job.backend)
    axes = choose_axes(axis, job.sizes, job.flows, placement)
    levels = build_levels(locations.nodes, locations.paths, locations.domains)
    draw_panels(PlacementPanels(prepared, job.sizes, levels, axes).make_panels(placement), "+".join(axes), path)


def _order_described_gpus(config: RunConfig, job: PlacementJob) -> GpuOrder | None:
    """Choose the GPU of each local rank where the cluster describes pairs of GPUs; None where it does not."""
    links = build_described_links(config.cluster.node)
    if links is None or links.count != job.fabric.ranks_per_node:
        return None
    return order_gpus(links, job.sizes, job.flows, job.backend)


def _bound_placed_routing(config: RunConfig, job: PlacementJob, placement: Placement) -> RoutingBounds | None:
    """Bound the placed order's communication where it depends on the routing; None where it does not."""
    if not config.cluster.fabric.topology.startswith("dragonfly"):
        return None
    model = build_cost_model(job.fabric, job.sizes, job.flows, len(placement.nodes), job.backend)
    return bound_routing(config.cluster, model, placement.nodes)


def _list_placement_notes(config: RunConfig, job: PlacementJob, locations: NodeLocations) -> list[str]:
    notes = [*list_assumptions(config.cluster, locations.node_gbit_s), *job.notes]
    if locations.problem is not None:
        notes.append(f"{locations.problem}; the launcher's order stays")
    if job.unknown:
        levels = " and ".join(job.unknown)
        notes.append(
            f"what the {levels} uplinks carry is not known; if you know their taper, "
            f"give {name_taper_settings(job.unknown)}"
        )
    return notes


def _placement_to_json(
    job: PlacementJob,
    locations: NodeLocations,
    placement: Placement,
    notes: Sequence[str],
    advice: Sequence[str],
    gpus: GpuOrder | None,
    routing: RoutingBounds | None,
) -> dict[str, Any]:
    order = [job.fabric.nodes[node] for node in placement.nodes]
    details = {
        "nodes": order,
        "source": locations.source,
        "unknown_tapers": list(job.unknown),
        "notes": list(notes),
        "advice": list(advice),
        **({"gpus": list(gpus.gpus)} if gpus is not None else {}),
        **({"routing": asdict(routing)} if routing is not None else {}),
    }
    return {**placement_to_json(placement), **details}
