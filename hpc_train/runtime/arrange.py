"""arrange: from a task to its rank. Facts, plan, binding and environment, all before the process group exists."""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import MutableMapping, Sequence
from dataclasses import replace
from datetime import timedelta
from typing import Any

from hpc_train.api import RankMap, Task
from hpc_train.config.run import RunConfig
from hpc_train.errors import UserError
from hpc_train.placement.environment import Setting, apply, cpu_settings, inherited, nic_settings, socket_settings
from hpc_train.runtime.agreement import agree, leave_together
from hpc_train.runtime.devices import pci_address
from hpc_train.runtime.export import export
from hpc_train.runtime.facts import Facts, hear_node, own_facts
from hpc_train.runtime.held import Held, hold
from hpc_train.runtime.network import own_address
from hpc_train.runtime.plan import Plan, Search, decide
from hpc_train.runtime.search import search
from hpc_train.runtime.start import identity_map, pick_device
from hpc_train.runtime.views import mpi_disagreement, mpi_missing, mpi_view, slurm_differs


def arrange(
    task: Task,
    config: RunConfig,
    needs_mpi: str | None = None,
    env: MutableMapping[str, str] | None = None,
    find: Search = search,
) -> RankMap:
    """Which rank every process takes; this one is bound to its processors and has its environment. A collective.

    needs_mpi: the setting for which MPI must have started the ranks. env: default this process's.
    Raises UserError, on every process, where launch.placement=strict and the ranks cannot be placed, and where MPI
    sees another job than the launcher.
    """
    if task.store is None:
        return identity_map(task)
    env = os.environ if env is None else env
    address, interface = own_address(task.host, task.nodes, config.cluster.fabric.interface)
    gpu = pci_address(pick_device(task, config))
    if needs_mpi and (missing := mpi_missing(task.launcher, env)):
        raise UserError(f"{needs_mpi}: {missing}")
    mine = own_facts(task, env, address, gpu, mpi_view() if needs_mpi else None)
    timeout = timedelta(seconds=config.launch.timeout_seconds)
    plan, hashed = agree(task, mine, timeout, lambda facts: _decide(config, task, facts, needs_mpi, env, find))
    _check(plan, task, config)
    here = hear_node(task)
    held = hold(config.launch, [fact.seat for fact in here], task.local, env, mpi=needs_mpi is not None)
    wanted = [Setting(*it) for it in plan.settings]
    sockets = socket_settings(interface, task.nodes, config.cluster.fabric.interface is not None)
    done, kept = apply([*sockets, *wanted], env)
    if task.launcher != "single":
        export(plan, task, env)
    own = {**held.as_json(), "gpu": gpu, "nic": here[0].nic_of.get(gpu or "")}
    lines = _lines(plan, task, held, done if task.nodes > 1 else done[len(sockets) :], kept)
    return RankMap(plan.map(), plan.reason, plan.warning, tuple(lines), _shared(plan, hashed, done, kept), own)


def _decide(
    config: RunConfig,
    task: Task,
    facts: list[Facts],
    needs_mpi: str | None,
    env: MutableMapping[str, str],
    find: Search,
) -> Plan:
    """On process 0: the plan, and what is the same for all ranks beside it."""
    plan = decide(config, facts, task.processes, find)
    heads = [fact for fact in facts if fact.local == 0]
    settings = [
        *nic_settings([fact.nics for fact in heads], [fact.dropped_nics for fact in heads]),
        *cpu_settings(any(seat.near and not seat.near & seat.allowed for seat in (fact.seat for fact in facts))),
    ]
    differs = slurm_differs(task, env)
    return replace(
        plan,
        refusal=mpi_disagreement(facts, task.launcher, needs_mpi) if needs_mpi else None,
        notes=[*plan.result.get("notes", []), *_harmful(facts), *([differs] if differs else [])],
        settings=[[it.name, it.value, it.reason] for it in settings],
    )


def _harmful(facts: Sequence[Facts]) -> list[str]:
    """One line for each variable and value that some rank has inherited."""
    who: dict[tuple[str, str], list[int]] = defaultdict(list)
    for fact in facts:
        for name, value in fact.harmful.items():
            who[name, value].append(fact.process)
    lines = []
    for (name, value), processes in sorted(who.items()):
        of = "" if len(processes) == len(facts) else f" (on {len(processes)} of {len(facts)} ranks)"
        lines += [f"{it}{of}" for it in inherited({name: value}, 2) if it.name == name]
    return lines


def _check(plan: Plan, task: Task, config: RunConfig) -> None:
    refusal = plan.refusal
    if refusal is None and plan.warning and config.launch.placement == "strict":
        refusal = f"launch.placement=strict: {plan.warning.partition(': ')[2]}"
    if refusal is not None:
        leave_together(task)
        raise UserError(refusal)


def _lines(plan: Plan, task: Task, held: Held, done: Sequence[Setting], kept: Sequence[str]) -> list[str]:
    """What rank 0 tells a person."""
    lines = []
    if task.nodes > 1 or plan.warning:
        lines.append(f"{'warning: ' if plan.warning else ''}placement: {plan.reason}")
    lines.append(f"binding: {held.line()}")
    lines += [f"set {setting}" for setting in done]
    lines += [f"kept your {name}" for name in kept]
    return lines + [f"warning: {note}" for note in plan.notes]


def _shared(plan: Plan, hashed: str, done: Sequence[Setting], kept: Sequence[str]) -> dict[str, Any]:
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
