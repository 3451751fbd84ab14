"""Give every process its rank: process 0 decides once, from everybody's facts, which node holds which ranks.

ProcessFacts -> search_placement -> RankAssignment -> agree_on_assignment -> arrange_ranks, all before the process
group exists. Process 0 publishes the assignment with its hash, everybody checks it, and one objection puts all back
to the launcher's order. `arrange_ranks` also binds the process and sets the variables by which other libraries learn
rank and size.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, MutableMapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from hpc_train.config.model import CustomModelConfig
from hpc_train.config.run import RunConfig
from hpc_train.errors import UserError
from hpc_train.interfaces import RankMap, Task
from hpc_train.placement.communication_environment import (
    VariableSetting,
    apply_settings,
    choose_cpu_settings,
    choose_nic_settings,
    choose_socket_settings,
    find_harmful_variables,
)
from hpc_train.placement.placement_result import Placement, placement_to_json
from hpc_train.runtime.binding import RankBinding, bind_rank, find_pci_address
from hpc_train.runtime.consensus import decide_on_process_0, leave_together
from hpc_train.runtime.host_info import (
    ProcessFacts,
    collect_own_facts,
    compare_with_slurm,
    find_missing_mpi,
    find_mpi_disagreement,
    gather_all_facts,
    gather_node_facts,
    publish_facts,
    read_mpi_view,
)
from hpc_train.runtime.identity import find_own_address
from hpc_train.runtime.start import make_identity_map, pick_device
from hpc_train.runtime.store.exchange import arrive, publish, read_published

if TYPE_CHECKING:
    from hpc_train.placement.node_locations import JobHost

log = logging.getLogger(__name__)

SearchPlacement = Callable[[RunConfig, Sequence[Sequence[ProcessFacts]]], Placement]
"""(config, facts of every node in the launcher's order and of its ranks) -> a better order of the nodes."""


_ASKED = "the launcher's order, as launch.placement=launcher asks"


class NotPlacedError(Exception):
    """Why the launcher's order stays. One line."""


@dataclass(frozen=True)
class RankAssignment:
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


def hash_assignment(text: str) -> str:
    """SHA-256 of a plan's text, in hexadecimal digits."""
    return hashlib.sha256(text.encode()).hexdigest()


def decide_assignment(
    config: RunConfig, facts: Sequence[ProcessFacts], processes: int, search: SearchPlacement
) -> RankAssignment:
    """The plan for these facts. Never raises for what goes wrong on the way: the plan then is the launcher's order."""
    try:
        nodes = group_by_node(facts, processes)
    except NotPlacedError as why:
        return _keep_launchers_order(facts, processes, why)
    try:
        placement = _search_if_needed(config, nodes, search)
    except NotPlacedError as why:
        return _keep_launchers_order(facts, processes, why, nodes)
    except UserError as error:
        return _keep_launchers_order(facts, processes, NotPlacedError(str(error)), nodes)
    except Exception as error:
        log.warning("placement failed", exc_info=error)
        lines = str(error).splitlines()
        what = f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__
        return _keep_launchers_order(facts, processes, NotPlacedError(f"the search failed with {what}"), nodes)
    return _assign_placed(nodes, placement) if placement else _assign_launchers_order(config, nodes)


def group_by_node(facts: Sequence[ProcessFacts], processes: int) -> list[list[ProcessFacts]]:
    """Facts by node, in the launcher's order, and by local rank. Raises NotPlaced where they cannot all be true, or
    nodes have not the same number of ranks.
    """
    if sorted(fact.process for fact in facts) != list(range(processes)):
        raise NotPlacedError(f"{len(facts)} of {processes} processes said where they are, or two said the same")
    nodes: dict[int, list[ProcessFacts]] = {}
    for fact in sorted(facts, key=lambda it: (it.node, it.local)):
        nodes.setdefault(fact.node, []).append(fact)
    for number, members in nodes.items():
        if [fact.local for fact in members] != list(range(len(members))):
            raise NotPlacedError(f"local ranks of node {number} are {[fact.local for fact in members]}")
        if len(hosts := {fact.host for fact in members}) > 1:
            raise NotPlacedError(f"ranks of node {number} say that they are on {' and '.join(sorted(hosts))}")
    if sorted(nodes) != list(range(len(nodes))):
        raise NotPlacedError(f"nodes are numbered {', '.join(map(str, sorted(nodes)[:5]))}, not from 0 without a gap")
    sizes = Counter(len(members) for members in nodes.values())
    if len(sizes) > 1:
        counts = ", ".join(f"{count} with {size}" for size, count in sorted(sizes.items()))
        raise NotPlacedError(f"nodes have not the same number of ranks ({counts})")
    # Slurm 26.05 numbers tasks by its topology, not by node index: the launcher's order is that of the tasks.
    return sorted(nodes.values(), key=lambda members: min(fact.process for fact in members))


def _search_if_needed(
    config: RunConfig, nodes: Sequence[Sequence[ProcessFacts]], search: SearchPlacement
) -> Placement | None:
    """The better order; None where there is nothing to search for."""
    if len(nodes) == 1 or config.launch.placement == "launcher":
        return None
    hosts = [members[0].host for members in nodes]
    if twice := [host for host, count in Counter(hosts).items() if count > 1]:
        raise NotPlacedError(f"the launcher counts {twice[0]} as {Counter(hosts)[twice[0]]} nodes")
    found = search(config, nodes)
    assert sorted(found.nodes) == list(range(len(nodes))), "a placement that is no permutation"
    assert found.ranks_per_node == len(nodes[0]), "a placement of other nodes"
    return found


def _assign_placed(nodes: Sequence[Sequence[ProcessFacts]], placement: Placement) -> RankAssignment:
    result = placement_to_json(placement)
    del result["rank_to_slot"]
    plan = _assign_whole_nodes(nodes, placement.nodes, placement.reason)
    return replace(plan, result=result)


def _assign_launchers_order(config: RunConfig, nodes: Sequence[Sequence[ProcessFacts]]) -> RankAssignment:
    if len(nodes) == 1:
        return _assign_whole_nodes(nodes, (0,), "one node: nothing to place")
    if _are_consecutive(nodes):
        return _assign_whole_nodes(nodes, range(len(nodes)), _ASKED)
    facts = [fact for members in nodes for fact in members]
    return _assign_as_launched(facts, len(facts), _ASKED)


def _keep_launchers_order(
    facts: Sequence[ProcessFacts],
    processes: int,
    why: NotPlacedError,
    nodes: Sequence[Sequence[ProcessFacts]] | None = None,
) -> RankAssignment:
    reason = f"the launcher's order, not placed: {why}"
    if nodes is not None and _are_consecutive(nodes):
        return replace(_assign_whole_nodes(nodes, range(len(nodes)), reason), warning=reason)
    return replace(_assign_as_launched(facts, processes, reason), warning=reason)


def _assign_as_launched(facts: Sequence[ProcessFacts], processes: int, reason: str) -> RankAssignment:
    """Every process with the rank that the launcher gave it, on whatever node."""
    first = min(facts, key=lambda it: it.process)
    return RankAssignment(world=processes, reason=reason, master=first.address, port=first.port)


def _are_consecutive(nodes: Sequence[Sequence[ProcessFacts]]) -> bool:
    return [fact.process for members in nodes for fact in members] == list(range(sum(map(len, nodes))))


def _assign_whole_nodes(nodes: Sequence[Sequence[ProcessFacts]], order: Sequence[int], reason: str) -> RankAssignment:
    """order: positions in `nodes`."""
    consecutive = _are_consecutive(nodes) and [members[0].node for members in nodes] == list(range(len(nodes)))
    first = nodes[order[0]][0]
    by_index = {members[0].node: [fact.process for fact in members] for members in nodes}
    moved = (
        "" if _are_consecutive(nodes) else "; ranks of one node made consecutive, which the launcher's order has not"
    )
    return RankAssignment(
        world=sum(map(len, nodes)),
        reason=reason + moved,
        nodes=[nodes[at][0].node for at in order],
        ranks_per_node=len(nodes[0]),
        hosts=[members[0].host for members in sorted(nodes, key=lambda members: members[0].node)],
        processes=None if consecutive else [by_index[node] for node in sorted(by_index)],
        master=first.address,
        port=first.port,
    )


def parse_assignment(text: str) -> RankAssignment:
    """The plan that `Plan.text` wrote."""
    content: Mapping[str, Any] = json.loads(text)
    return RankAssignment(**content)


def search_placement(
    config: RunConfig, nodes: Sequence[Sequence[ProcessFacts]], parameters: Callable[[], int] | None = None
) -> Placement:
    """The best order that is found for nodes in the launcher's order, each with its ranks' facts.

    parameters: counts those of a custom model, which alone knows its shape.
    Raises NotPlaced where nothing tells how the nodes hang together, UserError for a file that cannot be read.
    """
    from hpc_train.placement.node_locations import locate_hosts
    from hpc_train.placement.search import make_placement_job, place_nodes

    where = locate_hosts(config.cluster, make_hosts([members[0] for members in nodes]), "SLURM_JOB_ID" in os.environ)
    if where.problem is not None:
        raise NotPlacedError(where.problem)
    count = parameters() if parameters is not None and isinstance(config.model, CustomModelConfig) else None
    return place_nodes(make_placement_job(config, where, len(nodes[0]), count))


def make_hosts(heads: Sequence[ProcessFacts]) -> list[JobHost]:
    """Convert nodes to the form `locate` takes. heads: the facts of local rank 0 of every node."""
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


def agree_on_assignment(
    task: Task, mine: ProcessFacts, timeout: timedelta, decide: Callable[[list[ProcessFacts]], RankAssignment]
) -> tuple[RankAssignment, str]:
    """(the plan, its SHA-256): process 0's, or the launcher's order if any process finds it wrong. A collective.

    decide: from everybody's facts, in launcher order, to the plan; called by process 0 alone.
    Costs every process six messages to the store, whatever the size of the job.
    """
    assert task.store is not None
    publish_facts(task, mine)
    facts = gather_all_facts(task, timeout) if task.process == 0 else []

    def assign() -> dict[str, Any]:
        text = decide(facts).text()
        return {"hash": hash_assignment(text), "text": text, "first": [mine.address, mine.port]}

    decision = decide_on_process_0(task, "plan", assign)
    objection = _gather_objection(task, find_assignment_problem(decision["text"], decision["hash"], task))
    if objection is None:
        return parse_assignment(decision["text"]), decision["hash"]
    master, port = decision["first"]
    reason = f"the launcher's order, not placed: {objection}"
    plan = RankAssignment(world=task.processes, reason=reason, master=master, port=port, warning=reason)
    return plan, hash_assignment(plan.text())


def _gather_objection(task: Task, objection: str | None) -> str | None:
    """Return one process's objection to the assignment, the same on all; None if nobody objects. A collective."""
    assert task.store is not None
    if objection is not None:
        publish(task.store, "plan/objection", f"process {task.process} on {task.host}: {objection}")
    # The last to look at the plan decides: by then every objection is in the store.
    if arrive(task.store, "plan/seen", task.processes):
        objected = task.store.check(["plan/objection"])
        publish(task.store, "plan/verdict", read_published(task.store, "plan/objection") if objected else None)
    verdict: str | None = read_published(task.store, "plan/verdict")
    return verdict


def find_assignment_problem(text: str, hashed: str, task: Task) -> str | None:
    """What is wrong with a plan for this process; None if nothing is."""
    if hash_assignment(text) != hashed:
        return "the plan is not the one whose hash came with it"
    plan = parse_assignment(text)
    if plan.world != task.processes:
        return f"the plan is for {plan.world} processes, the job has {task.processes}"
    ranks = plan.map()
    if sorted(ranks) != list(range(plan.world)):
        return "the plan gives two processes the same rank"
    if not plan.nodes:
        return None
    if task.node >= len(plan.hosts) or plan.hosts[task.node] != task.host:
        there = plan.hosts[task.node] if task.node < len(plan.hosts) else "nowhere"
        return f"the plan has node {task.node} on {there}"
    if ranks[task.process] != plan.rank_of(task.process, task.node, task.local):
        return f"the plan has another process as local rank {task.local} of node {task.node}"
    return None


def export_environment(plan: RankAssignment, task: Task, env: MutableMapping[str, str]) -> dict[str, str]:
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


def arrange_ranks(
    task: Task,
    config: RunConfig,
    needs_mpi: str | None = None,
    env: MutableMapping[str, str] | None = None,
    find: SearchPlacement = search_placement,
) -> RankMap:
    """Which rank every process takes; this one is bound to its processors and has its environment. A collective.

    needs_mpi: the setting for which MPI must have started the ranks. env: default this process's.
    Raises UserError, on every process, where launch.placement=strict and the ranks cannot be placed, and where MPI
    sees another job than the launcher.
    """
    if task.store is None:
        return make_identity_map(task)
    env = os.environ if env is None else env
    address, interface = find_own_address(task.host, task.nodes, config.cluster.fabric.interface)
    gpu = find_pci_address(pick_device(task, config))
    if needs_mpi and (missing := find_missing_mpi(task.launcher, env)):
        raise UserError(f"{needs_mpi}: {missing}")
    mine = collect_own_facts(task, env, address, gpu, read_mpi_view() if needs_mpi else None)
    timeout = timedelta(seconds=config.launch.timeout_seconds)
    plan, hashed = agree_on_assignment(
        task, mine, timeout, lambda facts: _decide_on_process_0(config, task, facts, needs_mpi, env, find)
    )
    _check_assignment(plan, task, config)
    here = gather_node_facts(task)
    held = bind_rank(config.launch, [fact.seat for fact in here], task.local, env, mpi=needs_mpi is not None)
    wanted = [VariableSetting(*it) for it in plan.settings]
    sockets = choose_socket_settings(interface, task.nodes, config.cluster.fabric.interface is not None)
    done, kept = apply_settings([*sockets, *wanted], env)
    if task.launcher != "single":
        export_environment(plan, task, env)
    own = {**held.as_json(), "gpu": gpu, "nic": here[0].nic_of.get(gpu or "")}
    lines = _report_lines(plan, task, held, done if task.nodes > 1 else done[len(sockets) :], kept)
    return RankMap(
        plan.map(), plan.reason, plan.warning, tuple(lines), _describe_assignment(plan, hashed, done, kept), own
    )


def _decide_on_process_0(
    config: RunConfig,
    task: Task,
    facts: list[ProcessFacts],
    needs_mpi: str | None,
    env: MutableMapping[str, str],
    find: SearchPlacement,
) -> RankAssignment:
    """On process 0: the plan, and what is the same for all ranks beside it."""
    plan = decide_assignment(config, facts, task.processes, find)
    heads = [fact for fact in facts if fact.local == 0]
    settings = [
        *choose_nic_settings([fact.nics for fact in heads], [fact.dropped_nics for fact in heads]),
        *choose_cpu_settings(any(seat.near and not seat.near & seat.allowed for seat in (fact.seat for fact in facts))),
    ]
    differs = compare_with_slurm(task, env)
    return replace(
        plan,
        refusal=find_mpi_disagreement(facts, task.launcher, needs_mpi) if needs_mpi else None,
        notes=[*plan.result.get("notes", []), *_find_harmful_settings(facts), *([differs] if differs else [])],
        settings=[[it.name, it.value, it.reason] for it in settings],
    )


def _find_harmful_settings(facts: Sequence[ProcessFacts]) -> list[str]:
    """One line for each variable and value that some rank has inherited."""
    who: dict[tuple[str, str], list[int]] = defaultdict(list)
    for fact in facts:
        for name, value in fact.harmful.items():
            who[name, value].append(fact.process)
    lines = []
    for (name, value), processes in sorted(who.items()):
        of = "" if len(processes) == len(facts) else f" (on {len(processes)} of {len(facts)} ranks)"
        lines += [f"{it}{of}" for it in find_harmful_variables({name: value}, 2) if it.name == name]
    return lines


def _check_assignment(plan: RankAssignment, task: Task, config: RunConfig) -> None:
    refusal = plan.refusal
    if refusal is None and plan.warning and config.launch.placement == "strict":
        refusal = f"launch.placement=strict: {plan.warning.partition(': ')[2]}"
    if refusal is not None:
        leave_together(task)
        raise UserError(refusal)


def _report_lines(
    plan: RankAssignment, task: Task, held: RankBinding, done: Sequence[VariableSetting], kept: Sequence[str]
) -> list[str]:
    """What rank 0 tells a person."""
    lines = []
    if task.nodes > 1 or plan.warning:
        lines.append(f"{'warning: ' if plan.warning else ''}placement: {plan.reason}")
    lines.append(f"binding: {held.line()}")
    lines += [f"set {setting}" for setting in done]
    lines += [f"kept your {name}" for name in kept]
    return lines + [f"warning: {note}" for note in plan.notes]


def _describe_assignment(
    plan: RankAssignment, hashed: str, done: Sequence[VariableSetting], kept: Sequence[str]
) -> dict[str, Any]:
    """What rankmap.json has of the plan."""
    return {
        "hash": hashed,
        "warning": plan.warning,
        **plan.result,
        "master": [plan.master, plan.port],
        "environment": [{"name": it.name, "value": it.value, "reason": it.reason} for it in done],
        "kept": list(kept),
        "notes": plan.notes,
    }
