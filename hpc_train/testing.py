"""Test on real ranks: call a function on several ranks of this machine, as easily as in this process.

`run_ranks` starts them, on CPUs or on GPUs; `pretend_ranks` runs some ranks of a world of thousands, without the
others.
"""

from __future__ import annotations

import gc
import multiprocessing
import os
import signal
import tempfile
import time
import traceback
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from multiprocessing import forkserver
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from typing import Any, TypeVar

import cloudpickle
import torch
import torch.distributed as dist

from hpc_train.config.parallel import ParallelConfig
from hpc_train.config.run import RunConfig
from hpc_train.errors import UserError
from hpc_train.interfaces import RankMap, Task, World

T = TypeVar("T")

DEVICE_VARIABLE = "HPC_TRAIN_TEST_DEVICE"
"""Environment variable: `cuda` has run_ranks start its ranks on the GPUs of this machine, so that a suite of tests that
was written for CPUs runs there too."""


class RankFailure(AssertionError):
    """A rank raised or died; the text begins with the rank that did so first and holds its traceback."""


def run_ranks(
    function: Callable[..., T],
    ranks: int,
    *args: Any,
    parallel: ParallelConfig | None = None,
    timeout: float = 120.0,
    lost: Collection[int] = (),
) -> list[T]:
    """Call `function(world, *args)` on `ranks` processes of their own; returns their results in rank order.

    parallel: degrees of the mesh (default: ddp over all ranks). Results and errors come back by pickle; `function`
    may be a closure. The first rank that fails ends the others; its traceback is in the RankFailure that is raised.
    lost: ranks that `function` kills; the results are those of the others, and no rank waits for these at the end.
    The ranks are forked, on the CPU, with gloo. Fork keeps this cheap (0.1 s), and needs that no earlier torch
    operation of this process used several threads: call torch.set_num_threads(1) in conftest.py.
    With HPC_TRAIN_TEST_DEVICE=cuda in the environment they use the GPUs, with NCCL. Then nothing is inherited from this
    process: `function` goes to them by cloudpickle. Several ranks share a GPU where there are more ranks than GPUs.
    """
    with tempfile.TemporaryDirectory(prefix="run_ranks-") as folder:
        join = partial(_start, ranks=ranks, folder=folder, parallel=parallel or ParallelConfig(), timeout=timeout)
        return _run(function, range(ranks), args, join, timeout, lost, _choose_process())


def pretend_ranks(
    function: Callable[..., T],
    which: Sequence[int],
    ranks: int,
    *args: Any,
    parallel: ParallelConfig,
    timeout: float = 120.0,
) -> list[T]:
    """Call `function(world, *args)` as some ranks of a world of any size, each in a process of its own.

    For shapes, bytes and counts, never for numbers: collectives return at once and leave whatever memory holds.
    Otherwise it works like run_ranks, except that the ranks run one after the other.
    """
    join = partial(_pretend, ranks=ranks, parallel=parallel)
    return [value for rank in which for value in _run(function, [rank], args, join, timeout)]


Work = Callable[[Connection, int], None]
"""The work of a process, called with the pipe for its outcome and with its rank."""
MakeProcess = Callable[[Connection, int, Work], BaseProcess]


def prepare_forked_process(sender: Connection, rank: int, work: Work) -> BaseProcess:
    return multiprocessing.get_context("fork").Process(target=_run_forked, args=(sender, rank, work))


def _run_forked(sender: Connection, rank: int, work: Work) -> None:
    gc.freeze()  # what the parent left is neither looked through nor, by that, copied: a third of a short test's time
    torch.set_num_threads(1)
    os.environ["CUDA_VISIBLE_DEVICES"] = ""
    work(sender, rank)


def prepare_gpu_process(sender: Connection, rank: int, work: Work) -> BaseProcess:
    """Make a process that may use CUDA: forked from a server that never has, unlike perhaps this process."""
    start_gpu_server()
    return multiprocessing.get_context("forkserver").Process(
        target=_run_on_gpu, args=(sender, rank, cloudpickle.dumps(work))
    )


def start_gpu_server() -> None:
    """Start the process from which ranks on GPUs are forked, unless there is one. It runs until this process ends."""
    forkserver.set_forkserver_preload(["torch._dynamo", "hpc_train.runtime.start", "hpc_train.config.compose"])
    forkserver.ensure_running()


def _run_on_gpu(sender: Connection, rank: int, work: bytes) -> None:
    torch.set_num_threads(1)
    cloudpickle.loads(work)(sender, rank)


def _choose_process() -> MakeProcess:
    device = os.environ.get(DEVICE_VARIABLE, "cpu")
    if device not in ("cpu", "cuda"):
        raise UserError(f"{DEVICE_VARIABLE}={device}: choose cpu or cuda")
    if device == "cuda" and torch.cuda.device_count() == 0:
        raise UserError(f"{DEVICE_VARIABLE}=cuda: torch sees no GPU here")
    return prepare_gpu_process if device == "cuda" else prepare_forked_process


def _run(
    function: Callable[..., T],
    ranks: Sequence[int],
    args: tuple[Any, ...],
    join: Callable[[int], World],
    timeout: float,
    lost: Collection[int] = (),
    make_process: MakeProcess = prepare_forked_process,
) -> list[T]:
    """Run a function on ranks, and return their results by rank. lost: ranks that never report."""
    if dist.is_initialized():
        raise RankFailure("run_ranks: this process is a rank already; start all ranks with one run_ranks")
    import hpc_train.runtime.start  # noqa: F401  each rank needs it, and would take half a second to import it

    processes: list[BaseProcess] = []
    receivers: dict[Connection, int] = {}
    try:
        for rank in ranks:
            # Made one at a time: a later rank's pipe in this one's hands would not close when that rank dies.
            receiver, sender = multiprocessing.Pipe(duplex=False)
            receivers[receiver] = rank
            processes.append(make_process(sender, rank, partial(_call, function, args, join, not lost)))
            processes[-1].start()
            sender.close()
        return _collect({receiver: rank for receiver, rank in receivers.items() if rank not in lost}, timeout)
    finally:
        for process in processes:
            process.kill()
            process.join()
        for receiver in receivers:
            receiver.close()


@dataclass(frozen=True)
class _RankOutcome:
    """Result or traceback of one rank."""

    rank: int
    ok: bool
    value: Any = None
    at: float = -1.0
    """time.monotonic() on this machine; -1 from a rank that died, because the others fail of that."""

    def raise_failure(self) -> None:
        how = f"failed:\n{self.value}" if self.at >= 0 else "died without a word"
        raise RankFailure(f"rank {self.rank} {how}")


def _collect(receivers: dict[Connection, int], timeout: float) -> list[Any]:
    outcomes: list[_RankOutcome] = []
    waiting = dict(receivers)
    deadline = time.monotonic() + timeout
    while waiting:
        ready = wait(list(waiting), timeout=max(0.0, deadline - time.monotonic()))
        if not ready:
            raise RankFailure(f"ranks {sorted(waiting.values())} did not finish within {timeout:g} s")
        arrived = [_receive_outcome(receiver, waiting.pop(receiver)) for receiver in list(waiting) if receiver in ready]
        failed = [outcome for outcome in arrived if not outcome.ok]
        if failed:
            min(failed, key=lambda outcome: outcome.at).raise_failure()
        outcomes += arrived
    return [outcome.value for outcome in sorted(outcomes, key=lambda outcome: outcome.rank)]


def _receive_outcome(receiver: Connection, rank: int) -> _RankOutcome:
    try:
        outcome: _RankOutcome = receiver.recv()
    except EOFError:
        return _RankOutcome(rank, ok=False)
    return outcome


def _call(
    function: Callable[..., Any],
    args: tuple[Any, ...],
    join: Callable[[int], World],
    meet: bool,
    sender: Connection,
    rank: int,
) -> None:
    """Run a function as one rank, and send its result or traceback. meet: wait for the others."""
    try:
        world = join(rank)
        sender.send(_RankOutcome(rank, True, function(world, *args)))
        # A rank that leaves early would break the collectives of the others.
        if meet:
            dist.barrier()
        else:
            signal.pause()  # until the caller has all results, and kills what is left
    except BaseException:
        sender.send(_RankOutcome(rank, False, traceback.format_exc(), time.monotonic()))
    finally:
        sender.close()
        os._exit(0)  # skip the exit handlers of the parent's copy


def _start(rank: int, ranks: int, folder: str, parallel: ParallelConfig, timeout: float) -> World:
    from hpc_train.runtime.start import start

    store = dist.FileStore(f"{folder}/store", ranks)
    store.set_timeout(timedelta(seconds=timeout))
    task = Task(
        process=rank, processes=ranks, local=rank, node=0, nodes=1, launcher="testing", host="localhost", store=store
    )
    config = RunConfig(parallel=parallel)
    config.launch.timeout_seconds = int(timeout)
    gpus = torch.cuda.device_count()
    return start(task, RankMap(tuple(range(ranks)), gpu=rank % gpus if gpus else None), config)


def _pretend(rank: int, ranks: int, parallel: ParallelConfig) -> World:
    from hpc_train._torch.process_groups import pretend_group
    from hpc_train.config.parallel import resolve_degrees
    from hpc_train.runtime.start import make_world

    pretend_group(rank, ranks)
    return make_world(rank, ranks, 0, torch.device("cpu"), resolve_degrees(parallel, ranks))
