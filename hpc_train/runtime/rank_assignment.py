"""Decide which node of a job holds which ranks: on process 0, from the facts about all processes.

The result is a RankAssignment: a searched placement, or the launcher's order with the reason for it. arrange_ranks.py
publishes it to the other processes.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import TYPE_CHECKING, Any

from hpc_train.config.model import CustomModelConfig, HfModelConfig
from hpc_train.config.run import RunConfig
from hpc_train.errors import UserError
from hpc_train.placement.placement_result import Placement, placement_to_json
from hpc_train.runtime.host_info import ProcessInfo

if TYPE_CHECKING:
    from hpc_train.placement.node_locations import JobHost

log = logging.getLogger(__name__)

SearchPlacement = Callable[[RunConfig, Sequence[Sequence[ProcessInfo]]], Placement]
"""(config, the ProcessInfo of each node's ranks, nodes in the launcher's order) -> a better order of the nodes."""
_AS_CONFIGURED = "the launcher's order, as launch.placement=launcher asks"


class NotPlacedError(Exception):
    """Raised where ranks cannot be placed, so that the launcher's order stays; one line says why."""


@dataclass(frozen=True)
class RankAssignment:
    """Order of nodes that all processes agree on. It lists no single process, so that it stays small in a large job."""

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
    gpus: list[int] = field(default_factory=list)
    """gpus[n]: the GPU of local rank n, on every node; empty: its own."""
    gpu_reason: str | None = None
    """One line on the GPUs of local ranks; None if there is nothing to choose."""

    def find_rank(self, process: int, node: int, local: int) -> int:
        """Return the rank of a process; local: its local rank on `node`."""
        return self.find_node_position(node) * self.ranks_per_node + local if self.nodes else process

    def find_node_position(self, node: int) -> int:
        """Return the position of a node in the order of ranks."""
        return self.nodes.index(node) if self.nodes else node

    def map_processes(self) -> tuple[int, ...]:
        """Return the rank of each process."""
        if not self.nodes:
            return tuple(range(self.world))
        size, position_of = self.ranks_per_node, {node: index for index, node in enumerate(self.nodes)}
        ranks = [0] * self.world
        for node, index in position_of.items():
            for local in range(size):
                process = self.processes[node][local] if self.processes else node * size + local
                ranks[process] = index * size + local
        return tuple(ranks)

    def to_text(self) -> str:
        """Encode for the store: the same bytes for the same assignment, since they are hashed."""
        return json.dumps(asdict(self), sort_keys=True, separators=(",", ":"))


def hash_assignment(text: str) -> str:
    """Return the SHA-256 of an assignment's text in hexadecimal digits."""
    return hashlib.sha256(text.encode()).hexdigest()


def decide_assignment(
    config: RunConfig, infos: Sequence[ProcessInfo], processes: int, search: SearchPlacement
) -> RankAssignment:
    """Decide on process 0 which ranks go where. Never raises: if the search fails, the launcher's order stays."""
    try:
        nodes = group_by_node(infos, processes)
    except NotPlacedError as why:
        return _keep_launchers_order(infos, processes, why)
    try:
        placement = _search_if_needed(config, nodes, search)
    except NotPlacedError as why:
        return _keep_launchers_order(infos, processes, why, nodes)
    except UserError as error:
        return _keep_launchers_order(infos, processes, NotPlacedError(str(error)), nodes)
    except Exception as error:
        log.warning("placement failed", exc_info=error)
        lines = str(error).splitlines()
        description = f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__
        return _keep_launchers_order(infos, processes, NotPlacedError(f"the search failed with {description}"), nodes)
    return _assign_placed(nodes, placement) if placement else _assign_launchers_order(nodes)


def group_by_node(infos: Sequence[ProcessInfo], processes: int) -> list[list[ProcessInfo]]:
    """Group processes by node, nodes in the launcher's order, each sorted by local rank.

    processes: how many the job has. Raises NotPlacedError if the infos contradict each other, or if nodes have
    different numbers of ranks.
    """
    if sorted(info.process for info in infos) != list(range(processes)):
        raise NotPlacedError(f"{len(infos)} of {processes} processes said where they are, or two said the same")
    nodes: dict[int, list[ProcessInfo]] = {}
    for info in sorted(infos, key=lambda info: (info.node, info.local)):
        nodes.setdefault(info.node, []).append(info)
    for number, members in nodes.items():
        if [info.local for info in members] != list(range(len(members))):
            raise NotPlacedError(f"local ranks of node {number} are {[info.local for info in members]}")
        if len(hosts := {info.host for info in members}) > 1:
            raise NotPlacedError(f"ranks of node {number} say that they are on {' and '.join(sorted(hosts))}")
    if sorted(nodes) != list(range(len(nodes))):
        raise NotPlacedError(f"nodes are numbered {', '.join(map(str, sorted(nodes)[:5]))}, not from 0 without a gap")
    sizes = Counter(len(members) for members in nodes.values())
    if len(sizes) > 1:
        counts = ", ".join(f"{count} with {size}" for size, count in sorted(sizes.items()))
        raise NotPlacedError(f"nodes have not the same number of ranks ({counts})")
    # Slurm 26.05 numbers tasks by its topology, not by node index: the launcher's order is that of the tasks.
    return sorted(nodes.values(), key=lambda members: min(info.process for info in members))


def _search_if_needed(
    config: RunConfig, nodes: Sequence[Sequence[ProcessInfo]], search: SearchPlacement
) -> Placement | None:
    """Return a better order of the nodes; None if there is nothing to search for."""
    if len(nodes) == 1 or config.launch.placement == "launcher":
        return None
    hosts = [members[0].host for members in nodes]
    for host, count in Counter(hosts).items():
        if count > 1:
            raise NotPlacedError(f"the launcher counts {host} as {count} nodes")
    placement = search(config, nodes)
    assert sorted(placement.nodes) == list(range(len(nodes))), "a placement that is not a permutation"
    assert placement.ranks_per_node == len(nodes[0]), "a placement of other nodes"
    return placement


def _assign_placed(nodes: Sequence[Sequence[ProcessInfo]], placement: Placement) -> RankAssignment:
    result = placement_to_json(placement)
    del result["rank_to_slot"]
    assignment = _assign_whole_nodes(nodes, placement.nodes, placement.reason)
    return replace(assignment, result=result)


def _assign_launchers_order(nodes: Sequence[Sequence[ProcessInfo]]) -> RankAssignment:
    """Take the launcher's order, where there is one node or the configuration asks for it."""
    if len(nodes) == 1:
        return _assign_whole_nodes(nodes, (0,), "one node: nothing to place")
    if _are_consecutive(nodes):
        return _assign_whole_nodes(nodes, range(len(nodes)), _AS_CONFIGURED)
    infos = [info for members in nodes for info in members]
    return _assign_as_launched(infos, len(infos), _AS_CONFIGURED)


def _keep_launchers_order(
    infos: Sequence[ProcessInfo],
    processes: int,
    error: NotPlacedError,
    nodes: Sequence[Sequence[ProcessInfo]] | None = None,
) -> RankAssignment:
    """Keep the launcher's order, with a warning that says why. nodes: None if they could not be told apart."""
    reason = f"the launcher's order, not placed: {error}"
    if nodes is not None and _are_consecutive(nodes):
        return replace(_assign_whole_nodes(nodes, range(len(nodes)), reason), warning=reason)
    return replace(_assign_as_launched(infos, processes, reason), warning=reason)


def _assign_as_launched(infos: Sequence[ProcessInfo], processes: int, reason: str) -> RankAssignment:
    """Give every process the rank that the launcher gave it."""
    first = min(infos, key=lambda info: info.process)
    return RankAssignment(world=processes, reason=reason, master=first.address, port=first.port)


def _are_consecutive(nodes: Sequence[Sequence[ProcessInfo]]) -> bool:
    return [info.process for members in nodes for info in members] == list(range(sum(map(len, nodes))))


def _assign_whole_nodes(nodes: Sequence[Sequence[ProcessInfo]], order: Sequence[int], reason: str) -> RankAssignment:
    """Give consecutive ranks to each node. order: positions in `nodes`."""
    consecutive = _are_consecutive(nodes) and [members[0].node for members in nodes] == list(range(len(nodes)))
    first = nodes[order[0]][0]
    by_index = {members[0].node: [info.process for info in members] for members in nodes}
    note = "" if _are_consecutive(nodes) else "; ranks of a node made consecutive, unlike in the launcher's order"
    return RankAssignment(
        world=sum(map(len, nodes)),
        reason=reason + note,
        nodes=[nodes[index][0].node for index in order],
        ranks_per_node=len(nodes[0]),
        hosts=[members[0].host for members in sorted(nodes, key=lambda members: members[0].node)],
        processes=None if consecutive else [by_index[node] for node in sorted(by_index)],
        master=first.address,
        port=first.port,
    )


def parse_assignment(text: str) -> RankAssignment:
    """Decode what RankAssignment.to_text encoded."""
    content: Mapping[str, Any] = json.loads(text)
    return RankAssignment(**content)


def search_placement(
    config: RunConfig, nodes: Sequence[Sequence[ProcessInfo]], parameters: Callable[[], int] | None = None
) -> Placement:
    """Search for the best order of the nodes, which are given in the launcher's order.

    parameters: counts the parameters of a custom model, whose shape is only known to the model itself.
    Raises NotPlacedError if nothing tells how the nodes are connected, UserError for a file that cannot be read.
    """
    from hpc_train.placement.node_locations import locate_hosts
    from hpc_train.placement.search import make_placement_job, place_nodes

    locations = locate_hosts(
        config.cluster, make_hosts([members[0] for members in nodes]), "SLURM_JOB_ID" in os.environ
    )
    if locations.problem is not None:
        raise NotPlacedError(locations.problem)
    has_unknown_shape = isinstance(config.model, (CustomModelConfig, HfModelConfig))
    count = parameters() if parameters is not None and has_unknown_shape else None
    return place_nodes(make_placement_job(config, locations, len(nodes[0]), count))


def make_hosts(heads: Sequence[ProcessInfo]) -> list[JobHost]:
    """Convert nodes to the form that `locate_hosts` takes. heads: local rank 0 of every node."""
    from hpc_train.placement.node_locations import JobHost

    return [
        JobHost(
            head.host,
            head.slurm.get("SLURMD_NODENAME"),
            head.slurm.get("SLURM_TOPOLOGY_ADDR"),
            head.slurm.get("SLURM_TOPOLOGY_ADDR_PATTERN"),
            head.clique,
        )
        for head in heads
    ]
