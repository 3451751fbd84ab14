"""Facts of invented jobs, and searches with a given answer."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from hpc_train.config.run import RunConfig
from hpc_train.placement.placement_result import CommunicationCost, Placement
from hpc_train.runtime.host_info import ProcessInfo


def facts_of(nodes: int, each: int, numbering: Callable[[int, int], int] | None = None) -> list[ProcessInfo]:
    """Return facts in launcher order of `nodes` nodes with `each` ranks. numbering: (node, local) -> process."""
    number = numbering or (lambda node, local: node * each + local)
    found = [
        ProcessInfo(number(node, local), node, local, f"n{node}", f"10.0.0.{node + 1}", 5000 + node, "0-7")
        for node in range(nodes)
        for local in range(each)
    ]
    return sorted(found, key=lambda fact: fact.process)


def changed(facts: Sequence[ProcessInfo], which: int, /, **values: object) -> list[ProcessInfo]:
    """Return the same facts with other values for one process."""
    return [replace(fact, **values) if fact.process == which else fact for fact in facts]  # type: ignore[arg-type]


def answer(*order: int, each: int = 2) -> Callable[[RunConfig, object], Placement]:
    """Return a search that finds this order of nodes."""
    placement = Placement(
        tuple(order),
        each,
        CommunicationCost(2.0, {"dp_shard": 2.0}),
        CommunicationCost(1.0, {"dp_shard": 1.0}),
        {},
        0.0,
        "2.00x less",
    )
    return lambda _config, _nodes: placement


def backwards(config: RunConfig, nodes: Sequence[Sequence[ProcessInfo]]) -> Placement:
    """Return a search that reverses the launcher's order."""
    return answer(*reversed(range(len(nodes))), each=len(nodes[0]))(config, nodes)
