"""How many elements a job array may have on this cluster, and how to split more points over several arrays."""

from __future__ import annotations

import re

from hpc_train.launch.slurm.slurm_cli import RunClient

DEFAULT_ARRAY_SIZE = 1001
"""Slurm's own MaxArraySize, for a controller that does not say."""
_SHOW_CONFIG = ("scontrol", "show", "config")
_ARRAY_LIMITS = (re.compile(r"^MaxArraySize\s*=\s*(\d+)", re.MULTILINE), re.compile(r"\bmax_array_tasks=(\d+)"))


def max_array_size(ask: RunClient) -> int:
    """Return how many elements an array may have on this cluster."""
    answer = ask(_SHOW_CONFIG)
    # max_array_tasks, of SchedulerParameters, may be lower than MaxArraySize, and Slurm applies both.
    limits = [int(match[1]) for limit in _ARRAY_LIMITS if (match := limit.search(answer.out))]
    return min(limits) if answer.code == 0 and limits else DEFAULT_ARRAY_SIZE


def split_evenly(count: int, max_size: int) -> list[range]:
    """Split range(count) into as few ranges of at most `max_size` as possible, of sizes as equal as possible."""
    assert count >= 0
    assert max_size >= 1
    parts = -(-count // max_size)
    return [range(count * part // parts, count * (part + 1) // parts) for part in range(parts)]
