"""Share a node between jobs: each gets the GPUs of its slot, and CPUs that no other job has bound."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from functools import cache
from itertools import takewhile
from pathlib import Path

from hpc_train.placement.node.cpu_binding import parse_cpus, read_processors, split_cpus
from hpc_train.units import format_ranges

SHARE_VARIABLE = "HPC_TRAIN_SHARE"
"""Environment variable `index/count/processors`: which of `count` points on these processors a rank belongs to."""
_GPU_VARIABLES = ("CUDA_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES")
_GPU_DRIVERS = ("/dev/nvidiactl", "/dev/kfd")
_GPU_NAME = re.compile(r"\d+|(GPU|MIG)-.+")


def format_share(index: int, count: int) -> str:
    """Return the value of SHARE_VARIABLE for a point on this machine."""
    return f"{index}/{count}/{format_ranges(os.sched_getaffinity(0))}"


def bind_to_share() -> frozenset[int]:
    """Bind this process, before it starts any thread, to its point's CPUs; return them, or nothing.

    Nothing is done where a cgroup or the launcher has bound the process: it then has less than all of them already.
    """
    text = os.environ.get(SHARE_VARIABLE)
    if text is None:
        return frozenset()
    index, count, all_cpus = text.split("/")
    allowed = frozenset(os.sched_getaffinity(0))
    if len(allowed) < len(parse_cpus(all_cpus)) or len(allowed) < int(count):
        return frozenset()
    cpus = frozenset(split_cpus(allowed, int(count), read_processors())[int(index)])
    os.sched_setaffinity(0, cpus)
    return cpus


def list_visible_gpus(env: Mapping[str, str] = os.environ) -> list[str]:
    """Return the GPUs that this process may use, as CUDA_VISIBLE_DEVICES or ROCR_VISIBLE_DEVICES names them.

    Where the user or a scheduler has set such a variable it counts, up to the first entry that names no GPU, as for the
    driver. Without one these are all GPUs that torch sees.
    """
    if (chosen := env.get(_choose_gpu_variable(env))) is not None:
        return list(takewhile(_GPU_NAME.fullmatch, chosen.split(",")))
    return [str(index) for index in range(_count_gpus_of_torch())]


@cache
def _count_gpus_of_torch() -> int:
    if not any(Path(device).exists() for device in _GPU_DRIVERS):
        return 0
    import torch  # only where there may be a GPU: it takes a second

    return torch.cuda.device_count()


def make_gpu_share_environment(slot: int, count: int, gpus: Sequence[str], env: Mapping[str, str]) -> dict[str, str]:
    """Return the variable that shows the job in this slot its own `count` of the GPUs.

    Where more jobs run than there are GPUs for, some share theirs; {} where one alone has too few of them.
    """
    if not gpus or count > len(gpus):
        return {}
    first = slot % (len(gpus) // count) * count
    return {_choose_gpu_variable(env): ",".join(gpus[first : first + count])}


def _choose_gpu_variable(env: Mapping[str, str]) -> str:
    return next((name for name in _GPU_VARIABLES if name in env), _GPU_VARIABLES[0])
