"""A node that the pre-flight finds slow ends the attempt, once, if there is a spare node for it."""

from __future__ import annotations

import json
import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from hpc_train.config.compose import compose
from hpc_train.interfaces import Task, World
from hpc_train.launch.recovery.restarting import Allocation, decide_after_failure
from hpc_train.resilience import preflight
from hpc_train.resilience.exclusion import read_strikes
from hpc_train.resilience.restart import Action
from hpc_train.testing import run_ranks
from hpc_train.training.node_check import SlowNodes, check_job_nodes
from hpc_train.training.records.run_records import record_failure
from hpc_train.training.run_directory import RunDirectory, locate_run_directory, make_attempt, prepare_run_directory

SLOW = 2
FACTOR = 10.0
"""A node is slow from here on: other tests on the same cores make the others a few times slower than each other."""


def check_nodes(world: World, folder: RunDirectory, attempt: int, spares: int) -> str:
    """The pre-flight of one rank a node, on one of which products are slow; what it says."""
    preflight.MIN_EXCESS = FACTOR
    if world.rank == SLOW:
        product = torch.mm
        torch.mm = lambda *args: (time.sleep(0.6), product(*args))[1]  # type: ignore[func-returns-value]
    config = compose(
        ["resilience.preflight=quick", "launch=slurm", f"launch.spares={spares}", f"run_dir={folder.path}"]
    )
    task = Task(world.rank, world.size, 0, world.rank, world.size, "slurm", f"n{world.rank}.site")
    try:
        check_job_nodes(config, replace(world, node=world.rank, local_rank=0), task, folder, attempt)
    except SlowNodes as error:
        record_failure(folder.logs(attempt), world.rank, task.host, error)
        return str(error)
    return ""


@pytest.fixture
def folder(tmp_path: Path) -> RunDirectory:
    config = compose([f"run_dir={tmp_path / 'run'}"])
    made = locate_run_directory(config)
    prepare_run_directory(made, config)
    return made


@pytest.mark.hangs
def test_a_spare_takes_over_once(folder: RunDirectory) -> None:
    attempt = make_attempt(folder)
    said = run_ranks(check_nodes, 4, folder, attempt, 1)
    assert len(set(said)) == 1
    assert said[0].startswith("pre-flight: n2.site: matrix product takes")
    nodes = tuple(f"n{number}" for number in range(5))
    config = compose([f"run_dir={folder.path}"])
    decision = decide_after_failure(config, folder, attempt, 1, 0, Allocation(nodes, (), 4))
    assert decision.action is Action.RESTART
    assert (folder.logs(attempt) / "next-nodes").read_text() == "n0,n1,n3,n4\n"
    assert [strike.host for strike in read_strikes(folder.path)] == ["n2"]
    assert run_ranks(check_nodes, 4, folder, make_attempt(folder), 1) == [""] * 4  # there was no other node


@pytest.mark.long
def test_without_a_spare_it_is_only_said(folder: RunDirectory) -> None:
    attempt = make_attempt(folder)
    assert run_ranks(check_nodes, 4, folder, attempt, 0) == [""] * 4
    slow = json.loads((folder.logs(attempt) / "preflight.json").read_text())["slow"]
    assert [node["host"] for node in slow] == ["n2.site"]
