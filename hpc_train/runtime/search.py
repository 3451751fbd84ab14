"""Find a better order of the nodes from every rank's facts: locations, traffic, search."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from hpc_train.config.model import CustomModelConfig
from hpc_train.config.run import RunConfig
from hpc_train.placement.result import Placement
from hpc_train.runtime.facts import Facts
from hpc_train.runtime.plan import NotPlaced

if TYPE_CHECKING:
    from hpc_train.placement.locate import Host


def search(
    config: RunConfig, nodes: Sequence[Sequence[Facts]], parameters: Callable[[], int] | None = None
) -> Placement:
    """The best order that is found for nodes in the launcher's order, each with its ranks' facts.

    parameters: counts those of a custom model, which alone knows its shape.
    Raises NotPlaced where nothing tells how the nodes hang together, UserError for a file that cannot be read.
    """
    from hpc_train.placement.locate import locate
    from hpc_train.placement.place_nodes import job_of, place_nodes

    where = locate(config.cluster, hosts_of([members[0] for members in nodes]), "SLURM_JOB_ID" in os.environ)
    if where.problem is not None:
        raise NotPlaced(where.problem)
    count = parameters() if parameters is not None and isinstance(config.model, CustomModelConfig) else None
    return place_nodes(job_of(config, where, len(nodes[0]), count))


def hosts_of(heads: Sequence[Facts]) -> list[Host]:
    """Convert nodes to the form `locate` takes. heads: the facts of local rank 0 of every node."""
    from hpc_train.placement.locate import Host

    return [
        Host(
            head.host,
            head.slurm.get("SLURMD_NODENAME"),
            head.slurm.get("SLURM_TOPOLOGY_ADDR"),
            head.slurm.get("SLURM_TOPOLOGY_ADDR_PATTERN"),
            head.clique,
        )
        for head in heads
    ]
