"""From everybody's facts to a better order of the nodes: fabric, traffic, search."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict

from hpc_train.config.degrees import resolve
from hpc_train.config.model import CustomModelConfig
from hpc_train.config.run import RunConfig
from hpc_train.placement.result import Placement
from hpc_train.runtime.facts import Facts
from hpc_train.runtime.plan import NotPlaced


def search(
    config: RunConfig, nodes: Sequence[Sequence[Facts]], parameters: Callable[[], int] | None = None
) -> Placement:
    """The best order that is found for nodes in the launcher's order, each with its ranks' facts.

    parameters: counts those of a custom model, which alone knows its shape.
    Raises NotPlaced where nothing tells how the nodes hang together, UserError for a file that cannot be read.
    """
    from hpc_train.placement.from_config import fabric_of
    from hpc_train.placement.search import place
    from hpc_train.runtime.topology import paths_of
    from hpc_train.traffic.flows import flows

    hosts, size = [members[0].host for members in nodes], len(nodes[0])
    heads = [members[0] for members in nodes]
    paths, domains = paths_of(config.cluster, heads), domains_of(heads)
    if paths is None and not domains:
        raise NotPlaced("nothing tells how the nodes hang together; describe it with cluster.topology=FILE")
    fabric = fabric_of(config, hosts, size, paths, domains)
    world = len(nodes) * size
    count = parameters() if parameters is not None and isinstance(config.model, CustomModelConfig) else None
    moved = flows(config, world, count)
    sizes = asdict(resolve(config.parallel, world))
    return place(fabric, sizes, moved, "nccl" if config.cluster.node.gpus else "gloo")


def domains_of(heads: Sequence[Facts]) -> dict[str, str]:
    """Node -> NVLink domain that may span nodes, of the nodes that are in one."""
    return {head.host: head.clique for head in heads if head.clique is not None}
