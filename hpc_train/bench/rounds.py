"""Time several training loops ("sides") in interleaved rounds in the same processes."""

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
from hpc_train.timing import interleave_rounds

Samples = npt.NDArray[np.float64]
WARM_UP_STEPS = 2
"""Untimed steps of a side; the first allocates buffers and gradients, the second reuses them."""


@dataclass
class Side:
    """A training loop that is compared with others."""

    name: str
    steps: Iterator[float]
    first_loss: float
    """Loss of the first warm-up step, mean over ranks."""
    kept_mib: float
    """Growth of rank 0's resident memory in MiB: parameters, gradients, optimizer state, buckets."""


@dataclass(frozen=True)
class RoundTimings:
    """Seconds per step of every round and side, as arrays of shape (rounds, sides)."""

    wall: Samples
    """Wall time of the slowest rank."""
    cpu: Samples
    """CPU time, summed over all threads of all ranks."""


def warm_up_side(name: str, make: Callable[[], Iterator[float]]) -> Side:
    """Build a side and run its warm-up steps."""
    before = _measure_resident_mib()
    steps = make()
    losses = [next(steps) for _ in range(WARM_UP_STEPS)]
    return Side(name, steps, float(np.mean(_gather(losses[0]))), float(_gather(_measure_resident_mib() - before)[0]))


def time_rounds(sides: list[Side], rounds: int, steps: int) -> RoundTimings:
    """Time `rounds` rounds of `steps` steps of each side, the sides interleaved."""
    seconds = np.zeros((rounds, len(sides), 2))
    for number, index in interleave_rounds(rounds, len(sides)):
        seconds[number, index] = _time_steps(sides[index].steps, steps)
    ranks = _gather(seconds)
    return RoundTimings(wall=ranks[..., 0].max(axis=0), cpu=ranks[..., 1].sum(axis=0))


def _time_steps(side: Iterator[float], steps: int) -> tuple[float, float]:
    """Return (wall, CPU) seconds per step of this rank. Reading the loss synchronises with a GPU."""
    dist.barrier()  # else a rank that is still busy with the side before would count here
    wall, cpu = time.perf_counter(), time.process_time()
    for _ in range(steps):
        next(side)
    return (time.perf_counter() - wall) / steps, (time.process_time() - cpu) / steps


def _gather(value: float | Samples) -> Samples:
    """Gather the value of every rank, in rank order."""
    return np.array(all_gather_values(value))


def _measure_resident_mib() -> float:
    """Return the resident memory in MiB, after freeing garbage and the allocator's unused pages."""
    gc.collect()
    # glibc keeps freed pages for later; given back to the kernel, they no longer count as resident.
    ctypes.CDLL(None).malloc_trim(0)
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") / 2**20
