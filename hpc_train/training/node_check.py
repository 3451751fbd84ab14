"""The pre-flight of an attempt: compare the job's nodes before the first step, and leave slow ones to a spare node.

A slow node is named in the log. If the job has spare nodes, the attempt ends, and launch.recovery.restarting starts
the ranks again without the node. A node that already has a strike is used anyway: it is here because no other node was
available.
"""

from __future__ import annotations

import json
import logging
from pathlib import Path

from hpc_train.config.run import RunConfig
from hpc_train.errors import IncompleteRun
from hpc_train.interfaces import Task, World
from hpc_train.regular_files import write_private_file
from hpc_train.resilience.exclusion import read_strikes
from hpc_train.resilience.preflight import FILE, Preflight, check_nodes
from hpc_train.runtime.consensus import Consensus
from hpc_train.training.records.run_records import append_event
from hpc_train.training.run_directory import RunDirectory

log = logging.getLogger(__name__)
_CONSENSUS = Consensus(shared=())


class SlowNodes(IncompleteRun):
    """Raised on all ranks where the attempt ends so that spare nodes can take over for slow ones."""


def check_job_nodes(config: RunConfig, world: World, task: Task, directory: RunDirectory, attempt: int) -> None:
    """Run the pre-flight, if there is one. Raises SlowNodes on all ranks; a collective."""
    if config.resilience.preflight == "off" or task.nodes < 2:
        return
    logs = directory.logs(attempt)
    result = check_nodes(config.resilience.preflight, world, task.host, logs)
    if world.rank == 0:
        _write_result(result, logs)
    slow = {node.host: node.describe() for node in result.slow if node.blamed}
    if not slow or not config.launch.spares or not config.resilience.act:
        return
    earlier = _CONSENSUS.run_on_rank_0(
        world, lambda: [_shorten_host(strike.host) for strike in read_strikes(directory.path)]
    )
    if new := sorted(host for host in slow if _shorten_host(host) not in earlier):
        reason = "; ".join(slow[host] for host in new)
        if world.rank == 0:
            append_event(directory.events, "slow_node", attempt, hosts=new, why=reason)
        raise SlowNodes(f"pre-flight: {reason}; a spare node takes over")


def _shorten_host(host: str) -> str:
    return host.partition(".")[0]


def _write_result(result: Preflight, logs: Path) -> None:
    write_private_file(logs / FILE, json.dumps(result.as_json(), indent=1) + "\n")
    for node in result.slow:
        certain = "" if node.blamed else ", or its partner is slow"
        log.warning("pre-flight: %s%s; launch.exclude leaves it out", node.describe(), certain)
