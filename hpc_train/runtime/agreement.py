"""One plan for all processes: process 0 publishes it with its hash, everybody checks it, one objection stops it."""

from __future__ import annotations

import json
from collections.abc import Callable
from datetime import timedelta

from hpc_train.api import Task
from hpc_train.runtime.facts import Facts, hear_all, tell
from hpc_train.runtime.plan import Plan, digest, read_plan

_AGREED = "agreed"


def agree(task: Task, mine: Facts, timeout: timedelta, decide: Callable[[list[Facts]], Plan]) -> tuple[Plan, str]:
    """(the plan, its SHA-256): process 0's, or the launcher's order if any process finds it wrong. A collective.

    decide: from everybody's facts, in launcher order, to the plan; called by process 0 alone.
    Costs every process six messages to the store, whatever the size of the job.
    """
    assert task.store is not None
    tell(task, mine)
    if task.process == 0:
        task.store.set("plan/first", json.dumps([mine.address, mine.port]))
        text = decide(hear_all(task, timeout)).text()
        task.store.set("plan", f"{digest(text)}\n{text}")
    hashed, _, text = task.store.get("plan").decode().partition("\n")
    objection = check(text, hashed, task)
    if objection is not None:
        task.store.set("plan/objection", f"process {task.process} on {task.host}: {objection}")
    if task.store.add("plan/seen", 1) == task.processes:
        objected = task.store.check(["plan/objection"])
        task.store.set("plan/verdict", task.store.get("plan/objection").decode() if objected else _AGREED)
    verdict = task.store.get("plan/verdict").decode()
    if verdict == _AGREED:
        return read_plan(text), hashed
    plan = _fallback(task, verdict)
    return plan, digest(plan.text())


def _fallback(task: Task, objection: str) -> Plan:
    assert task.store is not None
    master, port = json.loads(task.store.get("plan/first"))
    reason = f"the launcher's order, not placed: {objection}"
    return Plan(world=task.processes, reason=reason, master=master, port=port, warning=reason)


def check(text: str, hashed: str, task: Task) -> str | None:
    """What is wrong with a plan for this process; None if nothing is."""
    if digest(text) != hashed:
        return "the plan is not the one whose hash came with it"
    plan = read_plan(text)
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


def leave_together(task: Task) -> None:
    """Let process 0, with which the store ends, be the last to go where all are about to fail. A collective."""
    assert task.store is not None
    if task.store.add("plan/leaving", 1) == task.processes:
        task.store.set("plan/left", "")
    if task.process == 0:
        task.store.wait(["plan/left"])
