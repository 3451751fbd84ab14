"""Give every process its rank: agree on an assignment, bind the process, and export rank and size.

The entry point is `arrange_ranks`, which every process calls before the process group exists. Every process publishes
its ProcessInfo. Process 0 decides (rank_assignment.py) and publishes a RankAssignment with its hash. Every process
checks it, and if one of them objects, all return to the launcher's order. `arrange_ranks` also binds the process and
sets the variables by which other libraries learn rank and size.
"""

from __future__ import annotations

import os
import sys
from collections import defaultdict
from collections.abc import Callable, MutableMapping, Sequence
from dataclasses import replace
from datetime import timedelta
from typing import Any

import torch

from hpc_train.config.run import RunConfig
from hpc_train.errors import UserError
from hpc_train.interfaces import RankMap, Task
from hpc_train.placement.communication_environment import (
    VariableSetting,
    choose_cpu_settings,
    choose_nic_settings,
    choose_socket_settings,
    find_harmful_variables,
    find_missing_file,
)
from hpc_train.runtime.binding import RankBinding, bind_rank, find_pci_address
from hpc_train.runtime.consensus import decide_on_process_0, leave_together
from hpc_train.runtime.gpu_assignment import GpuAssignment, assign_gpus, seat_ranks
from hpc_train.runtime.host_info import (
    ProcessInfo,
    collect_process_info,
    compare_with_slurm,
    find_missing_mpi,
    find_mpi_disagreement,
    gather_node_info,
    gather_process_info,
    publish_process_info,
    read_mpi_rank_and_size,
)
from hpc_train.runtime.identity import find_local_address
from hpc_train.runtime.rank_assignment import (
    RankAssignment,
    SearchPlacement,
    decide_assignment,
    group_by_node,
    hash_assignment,
    parse_assignment,
    search_placement,
)
from hpc_train.runtime.rank_environment import (
    RankEnvironment,
    choose_gpu_nic_settings,
    choose_mpi_nic_settings,
)
from hpc_train.runtime.start import make_identity_map, pick_device
from hpc_train.runtime.store.exchange import arrive_at_gate, publish_value, read_published


def agree_on_assignment(
    task: Task, local_info: ProcessInfo, timeout: timedelta, decide: Callable[[list[ProcessInfo]], RankAssignment]
) -> tuple[RankAssignment, str]:
    """Agree on process 0's assignment, or on the launcher's order if any process objects. A collective.

    decide: called by process 0 alone, with the ProcessInfo of all processes in the launcher's order.
    Returns the assignment and its SHA-256. Costs every process six messages to the store, whatever the job's size.
    """
    assert task.store is not None
    publish_process_info(task, local_info)
    infos = gather_process_info(task, timeout) if task.process == 0 else []

    def assign() -> dict[str, Any]:
        text = decide(infos).to_text()
        return {"hash": hash_assignment(text), "text": text, "first": [local_info.address, local_info.port]}

    decision = decide_on_process_0(task, "plan", assign)
    objection = _gather_objection(task, find_assignment_problem(decision["text"], decision["hash"], task))
    if objection is None:
        return parse_assignment(decision["text"]), decision["hash"]
    master, port = decision["first"]
    reason = f"the launcher's order, not placed: {objection}"
    assignment = RankAssignment(world=task.processes, reason=reason, master=master, port=port, warning=reason)
    return assignment, hash_assignment(assignment.to_text())


def _gather_objection(task: Task, objection: str | None) -> str | None:
    """Return one process's objection to the assignment, the same on all; None if no process objects. A collective."""
    assert task.store is not None
    if objection is not None:
        publish_value(task.store, "plan/objection", f"process {task.process} on {task.host}: {objection}")
    # The last to look at the plan decides: by then every objection is in the store.
    if arrive_at_gate(task.store, "plan/seen", task.processes):
        objected = task.store.check(["plan/objection"])
        publish_value(task.store, "plan/verdict", read_published(task.store, "plan/objection") if objected else None)
    verdict: str | None = read_published(task.store, "plan/verdict")
    return verdict


def find_assignment_problem(text: str, hashed: str, task: Task) -> str | None:
    """Return one line on what is wrong with an assignment for this process; None if nothing is."""
    if hash_assignment(text) != hashed:
        return "the plan is not the one whose hash came with it"
    assignment = parse_assignment(text)
    if assignment.world != task.processes:
        return f"the plan is for {assignment.world} processes, the job has {task.processes}"
    if assignment.gpus and sorted(assignment.gpus) != list(range(assignment.ranks_per_node)):
        return "the plan gives two local ranks the same GPU"
    ranks = assignment.map_processes()
    if sorted(ranks) != list(range(assignment.world)):
        return "the plan gives two processes the same rank"
    if not assignment.nodes:
        return None
    if task.node >= len(assignment.hosts) or assignment.hosts[task.node] != task.host:
        expected_host = assignment.hosts[task.node] if task.node < len(assignment.hosts) else "nowhere"
        return f"the plan has node {task.node} on {expected_host}"
    if ranks[task.process] != assignment.find_rank(task.process, task.node, task.local):
        return f"the plan has another process as local rank {task.local} of node {task.node}"
    return None


def export_environment(assignment: RankAssignment, task: Task, env: MutableMapping[str, str]) -> dict[str, str]:
    """Set RANK, WORLD_SIZE, LOCAL_RANK, LOCAL_WORLD_SIZE, NODE_RANK, MASTER_ADDR and MASTER_PORT; returns them.

    Existing values are replaced: those of a launcher that knows no placement would make a library take another rank's
    place. Under torchrun the address stays, because clients look for the agent's store there.
    """
    size = assignment.ranks_per_node
    variables = {
        "RANK": str(assignment.find_rank(task.process, task.node, task.local)),
        "WORLD_SIZE": str(assignment.world),
        "LOCAL_RANK": str(task.local),
        "NODE_RANK": str(assignment.find_node_position(task.node)),
    }
    if size:
        variables["LOCAL_WORLD_SIZE"] = str(size)
    if env.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
        variables |= {"MASTER_ADDR": assignment.master, "MASTER_PORT": str(assignment.port)}
    env.update(variables)
    return variables


def arrange_ranks(
    task: Task,
    config: RunConfig,
    mpi_setting: str | None = None,
    env: MutableMapping[str, str] | None = None,
    find: SearchPlacement = search_placement,
) -> RankMap:
    """Agree on which rank each process takes, bind this process and set its environment variables. A collective.

    mpi_setting: the setting that requires MPI to have started the ranks; None if no setting does. env: changed in
    place, by default this process's. find: searches for a placement.
    Raises UserError, on every process, if launch.placement=strict and the ranks cannot be placed, or if MPI and the
    launcher count ranks differently.
    """
    if task.store is None:
        return make_identity_map(task)
    env = os.environ if env is None else env
    # All of this comes before the process group: ranks, and so the group's members, are only decided here.
    environment = RankEnvironment(env, config.cluster.environment)
    local_info, interface = _collect_local_info(task, config, mpi_setting, environment)
    timeout = timedelta(seconds=config.launch.timeout_seconds)
    assignment, hashed = agree_on_assignment(
        task, local_info, timeout, lambda infos: _decide_on_process_0(config, task, infos, mpi_setting, env, find)
    )
    _check_assignment(assignment, task, config)
    # The rest concerns one node at a time: its ranks share out its CPUs by what all of them have published.
    node_infos = gather_node_info(task)
    seats = seat_ranks(node_infos, assignment.gpus)
    binding = bind_rank(config.launch, seats, task.local, env, mpi=mpi_setting is not None)
    gpu = node_infos[assignment.gpus[task.local]].gpu if assignment.gpus else local_info.gpu
    # Before a library reads them: gloo, NCCL and OpenMP look at their variables once.
    sockets = choose_socket_settings(interface, task.nodes, config.cluster.fabric.interface is not None)
    settings = [VariableSetting(*setting) for setting in assignment.settings]
    nic_settings = [] if mpi_setting else choose_gpu_nic_settings(node_infos, gpu, task.nodes)
    environment.set([*sockets, *settings], nic_settings)
    if task.launcher != "single":
        export_environment(assignment, task, env)
    per_rank = {**binding.as_json(), "gpu": gpu, "nic": node_infos[0].nic_of.get(gpu or "")}
    if environment.per_rank:
        per_rank["environment"] = environment.per_rank
    changes = environment.describe(quiet=sockets if task.nodes == 1 else ())
    return RankMap(
        process_to_rank=assignment.map_processes(),
        reason=assignment.reason,
        warning=assignment.warning,
        lines=tuple(_report_lines(assignment, task, binding, changes)),
        shared=_describe_assignment(assignment, hashed, environment),
        per_rank=per_rank,
        gpu=assignment.gpus[task.local] if assignment.gpus else None,
    )


def _collect_local_info(
    task: Task, config: RunConfig, mpi_setting: str | None, environment: RankEnvironment
) -> tuple[ProcessInfo, str]:
    """Return this process's facts, and the interface of its address. A collective with mpi_setting: it starts MPI."""
    address, interface = find_local_address(task.host, task.nodes, config.cluster.fabric.interface)
    gpu = find_pci_address(pick_device(task, config))
    visible = torch.cuda.device_count() if gpu is not None else 0
    mpi_view = None
    if mpi_setting:
        if missing := find_missing_mpi(task.launcher, environment.env):
            raise UserError(f"{mpi_setting}: {missing}")
        if "mpi4py.MPI" not in sys.modules:
            environment.set_before_mpi(choose_mpi_nic_settings(task, gpu))
        mpi_view = read_mpi_rank_and_size(task, timedelta(seconds=config.launch.timeout_seconds))
    return collect_process_info(task, environment.env, address, gpu, mpi_view, visible), interface


def _decide_on_process_0(
    config: RunConfig,
    task: Task,
    infos: list[ProcessInfo],
    mpi_setting: str | None,
    env: MutableMapping[str, str],
    find: SearchPlacement,
) -> RankAssignment:
    """Decide the assignment on process 0, with the settings and notes that are the same for all ranks."""
    assignment = decide_assignment(config, infos, task.processes, find)
    # Only local rank 0 has surveyed the NICs of its node, for all of its ranks.
    heads = [info for info in infos if info.local == 0]
    gpus = _assign_gpus_of_placed(config, assignment, infos)
    settings = [
        *choose_nic_settings([info.nics for info in heads], [info.dropped_nics for info in heads]),
        *choose_cpu_settings(_are_gpus_far(infos, gpus)),
    ]
    differs = compare_with_slurm(task, env)
    return replace(
        assignment,
        refusal=(find_mpi_disagreement(infos, task.launcher, mpi_setting) if mpi_setting else None)
        or find_missing_file(config.cluster.environment, task.host),
        notes=[*assignment.result.get("notes", []), *_find_harmful_settings(infos), *([differs] if differs else [])],
        settings=[[setting.name, setting.value, setting.reason] for setting in settings],
        gpus=list(gpus.gpus),
        gpu_reason=gpus.reason,
    )


def _assign_gpus_of_placed(
    config: RunConfig, assignment: RankAssignment, infos: Sequence[ProcessInfo]
) -> GpuAssignment:
    """Assign the GPUs where each node has consecutive ranks: only then a node's groups are known."""
    return assign_gpus(config, group_by_node(infos, assignment.world)) if assignment.nodes else GpuAssignment()


def _are_gpus_far(infos: Sequence[ProcessInfo], gpus: GpuAssignment) -> bool:
    """Whether the launcher allows some rank no processor next to the GPU that it takes."""
    seats = (
        [seat for members in group_by_node(infos, len(infos)) for seat in seat_ranks(members, gpus.gpus)]
        if gpus.gpus
        else [info.seat for info in infos]
    )
    return any(seat.near and not seat.near & seat.allowed for seat in seats)


def _find_harmful_settings(infos: Sequence[ProcessInfo]) -> list[str]:
    """Return one line for each harmful variable and value that some rank has inherited."""
    processes_with: dict[tuple[str, str], list[int]] = defaultdict(list)
    for info in infos:
        for name, value in info.harmful.items():
            processes_with[name, value].append(info.process)
    lines = []
    for (name, value), processes in sorted(processes_with.items()):
        count = "" if len(processes) == len(infos) else f" (on {len(processes)} of {len(infos)} ranks)"
        harmful = find_harmful_variables({name: value}, 2)  # several ranks on a node: a rank has judged that already
        lines += [f"{variable}{count}" for variable in harmful if variable.name == name]
    return lines


def _check_assignment(assignment: RankAssignment, task: Task, config: RunConfig) -> None:
    refusal = assignment.refusal
    if refusal is None and assignment.warning and config.launch.placement == "strict":
        reason = assignment.warning.partition(": ")[2]  # after "the launcher's order, not placed"
        refusal = f"launch.placement=strict: {reason}"
    if refusal is not None:
        leave_together(task)
        raise UserError(refusal)


def _report_lines(assignment: RankAssignment, task: Task, binding: RankBinding, changes: Sequence[str]) -> list[str]:
    """Return the lines that rank 0 prints. changes: those on its environment variables."""
    lines = []
    if task.nodes > 1 or assignment.warning:
        lines.append(f"{'warning: ' if assignment.warning else ''}placement: {assignment.reason}")
    if assignment.gpu_reason is not None:
        order = f"local ranks take GPUs {', '.join(map(str, assignment.gpus))}: " if assignment.gpus else ""
        lines.append(f"GPUs: {order}{assignment.gpu_reason}")
    lines.append(f"binding: {binding.describe()}")
    lines += changes
    return lines + [f"warning: {note}" for note in assignment.notes]


def _describe_assignment(assignment: RankAssignment, hashed: str, environment: RankEnvironment) -> dict[str, Any]:
    """Return the part of rankmap.json that is the same for all ranks."""
    return {
        "hash": hashed,
        "warning": assignment.warning,
        **assignment.result,
        "master": [assignment.master, assignment.port],
        "environment": [
            {"name": setting.name, "value": setting.value, "reason": setting.reason} for setting in environment.shared
        ],
        "kept": environment.unchanged,
        **({"gpus": assignment.gpus} if assignment.gpus else {}),
        "notes": assignment.notes,
    }
