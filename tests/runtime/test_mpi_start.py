"""Process 0, whose thread serves the job's store, initialises MPI when no other process needs the store any more."""

from __future__ import annotations

import sys
import time
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from types import SimpleNamespace

import pytest
import torch.distributed as dist

from hpc_train.errors import UserError
from hpc_train.interfaces import Task
from hpc_train.runtime import host_info


def make_task(process: int, store: dist.Store, processes: int = 3) -> Task:
    return Task(process, processes, process, 0, 1, "slurm", "localhost", store)


def test_process_0_comes_last(monkeypatch: pytest.MonkeyPatch) -> None:
    initialised: list[int] = []

    def initialise(process: int, store: dist.Store) -> None:
        time.sleep(0.2 * process)
        host_info.read_mpi_rank_and_size(make_task(process, store), timedelta(seconds=60))
        initialised.append(process)

    monkeypatch.delitem(sys.modules, "mpi4py.MPI", raising=False)
    world = SimpleNamespace(COMM_WORLD=SimpleNamespace(rank=0, size=3))
    monkeypatch.setattr(host_info, "load_mpi", lambda: world)
    store = dist.HashStore()
    with ThreadPoolExecutor(3) as pool:
        for call in [pool.submit(initialise, process, store) for process in range(3)]:
            call.result()
    assert initialised == [1, 2, 0]


def test_processes_that_do_not_come_are_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "mpi4py.MPI", raising=False)
    store = dist.HashStore()
    host_info.arrive_at_gate(store, "mpi/ready", 3)
    with pytest.raises(UserError, match="2 of 3 processes came to initialise MPI within 0 s"):
        host_info.read_mpi_rank_and_size(make_task(0, store), timedelta(seconds=0))
