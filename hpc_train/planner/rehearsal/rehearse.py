"""Rehearse a run: build some ranks of a large world on this machine, and check what they report.

choose_ranks picks ranks that differ from one another. replace_unavailable switches off what this machine cannot do, and
lists it. checks.py checks the result. Every rank is built in a forked process of its own, because torch keeps state of
process groups and meshes that would be wrong for the next rank.
"""

from __future__ import annotations

import multiprocessing
import os
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from multiprocessing.connection import Connection, wait
from multiprocessing.context import ForkProcess
from typing import Any, TypeVar

import torch
from torch import nn

from hpc_train._torch.rehearsal import MemorylessMode, preload_torch
from hpc_train.config.parallel import CompressionConfig, Degrees, ParallelConfig, ServerConfig
from hpc_train.config.run import RunConfig
from hpc_train.errors import UserError
from hpc_train.parallel.rules.check import check_support
from hpc_train.parallel.user_model import get_named_blocks
from hpc_train.planner.rehearsal.checks import (
    check_coverage,
    check_memory_fit,
    compute_closed_form_bytes,
    compute_server_bytes,
    plan_memory_by_rank,
    read_device,
)
from hpc_train.planner.rehearsal.one_rank import (
    build_whole_model,
    list_tensor_shapes,
    pretend_world,
    rehearse_rank,
)
from hpc_train.planner.rehearsal.pipeline_order import choose_micro_batches, prove_order
from hpc_train.planner.rehearsal.result import Rehearsal, RehearsedRank
from hpc_train.planner.rehearsal.start_up import estimate_start_up, measure_store
from hpc_train.planner.rehearsal.tiling import SHARED_AXES
from hpc_train.planner.request import check_not_loose

MAX_PROCESSES = 4
"""Limit on processes at a time: each needs up to a gigabyte."""


def rehearse_run(config: RunConfig, world: int, which: str = "sample", processes: int | None = None) -> Rehearsal:
    """Build the ranks that `which` names (see choose_ranks), train a step on some of them, and check the layout.

    processes: how many run at a time; None: one for each core of this process, at most MAX_PROCESSES.
    Raises UserError for a layout that is refused, an order that cannot complete, and a rank that cannot be built.
    """
    started = time.perf_counter()
    check_not_loose(config)
    degrees = check_support(config, world)
    runnable, notes = replace_unavailable(config)
    chosen = choose_ranks(which, degrees)
    preload_torch()
    # Only the shapes of the whole model are needed, so its tensors get no memory.
    with MemorylessMode(lambda *_: None):
        model = build_whole_model(config)
    proof = prove_order(config, degrees) if degrees.pp > 1 else None
    micro_batches, fewer = choose_micro_batches(config, degrees, _count_blocks(model, degrees), proof)
    processes = min(processes or _count_processes(), len(chosen.built))
    ranks = _build_ranks(runnable, degrees, chosen, micro_batches, processes)
    notes += [*([fewer] if fewer else []), *_list_not_rehearsed(degrees, ranks)]
    stages = {rank: ranks[rank].at["pp"] for rank in chosen.stepped}
    plan, real = plan_memory_by_rank(runnable, degrees, stages), plan_memory_by_rank(config, degrees, stages)
    more = {rank: sum(real[rank].values()) - sum(plan[rank].values()) for rank in real}
    return Rehearsal(
        degrees=degrees,
        ranks=tuple(ranks.values()),
        coverage=check_coverage(list_tensor_shapes(model), tuple(ranks.values()), degrees),
        proof=proof,
        micro_batches=micro_batches,
        closed_form=_compute_closed_forms(config, degrees, ranks),
        planned=plan,
        fit=check_memory_fit(tuple(ranks.values()), plan, read_device(config), more),
        servers=compute_server_bytes(config, model),
        start_up=estimate_start_up(degrees, measure_store(), run_in_processes(partial(_time_mesh, degrees), [0], 1)[0]),
        not_rehearsed=tuple(dict.fromkeys(notes)),
        seconds=time.perf_counter() - started,
        processes=processes,
    )


def _list_not_rehearsed(degrees: Degrees, ranks: Mapping[int, RehearsedRank]) -> list[str]:
    """Return a line for what the built ranks do not show: pipeline ranks without one, and steps that could not run."""
    missing = sorted({*range(degrees.pp)} - {degrees.find_coordinates(rank)["pp"] for rank in ranks})
    lines = [f"what pipeline ranks {', '.join(map(str, missing))} hold: none of them was built"] if missing else []
    return lines + [f"a step: {built.unknown}" for built in ranks.values() if built.unknown]


def _time_mesh(degrees: Degrees, rank: int) -> float:
    """Return the CPU seconds that a rank takes to make the mesh, in a process of its own."""
    started = time.process_time()
    with pretend_world(rank, degrees):
        return time.process_time() - started


def _compute_closed_forms(
    config: RunConfig, degrees: Degrees, ranks: Mapping[int, RehearsedRank]
) -> dict[int, dict[str, int]]:
    """Return the bytes of the closed form for the ranks that it applies to: the first one of each stage."""
    first = {rank: built.at["pp"] for rank, built in ranks.items() if not any(built.at[axis] for axis in SHARED_AXES)}
    return {rank: compute_closed_form_bytes(config, degrees, pp) for rank, pp in first.items()}


def _count_blocks(model: nn.Module, degrees: Degrees) -> int:
    """Return about how many blocks a rank has."""
    return max(1, -(-len(get_named_blocks(model)) // degrees.pp))


def _count_processes() -> int:
    return min(MAX_PROCESSES, len(os.sched_getaffinity(0)))


def _build_ranks(
    config: RunConfig, degrees: Degrees, chosen: ChosenRanks, micro_batches: int, processes: int
) -> dict[int, RehearsedRank]:
    count = dict.fromkeys(chosen.stepped, micro_batches)
    longest_first = sorted(chosen.built, key=lambda rank: rank not in count)
    ranks_built = run_in_processes(
        lambda rank: rehearse_rank(config, degrees, rank, count.get(rank, 0)), longest_first, processes
    )
    return {rank: ranks_built[rank] for rank in chosen.built}


MAX_CHOSEN = 16
"""Worlds up to this size are built completely."""


@dataclass(frozen=True)
class ChosenRanks:
    """Ranks to rehearse, ascending."""

    built: tuple[int, ...]
    stepped: tuple[int, ...]
    """The ranks of `built` that also train a step."""


def choose_ranks(which: str, degrees: Degrees) -> ChosenRanks:
    """Choose the ranks to build. which: all, sample, or a list of ranks separated by commas, which all train a step.

    A sample has one rank of each stage, and the last rank along each other axis, which has the smaller part of whatever
    does not divide. The first, the second and the last stage train a step: of the middle ones the second needs the most
    memory. Raises UserError for any other text.
    """
    if which not in ("all", "sample"):
        ranks = _parse_ranks(which, degrees)
        return ChosenRanks(ranks, ranks)
    all_ranks = which == "all" or degrees.world <= MAX_CHOSEN
    built = tuple(range(degrees.world)) if all_ranks else _choose_sample(degrees)
    stages = dict.fromkeys((0, min(1, degrees.pp - 1), degrees.pp - 1))
    return ChosenRanks(built, tuple(degrees.find_rank({"pp": stage}) for stage in stages))


def _choose_sample(degrees: Degrees) -> tuple[int, ...]:
    last = {axis: getattr(degrees, axis) - 1 for axis in SHARED_AXES}
    sample = {degrees.find_rank({"pp": stage}) for stage in range(degrees.pp)}
    sample |= {degrees.find_rank({"pp": degrees.pp // 2, axis: last[axis]}) for axis in SHARED_AXES}
    sample |= {degrees.find_rank({"pp": stage, **last}) for stage in (0, degrees.pp - 1)}
    return tuple(sorted(sample))


def _parse_ranks(text: str, degrees: Degrees) -> tuple[int, ...]:
    words: Sequence[str] = text.split(",")
    if not all(word.strip().isdecimal() for word in words):
        raise UserError(f"--ranks {text}: give all, sample, or ranks separated by commas, such as 0,8,127")
    ranks = sorted({int(word) for word in words})
    if ranks[-1] >= degrees.world:
        raise UserError(f"--ranks {ranks[-1]}: the world has {degrees.world} ranks, counted from 0 ({degrees})")
    return tuple(ranks)


def replace_unavailable(config: RunConfig) -> tuple[RunConfig, list[str]]:
    """Return a configuration that runs here with the same layout, and one line for each thing that it leaves out."""
    parallel, replaced = config.parallel, []
    for change in (
        _replace_compiled,
        _replace_symmetric,
        _replace_offloaded_activations,
        _replace_files,
        _note_host_memory,
        _replace_mpi,
        _replace_compression,
        _replace_servers,
    ):
        if (changed := change(parallel)) is not None:
            parallel, line = changed
            replaced.append(line)
    return replace(config, parallel=parallel, run_dir=None), replaced


def _replace_compiled(parallel: ParallelConfig) -> tuple[ParallelConfig, str] | None:
    if not parallel.compile:
        return None
    line = "parallel.compile=true: rehearsed without; compiled blocks keep fewer activations"
    return replace(parallel, compile=False, cuda_graphs=False), line


def _replace_symmetric(parallel: ParallelConfig) -> tuple[ParallelConfig, str] | None:
    if not parallel.tensor.symmetric:
        return None
    line = "parallel.tensor.symmetric=true: rehearsed with messages in a ring, which keep the same tensors"
    return replace(parallel, tensor=replace(parallel.tensor, symmetric=False)), line


def _replace_offloaded_activations(parallel: ParallelConfig) -> tuple[ParallelConfig, str] | None:
    if not parallel.recompute.offload:
        return None
    line = "parallel.recompute.offload=true: rehearsed without; activations are counted as if they stayed on the GPU"
    return replace(parallel, recompute=replace(parallel.recompute, offload=False)), line


def _replace_files(parallel: ParallelConfig) -> tuple[ParallelConfig, str] | None:
    offload = parallel.offload
    if "file" not in (offload.parameters, offload.optimizer):
        return None
    parameters, optimizer = (where.replace("file", "cpu") for where in (offload.parameters, offload.optimizer))
    line = "parallel.offload: rehearsed as cpu; no file is made, so whether the disk has room is not known"
    return replace(parallel, offload=replace(offload, parameters=parameters, optimizer=optimizer, dir=None)), line


def _note_host_memory(parallel: ParallelConfig) -> tuple[ParallelConfig, str] | None:
    if (parallel.offload.parameters, parallel.offload.optimizer) == ("none", "none"):
        return None
    return parallel, "parallel.offload: what is offloaded counts as the host's; copies on their way are not counted"


def _replace_mpi(parallel: ParallelConfig) -> tuple[ParallelConfig, str] | None:
    if parallel.reduce_with != "mpi":
        return None
    return replace(parallel, reduce_with="torch"), "parallel.reduce_with=mpi: rehearsed as torch; MPI is not started"


def _replace_compression(parallel: ParallelConfig) -> tuple[ParallelConfig, str] | None:
    method = parallel.compression.method
    if method == "none":
        return None
    line = f"parallel.compression.method={method}: rehearsed without; gradients are reduced whole"
    return replace(parallel, compression=CompressionConfig()), line


def _replace_servers(parallel: ParallelConfig) -> tuple[ParallelConfig, str] | None:
    mode = parallel.server.mode
    if mode == "none":
        return None
    what = "the workers' replicas are built as for ddp, the servers' shares are counted"
    if mode == "peer":
        what = "the ranks' replicas are built as for ddp"
    line = f"parallel.server.mode={mode}: {what}; MPI windows and what goes through them are not rehearsed"
    return replace(parallel, server=ServerConfig()), line


T = TypeVar("T")


def run_in_processes(function: Callable[[int], T], items: Sequence[int], at_once: int) -> dict[int, T]:
    """Call function(item) for every item, each in a forked process, and return the results by item.

    Calls start in the order of `items`, at most `at_once` at a time. Raises the first UserError of any call, and
    UserError for a process that dies.
    """
    waiting, running, results = list(reversed(items)), dict[Connection, tuple[int, ForkProcess]](), dict[int, T]()
    try:
        while waiting or running:
            while waiting and len(running) < at_once:
                item = waiting.pop()
                receiver, process = _start_process(function, item)
                running[receiver] = item, process
            ready = wait(list(running))
            # In the order of their start, so that of several errors the same one is raised each time.
            for receiver in [connection for connection in running if connection in ready]:
                item, process = running.pop(receiver)
                results[item] = _receive_result(receiver, item)
                process.join()
    finally:
        for _, process in running.values():
            process.kill()
            process.join()
    return results


def _start_process(function: Callable[[int], Any], item: int) -> tuple[Connection, ForkProcess]:
    context = multiprocessing.get_context("fork")
    receiver, sender = context.Pipe(duplex=False)
    process = context.Process(target=_send_result, args=(sender, function, item))
    process.start()
    sender.close()
    return receiver, process


def _send_result(sender: Connection, function: Callable[[int], Any], item: int) -> None:
    try:
        torch.set_num_threads(1)
        sender.send((function(item), ""))
    except BaseException as error:
        sender.send((error if isinstance(error, UserError) else None, traceback.format_exc()))
    finally:
        sender.close()
        os._exit(0)  # skip the exit handlers of the parent's copy


def _receive_result(receiver: Connection, item: int) -> Any:
    try:
        value, wrong = receiver.recv()
    except EOFError:
        raise UserError(
            f"rank {item}: its process was killed, as when memory is short; rehearse other ranks, or fewer at a time"
        ) from None
    finally:
        receiver.close()
    if wrong:
        raise value or RuntimeError(wrong) from RuntimeError(wrong)
    return value
