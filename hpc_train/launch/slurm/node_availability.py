"""Ask Slurm which nodes of a partition are up, and when each will be free, by the running jobs' limits and history.

A job may run until its time limit, but most jobs of a site end earlier. The accounting says how much of their limits
the partition's recent jobs used (median); without accounting nothing is known, and a job may end at any moment. Slurm
is asked for durations, not for times, as the clock of this machine may differ from that of Slurm's controller.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from hpc_train.launch.slurm.job_records import parse_nodes
from hpc_train.launch.slurm.slurm_cli import RunClient
from hpc_train.launch.slurm.supervisor.time_limit import parse_time_left

Floats = NDArray[np.float64]
_USABLE = frozenset({"idle", "mixed", "allocated", "completing", "planned"})
_FREE = frozenset({"idle", "planned"})
_NOT_RESPONDING = "*"
_HISTORY = "now-2days"
"""Beginning of the history: two days hold enough jobs, and the accounting of a busy site still answers in time."""


@dataclass(frozen=True)
class NodeAvailability:
    """The usable nodes of a partition, and when they will be free."""

    nodes: tuple[str, ...]
    """In Slurm's order."""
    expected: Floats
    """[nodes]: seconds from now until each is free, if running jobs use as much of their limits as recent ones did."""
    latest: Floats
    """[nodes]: seconds from now until each is free, if running jobs use all of their limits; inf: they have none."""
    used_share: float | None
    """Median share of their time limits that recent jobs of several nodes used; None: no history, or all are free."""


def read_availability(partition: str | None, constraint: str | None, ask: RunClient) -> NodeAvailability | None:
    """Ask about the nodes of a partition; None if Slurm does not answer.

    partition: one or several, separated by commas; None: the default one. constraint: of a job; one feature is looked
    up, and an expression of several is left to Slurm.
    """
    chosen = [f"--partition={partition}"] if partition else []
    nodes = ask(["sinfo", "--noheader", "--Node", "--exact", *chosen, "--format=%N|%T|%P|%f"])
    usable = {} if nodes.code else parse_usable_nodes(nodes.out, partition is None, constraint)
    if not usable:
        return None
    if all(usable.values()):
        return NodeAvailability(tuple(usable), np.zeros(len(usable)), np.zeros(len(usable)), None)
    jobs = ask(["squeue", "--noheader", "--all", "--states=RUNNING,COMPLETING,SUSPENDED", "--format=%M|%L|%N"])
    if jobs.code:
        return None
    share = _read_used_share(partition, ask)
    expected, latest = _find_free_times(usable, jobs.out, share)
    return NodeAvailability(tuple(usable), expected, latest, share)


def parse_usable_nodes(text: str, default_only: bool, constraint: str | None = None) -> dict[str, bool]:
    """Return whether each usable node is free now, from sinfo's lines of `name|state|partition|features`.

    default_only: lines of the default partition only, which sinfo marks with *.
    """
    usable: dict[str, bool] = {}
    for line in text.splitlines():
        fields = [field.strip() for field in line.split("|")]
        if len(fields) != 4 or (default_only and not fields[2].endswith("*")):
            continue
        name, state, _, features = fields
        # Flags after the state: ~ and # are powered down or up, which Slurm does by itself; * does not respond.
        word = state.rstrip("*~#!%$@^-")
        if word in _USABLE and _NOT_RESPONDING not in state and _has_feature(features, constraint):
            usable[name] = word in _FREE
    return usable


def _has_feature(features: str, constraint: str | None) -> bool:
    if constraint is None or not constraint.replace("-", "_").replace(".", "_").isidentifier():
        return True
    return constraint in features.split(",")


def _read_used_share(partition: str | None, ask: RunClient) -> float | None:
    chosen = [f"--partition={partition}"] if partition else []
    answer = ask(
        [
            *("sacct", "--allocations", "--allusers", "--noheader", "--parsable2", "--nnodes=2-1000000"),
            *(f"--starttime={_HISTORY}", "--endtime=now", "--state=COMPLETED,FAILED,TIMEOUT,CANCELLED", *chosen),
            "--format=ElapsedRaw,TimelimitRaw",
        ]
    )
    return parse_used_share(answer.out) if answer.code == 0 else None


def parse_used_share(text: str) -> float | None:
    """Return the median share of their limits that jobs used, from lines of `elapsed seconds|limit in minutes`.

    Jobs that never ran and jobs without a limit do not count; None if no other is left.
    """
    shares = []
    for line in text.splitlines():
        elapsed, _, limit = line.partition("|")
        if elapsed.isdecimal() and limit.isdecimal() and int(elapsed) and int(limit):
            shares.append(min(1.0, int(elapsed) / (60 * int(limit))))
    return statistics.median(shares) if shares else None


_SOON = 1.0
"""Seconds until a job ends that has run for longer than most: it may end at any moment, but it has not ended yet."""


def _find_free_times(usable: Mapping[str, bool], squeue: str, share: float | None) -> tuple[Floats, ...]:
    """Return (expected, latest) seconds until each node is free; a busy node that no job names is free at once.

    squeue: lines of `time used|time left|nodes`.
    """
    index = {name: at for at, name in enumerate(usable)}
    expected, latest = np.zeros(len(index)), np.zeros(len(index))
    for line in squeue.splitlines():
        used, left, names = [*(field.strip() for field in line.split("|", 2)), "", ""][:3]
        busy = [index[name] for name in parse_nodes(names) if name in index and not usable[name]]
        if not busy:
            continue
        soon, late = _estimate_end(parse_time_left(used), parse_time_left(left), share)
        expected[busy], latest[busy] = np.maximum(expected[busy], soon), np.maximum(latest[busy], late)
    return expected, latest


def _estimate_end(used: float | None, left: float | None, share: float | None) -> tuple[float, float]:
    """Return seconds from now until a job ends: as recent jobs do, and by its limit.

    used, left: seconds since its start and until its limit; None: not known, or there is no limit.
    """
    if used is None or left is None:
        return (_SOON if share is None else math.inf), math.inf
    late = max(_SOON, left)
    if share is None:
        return _SOON, late
    likely = (used + left) * share - used
    return min(max(likely, _SOON), late), late


def choose_first_free(free_in: Floats, count: int) -> float:
    """Return the seconds until `count` of these nodes are free; inf if there are fewer."""
    return float(np.sort(free_in)[count - 1]) if count <= len(free_in) else math.inf


def order_nodes(nodes: Sequence[str], chosen: Sequence[int]) -> tuple[str, ...]:
    """Return the chosen nodes by name, in Slurm's order."""
    return tuple(nodes[at] for at in sorted(chosen))
