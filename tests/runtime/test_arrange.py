"""arrange in real processes that meet in a real store: ranks, binding, environment, and refusals of all together."""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
from fact_helpers import backwards

from hpc_train.config.model import TransformerConfig
from hpc_train.config.run import RunConfig
from hpc_train.errors import UserError
from hpc_train.interfaces import Task
from hpc_train.runtime.arrange_ranks import arrange_ranks
from hpc_train.runtime.identity import ProcessIdentity
from hpc_train.runtime.rank_assignment import SearchPlacement, search_placement
from hpc_train.runtime.rendezvous import RENDEZVOUS_VARIABLE, open_job_store

LONG = timedelta(seconds=60)
SLURM = {"SLURM_TOPOLOGY_ADDR_PATTERN": "switch.switch.node"}
HERE = sorted(os.sched_getaffinity(0))


@dataclass
class Job:
    """Two nodes that are this machine twice."""

    folder: Path
    each: int = 1
    nodes: int = 2
    config: RunConfig = field(default_factory=RunConfig)
    env: dict[str, str] = field(default_factory=dict)
    leaves: tuple[str, ...] = ()
    """Leaf switch of each node; empty: Slurm tells no topology."""
    find: SearchPlacement = search_placement
    needs_mpi: str | None = None


@dataclass(frozen=True)
class Outcome:
    """What one process has afterwards."""

    refused: str | None
    rank: int = -1
    reason: str = ""
    warning: str | None = None
    lines: tuple[str, ...] = ()
    shared: dict[str, Any] = field(default_factory=dict)
    own: dict[str, Any] = field(default_factory=dict)
    env: dict[str, str] = field(default_factory=dict)
    cpus: tuple[int, ...] = ()
    threads: int = 0


def config_of(**launch: object) -> RunConfig:
    config = RunConfig(model=TransformerConfig(name="tiny", vocab_size=64, layers=1, hidden=16, heads=1))
    config.cluster.name = "here"
    config.cluster.fabric.interface = "lo"
    for name, value in launch.items():
        setattr(config.launch, name, value)
    return config


def member(job: Job, process: int) -> Outcome:
    count, (node, local) = job.each * job.nodes, divmod(process, job.each)
    env = {RENDEZVOUS_VARIABLE: str(job.folder), "SLURMD_NODENAME": f"n{node}", **job.env}
    if job.leaves:
        env |= {**SLURM, "SLURM_TOPOLOGY_ADDR": f"top.{job.leaves[node]}.n{node}"}
    me = ProcessIdentity(process, count, local, node, job.nodes, "slurm", f"n{node}", "arrange")
    store = open_job_store(me, env, "lo", LONG)
    task = Task(process, count, local, node, job.nodes, "slurm", me.host, store)
    before = dict(env)
    try:
        found = arrange_ranks(task, job.config, job.needs_mpi, env, job.find)
    except UserError as error:
        return Outcome(str(error))
    if store.add("done", 1) == count:
        store.set("all done", "")
    if process == 0:
        store.wait(["all done"])  # the store ends with this process
    new = {name: value for name, value in env.items() if before.get(name) != value}
    cpus, rank = tuple(sorted(os.sched_getaffinity(0))), found.process_to_rank[process]
    return Outcome(
        None,
        rank,
        found.reason,
        found.warning,
        found.lines,
        found.shared,
        found.per_rank,
        new,
        cpus,
        torch.get_num_threads(),
    )


def arranged(job: Job, one: Callable[[Job, int], Outcome] = member) -> list[Outcome]:
    count = job.each * job.nodes
    with ProcessPoolExecutor(count, multiprocessing.get_context("fork")) as pool:
        return list(pool.map(one, [job] * count, range(count)))


def test_other_libraries_are_told_the_ranks_of_the_plan(tmp_path: Path) -> None:
    found = arranged(Job(tmp_path, each=2, config=config_of(bind=False), find=backwards))
    assert [it.rank for it in found] == [2, 3, 0, 1]
    for it in found:
        assert it.env["RANK"] == str(it.rank)
        assert (it.env["WORLD_SIZE"], it.env["LOCAL_WORLD_SIZE"]) == ("4", "2")
        assert it.env["NODE_RANK"] == str(it.rank // 2)
        assert it.env["LOCAL_RANK"] == str(it.rank % 2)
    assert {(it.env["MASTER_ADDR"], it.env["MASTER_PORT"]) for it in found} == {
        ("127.0.0.1", found[0].env["MASTER_PORT"])
    }
    assert int(found[0].env["MASTER_PORT"]) > 0
    assert len({it.shared["hash"] for it in found}) == 1
    assert found[0].shared["cost"] == {"identity": 2.0, "placed": 1.0}


def test_variables_of_another_order_are_replaced_but_not_the_agents_store(tmp_path: Path) -> None:
    stale = {"RANK": "7", "MASTER_ADDR": "elsewhere", "MASTER_PORT": "1", "TORCHELASTIC_USE_AGENT_STORE": "True"}
    found = arranged(Job(tmp_path, config=config_of(bind=False), find=backwards, env=stale))
    assert [it.env["RANK"] for it in found] == ["1", "0"]
    assert not any("MASTER_ADDR" in it.env for it in found)


def test_slurms_own_topology_is_found(tmp_path: Path) -> None:
    """Four nodes dealt to two leaves in turn; the search is the real one."""
    config = config_of(bind=False)
    config.cluster.fabric.oversubscription = 4.0
    config.parallel.strategy, config.parallel.dp_replicate, config.parallel.dp_shard = "zero3", 2, 2
    found = arranged(Job(tmp_path, nodes=4, config=config, leaves=("a", "b", "a", "b")))
    assert [it.warning for it in found] == [None] * 4
    (shared,) = {str(it.shared) for it in found}
    assert "'identity'" in shared
    ranks = [it.rank for it in found]
    assert {frozenset(ranks[:3:2]), frozenset(ranks[1::2])} == {frozenset({0, 1}), frozenset({2, 3})}
    assert found[0].shared["straddling"]["dp_shard"]["leaf"] == {"groups": 2, "identity": 2, "placed": 0}
    assert found[0].shared["cost"]["placed"] < found[0].shared["cost"]["identity"]


def test_where_nothing_is_known_strict_refuses_on_every_process(tmp_path: Path) -> None:
    found = arranged(Job(tmp_path, config=config_of(placement="strict")))
    assert {it.refused for it in found} == {
        "launch.placement=strict: no source says which switches the nodes are on; give cluster.topology=FILE"
    }


def test_ranks_that_mpi_does_not_know_are_refused_on_every_process(tmp_path: Path) -> None:
    """The variables of another MPI library than the one that is loaded, which counts each process as the only one."""
    found = arranged(Job(tmp_path, config=config_of(), needs_mpi="parallel.reduce_with=mpi", env={"PMI_RANK": "0"}))
    assert {it.refused for it in found} == {
        "parallel.reduce_with=mpi: MPI sees process 0 of 1 where slurm started 0 of 2; "
        "start the ranks with mpirun, or srun --mpi=pmix"
    }


def test_ranks_that_srun_gave_no_mpi_are_refused_before_mpi_could_abort(tmp_path: Path) -> None:
    found = arranged(Job(tmp_path, config=config_of(), needs_mpi="parallel.reduce_with=mpi"))
    line = "parallel.reduce_with=mpi: srun gave these processes no MPI; use srun --mpi=pmix"
    assert {it.refused for it in found} == {line}


def test_inherited_variables_are_reported_once_and_the_users_value_stays(tmp_path: Path) -> None:
    env = {"NCCL_ALGO": "Ring", "NCCL_SOCKET_IFNAME": "eth9"}
    found = arranged(Job(tmp_path, config=config_of(bind=False, placement="launcher"), env=env))
    assert [it["name"] for it in found[0].shared["environment"]] == ["GLOO_SOCKET_IFNAME"]
    assert found[0].shared["kept"] == ["NCCL_SOCKET_IFNAME"]
    assert not any({"NCCL_ALGO", "NCCL_SOCKET_IFNAME"} & it.env.keys() for it in found)
    assert any(line.startswith("warning: NCCL_ALGO=Ring is inherited") for line in found[0].lines)
    assert any(line.startswith("set GLOO_SOCKET_IFNAME=lo") for line in found[0].lines)


def test_local_ranks_are_held_to_processors_of_their_own(tmp_path: Path) -> None:
    """Slurm gave a task more threads than it has processors; that is no wish of the user's."""
    env = {"OMP_NUM_THREADS": "64", "SLURM_CPUS_PER_TASK": "64"}
    found = arranged(Job(tmp_path, each=min(2, len(HERE)), nodes=1, config=config_of(), env=env))
    assert sorted(cpu for it in found for cpu in it.cpus) == HERE
    assert all(it.cpus for it in found)
    assert [it.threads for it in found] == [len(it.cpus) for it in found]
    assert [it.own["threads"] for it in found] == [it.threads for it in found]
    assert found[0].lines[-1].startswith("binding: CPUs ")


@pytest.mark.parametrize(
    ("launch", "each", "why"),
    [
        ({"bind": False}, 2, "not bound: launch.bind=false"),
        ({"threads": 4 * len(HERE)}, 2, f"not bound: {4 * len(HERE)} threads per rank"),
        ({}, 3 * len(HERE), "ranks share"),
    ],
    ids=["asked", "threads", "crowded"],
)
def test_what_leaves_ranks_unbound_is_said(tmp_path: Path, launch: dict[str, object], each: int, why: str) -> None:
    found = arranged(Job(tmp_path, each=each, nodes=1, config=config_of(**launch)))
    assert {it.cpus for it in found} == {tuple(HERE)}
    assert why in found[0].lines[-1]
