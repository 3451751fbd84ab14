"""Job arrays: how large one may be at a site, and a long list cut into as few of them as that allows."""

from __future__ import annotations

import re

from hpc_train.launch.clients import Ask

DEFAULT = 1001
"""Slurm's own MaxArraySize, for a controller that does not say."""
_COMMAND = ("scontrol", "show", "config")
_LIMITS = (re.compile(r"^MaxArraySize\s*=\s*(\d+)", re.MULTILINE), re.compile(r"\bmax_array_tasks=(\d+)"))


def largest_array(ask: Ask) -> int:
    """Elements of the largest array that this cluster takes, the first of which has index 0.

    The smaller of MaxArraySize, which no index may reach, and max_array_tasks of SchedulerParameters. 0: no arrays.
    """
    said = ask(_COMMAND)
    found = [int(match[1]) for limit in _LIMITS if (match := limit.search(said.out))]
    return min(found) if said.code == 0 and found else DEFAULT


def split(count: int, most: int) -> list[range]:
    """0 to `count` - 1 in as few consecutive ranges of at most `most` (1 or more) as there can be, of sizes as equal.

    [] for a count of 0.
    """
    assert count >= 0
    assert most >= 1
    parts = -(-count // most)
    return [range(count * part // parts, count * (part + 1) // parts) for part in range(parts)]
