"""run_ranks: run a function on several ranks of this machine, as easily as calling it. For tests, yours too."""

from __future__ import annotations

import multiprocessing
import os
import tempfile
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from hpc_train.api import RankMap, Task, World
from hpc_train.config.parallel import ParallelConfig
from hpc_train.config.run import RunConfig

T = TypeVar("T")


class RankFailure(AssertionError):
    """A rank raised or died; the text begins with the rank that did so first and holds its traceback."""


def run_ranks(
    function: Callable[..., T],
    ranks: int,
    *args: Any,
    parallel: ParallelConfig | None = None,
    timeout: float = 120.0,
) -> list[T]:
    """Call `function(world, *args)` on `ranks` forked gloo processes; returns their results in rank order.

    parallel: degrees of the mesh (default: ddp over all ranks). Results and errors come back by pickle; `function`
    may be a closure. The first rank that fails ends the others; its traceback is in the RankFailure that is raised.
    Fork keeps this cheap (0.1 s), and needs that no earlier torch operation of this process used several threads:
    call torch.set_num_threads(1) in conftest.py.
    """
    context = multiprocessing.get_context("fork")
    with tempfile.TemporaryDirectory(prefix="run_ranks-") as folder:
        pipes = [context.Pipe(duplex=False) for _ in range(ranks)]
        processes = [
            context.Process(target=_rank, args=(sender, rank, ranks, folder, parallel, timeout, function, args))
            for rank, (_, sender) in enumerate(pipes)
        ]
        try:
            for process, (_, sender) in zip(processes, pipes, strict=True):
                process.start()
                sender.close()  # so that the death of the child closes the pipe
            return _collect([receiver for receiver, _ in pipes], timeout)
        finally:
            for process in processes:
                if process.is_alive():
                    process.kill()
                process.join()


def _collect(receivers: list[Connection], timeout: float) -> list[Any]:
    results: dict[int, Any] = {}
    open_pipes = {receiver: rank for rank, receiver in enumerate(receivers)}
    deadline = time.monotonic() + timeout
    while open_pipes:
        ready = wait(list(open_pipes), timeout=max(0.0, deadline - time.monotonic()))
        if not ready:
            raise RankFailure(f"ranks {sorted(open_pipes.values())} did not finish within {timeout:g} s")
        for receiver in (pipe for pipe in list(open_pipes) if pipe in ready):
            rank = open_pipes.pop(receiver)
            try:
                ok, value = receiver.recv()
            except EOFError:
                raise RankFailure(f"rank {rank} died without a word") from None
            if not ok:
                raise RankFailure(f"rank {rank} failed:\n{value}")
            results[rank] = value
    return [results[rank] for rank in range(len(receivers))]


def _rank(
    sender: Connection,
    rank: int,
    ranks: int,
    folder: str,
    parallel: ParallelConfig | None,
    timeout: float,
    function: Callable[..., Any],
    args: tuple[Any, ...],
) -> None:
    try:
        torch.set_num_threads(1)
        world = _start(rank, ranks, folder, parallel or ParallelConfig(), timeout)
        sender.send((True, function(world, *args)))
        dist.barrier()  # a rank that leaves early would break the collectives of the others
    except BaseException:
        sender.send((False, traceback.format_exc()))
    finally:
        sender.close()
        os._exit(0)  # skip the exit handlers of the parent's copy


def _start(rank: int, ranks: int, folder: str, parallel: ParallelConfig, timeout: float) -> World:
    from hpc_train.runtime.start import start

    store = dist.FileStore(f"{folder}/store", ranks)
    store.set_timeout(timedelta(seconds=timeout))
    task = Task(rank, ranks, rank, 0, 1, "testing", "localhost", store)
    config = RunConfig(parallel=parallel)
    config.launch.timeout_seconds = int(timeout)
    return start(task, RankMap(tuple(range(ranks))), config)
