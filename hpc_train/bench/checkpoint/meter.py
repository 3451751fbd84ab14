"""What an operation takes of a rank: wall time, CPU time, bytes read."""

from __future__ import annotations

import gc
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch.distributed as dist

from hpc_train.bench.checkpoint.result import Samples
from hpc_train.checkpoint.files import opened
from hpc_train.collectives import all_gather_values

Taken = tuple[float, float, float]
"""(wall seconds, CPU seconds, bytes read) of this rank."""


def timed(work: Callable[[], Any], then: Callable[[Any], object] = lambda result: None) -> Taken:
    """All ranks begin together. then: takes the result, untimed."""
    gc.collect()
    barrier()
    before, wall, cpu = bytes_read(), time.perf_counter(), time.process_time()
    result = work()
    taken = time.perf_counter() - wall, time.process_time() - cpu, bytes_read() - before
    then(result)
    return taken


def of_all(mine: list[Taken]) -> Samples:
    """Wall time of the slowest rank, CPU time and bytes of all. mine: of every round."""
    ranks = gathered(mine)
    return np.stack([ranks[..., 0].max(axis=0), *ranks[..., 1:].sum(axis=0).T], axis=1)


def bytes_read() -> int:
    """Of this process and its threads since it began, by all system calls that read (proc_pid_io(5), rchar)."""
    fields = dict(line.split(": ") for line in Path("/proc/self/io").read_text().splitlines())
    return int(fields["rchar"])


def gathered(mine: Any) -> Samples:
    """Every rank's value, in rank order."""
    values = all_gather_values(mine) if dist.is_initialized() else [mine]
    return np.array(values, dtype=np.float64)


def barrier() -> None:
    """Wait for all ranks, if there are several."""
    if dist.is_initialized():
        dist.barrier()


def forget(folder: Path) -> None:
    """All files below it, out of the page cache."""
    for path in sorted(it for it in folder.rglob("*") if it.is_file()):
        with opened(path, os.O_RDONLY) as file:
            os.fsync(file)
            os.posix_fadvise(file, 0, 0, os.POSIX_FADV_DONTNEED)
