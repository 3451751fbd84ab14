"""Compute the placement from a configuration and its nodes' locations, for `topology place` and for a job."""

from __future__ import annotations

import time
from dataclasses import asdict, dataclass, replace

from hpc_train.config.degrees import resolve
from hpc_train.config.run import RunConfig
from hpc_train.placement.algorithm import Backend
from hpc_train.placement.cost import model
from hpc_train.placement.fabric import Fabric
from hpc_train.placement.from_config import capacity_notes, fabric_at, unknown_tapers
from hpc_train.placement.locate import Locations
from hpc_train.placement.reason import explain
from hpc_train.placement.result import Placement
from hpc_train.placement.search import WORTH, cases_of, place
from hpc_train.traffic.flow import Flow
from hpc_train.traffic.flows import flows

ASSUMED_TAPER = 2.0
"""Taper assumed for unknown uplinks: the smallest that is built. Its gain is reported as conditional."""


@dataclass(frozen=True)
class Job:
    """A job to be placed, and the fabric it is placed on."""

    fabric: Fabric
    """Fabric in which uplinks of unknown taper count as non-blocking."""
    sizes: dict[str, int]
    """Mesh axis -> degree."""
    flows: tuple[Flow, ...]
    backend: Backend
    tapered: Fabric | None
    """Fabric in which uplinks of unknown taper have ASSUMED_TAPER; None if all are known."""
    unknown: tuple[str, ...]
    """Levels whose taper is unknown."""
    notes: tuple[str, ...]


def job_of(config: RunConfig, where: Locations, ranks_per_node: int, parameters: int | None = None) -> Job:
    """Make the job to be placed.

    parameters: of a custom model, whose shape is not known here. Raises UserError for degrees that do not fit.
    """
    world = len(where.nodes) * ranks_per_node
    unknown = unknown_tapers(config, where)
    return Job(
        fabric=fabric_at(config, where, ranks_per_node),
        sizes=asdict(resolve(config.parallel, world)),
        flows=tuple(flows(config, world, parameters)),
        backend="nccl" if config.cluster.node.gpus else "gloo",
        tapered=fabric_at(config, where, ranks_per_node, ASSUMED_TAPER) if unknown else None,
        unknown=unknown,
        notes=(*where.notes, *capacity_notes(config, where)),
    )


def place_nodes(job: Job) -> Placement:
    """Return the best order found for the job's nodes, and its gain under each assumption.

    If a taper is unknown, the order is the best one for ASSUMED_TAPER: it has the fewest crossings, and costs nothing
    if the fabric is non-blocking. The costs are then those of a non-blocking fabric, the lowest possible.
    """
    start = time.perf_counter()
    if job.tapered is None:
        return replace(place(job.fabric, job.sizes, job.flows, job.backend), notes=job.notes)
    found = place(job.tapered, job.sizes, job.flows, job.backend)
    flat, narrow = (
        model(fabric, job.sizes, job.flows, len(fabric.nodes), job.backend) for fabric in (job.fabric, job.tapered)
    )
    identity = tuple(range(len(found.nodes)))
    before, after = flat.cost(identity), flat.cost(found.nodes)
    if after.total > before.total * (1 + WORTH):
        found = place(job.fabric, job.sizes, job.flows, job.backend)
        after = flat.cost(found.nodes)
    orders = (identity, found.nodes)
    cases = (*cases_of(flat, orders, 1.0), *cases_of(narrow, orders, ASSUMED_TAPER))
    kept = found.nodes == identity
    return replace(
        found,
        identity=before,
        placed=after,
        cases=cases,
        reason=explain(job.tapered, cases, found.straddling, kept, WORTH, job.unknown),
        notes=job.notes,
        seconds=time.perf_counter() - start,
    )
