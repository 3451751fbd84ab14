"""Plan: which node of the job holds which ranks, decided once by process 0 from everybody's facts."""

from __future__ import annotations

import hashlib
import json
import logging
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from hpc_train.config.run import RunConfig
from hpc_train.errors import UserError
from hpc_train.placement.result import Placement, as_json
from hpc_train.runtime.facts import Facts

log = logging.getLogger(__name__)

Search = Callable[[RunConfig, Sequence[Sequence[Facts]]], Placement]
"""(config, facts of every node in the launcher's order and of its ranks) -> a better order of the nodes."""


_ASKED = "the launcher's order, as launch.placement=launcher asks"


class NotPlaced(Exception):
    """Why the launcher's order stays. One line."""


@dataclass(frozen=True)
class Plan:
    """What all processes agree on. It says nothing of single processes, so that it stays small in a large job."""

    world: int
    reason: str
    nodes: list[int] = field(default_factory=list)
    """nodes[i]: the launcher's index of the node that holds ranks i * ranks_per_node and following; empty: every
    process has the rank that the launcher gave it."""
    ranks_per_node: int = 0
    hosts: list[str] = field(default_factory=list)
    """In the launcher's order of nodes."""
    processes: list[list[int]] | None = None
    """Node -> the processes on it by local rank; None where a node's processes are consecutive."""
    master: str = ""
    """Address of rank 0's host."""
    port: int = 0
    """A free port there."""
    warning: str | None = None
    """Why the launcher's order stays, where that is not as it should be."""
    refusal: str | None = None
    """Why this job must not start."""
    notes: list[str] = field(default_factory=list)
    """More lines for a person."""
    result: dict[str, Any] = field(default_factory=dict)
    """As `topology place --json` prints it, without the ranks."""
    settings: list[list[str]] = field(default_factory=list)
    """[variable, value, reason] to set on every rank, where the user has set nothing."""

    def rank_of(self, process: int, node: int, local: int) -> int:
        """The rank of a process, which is the local-th of its node."""
        return self.position(node) * self.ranks_per_node + local if self.nodes else process

    def position(self, node: int) -> int:
        """Where a node comes in the order of ranks."""
        return self.nodes.index(node) if self.nodes else node

    def map(self) -> tuple[int, ...]:
        """process -> rank."""
        if not self.nodes:
            return tuple(range(self.world))
        size, place = self.ranks_per_node, {node: at for at, node in enumerate(self.nodes)}
        ranks = [0] * self.world
        for node, at in place.items():
            for local in range(size):
                process = self.processes[node][local] if self.processes else node * size + local
                ranks[process] = at * size + local
        return tuple(ranks)

    def text(self) -> str:
        """As it is shared: the same bytes for the same plan."""
        return json.dumps(asdict(self), sort_keys=True, separators=(",", ":"))


def digest(text: str) -> str:
    """SHA-256 of a plan's text, in hexadecimal digits."""
    return hashlib.sha256(text.encode()).hexdigest()


def decide(config: RunConfig, facts: Sequence[Facts], processes: int, search: Search) -> Plan:
    """The plan for these facts. Never raises for what goes wrong on the way: the plan then is the launcher's order."""
    try:
        nodes = by_node(facts, processes)
    except NotPlaced as why:
        return _launchers(facts, processes, why)
    try:
        placement = _placement(config, nodes, search)
    except NotPlaced as why:
        return _launchers(facts, processes, why, nodes)
    except UserError as error:
        return _launchers(facts, processes, NotPlaced(str(error)), nodes)
    except Exception as error:
        log.warning("placement failed", exc_info=error)
        lines = str(error).splitlines()
        what = f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__
        return _launchers(facts, processes, NotPlaced(f"the search failed with {what}"), nodes)
    return _placed(nodes, placement) if placement else _quiet(config, nodes)


def by_node(facts: Sequence[Facts], processes: int) -> list[list[Facts]]:
    """Facts by node, in the launcher's order, and by local rank. Raises NotPlaced where they cannot all be true, or
    nodes have not the same number of ranks.
    """
    if sorted(fact.process for fact in facts) != list(range(processes)):
        raise NotPlaced(f"{len(facts)} of {processes} processes said where they are, or two said the same")
    nodes: dict[int, list[Facts]] = {}
    for fact in sorted(facts, key=lambda it: (it.node, it.local)):
        nodes.setdefault(fact.node, []).append(fact)
    for number, members in nodes.items():
        if [fact.local for fact in members] != list(range(len(members))):
            raise NotPlaced(f"local ranks of node {number} are {[fact.local for fact in members]}")
        if len(hosts := {fact.host for fact in members}) > 1:
            raise NotPlaced(f"ranks of node {number} say that they are on {' and '.join(sorted(hosts))}")
    if sorted(nodes) != list(range(len(nodes))):
        raise NotPlaced(f"nodes are numbered {', '.join(map(str, sorted(nodes)[:5]))}, not from 0 without a gap")
    sizes = Counter(len(members) for members in nodes.values())
    if len(sizes) > 1:
        counts = ", ".join(f"{count} with {size}" for size, count in sorted(sizes.items()))
        raise NotPlaced(f"nodes have not the same number of ranks ({counts})")
    # Slurm 26.05 numbers tasks by its topology, not by node index: the launcher's order is that of the tasks.
    return sorted(nodes.values(), key=lambda members: min(fact.process for fact in members))


def _placement(config: RunConfig, nodes: Sequence[Sequence[Facts]], search: Search) -> Placement | None:
    """The better order; None where there is nothing to search for."""
    if len(nodes) == 1 or config.launch.placement == "launcher":
        return None
    hosts = [members[0].host for members in nodes]
    if twice := [host for host, count in Counter(hosts).items() if count > 1]:
        raise NotPlaced(f"the launcher counts {twice[0]} as {Counter(hosts)[twice[0]]} nodes")
    found = search(config, nodes)
    assert sorted(found.nodes) == list(range(len(nodes))), "a placement that is no permutation"
    assert found.ranks_per_node == len(nodes[0]), "a placement of other nodes"
    return found


def _placed(nodes: Sequence[Sequence[Facts]], placement: Placement) -> Plan:
    result = as_json(placement)
    del result["rank_to_slot"]
    plan = _whole_nodes(nodes, placement.nodes, placement.reason)
    return replace(plan, result=result)


def _quiet(config: RunConfig, nodes: Sequence[Sequence[Facts]]) -> Plan:
    if len(nodes) == 1:
        return _whole_nodes(nodes, (0,), "one node: nothing to place")
    if _consecutive(nodes):
        return _whole_nodes(nodes, range(len(nodes)), _ASKED)
    facts = [fact for members in nodes for fact in members]
    return _as_launched(facts, len(facts), _ASKED)


def _launchers(
    facts: Sequence[Facts], processes: int, why: NotPlaced, nodes: Sequence[Sequence[Facts]] | None = None
) -> Plan:
    reason = f"the launcher's order, not placed: {why}"
    if nodes is not None and _consecutive(nodes):
        return replace(_whole_nodes(nodes, range(len(nodes)), reason), warning=reason)
    return replace(_as_launched(facts, processes, reason), warning=reason)


def _as_launched(facts: Sequence[Facts], processes: int, reason: str) -> Plan:
    """Every process with the rank that the launcher gave it, on whatever node."""
    first = min(facts, key=lambda it: it.process)
    return Plan(world=processes, reason=reason, master=first.address, port=first.port)


def _consecutive(nodes: Sequence[Sequence[Facts]]) -> bool:
    return [fact.process for members in nodes for fact in members] == list(range(sum(map(len, nodes))))


def _whole_nodes(nodes: Sequence[Sequence[Facts]], order: Sequence[int], reason: str) -> Plan:
    """order: positions in `nodes`."""
    consecutive = _consecutive(nodes) and [members[0].node for members in nodes] == list(range(len(nodes)))
    first = nodes[order[0]][0]
    by_index = {members[0].node: [fact.process for fact in members] for members in nodes}
    moved = "" if _consecutive(nodes) else "; ranks of one node made consecutive, which the launcher's order has not"
    return Plan(
        world=sum(map(len, nodes)),
        reason=reason + moved,
        nodes=[nodes[at][0].node for at in order],
        ranks_per_node=len(nodes[0]),
        hosts=[members[0].host for members in sorted(nodes, key=lambda members: members[0].node)],
        processes=None if consecutive else [by_index[node] for node in sorted(by_index)],
        master=first.address,
        port=first.port,
    )


def read_plan(text: str) -> Plan:
    """The plan that `Plan.text` wrote."""
    content: Mapping[str, Any] = json.loads(text)
    return Plan(**content)
