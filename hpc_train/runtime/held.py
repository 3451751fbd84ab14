"""This rank's processors, memory and threads: bound to its share of the node."""

from __future__ import annotations

import os
from collections.abc import Mapping, MutableMapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from hpc_train.config.launch import LaunchConfig
from hpc_train.placement.binding import Binding, Seat, bind, format_cpus, read_processors, share_out


@dataclass(frozen=True)
class Held:
    """What came of binding one rank."""

    binding: Binding
    threads: int
    """Threads of one torch operation."""
    memory_problem: str | None = None
    """Why the memory is not bound though its node is known."""

    def line(self) -> str:
        """For a person."""
        if not self.binding.cpus:
            return self.binding.reason
        where = f"processors {format_cpus(self.binding.cpus)}, {self.binding.reason}"
        if self.binding.memory is None:
            return where
        if self.memory_problem:
            return f"{where}; memory not bound: {self.memory_problem}"
        return f"{where}, and memory of NUMA node {self.binding.memory}"

    def as_json(self) -> dict[str, Any]:
        """As rankmap.json has it."""
        cpus = self.binding.cpus or os.sched_getaffinity(0)
        memory = None if self.memory_problem else self.binding.memory
        return {"cpus": format_cpus(cpus), "memory": memory, "threads": self.threads, "binding": self.binding.reason}


def hold(
    launch: LaunchConfig, seats: Sequence[Seat], local: int, env: MutableMapping[str, str], mpi: bool = False
) -> Held:
    """Bind this process as the local-th of the ranks of its node, and give torch as many threads as it has cores.

    A number of threads that the user has set stays; where it is more than a rank's share, no rank is bound. mpi: MPI
    moves data in this run; its launcher binds, as its library waits by spinning and needs to know of it.
    """
    chosen = launch.threads or users_threads(env, seats)
    binding = _binding(launch, seats, local, chosen)
    if mpi and binding.cpus:
        binding = Binding((), 0, None, "not bound: MPI's own launcher does that (mpirun --bind-to, srun --cpu-bind)")
    try:
        problem = bind(binding)
    except OSError as error:
        binding = replace(binding, cpus=(), memory=None, reason=f"not bound: {error.strerror}")
        problem = None
    if binding.cpus:
        threads = chosen or min(binding.cores, _number(env) or binding.cores)
        env["OMP_NUM_THREADS"] = str(threads)
        torch.set_num_threads(threads)
    return Held(binding, torch.get_num_threads(), problem)


def _binding(launch: LaunchConfig, seats: Sequence[Seat], local: int, threads: int | None) -> Binding:
    if not launch.bind:
        return Binding((), 0, None, "not bound: launch.bind=false")
    shares = share_out(seats, read_processors())
    least = min((len(share.cpus) for share in shares if share.cpus), default=0)
    if least and threads is not None and threads > least:
        return Binding((), 0, None, f"not bound: {threads} threads a rank, {least} processors")
    return shares[local]


def users_threads(env: Mapping[str, str], seats: Sequence[Seat]) -> int | None:
    """OMP_NUM_THREADS, unless it is what a launcher sets by itself: the processors of a task, or those of the node
    shared out.
    """
    number = _number(env)
    everything = len(frozenset[int]().union(*(seat.allowed for seat in seats)))
    usual = {env.get("SLURM_CPUS_PER_TASK", "1"), str(max(1, everything // len(seats)))}
    return None if str(number) in usual else number


def _number(env: Mapping[str, str]) -> int | None:
    text = env.get("OMP_NUM_THREADS", "").split(",")[0]
    return int(text) if text.isdecimal() and int(text[:9]) > 0 else None
