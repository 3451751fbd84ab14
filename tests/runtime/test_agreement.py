"""Real processes agree on one plan over a real store, or fall back together."""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from datetime import timedelta
from pathlib import Path

import pytest
from fact_helpers import backwards, facts_of

from hpc_train.config.run import RunConfig
from hpc_train.interfaces import Task
from hpc_train.runtime import arrange_ranks
from hpc_train.runtime.arrange_ranks import agree_on_assignment, find_assignment_problem
from hpc_train.runtime.host_info import ProcessInfo, gather_node_info
from hpc_train.runtime.identity import ProcessIdentity
from hpc_train.runtime.rank_assignment import RankAssignment, decide_assignment, hash_assignment
from hpc_train.runtime.rendezvous import RENDEZVOUS_VARIABLE, open_job_store

LONG = timedelta(seconds=60)
Agreed = tuple[tuple[int, ...], str, str | None, list[int]]


def member(folder: Path, mine: ProcessInfo, processes: int, nodes: int) -> Agreed:
    """One process: (its map, hash, warning, local ranks of its node)."""
    me = ProcessIdentity(mine.process, processes, mine.local, mine.node, 1, "submitit", "localhost", "agreement")
    store = open_job_store(me, {RENDEZVOUS_VARIABLE: str(folder)}, None, LONG)
    task = Task(mine.process, processes, mine.local, mine.node, nodes, "submitit", mine.host, store)
    plan, hashed = agree_on_assignment(
        task, mine, LONG, lambda facts: decide_assignment(RunConfig(), facts, processes, backwards)
    )
    here = [fact.local for fact in gather_node_info(task)]
    if store.add("done", 1) == processes:
        store.set("all done", "")
    if mine.process == 0:
        store.wait(["all done"])  # the store ends with this process
    return plan.map_processes(), hashed, plan.warning, here


def meet(
    folder: Path, facts: list[ProcessInfo], told: Callable[[ProcessInfo], ProcessInfo] = lambda it: it
) -> list[Agreed]:
    nodes = len({fact.node for fact in facts})
    with ProcessPoolExecutor(len(facts), multiprocessing.get_context("fork")) as pool:
        work = [pool.submit(member, folder, told(it), len(facts), nodes) for it in facts]
        return [it.result() for it in work]


def test_all_take_the_same_plan(tmp_path: Path) -> None:
    found = meet(tmp_path, facts_of(3, 2))
    assert {it[0] for it in found} == {(4, 5, 2, 3, 0, 1)}
    assert len({it[1] for it in found}) == 1
    assert {it[2] for it in found} == {None}
    assert [it[3] for it in found] == [[0, 1]] * 6


def test_processes_that_count_differently_fall_back_together(tmp_path: Path) -> None:
    """Two say that they are local rank 1 of node 1."""
    found = meet(tmp_path, facts_of(2, 2), lambda it: replace(it, local=1) if it.node else it)
    assert {it[0] for it in found} == {(0, 1, 2, 3)}
    assert {it[2] for it in found} == {"the launcher's order, not placed: local ranks of node 1 are [1, 1]"}


def test_one_that_objects_stops_the_plan_for_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Process 3 was told of another host than it is on."""
    real = arrange_ranks.find_assignment_problem

    def doubting(text: str, hashed: str, task: Task) -> str | None:
        return real(text, hashed, replace(task, host="moved") if task.process == 3 else task)

    monkeypatch.setattr(arrange_ranks, "find_assignment_problem", doubting)
    found = meet(tmp_path, facts_of(2, 2))
    assert {it[0] for it in found} == {(0, 1, 2, 3)}
    assert {it[2] for it in found} == {"the launcher's order, not placed: process 3 on n1: the plan has node 1 on n1"}


def test_what_a_process_checks() -> None:
    plan = decide_assignment(RunConfig(), facts_of(2, 2), 4, backwards)
    task = Task(1, 4, 1, 0, 2, "slurm", "n0")

    def says(plan: RankAssignment, task: Task = task) -> str | None:
        return find_assignment_problem(plan.to_text(), hash_assignment(plan.to_text()), task)

    assert says(plan) is None
    assert "hash" in str(find_assignment_problem(plan.to_text() + " ", hash_assignment(plan.to_text()), task))
    assert "for 4 processes, the job has 8" in str(says(plan, replace(task, processes=8)))
    assert "node 0 on n0" in str(says(plan, replace(task, host="n7")))
    assert "nowhere" in str(says(plan, replace(task, node=5)))
    assert "same rank" in str(says(replace(plan, nodes=[0, 0])))
    assert "another process as local rank 0" in str(says(plan, replace(task, local=0)))
