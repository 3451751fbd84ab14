"""Let a run continue on fewer nodes than it was submitted for, and return to all of them later (resilience.elastic).

After a loss without a spare the ranks start again on fewer nodes, as fewer data-parallel replicas. The global batch and
the order of the samples stay the same, so the losses are those of the full run up to rounding. Whether Slurm has other
nodes is asked in hpc_train.launch.slurm.waiting_time.
"""

from __future__ import annotations

from dataclasses import replace

from hpc_train.config.parallel import reduce_replicas
from hpc_train.config.run import RunConfig
from hpc_train.errors import UserError


def shrink_config(config: RunConfig, ranks: int, world: int) -> RunConfig:
    """Return the configuration of a run of `ranks` ranks for a job of `world` ranks; the same if there are as many.

    Raises UserError if the run may not go on with fewer, or its degrees do not come out even.
    """
    if world == ranks or not config.resilience.elastic.min_nodes:
        return config
    nodes = world // config.cluster.ranks_per_node
    fewer = replace(config, parallel=reduce_replicas(config.parallel, ranks, world))
    return replace(fewer, cluster=replace(config.cluster, nodes=nodes))


def find_smaller_size(config: RunConfig, nodes: int, usable: int) -> int:
    """Return the largest number of nodes, at most `usable`, that a run of `nodes` nodes can go on with; 0 if none."""
    least = config.resilience.elastic.min_nodes
    sizes = range(min(usable, nodes - 1), least - 1, -1) if least else range(0)
    return next((size for size in sizes if explain_unfit(config, nodes, size) is None), 0)


def explain_unfit(config: RunConfig, nodes: int, size: int) -> str | None:
    """Return why a run of `nodes` nodes cannot go on with `size` of them; None if it can."""
    # Here, as a decision after a fault imports this module, and needs the rules of all techniques only for this.
    from hpc_train.parallel.rules.check import check_support

    per_node = config.cluster.ranks_per_node
    try:
        check_support(shrink_config(config, nodes * per_node, size * per_node), size * per_node)
    except UserError as error:
        return str(error)
    return None


def check_elastic(config: RunConfig, nodes: int) -> None:
    """Raise UserError for resilience.elastic settings that could never have an effect. nodes: of the run."""
    least = config.resilience.elastic.min_nodes
    if not least:
        return
    setting, watched = f"resilience.elastic.min_nodes={least}", config.resilience
    if config.launch.points_per_job > 1:
        raise UserError(f"{setting}: points that share a job are not started again in it; use launch.points_per_job=1")
    if not (watched.watch and watched.act and watched.restarts):
        raise UserError(
            f"{setting}: a job goes on with fewer nodes by a restart, and those are off; use resilience.watch=true, "
            "resilience.act=true and resilience.restarts of 1 or more"
        )
    if least >= nodes:
        most = f"use at most {nodes - 1}" if nodes > 1 else "leave it out"
        raise UserError(f"{setting}: the run has {nodes} {'node' if nodes == 1 else 'nodes'}; {most}")
    if not find_smaller_size(config, nodes, nodes - 1):
        why = explain_unfit(config, nodes, nodes - 1)
        raise UserError(f"{setting}: no number of nodes from {least} to {nodes - 1} would do (with {nodes - 1}: {why})")
