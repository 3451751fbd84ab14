"""Hybrid sharding left to the cluster: one copy of the model in each NVLink domain, sharded over its ranks."""

from __future__ import annotations

from hpc_train.config.run import RunConfig
from hpc_train.errors import UserError


def fill_hybrid(config: RunConfig) -> None:
    """Where a zero strategy leaves dp_replicate open (-1) and dp_shard out, write the number of dp_shard into `config`.

    It is the ranks of one NVLink domain, or of one node where there is no NVLink, divided by tp x cp. Raises UserError
    where these do not divide or leave nothing to shard over.
    """
    parallel = config.parallel
    if parallel.strategy == "ddp" or parallel.dp_replicate != -1 or parallel.dp_shard is not None:
        return
    ranks, place = _neighbours(config)
    if ranks is None:  # all ranks are on this machine: one copy
        parallel.dp_replicate, parallel.dp_shard = 1, -1
        return
    inner = parallel.tp * parallel.cp
    if inner < 1 or ranks % inner or ranks == inner:
        raise UserError(
            f"parallel.dp_replicate=-1: one copy of the model in {place} of {ranks} ranks needs a dp_shard of "
            f"{ranks} / (tp {parallel.tp} x cp {parallel.cp}), which is no whole number above 1; give parallel.dp_shard"
        )
    parallel.dp_shard = ranks // inner


def _neighbours(config: RunConfig) -> tuple[int | None, str]:
    """(ranks that reach each other fast, what holds them); None: all."""
    node = config.cluster.node
    if node.nvlink_domain_gpus:
        return node.nvlink_domain_gpus * config.cluster.ranks_per_node // max(node.gpus, 1), "an NVLink domain"
    return (None, "") if config.launch.kind == "local" else (config.cluster.ranks_per_node, "a node")
