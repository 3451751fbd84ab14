"""Share a node between points that run side by side, and whose ranks nobody else has bound."""

from __future__ import annotations

import os
from collections.abc import Mapping

from hpc_train.placement.cpu_binding import format_cpus, parse_cpus, read_processors, split_cpus

SHARE_VARIABLE = "HPC_TRAIN_SHARE"
"""index/number/processors: this is the index-th of so many points, beside one another on these processors."""
_GPU_VARIABLES = ("CUDA_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES")


def format_share(index: int, count: int) -> str:
    """Return the value of SHARE_VARIABLE for a point on this machine."""
    return f"{index}/{count}/{format_cpus(os.sched_getaffinity(0))}"


def bind_to_share(env: Mapping[str, str] = os.environ) -> frozenset[int]:
    """Bind this process, before it starts any thread, to its point's CPUs; return them, or nothing.

    Nothing is done where a cgroup or the launcher has bound the process: it then has less than all of them already.
    """
    text = env.get(SHARE_VARIABLE)
    if text is None:
        return frozenset()
    index, count, together = text.split("/")
    allowed = frozenset(os.sched_getaffinity(0))
    if len(allowed) < len(parse_cpus(together)) or len(allowed) < int(count):
        return frozenset()
    cpus = frozenset(split_cpus(allowed, int(count), read_processors())[int(index)])
    os.sched_setaffinity(0, cpus)
    return cpus


def gpu_share_environment(index: int, ranks: int, env: Mapping[str, str], gpus: int) -> dict[str, str]:
    """Return the variable that shows each rank of the index-th point its own one of this machine's `gpus`.

    Where more points run than there are GPUs for, some share theirs; {} where one alone has too few of them.
    """
    name = next((name for name in _GPU_VARIABLES if name in env), _GPU_VARIABLES[0])
    visible = env[name].split(",") if env.get(name) else [str(number) for number in range(gpus)]
    if not gpus or ranks > len(visible):
        return {}
    first = index % (len(visible) // ranks) * ranks
    return {name: ",".join(visible[first : first + ranks])}
