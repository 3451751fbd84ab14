"""The variables by which other libraries learn rank, size and meeting point (torch's env:// and many after it)."""

from __future__ import annotations

from collections.abc import MutableMapping

from hpc_train.api import Task
from hpc_train.runtime.plan import Plan


def export(plan: Plan, task: Task, env: MutableMapping[str, str]) -> dict[str, str]:
    """Set RANK, WORLD_SIZE, LOCAL_RANK, LOCAL_WORLD_SIZE, NODE_RANK, MASTER_ADDR and MASTER_PORT from the plan.

    Whatever they were: values of a launcher that knows no placement would lead a library to another rank's place.
    The store of a torchrun agent stays where its clients look for it. Returns what was set.
    """
    size = plan.ranks_per_node
    found = {
        "RANK": str(plan.rank_of(task.process, task.node, task.local)),
        "WORLD_SIZE": str(plan.world),
        "LOCAL_RANK": str(task.local),
        "NODE_RANK": str(plan.position(task.node)),
    }
    if size:
        found["LOCAL_WORLD_SIZE"] = str(size)
    if env.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
        found |= {"MASTER_ADDR": plan.master, "MASTER_PORT": str(plan.port)}
    env.update(found)
    return found
