"""Check a job from all of its ranks together.

One process of each node checks its machine. All meet over gloo, which works where NCCL does not, compare what they are,
and then use NCCL where all have a GPU: so a broken network is told from ranks that do not agree.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import timedelta
from typing import TypeVar

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from hpc_train.cluster.this_machine import describe_this_node
from hpc_train.config.parallel import AXES, Degrees, ParallelConfig, resolve_degrees
from hpc_train.config.run import RunConfig
from hpc_train.doctor.agreement import RankReport, RankSpeed, check_agreement, make_report
from hpc_train.doctor.findings import Finding, choose_exit_code, fail_check
from hpc_train.doctor.machine import check_machine
from hpc_train.doctor.speeds import (
    check_reductions,
    check_slow_nodes,
    check_speeds,
    measure_reductions,
    measure_speed,
)
from hpc_train.errors import UserError
from hpc_train.interfaces import Task
from hpc_train.messages import Codec, all_gather_values
from hpc_train.parallel.rules.parameter_server import find_mpi_setting
from hpc_train.placement.communication_environment import apply_settings, choose_socket_settings
from hpc_train.resilience.preflight import SIZES, run_preflight
from hpc_train.runtime.device_settings import separate_ranks_on_one_gpu
from hpc_train.runtime.identity import ProcessIdentity, find_local_address
from hpc_train.runtime.start import join, leave_process_group

TIMEOUT = timedelta(minutes=2)
"""Time limit for ranks to connect, and for each exchange; a later rank counts as failed."""

T = TypeVar("T")


def check_job(config: RunConfig, identity: ProcessIdentity, env: Mapping[str, str]) -> tuple[list[Finding] | None, int]:
    """Check the job; return the findings (None on ranks that do not print them) and the exit code.

    Rank 0 has the findings, and so has a rank that cannot connect to the others.
    """
    # One process of each node checks the machine.
    per_node = -(-identity.processes // identity.nodes)
    findings = check_machine(config, env, identity.host, identity.nodes, per_node) if identity.local == 0 else []
    try:
        network = find_local_address(identity.host, identity.nodes, config.cluster.fabric.interface)
        task = _join_job(config, env, network[1])
    except (UserError, RuntimeError) as error:
        why = " ".join(str(error).split())[:300]
        advice = "can this node reach that of rank 0? see interface, and the output of the other ranks"
        return [
            *findings,
            fail_check("job", f"process {identity.process} on {identity.host} does not meet the others: {why}", advice),
        ], 1
    node = describe_this_node().nodes[0] if identity.local == 0 else None
    try:
        return _check_together(config, task, make_report(task, config, env, network, findings, node))
    finally:
        leave_process_group()


def _join_job(config: RunConfig, env: Mapping[str, str], interface: str) -> Task:
    task = join(env, config.cluster.fabric.interface, TIMEOUT)
    apply_settings(
        choose_socket_settings(interface, task.nodes, config.cluster.fabric.interface is not None), os.environ
    )
    _init_process_group(task, "gloo")
    return task


def _init_process_group(task: Task, backend: str) -> None:
    """Start the process group in the launcher's order. gloo comes first: it works where NCCL does not."""
    assert task.store is not None
    store = dist.PrefixStore(f"doctor/{backend}", task.store)
    dist.init_process_group(backend, store=store, rank=task.process, world_size=task.processes, timeout=TIMEOUT)


def _check_together(config: RunConfig, task: Task, report: RankReport) -> tuple[list[Finding] | None, int]:
    reports = gather_from_all(report)
    findings = list(check_agreement(reports, task.launcher, find_mpi_setting(config) is not None))
    device = _choose_device(reports, task)
    if device.type == "cuda":
        leave_process_group()
        separate_ranks_on_one_gpu(task, device)
        _init_process_group(task, "cpu:gloo,cuda:nccl")
    findings += check_speeds(reports, gather_from_all(measure_speed(device)))
    if task.nodes > 1:
        kind = config.resilience.preflight if config.resilience.preflight != "off" else "quick"
        place = _Place(task.process, task.local, task.node, device)
        findings.append(check_slow_nodes(run_preflight(place, task.host, SIZES[kind, device.type])))
    degrees, wrong = _resolve_degrees(config, task.processes)
    findings += wrong
    mesh = init_device_mesh(device.type, degrees.sizes, mesh_dim_names=AXES)
    hosts = [report.host for report in reports]
    findings += check_reductions(measure_reductions(config, degrees, hosts, mesh, device))
    code = max(gather_from_all(choose_exit_code(findings)))
    return (findings if task.process == 0 else None), code


@dataclass(frozen=True)
class _Place:
    """Place of this rank in the job, for the pre-flight (a RankPlace)."""

    rank: int
    local_rank: int
    node: int
    device: torch.device


def gather_from_all(value: T) -> list[T]:
    """Gather a value from every rank, in rank order."""
    return all_gather_values(value, codec=Codec((RankReport, Finding, RankSpeed)))


def _choose_device(reports: list[RankReport], task: Task) -> torch.device:
    """Return this rank's GPU if all ranks have one, else the CPU."""
    if not all(report.gpus for report in reports):
        return torch.device("cpu")
    device = torch.device("cuda", task.local % torch.cuda.device_count())
    torch.cuda.set_device(device)
    return device


def _resolve_degrees(config: RunConfig, ranks: int) -> tuple[Degrees, list[Finding]]:
    """Return the degrees of the configuration; if they do not fit the job, one axis of all ranks and a finding."""
    try:
        return resolve_degrees(config.parallel, ranks), []
    except UserError as error:
        advice = "give the degrees of the run that this job is for, or none"
        return resolve_degrees(ParallelConfig(), ranks), [fail_check("parallel", str(error), advice)]
