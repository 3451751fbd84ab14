"""Work out which node each task of a Slurm step is on, as srun deals tasks out to nodes (--distribution)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence


def list_task_hosts(nodes: Sequence[str], counts: Sequence[int], env: Mapping[str, str]) -> list[str]:
    """Return the node of each task, by task; "" for all of them if that cannot be known.

    nodes: of the step, in Slurm's order. counts: tasks on each of them. env: of srun or of a task, where
    SLURM_DISTRIBUTION names the order: node by node (block, the default), a task on each node in turn (cyclic), or
    SLURM_DIST_PLANESIZE tasks on each node in turn (plane).
    """
    order = env.get("SLURM_DISTRIBUTION", "").partition(":")[0].partition(",")[0]
    kind, _, size = order.partition("=")
    if kind in ("", "*", "block"):
        return [node for node, count in zip(nodes, counts, strict=True) for _ in range(count)]
    size = size or env.get("SLURM_DIST_PLANESIZE", "")
    if kind == "cyclic":
        return _deal_tasks(nodes, counts, 1)
    if kind == "plane" and size.isdecimal() and int(size) > 0:
        return _deal_tasks(nodes, counts, int(size))
    return [""] * sum(counts)  # arbitrary: in the order of a file of the user's


def _deal_tasks(nodes: Sequence[str], counts: Sequence[int], size: int) -> list[str]:
    """Deal out tasks to the nodes round-robin, `size` at a time, until each node has its number of tasks."""
    left, hosts = list(counts), []
    while any(left):
        for index, node in enumerate(nodes):
            dealt = min(size, left[index])
            left[index] -= dealt
            hosts += [node] * dealt
    return hosts
