"""The ranks of a job examine it together."""

from __future__ import annotations

import os
from collections.abc import Mapping
from datetime import timedelta
from typing import TypeVar

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from hpc_train.api import Task
from hpc_train.cluster.machine import this_node
from hpc_train.collectives import all_gather_values
from hpc_train.config.degrees import AXES, Degrees, resolve
from hpc_train.config.parallel import ParallelConfig
from hpc_train.config.run import RunConfig
from hpc_train.doctor.agreement import agreement
from hpc_train.doctor.command import node_findings
from hpc_train.doctor.finding import Finding, bad, exit_code
from hpc_train.doctor.measure import axis_reductions, own_speed
from hpc_train.doctor.report import Report, Speed, own_report
from hpc_train.doctor.speeds import reductions, speeds
from hpc_train.errors import UserError
from hpc_train.messages import Codec
from hpc_train.parallel.support.server import needs_mpi
from hpc_train.placement.environment import apply, socket_settings
from hpc_train.runtime.identity import Identity
from hpc_train.runtime.network import own_address
from hpc_train.runtime.start import join, shut_down

TIMEOUT = timedelta(minutes=2)
"""For ranks to meet, and for each of their exchanges: who comes later has failed."""

T = TypeVar("T")


def examine(config: RunConfig, me: Identity, env: Mapping[str, str]) -> tuple[list[Finding] | None, int]:
    """(what was found, on rank 0 and on a rank that cannot meet the others, else None; exit code, the same for all)."""
    per_node = -(-me.processes // me.nodes)
    mine = node_findings(config, env, me.host, me.nodes, per_node) if me.local == 0 else []
    try:
        network = own_address(me.host, me.nodes, config.cluster.fabric.interface)
        task = _meet(config, env, network[1])
    except (UserError, RuntimeError) as error:
        why = " ".join(str(error).split())[:300]
        advice = "can this node reach that of rank 0? see interface, and the output of the other ranks"
        return [*mine, bad("job", f"process {me.process} on {me.host} does not meet the others: {why}", advice)], 1
    node = this_node().nodes[0] if me.local == 0 else None
    try:
        return _together(config, task, own_report(task, config, env, network, mine, node))
    finally:
        shut_down()


def _meet(config: RunConfig, env: Mapping[str, str], interface: str) -> Task:
    task = join(env, config.cluster.fabric.interface, TIMEOUT)
    apply(socket_settings(interface, task.nodes, config.cluster.fabric.interface is not None), os.environ)
    _start(task, "gloo")
    return task


def _start(task: Task, backend: str) -> None:
    """The process group, in the launcher's order; by gloo first, which works where nothing else does."""
    assert task.store is not None
    store = dist.PrefixStore(f"doctor/{backend}", task.store)
    dist.init_process_group(backend, store=store, rank=task.process, world_size=task.processes, timeout=TIMEOUT)


def _together(config: RunConfig, task: Task, mine: Report) -> tuple[list[Finding] | None, int]:
    reports = everybody(mine)
    findings = list(agreement(reports, task.launcher, needs_mpi(config) is not None))
    device = _device(reports, task)
    if device.type == "cuda":
        shut_down()
        _start(task, "cpu:gloo,cuda:nccl")
    findings += speeds(reports, everybody(own_speed(device)))
    degrees, wrong = _degrees(config, task.processes)
    findings += wrong
    mesh = init_device_mesh(device.type, degrees.sizes, mesh_dim_names=AXES)
    hosts = [report.host for report in reports]
    findings += reductions(axis_reductions(config, degrees, hosts, mesh, device))
    code = max(everybody(exit_code(findings)))
    return (findings if task.process == 0 else None), code


def everybody(mine: T) -> list[T]:
    """What each rank has, by rank."""
    return all_gather_values(mine, codec=Codec((Report, Finding, Speed)))


def _device(reports: list[Report], task: Task) -> torch.device:
    """This rank's GPU where all ranks have one, else the CPU."""
    if not all(report.gpus for report in reports):
        return torch.device("cpu")
    device = torch.device("cuda", task.local % torch.cuda.device_count())
    torch.cuda.set_device(device)
    return device


def _degrees(config: RunConfig, ranks: int) -> tuple[Degrees, list[Finding]]:
    """Those of the configuration; one axis of all ranks where they do not fit the job."""
    try:
        return resolve(config.parallel, ranks), []
    except UserError as error:
        advice = "give the degrees of the run that this job is for, or none"
        return resolve(ParallelConfig(), ranks), [bad("parallel", str(error), advice)]
