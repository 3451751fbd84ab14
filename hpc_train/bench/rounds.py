"""Rounds of all sides in turn, in the same processes: what disturbs the machine disturbs all of them alike."""

from __future__ import annotations

import ctypes
import gc
import os
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch.distributed as dist

from hpc_train.messages import all_gather_values

Samples = npt.NDArray[np.float64]
WARM_UP_STEPS = 2
"""Steps of a side before anything is timed; the first makes buffers and gradients, the second reuses them."""


@dataclass
class Side:
    """One of the loops that are compared."""

    name: str
    steps: Iterator[float]
    first_loss: float
    """Mean over ranks."""
    kept_mib: float
    """By how much the resident memory of rank 0 grew for it: parameters, gradients, optimizer, buckets."""


@dataclass(frozen=True)
class RoundTimings:
    """Seconds a step of every round and side, (rounds, sides)."""

    wall: Samples
    """Of the slowest rank."""
    cpu: Samples
    """CPU time of all threads of all ranks."""


def warm_up_side(name: str, make: Callable[[], Iterator[float]]) -> Side:
    """Make a side and take its warm-up steps."""
    before = _resident_mib()
    steps = make()
    losses = [next(steps) for _ in range(WARM_UP_STEPS)]
    return Side(name, steps, float(np.mean(_gather(losses[0]))), float(_gather(_resident_mib() - before)[0]))


def time_rounds(sides: list[Side], rounds: int, steps: int) -> RoundTimings:
    """Time `rounds` rounds of `steps` steps of each side, every second one in reverse order: A B C, C B A, ..."""
    seconds = np.zeros((rounds, len(sides), 2))
    for number in range(rounds):
        forward = range(len(sides))
        for index in forward if number % 2 == 0 else reversed(forward):
            seconds[number, index] = _time_steps(sides[index].steps, steps)
    ranks = _gather(seconds)
    return RoundTimings(wall=ranks[..., 0].max(axis=0), cpu=ranks[..., 1].sum(axis=0))


def _time_steps(side: Iterator[float], steps: int) -> tuple[float, float]:
    """(wall, CPU) seconds a step of this rank; each step ends when its loss is known, on a GPU too."""
    dist.barrier()
    wall, cpu = time.perf_counter(), time.process_time()
    for _ in range(steps):
        next(side)
    return (time.perf_counter() - wall) / steps, (time.process_time() - cpu) / steps


def _gather(mine: float | Samples) -> Samples:
    """Every rank's value, in rank order."""
    return np.array(all_gather_values(mine))


def _resident_mib() -> float:
    """What this process really needs now: garbage and the allocator's free pages are given back first."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") / 2**20
